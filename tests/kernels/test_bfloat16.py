"""Convolution in bfloat16: rounded operands, float32 sums; equal on any number of ranks; refused where missing."""

import os
import subprocess
import sys

import numpy as np
import pytest
from mpi4py import MPI

import hpcpar as hp
from hpcpar import functional as F
from hpcpar import kernels, nn
from hpcpar.models import Spread, UNet3d, place

MISSING = kernels.bfloat16_missing()
RANKS = MPI.COMM_WORLD.Get_size()
L = hp.Layout
native = pytest.mark.skipif(bool(MISSING), reason=f"no bfloat16 compute: {MISSING}")
either_way = pytest.mark.usefixtures("instructions")

GEOMETRIES = {
    "padded": ((2, 5, 9, 8, 7), (6, 5, 3, 3, 3), (1, 1, 1), ((1, 1),) * 3, (1, 1, 1), 1),
    "strided": ((1, 4, 9, 8, 7), (8, 4, 3, 3, 3), (2, 2, 1), ((1, 1),) * 3, (1, 1, 1), 1),
    "even kernel": ((1, 16, 8, 8, 8), (16, 16, 2, 2, 2), (2, 2, 2), ((0, 0),) * 3, (1, 1, 1), 1),
    "halo on one side": ((1, 3, 7, 6, 5), (7, 3, 3, 3, 3), (1, 1, 1), ((0, 1), (2, 0), (1, 1)), (1, 1, 1), 1),
    "cropped": ((1, 3, 9, 9), (4, 3, 3, 3), (1, 1), ((-1, -2), (1, -1)), (1, 1), 1),
    "groups": ((2, 6, 9, 8), (9, 2, 3, 3), (1, 2), ((1, 1),) * 2, (1, 1), 3),
    "depthwise": ((1, 8, 11), (8, 1, 5), (1,), ((2, 2),), (1,), 8),
    "dilated": ((1, 4, 12, 11), (5, 4, 3, 2), (1, 1), ((2, 2), (1, 0)), (2, 3), 1),
    "one channel": ((1, 1, 10, 10, 10), (16, 1, 3, 3, 3), (1, 1, 1), ((1, 1),) * 3, (1, 1, 1), 1),
    "no samples": ((0, 3, 5, 5), (4, 3, 3, 3), (1, 1), ((1, 1),) * 2, (1, 1), 1),
    "no planes": ((1, 3, 0, 5), (4, 3, 3, 3), (1, 1), ((1, 1),) * 2, (1, 1), 1),
    "no channels": ((1, 0, 5, 5), (4, 0, 3, 3), (1, 1), ((1, 1),) * 2, (1, 1), 1),
}


def drawn(seed, *shapes):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def close(got, want, within=1e-5):
    assert got.dtype == np.float32 and got.shape == want.shape
    assert np.abs(got - want).max(initial=0) <= within * np.abs(want).max(initial=0)


def rounded(*arrays):
    return [kernels.round_to_bfloat16(a).astype(np.float64) for a in arrays]


@pytest.mark.serial
def test_rounding_is_to_the_nearest_and_of_ties_to_even():
    a = np.array([1, 1 + 2**-8, 1 + 2**-8 + 2**-20, 1 + 3 * 2**-8, -3.14159, np.inf, np.nan], np.float32)
    want = [1, 1, 1 + 2**-7, 1 + 2**-6, -3.140625, np.inf, np.nan]
    np.testing.assert_array_equal(kernels.round_to_bfloat16(a), np.array(want, np.float32))


@native
@pytest.mark.serial
@pytest.mark.parametrize("order", ["channels last", "channels first", "with gaps"])
def test_every_kernel_rounds_as_the_reference_does(order, monkeypatch):
    from hpcpar.kernels.cpu.onednn.library import load
    from hpcpar.kernels.cpu.onednn.operands import way

    (a,) = drawn(1, (2, 5, 7, 6))
    a[0, 0, 0, :5] = [1 + 2**-8, 1 + 3 * 2**-8, np.inf, -(1 + 2**-8), -np.inf]
    a = {"channels last": kernels.to_channels_last(a), "channels first": a, "with gaps": a[:, ::2, 1:]}[order]
    with kernels.use(elementwise="numpy"):
        want = kernels.round_to_bfloat16(a)
    monkeypatch.setitem(load().__dict__, "bfloat16_by_float32", False)
    bits = way("bfloat16").activation(a).astype(np.uint32) << 16
    np.testing.assert_array_equal(bits.view(np.float32), want)
    monkeypatch.setitem(load().__dict__, "bfloat16_by_float32", True)
    np.testing.assert_array_equal(way("bfloat16").activation(a), want)
    assert np.isnan(kernels.round_to_bfloat16(np.array([np.nan, -np.nan] * 400, np.float32))).all()


