"""A decoder from a Hugging Face folder: each rank reads the blocks that it owns, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcpar import nn
from hpcpar.mesh import Mesh, current_mesh
from hpcpar.models.decoder import Decoder
from hpcpar.models.placement import Spread, place
from hpcpar.models.pretrained.families import check_tensors, family_of
from hpcpar.models.pretrained.files import Reader, Stored, list_tensors
from hpcpar.models.pretrained.views import View
from hpcpar.nn import init
from hpcpar.together import on_all, on_root
from hpcpar.transport.device import like

CONFIG = "config.json"


def load_pretrained(
    folder: str | Path,
    mesh: Mesh | None = None,
    spread: Spread | None = None,
    *,
    dtype: Any = None,
    dropout: float | None = None,
) -> Decoder:
    """Return the decoder of a Hugging Face folder, laid on a mesh, in evaluation mode. Collective.

    Parameters
    ----------
    folder : path
        With ``config.json`` and ``model.safetensors``, or several files and their index; of the model_type gpt2, llama,
        mistral or qwen2. All ranks must see it.
    mesh : Mesh, optional
        The current mesh by default.
    spread : Spread, optional
        The plan; the usual names of axes by default.
    dtype : dtype, optional
        Of the parameters; `nn.get_default_dtype` by default, whatever the files hold (float64, float32, float16,
        bfloat16).
    dropout : float, optional
        In place of what the configuration says.

    Raises
    ------
    ValueError
        On all ranks: what this decoder cannot be, or tensors that are missing, of another shape, or not known; all at
        once.
    OSError
        On all ranks: a file is missing or cannot be read.
    """
    folder, mesh = Path(folder), mesh or current_mesh()
    table, tensors = on_root(mesh.world, lambda: (read_table(folder), list_tensors(folder)))
    family = family_of(table)
    config = family.read_config(table, dropout)
    views = family.views(config, family.find_prefix(tensors))
    check_tensors(family, views, tensors, folder)
    with mesh, init.skipped(), nn.default_dtype(dtype or nn.get_default_dtype()):
        model = Decoder(config)
        place(model, mesh, spread)
    on_all(mesh.world, lambda: read_parameters(model, folder, views, tensors))
    return model.eval()


def read_parameters(model: nn.Module, folder: Path, views: Mapping[str, View], tensors: Mapping[str, Stored]) -> int:
    """Read this rank's block of every parameter; return how many bytes that were. No message."""
    with Reader(folder, tensors) as reader:
        for name, parameter in model.named_parameters():
            block = reader.read(views[name], parameter.sig.box)
            parameter.shard[...] = like(block.astype(parameter.dtype, copy=False), parameter.shard)
            parameter.changed()
        return reader.bytes_read


def read_table(folder: Path) -> dict[str, Any]:
    """Return what ``config.json`` of a folder holds.

    Raises
    ------
    FileNotFoundError
        There is none.
    ValueError
        It is no JSON.
    """
    path = folder / CONFIG
    if not path.exists():
        raise FileNotFoundError(f"{folder} has no {CONFIG}: it is no folder of a model")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
