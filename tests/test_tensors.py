"""What a tensor is to NumPy and to format strings, and what is said of a value that lies on several ranks."""

from __future__ import annotations

import numpy as np
import pytest

import hpcpar as hp
from hpcpar.transport import counter

SPLIT = hp.Layout("depth")


@pytest.fixture
def mesh(comm):
    with hp.Mesh(comm=comm, depth=-1) as mesh:
        yield mesh
    mesh.free()


def test_numpy_takes_a_replicated_tensor_and_is_told_what_to_call_for_another(mesh):
    values = np.arange(12.0).reshape(4, 3)
    whole = hp.tensor(values)
    for made in (np.asarray(whole), np.array(whole), np.concatenate([whole, whole])[:4], hp.tensor(whole).numpy()):
        assert made.dtype == np.float64
        np.testing.assert_array_equal(made, values)
    assert np.asarray(whole, np.float32).dtype == np.float32
    copied = np.array(whole)
    copied[...] = 7
    np.testing.assert_array_equal(whole.shard, values)
    for apart in (hp.tensor(values, layout=SPLIT), hp.tensor(values, layout=SPLIT).sum(0)):
        if mesh.size == 1:
            np.testing.assert_array_equal(np.asarray(apart), apart.numpy())
            continue
        with counter.counting() as sent, pytest.raises(RuntimeError, match=r"several ranks as .*call \.numpy\(\)"):
            np.asarray(apart)
        assert not sent


def test_a_number_is_formatted_as_one(mesh):
    loss = hp.tensor(np.float64(2.0)) / 3.0
    assert f"{loss:.3f}" == "0.667" and f"{loss:>8.2e}" == "6.67e-01" and f"{loss}" == str(loss)
    if mesh.size > 1:
        with pytest.raises(RuntimeError, match=r"\.resolve\(\)"):
            format(hp.tensor(np.ones(5), layout=SPLIT).sum(), ".3f")
    with pytest.raises(TypeError, match="format"):
        format(hp.tensor(np.ones(2)), ".3f")


@pytest.mark.parametrize("layout", ["depth", ("depth",), ["depth", None]])
def test_what_is_no_layout_is_named_with_the_layout_that_was_meant(mesh, layout):
    for make in (lambda: hp.tensor(np.ones((4, 2)), layout=layout), lambda: hp.ones(4, 2, layout=layout),
                 lambda: hp.ones(4, 2).repartition(layout)):  # fmt: skip
        with pytest.raises(TypeError, match=r"like Layout\('depth'.*got"):
            make()
