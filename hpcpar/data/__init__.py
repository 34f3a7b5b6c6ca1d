"""Data: HDF5 samples read by hyperslab, samplers, augmentation, prefetch, and the built-in data sets."""

from hpcpar.data.augment import BiasField, Flip, Gamma, Noise, ScaleShift, SwapDims, Transform, make_transforms
from hpcpar.data.files import DataError
from hpcpar.data.hdf5 import HDF5Dataset
from hpcpar.data.loader import Batch, Loader
from hpcpar.data.sampler import Position, Sampler

__all__ = [
    "Batch",
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
    "SwapDims",
    "Transform",
    "make_transforms",
]
