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

from dataclasses import dataclass, field

from hpcpar.parallel.products import ROLES, Bill, Grid, Held, Operands, Product, Words, added

__all__ = [
    "ROLES", "Cube", "FourD", "Grid", "Held", "Integrated", "Operands", "Product", "Summa", "Tesseract", "Words",
]  # fmt: skip


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
        sync = self.all_reduced(k * n / self.Pr, "Pc")
        if self.gather == "input":
            return Words(self.gathered(m * k / self.Pc, "Pr"), self.scattered(m * k / self.Pc, "Pr"), sync)
        return Words(self.gathered(m * n / self.Pc, "Pr"), self.all_reduced(m * k / self.Pc, "Pr"), sync)


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

    def weight_words(self, k: int, n: int, second: bool = False) -> Bill:
        return self.gathered(k * n / self.q, "row")

    def product_words(self, m: int, k: int, n: int, second: bool = False) -> Words:
        panel = m * k / (self.q * self.d)
        return Words(
            added(self.gathered(panel, "col"), self.weight_words(k, n)),
            added(self.scattered(panel, "col"), self.scattered(k * n / self.q, "row")),
            self.all_reduced(k * n / self.q**2, "depth"),
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

    def weight_words(self, k: int, n: int, second: bool = False) -> Bill:
        return self.gathered(k * n / self.q**2, "i")

    def product_words(self, m: int, k: int, n: int, second: bool = False) -> Words:
        outer, inner = self._names(second)
        x, w, y = (size / self.q**2 for size in (m * k, k * n, m * n))
        return Words(
            added(added(self.gathered(x, outer), self.weight_words(k, n)), self.scattered(y, inner)),
            added(added(self.gathered(y, inner), self.scattered(x, outer)), self.scattered(w, "i")),
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

    def weight_words(self, k: int, n: int, second: bool = False) -> Bill:
        return self.gathered(k * n / (self.x * self.y), "z")

    def product_words(self, m: int, k: int, n: int, second: bool = False) -> Words:
        x, y = self._names(second)
        block = k * n / (self.x * self.y)
        rows = m / (self.data * self.z)
        return Words(
            added(self.weight_words(k, n), self.all_reduced(rows * n / self.axes[y], x)),
            added(self.scattered(block, "z"), self.all_reduced(rows * k / self.axes[x], y)),
            self.all_reduced(block / self.z, "data"),
        )
