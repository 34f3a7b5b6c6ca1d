"""Which modules of a model are run again in backward, as data: patterns of names."""

from __future__ import annotations

from collections.abc import Sequence

from hpcpar import remaking
from hpcpar.names import matching
from hpcpar.nn.module import Module


def recompute(model: Module, pattern: str = "", ops: Sequence[str] | None = None) -> Module:
    """Mark modules whose activations are not kept for backward, and return the model.

    Parameters
    ----------
    pattern : str
        Of module names, as in `parallelize`: ``"blocks.*"``, or ``""``, the model itself. Of modules inside each other
        the outermost ones that match are marked.
    ops : sequence of str, optional
        Keep activations but for results of these operations, which cost little to make again
        (`hpcpar.recompute_results`): ``("gelu", "layer_norm")``. Without it the modules keep their inputs only and run
        again as a whole (`hpcpar.recompute`). An empty sequence takes marks away.

    Raises
    ------
    ValueError
        The pattern matches no module, or an operation is not one of them.
    """
    names = dict(model.named_modules())
    found = matching("recompute", pattern, names, "module")
    operations = None if ops is None else remaking.checked("recompute", ops)
    for name in found:
        if any(name != other and _inside(name, other) for other in found):
            continue
        names[name].recomputed = operations is None
        names[name].not_kept = operations or frozenset()
    return model


def _inside(name: str, other: str) -> bool:
    return not other or name.startswith(f"{other}.")
