"""The CUDA sources, compiled as C++ and run by one thread on this CPU: their arithmetic without a device.

The launcher's one function that touches the device is replaced by one that runs the compiled source; all else, the
sources and the Python around them, is what a device would get. With a CuPy device the kernels are compared on it.
"""

import shutil

import numpy as np
import pytest

from hpcpar import kernels
from hpcpar.kernels.generic import elementwise, embedding, norm, optimizer, pool, random, rotary, rows, softmax
from hpcpar.kernels.gpu import elementwise as gpu_elementwise
from hpcpar.kernels.gpu import embedding as gpu_embedding
from hpcpar.kernels.gpu import norm as gpu_norm
from hpcpar.kernels.gpu import optimizer as gpu_optimizer
from hpcpar.kernels.gpu import pool as gpu_pool
from hpcpar.kernels.gpu import random as gpu_random
from hpcpar.kernels.gpu import rotary as gpu_rotary
from hpcpar.kernels.gpu import rows as gpu_rows
from hpcpar.kernels.gpu import softmax as gpu_softmax

pytestmark = [pytest.mark.serial, pytest.mark.usefixtures("cuda_on_this_cpu"),
              pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ to compile the sources")]


def close(got, want, dtype, factor=1.0):
    tolerance = factor * (2e-6 if dtype == np.float32 else 1e-13)
    for a, b in zip(got, want, strict=True) if isinstance(got, tuple) else ((got, want),):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * (1 + np.abs(b).max(initial=0)))


@pytest.fixture(params=[np.float32, np.float64], ids=["float32", "float64"])
def dtype(request):
    return request.param


@pytest.fixture
def draw(rng, dtype):
    def array(*shape):
        return kernels.to_channels_last(rng.standard_normal(shape).astype(dtype))
    return array


def test_activations(draw, dtype, rng):
    x, g = draw(2, 3, 5, 6) * 3, draw(2, 3, 5, 6)
    for name, arguments in (("leaky_relu", (x, 0.1)), ("leaky_relu", (x, 0.0)), ("leaky_relu_backward", (g, x, 0.1)),
                            ("leaky_relu_backward", (g, x, 0.0)), ("gelu", (x,)), ("gelu", (x, True)),
                            ("gelu_backward", (g, x)), ("gelu_backward", (g, x, True)), ("sigmoid", (x,)),
                            ("sigmoid_backward", (g, x)), ("tanh_backward", (g, x)), ("silu", (x,)),
                            ("silu_backward", (g, x)), ("swiglu", (x, g)),
                            ("apply_mask", (x, rng.random(x.shape) < 0.5, 1.5))):
        got = getattr(gpu_elementwise, name)(*arguments)
        close(got, getattr(elementwise, name)(*arguments), dtype, 4)
        assert got.strides == x.strides
    close(gpu_elementwise.swiglu_backward(g, x, x), elementwise.swiglu_backward(g, x, x), dtype, 4)
    assert gpu_elementwise.gelu(x[..., ::2]) is NotImplemented


@pytest.mark.parametrize("per_sample", [False, True])
def test_norms(draw, dtype, rng, per_sample, monkeypatch):
    monkeypatch.setattr(gpu_norm, "LANES", 60)  # so that a lane sums several positions
    x, g = draw(2, 6, 7, 5) + 3, draw(2, 6, 7, 5)
    close(gpu_norm.channel_moments(x), norm.channel_moments(x), np.float64)
    close(gpu_norm.group_moments(x, 3), norm.group_moments(x, 3), np.float64)
    close(gpu_norm.channel_sums(x), norm.channel_sums(x), dtype)
    mean, inv = (norm.sample_moments(x)[0] if per_sample else norm.channel_moments(x)[0]), rng.random(6) + 0.5
    inv = np.broadcast_to(inv, mean.shape).copy()
    weight, bias = rng.standard_normal(6).astype(dtype), rng.standard_normal(6).astype(dtype)
    for slope in (None, 0.0, 0.2):
        y = norm.channel_normalize(x, mean, inv, weight, bias, slope)
        close(gpu_norm.channel_normalize(x, mean, inv, weight, bias, slope), y, dtype, 4)
        arguments = (g, x, mean, inv, weight, bias, slope)
        close(gpu_norm.channel_grad_sums(*arguments), norm.channel_grad_sums(*arguments), np.float64)
        arguments = (g, x, mean, inv, weight, mean * 0.1, mean * 0.2, bias, slope)
        close(gpu_norm.channel_grad_input(*arguments), norm.channel_grad_input(*arguments), dtype, 4)


