"""Linear theory against other codes, closed forms and its own definitions."""

import numpy as np
import pytest

from hpcpar.data.cosmology_power import Cosmology, growth, linear_power, second_growth, sigma, transfer

pytestmark = pytest.mark.serial

FIRST = Cosmology(omega_m=0.30, sigma_8=0.8, n_s=0.96, h_0=70.0)
SECOND = Cosmology(omega_m=0.26, sigma_8=0.9, n_s=0.99, h_0=62.0)

# P(k) at z = 0 for omega_b = 0.049, T = 2.7255 K, printed by colossus 1.4.0 (model="eisenstein98", no relativistic
# species). Its sigma_8 is off by 4e-4 at most, from its interpolation tables.
K = np.array([1e-4, 1e-3, 0.01, 0.03, 0.05, 0.07, 0.1, 0.2, 0.5, 1, 5, 20])
COLOSSUS = {
    FIRST: np.array(
        [428.513, 3848.49, 21685.9, 19092.3, 12100, 9432.9, 5442.08, 1874.41, 295.597, 63.4412, 1.26719, 0.0340077]
    ),
    SECOND: np.array(
        [917.829, 8752.22, 45235.8, 31986.6, 17699.9, 13728, 6932.73, 2268.87, 338.244, 71.0934, 1.39406, 0.0377059]
    ),
}
# The same by the Boltzmann code CAMB 2.0.5, massless neutrinos; the fitting formula claims a few per cent.
K_CAMB = np.array([0.003, 0.01, 0.03, 0.05, 0.07, 0.1, 0.2, 0.5, 1, 5])
CAMB = {
    FIRST: np.array([10237.2, 22167.5, 19422.1, 12100.9, 9443.22, 5285.39, 1885.18, 300.773, 64.4229, 1.25853]),
    SECOND: np.array([22728.6, 45309.7, 31827.7, 17483.6, 13540.7, 6801.79, 2309.22, 340.606, 70.9045, 1.35719]),
}


@pytest.mark.parametrize("cosmology", [FIRST, SECOND], ids=["first", "second"])
def test_the_power_spectrum_agrees_with_other_codes(cosmology):
    power = linear_power(cosmology)
    np.testing.assert_allclose(power(K), COLOSSUS[cosmology], rtol=2e-4)
    np.testing.assert_allclose(power(K_CAMB), CAMB[cosmology], rtol=0.07)
    assert np.mean(np.abs(power(K_CAMB) / CAMB[cosmology] - 1)) < 0.03


def test_the_transfer_function_is_one_on_large_scales_and_falls_as_ln_k_over_k_squared():
    assert abs(transfer(np.array([1e-7]), FIRST)[0] - 1) < 1e-6
    k = np.array([1e3, 1e4])
    slope = np.diff(np.log(transfer(k, FIRST) / np.log(k / 0.1)))[0] / np.log(10)
    assert abs(slope + 2) < 0.05


@pytest.mark.parametrize("cosmology", [FIRST, SECOND], ids=["first", "second"])
def test_fluctuations_in_spheres_of_8_are_sigma_8(cosmology):
    power = linear_power(cosmology)
    assert abs(sigma(8.0, power) / cosmology.sigma_8 - 1) < 1e-12
    # by another rule on other points: Gauss and Legendre, piecewise between the zeros of the window
    nodes, weights = np.polynomial.legendre.leggauss(40)
    edges = np.concatenate([[0, 0.01, 0.05, 0.1], np.arange(0.2, 30, 0.2)])
    total = 0.0
    for a, b in zip(edges[:-1], edges[1:], strict=True):
        k = (b - a) / 2 * nodes + (a + b) / 2
        x = 8 * k
        total += (b - a) / 2 * weights @ (k**2 * power(k) * (3 * (np.sin(x) - x * np.cos(x)) / x**3) ** 2)
    assert abs(np.sqrt(total / (2 * np.pi**2)) / cosmology.sigma_8 - 1) < 1e-4
    assert power(np.zeros(1))[0] == 0


def test_without_a_cosmological_constant_the_growth_is_the_scale_factor():
    matter = Cosmology(omega_m=1.0, sigma_8=0.8, n_s=1.0)
    for z in (0.0, 0.5, 3.0, 49.0):
        assert abs(growth(z, matter) * (1 + z) - 1) < 1e-12
        assert abs(second_growth(z, matter) / (-3 / 7 / (1 + z) ** 2) - 1) < 1e-12


@pytest.mark.parametrize("cosmology", [FIRST, SECOND], ids=["first", "second"])
def test_growth_obeys_its_differential_equation(cosmology):
    """D'' + (3 + dlnH/dlna) D' = 3/2 Omega_m(a) D, primes for d/dlna."""

    def hubble_squared(a):
        return cosmology.omega_m / a**3 + 1 - cosmology.omega_m

    h = 1e-3
    for a in (0.1, 0.4, 0.9):
        d = [growth(1 / (a * np.exp(i * h)) - 1, cosmology) for i in (-1, 0, 1)]
        first, second = (d[2] - d[0]) / (2 * h), (d[2] - 2 * d[1] + d[0]) / h**2
        slope = (np.log(hubble_squared(a * np.exp(h))) - np.log(hubble_squared(a * np.exp(-h)))) / (4 * h)
        source = 1.5 * cosmology.omega_m / a**3 / hubble_squared(a) * d[1]
        assert abs(second + (2 + slope) * first - source) < 1e-5 * source
    assert growth(0.0, cosmology) == 1


def test_growth_agrees_with_its_closed_form():
    special = pytest.importorskip("scipy.special", reason="the closed form is a hypergeometric function of scipy")

    def closed(a, m):
        return a * special.hyp2f1(1 / 3, 1, 11 / 6, -(a**3) * (1 - m) / m)

    for c in (FIRST, SECOND):
        for z in (0.2, 1.5, 49.0):
            assert abs(growth(z, c) / (closed(1 / (1 + z), c.omega_m) / closed(1.0, c.omega_m)) - 1) < 1e-12
