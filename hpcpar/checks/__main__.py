"""``python -m hpcpar.checks FIRST SECOND``: where two logs written with ``HPCPAR_CHECK_LOG`` part."""

from __future__ import annotations

import sys

from hpcpar.checks.log import Log, first_difference


def main(arguments: list[str]) -> int:
    """Print the first difference; the exit status is 1 where there is one."""
    if len(arguments) != 2:
        print("usage: python -m hpcpar.checks FIRST SECOND", file=sys.stderr)
        return 2
    first, second = (Log.read(path) for path in arguments)
    found = first_difference(first, second)
    print(found or f"the runs agree in all {len(first)} records")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
