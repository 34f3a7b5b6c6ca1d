"""Plans of one dim against the definition, on drawn maps."""

import random

import numpy as np

from hpcpar.layout.blocks import owned
from hpcpar.layout.index_maps import flip_map, pad_map, roll_map, slice_map
from hpcpar.layout.maps import FILL, map_of_indices, out_size, transposed_map, window_map
from hpcpar.layout.plan import block_plan, dim_plan
from hpcpar.layout.resample_maps import taps_map


def random_maps(rng, n, p):
    """Draw one arbitrary map for each rank: repeats, gaps, any order."""
    return [map_of_indices([rng.randint(-1, n - 1) for _ in range(rng.randint(0, 9))]) for _ in range(p)]


def drawn_plans(seed, count):
    """Yield (maps, plans) of all ranks for arbitrary maps and for those of the operations in turn."""
    rng = random.Random(seed)
    for case in range(count):
        n, p = rng.randint(1, 16), rng.randint(1, 6)
        kind = case % 7
        if kind == 0:
            maps = random_maps(rng, n, p)
            yield maps, [dim_plan(n, p, r, maps.__getitem__) for r in range(p)]
            continue
        k, s, d, lo, hi = rng.randint(1, 5), rng.randint(1, 3), rng.randint(1, 2), rng.randint(0, 4), rng.randint(0, 4)
        if kind == 1:
            out, builder, args = out_size("conv", n, k, s, d, lo, hi), window_map, (k, s, d, lo)
        elif kind == 2:
            mode = rng.choice(["reflect", "replicate", "circular"])
            out, builder, args = out_size("conv", n, k, s, d, lo, hi), window_map, (k, s, d, lo, mode)
        elif kind == 3:
            out, builder, args = out_size("transposed", n, k, s, d, lo, hi), transposed_map, (k, s, d, lo)
        elif kind == 4:
            out = rng.randint(1, 20)
            builder, args = taps_map, (out, rng.choice(["nearest", "linear", "cubic"]))
        elif kind == 5:
            out, builder, args = n + lo - 1, pad_map, (lo, -1, rng.choice(["constant", "replicate"]))
        else:
            step = rng.choice([-2, -1, 2])
            out = len(range(n)[::step])
            builder, args = rng.choice(
                [(roll_map, (lo,)), (flip_map, ()), (slice_map, (0 if step > 0 else n - 1, step))]
            )
            out = out if builder is slice_map else n
        if out < 1:
            continue
        maps = [builder(n, *owned(out, p, r), *args) for r in range(p)]
        yield maps, [block_plan(builder, n, p, r, out, *args) for r in range(p)]


def shown(runs, size, source):
    """Apply runs: the array that shows `source` through them, FILL elsewhere."""
    result = np.full(size, FILL)
    for dst, src, length, step in runs:
        result[dst : dst + length] = source[src + step * np.arange(length)]
    return result


def test_messages_fill_the_buffers_as_the_maps_say_and_both_sides_agree():
    for maps, plans in drawn_plans(1, 4000):
        n, p = plans[0].n, plans[0].parts
        blocks = [np.arange(*owned(n, p, r)) for r in range(p)]
        for r, plan in enumerate(plans):
            buffer = shown(plan.own, plan.size, blocks[r]) if plan.own else np.full(plan.size, FILL)
            for q, piece in plan.recv.items():
                sent = plans[q].send[r]
                assert sent.count == piece.count > 0
                message = shown(sent.runs, sent.count, blocks[q])
                needed = {i for i in maps[r].indices().tolist() if i in set(blocks[q].tolist())}
                assert message.tolist() == sorted(needed), "a message holds each needed element once, ascending"
                arrived = shown(piece.runs, plan.size, message)
                if q == r:
                    assert (arrived[arrived != FILL] == buffer[arrived != FILL]).all()
                else:
                    assert (buffer[arrived != FILL] == FILL).all(), "no position is written twice"
                    buffer = np.where(arrived == FILL, buffer, arrived)
            assert buffer.tolist() == maps[r].indices().tolist()
            assert set(plan.send) == {q for q in range(p) if r in plans[q].recv}
            filled = {j for a, b in plan.holes for j in range(a, b)}
            assert filled == {j for j, i in enumerate(buffer) if i == FILL}


