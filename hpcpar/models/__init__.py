"""Networks: written once, as for one process; a mesh and a plan of layouts make them any hybrid."""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "Cache": "cache",
    "CosmoFlow": "cosmoflow",
    "Decoder": "decoder",
    "DecoderConfig": "decoder_config",
    "SpaceTime": "spacetime",
    "SpaceTimeConfig": "spacetime",
    "Spread": "placement",
    "Swin3d": "swin3d",
    "UNet3d": "unet3d",
    "ViT3d": "vit3d",
    "gpt": "decoder",
    "grid_placements": "decoder_grid",
    "llama": "decoder",
    "load_pretrained": "pretrained",
    "place": "placement",
    "save_pretrained": "pretrained",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
