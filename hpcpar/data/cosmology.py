"""The cosmology data set: universes whose parameters a network is to find from their matter density.

Files look like those of the public CosmoFlow sets: ``full`` (C, D, H, W) holds particle counts, one channel a redshift,
and ``unitPar`` the parameters scaled to [-1, 1]. The counts come from Lagrangian perturbation theory to second order,
which follows structure on scales above some Mpc/h and has no haloes; the public sets come from simulations.

Everything in a universe is a function of (seed, its number, the options): not of how many universes there are, nor of
how many ranks make them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpcpar.data.cosmology_particles import cloud_in_cell, displacements, linear_modes, white_noise
from hpcpar.data.cosmology_power import Cosmology, growth, linear_power, second_growth
from hpcpar.data.files import is_made, make_folder, write_hdf5
from hpcpar.data.sharing import ALONE, Sharing, by_folder
from hpcpar.data.streams import stream, uniform

__all__ = ["PARAMETERS", "Recipe", "draw_parameters", "make_cosmology", "make_universe"]

VERSION = 1  # of the files' contents; a change makes files of earlier versions stand in the way

# Name and range of each parameter. The first three ranges are those of the CosmoFlow paper (Mathuriya et al., SC 2018);
# later public sets vary the Hubble constant (km/s/Mpc) as well, so that unitPar has four entries.
PARAMETERS = (("Omega_m", 0.25, 0.35), ("sigma_8", 0.78, 0.95), ("n_s", 0.9, 1.0), ("H_0", 60.0, 80.0))
PRIMES = (3, 7, 13, 17)
REDSHIFTS = (0.0, 0.5, 1.5, 3.0)
CELL = 4.0  # Mpc/h, edge of a voxel unless `box` says otherwise
SETS = ("train",) * 8 + ("validation", "test")  # of universe i: entry i % 10


@dataclass(frozen=True)
class Recipe:
    """What a universe is made from, besides its number.

    Parameters
    ----------
    width : int
        Voxels per edge.
    seed : int
        Of parameters and initial conditions.
    box : float
        Edge in Mpc/h.
    redshifts : tuple of float
        One channel each.
    particles : int
        Particles per voxel edge: a voxel holds ``particles ** 3`` on average.
    """

    width: int
    seed: int
    box: float
    redshifts: tuple[float, ...]
    particles: int = 1

    def __post_init__(self):
        if self.width < 4:
            raise ValueError(f"width is {self.width} voxels; at least 4 are needed to have waves in the box")
        if self.particles < 1:
            raise ValueError(f"particles is {self.particles}; it counts particles per voxel edge, at least 1")
        if not self.box > 0:
            raise ValueError(f"box is {self.box} Mpc/h; it is a length")
        if not self.redshifts or min(self.redshifts) < 0:
            raise ValueError(f"redshifts are {self.redshifts}; at least one is needed, and none below 0")

    def of(self, universe: int) -> dict:
        """Recipe of one file."""
        return {"data": "cosmology", "version": VERSION, "universe": universe, **vars(self)}


def make_cosmology(
    out: str | os.PathLike,
    universes: int = 64,
    width: int = 64,
    seed: int = 0,
    box: float | None = None,
    redshifts: int | Sequence[float] = 4,
    particles: int = 1,
    sharing: Sharing = ALONE,
) -> list[Path]:
    """Write a cosmology data set, one HDF5 file a universe.

    Parameters
    ----------
    out : path
        Folder; gets ``train``, ``validation``, ``test`` (8 : 1 : 1) and ``dataset.json``.
    universes : int
        More can be added later: the first ones stay.
    width, seed, particles
        As in `Recipe`.
    box : float, optional
        Edge in Mpc/h, by default 4 Mpc/h times `width`. In voxels of 2 Mpc/h particles have passed through each other
        at z = 0, and the counts spread less than at z = 0.5: perturbation theory ends there.
    redshifts : int or sequence of float
        The channels; a number takes so many of 0, 0.5, 1.5 and 3.
    sharing : Sharing, optional
        How several ranks make the set together; by default this process makes all of it. Collective with a `gather`.

    Returns
    -------
    list of Path
        All files of the set, on every rank (also those that other ranks make).

    Raises
    ------
    ValueError
        For options out of range.
    DataError
        A file made from other parameters is in the way.
    """
    if universes < 1:
        raise ValueError(f"{universes} universes: at least 1 is needed")
    box = CELL * width if box is None else float(box)
    recipe = Recipe(width, seed, box, known_redshifts(redshifts), particles)
    out = make_folder(out)
    names = [f"{SETS[i % len(SETS)]}/universe-{i:05}.h5" for i in range(universes)]
    for name in sorted({os.path.dirname(name) for name in names}):
        make_folder(out / name)
    mine = sharing.own(range(universes))
    written = 0
    for count, i in enumerate(mine, start=1):
        if not is_made(out / names[i], recipe.of(i)):
            write_universe(out / names[i], recipe, i)
            written += 1
            if written % 8 == 1:
                sharing.report(f"cosmology: universe {count} of {len(mine)} on this rank written to {out / names[i]}")
    return sharing.finish("cosmology", out, names, written, summary(names, recipe))


def known_redshifts(redshifts: int | Sequence[float]) -> tuple[float, ...]:
    """The redshifts of the channels, from their number or from themselves.

    Raises
    ------
    ValueError
        A number that is not 1 to 4.
    """
    if not isinstance(redshifts, int):
        return tuple(float(z) for z in redshifts)
    if not 1 <= redshifts <= len(REDSHIFTS):
        raise ValueError(f"{redshifts} redshifts: 1 to {len(REDSHIFTS)} of {REDSHIFTS}, or give the values")
    return REDSHIFTS[:redshifts]


def draw_parameters(universe: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Parameters of a universe, spread evenly over their ranges.

    Richtmyer's sequence, ``frac(shift + i sqrt(p_j))`` with primes p_j, shifted at random by the seed. The primes were
    chosen so that all universes, and also every tenth (the test set), leave shorter gaps than independent draws.

    Returns
    -------
    physical, unit : arrays (4,), float64
        In the order of `PARAMETERS`; `unit` scaled to [-1, 1).
    """
    shift = uniform(seed, stream("cosmological parameters"), len(PARAMETERS))
    unit = 2 * np.mod(shift + universe * np.sqrt(PRIMES), 1.0) - 1
    low, high = np.array([(a, b) for _, a, b in PARAMETERS]).T
    return (low + high) / 2 + (high - low) / 2 * unit, unit


