"""Convolution against torch, and against its definition where torch has no word for the geometry."""

import itertools

import numpy as np
import pytest

from hpcpar import kernels

FAMILY = "conv"
ORDERS = ("last", "first", "gaps", "reversed")
pytestmark = pytest.mark.serial


def by_definition(x, w, out, stride, lo, dilation, groups):
    """``y[o] = sum_k x[o * stride - lo + k * dilation] w[k]`` as loops; the three passes are its derivatives."""
    y = np.zeros((x.shape[0], w.shape[0], *out))
    for where, o, k in pairs(x.shape[2:], w.shape[2:], out, stride, lo, dilation):
        for group in range(groups):
            cs, ocs = channels(w.shape, group, groups)
            y[(slice(None), ocs, *o)] += x[(slice(None), cs, *where)] @ w[(ocs, slice(None), *k)].T
    return y


def data_by_definition(dy, w, x_shape, stride, lo, dilation, groups):
    dx = np.zeros(x_shape)
    for where, o, k in pairs(x_shape[2:], w.shape[2:], dy.shape[2:], stride, lo, dilation):
        for group in range(groups):
            cs, ocs = channels(w.shape, group, groups)
            dx[(slice(None), cs, *where)] += dy[(slice(None), ocs, *o)] @ w[(ocs, slice(None), *k)]
    return dx


def weight_by_definition(x, dy, w_shape, stride, lo, dilation, groups):
    dw = np.zeros(w_shape)
    for where, o, k in pairs(x.shape[2:], w_shape[2:], dy.shape[2:], stride, lo, dilation):
        for group in range(groups):
            cs, ocs = channels(w_shape, group, groups)
            dw[(ocs, slice(None), *k)] += dy[(slice(None), ocs, *o)].T @ x[(slice(None), cs, *where)]
    return dw


def channels(w_shape, group, groups):
    c, oc = w_shape[1], w_shape[0] // groups
    return slice(group * c, (group + 1) * c), slice(group * oc, (group + 1) * oc)


def pairs(sizes, kernel, out, stride, lo, dilation):
    for o in np.ndindex(*out):
        for k in np.ndindex(*kernel):
            where = tuple(i * s - b + j * d for i, s, b, j, d in zip(o, stride, lo, k, dilation, strict=True))
            if all(0 <= i < n for i, n in zip(where, sizes, strict=True)):
                yield where, o, k


