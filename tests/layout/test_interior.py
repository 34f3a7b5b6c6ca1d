"""Interior and rim of output blocks against brute force."""

import random
from itertools import product

from hpcpar.layout.blocks import owned
from hpcpar.layout.interior import interior, rim, windows_inside
from hpcpar.layout.maps import out_size


def test_interior_is_every_output_that_reads_only_owned_elements_or_padding():
    rng = random.Random(1)
    for _ in range(6000):
        n, k, s, d = rng.randint(1, 30), rng.randint(1, 5), rng.randint(1, 3), rng.randint(1, 3)
        lo, hi = rng.randint(0, 5), rng.randint(0, 5)
        out = out_size("conv", n, k, s, d, lo, hi)
        if out < 1:
            continue
        p = rng.randint(1, 6)
        r = rng.randrange(p)
        a, b = owned(n, p, r)
        o0, o1 = owned(out, p, r)
        i0, i1 = interior(n, a, b, o0, o1, k, s, d, lo)
        # the hull of a window counts: with dilation, a gap over a neighbour's block is no element read, but the
        # buffer of the interior is an interval
        hulls = {o: (max(o * s - lo, 0), min(o * s - lo + d * (k - 1) + 1, n)) for o in range(o0, o1)}
        inside = [o for o, (u, v) in hulls.items() if b > a and (u >= v or (a <= u and v <= b))]
        touching = [o for o in inside if hulls[o][0] < hulls[o][1]]
        assert set(touching) <= set(range(i0, i1)) <= set(inside), (n, k, s, d, lo, p, r)


def test_windows_inside_a_span_of_the_buffer():
    rng = random.Random(2)
    for _ in range(3000):
        k, s, d, count = rng.randint(1, 5), rng.randint(1, 4), rng.randint(1, 3), rng.randint(0, 8)
        size = (count - 1) * s + d * (k - 1) + 1 if count else 0
        j0 = rng.randint(0, size)
        j1 = rng.randint(j0, size)
        inside = [o for o in range(count) if j0 <= o * s and o * s + d * (k - 1) < j1]
        assert list(range(*windows_inside(j0, j1, count, k, s, d))) == inside


def test_rim_and_interior_are_disjoint_and_complete():
    rng = random.Random(3)
    for _ in range(2000):
        block, inner = [], []
        for _dim in range(rng.randint(1, 3)):
            o0 = rng.randint(0, 5)
            o1 = o0 + rng.randint(0, 4)
            i0 = rng.randint(o0, o1)
            block.append((o0, o1))
            inner.append((i0, rng.randint(i0, o1)))
        boxes = rim(block, inner)
        points = [point for box in boxes for point in product(*(range(a, b) for a, b in box))]
        points += list(product(*(range(a, b) for a, b in inner)))
        assert sorted(points) == sorted(product(*(range(a, b) for a, b in block)))
        assert len(boxes) <= 2 * len(block)
