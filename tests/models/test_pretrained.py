"""Folders of the Hugging Face libraries: the logits and gradients of `transformers`, both ways, on every mesh.

Networks are small, with random weights, and saved to a temporary folder: nothing is downloaded.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hpcpar as hp
from hpcpar import nn
from hpcpar.models import Decoder, Spread, load_pretrained, save_pretrained
from hpcpar.models.pretrained import gpt2, llama
from hpcpar.models.pretrained.families import family_of
from hpcpar.models.pretrained.files import Reader, list_tensors
from hpcpar.models.pretrained.loading import read_parameters, read_table
from hpcpar.models.pretrained.views import View, transposed, whole
from hpcpar.parallel import GradientSync
from hpcpar.testing import collective_assert, shared_mesh

torch = pytest.importorskip("torch", reason="torch is the oracle")
transformers = pytest.importorskip("transformers", reason="the library whose folders these are")
F = hp.functional
RANKS = MPI.COMM_WORLD.Get_size()
TOKENS = np.random.default_rng(3).integers(0, 37, (3, 7))

ROPE3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
GPT2 = {
    "vocab_size": 37,
    "n_positions": 16,
    "n_embd": 12,
    "n_layer": 2,
    "n_head": 3,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
LLAMA = {
    "vocab_size": 37, "hidden_size": 12, "intermediate_size": 10, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 6, "max_position_embeddings": 64,
}  # fmt: skip
NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", {**GPT2, "activation_function": "gelu_new"}),
    "gpt2-exact-gelu": ("GPT2", {**GPT2, "activation_function": "gelu", "n_inner": 10, "tie_word_embeddings": False}),
    "llama3": ("Llama", {**LLAMA, "rope_parameters": ROPE3}),
    "llama-biased": ("Llama", {**LLAMA, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {**LLAMA, "sliding_window": 4}),
    "qwen2": ("Qwen2", {**{k: v for k, v in LLAMA.items() if k != "head_dim"}, "hidden_size": 16}),
}
HEADS = {"GPT2": "GPT2LMHeadModel"}


def network(name: str, dtype: Any = None) -> Any:
    """A network of `transformers` with weights far from 0, the same on every rank."""
    kind, options = NETWORKS[name]
    torch.manual_seed(7)
    config = getattr(transformers, f"{kind}Config")(**options)
    model = getattr(transformers, HEADS.get(kind, f"{kind}ForCausalLM"))(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
    return model.to(dtype or torch.float32)


@pytest.fixture(scope="module", autouse=True)
def quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def save(model: Any, folder: Path, **options: Any) -> Path:
    """Let rank 0 save a network of `transformers`."""
    if MPI.COMM_WORLD.Get_rank() == 0:
        model.save_pretrained(folder, **options)
    MPI.COMM_WORLD.barrier()
    return folder


def plans() -> list[tuple[hp.Mesh, Spread]]:
    if RANKS == 4:
        pairs = [
            ({"batch": 2, "model": 2}, Spread(sequence_parallel=True, shard_weights=True)),
            ({"sequence": 2, "model": 2}, Spread(context="ring", order="zigzag")),
            ({"model": 4}, Spread()),
        ]
    else:
        pairs = [
            ({"batch": RANKS}, Spread(shard_weights=True)),
            ({"model": RANKS}, Spread(sequence_parallel=True)),
            ({"sequence": RANKS}, Spread(context="all_to_all")),
            ({"sequence": RANKS}, Spread(context="gather", order="zigzag", shard_weights=True)),
        ]
    return [(shared_mesh(**axes), spread) for axes, spread in pairs]


def logits_of(model: Decoder) -> np.ndarray:
    """Logits in the natural order, on every rank."""
    order = model.token_order(TOKENS.shape[1])
    mesh = model.embedding.weight.mesh
    with hp.no_grad():
        found = model(hp.tensor(TOKENS[:, order], mesh=mesh, layout=model.layout)).numpy()
    return found[:, np.argsort(order)]


def their_logits(model: Any) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(TOKENS)).logits.numpy()


# ---- the same numbers


@pytest.mark.parametrize("name", NETWORKS)
def test_logits_equal_those_of_transformers_on_every_mesh(name: str, shared_path: Path) -> None:
    theirs = network(name)
    expected = their_logits(theirs)
    save(theirs, shared_path, max_shard_size="4KB")
    assert (shared_path / "model.safetensors.index.json").exists(), "several files"
    for mesh, spread in plans():
        model = load_pretrained(shared_path, mesh, spread, dropout=0.0)
        assert not model.training and model.embedding.weight.dtype == np.float32
        np.testing.assert_allclose(logits_of(model), expected, rtol=1e-5, atol=1e-5, err_msg=f"{mesh} {spread}")


@pytest.mark.parametrize("name", NETWORKS)
def test_what_is_saved_on_a_mesh_is_loaded_by_transformers(name: str, shared_path: Path) -> None:
    theirs = network(name)
    save(theirs, shared_path / "theirs")
    mesh, spread = plans()[1]
    model = load_pretrained(shared_path / "theirs", mesh, spread, dropout=0.0)
    files = save_pretrained(model, shared_path / "ours", shard_bytes=4000)
    assert len(files) > 1
    back = type(theirs).from_pretrained(shared_path / "ours").eval()
    state = back.state_dict()
    for key, value in theirs.state_dict().items():
        assert torch.equal(state[key], value), key
    np.testing.assert_allclose(their_logits(back), logits_of(model), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "llama3"])
def test_gradients_equal_those_of_transformers(name: str, shared_path: Path) -> None:
    theirs = network(name, torch.float64)
    save(theirs, shared_path)
    inputs = torch.tensor(TOKENS)
    scores = theirs(inputs).logits[:, :-1]
    torch.nn.functional.cross_entropy(scores.transpose(1, 2), inputs[:, 1:]).backward()
    gradients = {n: p.grad.numpy() for n, p in theirs.named_parameters()}
    for mesh, spread in plans()[:2]:
        model = load_pretrained(shared_path, mesh, spread, dtype="float64", dropout=0.0)
        order = model.token_order(TOKENS.shape[1] - 1)
        tokens, targets = (
            hp.tensor(t[:, order], mesh=mesh, layout=model.layout) for t in (TOKENS[:, :-1], TOKENS[:, 1:])
        )
        GradientSync(model).backward(F.cross_entropy(model(tokens).transpose(1, 2), targets))
        views = family_of(read_table(shared_path)).views(model.config)
        for ours, parameter in model.named_parameters():
            view, grad = views[ours], parameter.grad.numpy()
            wanted = np.lib.stride_tricks.as_strided(
                gradients[view.name].reshape(-1)[view.offset :], view.shape, [s * 8 for s in view.strides]
            )
            # the angles of transformers are of float32
            np.testing.assert_allclose(grad, wanted, rtol=0, atol=1e-12 if name == "gpt2" else 1e-6, err_msg=ours)


def test_older_files_without_prefix_and_with_buffers_are_read(shared_path: Path) -> None:
    """The files of the first releases were made from the network without its head, and hold masks."""
    safetensors = pytest.importorskip("safetensors.numpy")
    theirs = save_alone(network("gpt2"), shared_path, safetensors)
    model = load_pretrained(shared_path, shared_mesh(batch=1, model=RANKS), dropout=0.0)
    np.testing.assert_allclose(logits_of(model), their_logits(theirs), rtol=1e-5, atol=1e-5)


def save_alone(model: Any, folder: Path, safetensors: Any) -> Any:
    """Save a network under its inner names, with the masks of its attention."""
    save(model, folder)
    if MPI.COMM_WORLD.Get_rank() == 0:
        path = folder / "model.safetensors"
        tensors = {n.removeprefix("transformer."): v for n, v in safetensors.load_file(path).items()}
        masks = {f"h.{i}.attn.bias": np.tril(np.ones((1, 1, 16, 16), np.float32)) for i in range(2)}
        safetensors.save_file({**tensors, **masks}, path)
    MPI.COMM_WORLD.barrier()
    return model


# ---- what is read


@pytest.mark.parametrize("name", ["gpt2", "llama3"])
def test_each_rank_reads_its_blocks_and_no_other_byte(name: str, shared_path: Path) -> None:
    save(network(name), shared_path)
    tensors = list_tensors(shared_path)
    family = gpt2 if name == "gpt2" else llama
    mesh = shared_mesh(batch=1, model=RANKS)
    model = load_pretrained(shared_path, mesh, dropout=0.0)
    count = read_parameters(model, shared_path, family.views(model.config), tensors)
    assert count == 4 * sum(p.shard.size for p in model.parameters())
    split = [p for p in model.parameters() if p.sig.split_axes]
    assert RANKS == 1 or len(split) > len(list(model.parameters())) / 2
    read = sum(mesh.world.gather_objects(4 * sum(p.shard.size for p in split)))
    assert read == 4 * sum(p.numel() for p in split), "together each byte of what is split, once"


def test_any_block_of_a_view_is_read_in_runs() -> None:
    class File(Reader):
        """Reads from an array in memory."""

        def __init__(self, data: np.ndarray) -> None:
            self.data, self.bytes_read, self.runs = data.reshape(data.size), 0, 0
            self.tensors = {"x": type("Stored", (), {"dtype": "F64", "itemsize": 8, "start": 0})()}

        def _fill(self, stored: Any, position: int, into: np.ndarray) -> None:
            self.runs += 1
            into[...] = self.data[position // 8 : position // 8 + len(into) // 8].view(np.uint8)

    rng = np.random.default_rng(1)
    stored = rng.standard_normal((6, 3 * 8))  # inputs, three parts of 2 heads of 4
    ours = stored.reshape(6, 3, 2, 4)[:, 1].transpose(1, 2, 0)
    view = transposed("x", (2, 4, 6), 2, (1, 3))
    box = [(1, 2), (1, 4), (2, 5)]
    file = File(stored)
    assert np.array_equal(file.read(view, box), ours[1:2, 1:4, 2:5])
    assert (file.runs, file.bytes_read) == (3, 9 * 8), "one run of 3 elements in each of 3 rows"
    file = File(stored)
    assert np.array_equal(
        file.read(whole("x", (6, 4, 6), (6, 24)), [(2, 5), (0, 4), (0, 6)]), stored.reshape(6, 4, 6)[2:5]
    )
    assert file.runs == 1
    assert file.read(View("x", (6, 24), (6, 24), (24, 1)), [(3, 3), (0, 24)]).shape == (0, 24)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_files_of_other_dtypes_are_converted_and_written(dtype: str, shared_path: Path) -> None:
    theirs = network("llama3", getattr(torch, dtype))
    save(theirs, shared_path / "theirs")
    model = load_pretrained(shared_path / "theirs", shared_mesh(batch=1, model=RANKS))
    assert model.embedding.weight.dtype == np.float32
    expected = their_logits(type(theirs).from_pretrained(shared_path / "theirs", dtype=torch.float32).eval())
    np.testing.assert_allclose(logits_of(model), expected, rtol=1e-5, atol=1e-5)
    save_pretrained(model, shared_path / "ours", dtype=dtype)
    back = type(theirs).from_pretrained(shared_path / "ours", dtype=getattr(torch, dtype))
    assert back.dtype == getattr(torch, dtype)
    if dtype != "float64":
        for key, value in back.state_dict().items():
            assert torch.equal(value.to(torch.float32), theirs.state_dict()[key]), key


# ---- what is refused


def edited(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    if MPI.COMM_WORLD.Get_rank() == 0:
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    MPI.COMM_WORLD.barrier()


def test_errors_name_everything_that_does_not_fit(shared_path: Path) -> None:
    save(network("llama3"), shared_path)
    world = shared_mesh(batch=RANKS).world

    def refused(kind: type[Exception], *parts: str, **changes: Any) -> None:
        edited(shared_path, **changes)
        with pytest.raises(kind) as raised:
            load_pretrained(shared_path)
        collective_assert(world, all(part in str(raised.value) for part in parts), str(raised.value))

    refused(ValueError, "model_type is 'mamba'", "gpt2, llama, mistral, qwen2", model_type="mamba")
    refused(
        ValueError,
        "of another shape: model.layers.0.mlp.gate_proj.weight is (10, 12), not (11, 12)",
        "missing: model.layers.2.self_attn.q_proj.weight",
        "and 1 more",
        model_type="llama",
        num_hidden_layers=3,
        intermediate_size=11,
    )
    refused(ValueError, "not known: model.layers.1.input_layernorm.weight", num_hidden_layers=1, intermediate_size=10)
    refused(ValueError, "hidden_act is 'gelu'", "type 'yarn'", hidden_act="gelu", rope_parameters={"rope_type": "yarn"})
    if world.rank == 0:
        (shared_path / "model.safetensors").write_bytes(b"\x00" * 64)
    world.barrier()
    refused(ValueError, "is no safetensors file")
    with pytest.raises(OSError, match=r"has no config.json"):
        load_pretrained(shared_path / "nowhere")


def test_a_decoder_of_no_family_says_what_each_lacks(shared_path: Path) -> None:
    config = hp.models.DecoderConfig(37, 12, 1, 3, activation="geglu")
    with nn.default_dtype("float32"):
        model = Decoder(config)
    with pytest.raises(ValueError, match=r"gpt2 without activation='geglu'; llama/mistral/qwen2 without norm='layer'"):
        save_pretrained(model, shared_path)
