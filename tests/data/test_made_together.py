"""Data sets made by all ranks at once into one folder are those that one process makes."""

import pytest

from hpcpar.data import HDF5Dataset, Sharing
from hpcpar.data.commands import make_brain, make_cosmology


def assert_same_files(made, alone, comm):
    names = sorted(path.relative_to(alone) for path in alone.rglob("*") if path.is_file())
    assert names == sorted(path.relative_to(made) for path in made.rglob("*") if path.is_file())
    for name in names[comm.rank :: comm.size]:
        assert (made / name).read_bytes() == (alone / name).read_bytes()


def test_universes(shared_path, tmp_path_factory, comm):
    options = {"universes": 11, "width": 8, "redshifts": [0.0, 1.0], "seed": 2}
    lines = []
    paths = make_cosmology(shared_path, **options, sharing=Sharing(comm.rank, comm.size, lines.append))
    comm.barrier()
    assert len(paths) == 11 and all(path.exists() for path in paths)
    written, whose = len(range(comm.rank, 11, comm.size)), f" (rank {comm.rank} of {comm.size})" * (comm.size > 1)
    assert lines[-1] == f"cosmology: {written} files written, 0 already there, in {shared_path}{whose}"

    alone = tmp_path_factory.mktemp("alone")
    make_cosmology(alone, **options)
    assert_same_files(shared_path, alone, comm)
    comm.barrier()
    together = Sharing(comm.rank, comm.size, lines.append, comm.allgather)
    make_cosmology(shared_path, **options, sharing=together)
    assert lines[-1] == f"cosmology: 0 files written, 11 already there, in {shared_path}"
    assert len(HDF5Dataset(shared_path / "train")) == 9


def test_the_brain(shared_path, tmp_path_factory, comm):
    pytest.importorskip("nilearn", reason="the template comes with nilearn (extra: brain)")
    pytest.importorskip("nibabel", reason="the template is read by nibabel (extra: brain)")
    lines = []
    make_brain(shared_path, 2, Sharing(comm.rank, comm.size, lines.append, comm.allgather))
    assert lines == [f"brain, 2 mm: 22 files written, 0 already there, in {shared_path}"]
    comm.barrier()
    alone = tmp_path_factory.mktemp("alone")
    make_brain(alone, 2)
    assert_same_files(shared_path, alone, comm)
    comm.barrier()
