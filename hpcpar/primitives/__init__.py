"""Linear operators between ranks, on local arrays; each names its adjoint."""

from hpcpar.primitives.collectives import all_gather, all_reduce, all_to_all, broadcast, reduce, reduce_scatter, shift
from hpcpar.primitives.repartition import move
from hpcpar.primitives.stencil import halo_exchange, halo_exchange_adjoint

__all__ = [
    "all_gather", "all_reduce", "all_to_all", "broadcast", "halo_exchange", "halo_exchange_adjoint", "move", "reduce",
    "reduce_scatter", "shift",
]  # fmt: skip
