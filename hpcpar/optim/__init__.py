"""Optimizers, learning rates as functions of the step, and clipping; formulas, names and defaults as in torch."""

from hpcpar.optim import schedules
from hpcpar.optim.adam import Adam, AdamW
from hpcpar.optim.clip import clip_grad_norm_, total_norm
from hpcpar.optim.optimizer import Optimizer
from hpcpar.optim.scaler import GradScaler
from hpcpar.optim.sgd import SGD

__all__ = ["SGD", "Adam", "AdamW", "GradScaler", "Optimizer", "clip_grad_norm_", "schedules", "total_norm"]
