"""In which dtype the layers of a model multiply: decided for each by name."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from hpcpar.kernels import COMPUTE_DTYPES
from hpcpar.nn.module import Module


def set_compute_dtype(module: Module, compute_dtype: str, keep: Sequence[str] = ()) -> list[str]:
    """Let the layers inside a module multiply in a dtype, by the attribute `compute_dtype` of those that have one.

    Parameters
    ----------
    compute_dtype : {"float32", "bfloat16", "float16"}
        See `functional.conv3d` and `functional.einsum`. Weights, activations, sums and gradients stay float32.
    keep : sequence of str
        Names of layers that stay as they are, with the wildcards of a shell (``"down*.conv1"``). The output layer of a
        `Decoder` that shares the table of its embedding has the name ``"embedding"``.

    Returns
    -------
    list of str
        Names of the layers that were set.

    Raises
    ------
    ValueError
        An unknown dtype, one in which a layer does not multiply, or an entry of `keep` that names no such layer.
    """
    if compute_dtype not in COMPUTE_DTYPES:
        raise ValueError(f"compute_dtype is one of {', '.join(COMPUTE_DTYPES)}, got {compute_dtype!r}")
    found = {name: m for name, m in module.named_modules() if hasattr(m, "compute_dtype")}
    idle = [pattern for pattern in keep if not any(fnmatchcase(name, pattern) for name in found)]
    if idle:
        raise ValueError(f"{', '.join(idle)}: no layer that multiplies has such a name; there are {', '.join(found)}")
    chosen = [name for name in found if not any(fnmatchcase(name, pattern) for pattern in keep)]
    for name in chosen:
        served = getattr(found[name], "compute_dtypes", COMPUTE_DTYPES)
        if compute_dtype not in served:
            raise ValueError(
                f"{name}: {type(found[name]).__name__} multiplies in {' or '.join(served)}, not in "
                f"{compute_dtype}; name it in `keep`"
            )
    for name in chosen:
        found[name].compute_dtype = compute_dtype
    return chosen
