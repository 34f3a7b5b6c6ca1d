"""Evaluation: every sample once, sums and counts over all ranks, divided at the end."""

from __future__ import annotations

from collections.abc import Callable

from hpcpar.autograd import no_grad
from hpcpar.data import TensorBatches
from hpcpar.nn import Module
from hpcpar.train.tasks import Task


def evaluate(
    task: Task, model: Module, batches: TensorBatches, prefix: str, between: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """Return the mean loss over everything that counts and the figures of the task's score. Collective.

    Parameters
    ----------
    prefix : str
        Before the names of the figures.
    between : callable
        Called after each batch; what it raises, on all ranks, ends the evaluation.
    """
    training, score = model.training, task.score(batches)
    model.eval()
    total, counted = 0.0, 0.0
    try:
        with no_grad():
            for inputs, target in batches:
                output = task.forward(model, inputs)
                loss, count = task.loss(output, target).item(), task.count(inputs, target)
                if count:
                    total += loss * count
                    counted += count
                score.add(output, target, loss, count)
                between()
    finally:
        model.train(training)
    figures = {"loss": total / counted if counted else float("nan"), **score.figures()}
    return {f"{prefix}{name}": value for name, value in figures.items()}
