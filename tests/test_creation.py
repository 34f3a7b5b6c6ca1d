"""Tensors made from arrays, numbers, ranges and random streams: torch's arguments, the same values everywhere."""

from __future__ import annotations

import numpy as np
import pytest

import hpcpar as hp

torch = pytest.importorskip("torch")
SHAPE = (5, 3)


@pytest.fixture
def split(comm):
    mesh = hp.Mesh(comm=comm, depth=-1)
    yield {"mesh": mesh, "layout": hp.Layout("depth")}
    mesh.free()


@pytest.mark.parametrize("name", ["zeros", "ones", "rand", "randn"])
def test_a_shape_is_given_as_numbers_or_as_one_tuple(split, name):
    make = getattr(hp, name)
    hp.manual_seed(3)
    one = make(*SHAPE, dtype=np.float64, **split)
    hp.manual_seed(3)
    other = make(SHAPE, dtype=np.float64, mesh=split["mesh"])
    assert one.shape == other.shape == SHAPE
    assert one.shard.shape[0] <= -(-SHAPE[0] // split["mesh"].size)
    np.testing.assert_array_equal(one.numpy(), other.numpy())


@pytest.mark.parametrize("name", ["zeros", "ones", "rand", "randn", "full", "arange"])
def test_made_tensors_take_gradients_on_request(split, name):
    given = {"full": (SHAPE, 2), "arange": (0, 5, 0.5)}.get(name, SHAPE)
    x = getattr(hp, name)(*given, requires_grad=True, **split)
    (x * x).sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), 2 * x.numpy())
    with pytest.raises(RuntimeError, match="floating point"):
        getattr(hp, name)(*given, requires_grad=True, **{**split, "dtype": np.int64})


@pytest.mark.parametrize(
    "given", [(7,), (0,), (2, 9), (2, 9, 3), (9, 2, -2), (0, 1, 0.25), (1.5,), (1, 0, -0.3), (4, 4)]
)
def test_a_range_is_torchs(split, given):
    made, wanted = hp.arange(*given, **split), torch.arange(*given)
    assert made.shape == tuple(wanted.shape) and str(made.dtype) == str(wanted.dtype).split(".")[1]
    np.testing.assert_allclose(made.numpy(), wanted.numpy(), rtol=1e-6)


@pytest.mark.parametrize("given", [(3, 1), (1, 3, -1), (1, 3, 0)])
def test_a_range_that_leads_nowhere_is_an_error_of_all_ranks(split, given):
    with pytest.raises(ValueError, match="no steps of"):
        hp.arange(*given, **split)


@pytest.mark.parametrize("shape", [(2.0, 3), (-1,), ((2, "3"),)])
def test_what_is_no_shape_is_named(split, shape):
    for name in ("zeros", "randn"):
        with pytest.raises(ValueError, match="whole numbers >= 0"):
            getattr(hp, name)(*shape, **split)


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, bool])
def test_only_floating_point_tensors_require_gradients(split, dtype):
    whole = hp.tensor(np.ones(4, dtype), **split)
    with pytest.raises(RuntimeError, match="only floating point"):
        hp.tensor(np.ones(4, dtype), requires_grad=True, **split)
    with pytest.raises(RuntimeError, match="only floating point"):
        hp.from_shard(whole.shard, (4,), requires_grad=True, **split)


@pytest.mark.parametrize("values", [["a", "b"], [None, 1], np.array(["2026-12-01"], "M8[D]")])
def test_what_is_no_number_makes_no_tensor(split, values):
    with pytest.raises(TypeError, match="holds numbers"):
        hp.tensor(np.asarray(values), **split)
