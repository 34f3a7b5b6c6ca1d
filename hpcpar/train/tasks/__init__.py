"""Tasks: what a kind of model needs of a training. The loop, checkpoints and plans know no kind of model."""

from hpcpar.train.tasks.base import Score, Task
from hpcpar.train.tasks.choose import make_task

__all__ = ["Score", "Task", "make_task"]
