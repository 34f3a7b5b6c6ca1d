"""Save and load under any two layouts; the files as other programs see them; what a damaged one leads to."""

import shutil

import h5py
import numpy as np
import pytest

import hpcpar as hp
from hpcpar import nn
from hpcpar.checkpoint import CheckpointError, Folder, SaveError, Saver, choose
from hpcpar.checkpoint.reading import Checkpoint
from hpcpar.mesh import Mesh
from hpcpar.nn.state import assign
from hpcpar.testing import draw_layout, draw_mesh, run_cases

SHAPES = {"model/conv.weight": (5, 3, 3, 3, 3), "model/bias": (5,), "optimizer/exp_avg/conv.weight": (5, 3, 3, 3, 3)}


def make(shape, seed, dtype):
    values = np.random.default_rng(seed).normal(size=shape) * 100
    return values.astype(dtype)


def tensors(mesh, layouts):
    dtypes = ["<f4", "<f8", "<i8", "?", "<f2"]
    made = {}
    for seed, (name, (shape, layout)) in enumerate(layouts.items()):
        made[name] = hp.tensor(make(shape, seed, dtypes[seed % 5]), mesh=mesh, layout=layout)
    return made


def save(folder, comm, step=1, arrays=None, keep=3, state=None):
    saver = Saver(Folder(folder), comm, keep)
    return saver.save(step, arrays or {}, state or {"step": step})


def one_array(mesh, fill=0.0, length=1000):
    return {"model/w": hp.tensor(np.full(length, fill), mesh=mesh)}


