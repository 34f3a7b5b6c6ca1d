"""Checkpoints: sharded HDF5 files that show whole arrays, are published at once or not at all, and load anywhere."""

from importlib import import_module
from typing import Any

# looked up when first used: reading needs neither MPI nor tensors, and importing hpcpar should not load h5py
_HOMES = {
    "Checkpoint": "reading",
    "CheckpointError": "manifest",
    "Folder": "folder",
    "SaveError": "saver",
    "Saver": "saver",
    "choose": "choosing",
    "collect": "training",
    "restore_model": "training",
    "restore_optimizer": "training",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
