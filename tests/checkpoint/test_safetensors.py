"""Weights out to .safetensors and back in: names, shapes and bits; torch's model takes them."""

import json

import numpy as np
import pytest

import hpcpar as hp
from hpcpar import nn
from hpcpar.checkpoint import Checkpoint, Folder, Saver, restore_model
from hpcpar.checkpoint.safetensors import export_weights, import_weights
from hpcpar.checkpoint.training import model_tensors
from hpcpar.mesh import Mesh

pytestmark = pytest.mark.serial
library = pytest.importorskip("safetensors.numpy", reason="the package safetensors is not installed")


def make_model():
    return nn.Sequential(nn.Conv3d(2, 5, 3), nn.BatchNorm3d(5), nn.ConvTranspose3d(5, 3, 2, 2), nn.Linear(4, 7))


@pytest.fixture
def mesh():
    mesh = Mesh(batch=-1)
    with mesh:
        yield mesh
    mesh.free()


@pytest.fixture
def saved(mesh, tmp_path):
    """A model and its checkpoint."""
    hp.manual_seed(1)
    model = make_model()
    tensors, shown = model_tensors(model)
    return model, Checkpoint(Saver(Folder(tmp_path / "c"), mesh.world).save(12, tensors, {"step": 12}, shown))


def test_one_file_has_torch_names_and_shapes(saved, tmp_path):
    model, checkpoint = saved
    assert export_weights(checkpoint, tmp_path / "sub" / "m.safetensors") == [tmp_path / "sub" / "m.safetensors"]
    read = library.load_file(tmp_path / "sub" / "m.safetensors")
    state = model.state_dict(numpy=True)
    assert set(read) == set(state)
    for name, value in state.items():
        np.testing.assert_array_equal(read[name], value, strict=True)


def test_torch_takes_the_file(saved, tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    model, checkpoint = saved
    export_weights(checkpoint, tmp_path / "m.safetensors")
    twin = torch.nn.Sequential(
        torch.nn.Conv3d(2, 5, 3), torch.nn.BatchNorm3d(5), torch.nn.ConvTranspose3d(5, 3, 2, 2), torch.nn.Linear(4, 7)
    )
    twin.load_state_dict(load_file(tmp_path / "m.safetensors"))
    x = np.random.default_rng(0).normal(size=(2, 2, 4, 4, 4)).astype(np.float32)
    with torch.no_grad():
        expected = twin.eval()(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(model.eval()(hp.tensor(x)).numpy(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("limit", [None, 300, 1 << 30])
def test_back_again_bit_by_bit(saved, tmp_path, limit):
    model, checkpoint = saved
    out = tmp_path / ("m.safetensors" if limit is None else "many")
    files = export_weights(checkpoint, out, limit)
    if limit == 300:
        assert len(files) > 4 and files[-1].name == "model.safetensors.index.json"
        index = json.loads(files[-1].read_text())
        assert index["metadata"]["total_size"] == sum(v.nbytes for v in model.state_dict(numpy=True).values())
        for name, file in index["weight_map"].items():
            assert name in library.load_file(out / file)
        sizes = [sum(v.nbytes for v in library.load_file(f).values()) for f in files[:-1]]
        assert all(size <= 300 or len(library.load_file(f)) == 1 for size, f in zip(sizes, files[:-1], strict=True))
    imported = Checkpoint(import_weights(out, tmp_path / "imported"))
    imported.verify()
    hp.manual_seed(2)
    other = make_model()
    restore_model(imported, other)
    for name, value in model.state_dict(numpy=True).items():
        np.testing.assert_array_equal(other.state_dict(numpy=True)[name], value, strict=True)


def test_weights_that_are_kept_unflattened_are_exported_flat(mesh, tmp_path):
    model = nn.Linear(24, 3, in_dims=(2, 3, 4))
    tensors, shown = model_tensors(model)
    checkpoint = Checkpoint(Saver(Folder(tmp_path / "c"), mesh.world).save(1, tensors, {}, shown))
    export_weights(checkpoint, tmp_path / "m.safetensors")
    assert library.load_file(tmp_path / "m.safetensors")["weight"].shape == (3, 24)
    other = nn.Linear(24, 3, in_dims=(2, 3, 4))
    restore_model(Checkpoint(import_weights(tmp_path / "m.safetensors", tmp_path / "i")), other)
    np.testing.assert_array_equal(other.weight.numpy(), model.weight.numpy())


def test_mistakes_are_named(saved, tmp_path):
    _, checkpoint = saved
    with pytest.raises(ValueError, match="ends in .safetensors"):
        export_weights(checkpoint, tmp_path / "weights.pt")
    with pytest.raises(FileNotFoundError, match="none.safetensors does not exist"):
        import_weights(tmp_path / "none.safetensors", tmp_path / "i")
    (tmp_path / "text.safetensors").write_text("no weights here")
    with pytest.raises(ValueError, match="text.safetensors cannot be read"):
        import_weights(tmp_path / "text.safetensors", tmp_path / "i")
    assert Folder(tmp_path / "i").steps() == []
