"""The script for PBS, started as PBS starts it: there is no PBS for this machine, so the test takes its place.

What is real: the script, its clock, the launcher, the ranks, the checkpoint. A program ``qsub`` writes down what it is
asked for; the test then starts the script again as asked.
"""

import re
import shlex
import subprocess
import sys
import time

import pytest

from hpcpar.testing.launch import launch_environment

pytestmark = [pytest.mark.spawns_mpi, pytest.mark.watchdog(400)]

HPCPAR = [sys.executable, "-m", "hpcpar"]


@pytest.fixture
def pbs(tmp_path):
    """The environment of a job, with a ``qsub`` whose last request is in the file ``asked``."""
    qsub = tmp_path / "bin" / "qsub"
    qsub.parent.mkdir()
    qsub.write_text(f'#!/bin/sh\necho "$@" >{shlex.quote(str(tmp_path))}/asked\necho 2.server\n')
    qsub.chmod(0o755)
    env = launch_environment() | {"PBS_JOBID": "1.server", "PBS_O_WORKDIR": str(tmp_path)}
    return env | {"PATH": f"{qsub.parent}:{env['PATH']}"}


def test_a_job_saves_before_its_limit_submits_itself_and_goes_on(job, pbs):
    words = ["--scheduler", "pbs", "--ranks-per-node", "2", "--time", "60s", "--margin", "40s", "--partition", "small"]
    submitted = subprocess.run(
        [*HPCPAR, "submit", str(job.path), *words], env=pbs, cwd=job.folder, capture_output=True, text=True, timeout=60
    )
    assert submitted.returncode == 0 and submitted.stdout.startswith("2.server\n"), submitted.stderr
    asked = job.folder / "asked"
    script = asked.read_text().strip()
    assert "\n#PBS -q small\n" in (job.folder / "run" / "submit.pbs.sh").read_text()

    starts, status = 0, 75
    while status == 75 and starts < 8:  # on a slow machine it may be stopped once more
        starts += 1
        asked.write_text("")
        status = subprocess.run(["bash", script], env=pbs, cwd="/", timeout=150, check=False).returncode
        request = asked.read_text()
        if status == 75:
            assert request == f"-v HPCPAR_STARTS={starts + 1} {script}\n", job.log()
            pbs |= {"HPCPAR_STARTS": str(starts + 1), "PBS_JOBID": f"{starts + 1}.server"}
            job.end_after(job.stopped_at() + (5 if starts == 1 else 0))
    assert status == 0 and request == "" and starts >= 2, job.log()
    assert len(re.findall("saved; back into the queue", job.log())) == starts - 1
    job.assert_equals_unbroken_run(ranks=2, starts=starts)


def test_a_deleted_job_saves_and_does_not_come_back(job, pbs):
    words = ["--scheduler", "pbs", "--ranks-per-node", "2", "--print"]
    text = subprocess.run(
        [*HPCPAR, "submit", str(job.path), *words], env=pbs, cwd=job.folder, capture_output=True, text=True, timeout=60
    ).stdout
    script = job.folder / "job.sh"
    script.write_text(text)
    (job.folder / "run").mkdir()
    with subprocess.Popen(["bash", str(script)], env=pbs, cwd=job.folder) as shell:
        try:
            end = time.monotonic() + 100
            while not job.trains() and time.monotonic() < end:
                time.sleep(0.2)
        finally:
            shell.terminate()
        assert shell.wait(60) == 75
    assert job.stopped_at() >= 1 and not (job.folder / "asked").exists()
