"""A real Slurm with two nodes on this machine, with its own munge: sockets, keys and state in one folder.

Both nodes are this host under two names and ports, and claim four cores each, however many there are.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from hpcpar.testing.launch import launch_environment

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "salloc", "squeue", "scontrol", "scancel", "sinfo")
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={munge}
CryptoType=crypto/munge
SwitchType=switch/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=2,batch_sched_delay=0,requeue_setup_env_fail
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
KillWait=30
MinJobAge=3600
FirstJobId={first}
InactiveLimit=0
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={node1} CPUs=4 RealMemory=8000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={node2} CPUs=4 RealMemory=8000
PartitionName=both Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=9 PreemptMode=OFF
"""
# Ends everything when the tests have ended without doing so: read returns when their end of the pipe is gone.
_GUARD = 'read -r _; scancel --user=root; sleep 5; for file in "$@"; do kill "$(cat "$file")"; done'
# What sbatch and srun must not inherit from a job around the tests.
_FOREIGN = ("SLURM_", "SBATCH_", "SRUN_", "SALLOC_")


def missing() -> str:
    """Say why there can be no Slurm here; "" where there can."""
    absent = [name for name in PROGRAMS if _find(name) is None]
    if absent:
        return f"no Slurm here ({', '.join(absent)} not found); apt-get install slurm-wlm munge libpmi2-0"
    return "starting Slurm takes root" if os.geteuid() else ""


def _find(program: str) -> str | None:
    return shutil.which(program, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin:/usr/local/sbin")


class Cluster:
    """Start with `start`, use with `command`, end with `stop`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pid_files = [folder / name for name in ("slurmd-n1.pid", "slurmd-n2.pid", "slurmctld.pid", "munged.pid")]
        self.env = {k: v for k, v in launch_environment().items() if not k.startswith(_FOREIGN)}
        self.env["SLURM_CONF"] = str(folder / "slurm.conf")
        self._guard: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start munge, controller and both nodes, and wait until the nodes take jobs."""
        controller, node1, node2 = _free_ports(3)
        munge = self.folder / "munge.socket"
        (self.folder / "slurm.conf").write_text(
            CONFIGURATION.format(
                host=socket.gethostname().split(".")[0],
                folder=self.folder,
                controller=controller,
                node1=node1,
                node2=node2,
                munge=munge,
                # MPICH names shared memory by the job: no number of another Slurm on this host, of now or before
                first=1000 + secrets.randbelow(60_000_000),
            )
        )
        for name in ("state", "spool-n1", "spool-n2"):
            (self.folder / name).mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        paths = {"key-file": key, "socket": munge}
        for name in ("pid-file", "log-file", "seed-file"):
            paths[name] = self.folder / f"munged.{name[:-5]}"
        nothing, files = subprocess.DEVNULL, map(str, self.pid_files)
        self._guard = subprocess.Popen(
            ["sh", "-c", _GUARD, "guard", *files], env=self.env, stdin=subprocess.PIPE, stdout=nothing, stderr=nothing,
            start_new_session=True,
        )  # fmt: skip
        # --force: the folder is below a directory that all may write to
        self._daemon(["munged", "--force", *(f"--{name}={path}" for name, path in paths.items())])
        self._daemon(["slurmctld", "-c"])
        for node in ("n1", "n2"):
            self._daemon(["slurmd", "-c", "-N", node])
        self.wait_for(lambda: self.command(["sinfo", "-h", "-N", "-p", "both", "-o", "%T"]).split() == ["idle"] * 2, 60)

    def _daemon(self, words: list[str]) -> None:
        words[0] = _find(words[0]) or words[0]
        run = subprocess.run(
            words, env=self.env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False
        )
        if run.returncode:
            raise RuntimeError(f"{' '.join(words)}: {run.stderr}{run.stdout}")

    @contextmanager
    def configured(self, *lines: str) -> Iterator[None]:
        """Add lines to the configuration for a while."""
        file = self.folder / "slurm.conf"
        before = file.read_text()
        try:
            file.write_text("\n".join([before, *lines, ""]))
            self.command(["scontrol", "reconfigure"])
            yield
        finally:
            file.write_text(before)
            self.command(["scontrol", "reconfigure"])

    def stop(self) -> None:
        """Cancel all jobs, wait until their processes have ended, and stop the daemons by their pid files."""
        if self._guard is not None:
            self._guard.kill()
            self._guard.communicate()
        self.run(["scancel", "--user=root"])
        end = time.monotonic() + 60  # KillWait, and some
        while self.run(["squeue", "--noheader"]).stdout.strip() and time.monotonic() < end:
            time.sleep(0.5)
        for path in self.pid_files:
            if path.exists():
                _end(int(path.read_text()))

    def command(
        self, words: Sequence[str], timeout: float = 60, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> str:
        """Return the standard output of a client command; AssertionError with all it said where it fails."""
        run = self.run(words, timeout, env, cwd)
        assert run.returncode == 0, f"{' '.join(words)}: status {run.returncode}\n{run.stdout}\n{run.stderr}"
        return run.stdout

    def run(
        self, words: Sequence[str], timeout: float = 60, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a client command to its end, whatever that is."""
        return subprocess.run(
            list(words), env=self.env | dict(env or {}), cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=timeout, check=False,
        )  # fmt: skip

    def background(self, words: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start a client command and do not wait for it."""
        nothing = subprocess.DEVNULL
        return subprocess.Popen(list(words), env=self.env, stdin=nothing, stdout=nothing, stderr=nothing)

    def job(self, number: str) -> dict[str, str]:
        """Return what the controller knows of a job: ``JobState``, ``Restarts``, ``ExitCode``, ..."""
        words = self.command(["scontrol", "--oneliner", "show", "job", number]).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, condition, seconds: float) -> None:
        """Wait until `condition` holds; AssertionError with the daemons' last words where it does not come true."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"did not come true in {seconds} s\n{self.logs()}"
            time.sleep(0.5)

    def logs(self) -> str:
        """Return the last lines of all logs."""
        parts = []
        for path in sorted(self.folder.glob("*.log")):
            parts += [f"--- {path.name}", *path.read_text(errors="replace").splitlines()[-15:]]
        return "\n".join(parts)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def _end(pid: int) -> None:
    """End a daemon, at once where it does not listen."""
    for number, patience in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 5.0)):
        try:
            os.kill(pid, number)
            end = time.monotonic() + patience
            while time.monotonic() < end:
                os.kill(pid, 0)
                time.sleep(0.1)
        except ProcessLookupError:
            return
