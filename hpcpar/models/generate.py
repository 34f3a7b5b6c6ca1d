"""Text from a decoder, token by token, with the keys and values of earlier tokens kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from hpcpar.autograd import no_grad
from hpcpar.creation import from_shard, tensor
from hpcpar.layout.layout import Layout, LayoutError
from hpcpar.models.cache import Cache
from hpcpar.models.decoder import Decoder
from hpcpar.models.sampling import Sampling
from hpcpar.tensors import Tensor


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop: int | None = None,
    each: Callable[[np.ndarray], None] | None = None,
) -> list[list[int]]:
    """Continue texts, and return what was added to each. Collective.

    Parameters
    ----------
    model : Decoder
        On any mesh whose plan splits no tokens (``Spread(sequence=())``); texts may be split, and heads, hidden layer
        and vocabulary.
    prompts : sequence of sequences of int
        Tokens of the texts, of any lengths from 1 on; the same on every rank.
    tokens : int
        How many to add at most.
    temperature, top_k, top_p, seed
        See `hpcpar.models.sampling.Sampling`; the default takes the most probable token.
    stop : int, optional
        The token that ends a text; it is not returned.
    each : callable, optional
        Called with the tokens (N,) of each step, -1 for texts that have ended.

    Raises
    ------
    ValueError
        On all ranks: an empty prompt, tokens that the model does not know, or more than it has positions for.
    LayoutError
        The model's plan splits tokens.

    Notes
    -----
    Each text is what it is alone: none sees the padding of another. Rank 0 chooses and tells the others.
    """
    sampling = Sampling(temperature, top_k, top_p, seed)
    _check(model, prompts, tokens)
    lengths = np.array([len(prompt) for prompt in prompts])
    mesh, was_training = model.embedding.weight.mesh, model.training
    padded = np.zeros((len(prompts), int(lengths.max(initial=0))), np.int64)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    added: list[list[int]] = [[] for _ in prompts]
    cache = Cache(model.config.layers, padded.shape[1] + tokens)
    model.eval()
    try:
        with no_grad():
            logits = _last_logits(model, padded, np.arange(padded.shape[1]), lengths - 1, cache)
            running = np.ones(len(prompts), bool)
            for step in range(tokens):
                chosen = mesh.world.broadcast_object(sampling.choose(logits, step))
                running &= chosen != (-1 if stop is None else stop)
                if each is not None:
                    each(np.where(running, chosen, -1))
                for text, token, on in zip(added, chosen.tolist(), running.tolist(), strict=True):
                    text += [token] * on
                if step + 1 == tokens or not running.any():
                    break
                where = (lengths + step)[:, None]
                logits = _last_logits(model, chosen[:, None], where, np.zeros_like(lengths), cache)
    finally:
        model.train(was_training)
    return added


def _check(model: Decoder, prompts: Sequence[Sequence[int]], tokens: int) -> None:
    lengths = [len(prompt) for prompt in prompts]
    if tokens < 0 or not lengths or min(lengths) < 1:
        raise ValueError(f"generate takes prompts of at least one token, and tokens >= 0; got {lengths} and {tokens}")
    size, used = model.config.vocab_size, [token for prompt in prompts for token in prompt]
    if not 0 <= min(used) <= max(used) < size:
        raise ValueError(f"a prompt has the tokens {min(used)} to {max(used)}, the model knows 0 to {size - 1}")
    longest, room = max(lengths) + tokens, model.config.max_positions
    if model.position_embedding is not None and longest > room:
        raise ValueError(f"a prompt and {tokens} tokens are {longest}, the model has learned {room} positions")
    if model.layout is not None and model.layout.on((1, 1), model.embedding.weight.mesh.shape).entry(1):
        raise LayoutError(f"generate takes whole texts, the plan has {model.layout!r}: use Spread(sequence=())")


def _last_logits(model: Decoder, tokens: np.ndarray, positions: np.ndarray, at: np.ndarray, cache: Cache) -> np.ndarray:
    """Logits (N, V) of the token ``at[n]`` of each text, on every rank."""
    mesh, layout = model.embedding.weight.mesh, model.layout or Layout()
    x = model.features(tensor(tokens, mesh=mesh, layout=layout), positions, cache=cache)
    return model.logits_of(_picked(x, at)).numpy()[:, 0]


def _picked(x: Tensor, at: np.ndarray) -> Tensor:
    """One token (N, 1, C) of each text of x (N, S, C)."""
    x = x.repartition(Layout(x.sig.dims[0], None, x.sig.dims[2]))
    rows = at[slice(*x.sig.box[0])]
    part = x.shard[np.arange(len(rows)), rows][:, None]
    return from_shard(part, (x.shape[0], 1, x.shape[2]), x.mesh, x.layout)
