"""The version of the package: the one place, read by setup.cfg, the command and run records."""

__version__ = "0.1.0"
