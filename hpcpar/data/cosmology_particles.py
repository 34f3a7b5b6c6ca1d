"""From random numbers to particle counts: linear fields, second-order displacements, cloud-in-cell assignment.

A box of edge `box` Mpc/h has n points per edge. Fourier arrays have the shape (n, n, n // 2 + 1) of `numpy.fft.rfftn`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hpcpar.data.streams import stream
from hpcpar.kernels.generic.random import random_normal  # the reference: same bits whatever is installed

__all__ = ["cloud_in_cell", "displacements", "linear_modes", "measured_power", "white_noise"]

CHUNK = 1 << 17  # numbers drawn, and at least so many particles assigned, at a time: temporaries of 10 MB fit in caches


def wavenumbers(n: int, box: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Components of the wave vectors in h/Mpc, shaped to broadcast against a Fourier array."""
    k = 2 * np.pi / box * np.fft.fftfreq(n, 1 / n)
    half = 2 * np.pi / box * np.arange(n // 2 + 1)
    return k[:, None, None], k[None, :, None], half[None, None, :]


def white_noise(n: int, seed: int, universe: int) -> np.ndarray:
    """Independent standard normal numbers, shape (n, n, n): functions of (seed, universe, index) only."""
    noise = np.empty(n**3)
    for first in range(0, n**3, CHUNK):
        piece = first, min(first + CHUNK, n**3)
        noise[slice(*piece)] = random_normal(seed, stream("initial conditions", universe), (n**3,), (piece,))
    return noise.reshape(n, n, n)


def linear_modes(noise: np.ndarray, power: Callable[[np.ndarray], np.ndarray], box: float) -> np.ndarray:
    """Fourier modes of a Gaussian density contrast with a power spectrum.

    Parameters
    ----------
    noise : array (n, n, n)
        White noise of unit variance. Its modes have mean square n^3, hence the factor sqrt(P n^3 / V).
    power : callable
        P(k), at the redshift wanted.
    """
    n = noise.shape[0]
    kx, ky, kz = wavenumbers(n, box)
    return np.fft.rfftn(noise) * np.sqrt(power(np.sqrt(kx**2 + ky**2 + kz**2)) * (n / box) ** 3)


def displacements(modes: np.ndarray, box: float) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Displacement fields of Lagrangian perturbation theory to second order.

    A particle that starts at q is found at ``q + D psi1(q) + D2 psi2(q)`` with ``psi1 = -grad phi1``, ``psi2 = grad
    phi2``, ``laplace phi1 = delta`` and ``laplace phi2 = sum over i > j of phi1_ii phi1_jj - phi1_ij^2``
    (Scoccimarro, MNRAS 299, 1097 (1998), appendix D). D and D2 are `growth` and `second_growth`.

    Parameters
    ----------
    modes : array (n, n, n // 2 + 1)
        Fourier modes of delta at z = 0.

    Returns
    -------
    psi1, psi2 : lists of three arrays (n, n, n)
        In Mpc/h.
    """
    n = modes.shape[0]
    k = wavenumbers(n, box)
    k2 = k[0] ** 2 + k[1] ** 2 + k[2] ** 2
    k2[0, 0, 0] = 1.0  # the mean has no potential; its modes are set to 0
    potential = -modes / k2
    potential[0, 0, 0] = 0.0
    size = (n, n, n)

    def second_derivative(i: int, j: int) -> np.ndarray:
        return np.fft.irfftn(-k[i] * k[j] * potential, size, axes=(0, 1, 2))

    xx, yy, zz = (second_derivative(i, i) for i in range(3))
    source = xx * yy + xx * zz + yy * zz
    del xx, yy, zz
    for i, j in ((0, 1), (0, 2), (1, 2)):
        source -= second_derivative(i, j) ** 2
    second = -np.fft.rfftn(source) / k2
    second[0, 0, 0] = 0.0
    return gradient(potential, k, -1.0), gradient(second, k, 1.0)


def gradient(modes: np.ndarray, k: tuple[np.ndarray, ...], factor: float) -> list[np.ndarray]:
    """`factor` times the gradient of the real field with these modes: three arrays (n, n, n)."""
    n = modes.shape[0]
    fields = []
    for component in k:
        # the derivative of the highest frequency of an even grid is not a real field; it is left out
        odd = np.where(np.isclose(np.abs(component), np.abs(k[0]).max()), 0.0, component) if n % 2 == 0 else component
        fields.append(np.fft.irfftn(factor * 1j * odd * modes, (n, n, n), axes=(0, 1, 2)))
    return fields


def cloud_in_cell(shifts: list[np.ndarray], box: float, width: int) -> np.ndarray:
    """Count particles on a periodic grid, each shared between the 8 nearest cells (Hockney and Eastwood, 1988).

    Parameters
    ----------
    shifts : list of three arrays (n, n, n)
        Displacements in Mpc/h of particles that start at the points of a regular grid.
    width : int
        Cells per edge of the result.

    Returns
    -------
    array (width, width, width), float64
        Particles in each cell; their sum is n^3. Added up in the order of the particles.

    Notes
    -----
    The particles' grid is put half a spacing off the cells' centres. There the counts respond linearly to small
    displacements. With particles on the centres the share given away is |shift|, a kink that doubles the power at the
    highest wavenumbers when little has moved (high redshift); half a spacing off, the excess is 12 % there, and 4 % at
    half of it.
    """
    n = shifts[0].shape[0]
    counts = np.zeros(width**3)
    planes = max(1, CHUNK // n**2, n // 64)  # no more than 64 passes over the grid of a large box
    for first in range(0, n, planes):
        rows = slice(first, min(first + planes, n))
        lower, part = [], []
        for axis, shift in enumerate(shifts):
            start = np.arange(n)[rows] if axis == 0 else np.arange(n)
            start = (start + 0.5).reshape([-1 if d == axis else 1 for d in range(3)]) * (width / n)
            position = start + shift[rows] * (width / box)
            floor = np.floor(position)
            part.append((position - floor).ravel())
            lower.append(floor.astype(np.int64).ravel() % width)
        counts += shared(lower, part, width)
    return counts.reshape(width, width, width)


def shared(lower: list[np.ndarray], part: list[np.ndarray], width: int) -> np.ndarray:
    """Counts (width^3,) of particles in cell `lower` and, by the fractions `part`, in the next cell of each dim."""
    cells, weights = np.zeros((1, lower[0].size), np.int64), np.ones((1, lower[0].size))
    for cell, fraction in zip(lower, part, strict=True):
        both = cell, (cell + 1) % width
        cells = np.concatenate([cells * width + c for c in both])
        weights = np.concatenate([weights * f for f in (1.0 - fraction, fraction)])
    return np.bincount(cells.ravel(), weights.ravel(), minlength=width**3)


def measured_power(
    contrast: np.ndarray, box: float, deconvolve: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Power spectrum of a density contrast in bins as wide as the fundamental wavenumber.

    Parameters
    ----------
    contrast : array (n, n, n)
        Density over its mean, minus 1.
    deconvolve : bool
        Divide by the square of the cloud-in-cell window, ``prod sinc(k_i L / 2n)^2`` per mode.

    Returns
    -------
    k, power, modes : arrays
        Mean wavenumber (h/Mpc), mean power ((Mpc/h)^3) and number of modes (both of k and -k) of each bin, up to the
        highest wavenumber of the axes.
    """
    n = contrast.shape[0]
    components = wavenumbers(n, box)
    density = np.abs(np.fft.rfftn(contrast)) ** 2 * (box / n**2) ** 3
    if deconvolve:
        for k in components:
            density /= np.sinc(k * box / (2 * np.pi * n)) ** 4
    k = np.sqrt(sum(c**2 for c in components))
    twice = np.full(k.shape, 2.0)  # modes of a real field come in pairs, of which rfftn keeps one
    twice[:, :, 0] = 1.0
    if n % 2 == 0:
        twice[:, :, -1] = 1.0
    bins = np.rint(k * box / (2 * np.pi)).astype(int).ravel()
    modes, k_sum, power = (
        np.bincount(bins, (twice * value).ravel())[1 : n // 2] for value in (np.ones_like(k), k, density)
    )
    return k_sum / modes, power / modes, modes
