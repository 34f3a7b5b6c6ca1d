"""The warning before the time limit, when it comes before training is ready for it, or after training is over."""

import os
import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.serial

PROGRAM = """
import os, signal, threading
from hpcpar.train.signals import StopSignals, held_back

def warn():
    os.kill(os.getpid(), signal.SIGUSR1)

with held_back(for_good={for_good}):
    if {early}:
        warn()
    notes = StopSignals()
    notes.install()
    print(notes.asked)
    ready, end = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: (ready.set(), end.wait()))  # made in training, still there later
    thread.start()
    ready.wait()
    notes.remove()
    warn()
if {for_good}:
    warn()
end.set()
print(signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL)
"""


def run(program):
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("early", [True, False], ids=["early", "late-only"])
@pytest.mark.parametrize("for_good", [True, False], ids=["to-the-end", "restored"])
def test_an_early_warning_is_noted_and_a_late_one_ends_nothing(early, for_good):
    ended = run(PROGRAM.format(early=early, for_good=for_good))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == [str(early), str(not for_good)]


def test_unheld_the_warning_would_end_the_process():
    assert run("import os, signal; os.kill(os.getpid(), signal.SIGUSR1)").returncode == -signal.SIGUSR1


def test_nothing_is_left_of_an_early_warning_for_the_next_run():
    from hpcpar.train.signals import StopSignals, held_back

    with held_back():
        signal.raise_signal(signal.SIGUSR1)
    notes = StopSignals()
    notes.install()
    notes.remove()
    assert not notes.asked
