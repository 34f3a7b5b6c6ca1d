"""The brain data set: grey and white matter of the ICBM 152 template, without a download.

The `nilearn` wheel ships the symmetric ICBM 152 2009a template (Fonov et al., NeuroImage 54, 2011): a T1-weighted
average brain at 1 mm with probability maps of grey and white matter, 197 x 233 x 189 voxels. The task is to label each
voxel of the T1 image.

What a score on it means
    There is one brain, and its template is symmetric by construction: the right hemisphere is the exact mirror image
    of the left one. A network trained on all of the left hemisphere with left-right flips has seen the right one. The
    files are therefore cut so that training uses one hemisphere and testing the other, *and* the tissue of the test
    has no mirror image in training or validation:

    - each hemisphere is cut into 6 slabs of 32 mm from back to front and 2 halves of 80 mm, lower and upper;
    - ``train`` is the left hemisphere's slabs 0, 2, 3 and 5 (8 files), ``validation`` its slab 4 (2 files);
    - ``test`` is the right hemisphere's slab 1 (2 files), which no other set holds, mirrored or not;
    - ``mirror`` is the right hemisphere's slabs 0, 2, 3, 5: mirror images of ``train``, to see how much is memory;
    - ``whole`` is both hemispheres uncut, for pictures and for runs with one large volume.

    Good scores show that training works. They say nothing about other people's brains or other scanners.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np

from hpcpar.data.files import DataError, is_made, make_folder, write_hdf5
from hpcpar.data.sharing import ALONE, Sharing, by_folder

__all__ = ["LABELS", "make_brain"]

LABELS = ("background", "grey", "white", "other tissue")
DIMS = ("back to front", "bottom to top", "left to right")
VERSION = 1  # of the files' contents; a change makes files of earlier versions stand in the way

TEMPLATE = (197, 233, 189)  # right, anterior, superior; plane 98 is the mid-sagittal one
MIDDLE = 98
# The brain's bounding box is x 25..171, y 27..209, z 0..156. A hemisphere is 80 x 192 x 160 mm: three times halvable.
LEFT, RIGHT = (18, 98), (99, 179)
DEPTH, HEIGHT = (24, 216), (0, 160)
SLABS, HALVES = 6, ("lower", "upper")
SETS = {
    "train": ("left", (0, 2, 3, 5)),
    "validation": ("left", (4,)),
    "test": ("right", (1,)),
    "mirror": ("right", (0, 2, 3, 5)),
}


@dataclass(frozen=True)
class Brain:
    """T1 intensity in [0, 1] (float32) and labels 0 to 3 (uint8), both in template order (x, y, z) at 1 mm."""

    intensity: np.ndarray
    labels: np.ndarray


def make_brain(out: str | os.PathLike, spacing: int = 1, sharing: Sharing = ALONE) -> list[Path]:
    """Write the brain data set as HDF5 files.

    Parameters
    ----------
    out : path
        Folder; gets ``train``, ``validation``, ``test``, ``mirror``, ``whole`` and ``dataset.json``.
    spacing : {1, 2}
        Voxel size in mm. 2 averages intensities over cubes of 8 voxels and takes their most frequent label.
    sharing : Sharing, optional
        How several ranks make the set together; by default this process makes all of it. Collective with a `gather`.

    Returns
    -------
    list of Path
        All files of the set, on every rank (also those that other ranks make).

    Raises
    ------
    ModuleNotFoundError
        nilearn or nibabel is missing; the message names the extra that brings them.
    DataError
        The template is not the known one, or a file made from other parameters is in the way.

    Notes
    -----
    Each file holds ``volume`` (1, D, H, W) float32 and ``segmentation`` (D, H, W) uint8, where D runs from back to
    front, H from bottom to top, W from left to right. Cells are 32 x 80 x 80 voxels at 1 mm and 16 x 40 x 40 at 2 mm,
    hemispheres 192 x 160 x 80 and 96 x 80 x 40: divisible by 8, for three halvings. A label is the most probable of
    grey, white and other (1 - grey - white) where T1 > 0, and background elsewhere. Files that are there are kept.
    """
    if spacing not in (1, 2):
        raise ValueError(f"spacing is {spacing} mm; the cells allow 1 and 2")
    out = make_folder(out)
    boxes = cells()
    names = list(boxes)
    recipes = {name: recipe(name, boxes[name], spacing) for name in names}
    missing = [name for name in sharing.own(names) if not is_made(out / name, recipes[name])]
    if missing:
        brain = load_template()
        for name in missing:
            make_folder((out / name).parent)
            volume, labels = cut(brain, boxes[name], spacing)
            attributes = {"labels": list(LABELS), "spacing_mm": float(spacing), "dims": list(DIMS)}
            write_hdf5(out / name, {"volume": volume[None], "segmentation": labels}, attributes, recipes[name])
    return sharing.finish(f"brain, {spacing} mm", out, names, len(missing), summary(names, spacing))


def cells() -> dict[str, tuple]:
    """File names and their boxes ((x), (y), (z)) in the template."""
    found = {}
    sides = {"left": LEFT, "right": RIGHT}
    for group, (side, slabs) in SETS.items():
        for slab in slabs:
            for half, level in enumerate(HALVES):
                box = (sides[side], part(DEPTH, SLABS, slab), part(HEIGHT, len(HALVES), half))
                found[f"{group}/{side}-{slab}-{level}.h5"] = box
    for side, x in sides.items():
        found[f"whole/{side}.h5"] = (x, DEPTH, HEIGHT)
    return found


def part(interval: tuple[int, int], parts: int, index: int) -> tuple[int, int]:
    """One of equal parts of an interval of voxels."""
    length = (interval[1] - interval[0]) // parts
    return interval[0] + index * length, interval[0] + (index + 1) * length


def recipe(name: str, box: tuple, spacing: int) -> dict:
    """What a file's contents depend on."""
    return {"data": "brain", "version": VERSION, "name": name, "box": box, "spacing": spacing}


