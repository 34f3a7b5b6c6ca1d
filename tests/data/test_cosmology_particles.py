"""Fields and particles: spectra equal to the input within sampling error, displacements equal to closed forms."""

import numpy as np
import pytest

from hpcpar.data.cosmology_particles import (
    cloud_in_cell,
    displacements,
    linear_modes,
    measured_power,
    shared,
    white_noise,
)
from hpcpar.data.cosmology_power import Cosmology, growth, linear_power, second_growth

pytestmark = pytest.mark.serial

COSMOLOGY = Cosmology(omega_m=0.3, sigma_8=0.8, n_s=0.96)
N, BOX = 32, 128.0


def field(modes):
    return np.fft.irfftn(modes, (modes.shape[0],) * 3, axes=(0, 1, 2))


def contrast_of_particles(modes, z, n):
    first, second = displacements(modes, BOX)
    d1, d2 = growth(z, COSMOLOGY), second_growth(z, COSMOLOGY)
    shifts = [d1 * a + d2 * b for a, b in zip(first, second, strict=True)]
    return cloud_in_cell(shifts, BOX, n) - 1


def test_noise_is_a_function_of_seed_universe_and_index():
    noise = white_noise(8, 3, 5)
    np.testing.assert_array_equal(white_noise(8, 3, 5), noise)
    assert not np.array_equal(white_noise(8, 3, 6), noise) and not np.array_equal(white_noise(8, 4, 5), noise)
    large = white_noise(64, 0, 0)  # drawn in two pieces
    assert abs(large.mean()) < 5 / 64**1.5 and abs(large.var() - 1) < 5 * np.sqrt(2) / 64**1.5
    assert abs(np.corrcoef(large[:32].ravel(), large[32:].ravel())[0, 1]) < 0.02


def test_the_linear_field_has_the_input_power():
    """Averaged over 8 universes, each bin is within 4 of its standard deviations sqrt(2 / modes)."""
    power = linear_power(COSMOLOGY)
    spectra = []
    for universe in range(8):
        k, found, modes = measured_power(field(linear_modes(white_noise(N, 1, universe), power, BOX)), BOX)
        spectra.append(found)
    expected = spectral_mean(power)
    error = (np.mean(spectra, axis=0) / expected - 1) / np.sqrt(2 / (8 * modes))
    assert modes[0] == 18 and len(k) == N // 2 - 1  # bin 1: 6 modes of |m| = 1 and 12 of |m| = sqrt 2
    assert np.abs(error).max() < 4
    assert 0.3 < np.mean(error**2) < 2.5


