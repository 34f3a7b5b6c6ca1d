"""The brain data: right labels, sets that share no tissue, and files that are made once."""

import json
import sys

import h5py
import numpy as np
import pytest

from hpcpar.data import DataError, HDF5Dataset, Sharing
from hpcpar.data.brain import LABELS, cells, load_template, majority, make_brain

pytestmark = pytest.mark.serial
pytest.importorskip("nilearn", reason="the template comes with nilearn (extra: brain)")
pytest.importorskip("nibabel", reason="the template is read by nibabel (extra: brain)")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The 2 mm set."""
    out = tmp_path_factory.mktemp("brain")
    make_brain(out, spacing=2)
    return out


@pytest.fixture(scope="module")
def template():
    return load_template()


def read(path):
    with h5py.File(path) as file:
        return file["volume"][0], file["segmentation"][...]


def test_the_sets_have_sizes_that_suit_three_halvings(folder):
    for group, files in {"train": 8, "validation": 2, "test": 2, "mirror": 8, "whole": 2}.items():
        data = HDF5Dataset(folder / group, channels=1)
        data.verify()
        assert len(data) == files
        assert data.shape("volume") == (1, *data.shape("segmentation"))
        assert all(n % 8 == 0 for n in data.shape("segmentation"))
        assert (data.dtype("volume"), data.dtype("segmentation")) == (np.float32, np.uint8)
    assert json.loads((folder / "dataset.json").read_text())["sets"]["test"] == [
        "test/right-1-lower.h5",
        "test/right-1-upper.h5",
    ]


def test_no_tissue_of_the_test_is_in_training_or_validation_even_mirrored():
    def onto_the_left(box):
        (a, b), y, z = box
        return ((a, b) if b <= 98 else (197 - b, 197 - a), y, z)

    def meet(one, other):
        return all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(one, other, strict=True))

    boxes = {}
    for name, box in cells().items():
        boxes.setdefault(name.split("/")[0], []).append(onto_the_left(box))
    for first, second in [("train", "validation"), ("train", "test"), ("validation", "test"), ("mirror", "test")]:
        assert not any(meet(a, b) for a in boxes[first] for b in boxes[second])
    assert boxes["mirror"] == boxes["train"]


def test_the_template_is_symmetric_as_documented(template, folder):
    np.testing.assert_array_equal(template.intensity, template.intensity[::-1])
    np.testing.assert_array_equal(template.labels, template.labels[::-1])
    for name in ("0-lower", "3-upper"):
        pair = read(folder / f"train/left-{name}.h5"), read(folder / f"mirror/right-{name}.h5")
        for left, right in zip(*pair, strict=True):
            np.testing.assert_array_equal(left, right[:, :, ::-1])


def test_the_hemispheres_hold_the_whole_brain_but_its_middle_plane(template):
    boxes = cells()
    inside = np.zeros(template.labels.shape, bool)
    for side in ("left", "right"):
        inside[tuple(slice(a, b) for a, b in boxes[f"whole/{side}.h5"])] = True
    outside = template.labels.copy()
    outside[inside] = 0
    assert outside[98].any() and not np.delete(outside, 98, axis=0).any()


def test_labels_follow_from_the_maps(template):
    counts = np.bincount(template.labels.ravel())
    np.testing.assert_array_equal(counts, [6788750, 1091139, 635537, 159863])
    assert len(LABELS) == 4
    assert (template.intensity[template.labels == 0] == 0).all()
    means = [template.intensity[template.labels == k].mean() for k in range(4)]
    assert means[0] == 0 < means[3] < means[1] < means[2] < 1  # T1 contrast: fluid darkest, white matter brightest


def test_two_millimetres_are_means_and_majorities_of_one_millimetre(template, folder):
    volume, labels = read(folder / "validation/left-4-upper.h5")
    (x0, _), (y0, _), (z0, _) = cells()["validation/left-4-upper.h5"]
    rng = np.random.default_rng(0)
    for d, h, w in rng.integers(0, labels.shape, (300, 3)):
        cube = tuple(slice(start + 2 * i, start + 2 * i + 2) for start, i in ((x0, w), (y0, d), (z0, h)))
        assert volume[d, h, w] == np.float32(template.intensity[cube].astype(np.float64).mean())
        assert labels[d, h, w] == np.argmax(np.bincount(template.labels[cube].ravel()))
    tie = np.array([[[3, 3], [2, 2]], [[2, 2], [3, 3]]], np.uint8)
    assert majority(tie, 2).tolist() == [[[2]]]


def test_ranks_share_the_work_and_make_the_same_bytes(folder, tmp_path):
    for rank in (2, 0, 1):
        paths = make_brain(tmp_path, 2, Sharing(rank, 3))
    assert len(paths) == 22
    for path in paths:
        assert path.read_bytes() == (folder / path.relative_to(tmp_path)).read_bytes()


def test_whole_files_are_kept_damaged_ones_made_again_others_refused(folder, tmp_path):
    paths = make_brain(tmp_path, 2)
    paths[3].write_bytes(paths[3].read_bytes()[:5000])
    paths[5].unlink()
    stamps = {path: path.stat().st_mtime_ns for path in paths if path.exists()}
    lines = []
    make_brain(tmp_path, 2, Sharing(report=lines.append))
    assert lines == [f"brain, 2 mm: 2 files written, 20 already there, in {tmp_path}"]
    assert [path for path in stamps if path.stat().st_mtime_ns != stamps[path]] == [paths[3]]
    assert paths[3].read_bytes() == (folder / paths[3].relative_to(tmp_path)).read_bytes()
    assert not [p for p in tmp_path.rglob("*") if p.name.endswith(".partial")]
    with pytest.raises(DataError, match=r"left-0-lower.h5 was made from other parameters \(spacing: 2 there, 1 asked"):
        make_brain(tmp_path, 1)
    with pytest.raises(ValueError, match="spacing is 4 mm"):
        make_brain(tmp_path, 4)


@pytest.mark.parametrize("package", ["nilearn", "nibabel"])
def test_a_missing_package_is_named_with_the_extra_that_brings_it(package, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError, match=rf"{package} is not installed: pip install 'hpcpar\[brain\]'"):
        make_brain(tmp_path, 2)
