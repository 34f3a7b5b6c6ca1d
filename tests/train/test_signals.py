"""The warning before the time limit: noted when training is ready for it, and not deadly before."""

import os
import signal
import subprocess
import sys

import pytest

from hpcpar.train.signals import StopSignals

pytestmark = pytest.mark.serial


EARLY = """
import os, signal
from hpcpar.train.signals import StopSignals, held_back

with held_back():
    import numpy  # its threads are made while the signal is held back, and hold it back too
    os.kill(os.getpid(), signal.SIGUSR1)
    notes = StopSignals()
    before = notes.asked
    if {installed}:
        notes.install()
    print(before, notes.asked)
    notes.remove()
print(signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL, signal.pthread_sigmask(signal.SIG_BLOCK, ()))
"""


@pytest.mark.parametrize("installed", [True, False], ids=["handler", "no-handler"])
def test_a_warning_that_comes_early_waits_for_the_handler_and_without_one_ends_nothing(installed):
    """In a process of its own: a signal to this one may go to any thread that somebody has started."""
    words = [sys.executable, "-c", EARLY.format(installed=installed)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OPENBLAS_NUM_THREADS": "2"}
    run = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [f"False {installed}", "True set()"]


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGTERM"])
def test_signals_mean_again_what_they_meant_after_training(name):
    number = getattr(signal, name)
    before = signal.getsignal(number)
    notes = StopSignals()
    notes.install()
    os.kill(os.getpid(), number)
    notes.remove()
    assert notes.asked and signal.getsignal(number) == before


def test_without_holding_back_the_early_warning_would_end_the_process():
    program = "import os, signal; os.kill(os.getpid(), signal.SIGUSR1)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == -signal.SIGUSR1
