"""The command ``hpcpar``: one file a subcommand."""

from hpcpar.cli.main import main

__all__ = ["main"]
