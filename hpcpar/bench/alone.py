"""What is measured in one process by itself, with one thread: ``python -m hpcpar.bench.alone``."""

from __future__ import annotations

from typing import Any

from hpcpar.bench import attention, kernels, machine, ops, process
from hpcpar.bench.measure import Measure
from hpcpar.bench.options import Options


def main() -> None:
    """Serve."""

    def plain(measures: list[Measure]) -> list[dict[str, Any]]:
        return [m.plain() for m in measures]

    process.serve(
        {
            "machine": lambda **options: plain(machine.measure(Options(**options))),
            "attention": lambda **options: plain(attention.measure(Options(**options))),
            "ops": lambda **options: plain(ops.measure(Options(**options))),
            "kernels": lambda gemm, copy, **options: plain(kernels.measure(Options(**options), gemm, copy)),
        }
    )


if __name__ == "__main__":
    main()
