"""Attention over split tokens: three schemes equal the serial run under every layout, and send what they say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hpcpar as hp
from hpcpar.kernels import registry
from hpcpar.layout.layout import Layout, LayoutError
from hpcpar.ops.context import zigzag
from hpcpar.ops.overlap import overlap
from hpcpar.plan import VirtualMesh
from hpcpar.testing import collective_assert, compare_with_serial, operand, run_cases, shared_mesh
from hpcpar.transport import counter

torch = pytest.importorskip("torch", reason="torch is the oracle")
F = hp.functional
SCHEMES = ("ring", "all_to_all", "gather")
RANKS = hp.current_mesh().size


def theirs(order: np.ndarray, keys: np.ndarray, options: dict[str, Any]) -> Callable[..., Any]:
    """Torch's attention of tokens that lie in an order: taken to their positions, and the result back."""

    def run(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
        to_q, to_k = np.argsort(order), np.argsort(keys)
        q, k, v = q[:, :, to_q], k[:, :, to_k], v[:, :, to_k]
        rows, columns = np.arange(len(order))[:, None], np.arange(len(keys))
        seen = np.ones((1, 1, len(order), len(keys)), bool)
        if options.get("is_causal"):
            seen = seen & (columns <= rows)
        if options.get("window"):
            left, right = options["window"]
            seen = seen & (columns >= rows - left) & (columns <= rows + right)
        if options.get("documents") is not None:
            given = np.asarray(options["documents"])[:, to_k]
            seen = seen & (given[:, None, :, None] == given[:, None, None, :])
        hidden = torch.tensor(np.where(seen, 0.0, -np.inf))
        if mask is not None:
            mask = mask[:, :, to_q] if mask.shape[2] > 1 else mask
            hidden = hidden + (mask[..., to_k] if mask.shape[3] > 1 else mask)
        grouped = q.shape[1] != k.shape[1]
        result = torch.nn.functional.scaled_dot_product_attention(q, k, v, hidden, enable_gqa=grouped)
        return result[:, :, order]

    return run


def meshes() -> list[hp.Mesh]:
    shapes = {4: [(2, 2, 1), (1, 4, 1), (1, 2, 2)]}.get(RANKS, [(1, RANKS, 1), (RANKS, 1, 1), (1, 1, RANKS)])
    return [shared_mesh(other=a, sequence=b, model=c) for a, b, c in shapes]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_equals_torch_under_random_layouts_and_conditions(scheme: str) -> None:
    """Uneven and empty blocks, tokens over two axes in both orders, grouped heads, cross attention, both orders."""

    def case(rng: np.random.Generator) -> None:
        mesh = meshes()[rng.integers(3)]
        stack = [("sequence",), ("sequence", "model"), ("model", "sequence")][rng.integers(3)]
        free = ["other", *[a for a in ("sequence", "model") if a not in stack]]
        where = [rng.integers(3) for _ in free]
        batch, heads = (tuple(a for a, w in zip(free, where, strict=True) if w == d) for d in (0, 1))
        h, g = [(4, 4), (4, 2), (3, 3), (4, 1), (1, 1)][rng.integers(5)]
        n, length = int(rng.integers(1, 4)), int([7, 12, 3, 2][rng.integers(4)])
        keys = length if rng.integers(4) else int(rng.integers(1, 9))
        parts = int(np.prod([mesh.shape[a] for a in stack]))
        options: dict[str, Any] = {"is_causal": bool(rng.integers(2))}
        if rng.integers(3) == 0:
            options["window"] = (int(rng.integers(1, 4)), int(rng.integers(1, 4)))
        if rng.integers(3) == 0 and keys == length:
            options["documents"] = rng.integers(0, 2, (n, length))
        zig = bool(rng.integers(2))
        orders = [zigzag(m, parts if zig else 1) for m in (length, keys)]
        arrays = [rng.standard_normal(s) for s in ((n, h, length, 2), (n, g, keys, 2), (n, g, keys, 3))]
        # whole key heads where the few of them would be cut
        together = () if g % int(np.prod([mesh.shape[a] for a in heads])) and h != g else heads
        layouts = [Layout(batch, heads, stack), *[Layout(batch, together, stack)] * 2]
        if rng.integers(3) == 0 and not options["is_causal"]:
            shape = [(1, 1, length, keys), (n, 1, 1, keys), (1, h, length, keys)][rng.integers(3)]
            arrays.append(rng.standard_normal(shape))
            layouts.append(Layout(None, None, None, stack) if shape[2] == 1 and rng.integers(2) else Layout())
        blind = not all_see_something(orders, options)
        documents = options.pop("documents", None)
        extra = {"documents": operand(documents, mesh, Layout(batch, stack))} if documents is not None else {}
        kwargs = {**options, **extra, "order": "zigzag" if zig else "natural", "context": scheme, "enable_gqa": True}
        if blind:
            return
        compare_with_serial(
            lambda q, k, v, m=None: F.scaled_dot_product_attention(q, k, v, m, **kwargs),
            theirs(*orders, {**options, "documents": documents}),
            arrays,
            mesh,
            layouts,
            out=layouts[0],
        )

    assert run_cases(case, 30, seed=51).accepted == 30


def all_see_something(orders: list[np.ndarray], options: dict[str, Any]) -> bool:
    """Whether every query sees a key: torch gives NaN to those that do not."""
    length, keys = (len(o) for o in orders)
    left, right = options.get("window") or (length + keys, length + keys)
    right = 0 if options["is_causal"] else right
    q, k = np.arange(length)[:, None], np.arange(keys)
    return bool(((k >= q - left) & (k <= q + right)).any(axis=1).all())


def sequence_operands(n: int, h: int, g: int, length: int, e: int, parts_axis: str = "s", dtype: Any = float) -> list:
    mesh, rng = shared_mesh(s=RANKS), np.random.default_rng(3)
    shapes = ((n, h, length, e), (n, g, length, e), (n, g, length, e))
    return [
        operand(rng.standard_normal(s).astype(dtype), mesh, Layout(None, None, parts_axis), requires_grad=True)
        for s in shapes
    ]


def bill(operands: list, **options: Any) -> tuple[dict, dict]:
    """What this rank sends in forward and in backward: {operation: (messages, bytes)}."""
    with counter.counting() as ahead:
        y = F.scaled_dot_product_attention(*operands, enable_gqa=True, **options)
    ones = operand(np.ones(y.shape, y.dtype), y.mesh, y.layout)
    with counter.counting() as back:
        y.backward(ones)
    return tuple({op: (t.messages, t.bytes) for (op, _), t in sums.items()} for sums in (ahead, back))


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_the_ring_sends_2_k_of_n_minus_1_over_n_and_twice_that_backward(dtype: str) -> None:
    p, n, g, e, length = RANKS, 3, 2, 5, 4 * RANKS
    ahead, back = bill(sequence_operands(n, 4, g, length, e, dtype=dtype), context="ring")
    whole = n * g * length * e * np.dtype(dtype).itemsize
    assert ahead == {"ring": (p - 1, 2 * whole * (p - 1) / p)}
    gradients = 4 if dtype == "float16" else 2  # which travel in float32
    assert back == {"ring": (2 * (p - 1), (2 + gradients) * whole * (p - 1) / p)}


@pytest.mark.ranks(min=2)
def test_heads_for_tokens_are_four_all_to_alls_of_m_over_n() -> None:
    p, n, h, e, length = RANKS, 3, 2 * RANKS, 5, 4 * RANKS
    ahead, back = bill(sequence_operands(n, h, h, length, e), context="all_to_all")
    part = n * h * length * e * 8 / p * (p - 1) / p
    assert ahead == back == {"exchange": (4 * (p - 1), 4 * part)}


@pytest.mark.ranks(min=2)
def test_few_key_heads_are_repeated_until_they_divide_before_heads_are_split() -> None:
    p, n, e, length = RANKS, 2, 3, 2 * RANKS
    ahead, back = bill(sequence_operands(n, 2 * p, 1, length, e), context="all_to_all")
    part = n * length * e * 8 / p * (p - 1) / p
    expected = (2 * 2 * p + 2 * p) * part  # query and result have 2 p heads; key and value 1, of which p are sent
    assert ahead == back == {"exchange": (4 * (p - 1), expected)}


@pytest.mark.ranks(min=2)
def test_gathering_sends_keys_and_values_to_all_and_scatters_their_gradients() -> None:
    p, n, g, e, length = RANKS, 3, 2, 5, 4 * RANKS
    ahead, back = bill(sequence_operands(n, 4, g, length, e), context="gather")
    whole = n * g * length * e * 8
    assert ahead == {"all_gather": (2, 2 * whole * (p - 1) / p)}
    assert back == {"reduce_scatter": (2, 2 * whole * (p - 1) / p)}


@pytest.mark.ranks(min=2)
def test_causal_in_natural_order_sends_no_block_further_than_it_is_needed() -> None:
    """Block j goes to the last rank; its gradient comes home from there. The last rank sends no keys."""
    p, rank, n, g, e, length = RANKS, shared_mesh(s=RANKS).rank, 2, 1, 3, 4 * RANKS
    operands = sequence_operands(n, 1, g, length, e)
    block = 2 * n * g * (length // p) * e * 8
    ahead, back = bill(operands, is_causal=True, context="ring")
    hops = rank + 1 if rank < p - 1 else 0  # this rank's block and those of all ranks before
    assert ahead == ({"ring": (hops, hops * block)} if hops else {})
    gradients = rank  # of the blocks that came here, one each
    assert back == {"ring": (hops + gradients, (hops + gradients) * block)}
    total = p * (p - 1) / 2 * block
    world = operands[0].mesh.world
    assert sum(world.gather_objects(ahead.get("ring", (0, 0))[1])) == total
    assert sum(world.gather_objects(back["ring"][1] if back else 0)) == 2 * total


@pytest.mark.ranks(min=3)
def test_a_narrow_window_sends_to_neighbours_alone() -> None:
    p, rank, n, e, length = RANKS, shared_mesh(s=RANKS).rank, 2, 3, 4 * RANKS
    block = 2 * n * (length // p) * e * 8
    inner = 0 < rank < p - 1
    ahead, back = bill(sequence_operands(n, 1, 1, length, e), window=(3, 2), context="ring")
    sent = 2 if inner else 1  # the own block, up and down
    assert ahead == {"ring": (sent, sent * block)} and back == {"ring": (2 * sent, 2 * sent * block)}
    ahead, back = bill(sequence_operands(n, 1, 1, length, e), window=(4, 0), context="ring")
    assert ahead == ({"ring": (1, block)} if rank < p - 1 else {})
    ahead, back = bill(sequence_operands(n, 1, 1, length, e), window=(0, 0), context="ring")
    assert ahead == back == {}, "a query that sees itself alone needs nobody"


def counted_work(operands: list, **options: Any) -> int:
    """Scores that the kernels of this rank are asked for: pairs of a query and a key it sees."""
    pairs = [0]

    def wrap(name: str, kernel: Callable) -> Callable:
        def counted(query: Any, key: Any, value: Any, scale: float, visible: Any, *rest: Any) -> Any:
            q = np.arange(query.shape[2]) if visible.q_positions is None else visible.q_positions
            k = np.arange(key.shape[2]) if visible.k_positions is None else visible.k_positions
            seen = k <= q[:, None] if visible.causal else np.ones((q.size, k.size), bool)
            pairs[0] += int(seen.sum()) * query.shape[0] * query.shape[1]
            return kernel(query, key, value, scale, visible, *rest)

        return counted if name == "attention_forward" else kernel

    with registry.wrapped(wrap):
        F.scaled_dot_product_attention(*operands, is_causal=True, **options)
    return pairs[0]


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("length", [8 * RANKS, 8 * RANKS + 3])
def test_zigzag_gives_every_rank_the_same_work(length: int) -> None:
    operands, world = sequence_operands(1, 2, 2, length, 3), shared_mesh(s=RANKS).world
    total = 2 * length * (length + 1) // 2
    for context in ("ring", "gather"):
        natural = world.gather_objects(counted_work(operands, context=context))
        balanced = world.gather_objects(counted_work(operands, context=context, order="zigzag"))
        assert sum(natural) == sum(balanced) == total
        assert max(natural) > 1.4 * total / RANKS
        # blocks differ by one token, which sees at most all others
        assert max(balanced) - min(balanced) <= (0 if length % (2 * RANKS) == 0 else 2 * 2 * length)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_dropout_hides_the_same_weights_under_every_layout_order_and_scheme(scheme: str) -> None:
    n, h, length = 2, 3, 11
    rng = np.random.default_rng(9)
    q, k = (rng.standard_normal((n, h, length, 4)) for _ in range(2))
    v = np.broadcast_to(np.eye(length), (n, h, length, length)).copy()  # the result is the matrix of weights
    hp.manual_seed(5)
    mesh = shared_mesh(s=RANKS)
    serial = F.scaled_dot_product_attention(*[operand(a, mesh) for a in (q, k, v)], dropout_p=0.5, is_causal=True)
    for order in ("natural", "zigzag"):
        lie = zigzag(length, RANKS if order == "zigzag" else 1)
        operands = [operand(a[:, :, lie], mesh, Layout(None, None, "s"), True) for a in (q, k, v)]
        hp.manual_seed(5)
        y = F.scaled_dot_product_attention(*operands, dropout_p=0.5, is_causal=True, order=order, context=scheme)
        assert np.allclose(y.numpy()[:, :, np.argsort(lie)], serial.numpy(), rtol=1e-12, atol=1e-15)
        seed = rng.standard_normal(y.shape)
        y.backward(operand(seed, mesh, y.layout))
        # linear in v: <g, y> = <dv, v>
        assert np.isclose((seed * y.numpy()).sum(), (operands[2].grad.numpy() * operands[2].numpy()).sum(), rtol=1e-11)
    assert 0.3 < (serial.numpy() != 0).sum() / (n * h * length * (length + 1) / 2) < 0.7


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_frames_that_are_split_beside_the_tokens(scheme: str, p: float) -> None:
    """(N, T, H, S, E): T over one axis, S over another; the mask of dropout is that of one rank."""
    for mesh in meshes():
        rng, results = np.random.default_rng(4), []
        arrays = [rng.standard_normal((2, 5, 3, 7, 2)) for _ in range(3)]
        for layout in (Layout(), Layout(None, "other", "model", "sequence")):
            hp.manual_seed(8)
            operands = [operand(a, mesh, layout, True) for a in arrays]
            y = F.scaled_dot_product_attention(*operands, dropout_p=p, is_causal=True, context=scheme)
            (y * y).sum().backward()
            results.append([y.numpy(), *[t.grad.numpy() for t in operands]])
        for serial, parallel in zip(*results, strict=True):
            assert np.abs(parallel - serial).max() <= 1e-12 * np.abs(serial).max()


@pytest.mark.parametrize("order", ["natural", "zigzag"])
def test_overlap_moves_the_wait_and_no_bit(order: str) -> None:
    def run() -> list[bytes]:
        operands = sequence_operands(3, 4, 2, 13, 3)
        y = F.scaled_dot_product_attention(*operands, is_causal=True, enable_gqa=True, order=order, context="ring")
        y.sum().backward()
        return [y.shard.tobytes(), *[t.grad.shard.tobytes() for t in operands]]

    hidden = run()
    with overlap(False):
        waited = run()
    collective_assert(shared_mesh(s=RANKS).world, hidden == waited, "bits differ")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_log_of_the_checked_mode_is_that_of_one_rank(scheme: str) -> None:
    """Also with few key heads, which are repeated before heads take the place of tokens."""
    mesh, rng, logs = shared_mesh(s=RANKS), np.random.default_rng(8), []
    arrays = [rng.standard_normal((2, h, 9, 3)) for h in (6, 1, 1)]
    for layout in (Layout(), Layout(None, None, "s")):
        operands = [operand(a, mesh, layout, True) for a in arrays]
        with hp.checked() as check:
            y = F.scaled_dot_product_attention(*operands, enable_gqa=True, is_causal=True, context=scheme)
            (y * y).sum().backward()
        logs.append(check.log)
    assert len(logs[0]) >= 6 and hp.checks.first_difference(*logs) is None


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_checked_mode_has_nothing_to_object_to(scheme: str) -> None:
    operands = sequence_operands(2, 4, 2, 9, 3)
    for options in ({"window": (3, 1)}, {"is_causal": True, "order": "zigzag"}):
        with hp.checked():
            y = F.scaled_dot_product_attention(*operands, enable_gqa=True, context=scheme, **options)
            y.sum().backward()


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_short_floats_keep_their_precision_on_the_way(scheme: str, dtype: Any) -> None:
    """Sums over ranks of half precision are made in float32."""
    operands = sequence_operands(2, 4, 4, 21, 4, dtype=dtype)
    y = F.scaled_dot_product_attention(*operands, is_causal=True, context=scheme)
    y.sum().backward()
    wide = [torch.tensor(t.numpy().astype(float), requires_grad=True) for t in operands]
    expected = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=True)
    expected.sum().backward()
    within = 4e-3 if dtype == np.float16 else 1e-5  # 4 of float16's roundings
    for got, wanted in ((y, expected), *[(t.grad, w.grad) for t, w in zip(operands, wide, strict=True)]):
        assert got.dtype == dtype
        wanted = wanted.detach().numpy()
        assert np.abs(got.numpy() - wanted).max() <= within * np.abs(wanted).max()


@pytest.mark.ranks(min=2)
def test_documents_are_gathered_once_for_all_layers() -> None:
    mesh = shared_mesh(s=RANKS)
    documents = operand(np.repeat([0, 1], [4, 2 * RANKS])[None], mesh, Layout(None, "s"))
    length = documents.shape[1]
    with counter.counting() as sent:
        outs = [
            F.scaled_dot_product_attention(*sequence_operands(1, 2, 2, length, 3), documents=documents, context="ring")
            for _ in range(3)
        ]
    assert len(outs) == 3 and sent["all_gather", "s"].messages == 1


@pytest.mark.ranks(min=2)
def test_auto_takes_heads_where_they_divide_and_send_no_more() -> None:
    p = RANKS

    def chosen(h: int, g: int, **options: Any) -> set[str]:
        with counter.counting() as sent:
            F.scaled_dot_product_attention(*sequence_operands(1, h, g, 4 * p, 3), enable_gqa=True, **options)
        return {operation for operation, _ in sent}

    everyone = shared_mesh(s=RANKS).world.gather_objects
    # as many words for 2 ranks, fewer for more
    assert everyone(chosen(2 * p, 2 * p)) == [{"exchange"}] * p
    assert {"ring"} in everyone(chosen(2 * p + 1, 2 * p + 1)), "heads that do not divide"
    assert {"ring"} in everyone(chosen(8 * p, 1)), "few key heads are cheap to pass round"
    assert everyone(chosen(8 * p, 1, is_causal=True)) == [{"exchange"}] * p, "the ring would leave ranks idle"
    assert {"ring"} in everyone(chosen(8 * p, 1, is_causal=True, order="zigzag"))
    assert {"ring"} in everyone(chosen(2 * p, 2 * p, window=(1, 0))), "a narrow window"


@pytest.mark.ranks(min=2)
def test_whole_keys_need_no_scheme_and_their_gradient_is_partial_until_it_is_used() -> None:
    mesh, rng = shared_mesh(s=RANKS), np.random.default_rng(2)
    arrays = [rng.standard_normal(s) for s in ((2, 2, 9, 3), (2, 2, 5, 3), (2, 2, 5, 3))]
    q = operand(arrays[0], mesh, Layout(None, None, "s"), True)
    k, v = (operand(a, mesh, Layout(), True) for a in arrays[1:])
    with counter.counting() as sent:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert not sent and y.layout == q.layout
    compare_with_serial(
        lambda *x: F.scaled_dot_product_attention(*x, is_causal=True),
        lambda *x: torch.nn.functional.scaled_dot_product_attention(*x, is_causal=True),
        arrays,
        mesh,
        [q.layout, Layout(), Layout()],
    )


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_mesh_that_only_plans_counts_the_same_messages(scheme: str) -> None:
    shapes = ((3, 4, 11, 5), (3, 2, 11, 5), (3, 2, 11, 5))
    mesh = shared_mesh(s=RANKS)
    virtual = VirtualMesh({"s": RANKS}, mesh.rank)

    def run(on: Any) -> tuple[dict, list]:
        make = hp.kernels.outline.zeros if on.virtual else np.zeros
        with counter.counting() as sent:
            lay = Layout(None, None, "s")
            sigs = [hp.signature.signature(on, s, lay) for s in shapes]
            operands = [hp.from_shard(make(g.local_shape), g.shape, on, lay, True) for g in sigs]
            y = F.scaled_dot_product_attention(*operands, is_causal=True, enable_gqa=True, context=scheme)
            y.sum().backward()
        return sent, [y.shard.shape, *[t.grad.shard.shape for t in operands]]

    assert run(virtual) == run(mesh)


@pytest.mark.serial
def test_a_ring_holds_a_few_blocks_of_keys_where_gathering_holds_them_all() -> None:
    """Bytes of all arrays of one of 16 ranks above its operands, at most; the unit is a block of one operand."""
    parts, shape = 16, (1, 4, 1600, 8)
    unit = int(np.prod(shape)) * 4 // parts
    peaks = {}
    for scheme in ("ring", "gather"):
        mesh = VirtualMesh({"s": parts}, 3)
        sig = hp.signature.signature(mesh, shape, Layout(None, None, "s"))
        with hp.kernels.outline.keeping() as ledger:
            arrays = [hp.kernels.outline.zeros(sig.local_shape, np.float32) for _ in range(3)]
            operands = [hp.from_shard(a, shape, mesh, sig.layout, True) for a in arrays]
            y = F.scaled_dot_product_attention(*operands, context=scheme)
            peaks[scheme] = (ledger.peak - 3 * unit) / unit
            y.sum().backward()
            peaks[f"{scheme} backward"] = (ledger.peak - 3 * unit) / unit
    # keys and values: the own block, the one here and the one that comes; the result so far, of one block, and merged
    assert peaks["ring"] < 3 * 2 + 3 + 0.5
    # backward as many blocks, their sums likewise and the own one, and gradients of four operands
    assert peaks["ring backward"] < 3 * 2 + 4 * 2 + 4 + 0.5
    assert peaks["gather"] >= 2 * parts and peaks["gather backward"] >= 4 * parts


@pytest.mark.ranks(exactly=4)
def test_tokens_split_differently_are_refused_with_the_move_that_helps() -> None:
    mesh = shared_mesh(a=2, b=2)
    q, k, v = (
        operand(np.ones((2, 2, 8, 3)), mesh, lay)
        for lay in (Layout(None, None, ("a", "b")), Layout(None, None, "a"), Layout(None, None, "a"))
    )
    for scheme in SCHEMES:
        with counter.counting() as sent, pytest.raises(LayoutError, match="tokens are split differently") as raised:
            F.scaled_dot_product_attention(q, k, v, context=scheme)
        assert "query.repartition(Layout(None, None, 'a'))" in str(raised.value)
        collective_assert(mesh.world, not sent, "a message before the error")
    mask = operand(np.ones((1, 1, 8, 8)), mesh, Layout(None, None, "b"))
    with pytest.raises(LayoutError, match="attn_mask .* is split differently; repartition it to"):
        F.scaled_dot_product_attention(k, k, v, mask)
