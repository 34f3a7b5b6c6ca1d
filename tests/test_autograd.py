"""The tape: gradients as logical arrays, sums before moves, and who gets what when."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

import hpcpar as hp
from hpcpar.layout.layout import Layout
from hpcpar.testing import compare_with_serial, draw_layout, draw_mesh, operand, run_cases, shared_mesh
from hpcpar.transport import counter

F = hp.functional


def mesh_of_all() -> hp.Mesh:
    return shared_mesh(a=hp.current_mesh().size)


def words(sent: dict[tuple[str, str], counter.Tally]) -> dict[str, float]:
    return {what: t.bytes / 8 for (what, _), t in sent.items()}


def leaf(values: np.ndarray, layout: Layout | None = None, parameter: bool = False) -> hp.Tensor:
    return operand(values, mesh_of_all(), layout, requires_grad=True, parameter=parameter)


# ---- how gradients lie


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("layout", [Layout(), Layout("a"), Layout(None, "a"), Layout(partial="a")])
def test_the_gradient_of_an_activation_lies_as_it_does_but_is_never_partial(layout: Layout) -> None:
    x = leaf(np.arange(12.0).reshape(4, 3), layout)
    (x * 2).sum().backward()
    assert x.grad.layout == layout.resolved()
    assert np.array_equal(x.grad.numpy(), np.full((4, 3), 2.0))


@pytest.mark.ranks(min=2)
def test_the_gradient_of_a_parameter_is_partial_only_where_it_is_replicated() -> None:
    mesh = mesh_of_all()
    x = operand(np.ones((6, 4)), mesh, Layout("a"))
    for layout, expected in ((Layout(), Layout(partial="a")), (Layout("a"), Layout("a"))):
        w = operand(np.ones((4, 8)), mesh, layout, requires_grad=True, parameter=True)
        hp.einsum("mk,kn->mn", x, w, out=Layout("a")).sum().backward()
        assert w.grad.layout == expected
        assert np.array_equal(w.grad.numpy(), np.full((4, 8), 6.0))


@pytest.mark.ranks(min=2)
def test_a_parameter_used_sliced_gets_its_block_among_zeros_without_a_message() -> None:
    w = leaf(np.arange(8.0), parameter=True)
    with counter.counting() as sent:
        (w * operand(np.arange(8.0), mesh_of_all(), Layout("a"))).sum().backward()
    assert not sent and w.grad.layout == Layout(partial="a")
    assert np.array_equal(w.grad.numpy(), np.arange(8.0))


@pytest.mark.ranks(min=2)
def test_a_weight_used_in_split_and_in_replicated_regions_counts_each_once() -> None:
    w = leaf(np.ones(3), parameter=True)
    x = operand(np.arange(15.0).reshape(5, 3), mesh_of_all(), Layout("a"))
    loss = (x * w).sum() + (w * 10).sum()
    loss.backward()
    assert w.grad.layout == Layout(partial="a")
    assert np.array_equal(w.grad.numpy(), np.arange(15.0).reshape(5, 3).sum(0) + 10)


@pytest.mark.ranks(min=2)
def test_redundant_computation_needs_no_sum() -> None:
    w = leaf(np.ones((4, 3)), parameter=True)
    with counter.counting() as sent:
        F.linear(operand(np.ones((2, 3)), mesh_of_all()), w).sum().backward()
    assert not sent and w.grad.layout == Layout()
    assert np.array_equal(w.grad.shard, np.full((4, 3), 2.0))


@pytest.mark.ranks(min=2)
def test_the_seed_is_a_logical_one_also_for_a_partial_loss() -> None:
    x = leaf(np.ones(5), Layout("a"))
    loss = x.sum()
    assert loss.layout == Layout(partial="a")
    loss.backward()
    assert np.array_equal(x.grad.numpy(), np.ones(5))


# ---- sums before moves


@pytest.mark.ranks(min=2)
def test_three_projections_gather_once_and_their_gradients_are_reduced_once() -> None:
    """q, k and v on one sequence-split x: one all-gather, and one reduce-scatter of the sum."""
    mesh = mesh_of_all()
    p, (m, k, n) = mesh.size, (12, 4, 24)
    x = operand(np.ones((m, k)), mesh, Layout("a"), requires_grad=True)
    weights = [operand(np.full((k, n), i + 1.0), mesh, Layout(None, "a"), True, parameter=True) for i in range(3)]
    with counter.counting() as sent:
        q, key, v = (hp.einsum("mk,kn->mn", x, w, out=Layout(None, "a")) for w in weights)
    assert words(sent) == {"all_gather": m * k - m // p * k}
    with counter.counting() as sent:
        (q + key + v).sum().backward()
    assert words(sent) == {"reduce_scatter": m * k - m // p * k}
    assert np.array_equal(x.grad.numpy(), np.full((m, k), 6.0 * n))


@pytest.mark.ranks(min=2)
def test_three_projections_of_a_replicated_activation_share_one_all_reduce_backward() -> None:
    mesh = mesh_of_all()
    p = mesh.size
    x = operand(np.ones((6, 4)), mesh, Layout(), requires_grad=True)
    hidden = x * 1.0
    weights = [operand(np.ones((4, 12)), mesh, Layout(None, "a"), True, parameter=True) for _ in range(3)]
    q, key, v = (hp.einsum("mk,kn->mn", hidden, w) for w in weights)
    with counter.counting() as sent:
        (q + key * v).sum().backward()
    assert list(sent) == [("all_reduce", "a")] and sent["all_reduce", "a"].messages == 1
    assert words(sent)["all_reduce"] == pytest.approx(2 * (p - 1) / p * 24)


@pytest.mark.ranks(exactly=4)
def test_a_repartition_passes_its_gradient_so_that_partial_becomes_split_in_one_step() -> None:
    """FSDP: 864 words and not 1728; sequence parallel: 288 and not 576 (m=16, k=24, n=48)."""
    mesh = mesh_of_all()
    x = operand(np.ones((16, 24)), mesh, Layout("a"))
    w = operand(np.ones((24, 48)), mesh, Layout("a"), requires_grad=True, parameter=True)
    y = hp.einsum("mk,kn->mn", x, w.repartition(Layout()))
    with counter.counting() as sent:
        y.sum().backward()
    assert words(sent) == {"reduce_scatter": 864}

    x = operand(np.ones((16, 24)), mesh, Layout("a"), requires_grad=True)
    w = operand(np.ones((24, 48)), mesh, Layout(None, "a"), parameter=True)
    y = hp.einsum("mk,kn->mn", x.repartition(Layout()), w)
    with counter.counting() as sent:
        y.sum().backward()
    assert words(sent) == {"reduce_scatter": 288}


@pytest.mark.ranks(exactly=4)
def test_partial_gradients_of_different_splits_share_one_message() -> None:
    """One use gathers x over b, the other does not: what both leave partial over a is sliced, added and sent once."""
    mesh = shared_mesh(a=2, b=2)
    x = operand(np.ones((8, 4)), mesh, Layout("b"), requires_grad=True)
    w = operand(np.ones((4, 6)), mesh, Layout(None, "a"))
    whole = hp.einsum("mk,kn->mn", x.repartition(Layout()), w)
    split = hp.einsum("mk,kn->mn", x, w)
    with counter.counting() as sent:
        (whole.sum() + split.sum()).backward()
    assert {key: t.messages for key, t in sent.items()} == {("all_reduce", "a"): 1}
    assert sum(t.bytes for t in sent.values()) == 4 * 4 * 8, "half of x"
    assert np.array_equal(x.grad.numpy(), np.full((8, 4), 12.0))


@pytest.mark.ranks(min=2)
def test_micro_batches_accumulate_a_partial_gradient_without_a_message() -> None:
    w = leaf(np.ones(3), parameter=True)
    x = operand(np.arange(15.0).reshape(5, 3), mesh_of_all(), Layout("a"))
    with counter.counting() as sent:
        for _ in range(3):
            (x * w).sum().backward()
    assert not sent and w.grad.layout == Layout(partial="a")
    assert np.array_equal(w.grad.numpy(), 3 * np.arange(15.0).reshape(5, 3).sum(0))


@pytest.mark.ranks(min=2)
def test_accumulating_onto_a_synchronised_gradient_counts_it_once() -> None:
    w = leaf(np.ones(3), parameter=True)
    x = operand(np.arange(15.0).reshape(5, 3), mesh_of_all(), Layout("a"))
    (x * w).sum().backward()
    w.grad = w.grad.resolve()
    (x * w).sum().backward()
    assert np.array_equal(w.grad.numpy(), 2 * np.arange(15.0).reshape(5, 3).sum(0))


# ---- graphs


def test_random_graphs_with_shared_parts_equal_torch() -> None:
    torch = pytest.importorskip("torch", reason="torch is the oracle")

    def build(choices: list[int], tanh, x, y):
        steps = [lambda a, b: a + b, lambda a, b: a * b, lambda a, b: tanh(a), lambda a, b: a - b * 0.5]
        values = [x, y, x * y]
        for c in choices:
            values.append(steps[c % 4](values[c % len(values)], values[(c // 7) % len(values)]))
        return sum(values[3:], values[2])

    def case(rng: np.random.Generator) -> None:
        mesh = draw_mesh(rng, ("a", "b"))
        shape = (4, 3)
        layouts = [draw_layout(rng, shape, mesh, partial=True) for _ in range(2)]
        choices = [int(c) for c in rng.integers(0, 1000, 8)]
        arrays = [rng.standard_normal(shape) / 2 for _ in range(2)]
        compare_with_serial(
            lambda x, y: build(choices, F.tanh, x, y),
            lambda x, y: build(choices, torch.tanh, x, y),
            arrays,
            mesh,
            layouts,
            parameters=[int(rng.integers(2))],
            tolerance=1e-11,
        )

    assert run_cases(case, 24, seed=13).accepted > 6


def test_a_freed_graph_is_a_named_error_and_a_retained_one_adds_up() -> None:
    x = leaf(np.ones(4), Layout("a"))
    y = (x * x).sum()
    y.backward(retain_graph=True)
    y.backward()
    assert np.array_equal(x.grad.numpy(), np.full(4, 4.0))
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        y.backward()


def test_backward_of_a_leaf_gives_it_the_seed() -> None:
    x = leaf(np.array(2.0))
    x.backward()
    assert x.grad.item() == 1.0


def test_backward_needs_a_history_and_one_element_or_a_gradient() -> None:
    x = leaf(np.ones((2, 3)))
    with pytest.raises(RuntimeError, match="one element"):
        (x * 2).backward()
    with pytest.raises(RuntimeError, match="does not require"):
        x.detach().backward()
    with pytest.raises(ValueError, match="shape"):
        (x * 2).backward(operand(np.ones(3), mesh_of_all()))
    y = leaf(np.ones((1, 1)))
    (y * 3).backward()
    assert y.grad.numpy().tolist() == [[3.0]]


def test_no_grad_records_nothing_and_enable_grad_records_again() -> None:
    x = leaf(np.ones(3))
    with hp.no_grad():
        assert not (x * 2).requires_grad
        with hp.enable_grad():
            assert (x * 2).requires_grad
        assert not hp.grad_enabled()
    assert hp.grad_enabled() and (x * 2).requires_grad

    @hp.no_grad()
    def inference(x: hp.Tensor) -> hp.Tensor:
        return x * 2

    assert not inference(x).requires_grad and hp.grad_enabled()
    with pytest.raises(KeyError), hp.no_grad():
        raise KeyError
    assert hp.grad_enabled()


def test_detach_and_requires_grad_cut_and_start_a_history() -> None:
    x = leaf(np.ones(3))
    y = (x * 2).detach()
    assert y.is_leaf and not y.requires_grad
    y.requires_grad_()
    (y * 3).sum().backward()
    assert x.grad is None and np.array_equal(y.grad.numpy(), np.full(3, 3.0))
    with pytest.raises(RuntimeError, match="leaf"):
        (y * 3).requires_grad_(False)


def test_only_what_asked_for_a_gradient_gets_one() -> None:
    x, w = leaf(np.ones(3)), operand(np.ones(3), mesh_of_all())
    y = x * w
    (y * 2).sum().backward()
    assert w.grad is None and y.grad is None and x.grad is not None


# ---- memory


def test_gradients_of_two_leaves_never_share_memory() -> None:
    x, y, g = leaf(np.ones(4)), leaf(np.ones(4)), operand(np.ones(4), mesh_of_all())
    (x + y).backward(g)
    x.grad.shard[...] = 7
    assert np.array_equal(y.grad.shard, np.ones(4)) and np.array_equal(g.shard, np.ones(4))


def test_gradients_may_be_written_even_where_the_rule_repeats_one_number() -> None:
    x = leaf(np.ones((4, 3)), Layout("a"))
    x.sum().backward()
    x.grad.shard[...] += 1
    assert (x.grad.shard == 2).all()


@pytest.mark.ranks(min=2)
def test_a_sliced_contribution_does_not_write_into_its_source() -> None:
    """Two contributions in two layouts: bringing one to the target's is a view of an array that others hold."""
    x = leaf(np.ones((4, 4)), Layout("a"))
    whole = x.repartition(Layout())
    other = leaf(np.ones((4, 4)))
    (whole + other).sum().backward(retain_graph=True)
    assert np.array_equal(other.grad.numpy(), np.ones((4, 4)))
    ((whole + other) + (x * 1.0).repartition(Layout()) + x.repartition(Layout(None, "a"))).sum().backward()
    assert np.array_equal(other.grad.numpy(), np.full((4, 4), 2.0))
    assert np.array_equal(x.grad.numpy(), np.full((4, 4), 4.0))


