"""Matrix products: every kernel against float64, in float32 and in two bytes; layers under split layouts."""

import numpy as np
import pytest

import hpcpar as hp
from hpcpar import Layout, kernels, nn
from hpcpar import functional as F
from hpcpar.kernels.precision import rounded
from hpcpar.testing import assert_close_everywhere

FAMILY = "matmul"
SHAPES = [(130, 257, 90), (1, 900, 1200), (64, 300, 64), (3, 2, 5), (2, 3, 0, 4), (0, 5, 7), (5, 0, 7), (6, 40, 90, 80)]
NARROW = ["bfloat16", "float16"]


def native(compute_dtype):
    missing = kernels.compute_missing(compute_dtype)
    return pytest.param(compute_dtype, marks=pytest.mark.skipif(bool(missing), reason=missing))


def operands(rng, shape, dtype, how):
    *batch, m, k, n = shape
    a, b = rng.standard_normal((*batch, m, k)).astype(dtype), rng.standard_normal((*batch, k, n)).astype(dtype)
    if how == "turned":
        a, b = (np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2) for x in (a, b))
    if how == "gaps":
        a, b = (np.repeat(np.repeat(x, 2, -1), 2, -2)[..., ::2, ::2] for x in (a, b))
    if how == "reversed":
        a, b = (np.ascontiguousarray(x[..., ::-1, :])[..., ::-1, :] for x in (a, b))
    return a, b


@pytest.mark.serial
@pytest.mark.parametrize("how", ["plain", "turned", "gaps", "reversed"])
@pytest.mark.parametrize(("dtype", "within"), [(np.float32, 1e-6), (np.float64, 1e-14)])
def test_products_equal_those_of_float64(implementation, rng, how, dtype, within):
    for shape in SHAPES:
        a, b = operands(rng, shape, dtype, how)
        got = kernels.matmul(a, b)
        want = np.matmul(a.astype(np.float64), b.astype(np.float64))
        assert got.dtype == dtype and got.shape == want.shape and got.flags.c_contiguous
        assert np.abs(got - want).max(initial=0) <= within * shape[-2] ** 0.5 * 8


@pytest.mark.serial
@pytest.mark.parametrize("compute_dtype", [native(d) for d in NARROW])
@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("how", ["plain", "turned", "gaps", "reversed"])
@pytest.mark.filterwarnings("ignore::hpcpar.kernels.KernelWarning")
def test_narrow_products_are_those_of_rounded_operands_summed_in_float32(implementation, rng, compute_dtype, how):
    for shape in SHAPES:
        a, b = operands(rng, shape, np.float32, how)
        got = kernels.matmul(a, b, compute_dtype)
        want = np.matmul(*(rounded(x, compute_dtype).astype(np.float64) for x in (a, b)))
        assert got.dtype == np.float32 and got.shape == want.shape
        scale = np.matmul(np.abs(a), np.abs(b)).max(initial=0)
        assert np.abs(got - want).max(initial=0) <= 2e-6 * scale
        if shape == SHAPES[0]:
            assert np.abs(got - a @ b).max() > 1e-5 * scale  # they were rounded


@pytest.mark.serial
@pytest.mark.parametrize("compute_dtype", [native("float16")])
def test_what_float16_cannot_hold_becomes_infinite(implementation, compute_dtype):
    a, b = np.full((4, 8), 7e4, np.float32), np.ones((8, 5), np.float32)
    with np.errstate(invalid="ignore"):
        assert np.isinf(kernels.matmul(a, b, compute_dtype)).all()
    assert np.isfinite(kernels.matmul(a, b)).all()


@pytest.mark.serial
def test_unknown_dtypes_and_wide_arrays_are_refused(implementation):
    a = np.ones((3, 3), np.float32)
    with pytest.raises(ValueError, match="compute_dtype is one of float32, bfloat16, float16, got 'int8'"):
        kernels.matmul(a, a, "int8")
    with pytest.raises(ValueError, match="bfloat16 compute takes float32 arrays, got float64"):
        kernels.matmul(a.astype(np.float64), a.astype(np.float64), "bfloat16")
    with pytest.raises(ValueError, match="compute_dtype is one of"):
        F.einsum("ij,jk->ik", hp.tensor(a, mesh=hp.Mesh(batch=1)), hp.tensor(a, mesh=hp.Mesh(batch=1)),
                 compute_dtype="half")


@pytest.mark.serial
@pytest.mark.parametrize("compute_dtype", NARROW)
def test_a_processor_without_the_dtype_refuses_it(monkeypatch, compute_dtype):
    if not kernels.available("onednn"):
        pytest.skip("oneDNN is not installed")
    from hpcpar.kernels.cpu.onednn.library import load

    monkeypatch.setitem(load().__dict__, compute_dtype, False)
    a = np.ones((3, 3), np.float32)
    with pytest.raises(RuntimeError, match=f"{compute_dtype} compute is not available: it needs a processor with"):
        kernels.matmul(a, a, compute_dtype)