def test_pools(draw, dtype, rng):
    for sizes, kernel, stride, lo in (((7, 6, 5), (3, 2, 3), (2, 2, 1), (1, 0, 2)), ((8, 5), (2, 3), (3, 1), (0, -1)),
                                      ((9,), (3,), (2,), (1,))):
        x = draw(2, 3, *sizes)
        x.flat[5] = np.nan
        valid = [(1, n - 1) for n in sizes]
        dilation = (1,) * len(sizes)
        for got, want in zip(gpu_pool.max_pool_forward(x, kernel, stride, dilation, None, valid),
                             pool.max_pool_forward(x, kernel, stride, dilation, None, valid), strict=True):
            np.testing.assert_array_equal(got, want)
            assert got.dtype == want.dtype
        x = draw(2, 3, *sizes)
        divisors = [rng.integers(1, 4, n // 2 + 1) for n in sizes]
        g = draw(2, 3, *(len(d) for d in divisors))
        for slope in (None, 0.1):
            arguments = (kernel, stride, lo, divisors)
            mine, theirs = kernels.empty_signs(x), kernels.empty_signs(x)
            close(gpu_pool.avg_pool_forward(x, *arguments, slope, signs=mine),
                  pool.avg_pool_forward(x, *arguments, slope, signs=theirs), dtype, 4)
            np.testing.assert_array_equal(mine, theirs)
            arguments = (g, x.shape, *arguments, mine, slope)
            close(gpu_pool.avg_pool_backward(*arguments), pool.avg_pool_backward(*arguments), dtype, 4)
        close(gpu_pool.sum_pool_forward(x, kernel, stride), pool.sum_pool_forward(x, kernel, stride), dtype, 4)


def test_cross_entropy(draw, dtype, rng):
    x = draw(2, 4, 3, 5) * 4
    x[0, :, 0, 0] = -np.inf
    target = rng.integers(-1, 5, (2, 3, 5))
    got = gpu_softmax.cross_entropy_forward(x, target)
    want = softmax.cross_entropy_forward(x, target)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    x = draw(2, 4, 3, 5)
    lse, soft, hard, smooth = (rng.random(target.shape).astype(dtype) for _ in range(4))
    for more in ((), (smooth,), (smooth, rng.random(4).astype(dtype))):
        close(gpu_softmax.cross_entropy_backward(x, target, lse, soft, hard, *more),
              softmax.cross_entropy_backward(x, target, lse, soft, hard, *more), dtype, 4)


def test_cross_entropy_over_a_vocabulary(dtype, rng):
    x = rng.standard_normal((3, 5, 300)).astype(dtype).transpose(0, 2, 1) * 4
    x[0, :, 1], x[1, 7:290, 2], x[2, 200, 3] = -np.inf, -np.inf, 90
    target = rng.integers(-1, 301, (3, 5))
    for got, want in zip(gpu_softmax.cross_entropy_forward(x, target), softmax.cross_entropy_forward(x, target),
                         strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6 if dtype == np.float32 else 1e-14)
    x[0, 250, 0] = np.nan
    assert np.isnan(gpu_softmax.cross_entropy_forward(x, target)[0][0, 0])


def test_tables(draw, dtype, rng):
    index = rng.integers(-2, 9, (3, 20))
    np.testing.assert_array_equal(gpu_embedding.take_rows(table := draw(7, 5), index),
                                  embedding.take_rows(table, index))
    g = rng.standard_normal((3, 20, 5)).astype(dtype)
    close(gpu_embedding.add_rows(g, index, 7), embedding.add_rows(g, index, 7), dtype, 4)


@pytest.mark.parametrize("affine", [False, True])
def test_norms_of_rows(dtype, rng, affine, monkeypatch):
    monkeypatch.setattr(gpu_rows, "PARTS", 3)  # so that each part sums several rows
    x, g = (np.asfortranarray(rng.standard_normal((7, 45)).astype(dtype) + shift) for shift in (3, 0))
    weight, bias = (rng.standard_normal(45).astype(dtype) if affine else None for _ in range(2))
    mean, m2 = rows.row_moments(x)
    close(gpu_rows.row_moments(x), (mean, m2), np.float64)
    close(gpu_rows.row_squares(x), rows.row_squares(x), np.float64)
    inv = 1 / np.sqrt(m2 / 45)
    close(gpu_rows.row_normalize(x, mean, inv, weight, bias), rows.row_normalize(x, mean, inv, weight, bias), dtype, 4)
    for got, want in zip(gpu_rows.row_grad_sums(g, x, mean, inv, weight), rows.row_grad_sums(g, x, mean, inv, weight),
                         strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5 if dtype == np.float32 else 1e-12, atol=1e-5)
    arguments = (g, x, mean, inv, weight, mean * 0.1, mean * 0.2)
    close(gpu_rows.row_grad_input(*arguments), rows.row_grad_input(*arguments), dtype, 8)


def test_rotations(dtype, rng):
    memory = rng.standard_normal((2, 5, 3, 10)).astype(dtype)
    for x in (memory, memory.transpose(0, 2, 1, 3)):
        for lead in ((), (2,)):
            cosine, sine = (rng.standard_normal((*lead, x.shape[2], 4)).astype(dtype) for _ in range(2))
            for interleaved in (False, True):
                got = gpu_rotary.rotate_pairs(x, cosine, sine, interleaved)
                close(got, rotary.rotate_pairs(x, cosine, sine, interleaved), dtype, 4)
                assert got.strides == x.strides


def test_optimizers(draw, dtype):
    g = draw(2, 3, 4, 5)
    for name, more in (("sgd_step", (0.1, 0.9, 0.2, 0.01, False, True)), ("sgd_step", (0.1, 0.9, 0.0, 0.01, True)),
                       ("adam_step", (3, 0.1, 0.8, 0.9, 1e-8, 0.1)), ("adamw_step", (3, 0.1, 0.8, 0.9, 1e-8, 0.1))):
        start = [np.abs(draw(2, 3, 4, 5)) for _ in range(4)]
        ours, theirs = ([a.copy(order="K") for a in start] for _ in range(2))
        for state, module in ((ours, gpu_optimizer), (theirs, optimizer)):
            if name == "sgd_step":
                module.sgd_step(state[0], g, state[1], *more, grad_scale=0.5)
                module.sgd_step(state[2], g, None, 0.1, weight_decay=0.1)
            else:
                getattr(module, name)(*(state[0], g, state[1], state[2]), *more, vmax=state[3], grad_scale=0.5)
        for a, b in zip(ours, theirs, strict=True):
            close(a, b, dtype, 4)


def test_random_numbers_are_the_hosts(dtype, rng):
    for shape in ((2, 3, 7, 9), (40, 11), (77,), (2, 3, 4, 5, 6)):
        box = [sorted(int(i) for i in rng.integers(0, n + 1, 2)) for n in shape]
        for name, tolerance in (("random_uniform", 0), ("random_normal", 1e-6 if dtype == np.float32 else 1e-13)):
            got = getattr(gpu_random, name)(2**63 + 1, 5, shape, box, dtype)
            want = getattr(random, name)(2**63 + 1, 5, shape, box, dtype)
            assert got.dtype == want.dtype and got.strides == want.strides
            np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)
        np.testing.assert_array_equal(gpu_random.dropout_mask(3, 4, shape, box, 0.3),
                                      random.dropout_mask(3, 4, shape, box, 0.3))


def test_on_a_device_every_operation_equals_the_cpu(dtype, rng, monkeypatch):
    cupy = pytest.importorskip("cupy")
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        pytest.skip(f"no CUDA device: {error}")
    monkeypatch.undo()
    x = kernels.to_channels_last(rng.standard_normal((2, 8, 6, 7, 5)).astype(dtype))
    w = rng.standard_normal((16, 8, 3, 3, 3)).astype(dtype)
    layer = ((1, 2, 1), ((1, 1),) * 3, (1, 1, 1), 1)
    gx, gw = cupy.asarray(x), cupy.asarray(w)
    y = kernels.conv_forward(x, w, None, *layer, slope=0.1)
    close(cupy.asnumpy(kernels.conv_forward(gx, gw, None, *layer, slope=0.1)), y, dtype, 10)
    gy = cupy.asarray(y)
    close(cupy.asnumpy(kernels.conv_backward_data(gy, gw, x.shape, *layer)),
          kernels.conv_backward_data(y, w, x.shape, *layer), dtype, 10)
    close(cupy.asnumpy(kernels.conv_backward_weight(gx, gy, w.shape, *layer)),
          kernels.conv_backward_weight(x, y, w.shape, *layer), dtype, 10)
    for call in (kernels.gelu, kernels.silu, kernels.leaky_relu, lambda a: kernels.channel_moments(a)[1],
                 lambda a: kernels.max_pool_forward(a, (2, 2, 2), (2, 2, 2), (1, 1, 1))[0],
                 lambda a: kernels.sum_pool_forward(a, (2, 2, 2), (2, 2, 2)), lambda a: kernels.softmax(a, 1)):
        close(cupy.asnumpy(call(gx)), call(x), dtype, 10)
