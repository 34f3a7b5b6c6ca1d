"""Optimizers run on the meshes of training, in float64."""

import pytest


@pytest.fixture
def mesh(training_mesh):
    """All ranks as a batch axis, as a model axis, as both."""
    return training_mesh


@pytest.fixture(autouse=True)
def in_float64(alike):
    """Everything starts alike on all ranks."""
