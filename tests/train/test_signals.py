"""The warning before the time limit: noted when training is ready for it, and not deadly before."""

import os
import signal
import subprocess
import sys

import pytest

from hpcpar.train.signals import StopSignals, held_back

pytestmark = pytest.mark.serial


def test_a_warning_that_comes_early_is_noted_when_the_handler_is_there():
    notes = StopSignals()
    with held_back():
        os.kill(os.getpid(), signal.SIGUSR1)
        assert not notes.asked
        notes.install()
        assert notes.asked
        notes.remove()


def test_a_warning_that_nobody_takes_ends_nothing():
    before = signal.getsignal(signal.SIGUSR1), signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with held_back():
        os.kill(os.getpid(), signal.SIGUSR1)
    assert (signal.getsignal(signal.SIGUSR1), signal.pthread_sigmask(signal.SIG_BLOCK, ())) == before


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
