"""``python -m hpcpar``: the command where no console script is installed."""

import sys

from hpcpar.cli import main

sys.exit(main())