def spectral_mean(power):
    """P averaged over the modes of each bin: what a bin of a Gaussian field is expected to hold."""
    m = np.fft.fftfreq(N, 1 / N)
    k = np.sqrt(m[:, None, None] ** 2 + m[:, None] ** 2 + m**2)
    bins = np.rint(k).astype(int).ravel()
    values = power(2 * np.pi / BOX * k).ravel()
    return (np.bincount(bins, values) / np.bincount(bins))[1 : N // 2]


def test_particles_at_high_redshift_have_the_power_of_the_linear_field():
    """At z = 49, with the same random numbers: no sampling error. Deconvolved of the cloud-in-cell window, the power
    agrees with D^2 times that of the linear field within 1 % up to a quarter of the highest wavenumber and within 4 %
    up to half of it; above, the aliases of the window show.
    """
    modes = linear_modes(white_noise(N, 2, 0), linear_power(COSMOLOGY), BOX)
    z = 49.0
    k, expected, _ = measured_power(field(modes), BOX)
    _, found, _ = measured_power(contrast_of_particles(modes, z, N), BOX, deconvolve=True)
    ratio = found / (growth(z, COSMOLOGY) ** 2 * expected)
    highest = np.pi * N / BOX
    quarter, half = k < highest / 4, k < highest / 2
    assert (quarter.sum(), half.sum()) == (3, 7)
    np.testing.assert_allclose(ratio[quarter], 1, atol=0.01)
    np.testing.assert_allclose(ratio[half], 1, atol=0.04)


def test_clustering_grows_with_time_and_becomes_skewed():
    modes = linear_modes(white_noise(N, 2, 0), linear_power(COSMOLOGY), BOX)
    contrasts = [contrast_of_particles(modes, z, N) for z in (3.0, 1.0, 0.0)]
    spread = [contrast.std() for contrast in contrasts]
    assert spread[0] < spread[1] < spread[2]
    skewness = [(c**3).mean() / c.std() ** 3 for c in contrasts]
    assert 0 < skewness[0] < skewness[1] < skewness[2]  # gravity makes voids wide and knots dense
    _, linear, _ = measured_power(field(modes), BOX)
    _, found, _ = measured_power(contrasts[0], BOX, deconvolve=True)
    assert abs(found[0] / (growth(3.0, COSMOLOGY) ** 2 * linear[0]) - 1) < 0.05  # the largest waves stay linear


def waves(n, box):
    """cos(kx), cos(2ky) on a grid, and k."""
    x = 2 * np.pi * np.arange(n) / n
    ones = np.ones((n, n, n))
    return np.cos(x)[:, None, None] * ones, np.cos(2 * x)[None, :, None] * ones, 2 * np.pi / box


def test_one_plane_wave_moves_particles_along_it_and_has_no_second_order():
    a, _, k = waves(16, 50.0)
    first, second = displacements(np.fft.rfftn(0.1 * a), 50.0)
    x = 2 * np.pi * np.arange(16) / 16
    np.testing.assert_allclose(first[0], (-0.1 / k * np.sin(x))[:, None, None] * np.ones((16, 16, 16)), atol=1e-14)
    for zero in (*first[1:], *second):
        np.testing.assert_allclose(zero, 0, atol=1e-14)


def test_two_crossed_waves_have_the_second_order_of_their_closed_form():
    """delta = a cos(kx) + b cos(2ky): the source is their product, phi2 = -a b cos(kx) cos(2ky) / (5 k^2)."""
    a, b, k = waves(16, 50.0)
    _, second = displacements(np.fft.rfftn(0.1 * a + 0.3 * b), 50.0)
    x = 2 * np.pi * np.arange(16) / 16
    sx, sy = np.sin(x)[:, None, None], np.sin(2 * x)[None, :, None]
    np.testing.assert_allclose(second[0], 0.03 / (5 * k) * sx * b, atol=1e-14)
    np.testing.assert_allclose(second[1], 2 * 0.03 / (5 * k) * a * sy, atol=1e-14)
    np.testing.assert_allclose(second[2], 0, atol=1e-14)


def test_first_order_displacements_have_minus_the_contrast_as_divergence():
    modes = linear_modes(white_noise(15, 0, 0), linear_power(COSMOLOGY), 60.0)  # odd: every wave has its derivative
    first, _ = displacements(modes, 60.0)
    k = 2 * np.pi / 60.0 * np.fft.fftfreq(15, 1 / 15)
    divergence = np.zeros((15, 15, 15))
    for axis, psi in enumerate(first):
        along = np.moveaxis(psi, axis, -1)
        divergence += np.moveaxis(np.fft.ifft(1j * k * np.fft.fft(along)).real, -1, axis)
    np.testing.assert_allclose(divergence, -field(modes), atol=1e-12)


@pytest.mark.parametrize("width", [8, 16, 12])
def test_all_particles_are_counted(width):
    rng = np.random.default_rng(0)
    shifts = [rng.normal(0, 30, (16, 16, 16)) for _ in range(3)]  # many leave the box and come back on the other side
    counts = cloud_in_cell(shifts, 50.0, width)
    assert abs(counts.sum() - 16**3) < 1e-9 and counts.min() >= 0


def test_resting_particles_fill_the_grid_evenly():
    still = [np.zeros((16, 16, 16))] * 3
    np.testing.assert_array_equal(cloud_in_cell(still, 50.0, 16), 1)
    np.testing.assert_array_equal(cloud_in_cell(still, 50.0, 8).sum(), 16**3)


def test_a_particle_is_shared_by_distance_and_around_the_box():
    counts = shared([np.array([3]), np.array([0]), np.array([1])], [np.array([f]) for f in (0.25, 0.5, 0.0)], 4)
    counts = counts.reshape(4, 4, 4)
    assert {tuple(i): counts[tuple(i)] for i in np.argwhere(counts)} == {
        (3, 0, 1): 0.375,
        (0, 0, 1): 0.125,
        (3, 1, 1): 0.375,
        (0, 1, 1): 0.125,
    }


def test_counts_do_not_depend_on_how_many_particles_are_assigned_at_a_time(monkeypatch):
    rng = np.random.default_rng(1)
    shifts = [rng.normal(0, 5, (12, 12, 12)) for _ in range(3)]
    whole = cloud_in_cell(shifts, 40.0, 12)
    monkeypatch.setattr("hpcpar.data.cosmology_particles.CHUNK", 300)
    np.testing.assert_allclose(cloud_in_cell(shifts, 40.0, 12), whole, rtol=1e-13)
