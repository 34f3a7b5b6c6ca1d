"""The cosmology set: the same bytes for any number of ranks, parameters spread over their ranges, made once."""

import json

import h5py
import numpy as np
import pytest

from hpcpar.data import DataError, HDF5Dataset, Sharing
from hpcpar.data.cosmology import PARAMETERS, Recipe, draw_parameters, make_cosmology, make_universe

pytestmark = pytest.mark.serial

OPTIONS = {"universes": 12, "width": 8, "seed": 4, "redshifts": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("cosmology")
    make_cosmology(out, **OPTIONS)
    return out


def test_files_look_like_the_public_ones_and_are_split_eight_to_one_to_one(folder):
    sets = {"train": 10, "validation": 1, "test": 1}
    for group, files in sets.items():
        data = HDF5Dataset(folder / group, channels=2)
        data.verify()
        assert (len(data), data.input, data.target) == (files, "full", "unitPar")
        assert data.shape("full") == (2, 8, 8, 8) and data.shape("unitPar") == (4,)
        assert data.dtype("full") == data.dtype("unitPar") == np.float32
    with h5py.File(folder / "validation" / "universe-00008.h5") as file:
        assert list(file.attrs["namePar"]) == ["Omega_m", "sigma_8", "n_s", "H_0"]
        assert file.attrs["box_mpc_h"] == 32.0
        np.testing.assert_array_equal(file["redshifts"], np.float32([0, 0.5]))
        for i, (name, low, high) in enumerate(PARAMETERS):
            value = file.attrs[name]
            assert low <= value < high and file["physPar"][i] == np.float32(value)
            assert abs(file["unitPar"][i] - (2 * (value - low) / (high - low) - 1)) < 1e-6
    listed = json.loads((folder / "dataset.json").read_text())["sets"]
    assert {group: len(names) for group, names in listed.items()} == sets


@pytest.mark.parametrize("ranks", [2, 3])
def test_any_number_of_ranks_makes_the_same_bytes(folder, tmp_path, ranks):
    for rank in reversed(range(ranks)):
        paths = make_cosmology(tmp_path, **OPTIONS, sharing=Sharing(rank, ranks))
    assert len(paths) == 12
    for path in paths:
        assert path.read_bytes() == (folder / path.relative_to(tmp_path)).read_bytes()
    assert (tmp_path / "dataset.json").read_text() == (folder / "dataset.json").read_text()


def test_universes_are_kept_when_more_are_added_and_others_are_refused(folder, tmp_path):
    first = make_cosmology(tmp_path, **OPTIONS | {"universes": 5})
    stamps = [path.stat().st_mtime_ns for path in first]
    lines = []
    paths = make_cosmology(tmp_path, **OPTIONS, sharing=Sharing(report=lines.append))
    assert paths[:5] == first and [path.stat().st_mtime_ns for path in first] == stamps
    assert lines[-1] == f"cosmology: 7 files written, 5 already there, in {tmp_path}"
    assert paths[11].read_bytes() == (folder / paths[11].relative_to(tmp_path)).read_bytes()
    with pytest.raises(DataError, match=r"universe-00000.h5 was made from other parameters \(seed: 4 there, 5 asked"):
        make_cosmology(tmp_path, **OPTIONS | {"seed": 5})


@pytest.mark.parametrize("particles", [1, 2])
def test_every_channel_holds_all_particles_and_later_ones_cluster_more(particles):
    full = make_universe(Recipe(16, 0, 64.0, (0.0, 1.0, 5.0), particles), 3)
    assert full.shape == (3, 16, 16, 16) and full.dtype == np.float32 and full.min() >= 0
    np.testing.assert_allclose(full.sum(axis=(1, 2, 3), dtype=np.float64), (16 * particles) ** 3, rtol=1e-6)
    spread = full.std(axis=(1, 2, 3))
    assert spread[0] > spread[1] > spread[2] > 0


def test_universes_differ_in_parameters_and_initial_conditions():
    recipe = Recipe(8, 0, 16.0, (0.0,))
    first, second = make_universe(recipe, 0), make_universe(recipe, 1)
    assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.3
    np.testing.assert_array_equal(make_universe(recipe, 1), second)
    assert not np.array_equal(make_universe(Recipe(8, 1, 16.0, (0.0,)), 1), second)


@pytest.mark.parametrize("stride,longest", [(1, 2.5), (10, 4.5)], ids=["all universes", "every tenth"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_parameters_fill_their_ranges(stride, longest, seed):
    """The longest gap along any parameter, in mean gaps; 4 times 64 independent draws leave one of 5.6 on average."""
    unit = np.array([draw_parameters(i, seed)[1] for i in range(0, 64 * stride, stride)])
    physical = np.array([draw_parameters(i, seed)[0] for i in range(0, 64 * stride, stride)])
    assert unit.min() >= -1 and unit.max() < 1
    for j, (_, low, high) in enumerate(PARAMETERS):
        np.testing.assert_allclose(physical[:, j], low + (high - low) * (unit[:, j] + 1) / 2, rtol=1e-12)
        gaps = np.diff(np.concatenate([[-1], np.sort(unit[:, j]), [1]]))
        assert gaps.max() < longest * 2 / 64
        assert abs(unit[:, j].mean()) < 0.15
    assert np.abs(np.corrcoef(unit.T) - np.eye(4)).max() < 0.4


def test_options_out_of_range_are_refused(tmp_path):
    for options, message in [
        ({"universes": 0}, "0 universes"),
        ({"width": 2}, "width is 2 voxels"),
        ({"redshifts": 5}, "5 redshifts: 1 to 4"),
        ({"redshifts": [-1.0]}, "none below 0"),
        ({"box": -3.0}, "it is a length"),
        ({"particles": 0}, "at least 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            make_cosmology(tmp_path / "none", **OPTIONS | options)
    assert not (tmp_path / "none").exists()
