"""Continue a text with a trained decoder, on all ranks of the job.

SOURCE is the run directory of a decoder that hpcpar train made, or a folder of the Hugging Face libraries (GPT-2,
Llama, Mistral or Qwen 2) with its tokenizer.json. Ranks share heads, hidden layer and vocabulary.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpcpar.data.text_tokens import Tokens
    from hpcpar.mesh import Mesh
    from hpcpar.models import Decoder

SUMMARY = "continue a text with a trained decoder"
PARALLEL = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("source", metavar="SOURCE", help="run directory, or folder of the Hugging Face libraries")
    parser.add_argument(
        "--prompt", action="append", metavar="TEXT", help="how the text begins; may be repeated (default: an empty one)"
    )
    parser.add_argument("--tokens", type=int, default=200, metavar="N", help="how many tokens to add at most (200)")
    parser.add_argument(
        "--temperature", type=float, default=0.8, metavar="T", help="0 takes the most probable token (default: 0.8)"
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="choose among the K most probable tokens")
    parser.add_argument(
        "--top-p", type=float, metavar="P", help="choose among the most probable tokens of probability P together"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the choices (default: 0)")


def run(args: argparse.Namespace) -> int:
    """Load, generate, and print each text on rank 0."""
    from hpcpar.mesh import Mesh
    from hpcpar.models.generate import generate

    mesh = Mesh(model=-1)
    model, tokens, begin = _load(Path(args.source), mesh)
    texts = [tokens.encode(text.encode()).tolist() for text in args.prompt or [""]]
    prompts = [[*begin, *text] or [tokens.end] for text in texts]
    added = generate(
        model, prompts, args.tokens, temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed,
        stop=tokens.end,
    )  # fmt: skip
    if mesh.rank == 0:
        whole = [tokens.decode([*text, *more]) for text, more in zip(texts, added, strict=True)]
        sys.stdout.write("\n\n".join(whole) + "\n")
    return 0


def _load(source: Path, mesh: Mesh) -> tuple[Decoder, Tokens, list[int]]:
    """The model on all ranks, what its tokens mean, and those before each text."""
    from hpcpar.data.text_tokens import FileTokens
    from hpcpar.models.pretrained.loading import CONFIG, load_pretrained, read_table
    from hpcpar.together import on_root
    from hpcpar.train import trained

    files = on_root(mesh.world, lambda: [name for name in (CONFIG, trained.CONFIG) if (source / name).exists()])
    if not files:
        raise FileNotFoundError(
            f"{source} is no run directory (with {trained.CONFIG}) and no folder of the Hugging Face libraries "
            f"(with {CONFIG})"
        )
    if trained.CONFIG in files:
        model, tokens = trained.load_trained(source, mesh, say=lambda text: sys.stderr.write(text + "\n"))
        return model, tokens, [tokens.end]  # in the data each document begins with it
    about = on_root(mesh.world, lambda: read_table(source))
    end = about.get("eos_token_id")
    text, end = on_root(mesh.world, lambda: _tokenizer(source)), end[0] if isinstance(end, list) else end
    tokens = FileTokens(text, end, source / "tokenizer.json")
    # texts of Llama and Mistral begin with a token, those of GPT-2 and Qwen 2 do not
    begin = about.get("bos_token_id") if about.get("model_type") in ("llama", "mistral") else None
    return load_pretrained(source, mesh), tokens, [] if begin is None else [begin]


def _tokenizer(folder: Path) -> str:
    path = folder / "tokenizer.json"
    if not path.exists():
        raise FileNotFoundError(f"{folder} has no tokenizer.json, which says what the tokens mean")
    return path.read_text(encoding="utf-8")