def layer(mesh, compute_dtype, layouts, x_layout):
    """Output and gradients of a linear layer, as whole arrays."""
    rng = np.random.default_rng(8)
    x, w, b, g = (rng.standard_normal(s).astype(np.float32) for s in ((37, 24), (18, 24), (18,), (37, 18)))
    net = nn.Linear(24, 18, dtype=np.float32, layouts=layouts, compute_dtype=compute_dtype)
    net.load_state_dict({"weight": w, "bias": b})
    x = hp.tensor(x, layout=x_layout, requires_grad=True)
    y = net(x)
    (y * hp.tensor(g)).sum().backward()
    return [a.numpy() for a in (y, x.grad, net.weight.grad, net.bias.grad)]


@pytest.mark.parametrize("compute_dtype", [native(d) for d in NARROW])
@pytest.mark.parametrize("layouts", [
    ({}, Layout("batch")),
    ({"weight": Layout("batch"), "bias": Layout("batch")}, Layout()),
    ({"weight": Layout(None, "batch")}, Layout(None, "batch")),
], ids=["rows", "outputs", "inputs"])
def test_a_layer_in_two_bytes_is_the_same_under_every_layout(comm, compute_dtype, layouts):
    with hp.Mesh(comm, batch=comm.Get_size()) as mesh:
        whole = layer(mesh, compute_dtype, {}, Layout())
        split = layer(mesh, compute_dtype, *layouts)
        exact = layer(mesh, "float32", {}, Layout())
        for name, got, want, full in zip(("y", "dx", "dw", "db"), split, whole, exact, strict=True):
            assert_close_everywhere(mesh.world, got, want, 1e-5, name)
            error = np.abs(want - full).max() / np.abs(full).max()
            assert error <= 2 * kernels.ROUNDINGS[compute_dtype] and (error > 1e-6 or name == "db")


@pytest.mark.serial
@pytest.mark.parametrize("compute_dtype", [native("bfloat16")])
def test_a_layer_is_as_near_to_float32_as_that_of_torch(compute_dtype):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(9)
    x, w = rng.standard_normal((50, 64)).astype(np.float32), rng.standard_normal((30, 64)).astype(np.float32)
    with hp.Mesh(batch=1):
        ours = F.matmul(hp.tensor(x), hp.tensor(w.T), compute_dtype=compute_dtype).numpy()
    with torch.autocast("cpu", torch.bfloat16):
        theirs = torch.nn.functional.linear(torch.tensor(x), torch.tensor(w)).float().numpy()
    assert 0 < np.abs(ours - x @ w.T).max() <= np.abs(theirs - x @ w.T).max()


@pytest.mark.serial
def test_layers_are_set_by_name():
    model = nn.Sequential(nn.Conv1d(2, 3, 3), nn.Linear(4, 5), nn.Linear(5, 6))
    assert nn.set_compute_dtype(model, "bfloat16", keep=("1",)) == ["0", "2"]
    assert (model[1].compute_dtype, model[2].compute_dtype) == ("float32", "bfloat16")
    assert "compute_dtype=bfloat16" in repr(model[2])
    with pytest.raises(ValueError, match="0: Conv1d multiplies in float32 or bfloat16, not in float16; name it in"):
        nn.set_compute_dtype(model, "float16")
    assert nn.set_compute_dtype(model, "float16", keep=("0",)) == ["1", "2"]


def attention(comm, compute_dtype, context):
    """Output and gradients of attention over split tokens, as whole arrays."""
    rng = np.random.default_rng(10)
    q, k, v, g = (rng.standard_normal((2, h, 50, 16)).astype(np.float32) for h in (4, 2, 2, 4))
    axis = None if context is None else "sequence"
    layout = Layout(None, None, axis)
    with hp.Mesh(comm, sequence=comm.Get_size()) as mesh:
        tensors = [hp.tensor(a, layout=layout, requires_grad=True) for a in (q, k, v)]
        out = F.scaled_dot_product_attention(
            *tensors, is_causal=True, enable_gqa=True, context=context or "auto", compute_dtype=compute_dtype)
        (out * hp.tensor(g)).sum().backward()
        found = [t.numpy() for t in (out, *[t.grad for t in tensors])]
        assert len({a.tobytes() for a in mesh.world.gather_objects(found[0])}) == 1
        return found


@pytest.mark.parametrize("compute_dtype", [native(d) for d in NARROW])
@pytest.mark.parametrize("context", ["ring", "gather"])
def test_attention_in_two_bytes_is_the_same_where_tokens_are_split(comm, compute_dtype, context):
    exact, whole, split = (attention(comm, *how) for how in (("float32", None), (compute_dtype, None),
                                                            (compute_dtype, context)))
    for full, want, got in zip(exact, whole, split, strict=True):
        scale, part = np.abs(full).max(), kernels.ROUNDINGS[compute_dtype]
        assert part / 100 < np.abs(want - full).max() / scale < 6 * part
        # not more alike than that: weights are rounded when they are relative to the maximum of a block
        assert np.abs(got - full).max() / scale < 6 * part
