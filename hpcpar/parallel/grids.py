"""The process grids of the literature as plans: 1.5D, SUMMA, Tesseract, the cube and the four-dimensional grid.

Each of them is a placement of the three operands of ``Y = X W^T`` on named axes; which operand is gathered, and what is
reduced, follows from the layouts (`hpcpar.functional.einsum`). A grid makes the mesh, says how operands lie, gives a
plan for `hpcpar.parallelize`, and knows in closed form what its ranks hold and send.

====================  ==================================================  =============================
grid                  source                                              axes
====================  ==================================================  =============================
`Integrated`          Gholami et al. 2018 (SPAA), the 1.5D algorithm      Pr, Pc
`Summa`               van de Geijn and Watts 1997; Xu et al. 2021         row, col
`Tesseract`           Wang et al. 2021                                    depth, row, col
`Cube`                Bian et al. 2021                                    i, j, l
`FourD`               Singh et al. 2023, 2025 (AxoNN)                     data, z, y, x
====================  ==================================================  =============================
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
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
        return Words(*[_sum(a, b) for a, b in zip(self, other, strict=True)])


def _sum(a: Bill, b: Bill) -> Bill:
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
        self, m: int, k: int, n: int, second: bool = False, bias: bool = False, input_gradient: bool = True
    ) -> Words:
        """Return what a rank sends for one layer of `m` rows, `k` inputs and `n` outputs, where all divides evenly.

        Parameters
        ----------
        bias : bool
            With the sum of its gradient.
        input_gradient : bool
            False for the first layer of a network, whose input needs none.

        Notes
        -----
        Layers that share their input, as q, k and v do, gather it once and add its gradients before the message: they
        are one layer with the outputs of all.
        """
        p = self.product(second)
        words = self.product_words(m, k, n, second)
        if not input_gradient:
            words = words._replace(backward=self._without_input(words.backward, p))
        if bias:
            rows = [a for a in p.rows if a in p.out_rows]
            words += Words({}, {}, self._all_reduce(n / self.parts(p.bias), *rows))
        return words

    def norm_words(self, m: int, c: int) -> Words:
        """Return what a rank sends for a layer norm, with weight and bias, of `m` rows of `c` features of the stream.

        Float64 words: (mean, M2) of each row are gathered over the axes that split the features (up to 32 ranks), and
        two sums of each row are reduced in backward.
        """
        p = self.product()
        rows, parts = m / self.parts(p.rows), self.parts(p.inputs)
        forward = {("all_gather", self._name(*p.inputs)): (parts - 1) * 2 * rows}
        sums = self._all_reduce(2 * rows, *p.inputs)
        return Words(_kept(forward), sums, self._all_reduce(2 * c / parts, *p.rows))

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

    def _all_reduce(self, size: float, *axes: str) -> Bill:
        p = prod(self.axes[a] for a in axes)
        return _kept({("all_reduce", self._name(*axes)): 2 * (p - 1) / p * size})

    def _gather(self, size: float, axis: str) -> Bill:
        """All-gather of what has `size` elements when it is whole."""
        p = self.axes[axis]
        return _kept({("all_gather", axis): (p - 1) / p * size})

    def _scatter(self, size: float, axis: str) -> Bill:
        """Reduce-scatter of what has `size` elements before."""
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


@dataclass(frozen=True)
class Integrated(Grid):
    """Model and batch parallelism on a Pr x Pc grid, the 1.5D algorithm (Gholami et al. 2018).

    Weights are split by outputs over Pr and replicated over Pc, samples are split over Pc and replicated over Pr.

    Parameters
    ----------
    Pr, Pc : int
    gather : {"out", "input"}
        The paper gathers Y over Pr before the nonlinearity, and reduces dX over Pr. With ``"input"`` Y stays split, the
        next layer gathers it as its input, and dX is reduce-scattered: half the words in backward, and nonlinearities
        are computed once.
    """

    Pr: int
    Pc: int
    gather: str = "out"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gather not in ("out", "input"):
            raise ValueError(f"Integrated: what is gathered is 'out' or 'input', got {self.gather!r}")

    @property
    def axes(self) -> dict[str, int]:
        return {"Pc": self.Pc, "Pr": self.Pr}

    def product(self, second: bool = False) -> Product:
        features = ("Pr",) if self.gather == "input" else ()
        return Product(("Pc",), features, ("Pr",), (), ("Pc",), features)

    def product_words(self, m: int, k: int, n: int, second: bool = False) -> Words:
        sync = self._all_reduce(k * n / self.Pr, "Pc")
        if self.gather == "input":
            return Words(self._gather(m * k / self.Pc, "Pr"), self._scatter(m * k / self.Pc, "Pr"), sync)
        return Words(self._gather(m * n / self.Pc, "Pr"), self._all_reduce(m * k / self.Pc, "Pr"), sync)


@dataclass(frozen=True)
class Tesseract(Grid):
    """q x q x d: layers of q x q ranks that share the weights and split the samples (Wang et al. 2021).

    X is split by rows over (depth, row) and by features over col, W is q x q and replicated over depth. The operands
    are gathered where the paper broadcasts panels: the same words, with whole panels in memory. The sum of dW over
    depth is part of the synchronisation of gradients.

    Parameters
    ----------
    q, d : int
        Side and depth; ``d = 1`` is SUMMA.
    """

    q: int
    d: int = 1

    @property
    def axes(self) -> dict[str, int]:
        return {"depth": self.d, "row": self.q, "col": self.q}

    def product(self, second: bool = False) -> Product:
        rows = ("depth", "row")
        return Product(rows, ("col",), ("col",), ("row",), rows, ("col",))

    def product_words(self, m: int, k: int, n: int, second: bool = False) -> Words:
        panel_x, panel_w = m * k / (self.q * self.d), k * n / self.q
        return Words(
            _sum(self._gather(panel_x, "col"), self._gather(panel_w, "row")),
            _sum(self._scatter(panel_x, "col"), self._scatter(panel_w, "row")),
            self._all_reduce(k * n / self.q**2, "depth"),
        )


@dataclass(frozen=True)
class Summa(Tesseract):
    """q x q: Tesseract of depth 1 (van de Geijn and Watts 1997; Optimus: Xu et al. 2021).

    Parameters
    ----------
    q : int
    """

    d: int = field(default=1, init=False)


@dataclass(frozen=True)
class Cube(Grid):
    """q x q x q: X, W and Y each split over the whole cube (Bian et al. 2021).

    X is gathered over j, W over i, and Y reduce-scattered over l. The second layer exchanges j and l.

    Parameters
    ----------
    q : int
    """

    q: int

    @property
    def axes(self) -> dict[str, int]:
        return {"i": self.q, "j": self.q, "l": self.q}

    def _names(self, second: bool) -> tuple[str, str]:
        """The axes that split outputs and inputs."""
        return ("l", "j") if second else ("j", "l")

    def product(self, second: bool = False) -> Product:
        outer, inner = self._names(second)
        return Product(("i", outer), (inner,), (outer, "i"), (inner,), ("i", inner), (outer,))

    def product_words(self, m: int, k: int, n: int, second: bool = False) -> Words:
        outer, inner = self._names(second)
        x, w, y = (size / self.q**2 for size in (m * k, k * n, m * n))
        return Words(
            _sum(_sum(self._gather(x, outer), self._gather(w, "i")), self._scatter(y, inner)),
            _sum(_sum(self._gather(y, inner), self._scatter(x, outer)), self._scatter(w, "i")),
            {},
        )


@dataclass(frozen=True)
class FourD(Grid):
    """x * y * z tensor parallelism times data parallelism (AxoNN: Singh et al. 2023, 2025).

    Samples are split over data and z. W is split by inputs over x, by outputs over y, and its blocks over z, where they
    are gathered on use; Y is summed over x. The second layer exchanges x and y. Alone, x is Megatron's row and y its
    column, z is sharded state (FSDP), data is data parallelism.

    Parameters
    ----------
    x, y, z, data : int
        Ranks with neighbouring numbers differ in x, then in y, z and data.
    """

    x: int = 1
    y: int = 1
    z: int = 1
    data: int = 1

    @property
    def axes(self) -> dict[str, int]:
        return {"data": self.data, "z": self.z, "y": self.y, "x": self.x}

    def _names(self, second: bool) -> tuple[str, str]:
        return ("y", "x") if second else ("x", "y")

    def product(self, second: bool = False) -> Product:
        x, y = self._names(second)
        rows = ("data", "z")
        return Product(rows, (x,), (y,), (x, "z"), rows, (y,))

    def product_words(self, m: int, k: int, n: int, second: bool = False) -> Words:
        x, y = self._names(second)
        block = k * n / (self.x * self.y)
        rows = m / (self.data * self.z)
        return Words(
            _sum(self._gather(block, "z"), self._all_reduce(rows * n / self.axes[y], x)),
            _sum(self._scatter(block, "z"), self._all_reduce(rows * k / self.axes[x], y)),
            self._all_reduce(block / self.z, "data"),
        )