def test_plans_without_padding_drop_exactly_the_fill_at_the_ends():
    for maps, plans in drawn_plans(2, 3000):
        for r, plan in enumerate(plans):
            cut = plan.without_padding
            before, after = cut.padding
            index = maps[r].indices()
            assert (before, after) == _fill_at_ends(index)
            assert cut.size == plan.size - before - after
            kept = shown(cut.own, cut.size, np.arange(*plan.block))
            whole = shown(plan.own, plan.size, np.arange(*plan.block))
            assert kept.tolist() == whole[before : plan.size - after].tolist()
            assert not cut.holes or (cut.holes[0][0] > 0 and cut.holes[-1][1] < cut.size)
            assert {q: piece.count for q, piece in cut.recv.items()} == {q: p.count for q, p in plan.recv.items()}


def _fill_at_ends(index):
    covered = np.flatnonzero(index != FILL)
    return (len(index), 0) if not covered.size else (int(covered[0]), len(index) - 1 - int(covered[-1]))


def test_at_home_is_a_longest_stretch_without_anything_borrowed():
    for maps, plans in drawn_plans(3, 2000):
        for r, plan in enumerate(plans):
            a, b = plan.block
            free = "".join("." if i == FILL or a <= i < b else "x" for i in maps[r].indices())
            j0, j1 = plan.at_home
            assert "x" not in free[j0:j1]
            assert j1 - j0 == max(map(len, free.split("x")))


def test_the_plan_of_a_convolution_borrows_one_plane_from_each_neighbour():
    plan = block_plan(window_map, 32, 4, 1, 32, 3, 1, 1, 1)
    assert {q: piece.count for q, piece in plan.recv.items()} == {0: 1, 1: 8, 2: 1}
    assert {q: piece.count for q, piece in plan.send.items()} == {0: 1, 1: 8, 2: 1}
    assert str(plan) == "1 of 4 owns [8, 16) of 32, buffer of 10: 8 own, 1 from 0, 1 from 2; lends 1 to 0, 1 to 2"


def test_a_wide_kernel_borrows_from_ranks_beyond_the_neighbour():
    plan = block_plan(window_map, 8, 8, 0, 8, 7, 1, 1, 3)
    assert {q: piece.count for q, piece in plan.recv.items()} == {0: 1, 1: 1, 2: 1, 3: 1}


def test_an_element_needed_twice_travels_once():
    plan = block_plan(window_map, 4, 2, 0, 4, 3, 1, 1, 1, "circular")
    assert plan.recv[1].count == 2, "both ends of the buffer come from the one other rank"
    few = dim_plan(4, 2, 0, [map_of_indices([3, 3, 0, 3]), map_of_indices([])].__getitem__)
    assert few.recv[1].count == 1


def test_a_rank_without_a_block_receives_and_sends_nothing():
    plan = block_plan(window_map, 2, 4, 0, 2, 3, 1, 1, 1)
    assert (plan.size, plan.recv, plan.send, plan.is_identity) == (0, {}, {}, True)


def test_drift_between_the_blocks_of_n_and_half_n_stays_within_two_elements():
    for p in range(1, 20):
        for n in range(2, 6 * p):
            for r in range(p):
                plan = block_plan(window_map, n, p, r, out_size("pool", n, 2, 2), 2, 2, 1, 0)
                assert sum(piece.count for q, piece in plan.recv.items() if q != r) <= 2


def test_plans_of_equal_arguments_are_one_object():
    assert block_plan(window_map, 9, 3, 1, 9, 3, 1, 1, 1) is block_plan(window_map, 9, 3, 1, 9, 3, 1, 1, 1)