def cut(brain: Brain, box: tuple, spacing: int) -> tuple[np.ndarray, np.ndarray]:
    """Intensity and labels of one box of the template, at the spacing, in order (D, H, W) = (y, z, x)."""
    where = tuple(slice(a, b) for a, b in box)
    volume = brain.intensity[where].transpose(1, 2, 0)
    labels = brain.labels[where].transpose(1, 2, 0)
    if spacing == 1:
        return np.ascontiguousarray(volume), np.ascontiguousarray(labels)
    return average(volume, spacing), majority(labels, spacing)


def cubes(array: np.ndarray, edge: int) -> np.ndarray:
    """View (D, H, W) as (D / edge, H / edge, W / edge, edge, edge, edge)."""
    shape = [m for n in array.shape for m in (n // edge, edge)]
    return array.reshape(shape).transpose(0, 2, 4, 1, 3, 5)


def average(volume: np.ndarray, edge: int) -> np.ndarray:
    """Mean over cubes of voxels, float32."""
    return cubes(volume, edge).mean(axis=(3, 4, 5), dtype=np.float64).astype(np.float32)


def majority(labels: np.ndarray, edge: int) -> np.ndarray:
    """Most frequent label of cubes of voxels, uint8; of equally frequent ones the lowest."""
    votes = [(cubes(labels, edge) == label).sum(axis=(3, 4, 5)) for label in range(len(LABELS))]
    return np.argmax(votes, axis=0).astype(np.uint8)


def load_template() -> Brain:
    """Read the template from the installed nilearn package, which is not imported: only its files are needed.

    Raises
    ------
    ModuleNotFoundError
        nilearn or nibabel is missing; the message names the extra that brings them.
    FileNotFoundError
        The nilearn that is there does not ship the template.
    DataError
        It is not the known one.
    """
    found = importlib.util.find_spec("nilearn")
    try:
        if found is None:
            raise ModuleNotFoundError(name="nilearn")
        import nibabel
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"the brain data are read from the packages nilearn and nibabel, and {error.name} is not installed:"
            " pip install 'hpcpar[brain]'",
            name=error.name,
        ) from None
    folder = Path(found.origin).parent / "datasets" / "data"
    maps = {}
    for kind in ("t1", "gm", "wm"):
        path = folder / f"mni_icbm152_{kind}_tal_nlin_sym_09a_converted.nii.gz"
        if not path.exists():
            raise FileNotFoundError(f"nilearn {version('nilearn')} does not ship {path.name} (looked in {folder})")
        maps[kind] = np.asanyarray(nibabel.load(path).dataobj)
        if maps[kind].shape != TEMPLATE or maps[kind].dtype != np.uint8:
            raise DataError(f"{path}: {maps[kind].shape} {maps[kind].dtype}; expected {TEMPLATE} uint8")
    return Brain(maps["t1"].astype(np.float32) / np.float32(255), label(**maps))


def label(t1: np.ndarray, gm: np.ndarray, wm: np.ndarray) -> np.ndarray:
    """Labels from the T1 image and the probability maps of grey and white matter, all uint8 with 255 for 1."""
    grey, white = gm.astype(np.int16), wm.astype(np.int16)
    tissue = np.argmax([grey, white, 255 - grey - white], axis=0).astype(np.uint8) + np.uint8(1)
    return np.where(t1 > 0, tissue, np.uint8(0))


def summary(names: list[str], spacing: int) -> dict:
    """Contents of ``dataset.json``."""
    return {
        "data": "brain",
        "spacing_mm": spacing,
        "labels": list(LABELS),
        "note": "One symmetric brain: mirror holds mirror images of train; test holds tissue that no other set holds.",
        "sets": by_folder(names),
    }
