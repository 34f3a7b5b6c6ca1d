"""Operations one by one, forward and backward: a virtual mesh counts what the real one sends."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from hpcpar import functional as F
from hpcpar import nn
from hpcpar.kernels import outline
from hpcpar.layout.layout import Layout
from hpcpar.mesh import Mesh
from hpcpar.plan import VirtualMesh
from hpcpar.signature import signature
from hpcpar.tensors import Tensor
from hpcpar.transport import counter

SHAPE = (2, 8, 9, 10, 4)
CLASSES = (2, 9, 10, 4)

OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "dilated convolution": lambda x, t: nn.Conv3d(8, 4, (5, 3, 1), padding=(4, 1, 0), dilation=(2, 1, 1))(x),
    "convolution of reflected borders": lambda x, t: nn.Conv3d(8, 4, 3, padding=1, padding_mode="reflect")(x),
    "convolution in groups with stride": lambda x, t: nn.Conv3d(8, 8, 2, stride=2, groups=4)(x),
    "transposed convolution": lambda x, t: nn.ConvTranspose3d(8, 4, 3, stride=2, padding=1)(x),
    "max pooling that overlaps": lambda x, t: F.max_pool3d(x, 3, 2, 1),
    "average pooling": lambda x, t: F.avg_pool3d(x, (3, 2, 1), (1, 2, 1), (1, 0, 0), count_include_pad=False),
    "group norm across channels": lambda x, t: nn.GroupNorm(2, 8)(x),
    "instance norm": lambda x, t: nn.InstanceNorm3d(8, affine=True)(x),
    "batch norm of one sample": lambda x, t: nn.BatchNorm3d(8, scope="sample")(x),
    "softmax over classes": lambda x, t: F.softmax(x, 1),
    "softmax over depth": lambda x, t: F.log_softmax(x, 2),
    "cross entropy": lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1),
    "Dice": lambda x, t: F.dice_loss(F.softmax(x, 1), t),
    "mean squares": lambda x, t: F.mse_loss(x, F.relu(x).detach()),
    "variance": lambda x, t: F.var(x, (0, 2, 3)),
    "maximum": lambda x, t: F.amax(x, (1, 2)),
    "logsumexp": lambda x, t: F.logsumexp(x, 2),
    "broadcasting": lambda x, t: x * F.mean(x, (2, 3, 4), keepdim=True),
    "flatten and linear": lambda x, t: nn.Linear(8 * 9 * 10 * 4, 3, in_dims=(8, 9, 10, 4))(x),
    "interpolation": lambda x, t: F.interpolate(x, scale_factor=2, mode="trilinear"),
    "adaptive pooling": lambda x, t: F.adaptive_avg_pool3d(x, (4, 3, 4)),
    "adaptive maxima": lambda x, t: F.adaptive_max_pool3d(x, 3),
    "padding that wraps around": lambda x, t: F.pad(x, (0, 0, 0, 0, 3, 2), mode="circular"),
    "flip": lambda x, t: F.flip(x, (2,)),
    "roll": lambda x, t: F.roll(x, 3, 2),
    "layer norm": lambda x, t: F.layer_norm(x, SHAPE[1:]),
    "RMS norm": lambda x, t: F.rms_norm(x, SHAPE[2:]),
    "positions of maxima": lambda x, t: F.to(F.argmax(x, 2), np.float32) * F.amax(x, 2),
    "repartition to samples": lambda x, t: F.repartition(x, Layout("a")),
    "repartition to channels": lambda x, t: F.repartition(x, Layout(None, ("a", "b"))),
}  # fmt: skip

LAYOUTS = {
    "depth": Layout(None, None, "a"),
    "depth and height": Layout(None, None, "a", "b"),
    "samples and depth": Layout("a", None, "b"),
    "channels and depth": Layout(None, "a", "b"),
}


def messages(operation: Callable, mesh: Mesh | VirtualMesh, layout: Layout) -> dict:
    """What this rank sends, forward and backward."""
    target = Layout(layout.entry(0), *[layout.entry(d) for d in (2, 3, 4)])
    tensors = []
    for shape, lay, dtype in ((SHAPE, layout, np.float32), (CLASSES, target, np.int64)):
        sig = signature(mesh, shape, lay)
        data = outline.empty(sig.local_shape, dtype) if mesh.virtual else np.ones(sig.local_shape, dtype)
        tensors.append(Tensor(data, sig, requires_grad=dtype == np.float32))
    with mesh, counter.counting() as sent:
        F.sum(operation(*tensors)).backward()
    return sent


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_operation_sends_what_a_virtual_mesh_counts(name: str, layout: str, comm) -> None:
    if "groups" in name and "channels" in layout and comm.size == 3:
        pytest.skip("four groups over three parts are refused")
    shape = {"a": 2, "b": 2} if comm.size == 4 else {"a": comm.size, "b": 1}
    mesh = Mesh(**shape)
    sent = messages(OPERATIONS[name], mesh, LAYOUTS[layout])
    assert messages(OPERATIONS[name], VirtualMesh(shape, mesh.rank), LAYOUTS[layout]) == sent
    assert comm.size > 1 or not sent
    mesh.free()
