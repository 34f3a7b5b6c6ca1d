"""Clipping: each logical element counts once, whatever is split; all ranks decide alike, also about NaN."""

import math

import numpy as np
import pytest

import hpcpar as hp
from hpcpar import Layout, nn
from hpcpar.optim import clip_grad_norm_, total_norm
from hpcpar.testing import assert_close_everywhere

SHAPES = {"replicated": (3, 4), "rows": (7, 5), "columns": (5, 6), "both": (4, 9), "short": (1, 3), "scalar": ()}
LAYOUTS = {
    "replicated": Layout(),
    "rows": Layout("model"),
    "columns": Layout(None, ("batch", "model")),
    "both": Layout("batch", "model"),
    "short": Layout("model"),
    "scalar": Layout(),
}


def parameters():
    """Parameters of all kinds with gradients, and the gradients as whole arrays."""
    made, whole = [], {}
    for i, (name, shape) in enumerate(SHAPES.items()):
        values = np.random.default_rng(i).standard_normal(shape)
        like = hp.tensor(np.zeros(shape), layout=LAYOUTS[name])
        parameter = nn.Parameter(like.shard, like.sig)
        parameter.grad = hp.tensor(values, layout=LAYOUTS[name])
        made.append((name, parameter))
        whole[name] = values
    return made, whole


def norm_of(whole, norm_type):
    flat = np.concatenate([v.ravel() for v in whole.values()])
    return np.linalg.norm(flat, norm_type)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, math.inf])
@pytest.mark.parametrize("max_norm", [1e-3, 2.0, 1e3])
def test_split_and_replicated_parameters_are_clipped_together(mesh, norm_type, max_norm):
    pairs, whole = parameters()
    norm = clip_grad_norm_(pairs, max_norm, norm_type)
    expected = norm_of(whole, norm_type)
    assert norm == pytest.approx(expected, rel=1e-13)
    factor = min(1.0, max_norm / (expected + 1e-6))
    for name, parameter in pairs:
        assert_close_everywhere(mesh.world, parameter.grad.numpy(), whole[name] * factor, 1e-12, name)
    assert total_norm([p.grad for _, p in pairs], norm_type) == pytest.approx(expected * factor, rel=1e-12)


def test_all_ranks_get_the_same_bits(mesh):
    pairs, _ = parameters()
    norm = clip_grad_norm_(pairs, 0.1)
    assert len(set(mesh.world.gather_objects(norm))) == 1


def test_the_norm_equals_that_of_torch(mesh):
    torch = pytest.importorskip("torch", reason="torch is the oracle")
    pairs, whole = parameters()
    twins = [torch.zeros(v.shape, dtype=torch.float64, requires_grad=True) for v in whole.values()]
    for twin, value in zip(twins, whole.values(), strict=True):
        twin.grad = torch.tensor(value)
    expected = torch.nn.utils.clip_grad_norm_(twins, 0.7)
    assert clip_grad_norm_(pairs, 0.7) == pytest.approx(expected.item(), rel=1e-13)
    for (name, parameter), twin in zip(pairs, twins, strict=True):
        assert_close_everywhere(mesh.world, parameter.grad.numpy(), twin.grad.numpy(), 1e-12, name)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_one_bad_element_on_one_rank_is_everybodys(mesh, bad, norm_type):
    pairs, _ = parameters()
    gradient = dict(pairs)["rows"].grad
    if mesh.index("model") == mesh.shape["model"] - 1:
        gradient.shard[-1:, -1:] = bad
    norm = total_norm([p.grad for _, p in pairs], norm_type)
    assert np.array_equal(mesh.world.gather_objects(norm), [bad] * mesh.size, equal_nan=True)
    with pytest.raises(RuntimeError, match=f"the norm of the gradients is {bad}"):
        clip_grad_norm_(pairs, 1.0, norm_type, error_if_nonfinite=True)
    clip_grad_norm_(pairs, 1.0, norm_type)
    finite = dict(pairs)["replicated"].grad.numpy()
    assert np.isnan(finite).all() if math.isnan(bad) else not finite.any()


def test_a_float32_sum_of_many_small_elements_is_exact_enough(mesh):
    n = 3_000_000
    like = hp.tensor(np.zeros(n, np.float32), layout=Layout("model"))
    parameter = nn.Parameter(like.shard, like.sig)
    parameter.grad = hp.tensor(np.full(n, 1e-3, np.float32), layout=Layout("model"))
    assert clip_grad_norm_([("w", parameter)], 1e9) == pytest.approx(float(np.float32(1e-3)) * math.sqrt(n), rel=1e-9)


def test_partial_gradients_are_refused(mesh):
    if mesh.shape["batch"] == 1:
        pytest.skip("nothing is partial on this mesh")
    net = nn.Linear(3, 2)
    net(hp.tensor(np.ones((4, 3)), layout=Layout("batch"))).sum().backward()
    with pytest.raises(RuntimeError, match="still partial"):
        clip_grad_norm_(net, 1.0)