@either_way
@pytest.mark.serial
@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("order", ["channels last", "channels first"])
def test_three_passes_equal_float64_passes_of_the_rounded_operands(name, order):
    x_shape, w_shape, *geometry = GEOMETRIES[name]
    x, w, bias = drawn(2, x_shape, w_shape, w_shape[:1])
    x = kernels.to_channels_last(x) if order == "channels last" else x
    y = kernels.conv_forward(x, w, bias, *geometry, compute_dtype="bfloat16")
    (dy,) = drawn(3, y.shape)
    x64, w64, dy64 = rounded(x, w, dy)
    close(y, kernels.conv_forward(x64, w64, bias.astype(np.float64), *geometry))
    dx = kernels.conv_backward_data(dy, w, x.shape, *geometry, compute_dtype="bfloat16")
    close(dx, kernels.conv_backward_data(dy64, w64, x.shape, *geometry))
    dw = kernels.conv_backward_weight(x, dy, w.shape, *geometry, compute_dtype="bfloat16")
    close(dw, kernels.conv_backward_weight(x64, dy64, w.shape, *geometry))


@either_way
@pytest.mark.serial
def test_a_result_is_added_to_and_bent_as_in_float32():
    x, w, first = drawn(4, (1, 16, 6, 6, 6), (16, 16, 3, 3, 3), (1, 16, 6, 6, 6))
    geometry = ((1, 1, 1), ((1, 1),) * 3, (1, 1, 1))
    out = kernels.to_channels_last(first.copy())
    kernels.conv_forward(x, w, None, *geometry, out=out, slope=0.1, accumulate=True, compute_dtype="bfloat16")
    want = first + kernels.conv_forward(*rounded(x, w), None, *geometry)
    close(out, np.where(want > 0, want, 0.1 * want))


@pytest.mark.serial
def test_kernels_of_a_network_run_on_the_instructions_that_were_asked_for(instructions):
    from hpcpar.kernels.cpu.onednn.primitive import thread

    x, w = drawn(5, (1, 16, 12, 12, 12), (32, 16, 3, 3, 3))
    geometry = ((1, 1, 1), ((1, 1),) * 3, (1, 1, 1))
    thread()._cache.clear()
    y = kernels.conv_forward(x, w, None, *geometry, compute_dtype="bfloat16")
    kernels.conv_backward_data(y, w, x.shape, *geometry, compute_dtype="bfloat16")
    kernels.conv_backward_weight(x, y, w.shape, *geometry, compute_dtype="bfloat16")
    names = [kept.primitive.implementation for kept in thread()._cache.values() if hasattr(kept, "primitive")]
    assert len(names) == 3
    assert all(("bf16" in name or "amx" in name) == (instructions == "native") for name in names), names


ASK = """
import numpy as np
from hpcpar import kernels
x, geometry = np.ones((1, 3, 5, 5), np.float32), ((1, 1), ((1, 1),) * 2, (1, 1))
for call in (
    lambda: kernels.conv_forward(x, x[:1, :, :3, :3], None, *geometry, compute_dtype="bfloat16"),
    lambda: kernels.conv_backward_data(x, x[0, :, None, :3, :3], (1, 1, 5, 5), *geometry, compute_dtype="bfloat16"),
    lambda: kernels.conv_backward_weight(x, x, (3, 3, 3, 3), *geometry, compute_dtype="bfloat16"),
):
    try:
        call()
    except RuntimeError as error:
        print(error)
print(kernels.describe()[0].get("compute"))
"""


@pytest.mark.serial
def test_a_processor_without_it_is_an_error_and_never_emulated():
    if not kernels.available("onednn"):
        pytest.skip("oneDNN is not available")
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run([sys.executable, "-c", ASK], env=environment, capture_output=True, text=True, timeout=60)
    *errors, dtypes = done.stdout.splitlines()
    assert len(errors) == 3 and dtypes == "float32", done.stdout + done.stderr
    for error in errors:
        assert "bfloat16 compute is not available: it needs a processor with avx512_bf16" in error
        assert "AVX2" in error


