"""The checked mode on correct programs, and on programs into which one bug was put."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hpcpar as hp
from hpcpar.checks import CheckError, check_gradient_layouts, checked, fingerprint, first_difference, inner_products
from hpcpar.kernels import bfloat16_missing
from hpcpar.layout.layout import Layout
from hpcpar.ops.core import Op, Rule
from hpcpar.ops.elementwise import Add, AddNumber
from hpcpar.ops.linear import Einsum
from hpcpar.ops.repartition import Repartition
from hpcpar.primitives import steps
from hpcpar.signature import signature
from hpcpar.testing import draw_layout, draw_mesh, operand, run_cases, shared_mesh
from hpcpar.transport import Comm

F = hp.functional
RANKS = MPI.COMM_WORLD.Get_size()


def mesh_of_all() -> hp.Mesh:
    return shared_mesh(a=RANKS)


@pytest.fixture
def fresh() -> Iterator[hp.Mesh]:
    """A mesh of its own: rules and plans are made anew, by what the test has put in the place of the real thing."""
    mesh = hp.Mesh(a=RANKS)
    yield mesh
    mesh.free()


def network(mesh: hp.Mesh, x: Layout, w: Layout, seed: int = 0) -> list[hp.Tensor]:
    """A small program with products, norms, broadcasts and reductions; returns its parameters."""
    rng = np.random.default_rng(seed)
    inputs = operand(rng.standard_normal((6, 4)), mesh, x)
    first = operand(rng.standard_normal((8, 4)), mesh, w, requires_grad=True, parameter=True)
    bias = operand(rng.standard_normal(8), mesh, requires_grad=True, parameter=True)
    second = operand(rng.standard_normal((3, 8)), mesh, None, requires_grad=True, parameter=True)
    hidden = F.tanh(F.linear(inputs, first, bias))
    hidden = (hidden - hidden.mean(1, keepdim=True)) / (hidden.var(1, keepdim=True) + 1.0)
    loss = (F.linear(hidden.resolve(), second) * 0.5 + 1.0).sum() / 7
    loss.resolve().backward()
    return [first, bias, second]


LAYOUTS = [
    (Layout(), Layout()),
    (Layout("a"), Layout()),
    (Layout(), Layout("a")),
    (Layout(None, "a"), Layout()),
    (Layout(), Layout(None, "a")),
    (Layout("a"), Layout("a")),
    (Layout(partial="a"), Layout("a")),
]


# ---- correct programs


@pytest.mark.parametrize("layouts", LAYOUTS)
def test_a_correct_program_passes_and_leaves_the_log_of_the_serial_run(layouts: tuple[Layout, Layout]) -> None:
    alone = hp.Mesh(MPI.COMM_SELF, a=1)
    with checked() as serial:
        network(alone, Layout(), Layout())
    with checked() as parallel:
        network(mesh_of_all(), *layouts)
    alone.free()
    names = [record.what for record in serial.log]
    assert "einsum" in names and "gradient of einsum" in names and len(names) > 25
    assert first_difference(serial.log, parallel.log) is None


def test_random_layouts_give_one_log() -> None:
    def case(rng: np.random.Generator) -> None:
        logs = []
        for _ in range(2):
            mesh = draw_mesh(rng, ("a", "b"))
            with checked() as check:
                network(mesh, draw_layout(rng, (6, 4), mesh, partial=True), draw_layout(rng, (8, 4), mesh))
            logs.append(check.log)
        assert first_difference(*logs) is None

    assert run_cases(case, 5, seed=20).accepted >= 1


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_rounding_in_narrow_types_is_no_violation(dtype: type) -> None:
    mesh, rng = mesh_of_all(), np.random.default_rng(1)
    x = operand(rng.standard_normal((40, 30)).astype(dtype), mesh, Layout("a"), requires_grad=True)
    w = operand(rng.standard_normal((20, 30)).astype(dtype), mesh, Layout(), requires_grad=True, parameter=True)
    with checked():
        (F.linear(x, w) * 0.1).sum().resolve().backward()


@pytest.mark.filterwarnings("ignore::hpcpar.kernels.KernelWarning")  # how a processor multiplies such numbers
@pytest.mark.skipif(bool(bfloat16_missing()), reason=bfloat16_missing())
@pytest.mark.parametrize("convolution", ["conv2d", "conv_transpose2d"])
def test_operands_rounded_to_bfloat16_are_no_violation(convolution: str) -> None:
    mesh = mesh_of_all()
    rng, rows = np.random.default_rng(5), Layout(None, None, "a")
    with mesh, checked():
        x = hp.tensor(rng.standard_normal((2, 8, 12, 9), np.float32), layout=rows, requires_grad=True)
        w = hp.tensor(rng.standard_normal((8, 8, 3, 3), np.float32), requires_grad=True)
        y = getattr(F, convolution)(x, w, padding=1, compute_dtype="bfloat16")
        (y * y).sum().backward()
        assert x.grad is not None and w.grad is not None


def test_the_mode_ends_with_its_block_and_nests() -> None:
    from hpcpar.ops import core

    with checked() as outer:
        _ = mesh_of_all()
        x = operand(np.ones(3), mesh_of_all())
        _ = x + x
        with checked() as inner:
            _ = x + x
        _ = x + x
        assert len(inner.log) == 1 and len(outer.log) == 2
    assert not core.observers and not hp.autograd.observers


def test_inner_product_and_fingerprint_do_not_depend_on_the_layout() -> None:
    def case(rng: np.random.Generator) -> None:
        mesh, shape = draw_mesh(rng, ("a", "b")), (5, 3)
        a, b = (rng.integers(-4, 5, shape).astype(float) for _ in range(2))
        x, y = (operand(v, mesh, draw_layout(rng, shape, mesh, partial=True)) for v in (a, b))
        (product,) = inner_products([(x.shard, x.sig, y.shard, y.sig)])
        assert abs(product.value - (a * b).sum()) < 1e-9
        whole = signature(mesh, shape, Layout())
        assert fingerprint(x.shard, x.sig).value == pytest.approx(fingerprint(a, whole).value, abs=1e-9)
        if a.any():
            assert abs(fingerprint(a, whole).value - fingerprint(np.roll(a, 1), whole).value) > 1e-6, "order matters"

    run_cases(case, 12, seed=21)


# ---- one bug at a time


def backward_through(mesh: hp.Mesh, build: Any, *layouts: Layout) -> None:
    rng = np.random.default_rng(2)
    tensors = [operand(rng.standard_normal((4, 4)), mesh, lay, requires_grad=True) for lay in layouts]
    y = build(*tensors).resolve()
    y.backward(operand(rng.standard_normal(y.shape), mesh, y.layout))


@pytest.mark.ranks(min=2)
def test_a_number_added_on_every_rank_of_a_partial_value_is_named_at_the_add(
    fresh: hp.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AddNumber, "forward", lambda self, rule, arrays, extra: (arrays[0] + extra, None))
    with checked(), pytest.raises(CheckError, match=r"operand 0 and the number added of operation 1, add"):
        backward_through(fresh, lambda x: x + 3.0, Layout(partial="a"))


@pytest.mark.ranks(min=2)
def test_a_bias_that_counts_on_every_rank_is_named_at_its_move(fresh: hp.Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps.Mask, "__call__", lambda self, array: array)
    with checked(), pytest.raises(CheckError, match=r"move of .* to Layout\(partial='a'\).*not the same"):
        backward_through(fresh, lambda x, b: x + b, Layout(partial="a"), Layout())


@pytest.mark.ranks(min=2)
def test_a_broadcast_gradient_that_forgets_to_be_partial_is_named_at_the_add(
    fresh: hp.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Add.rule

    def forgetful(self: Add, sigs: tuple) -> Rule:
        rule = honest(self, sigs)
        rule.grads = tuple(g.resolved for g in rule.grads)
        return rule

    monkeypatch.setattr(Add, "rule", forgetful)
    with checked(), pytest.raises(CheckError, match=r"gradient of operand 1 of operation 1, add.*replicated over a"):
        x = operand(np.ones((4, 4)), fresh, Layout("a"), requires_grad=True)
        b = operand(np.ones(4), fresh, requires_grad=True)
        (x + b).backward(operand(np.random.default_rng(0).standard_normal((4, 4)), fresh, Layout("a")))


@pytest.mark.ranks(min=2)
def test_a_gradient_of_redundant_computation_that_is_summed_is_named_with_its_factor(
    fresh: hp.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Einsum.backward

    def summing(self: Einsum, rule: Rule, saved: Any, g: Any, needs: tuple[bool, ...]) -> tuple:
        dx, dw = honest(self, rule, saved, g, needs)
        return dx, fresh.world.all_reduce(dw)

    monkeypatch.setattr(Einsum, "backward", summing)
    with checked(), pytest.raises(CheckError, match=rf"operand 1 of operation 1, einsum.*a factor of {RANKS}$"):
        backward_through(fresh, lambda x, w: hp.einsum("mk,kn->mn", x, w), Layout(), Layout())


@pytest.mark.ranks(min=2)
def test_one_replica_off_by_the_last_bit_is_named_with_its_rank() -> None:
    mesh = mesh_of_all()
    x = operand(np.ones((4, 4)), mesh)
    if mesh.rank == RANKS - 1:
        x.shard[1, 2] += 1e-15
    with checked(), pytest.raises(CheckError, match=rf"result of operation 1, tanh.*rank {RANKS - 1} holds other bits"):
        F.tanh(x)


@pytest.mark.ranks(min=2)
def test_a_corrupted_message_is_named_at_the_move(fresh: hp.Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = steps.AllGather.__call__
    monkeypatch.setattr(steps.AllGather, "__call__", lambda self, array: honest(self, array)[::-1].copy())
    with checked(), pytest.raises(CheckError, match=r"move of \(4, 4\) Layout\('a'\) to Layout\(\), after operation 1"):
        backward_through(fresh, lambda x: x.repartition(Layout()), Layout("a"))


class Doubled(Op):
    """A wrong bias that is its own adjoint: scaled by the number of ranks, forward and backward."""

    name = "scaled"
    linear = "each"

    def rule(self, sigs: tuple) -> Rule:
        return Rule(sigs[0], [sigs[0]], [sigs[0].resolved], sigs)

    def forward(self, rule: Rule, arrays: list, extra: Any) -> tuple[Any, Any]:
        return arrays[0] * rule.out.mesh.size, None

    def backward(self, rule: Rule, saved: Any, g: Any, needs: tuple[bool, ...]) -> tuple:
        return (g * rule.out.mesh.size,)


@pytest.mark.ranks(min=2)
def test_an_error_that_is_its_own_adjoint_is_found_by_the_fingerprints_of_two_runs() -> None:
    scaled, alone, logs = Doubled(), hp.Mesh(MPI.COMM_SELF, a=1), []
    for mesh in (alone, mesh_of_all()):
        with checked() as check:
            x = operand(np.arange(12.0).reshape(4, 3), mesh, Layout("a"), requires_grad=True)
            F.tanh(scaled((x * 0.5,)) * 1.0).sum().resolve().backward()
        logs.append(check.log)
    alone.free()
    found = first_difference(*logs)
    assert found is not None and found.startswith("record 1: scaled (4, 3)") and f"a factor of {RANKS}" in found


# ---- ranks that part


@pytest.mark.ranks(min=2)
def test_ranks_that_apply_different_operations_are_both_named() -> None:
    mesh = mesh_of_all()
    x = operand(np.ones((4, 4)), mesh, Layout("a"))
    both = r"operation 1 differs: rank 0 applies mul on .*; rank 1 applies add on"
    with checked(), pytest.raises(CheckError, match=both):
        _ = x * x if mesh.rank == 0 else x + x


@pytest.mark.ranks(min=2)
def test_an_operation_that_meets_a_collective_is_named_on_both_sides() -> None:
    mesh = mesh_of_all()
    x = operand(np.ones((4, 4)), mesh, Layout("a"))
    both = r"rank 0 applies exp on \(4, 4\).*; rank 1 calls all_reduce of sum of \(3,\) float64$"
    with checked(), pytest.raises(CheckError, match=both):
        _ = F.exp(x) if mesh.rank == 0 else mesh.world.all_reduce(np.ones(3))
    other = r"rank 0 calls all_reduce of sum of \(3,\) float64; rank 1 applies exp on \(4, 4\).*float64$"
    with checked(), pytest.raises(CheckError, match=other):
        _ = F.exp(x) if mesh.rank > 0 else mesh.world.all_reduce(np.ones(3))


@pytest.mark.ranks(min=2)
def test_ranks_with_different_shapes_or_dtypes_are_both_named() -> None:
    mesh = mesh_of_all()
    x = operand(np.ones(4 if mesh.rank == 0 else 5), mesh)
    with checked(), pytest.raises(CheckError, match=r"rank 0 applies exp on \(4,\).*rank 1 applies exp on \(5,\)"):
        F.exp(x)
    x = operand(np.ones(4, np.float32 if mesh.rank == 0 else np.float64), mesh)
    with checked(), pytest.raises(CheckError, match=r"float32; rank 1 applies exp on .* float64"):
        F.exp(x)


@pytest.mark.ranks(min=2)
def test_different_collectives_and_shapes_stop_before_the_message(comm: MPI.Comm) -> None:
    c = Comm(comm, "model")
    first = c.rank == 0
    with checked():
        with pytest.raises(CheckError, match=r"along model differ: rank 0 calls all_reduce.*rank 1 calls broadcast"):
            c.all_reduce(np.ones(3)) if first else c.broadcast(np.ones(3))
        with pytest.raises(CheckError, match=r"sum of \(3,\) float64; rank 1 calls all_reduce of sum of \(4,\)"):
            c.all_reduce(np.ones(3 if first else 4))
        with pytest.raises(CheckError, match=r"sum of .*; rank 1 calls all_reduce of max of"):
            c.all_reduce(np.ones(3), "sum" if first else "max")
        with pytest.raises(CheckError, match=r"of which this one is \(5,\)"):
            c.all_gather(np.ones(3 if first else 5), [(3,)] * c.size)
        with pytest.raises(CheckError, match=r"rank 0 sends \(3,\) float64 to rank 1, which waits for \(4,\) float64"):
            c.exchange({1: np.ones(3)} if first else {}, {0: ((4,), np.dtype(float))} if c.rank == 1 else {})
        with pytest.raises(CheckError, match="waits for nothing"):
            c.exchange({1: np.ones(3)} if first else {}, {})
    assert np.array_equal(c.all_reduce(np.ones(2)), np.full(2, c.size)), "the communicator is still of use"


# ---- after the synchronisation


@pytest.mark.ranks(min=2)
def test_a_gradient_that_was_not_synchronised_is_named() -> None:
    mesh = mesh_of_all()
    w = operand(np.ones(3), mesh, requires_grad=True, parameter=True)
    unused = operand(np.ones(3), mesh, requires_grad=True, parameter=True)
    (operand(np.ones((4, 3)), mesh, Layout("a")) * w).sum().backward()
    with pytest.raises(CheckError, match=r"bias lies as Layout\(\), its gradient as Layout\(partial='a'\)"):
        check_gradient_layouts([("bias", w), ("unused", unused)])
    w.grad = w.grad.resolve()
    check_gradient_layouts([w, unused])


def test_repartitions_leave_no_record_as_another_layout_needs_others() -> None:
    mesh = mesh_of_all()
    x = operand(np.ones((4, 3)), mesh, Layout("a"))
    with checked() as check:
        x.repartition(Layout()).repartition(Layout(None, "a"))
    assert Repartition.name not in {record.what for record in check.log}
