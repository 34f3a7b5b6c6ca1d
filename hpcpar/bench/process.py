"""Contestants as processes: one line asks, one line answers, and whoever is not asked sleeps.

A question is a JSON object with the key ``do`` on standard input; its answer is a JSON value on standard output, behind
a mark, as libraries may write there too. The end of standard input ends the process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from threading import Timer
from typing import IO, Any

from hpcpar.testing.launch import launch_command, launch_environment

MARK = "hpcpar-bench "
PATIENCE = 1200.0
"""Seconds after which an answer is given up."""


class BenchError(RuntimeError):
    """A contestant failed, or computed something else than it should."""


class Worker:
    """A contestant.

    Parameters
    ----------
    words : sequence of str
        Arguments of the interpreter.
    ranks : int
        Above 1 it runs under mpiexec.
    copies : int
        So many processes, which all get every question; ``{copy}`` in `words` is the number of each.
    env : mapping, optional
        Added to the environment; thread counts are 1 unless given here.
    """

    def __init__(
        self, words: Sequence[str], ranks: int = 1, copies: int = 1, env: Mapping[str, str] | None = None
    ) -> None:
        self.words = list(words)
        self._jobs: list[subprocess.Popen[str]] = []
        self._files = ExitStack()
        self._said: list[IO[str]] = []
        session = self._files.enter_context(tempfile.TemporaryDirectory(prefix="hpcpar-bench-"))
        for copy in range(copies):
            file = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  (closed with the worker)
            self._said.append(self._files.enter_context(file))
            arguments = [word.replace("{copy}", str(copy)) for word in self.words]
            command = [sys.executable, *arguments] if ranks == 1 else launch_command(ranks, arguments)
            self._jobs.append(
                subprocess.Popen(
                    command,
                    env=launch_environment(env, session),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=file,
                    text=True,
                    start_new_session=True,
                )
            )

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, do: str, **arguments: Any) -> Any:
        """Return the answer to a question; of several copies, the largest number or the first one's answer.

        Raises
        ------
        BenchError
            When the process ended, or did not answer in time.
        """
        timer = Timer(PATIENCE, self._kill)
        timer.start()
        try:
            for job in self._jobs:
                try:
                    job.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
                    job.stdin.flush()
                except BrokenPipeError:
                    raise self._failure(do) from None
            answers = [self._answer(job, do) for job in self._jobs]
        finally:
            timer.cancel()
        return max(answers) if isinstance(answers[0], float) else answers[0]

    def _answer(self, job: subprocess.Popen[str], do: str) -> Any:
        for line in job.stdout:
            _, mark, text = line.partition(MARK)
            if mark:
                return json.loads(text)
        raise self._failure(do)

    def _failure(self, do: str) -> BenchError:
        self._kill()
        texts = []
        for job, said in zip(self._jobs, self._said, strict=True):
            job.wait()
            said.seek(0)
            texts.append(said.read()[-4000:])
        return BenchError(f"{' '.join(self.words)} did not answer {do!r}:\n" + "\n".join(texts))

    def _kill(self) -> None:
        for job in self._jobs:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)

    def close(self) -> None:
        """End the process: by the end of its input, by force if that does not help."""
        for job in self._jobs:
            try:
                job.stdin.close()
            except BrokenPipeError:
                continue
        for job in self._jobs:
            try:
                job.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()
            job.stdout.close()
        self._files.close()


def read() -> dict[str, Any] | None:
    """Return the next question; None when there are no more."""
    line = sys.stdin.readline()
    return json.loads(line) if line.strip() else None


def answer(value: Any) -> None:
    """Write an answer."""
    sys.stdout.write(f"{MARK}{json.dumps(value)}\n")
    sys.stdout.flush()


def serve(
    handlers: Mapping[str, Callable[..., Any]],
    receive: Callable[[], dict[str, Any] | None] = read,
    reply: Callable[[Any], None] = answer,
) -> None:
    """Answer questions until there are no more; an error ends the process, and its traceback tells why."""
    while (question := receive()) is not None:
        reply(handlers[question.pop("do")](**question))
