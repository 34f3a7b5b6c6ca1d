"""What a GPU must show: the same networks, losses and messages with CuPy arrays as with NumPy's.

Nothing here has run on a device yet (docs/sharp-bits.md); without one every test skips and says why.
"""

from __future__ import annotations

import numpy as np
import pytest

import hpcpar as hp
from hpcpar import functional as F
from hpcpar.mesh import Mesh
from hpcpar.primitives.repartition import move
from hpcpar.signature import signature


def _missing() -> str:
    try:
        import cupy

        cupy.cuda.runtime.getDeviceCount()
    except ImportError:
        return "CuPy is not installed (pip install 'hpcpar[gpu]')"
    except Exception as error:  # noqa: BLE001 - the runtime's own error types exist only where it is installed
        return f"no GPU can be used: {error}"
    return ""


REASON = _missing()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON or "a GPU is there")


@pytest.fixture
def mesh() -> Mesh:
    made = Mesh(batch=1, depth=-1)
    yield made
    made.free()


def on_gpu(array: np.ndarray, mesh: Mesh, layout: hp.Layout, requires_grad: bool = False) -> hp.Tensor:
    import cupy

    return hp.tensor(cupy.asarray(array), mesh, layout, requires_grad=requires_grad)


def test_a_network_gives_the_same_loss_and_gradients_as_on_the_host(mesh):
    from hpcpar.models import UNet3d

    rng = np.random.default_rng(0)
    volume, labels = rng.standard_normal((1, 1, 16, 12, 8)), rng.integers(0, 3, (1, 16, 12, 8))
    results = []
    for device in ("cpu", "gpu"):
        hp.manual_seed(0)
        with mesh, hp.nn.default_dtype("float64"):
            model = UNet3d(1, 3, base=2, levels=2)
        make = hp.tensor if device == "cpu" else on_gpu
        if device == "gpu":
            model.to(device="gpu")
        x = make(volume, mesh, hp.Layout("batch", None, "depth"))
        target = make(labels, mesh, hp.Layout("batch", "depth"))
        loss = F.cross_entropy(model(x), target)
        hp.parallel.GradientSync(model).backward(loss)
        results.append([float(loss), *[p.grad.numpy() for p in model.parameters()]])
    for host, device in zip(*results, strict=True):
        np.testing.assert_allclose(device, host, rtol=1e-10, atol=1e-12)


def test_a_message_waits_for_the_kernel_that_fills_its_buffer(mesh):
    import cupy

    n = 1 << 22
    split = signature(mesh, (n,), hp.Layout("depth"))
    whole = signature(mesh, (n,), hp.Layout())
    with cupy.cuda.Stream(non_blocking=True):
        block = cupy.zeros(split.local_shape, np.float64)
        for _ in range(200):  # work that is still running when the message is asked for
            block += 1
        gathered = move(block, split, whole)
        assert bool((gathered == 200).all())


def test_halos_travel_between_devices(mesh):
    rng = np.random.default_rng(1)
    volume, kernel = rng.standard_normal((1, 2, 12, 6, 6)), rng.standard_normal((3, 2, 3, 3, 3))
    layout = hp.Layout("batch", None, "depth")
    host = F.conv3d(hp.tensor(volume, mesh, layout), hp.tensor(kernel, mesh), padding=1).numpy()
    device = F.conv3d(on_gpu(volume, mesh, layout), on_gpu(kernel, mesh, hp.Layout()), padding=1).numpy()
    np.testing.assert_allclose(device, host, rtol=1e-12, atol=1e-12)


def test_a_configuration_trains_on_the_gpu(shared_path, comm):
    from hpcpar.testing.small_job import write_small_job
    from hpcpar.train.config import load_job
    from hpcpar.train.trainer import train

    if comm.rank == 0:
        write_small_job(shared_path)
    comm.barrier()
    job = load_job(shared_path / "job.toml", ['run.device="gpu"', "mesh.batch=1", "mesh.depth=-1"])
    assert np.isfinite(train(job)["loss"])


@pytest.mark.parametrize("context", ["ring", "all_to_all", "gather"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_attention_gives_the_same_output_and_gradients_as_on_the_host(mesh, context, dropout):
    rng = np.random.default_rng(2)
    q, k, v, g = (rng.standard_normal((2, h, 70, 16)) for h in (8, 8, 8, 8))
    layout = hp.Layout(None, None, "depth")
    results = []
    for make in (hp.tensor, on_gpu):
        hp.manual_seed(0)
        tensors = [make(a, mesh, layout, requires_grad=True) for a in (q, k, v)]
        out = F.scaled_dot_product_attention(
            *tensors, is_causal=True, dropout_p=dropout, window=(40, 0), context=context
        )
        (out * make(g, mesh, layout)).sum().backward()
        results.append([t.numpy() for t in (out, *[t.grad for t in tensors])])
    for host, device in zip(*results, strict=True):
        np.testing.assert_allclose(device, host, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("compute_dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_products_in_two_bytes_are_those_of_rounded_operands(compute_dtype, batch):
    import cupy

    from hpcpar import kernels
    from hpcpar.kernels.precision import rounded

    rng = np.random.default_rng(3)
    a, b = rng.standard_normal((*batch, 65, 200)), rng.standard_normal((*batch, 200, 33))
    a, b = a.astype(np.float32), b.astype(np.float32)
    got = cupy.asnumpy(kernels.matmul(cupy.asarray(a), cupy.asarray(b), compute_dtype))
    want = np.matmul(*(rounded(x, compute_dtype).astype(np.float64) for x in (a, b)))
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)
