"""Which task a configuration sets."""

from __future__ import annotations

from hpcpar.train import config
from hpcpar.train.config import Job
from hpcpar.train.tasks.base import Task
from hpcpar.train.tasks.text import LanguageModelling
from hpcpar.train.tasks.volumes import Regression, Segmentation

TASKS: dict[type, type[Task]] = {
    config.UNet3d: Segmentation,
    config.ViT3d: Segmentation,
    config.Swin3d: Segmentation,
    config.CosmoFlow: Regression,
    config.GPT: LanguageModelling,
    config.Llama: LanguageModelling,
}
"""By the class of [model]."""


def make_task(job: Job) -> Task:
    """Return the task of a configuration."""
    return TASKS[type(job.model)](job)
