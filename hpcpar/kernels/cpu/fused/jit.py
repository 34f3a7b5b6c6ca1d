"""numba, imported when the first fused kernel runs; compiled kernels are kept on disk and shared by all processes.

Thousands of ranks must neither compile the same kernel nor write one file at once: the first call of a kernel takes a
lock in the cache folder, and whoever gets it compiles, saves and leaves a mark; all others load. The folder is
HPCPAR_CACHE_DIR, else ``~/.cache/hpcpar`` (XDG_CACHE_HOME is obeyed), else one in the temporary directory. numba sees
that a kernel's own file has changed; the folder's name carries the rest that a kernel is made of: the version of
numba, the processor, and the scalar functions.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any


@functools.cache
def load() -> ModuleType:
    """numba.

    Raises
    ------
    ImportError
        If it is not installed, with what would help.
    """
    try:
        import numba
    except ImportError as error:
        raise ImportError(f"numba is not available ({error}); install it by pip install 'hpcpar[cpu]'") from error
    return numba


def facts() -> dict[str, str]:
    """Version, cache folder, processor and threads, for ``hpcpar info``."""
    return {"version": load().__version__, "library": str(cache_folder()), "isa": _processor(), "threads": "1"}


class Kernel:
    """A function compiled at its first call, once for each type of its first argument (an array)."""

    def __init__(self, function: Callable) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._dispatcher: Callable | None = None
        self._ready: set[str] = set()

    def __call__(self, *args: Any) -> Any:
        kind = args[0].dtype.char
        if kind in self._ready:
            return self._dispatcher(*args)
        source = self._function.__code__.co_filename
        with _cached(f"{self._function.__module__}.{self._function.__name__}.{kind}.{_stamp(source)}"):
            if self._dispatcher is None:
                self._dispatcher = _compile(self._function)
            result = self._dispatcher(*args)
        self._ready.add(kind)
        return result


def kernel(function: Callable) -> Kernel:
    """Decorator of a loop in which a * b + c may be fused; sums keep their order."""
    return Kernel(function)


def inlined(function: Callable) -> Callable:
    """Decorator of a scalar function used inside kernels."""
    return load().njit(inline="always", error_model="numpy")(function)


def typed(stub: Callable) -> Callable:
    """Decorator of a function that returns, for the types of the arguments, what kernels run in place of ``stub``."""
    return load().extending.overload(stub, inline="always")


def inner(function: Callable) -> Callable:
    """Decorator of a loop that kernels of the same file call."""
    return load().njit(error_model="numpy", fastmath={"contract", "nsz"})(function)


def vectorised_sum(function: Callable) -> Callable:
    """Decorator of a function used inside kernels whose sum may be taken in any order, the same each time."""
    return load().njit(error_model="numpy", fastmath={"contract", "nsz", "reassoc"})(function)


@functools.cache
def cache_folder() -> Path:
    """The folder of compiled kernels, created if need be."""
    here = Path(__file__).parent
    name = f"numba-{load().__version__}-{_processor()}-{_stamp(here / 'functions.py', __file__)}"
    asked = os.environ.get("HPCPAR_CACHE_DIR")
    home = os.path.abspath(asked) if asked else os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "hpcpar")
    # a user without a home keeps the tilde, which is no place to write to
    choices = [Path(home)] if os.path.isabs(home) else []
    for base in (*choices, Path(tempfile.gettempdir(), f"hpcpar-{os.getuid()}")):
        try:
            folder = base / name
            folder.mkdir(parents=True, exist_ok=True)
            (folder / ".lock").touch()
            return folder
        except OSError:
            continue
    raise OSError(f"hpcpar: no folder for compiled kernels can be written, neither {home} nor {base}; set "
                  f"HPCPAR_CACHE_DIR, or HPCPAR_KERNELS=all=numpy to do without")


@contextmanager
def _cached(name: str) -> Iterator[None]:
    """Hold the lock of a kernel's cache file unless it is known to be written."""
    mark = cache_folder() / f"{name}.done"
    if mark.exists():
        yield
        return
    with open(cache_folder() / ".lock", "rb+") as lock:
        with suppress(OSError):  # a file system without locks: several may compile; numba renames files into place
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        mark.touch()


def _compile(function: Callable) -> Callable:
    numba = load()
    before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(cache_folder())
    try:
        return numba.njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract", "nsz"})(function)
    finally:
        numba.config.CACHE_DIR = before


def _stamp(*files: str | Path) -> str:
    """Changes when one of the files does, or moves."""
    state = [(str(file), os.stat(file).st_size, os.stat(file).st_mtime_ns) for file in files]
    return hashlib.sha256(repr(state).encode()).hexdigest()[:12]


def _processor() -> str:
    load()
    from llvmlite import binding

    return binding.get_host_cpu_name()