@pytest.mark.serial
def test_other_arrays_than_float32_and_unknown_dtypes_are_refused():
    x, w = (a.astype(np.float64) for a in drawn(7, (1, 3, 5, 5), (4, 3, 3, 3)))
    with pytest.raises(ValueError, match="takes float32 arrays, got float64"):
        kernels.conv_forward(x, w, None, (1, 1), ((1, 1),) * 2, (1, 1), compute_dtype="bfloat16")
    with hp.Mesh(batch=RANKS), pytest.raises(ValueError, match="one of float32, bfloat16, got 'float16'"):
        F.conv2d(hp.tensor(x), hp.tensor(w), compute_dtype="float16")


def test_names_decide_which_convolutions_compute_in_bfloat16():
    with hp.Mesh(batch=RANKS):
        model = UNet3d(base=2, levels=1)
    assert nn.set_compute_dtype(model, "bfloat16", keep=("down*.conv1", "head")) == [
        "down0.conv2", "bottom.conv1", "bottom.conv2", "up0", "merge0.conv1", "merge0.conv2"]
    assert model.head.compute_dtype == "float32" and "compute_dtype=bfloat16" in repr(model.up0)
    with pytest.raises(ValueError, match="tail: no layer that multiplies has such a name"):
        nn.set_compute_dtype(model, "bfloat16", keep=("tail",))


def layer(mesh, name, layout, stride):
    """Result and gradients, gathered, of one layer whose input lies as given."""
    x, w, b, seed = drawn(8, (2, 4, 9, 8, 6), (4, 4, 3, 3, 3), (4,), (2, 4, 17, 16, 12))
    with mesh:
        x, w, b = (hp.tensor(a, layout=how, requires_grad=True) for a, how in ((x, layout), (w, L()), (b, L())))
        y = getattr(F, name)(x, w, b, stride=stride, padding=1, compute_dtype="bfloat16")
        (y * hp.tensor(seed[tuple(slice(n) for n in y.shape)], layout=y.layout)).sum().backward()
        return [a.numpy() for a in (y, x.grad, w.grad, b.grad)]


WAYS = """
import warnings
import numpy as np
from hpcpar import kernels
x = np.ones((1, 3, 5, 5), np.float32)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    kernels.conv_forward(x, x[:1, :, :3, :3], None, (1, 1), ((1, 1),) * 2, (1, 1), compute_dtype="bfloat16")
print(len(said), any("by instructions for float32" in str(w.message) for w in said))
print(kernels.describe()[0]["compute"])
"""


@native
@pytest.mark.serial
@pytest.mark.parametrize("asked", ["native", "float32", "sometimes"])
def test_a_variable_chooses_the_instructions_and_both_the_warning_and_info_name_them(asked):
    environment = {**os.environ, "HPCPAR_BFLOAT16": asked}
    done = subprocess.run([sys.executable, "-c", WAYS], env=environment, capture_output=True, text=True, timeout=60)
    if asked == "sometimes":
        assert done.returncode and "HPCPAR_BFLOAT16='sometimes': expected one of native, float32" in done.stderr
    else:
        warned, info = done.stdout.splitlines()
        assert warned == ("1 True" if asked == "float32" else "0 False")
        assert ("by the faster instructions for float32" in info) == (asked == "float32")


def test_the_rounded_copies_are_counted_in_their_size(instructions):
    x, w = kernels.outline.empty((1, 8, 6, 6, 6), np.float32), kernels.outline.empty((8, 8, 3, 3, 3), np.float32)
    geometry = ((1, 1, 1), ((1, 1),) * 3, (1, 1, 1))
    peak = {}
    for compute_dtype in ("float32", "bfloat16"):
        with kernels.outline.keeping() as ledger:
            kernels.conv_forward(x, w, None, *geometry, compute_dtype=compute_dtype)
        peak[compute_dtype] = ledger.peak
    assert peak["bfloat16"] - peak["float32"] == 8 * 6**3 * (2 if instructions == "native" else 4)


@either_way
@pytest.mark.parametrize("name", ["conv3d", "conv_transpose3d"])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("dim", [0, 2, 3])
def test_a_split_layer_equals_the_whole_one(name, stride, dim):
    split = L(*[None] * dim, "part")
    mesh = hp.Mesh(part=RANKS)
    for got, want in zip(layer(mesh, name, split, stride), layer(mesh, name, L(), stride), strict=True):
        close(got, want)


