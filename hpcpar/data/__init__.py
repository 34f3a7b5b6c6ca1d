"""Data: HDF5 samples read by hyperslab, samplers, augmentation, prefetch, and the built-in data sets."""

from importlib import import_module
from typing import Any

from hpcpar.data.augment import BiasField, Flip, Gamma, Noise, ScaleShift, SwapDims, Transform, make_transforms
from hpcpar.data.files import DataError
from hpcpar.data.hdf5 import HDF5Dataset
from hpcpar.data.loader import Batch, Loader
from hpcpar.data.sampler import Position, Sampler
from hpcpar.data.sharing import Sharing

# looked up when first used: tensors start MPI, which reading and making data do without
_HOMES = {
    "Batches": "batches",
    "TensorBatches": "batches",
    "TextBatches": "text_batches",
    "TextDataset": "text_dataset",
    "make_brain": "commands",
    "make_cosmology": "commands",
    "make_text": "commands",
}

__all__ = [
    "Batch",
    "Batches",
    "BiasField",
    "DataError",
    "Flip",
    "Gamma",
    "HDF5Dataset",
    "Loader",
    "Noise",
    "Position",
    "Sampler",
    "ScaleShift",
    "Sharing",
    "SwapDims",
    "TensorBatches",
    "TextBatches",
    "TextDataset",
    "Transform",
    "make_brain",
    "make_cosmology",
    "make_text",
    "make_transforms",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
