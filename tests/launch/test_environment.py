"""How many threads a rank gets from what launcher and batch system gave it, and that this comes before NumPy."""

import os
import subprocess
import sys

import pytest

from hpcpar.launch.environment import THREAD_VARIABLES, set_threads, threads_of_rank
from hpcpar.launch.process import Process

pytestmark = pytest.mark.serial

FOUR_HERE = Process(0, 8, 0, 4)


@pytest.mark.parametrize(
    ("env", "process", "cores", "threads"),
    [
        ({}, Process(), 64, 64),
        ({}, FOUR_HERE, 64, 16),
        ({}, FOUR_HERE, 16, 16),
        ({}, FOUR_HERE, 32, 16),
        ({}, FOUR_HERE, 1, 1),
        ({}, Process(0, 128, 0, 128), 64, 1),
        ({}, Process(0, 8), 64, 8),
        ({"SLURM_CPUS_PER_TASK": "6"}, FOUR_HERE, 64, 6),
        ({"SLURM_CPUS_PER_TASK": "6"}, FOUR_HERE, 4, 4),
        ({"SLURM_CPUS_ON_NODE": "16"}, FOUR_HERE, 16, 4),
        ({"NCPUS": "8"}, FOUR_HERE, 64, 2),
        ({"OMP_NUM_THREADS": "3", "SLURM_CPUS_PER_TASK": "6"}, FOUR_HERE, 64, 3),
        ({"OMP_NUM_THREADS": "5,2"}, FOUR_HERE, 4, 5),
        ({"OMP_NUM_THREADS": ""}, FOUR_HERE, 64, 16),
    ],
    ids=[
        "alone",
        "unbound",
        "bound-each",
        "bound-to-socket",
        "bound-to-one-core",
        "more-ranks-than-cores",
        "nodes-unknown",
        "per-task",
        "per-task-but-bound",
        "part-of-a-node",
        "pbs",
        "user",
        "user-nested",
        "set-but-empty",
    ],
)
def test_threads_of_a_rank_on_a_node_of_64_cores(env, process, cores, threads):
    assert threads_of_rank(env, process, cores, machine=64) == threads


def test_what_the_user_set_is_kept_and_the_rest_follows_it():
    env = {"OMP_NUM_THREADS": "3", "NUMBA_NUM_THREADS": "7"}
    assert set_threads(env, cores=64) == 3
    assert [env[name] for name in THREAD_VARIABLES] == ["3", "3", "3", "7"]


def test_the_command_sets_threads_before_numpy_is_loaded():
    script = """
import builtins, os, sys
seen = []
load = builtins.__import__
def watch(name, *rest, **more):
    if name.split(".")[0] == "numpy" and not seen:
        seen.append(os.environ.get("OMP_NUM_THREADS"))
    return load(name, *rest, **more)
builtins.__import__ = watch
from hpcpar.cli import main
status = main(["train", "no-such-file.toml"])
print(status, seen, os.environ["OPENBLAS_NUM_THREADS"])
"""
    env = {k: v for k, v in os.environ.items() if k not in THREAD_VARIABLES}
    env |= {"SLURM_CPUS_PER_TASK": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=120)
    assert run.stdout.split("\n")[-2] == "2 ['1'] 1", run.stdout + run.stderr
