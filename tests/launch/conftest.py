"""One Slurm for all tests of a session; they are skipped, with the reason, where there can be none."""

import importlib.util
import sys
from pathlib import Path

import pytest


def _load(name):
    """A module beside this file: tests are imported by path, and their folders are no packages."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """A running two-node Slurm, see cluster.py."""
    slurm = _load("cluster")
    if reason := slurm.missing():
        pytest.skip(reason)
    cluster = slurm.Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def job(tmp_path):
    """A small training without end, see endless.py."""
    return _load("endless").EndlessJob(tmp_path)