def draw(rng):
    """A random layer whose x, y and padding need not fit together."""
    nd = int(rng.integers(1, 4))
    groups = int(rng.choice([1, 1, 1, 2, 3]))
    c, oc = (groups * int(rng.integers(1, 4)) for _ in range(2))
    small = {1: 12, 2: 7, 3: 5}[nd]
    return {
        "x_shape": (int(rng.integers(0, 3)), c, *rng.integers(0, small, nd)),
        "out": tuple(int(n) for n in rng.integers(0, small, nd)),
        "w_shape": (oc, c // groups, *(int(k) for k in rng.integers(1, 5 if nd < 3 else 4, nd))),
        "stride": tuple(int(s) for s in rng.integers(1, 5, nd)),
        "dilation": tuple(int(d) for d in rng.integers(1, 4, nd)),
        "padding": tuple((int(a), int(b)) for a, b in rng.integers(-3, 5, (nd, 2))),
        "groups": groups,
    }


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_three_passes_equal_their_definition_for_any_geometry(implementation, arrange, seed, dtype):
    rng = np.random.default_rng(seed)
    tolerance = 1e-12 if dtype == np.float64 else 1e-5
    for case in range(30):
        layer = draw(rng)
        args = [layer[name] for name in ("stride", "padding", "dilation", "groups")]
        plain = (layer["stride"], [lo for lo, _ in layer["padding"]], layer["dilation"], layer["groups"])
        x, dy, w = (rng.standard_normal(s).astype(dtype) for s in (
            layer["x_shape"], (layer["x_shape"][0], layer["w_shape"][0], *layer["out"]), layer["w_shape"]))
        moved = [arrange(a, rng.choice(ORDERS)) for a in (x, dy)]
        x64, dy64, w64 = (a.astype(np.float64) for a in (x, dy, w))
        dx = kernels.conv_backward_data(moved[1], w, x.shape, *args)
        dw = kernels.conv_backward_weight(moved[0], moved[1], w.shape, *args)
        y = kernels.conv_forward(moved[0], w, None, *args)
        for name, got, want in (
            ("dx", dx, data_by_definition(dy64, w64, x.shape, *plain)),
            ("dw", dw, weight_by_definition(x64, dy64, w.shape, *plain)),
            ("y", y, by_definition(x64, w64, y.shape[2:], *plain)),
        ):
            scale = 1 + np.abs(want).max(initial=0)
            assert got.shape == want.shape and got.dtype == dtype
            assert np.abs(got - want).max(initial=0) <= tolerance * scale, (name, case, layer)


@pytest.mark.parametrize("nd", [1, 2, 3])
@pytest.mark.parametrize(("kernel", "stride", "dilation", "groups", "padding"), [
    (3, 1, 1, 1, 1), (3, 2, 1, 1, 1), (2, 2, 1, 1, 0), (4, 2, 1, 2, 1), (3, 1, 2, 4, 2), (1, 1, 1, 1, 0),
    (2, 5, 1, 1, 2), (5, 1, 1, 8, 2),
])
def test_layers_and_gradients_equal_torch(implementation, rng, nd, kernel, stride, dilation, groups, padding):
    torch = pytest.importorskip("torch")
    x, w, b = (torch.tensor(rng.standard_normal(s), requires_grad=True)
               for s in ((2, 8, *(7, 9, 6)[:nd]), (16, 8 // groups, *(kernel,) * nd), (16,)))
    call = {1: torch.nn.functional.conv1d, 2: torch.nn.functional.conv2d, 3: torch.nn.functional.conv3d}[nd]
    y = call(x, w, b, stride, padding, dilation, groups)
    g = torch.tensor(rng.standard_normal(y.shape))
    y.backward(g)
    args = ((stride,) * nd, ((padding, padding),) * nd, (dilation,) * nd, groups)
    for dtype, tolerance in ((np.float64, 1e-12), (np.float32, 1e-5)):
        xa, wa, ba, ga = (a.detach().numpy().astype(dtype) for a in (x, w, b, g))
        for got, want in (
            (kernels.conv_forward(xa, wa, ba, *args), y.detach()),
            (kernels.conv_backward_data(ga, wa, xa.shape, *args), x.grad),
            (kernels.conv_backward_weight(xa, ga, wa.shape, *args), w.grad),
        ):
            np.testing.assert_allclose(got, want.numpy(), rtol=tolerance, atol=tolerance * want.abs().max().item())


def test_results_lie_channels_last_and_weight_gradients_in_kernel_order(implementation, rng):
    x = rng.standard_normal((2, 16, 6, 5, 4)).astype(np.float32)
    w = rng.standard_normal((32, 16, 3, 3, 3)).astype(np.float32)
    args = ((1,) * 3, ((1, 1),) * 3, (1,) * 3, 1)
    y = kernels.conv_forward(x, w, None, *args)
    assert kernels.is_channels_last(y)
    assert kernels.is_channels_last(kernels.conv_backward_data(y, w, x.shape, *args))
    assert kernels.conv_backward_weight(x, y, w.shape, *args).transpose(2, 3, 4, 1, 0).flags.c_contiguous


def test_out_is_written_and_slope_is_leaky_relu(implementation, rng):
    x = rng.standard_normal((2, 4, 5, 6)).astype(np.float32)
    w, b = rng.standard_normal((8, 4, 3, 3)).astype(np.float32), rng.standard_normal(8).astype(np.float32)
    args = ((1, 1), ((1, 1), (0, 2)), (1, 1), 1)
    y = kernels.conv_forward(x, w, b, *args)
    for room in (np.empty_like(y), np.empty(y.shape, y.dtype), np.empty((*y.shape, 2), y.dtype)[..., 0]):
        for slope in (0.0, 0.01):
            assert kernels.conv_forward(x, w, b, *args, out=room, slope=slope) is room
            np.testing.assert_allclose(room, np.where(y > 0, y, np.float32(slope) * y), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("slope", [None, 0.1])
def test_the_convolution_of_concatenated_channels_is_the_accumulated_sum_over_the_parts(implementation, rng, slope):
    x, w = rng.standard_normal((2, 40, 6, 5, 7)), rng.standard_normal((16, 40, 3, 3, 3))
    b = rng.standard_normal(16)
    args = ((1, 2, 1), ((1, 1), (0, 1), (1, 0)), (1, 1, 1), 1)
    for dtype, tolerance in ((np.float32, 1e-5), (np.float64, 1e-13)):
        xs, ws, bs = (a.astype(dtype) for a in (x, w, b))
        whole = kernels.conv_forward(xs, ws, bs, *args, slope=slope)
        for room in (kernels.empty_channels_last(whole.shape, dtype), np.empty(whole.shape, dtype)):
            kernels.conv_forward(xs[:, :24], ws[:, :24], bs, *args, out=room)
            parts = kernels.conv_forward(xs[:, 24:], ws[:, 24:], None, *args, out=room, slope=slope, accumulate=True)
            assert parts is room
            np.testing.assert_allclose(parts, whole, rtol=tolerance, atol=tolerance * np.abs(whole).max())
    with pytest.raises(ValueError, match="accumulate"):
        kernels.conv_forward(xs, ws, bs, *args, accumulate=True)


def test_no_input_channels_give_the_bias_and_empty_blocks_give_zero_gradients(implementation):
    x, w = np.empty((2, 0, 5), np.float32), np.empty((3, 0, 2), np.float32)
    y = kernels.conv_forward(x, w, np.arange(3, dtype=np.float32), (1,), ((0, 0),), (1,), 1)
    assert y.shape == (2, 3, 4) and (y == np.arange(3).reshape(1, 3, 1)).all()
    w = np.ones((3, 2, 3), np.float32)
    nothing = np.empty((2, 3, 0), np.float32)
    assert not kernels.conv_backward_data(nothing, w, (2, 2, 4), (1,), ((1, 1),), (1,), 1).any()
    assert not kernels.conv_backward_weight(np.ones((2, 2, 0), np.float32), nothing, w.shape, (1,), ((1, 1),), (1,),
                                            1).any()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_generic_outputs_and_input_gradients_have_the_same_bits_under_any_cut(rng, dtype):
    for c, oc, k, s in ((1, 16, 3, 1), (5, 7, 3, 2), (33, 17, 3, 1), (16, 32, 4, 2), (64, 1, 5, 3)):
        x = rng.standard_normal((1, c, 23, 6, 7)).astype(dtype)
        w = rng.standard_normal((oc, c, k, k, k)).astype(dtype)
        with kernels.use(conv="numpy"):
            def forward(x, before, after, w=w, s=s):
                return kernels.conv_forward(x, w, None, (s,) * 3, ((before, after), (1, 1), (1, 1)), (1,) * 3, 1)

            whole = forward(x, 1, 1)
            grad = kernels.conv_backward_data(whole, w, x.shape, (s,) * 3, ((1, 1),) * 3, (1,) * 3, 1)
            n = whole.shape[2]
            for cut in range(1, n):
                parts = []
                for a, b in ((0, cut), (cut, n)):
                    first, end = a * s - 1, (b - 1) * s - 1 + k
                    block = x[:, :, max(0, first):min(23, end)]
                    parts.append(forward(block, max(0, -first), max(0, end - 23)))
                assert (np.concatenate(parts, axis=2) == whole).all(), (c, oc, k, s, cut)
            for a, b in itertools.pairwise((0, 4, 5, 14, 23)):
                part = kernels.conv_backward_data(whole, w, (1, c, b - a, 6, 7), (s,) * 3,
                                                  ((1 + a, 0), (1, 1), (1, 1)), (1,) * 3, 1)
                assert (part == grad[:, :, a:b]).all(), (c, oc, k, s, a, b)


@pytest.mark.parametrize(("x", "w", "stride", "padding", "groups", "message"), [
    ((1, 4, 5), (2, 3, 3), (1,), ((0, 0),), 1, "channels / groups"),
    ((1, 4, 5), (3, 2, 3), (1,), ((0, 0),), 2, "channels / groups"),
    ((1, 4, 5, 5), (2, 4, 3), (1,), ((0, 0),), 1, "spatial dims"),
    ((1, 4, 5), (2, 4, 3), (1, 1), ((0, 0),), 1, "spatial dims"),
])
def test_arguments_that_do_not_fit_are_named(implementation, x, w, stride, padding, groups, message):
    with pytest.raises(ValueError, match=message):
        kernels.conv_forward(np.zeros(x, np.float32), np.zeros(w, np.float32), None, stride, padding,
                             (1,) * len(stride), groups)
