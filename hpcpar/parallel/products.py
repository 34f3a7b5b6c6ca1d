"""What follows from how one product ``Y = X W^T`` lies: layouts and plans for networks, and closed forms.

The grids of the literature, which differ in this alone, are in `hpcpar.parallel.grids`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from hpcpar.layout.layout import Layout
from hpcpar.mesh import Mesh
from hpcpar.parallel.plan import Placement

Axes = tuple[str, ...]
Bill = dict[tuple[str, str], float]

ROLES = ("first", "second", "heads", "merge", "norm", "embedding")
"""What a module can be in a plan: see `Grid.plan`."""


class Product(NamedTuple):
    """Which axes split what in ``Y = X W^T``: X is (rows, inputs), W is (outputs, inputs), Y is (rows, outputs)."""

    rows: Axes
    inputs: Axes
    weight_outputs: Axes
    weight_inputs: Axes
    out_rows: Axes
    outputs: Axes

    @property
    def bias(self) -> Axes:
        """Which axes split the bias: those of the outputs of the product itself, before Y is gathered or scattered."""
        return tuple(a for a in self.weight_outputs if a not in self.out_rows)


class Operands(NamedTuple):
    """Layouts of one linear layer: its input, its weight as (outputs, inputs), its bias and its result."""

    x: Layout
    weight: Layout
    bias: Layout
    out: Layout


class Held(NamedTuple):
    """Elements of one rank."""

    x: float
    weight: float
    out: float


class Words(NamedTuple):
    """Elements that a rank sends, by (operation, axes joined by "+"), in each phase of a step.

    Backward includes the reductions of weights that are split over the axis; what is summed over axes on which a weight
    is replicated belongs to the synchronisation of gradients.
    """

    forward: Bill
    backward: Bill
    synchronisation: Bill

    def __add__(self, other: Words) -> Words:  # type: ignore[override]
        return Words(*[added(a, b) for a, b in zip(self, other, strict=True)])


def added(a: Bill, b: Bill) -> Bill:
    """Return the sum of two bills."""
    return {key: a.get(key, 0.0) + b.get(key, 0.0) for key in {**a, **b}}


@dataclass(frozen=True)
class Grid(ABC):
    """Base of the grids: what follows from how one product lies.

    A pair of layers, ``first`` and ``second``, closes: the second takes the result of the first as it lies, and leaves
    its own as the first one's input lay. Grids that alternate exchange two axes in the second layer.
    """

    @property
    @abstractmethod
    def axes(self) -> dict[str, int]:
        """Length of each axis of the mesh, the last varying fastest."""

    @abstractmethod
    def product(self, second: bool = False) -> Product:
        """Return which axes split the operands of a layer."""

    @abstractmethod
    def product_words(self, m: int, k: int, n: int, second: bool = False) -> Words:
        """Return what a rank sends for one layer without bias: `m` rows, `k` inputs, `n` outputs, all dividing evenly.

        Moved operands are kept for backward. Collectives count as bandwidth-optimal ones (`hpcpar.transport.counter`).
        """

    def weight_words(self, k: int, n: int, second: bool = False) -> Bill:
        """Return what a rank sends to gather a weight where it is used; nothing in grids that do not gather it."""
        return {}

    def mesh(self, comm: Any = None) -> Mesh:
        """Return a mesh with the axes of this grid, over all ranks or those of `comm`. Collective."""
        return Mesh(comm, **self.axes)

    # ---- layouts

    def operands(self, ndim: int = 2, second: bool = False) -> Operands:
        """Return the layouts of a linear layer whose input has `ndim` dims: rows are dim 0, features the last."""
        p = self.product(second)
        between = [None] * (ndim - 2)
        return Operands(
            Layout(p.rows, *between, p.inputs),
            Layout(p.weight_outputs, p.weight_inputs),
            Layout(p.bias),
            Layout(p.out_rows, *between, p.outputs),
        )

    def stream(self, ndim: int = 3) -> Layout:
        """Return the layout of what enters and leaves a block, (samples, ..., features) with `ndim` dims."""
        return self.operands(ndim).x

    @property
    def samples(self) -> Layout:
        """Layout of an array whose dim 0 alone is split, as that of the stream: tokens, positions, labels."""
        return Layout(self.product().rows)

    def plan(
        self,
        roles: Mapping[str, str],
        ndim: int = 3,
        *,
        bias: bool = True,
        keep: str | None = None,
        overlap: Collection[str] | None = None,
    ) -> dict[str, Placement]:
        """Return a plan for `hpcpar.parallelize`.

        Parameters
        ----------
        roles : mapping of str to str
            From patterns of module names to what the modules are:

            - ``"first"``, ``"second"``: linear layers, weight (outputs, inputs), bias (outputs,); any layer that takes
              the stream is a first one, whatever takes the result of a first one is a second one.
            - ``"heads"``: a first layer, weight (heads, head_dim, inputs), bias (heads, head_dim): its result (samples,
              heads, tokens, head_dim) is split by heads.
            - ``"merge"``: a second layer, weight (outputs, heads, head_dim), that takes such a result.
            - ``"norm"``: a normalisation over the features of the stream, weight and bias (features,).
            - ``"embedding"``: a table (entries, features) whose result is the stream.
        ndim : int
            Dims of the stream: 3 for (samples, tokens, features).
        bias : bool
            Whether the layers and norms have one. Where some do, two plans are joined: ``{**plan, **other}``.
        keep : {"moved", "source"}, optional
            Whether gathered weights stay for backward, or are gathered again: `Placement`.
        overlap : collection of {"reduce", "scatter", "gather"}, optional
            The three overlaps of the 4D method, for any grid: `Placement`. Products are then computed in pieces.

        Raises
        ------
        ValueError
            Another role.

        Notes
        -----
        A bias is split as the outputs of the product are, and is added once, whatever is partial.
        """
        unknown = [role for role in roles.values() if role not in ROLES]
        if unknown:
            raise ValueError(f"a module of a grid is one of {', '.join(ROLES)}, got {unknown[0]!r}")
        return {pattern: self._placement(role, ndim, bias, keep, overlap) for pattern, role in roles.items()}

    def chain(self, names: Sequence[str], ndim: int = 2, **rest: Any) -> dict[str, Placement]:
        """Return a plan for linear layers one behind the other, first and second in turn; the rest as in `plan`."""
        return self.plan({name: ("first", "second")[i % 2] for i, name in enumerate(names)}, ndim, **rest)

    def _placement(
        self, role: str, ndim: int, biased: bool, keep: str | None, overlap: Collection[str] | None
    ) -> Placement:
        x, weight, bias, out = self.operands(ndim, second=role in ("second", "merge"))
        if role == "embedding":
            return Placement(out=x, weight=Layout(None, x.entry(ndim - 1)))
        if role == "norm":
            weight = bias = Layout(x.entry(ndim - 1))
            out = x
        elif role == "heads":
            weight = Layout(weight.entry(0), None, weight.entry(1))
            out = _by_heads(out, ndim)
        elif role == "merge":
            x = _by_heads(x, ndim)
        parameters = {"weight": weight, "bias": bias} if biased else {"weight": weight}
        if role == "norm":
            return Placement(x, out, **parameters)
        return Placement(x, out, keep=keep, overlap=overlap, **parameters)

    # ---- closed forms

    def held(self, m: int, k: int, n: int, second: bool = False) -> Held:
        """Return how many elements of X (m, k), W (n, k) and Y (m, n) a rank holds, where all divides evenly."""
        p = self.product(second)
        return Held(
            m * k / self.parts(p.rows, p.inputs),
            n * k / self.parts(p.weight_outputs, p.weight_inputs),
            m * n / self.parts(p.out_rows, p.outputs),
        )

    def words(
        self,
        m: int,
        k: int,
        n: int,
        second: bool = False,
        *,
        bias: bool = False,
        input_gradient: bool = True,
        keep: str | None = None,
    ) -> Words:
        """Return what a rank sends for one layer of `m` rows, `k` inputs and `n` outputs, where all divides evenly.

        Parameters
        ----------
        bias : bool
            With the sum of its gradient.
        input_gradient : bool
            False for the first layer of a network, whose input needs none.
        keep : {"moved", "source"}, optional
            As of `plan`: with "source" weights are gathered once more in backward.

        Notes
        -----
        Layers that share their input, as q, k and v do, gather it once and add its gradients before the message: they
        are one layer with the outputs of all.
        """
        p = self.product(second)
        words = self.product_words(m, k, n, second)
        if not input_gradient:
            words = words._replace(backward=self._without_input(words.backward, p))
        if keep == "source":
            words += Words({}, self.weight_words(k, n, second), {})
        if bias:
            rows = [a for a in p.rows if a in p.out_rows]
            words += Words({}, {}, self.all_reduced(n / self.parts(p.bias), *rows))
        return words

    def norm_words(self, m: int, c: int) -> Words:
        """Return what a rank sends for a layer norm, with weight and bias, of `m` rows of `c` features of the stream.

        Float64 words: (mean, M2) of each row are gathered over the axes that split the features (up to 32 ranks), and
        two sums of each row are reduced in backward.
        """
        p = self.product()
        rows, parts = m / self.parts(p.rows), self.parts(p.inputs)
        forward = {("all_gather", self._name(*p.inputs)): (parts - 1) * 2 * rows}
        sums = self.all_reduced(2 * rows, *p.inputs)
        return Words(_kept(forward), sums, self.all_reduced(2 * c / parts, *p.rows))

    def _without_input(self, backward: Bill, p: Product) -> Bill:
        """`backward` without the message that completes the gradient of X."""
        lost = [a for a in p.weight_outputs if a not in p.weight_inputs and a not in p.out_rows]
        return {key: w for key, w in backward.items() if key[1] != self._name(*lost)}

    def parts(self, *stacks: Axes) -> int:
        """Return into how many parts the given axes split."""
        return prod(self.axes[a] for stack in stacks for a in stack)

    def _name(self, *axes: str) -> str:
        """The name of the communicator over `axes`: those longer than 1, in mesh order."""
        return "+".join(a for a, length in self.axes.items() if a in axes and length > 1)

    def all_reduced(self, size: float, *axes: str) -> Bill:
        """Return the words of an all-reduce of `size` elements."""
        p = prod(self.axes[a] for a in axes)
        return _kept({("all_reduce", self._name(*axes)): 2 * (p - 1) / p * size})

    def gathered(self, size: float, axis: str) -> Bill:
        """Return the words of an all-gather of what has `size` elements when it is whole."""
        p = self.axes[axis]
        return _kept({("all_gather", axis): (p - 1) / p * size})

    def scattered(self, size: float, axis: str) -> Bill:
        """Return the words of a reduce-scatter of what has `size` elements before."""
        p = self.axes[axis]
        return _kept({("reduce_scatter", axis): (p - 1) / p * size})

    def __post_init__(self) -> None:
        for axis, n in self.axes.items():
            if isinstance(n, bool) or not isinstance(n, int) or n < 1:
                raise ValueError(f"{type(self).__name__}: {axis} has length {n!r}; lengths are integers of at least 1")


def _by_heads(layout: Layout, ndim: int) -> Layout:
    """The layout of (samples, ..., heads, tokens, head_dim) for that of (samples, ..., tokens, features)."""
    return Layout(layout.entry(0), *[None] * (ndim - 3), layout.entry(ndim - 1))


def _kept(bill: Bill) -> Bill:
    return {key: words for key, words in bill.items() if words}
