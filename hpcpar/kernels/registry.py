"""One registry chooses the implementation of every kernel.

Operations come in families. For each family there is an order of preference; an implementation that is missing on this
machine is passed over with one warning, and one that does not serve a call (a dtype, a geometry) declines it by
returning NotImplemented and the next is asked. The generic implementation is last and serves everything. CuPy arrays
have an order of their own.

The choice is overridden by the environment, ``HPCPAR_KERNELS="conv=numpy,norm=numba"`` (``all=numpy`` for every
family), or for a while by `use`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np

from .arrays import Array, is_device, is_outline

#: Order of preference on the CPU, by family.
PREFERENCE: dict[str, tuple[str, ...]] = {
    "conv": ("onednn", "numpy"),
    "pool": ("numba", "numpy"),
    "matmul": ("onednn", "numpy"),
    "norm": ("numba", "numpy"),
    "rows": ("numba", "numpy"),
    "elementwise": ("numba", "numpy"),
    "embedding": ("numba", "numpy"),
    "rotary": ("numba", "numpy"),
    "softmax": ("numba", "numpy"),
    "attention": ("numba", "numpy"),
    "windows": ("numpy",),
    "random": ("numba", "numpy"),
    "optimizer": ("numba", "numpy"),
}

_FOLDER = {"onednn": "cpu.onednn", "numba": "cpu.fused", "numpy": "generic", "cupy": "gpu"}
_SUPPORT = {"onednn": ".cpu.onednn.library", "numba": ".cpu.fused.jit"}  # each has load() and facts()


class KernelWarning(UserWarning):
    """A kernel runs slower than it could: a library is missing or refused a case."""


class _State:
    chosen: dict[str, tuple[str, ...]] | None = None   # families' preference after the environment
    missing: dict[str, str] = {}                       # implementation -> why it is not there
    told: set[str] = set()                             # notices given
    host: dict[str, tuple[Callable, ...]] = {}         # operation -> implementations in order
    device: dict[str, tuple[Callable, ...]] = {}
    outline: dict[str, tuple[Callable, ...]] = {}      # of arrays without storage
    wrap: Callable[[str, Callable], Callable] | None = None


#: Operation -> (family, reference implementation).
OPERATIONS: dict[str, tuple[str, Callable]] = {}


def operation(family: str, reference: Callable, array: str = "") -> Callable:
    """The public function of one operation: documentation and arguments of the reference, choice by the registry.

    The kind of the first argument decides between CPU and GPU, or that of the keyword argument ``array``.
    """
    name = reference.__name__
    OPERATIONS[name] = (family, reference)
    host, device, outline = _State.host, _State.device, _State.outline

    @functools.wraps(reference)
    def call(*args: Any, **kwargs: Any) -> Any:
        decider: Array = kwargs.get(array) if array else args[0] if args else next(iter(kwargs.values()))
        chains = host
        if type(decider) is not np.ndarray:
            chains = device if is_device(decider) else outline if is_outline(decider) else host
        for implementation in chains.get(name) or _resolve(name, chains):
            result = implementation(*args, **kwargs)
            if result is not NotImplemented:
                return result
        raise AssertionError(f"the generic implementation of {name} declined a call")

    return call


def preferences() -> dict[str, tuple[str, ...]]:
    """Order of preference by family, after HPCPAR_KERNELS.

    Raises
    ------
    ValueError
        If the variable names an unknown family or implementation.
    """
    if _State.chosen is None:
        text = os.environ.get("HPCPAR_KERNELS", "")
        pairs = [part.split("=", 1) for part in text.replace(" ", "").split(",") if part]
        if any(len(pair) != 2 for pair in pairs):
            raise ValueError(f"HPCPAR_KERNELS={text!r}: expected family=implementation, separated by commas")
        _State.chosen = _override(dict(PREFERENCE), dict(pairs), "HPCPAR_KERNELS")
    return _State.chosen


@contextmanager
def use(**families: str) -> Iterator[None]:
    """Context in which families run by a named implementation: ``with kernels.use(conv="numpy"): ...``.

    ``all="numpy"`` sets every family that has the implementation. The generic implementation still takes the calls
    that the named one declines. The choice is the process's, not the thread's.

    Raises
    ------
    ValueError
        If a family or implementation is unknown.
    RuntimeError
        If the implementation is not available on this machine.
    """
    before = preferences()
    after = _override(dict(before), families, "kernels.use")
    for family, name in families.items():
        if name != "numpy" and not available(name):
            raise RuntimeError(f"kernels.use({family}={name!r}): {_State.missing[name]}")
    _choose(after)
    try:
        yield
    finally:
        _choose(before)


@contextmanager
def wrapped(wrap: Callable[[str, Callable], Callable]) -> Iterator[None]:
    """Context in which ``wrap(operation, implementation)`` runs in place of every implementation on the host."""
    _State.wrap = wrap
    _State.host.clear()
    try:
        yield
    finally:
        _State.wrap = None
        _State.host.clear()


def available(name: str) -> bool:
    """Whether an implementation can be used here; the first question imports what it needs."""
    if name in _SUPPORT and name not in _State.missing:
        try:
            importlib.import_module(_SUPPORT[name], __package__).load()
        except (ImportError, OSError) as error:
            _State.missing[name] = str(error)
    return name not in _State.missing


def lose(name: str, why: str) -> None:
    """Use an implementation no more in this process."""
    _State.missing[name] = why
    _State.host.clear()


def notice(text: str) -> None:
    """Warn once per process."""
    if text not in _State.told:
        _State.told.add(text)
        warnings.warn(text, KernelWarning, stacklevel=4)


def describe() -> list[dict[str, str]]:
    """One row a family: implementation, version, library, instruction set and threads, for ``hpcpar info``.

    Where a preferred implementation is missing, ``note`` says why.
    """
    rows = []
    for family, order in preferences().items():
        name = next(n for n in order if n == "numpy" or available(n))
        notes = [_State.missing[n] for n in order[:order.index(name)]]
        facts = importlib.import_module(_SUPPORT[name], __package__).facts() if name in _SUPPORT else _numpy_facts()
        rows.append({"family": family, "implementation": name, **facts, "note": "; ".join(notes)})
    return rows


def _numpy_facts() -> dict[str, str]:
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    return {"version": np.__version__, "library": f"{blas.get('name', '')} {blas.get('version', '')}".strip(),
            "isa": "", "threads": os.environ.get("OPENBLAS_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS") or "all"}


def _override(order: dict[str, tuple[str, ...]], wanted: dict[str, str], who: str) -> dict[str, tuple[str, ...]]:
    for family, name in wanted.items():
        if family != "all" and family not in order:
            raise ValueError(f"{who}: no family of kernels {family!r}; there are {', '.join(order)} and all")
        targets = [f for f in order if name in PREFERENCE[f]] if family == "all" else [family]
        if not targets or name not in PREFERENCE[targets[0]]:
            known = sorted({n for f in order for n in PREFERENCE[f]}) if family == "all" else PREFERENCE[family]
            raise ValueError(f"{who}: {family} has no implementation {name!r}; there are {', '.join(known)}")
        for target in targets:
            order[target] = (name,) if name == "numpy" else (name, "numpy")
    return order


def _choose(order: dict[str, tuple[str, ...]]) -> None:
    _State.chosen = order
    _State.host.clear()


def _resolve(name: str, chains: dict[str, tuple[Callable, ...]]) -> tuple[Callable, ...]:
    """The implementations of one operation, in order, kept for the next calls."""
    family, reference = OPERATIONS[name]
    if chains is _State.outline:
        rule = getattr(importlib.import_module(".outline.rules", __package__), name, None)
        chains[name] = (reference,) if rule is None else (rule,)
        return chains[name]
    order = ("cupy",) if chains is _State.device else preferences()[family]
    found = []
    for implementation in order:
        if implementation == "numpy":
            continue
        if not available(implementation):
            notice(f"{_State.missing[implementation]}; {' and '.join(_served(implementation))} run by the next choice")
            continue
        function = getattr(_module(implementation, family), name, None)
        if function is not None:
            found.append(function)
    found.append(reference)
    if _State.wrap is not None and chains is _State.host:
        found = [_State.wrap(name, function) for function in found]
    chains[name] = tuple(found)
    return chains[name]


def _served(implementation: str) -> list[str]:
    return [family for family, order in preferences().items() if implementation in order]


def _module(implementation: str, family: str) -> ModuleType | None:
    path = f".{_FOLDER[implementation]}.{family}"
    if importlib.util.find_spec(path, __package__) is None:
        return None
    return importlib.import_module(path, __package__)
