"""Jobs under a real Slurm with two nodes: started by its launchers, warned by it, put back by it, and going on.

Slurm looks at time limits every half minute, so that the test of the limit takes about a minute; the others send the
same signal by hand. Whatever the speed of the machine, a job is stopped in the middle and goes on for some steps: it is
given its end when the step is known at which it was stopped.
"""

import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from hpcpar.cli.submit import default_launcher
from hpcpar.testing.launch import is_open_mpi

pytestmark = [pytest.mark.spawns_mpi, pytest.mark.watchdog(400)]

HOME = Path(__file__).resolve().parents[2]
HPCPAR = [sys.executable, "-m", "hpcpar"]
RANKS = ["--nodes", "2", "--ranks-per-node", "1"]
MORE_STEPS = 5
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}


def submit(cluster, job, *words):
    """Return the number of the job that `hpcpar submit` made."""
    answer = cluster.command([*HPCPAR, "submit", str(job.path), *RANKS, *words], cwd=job.folder)
    return re.search(r"Submitted batch job (\d+)", answer)[1]


def wait_for_steps(cluster, job, number, starts=1):
    """Wait until a start of the job has trained for some steps."""

    def trains():
        assert cluster.job(number)["JobState"] not in ENDED, f"{job.log()}\n{cluster.logs()}"
        return job.trains(starts)

    cluster.wait_for(trains, 120)


def wait_for_state(cluster, job, number, state, **fields):
    """Wait for a state, and for values of other fields; an end in another state is a failure at once."""

    def reached():
        known = cluster.job(number)
        assert known["JobState"] not in ENDED - {state}, f"{known}\n{job.log()}\n{cluster.logs()}"
        return known["JobState"] == state and all(known[k] == v for k, v in fields.items())

    cluster.wait_for(reached, 150)


def start_now(cluster, number):
    """Cut short the two minutes for which Slurm keeps a requeued job back, and let it end on a slow machine too.

    A node takes no job that it killed in the same second.
    """
    cluster.command(["scontrol", "update", f"jobid={number}", "StartTime=now+3seconds", "TimeLimit=60"])


def test_a_job_outlives_its_time_limit(cluster, job):
    number = submit(cluster, job, "--time", "60s", "--margin", "10s")
    wait_for_state(cluster, job, number, "PENDING", Restarts="1")
    assert "saved; back into the queue after start 1" in job.log()
    step = job.stopped_at()
    job.end_after(step + MORE_STEPS)
    start_now(cluster, number)
    wait_for_state(cluster, job, number, "COMPLETED", ExitCode="0:0")
    job.assert_equals_unbroken_run(ranks=2, starts=2)
    assert max(job.steps()) == step + MORE_STEPS


def test_the_script_for_any_job_trains_and_comes_back(cluster, job):
    job.logs = "train.log"
    script = str(HOME / "jobs" / "slurm" / "train.sbatch")
    options = ["--parsable", "--nodes=2", "--ntasks-per-node=1", "--output=train.log"]
    env = {"HPCPAR_ENV": sys.prefix}
    words = ["sbatch", *options, script, str(job.path), "run.seed=4"]
    number = cluster.command(words, cwd=job.folder, env=env).strip()
    wait_for_steps(cluster, job, number)
    cluster.command(["scancel", "--batch", "--signal=USR1", number])
    wait_for_state(cluster, job, number, "PENDING", Restarts="1")
    job.end_after(job.stopped_at() + MORE_STEPS)
    start_now(cluster, number)
    wait_for_state(cluster, job, number, "COMPLETED", ExitCode="0:0")
    job.assert_equals_unbroken_run("run.seed=4", ranks=2, starts=2)


def test_mpiexec_passes_the_warning_on(cluster, job):
    if is_open_mpi():
        pytest.skip("the launcher of the other tests is mpirun here")
    mpiexec = f"{shlex.quote(os.path.join(sys.prefix, 'bin', 'mpiexec'))} -n 2"
    number = submit(cluster, job, "--launcher", mpiexec, "--restarts", "0")
    wait_for_steps(cluster, job, number)
    cluster.command(["scancel", "--batch", "--signal=USR1", number])
    wait_for_state(cluster, job, number, "FAILED", ExitCode="75:0", Restarts="0")
    assert job.stopped_at() >= 1


