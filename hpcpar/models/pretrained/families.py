"""Which family a folder, or a configuration, belongs to; and whether the tensors of a folder are those of the model."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from hpcpar.models.decoder_config import DecoderConfig
from hpcpar.models.pretrained import gpt2, llama
from hpcpar.models.pretrained.files import DTYPES, Stored
from hpcpar.models.pretrained.views import View

FAMILIES = (gpt2, llama)
LISTED = 8
"""How many tensors an error names before it counts the rest."""


def family_of(table: Mapping[str, Any]) -> ModuleType:
    """Return the module for a ``config.json``; a ValueError for a model_type that there is none for."""
    kind = table.get("model_type")
    for family in FAMILIES:
        if kind in family.MODEL_TYPES:
            return family
    known = ", ".join(name for family in FAMILIES for name in family.MODEL_TYPES)
    raise ValueError(f"config.json: model_type is {kind!r}; there are {known}")


def family_for(config: DecoderConfig) -> ModuleType:
    """Return the module that can express a configuration; a ValueError that says what each of them lacks."""
    unlike = {family: family.unlike(config) for family in FAMILIES}
    for family, faults in unlike.items():
        if not faults:
            return family
    lacks = "; ".join(f"{'/'.join(family.MODEL_TYPES)} without {', '.join(f)}" for family, f in unlike.items())
    raise ValueError(f"no known model_type has this configuration: {lacks}")


def check_tensors(family: ModuleType, views: Mapping[str, View], tensors: Mapping[str, Stored], folder: Any) -> None:
    """Raise a ValueError that names all tensors that are missing, of another shape or dtype, or not wanted."""
    wanted = {view.name: view.stored for view in views.values()}
    missing = [name for name in wanted if name not in tensors]
    shapes = [
        f"{name} is {tensors[name].shape}, not {shape}"
        for name, shape in wanted.items()
        if name in tensors and tensors[name].shape != shape
    ]
    dtypes = [f"{name} is {tensors[name].dtype}" for name in wanted if name in tensors and not _readable(tensors[name])]
    spare = [name for name in tensors if name not in wanted and not _passed_over(family, name)]
    found = {"missing": missing, "of another shape": shapes, f"not of {', '.join(DTYPES)}": dtypes, "not known": spare}
    faults = [f"{what}: {_listed(names)}" for what, names in found.items() if names]
    if faults:
        raise ValueError(f"the tensors in {folder} are not those of its config.json; {'; '.join(faults)}")


def _readable(tensor: Stored) -> bool:
    return tensor.dtype in DTYPES


def _passed_over(family: ModuleType, name: str) -> bool:
    """What files hold beside weights, and the head once more where it is the embedding."""
    return name.endswith(family.BUFFERS) or name == "lm_head.weight"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more
