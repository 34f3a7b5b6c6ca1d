"""Slices of a prediction as PNG pictures inside the page, without a drawing library."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hpcpar.train.plot import DIMS, centre, read_volumes

_CLASSES = np.array(
    [(16, 18, 20), (47, 102, 144), (224, 122, 63), (90, 147, 103), (178, 58, 72), (132, 101, 168), (196, 154, 44),
     (74, 163, 162), (205, 205, 205)], np.uint8,
)  # fmt: skip
_LARGEST = 256  # pixels along an edge


def slices(path: Path) -> list[tuple[str, list[str]]]:
    """Return three orthogonal slices through the middle of what is labelled: where, and input, label, prediction.

    Each picture is a data URI. Labels are drawn as classes, in one set of colours.
    """
    image, label, prediction = read_volumes(path)
    where = centre(label)
    limits = float(np.min(image)), float(np.max(image))
    rows = []
    for dim, name in enumerate(DIMS):
        planes = [_thinned(np.take(v, where[dim], axis=dim)) for v in (image, label, prediction)]
        drawn = [png(gray(planes[0], limits)), *(png(_target(plane, label)) for plane in planes[1:])]
        rows.append((f"{name} {where[dim]} of {image.shape[dim]}", [_uri(data) for data in drawn]))
    return rows


def _target(plane: np.ndarray, label: np.ndarray) -> np.ndarray:
    if plane.dtype.kind in "iub" and label.dtype.kind in "iub":
        kinds = np.maximum(plane, 0).astype(int)  # what is ignored counts as background
        return _CLASSES[np.where(kinds > 0, (kinds - 1) % (len(_CLASSES) - 1) + 1, 0)]
    return gray(plane, (float(np.min(label)), float(np.max(label))))


def gray(plane: np.ndarray, limits: tuple[float, float]) -> np.ndarray:
    """Return a plane as (height, width, 3) bytes, black at the lower limit and white at the upper."""
    low, high = limits
    scaled = (plane.astype(float) - low) * (255 / (high - low) if high > low else 0)
    values = np.nan_to_num(scaled, nan=0.0).clip(0, 255).astype(np.uint8)
    return np.repeat(values[..., None], 3, axis=-1)


def _thinned(plane: np.ndarray) -> np.ndarray:
    """Every k-th pixel, so that the page stays small; the first row is drawn at the bottom."""
    step = -(-max(plane.shape) // _LARGEST)
    return plane[::step, ::step][::-1]


def png(pixels: np.ndarray) -> bytes:
    """Return the PNG file of (height, width, 3) bytes (ISO/IEC 15948: 8 bits, RGB, no filter)."""
    height, width, _ = pixels.shape
    rows = np.zeros((height, 1 + 3 * width), np.uint8)  # each begins with its filter
    rows[:, 1:] = pixels.reshape(height, 3 * width)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts: Sequence[tuple[bytes, bytes]] = (
        (b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 9)), (b"IEND", b"")
    )  # fmt: skip
    chunks = (struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in parts)
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def _uri(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()
