"""What the trainer, the plan and the command ask of a task."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hpcpar.nn import Module, set_compute_dtype
from hpcpar.tensors import Tensor
from hpcpar.train.config import ConfigError, Job
from hpcpar.train.scores import Score

if TYPE_CHECKING:
    from hpcpar import plan
    from hpcpar.data import TensorBatches
    from hpcpar.mesh import Mesh
    from hpcpar.models import Spread


class Task(ABC):
    """What a kind of model is given, what it is asked for, and how it is judged.

    A batch is a pair (inputs, target) as `make_batches` yields it; only the task looks into `inputs`.

    Parameters
    ----------
    job : Job
    """

    kept_in_float32: tuple[str, ...] = ()  # layers, where ``run.compute_except`` does not say which

    def __init__(self, job: Job) -> None:
        self.job = job

    # ---- the parts of a run

    @abstractmethod
    def make_model(self) -> Module:
        """Return the network, on the current mesh, replicated; `models.place` lays it out.

        Raises
        ------
        ConfigError
            The configuration does not fit the network.
        """

    @abstractmethod
    def make_batches(self, which: str, mesh: Mesh, spread: Spread) -> TensorBatches | None:
        """Return the batches of ``train``, ``validation`` or ``test``; None where the configuration names no files.

        Training batches are shuffled; of the others each sample comes once, in order.
        """

    def in_precision(self, model: Module) -> Module:
        """Let the layers of a network multiply as the configuration says, and return it.

        Raises
        ------
        ConfigError
            An entry of ``run.compute_except`` that names no layer.
        """
        run = self.job.run
        if run.compute != "float32":
            kept = run.compute_except
            try:
                set_compute_dtype(model, run.compute, self.kept_in_float32 if kept is None else kept)
            except ValueError as error:
                raise ConfigError(f"run.compute_except: {error}") from None
        return model

    # ---- one batch

    def operands(self, inputs: Any) -> Sequence[Tensor]:
        """Return the tensors that `inputs` consists of."""
        return (inputs,)

    def forward(self, model: Module, inputs: Any) -> Tensor:
        """Return the model's output."""
        return model(inputs)

    @abstractmethod
    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the loss, a replicated scalar, a mean over what `count` counts."""

    @abstractmethod
    def count(self, inputs: Any, target: Tensor) -> float:
        """Return over how much of all ranks the loss of a batch is a mean: its weight beside other batches. Collective.

        Zero where nothing in the batch counts.
        """

    def rates(self, samples_per_second: float) -> dict[str, float]:
        """Return the figures of speed that a record gets."""
        return {"samples_per_s": samples_per_second}

    # ---- results

    @abstractmethod
    def score(self, batches: TensorBatches) -> Score:
        """Return a score that has counted nothing, for all of `batches`."""

    def examples(self, model: Module, batches: TensorBatches) -> dict[str, dict[str, Tensor]]:
        """Return, at the end of a run, what is worth a look: for the name of each file its tensors. Collective.

        Parameters
        ----------
        batches : TensorBatches
            Not trained on, if there are such.
        """
        return {}

    # ---- the plan

    @abstractmethod
    def sample(self, given: Sequence[int] | None = None) -> tuple[int, ...]:
        """Return the shape of one input sample: as given, as in the data files, or as the model has it.

        Parameters
        ----------
        given : sequence of int, optional
            What the command's ``--shape`` says.

        Raises
        ------
        ConfigError
            Nothing says how large a sample is, or it cannot be such.
        """

    @abstractmethod
    def outline(self, sample: Sequence[int]) -> plan.Task:
        """Return one training step on samples of a shape, for dry runs; without optimizer and clipping."""
