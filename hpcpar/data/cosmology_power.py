"""Linear theory of a flat universe of cold dark matter, baryons and a cosmological constant.

Wavenumbers are in h/Mpc, lengths in Mpc/h, power in (Mpc/h)^3, unless a name says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

__all__ = ["Cosmology", "growth", "linear_power", "second_growth", "sigma", "transfer"]

Spectrum = Callable[[np.ndarray], np.ndarray]
T_CMB = 2.7255  # K


@dataclass(frozen=True)
class Cosmology:
    """Parameters of a universe; flat, so the cosmological constant has ``1 - omega_m``."""

    omega_m: float
    sigma_8: float
    n_s: float
    h_0: float = 70.0  # km/s/Mpc
    omega_b: float = 0.049

    @property
    def h(self) -> float:
        """The Hubble constant in units of 100 km/s/Mpc."""
        return self.h_0 / 100


def transfer(k: np.ndarray, c: Cosmology) -> np.ndarray:
    """Matter transfer function with acoustic oscillations, 1 at k = 0.

    Eisenstein and Hu, ApJ 496, 605 (1998), equations (2) to (7), (10) to (12) and (14) to (24); accurate to a few per
    cent.

    Parameters
    ----------
    k : array
        Wavenumbers in h/Mpc, > 0.
    """
    k_mpc = np.asarray(k, np.float64) * c.h
    w_m, w_b = c.omega_m * c.h**2, c.omega_b * c.h**2
    f_b = c.omega_b / c.omega_m
    theta = T_CMB / 2.7

    z_eq = 2.50e4 * w_m / theta**4  # (2)
    k_eq = 7.46e-2 * w_m / theta**2  # (3), 1/Mpc
    z_d = drag_epoch(w_m, w_b)
    r_d, r_eq = (31.5 * w_b / theta**4 * 1000 / z for z in (z_d, z_eq))  # (5)
    root = (np.sqrt(1 + r_d) + np.sqrt(r_d + r_eq)) / (1 + np.sqrt(r_eq))
    s = 2 / (3 * k_eq) * np.sqrt(6 / r_eq) * np.log(root)  # (6), sound horizon in Mpc
    q = k_mpc / (13.41 * k_eq)  # (10)

    a1 = (46.9 * w_m) ** 0.670 * (1 + (32.1 * w_m) ** -0.532)
    a2 = (12.0 * w_m) ** 0.424 * (1 + (45.0 * w_m) ** -0.582)
    alpha_c = a1**-f_b * a2 ** -(f_b**3)  # (11)
    b1 = 0.944 / (1 + (458 * w_m) ** -0.708)
    b2 = (0.395 * w_m) ** -0.0266
    beta_c = 1 / (1 + b1 * ((1 - f_b) ** b2 - 1))  # (12)
    f = 1 / (1 + (k_mpc * s / 5.4) ** 4)  # (18)
    cold = f * pressureless(q, 1, beta_c) + (1 - f) * pressureless(q, alpha_c, beta_c)  # (17)

    k_silk = 1.6 * w_b**0.52 * w_m**0.73 * (1 + (10.4 * w_m) ** -0.95)  # (7), 1/Mpc
    y = (1 + z_eq) / (1 + z_d)
    root = np.sqrt(1 + y)
    g = y * (-6 * root + (2 + 3 * y) * np.log((root + 1) / (root - 1)))  # (15)
    alpha_b = 2.07 * k_eq * s * (1 + r_d) ** -0.75 * g  # (14)
    beta_b = 0.5 + f_b + (3 - 2 * f_b) * np.sqrt((17.2 * w_m) ** 2 + 1)  # (24)
    beta_node = 8.41 * w_m**0.435  # (23)
    s_node = s / np.cbrt(1 + (beta_node / (k_mpc * s)) ** 3)  # (22)
    silk = alpha_b / (1 + (beta_b / (k_mpc * s)) ** 3) * np.exp(-((k_mpc / k_silk) ** 1.4))
    baryons = pressureless(q, 1, 1) / (1 + (k_mpc * s / 5.2) ** 2) + silk
    baryons *= np.sinc(k_mpc * s_node / np.pi)  # (21); NumPy's sinc(x) is sin(pi x) / (pi x)
    return f_b * baryons + (1 - f_b) * cold  # (16)


def drag_epoch(w_m: float, w_b: float) -> float:
    """Redshift at which baryons come free of the photons: equation (4) of the same paper."""
    b1 = 0.313 * w_m**-0.419 * (1 + 0.607 * w_m**0.674)
    b2 = 0.238 * w_m**0.223
    return 1291 * w_m**0.251 / (1 + 0.659 * w_m**0.828) * (1 + b1 * w_b**b2)


def pressureless(q: np.ndarray, alpha: float, beta: float) -> np.ndarray:
    """Equations (19) and (20) of the same paper."""
    logarithm = np.log(np.e + 1.8 * beta * q)
    return logarithm / (logarithm + (14.2 / alpha + 386 / (1 + 69.9 * q**1.08)) * q**2)


def growth(z: float, c: Cosmology) -> float:
    """Linear growth factor D(z) of the density contrast, 1 at z = 0.

    ``D(a) ~ H(a) * integral from 0 to a of da' / (a' H(a'))^3`` (Heath, MNRAS 179, 351 (1977)), by Gauss and Legendre's
    rule after ``a' = t^2``, which makes the integrand smooth.
    """
    return _growth(1 / (1 + z), c) / _growth(1.0, c)


def _growth(a: float, c: Cosmology) -> float:
    nodes, weights = np.polynomial.legendre.leggauss(48)
    t = np.sqrt(a) * (nodes + 1) / 2
    integrand = 2 * t**4 / (c.omega_m + (1 - c.omega_m) * t**6) ** 1.5
    hubble = np.sqrt(c.omega_m / a**3 + 1 - c.omega_m)
    return float(hubble * (weights @ integrand) * np.sqrt(a) / 2)


def second_growth(z: float, c: Cosmology) -> float:
    """Growth factor of second-order displacements, ``-3/7 D^2 Omega_m(z)^(-1/143)``.

    For a flat universe with a cosmological constant. Bouchet, Colombi, Hivon and Juszkiewicz, A&A 296, 575 (1995).
    """
    matter = c.omega_m * (1 + z) ** 3
    return float(-3 / 7 * growth(z, c) ** 2 * (matter / (matter + 1 - c.omega_m)) ** (-1 / 143))


def linear_power(c: Cosmology) -> Spectrum:
    """The linear matter power spectrum at z = 0, as a function of k.

    ``P(k) = A k^n_s T(k)^2`` with A such that the fluctuations in spheres of 8 Mpc/h are sigma_8. ``P(0) = 0``. At
    redshift z it is ``growth(z)^2`` times this.
    """

    def shape(k: np.ndarray) -> np.ndarray:
        positive = np.where(k > 0, k, 1.0)
        return np.where(k > 0, positive**c.n_s * transfer(positive, c) ** 2, 0.0)

    amplitude = (c.sigma_8 / sigma(8.0, shape)) ** 2
    return lambda k: amplitude * shape(np.asarray(k, np.float64))


def sigma(radius: float, power: Spectrum) -> float:
    """Standard deviation of the density contrast averaged over spheres, from a power spectrum.

    ``sigma^2 = 1 / (2 pi^2) integral of k^3 P(k) W(k R)^2 d ln k`` with ``W(x) = 3 (sin x - x cos x) / x^3``. The
    trapezoidal rule on 8192 points from 1e-5 to 1e2 h/Mpc is exact to about 1e-6.
    """
    log_k = np.linspace(np.log(1e-5), np.log(1e2), 8192)
    k = np.exp(log_k)
    x = k * radius
    window = 3 * (np.sin(x) - x * np.cos(x)) / x**3
    y = k**3 * power(k) * window**2 / (2 * np.pi**2)
    return float(np.sqrt(np.sum((y[1:] + y[:-1]) / 2 * np.diff(log_k))))