def preempt(cluster, job, number):
    """Let a job of higher priority take both nodes, and wait until the other is back in the queue."""
    cluster.command(["sbatch", "-N2", "--ntasks-per-node=4", "--partition=urgent", "-o", "/dev/null", "--wrap=sleep 1"])
    wait_for_state(cluster, job, number, "PENDING", Restarts="1")


def test_a_preempted_job_comes_back_and_a_cancelled_one_does_not(cluster, job):
    if is_open_mpi():
        pytest.skip("without srun only Slurm's own helpers are told of a preemption, see docs/centres")
    number = submit(cluster, job, "--partition", "both")
    wait_for_steps(cluster, job, number)
    preempt(cluster, job, number)
    first = job.stopped_at()
    start_now(cluster, number)
    wait_for_steps(cluster, job, number, starts=2)
    cluster.command(["scancel", number])
    wait_for_state(cluster, job, number, "CANCELLED", Restarts="1")
    assert job.stopped_at() > first


def test_where_preemption_sends_the_signal_of_the_job_mpiexec_passes_it_on(cluster, job):
    mpiexec = f"{shlex.quote(os.path.join(sys.prefix, 'bin', 'mpiexec'))} -n 2"
    launcher = () if is_open_mpi() else ("--launcher", mpiexec)  # which is mpirun there
    with cluster.configured("SlurmctldParameters=preempt_send_user_signal"):
        number = submit(cluster, job, "--partition", "both", *launcher)
        wait_for_steps(cluster, job, number)
        preempt(cluster, job, number)
        job.end_after(job.stopped_at() + MORE_STEPS)
        start_now(cluster, number)
        wait_for_state(cluster, job, number, "COMPLETED", ExitCode="0:0")
    job.assert_equals_unbroken_run(ranks=2, starts=2)


def test_a_chain_goes_on_from_element_to_element_and_ends_with_the_training(cluster, job):
    number = submit(cluster, job, "--chain", "3")
    wait_for_steps(cluster, job, f"{number}_1")
    # it arrives at once, but scancel of 22.05 takes an element of an array for a job on its way out, and tries again
    with cluster.background(["scancel", "--batch", "--signal=USR1", f"{number}_1"]) as scancel:
        cluster.wait_for(lambda: "asked to stop" in job.log(), 60)
        scancel.kill()
    job.end_after(job.stopped_at() + MORE_STEPS)
    wait_for_state(cluster, job, f"{number}_1", "COMPLETED")
    wait_for_state(cluster, job, f"{number}_2", "COMPLETED")
    wait_for_state(cluster, job, f"{number}_3", "CANCELLED")
    job.assert_equals_unbroken_run(ranks=2, starts=2)


def test_info_inside_an_allocation(cluster):
    env = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "")
    launch = f"export SRUN_CPUS_PER_TASK=2; {default_launcher('slurm', 4)} {shlex.join([*HPCPAR, 'info', '--json'])}"
    words = ["salloc", "--quiet", "-N2", "--ntasks-per-node=2", "--cpus-per-task=2", "bash", "-c", launch]
    facts = json.loads(cluster.command(words, env=env))
    assert facts["mpi"]["size"] == 4
    assert facts["scheduler"]["slurm"]["SLURM_JOB_NUM_NODES"] == "2"
    threads = str(min(2, len(os.sched_getaffinity(0))))
    assert [row["OMP_NUM_THREADS"] for row in facts["threads"]] == [threads] * 4


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        (["srun", "--mpi=none", "-N2", "-n3"], True),
        (["srun", "--mpi=none", "-n1"], False),
        (["salloc", "--quiet", "-N2", "-n4"], False),
        (["salloc", "--quiet", "-N2", "-n4", "srun", "--mpi=none", "-n1"], False),
    ],
    ids=["step-of-three", "step-of-one", "shell-of-an-allocation", "step-of-one-in-an-allocation"],
)
def test_processes_that_do_not_find_each_other_are_refused(cluster, words, refused):
    run = cluster.run([*words, *HPCPAR, "train", "no-such-job.toml"])
    assert run.returncode == 2
    assert run.stderr.count("the launcher started 3 processes") == int(refused), run.stderr
    assert run.stderr.count("no-such-job.toml: no such file or directory") == int(not refused), run.stderr