def flip(path, at=None):
    """Change one byte in the middle of a file, or at a place."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if at is None else at] ^= 0x40
    path.write_bytes(content)


def shard_with(checkpoint, name):
    """The file and the place of the first bytes of an array."""
    path, piece, _ = checkpoint.arrays[name].pieces[0]
    with h5py.File(path) as file:
        return path, file[piece.path].id.get_offset()


def test_loads_under_any_other_mesh_and_layout(shared_path, comm):
    axes = ("depth", "batch", "model")

    def case(rng):
        shapes = [tuple(int(n) for n in rng.integers(0, 9, rng.integers(0, 4))) for _ in range(5)]
        mesh = draw_mesh(rng, axes)
        saved = tensors(mesh, {f"model/x{i}": (s, draw_layout(rng, s, mesh)) for i, s in enumerate(shapes)})
        number = int(rng.integers(1 << 30))
        path = save(shared_path / str(number), mesh.world, arrays=saved)
        other = draw_mesh(rng, axes)
        checkpoint = Checkpoint(path)
        for name, source in saved.items():
            target = hp.tensor(np.zeros(source.shape, source.dtype), other, draw_layout(rng, source.shape, other))
            assign(target, checkpoint.arrays[name])
            np.testing.assert_array_equal(target.numpy(), source.numpy(), strict=True)

    assert run_cases(case, 12).accepted == 12


def test_a_rank_reads_its_block_only(shared_path, comm, monkeypatch):
    mesh = Mesh(depth=-1)
    value = np.arange(24.0 * 5).reshape(24, 5)
    path = save(shared_path / "c", mesh.world, arrays={"model/w": hp.tensor(value, mesh, hp.Layout("depth"))})
    read = []
    original = h5py.Dataset.__getitem__

    def counting(dataset, index, *more):
        result = original(dataset, index, *more)
        read.append(np.asarray(result).nbytes)
        return result

    monkeypatch.setattr(h5py.Dataset, "__getitem__", counting)
    target = hp.tensor(np.zeros((24, 5)), mesh, hp.Layout(None, "depth"))
    assign(target, Checkpoint(path).arrays["model/w"])
    assert sum(read) == target.shard.nbytes
    np.testing.assert_array_equal(target.numpy(), value)
    mesh.free()


def test_other_programs_see_whole_arrays(shared_path, comm, monkeypatch):
    mesh = Mesh(model=-1)
    layouts = {name: (shape, hp.Layout("model")) for name, shape in SHAPES.items()}
    layouts["model/count"] = ((), hp.Layout())
    saved = tensors(mesh, layouts)
    path = save(shared_path / "c", mesh.world, arrays=saved, state={"step": 7, "loss": 0.5, "position": {"epoch": 2}})
    whole = {name: tensor.numpy() for name, tensor in saved.items()}
    monkeypatch.chdir("/")
    with h5py.File(path / "index.h5") as file:
        for name, value in whole.items():
            assert file[name].shape == value.shape and file[name].dtype == value.dtype
            np.testing.assert_array_equal(file[name][()], value)
        assert file.attrs["step"] == 7 and file.attrs["loss"] == 0.5 and file.attrs["position"] == '{"epoch": 2}'
    mesh.free()


def test_convolution_weights_are_stored_in_torch_shape(shared_path, comm):
    mesh = Mesh(batch=-1)
    with mesh:
        conv = nn.Conv3d(3, 4, 3)
    assert not conv.weight.shard.flags.c_contiguous  # kernel first in memory
    path = save(shared_path / "c", mesh.world, arrays={"model/weight": conv.weight})
    whole = conv.weight.numpy()
    with h5py.File(path / "index.h5") as file:
        assert file["model/weight"].shape == (4, 3, 3, 3, 3)
        np.testing.assert_array_equal(file["model/weight"][...], whole)
    mesh.free()


def test_training_goes_on_while_a_checkpoint_is_written(shared_path, comm):
    mesh = Mesh(batch=-1)
    arrays = one_array(mesh, 1.0)
    saver = Saver(Folder(shared_path / "c"), mesh.world)
    saver.start(5, arrays, {"step": 5})
    arrays["model/w"].shard[...] = 2.0  # the next step changes the weights
    assert saver.active
    while saver.active:
        saver.advance(int(mesh.world.all_reduce(np.array([saver.status()]), "max")[0]))
    assert saver.published == 5
    assert (Checkpoint(shared_path / "c" / "step-00000005").arrays["model/w"][...] == 1.0).all()
    mesh.free()


def test_what_is_steady_is_copied_in_the_background_until_settle(shared_path, comm):
    mesh = Mesh(batch=-1)
    arrays = {"model/w": one_array(mesh, 1.0, 400_000)["model/w"], "model/mean": one_array(mesh, 1.0)["model/w"]}
    saver = Saver(Folder(shared_path / "c"), mesh.world)
    for step in range(1, 6):
        for tensor in arrays.values():
            tensor.shard[...] = step
        saver.start(step, arrays, {}, steady={"model/w"})
        arrays["model/mean"].shard[...] = -1.0  # the next forward pass
        saver.settle()
        arrays["model/w"].shard[...] = -1.0  # the next optimizer step
        saver.finish()
        stored = Checkpoint(saver.folder.at(step)).arrays
        assert (stored["model/w"][...] == step).all() and (stored["model/mean"][...] == step).all()
    mesh.free()


def test_the_last_few_are_kept_and_latest_names_the_newest(shared_path, comm):
    mesh = Mesh(batch=-1)
    saver = Saver(Folder(shared_path / "c"), mesh.world, keep=2)
    for step in (10, 20, 30, 40):
        saver.save(step, one_array(mesh, step), {})
    assert Folder(shared_path / "c").steps() == [40, 30]
    assert Folder(shared_path / "c").latest() == "step-00000040"
    mesh.world.barrier()
    assert sorted(p.name for p in (shared_path / "c").iterdir()) == ["latest", "step-00000030", "step-00000040"]
    mesh.free()


@pytest.mark.parametrize("damage", ["value", "cut", "shard", "manifest", "index", "not finished"])
def test_a_damaged_checkpoint_is_passed_over_loudly(shared_path, comm, damage):
    mesh = Mesh(batch=-1)
    for step in (1, 2):
        save(shared_path / "c", mesh.world, step, one_array(mesh, step, 300_000))
    newest = shared_path / "c" / "step-00000002"
    if comm.rank == 0:
        path, at = shard_with(Checkpoint(newest), "model/w")
        if damage == "value":
            flip(path, at + 801)
        elif damage == "cut":
            path.write_bytes(path.read_bytes()[:-8])
        elif damage == "shard":
            path.unlink()
        elif damage == "index":
            flip(newest / "index.h5")
        elif damage == "manifest":
            flip(newest / "manifest.json")
        else:
            (newest / "manifest.json").unlink()
    mesh.world.barrier()
    said = []
    choice = choose(shared_path / "c", mesh.world, said.append)
    assert choice.checkpoint.step == 1 and list(choice.passed_over) == [newest]
    assert len(said) == (comm.rank == 0)
    if comm.rank == 0:
        assert "step-00000002 cannot be used" in said[0]
        assert {"value": "checksum of model/w", "cut": "bytes", "shard": "missing", "index": "index.h5",
                "manifest": "manifest.json is damaged", "not finished": "not finished"}[damage] in said[0]  # fmt: skip
    mesh.free()


def test_all_damaged_is_an_error_and_none_is_not(shared_path, comm):
    mesh = Mesh(batch=-1)
    assert choose(shared_path / "nothing", mesh.world, print).checkpoint is None
    path = save(shared_path / "c", mesh.world, 3, one_array(mesh))
    if comm.rank == 0:
        (path / "manifest.json").unlink()
    mesh.world.barrier()
    with pytest.raises(CheckpointError, match="no checkpoint in .* is whole:\n  step-00000003: .*not finished"):
        choose(shared_path / "c", mesh.world, lambda text: None)
    mesh.free()


def test_a_file_in_place_of_a_folder_is_told_on_all_ranks(shared_path, comm):
    mesh, path = Mesh(batch=-1), shared_path / "job.toml"
    if comm.rank == 0:
        path.write_text("[run]", encoding="utf-8")
    comm.barrier()
    with pytest.raises(NotADirectoryError, match="job.toml"):
        choose(path, mesh.world, lambda text: None)
    mesh.free()


@pytest.mark.ranks(min=2)
def test_what_one_rank_cannot_see_nobody_uses(shared_path, comm, monkeypatch):
    mesh = Mesh(batch=-1)
    for step in (1, 2):
        save(shared_path / "c", mesh.world, step, one_array(mesh, step))
    if comm.rank == 1:  # a network file system may show old contents on one node
        shutil.copytree(shared_path / "c", shared_path / "old")
        shutil.rmtree(shared_path / "old" / "step-00000002")
        original = Checkpoint.__init__

        def elsewhere(self, path):
            original(self, shared_path / "old" / path.name)

        monkeypatch.setattr(Checkpoint, "__init__", elsewhere)
    choice = choose(shared_path / "c", mesh.world, lambda text: None)
    assert choice.checkpoint.step == 1
    mesh.free()


def test_weights_that_are_not_finite_are_not_published(shared_path, comm):
    mesh = Mesh(batch=-1)
    save(shared_path / "c", mesh.world, 1, one_array(mesh, 1.0))
    broken = one_array(mesh, 1.0, 4)
    broken["model/w"].shard[2] = np.nan
    with pytest.raises(FloatingPointError, match="step 2 is not kept: rank 0: model/w is not finite"):
        save(shared_path / "c", mesh.world, 2, broken)
    assert Folder(shared_path / "c").steps() == [1]
    mesh.free()


def test_a_folder_that_cannot_be_made_is_an_error_on_all_ranks(shared_path, comm):
    mesh = Mesh(batch=-1)
    if comm.rank == 0:
        (shared_path / "file").write_text("")
    mesh.world.barrier()
    with pytest.raises(SaveError, match="checkpoint of step 1 cannot be written: .*file"):
        save(shared_path / "file" / "c", mesh.world, 1, one_array(mesh))
    mesh.free()


def test_an_array_that_fits_nobody_names_the_checkpoint(shared_path, comm):
    mesh = Mesh(batch=-1)
    path = save(shared_path / "c", mesh.world, 1, one_array(mesh))
    array = Checkpoint(path).arrays["model/w"]
    with pytest.raises(IndexError, match="step 1"):
        array[::2]
    np.testing.assert_array_equal(np.asarray(array), np.zeros(1000))
    mesh.free()


@pytest.mark.skipif(h5py.get_config().mpi, reason="this h5py was built with MPI")
def test_one_file_is_refused_with_the_reason_where_hdf5_is_serial(shared_path, comm):
    mesh = Mesh(batch=-1)
    with pytest.raises(ValueError, match="checkpoint.one_file needs an h5py built with MPI, and h5py .* is serial"):
        Saver(Folder(shared_path / "c"), mesh.world, one_file=True)
    mesh.free()


@pytest.mark.skipif(not h5py.get_config().mpi, reason="this h5py was built without MPI")
def test_one_file_holds_whole_arrays(shared_path, comm):
    mesh = Mesh(model=-1)
    layouts = {name: (shape, hp.Layout("model")) for name, shape in SHAPES.items()}
    saved = tensors(mesh, {**layouts, "model/count": ((), hp.Layout())})
    path = Saver(Folder(shared_path / "c"), mesh.world, one_file=True).save(1, saved, {})
    checkpoint = choose(path, mesh.world, print).checkpoint
    whole = {name: tensor.numpy() for name, tensor in saved.items()}
    for name, value in whole.items():
        np.testing.assert_array_equal(checkpoint.arrays[name][...], value)
        for file in ("arrays.h5", "index.h5"):
            with h5py.File(path / file, locking=False) as opened:
                np.testing.assert_array_equal(opened[name][()], value)
    mesh.free()