def test_activations_end_with_the_walk_and_nodes_hold_no_tensors() -> None:
    x = leaf(np.ones(4))
    hidden = x * x
    seen = weakref.ref(hidden)
    y = F.tanh(hidden).sum()
    del hidden
    gc.collect()
    assert seen() is None, "tanh saved its result and not the tensor it read"
    node = y.node
    y.backward()
    assert node.saved is None and node.rule is None


def test_a_failing_rule_leaves_no_half_gradients_behind() -> None:
    x = leaf(np.ones(4))
    hidden = x * 2
    y = (hidden * hidden).sum()
    broken = {"on": True}

    def stop(*_: object) -> None:
        if broken["on"]:
            raise KeyError("stop")

    hp.autograd.observers.append(stop)
    try:
        with pytest.raises(KeyError):
            y.backward(retain_graph=True)
    finally:
        broken["on"] = False
        hp.autograd.observers.remove(stop)
    y.backward()
    assert np.array_equal(x.grad.numpy(), np.full(4, 8.0))


# ---- hooks


def test_hooks_see_complete_gradients_while_the_walk_goes_on() -> None:
    """The last layer's weight is ready before the first layer's: that is when its bucket can be sent."""
    seen: list[tuple[str, float]] = []
    first, second = leaf(np.full(3, 2.0), parameter=True), leaf(np.full(3, 5.0), parameter=True)
    for name, w in (("first", first), ("second", second)):
        w.on_gradient(lambda w, name=name: seen.append((name, float(w.grad.shard.sum()))))
    x = operand(np.ones(3), mesh_of_all())
    order: list[str] = []
    hp.autograd.observers.append(lambda node, *_: order.append(f"{node.op.name} after {len(seen)}"))
    try:
        ((x * first) * second * second).sum().backward()
    finally:
        hp.autograd.observers.pop()
    assert [name for name, _ in seen] == ["second", "first"]
    assert seen[0][1] == 3 * 2 * 2.0 * 5 and seen[1][1] == 3 * 25.0
    assert order == ["sum after 0", "mul after 0", "mul after 0", "mul after 1"]


# ---- what is remembered


@pytest.mark.ranks(min=2)
def test_a_move_is_remembered_by_all_ranks_or_by_none() -> None:
    """The mask of a replicated bias is the bias itself on index 0, which always lives, and zeros elsewhere."""
    mesh = mesh_of_all()
    bias = operand(np.ones(4), mesh)
    partial = bias.sig.with_layout(Layout(partial="a"))
    bias.moved(partial)
    assert not any(mesh.world.gather_objects(bool(bias._moved)))
    split = operand(np.ones(4), mesh, Layout("a"))
    held = split.moved(bias.sig)
    assert all(mesh.world.gather_objects(split.moved(bias.sig) is held))


@pytest.mark.ranks(min=2)
def test_what_was_moved_before_a_backward_is_moved_again_after_it() -> None:
    """Garbage is collected at other times on other ranks; a step must not depend on it."""
    mesh = mesh_of_all()
    x = operand(np.ones((4, 3)), mesh, Layout("a"))
    whole = x.sig.with_layout(Layout())
    held = x.moved(whole)
    leaf(np.ones(2)).sum().backward()
    with counter.counting() as sent:
        again = x.moved(whole)
    assert sent and again is not held and np.array_equal(again, held)