def make_universe(recipe: Recipe, universe: int) -> np.ndarray:
    """Particle counts of a universe, shape (C, width, width, width), float32; each channel sums to all particles."""
    physical, _ = draw_parameters(universe, recipe.seed)
    cosmology = Cosmology(*(float(p) for p in physical))
    n = recipe.particles * recipe.width
    modes = linear_modes(white_noise(n, recipe.seed, universe), linear_power(cosmology), recipe.box)
    first, second = displacements(modes, recipe.box)
    full = np.empty((len(recipe.redshifts), *(recipe.width,) * 3), np.float32)
    for channel, z in enumerate(recipe.redshifts):
        d1, d2 = growth(z, cosmology), second_growth(z, cosmology)
        shifts = [d1 * a + d2 * b for a, b in zip(first, second, strict=True)]
        full[channel] = cloud_in_cell(shifts, recipe.box, recipe.width)
    return full


def write_universe(path: Path, recipe: Recipe, universe: int) -> None:
    """Make one universe and write its file."""
    physical, unit = draw_parameters(universe, recipe.seed)
    datasets = {
        "full": make_universe(recipe, universe),
        "unitPar": unit.astype(np.float32),
        "physPar": physical.astype(np.float32),
        "redshifts": np.array(recipe.redshifts, np.float32),
    }
    attributes = {"namePar": [name for name, *_ in PARAMETERS], "box_mpc_h": recipe.box}
    attributes |= {name: float(value) for (name, *_), value in zip(PARAMETERS, physical, strict=True)}
    write_hdf5(path, datasets, attributes, recipe.of(universe))


def summary(names: list[str], recipe: Recipe) -> dict:
    """Contents of ``dataset.json``."""
    ranges = {name: [low, high] for name, low, high in PARAMETERS}
    return {"data": "cosmology", "version": VERSION, **vars(recipe), "parameters": ranges, "sets": by_folder(names)}