WHOLE, SPLIT = Spread((), (), ((), (), ())), Spread((), (), (("depth",), (), ()))


def distance(a, b):
    """Of all arrays of a from those of b, in the Euclidean norm, relative to b."""
    square = sum(np.sum((a[name] - b[name]).astype(np.float64) ** 2) for name in b)
    return float(np.sqrt(square / sum(np.sum(b[name].astype(np.float64) ** 2) for name in b)))


def samples():
    (x,) = drawn(9, (2, 1, 8, 8, 8))
    return x, (x[:, 0] > 0.5).astype(np.int64)


def step(mesh, compute_dtype, spread):
    """Loss, gradients and weights of one step of a small U-Net."""
    hp.manual_seed(3)
    x, labels = samples()
    with mesh:
        model = UNet3d(base=4, levels=1)
        place(model, mesh, spread)
        weights = model.state_dict(numpy=True)
        nn.set_compute_dtype(model, compute_dtype)
        loss = F.cross_entropy(model(hp.tensor(x, layout=spread.volume)), hp.tensor(labels, layout=spread.labels))
        loss.backward()
        return loss.item(), {name: p.grad.numpy() for name, p in model.named_parameters()}, weights


@native
def test_smooth_layers_have_nearly_the_gradients_of_float32():
    def gradients(compute_dtype):
        hp.manual_seed(3)
        with hp.Mesh(batch=RANKS):
            layers = [nn.Conv3d(1, 8, 3, padding=1), nn.ConvTranspose3d(8, 8, 2, stride=2), nn.Conv3d(8, 3, 3)]
            x, labels = samples()
            x = hp.tensor(x)
            for layer in layers:
                layer.compute_dtype = compute_dtype
                x = F.tanh(layer(x))
            F.cross_entropy(x, hp.tensor(np.pad(labels, ((0, 0), *[(3, 3)] * 3)))).backward()
            return {str(i): layer.weight.grad.numpy() for i, layer in enumerate(layers)}

    want, got = gradients("float32"), gradients("bfloat16")
    for name in want:
        assert 1e-5 < distance({name: got[name]}, {name: want[name]}) < 2e-2, name


@native
def test_a_split_network_has_the_gradients_of_the_whole_one():
    mesh = hp.Mesh(depth=RANKS)
    loss, whole, _ = step(mesh, "bfloat16", WHOLE)
    split_loss, split, _ = step(mesh, "bfloat16", SPLIT)
    assert abs(split_loss - loss) <= 1e-5 * loss
    assert distance(split, whole) < 1e-3


@native
@pytest.mark.serial
def test_a_network_is_as_near_to_float32_as_torch_autocast():
    """Rounding flips some gates of ReLU and max pooling, so gradients of a network differ by more than rounding."""
    torch = pytest.importorskip("torch")
    from hpcpar.bench.theirs import UNet3d as Twin

    mesh = hp.Mesh(depth=1)
    loss, exact, weights = step(mesh, "float32", WHOLE)
    half_loss, half, _ = step(mesh, "bfloat16", WHOLE)
    assert half_loss != loss and abs(half_loss - loss) <= 1e-3 * loss
    twin = Twin(4, 1)
    twin.load_state_dict({name: torch.from_numpy(a.copy()) for name, a in weights.items()}, strict=False)
    x, labels = (torch.from_numpy(a) for a in samples())
    with torch.autocast("cpu", torch.bfloat16):
        output = twin(x)
    torch.nn.functional.cross_entropy(output.float(), labels).backward()
    theirs = {name: p.grad.numpy() for name, p in twin.named_parameters()}
    assert distance(half, exact) < 1.25 * distance(theirs, exact)


@native
@pytest.mark.serial
def test_the_reference_computes_what_the_library_declines_and_says_so():
    x, w = drawn(11, (1, 3, 5, 5), (4, 3, 3, 3))
    geometry = ((1, 1), ((1, 1),) * 2, (1, 1))
    want = kernels.conv_forward(x, w, None, *geometry, compute_dtype="bfloat16")
    kernels.registry._State.told.clear()
    with kernels.use(conv="numpy"), pytest.warns(kernels.KernelWarning, match="multiplied in float32"):
        close(kernels.conv_forward(x, w, None, *geometry, compute_dtype="bfloat16"), want)
