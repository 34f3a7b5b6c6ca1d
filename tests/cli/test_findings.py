"""Warnings of `hpcpar info` from facts of jobs of all sizes: each where it belongs, none where all is well."""

import pytest

from hpcpar.cli import findings
from hpcpar.transport.system import RankFacts

pytestmark = pytest.mark.serial


def rank(host="n1", cores=range(4), devices=None, **threads):
    return RankFacts(host, tuple(cores), {k: str(v) for k, v in threads.items()}, devices)


def test_nothing_to_say_of_a_job_that_fits():
    ranks = [rank(h, OMP_NUM_THREADS=2) for h in ("n1", "n1", "n2", "n2")]
    assert findings.warnings(ranks, {}) == []
    assert findings.warnings([rank()], {}) == []  # alone: all threads of the machine are welcome


def test_more_ranks_than_cores():
    (line,) = findings.warnings([rank(OMP_NUM_THREADS=1)] * 5, {})
    assert line.startswith("n1: 5 rank(s) on 4 core(s)") and "share" in line


def test_more_threads_than_cores_on_one_of_two_nodes():
    ranks = [rank("n1", OMP_NUM_THREADS=2), rank("n1", OMP_NUM_THREADS=2), rank("n2", OMP_NUM_THREADS=5)]
    found = findings.warnings(ranks, {})
    assert "n2: 1 rank(s) on 4 core(s) with 5 threads: set OMP_NUM_THREADS to 4" in found
    assert not any(line.startswith("n1") for line in found)


def test_unset_thread_count_with_several_ranks():
    (line,) = findings.warnings([rank(), rank(OMP_NUM_THREADS=1)], {})
    assert "OMP_NUM_THREADS is not set" in line and line.endswith("set OMP_NUM_THREADS to 2")


def test_threads_on_one_bound_core():
    ranks = [rank(cores=[i], OMP_NUM_THREADS=2) for i in range(2)]
    assert any("bound to (1)" in line for line in findings.warnings(ranks, {}))


def test_ranks_that_see_the_same_gpu():
    same = [rank(OMP_NUM_THREADS=1, devices="0")] * 2
    own = [rank(OMP_NUM_THREADS=1, devices=str(i)) for i in range(2)]
    assert any("see the same 1 GPU" in line for line in findings.warnings(same, {}, gpus=1))
    assert findings.warnings(own, {}, gpus=1) == []


def test_batch_systems_are_told_by_their_variables():
    env = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "PBS_JOBID": "3.host", "HOME": "/root"}
    assert findings.scheduler(env) == {
        "slurm": {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"},
        "pbs": {"PBS_JOBID": "3.host"},
    }


def test_nodes_in_order_of_their_first_rank():
    rows = findings.nodes([rank("b", [0]), rank("a", [1]), rank("b", [2])])
    assert [(r["host"], r["ranks"], r["cores"]) for r in rows] == [("b", [0, 2], [0, 2]), ("a", [1], [1])]


def test_first_number_of_a_nested_thread_list_counts():
    assert findings.threads_of(rank(OMP_NUM_THREADS="4,2")) == 4
    assert findings.threads_of(rank(OPENBLAS_NUM_THREADS=3)) == 3
    assert findings.threads_of(rank(OMP_NUM_THREADS="many")) is None
