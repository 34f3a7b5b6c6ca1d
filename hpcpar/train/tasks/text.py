"""The task on texts: predict each token from those before it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from hpcpar import functional as F
from hpcpar import nn
from hpcpar.data import TextBatches, TextDataset
from hpcpar.data.text_batches import Text
from hpcpar.models import Decoder, gpt, llama
from hpcpar.plan.dry import Task as Outline
from hpcpar.tensors import Tensor
from hpcpar.train import build, config
from hpcpar.train.config import ConfigError
from hpcpar.train.scores import CodeLength, Score
from hpcpar.train.tasks.base import Task

if TYPE_CHECKING:
    from hpcpar.mesh import Mesh
    from hpcpar.models import Spread


class LanguageModelling(Task):
    """Windows of texts into a decoder; the loss is the mean cross entropy, in nats a token."""

    @cached_property
    def vocabulary(self) -> int:
        """Tokens that the model knows: as configured, or as the first data have them.

        Raises
        ------
        ConfigError
            The configuration names neither.
        """
        settings, data = self.job.model, self.job.data
        source = data.train or data.validation or data.test
        if not source:
            if settings.vocabulary is None:
                raise ConfigError("the configuration names no data: give model.vocabulary")
            return settings.vocabulary
        with TextDataset(source, data.sequence) as dataset:
            return self._fitting(dataset)

    def _fitting(self, dataset: TextDataset) -> int:
        """The model's vocabulary, which must hold that of the data."""
        chosen = self.job.model.vocabulary or dataset.vocabulary
        if chosen < dataset.vocabulary:
            raise ConfigError(f"model.vocabulary is {chosen}, but {dataset!r} has {dataset.vocabulary} tokens")
        if 0 <= self.job.loss.ignore_index < chosen:
            raise ConfigError(f"loss.ignore_index is {self.job.loss.ignore_index}, which is a token; take -100")
        return chosen

    def make_model(self) -> Decoder:
        return self.in_precision(self.network())

    def network(self) -> Decoder:
        """Return the decoder as configured.

        Raises
        ------
        ConfigError
            Sizes that do not fit each other.
        """
        s = self.job.model
        sizes = {
            "vocab_size": self.vocabulary, "width": s.width, "layers": s.layers, "heads": s.heads,
            "kv_heads": s.kv_heads or s.heads, "window": s.window, "dropout": s.dropout, "tied": s.tied,
        }  # fmt: skip
        if s.hidden:
            sizes["hidden"] = s.hidden
        try:
            if isinstance(s, config.Llama):
                return llama(**sizes, max_positions=self.job.data.sequence, rope_theta=s.rope_theta)
            most = s.max_positions or self.job.data.sequence
            if s.positions == "learned" and most < self.job.data.sequence:
                length = self.job.data.sequence
                raise ValueError(f"learns {most} positions, data.sequence is {length}; it needs as many")
            return gpt(**sizes, positions=s.positions, max_positions=most)
        except ValueError as error:
            raise ConfigError(f"[model] {error}") from None

    def make_batches(self, which: str, mesh: Mesh, spread: Spread) -> TextBatches | None:
        job = self.job
        source = getattr(job.data, which)
        if not source:
            return None
        dataset = TextDataset(source, job.data.sequence)
        if self._fitting(dataset) > self.vocabulary:
            raise ConfigError(f"data.{which} has {dataset.vocabulary} tokens, data.train {self.vocabulary}")
        self._check_filled(which, dataset, mesh)
        return TextBatches(
            dataset,
            job.data.batch,
            spread.tokens,
            mesh=mesh,
            order=spread.order,
            documents=job.data.documents,
            restart=job.data.restart_positions,
            ignore_index=job.loss.ignore_index,
            seed=job.run.seed,
            shuffle=which == "train",
            depth=job.data.prefetch,
            transfer=build.to_device(job.run.device),
        )

    def _check_filled(self, which: str, dataset: TextDataset, mesh: Mesh) -> None:
        """Windows that are padding for the most part: an error to train on, a warning where they are only judged by."""
        if dataset.filled >= 0.5:
            return
        said = (
            f"data.sequence is {dataset.sequence}, far more than data.{which} has: {1 - dataset.filled:.0%} of its "
            f"windows would be padding; its longest file has {dataset.longest} tokens, so take at most that"
        )
        if which == "train":
            raise ConfigError(said)
        if mesh.rank == 0:
            sys.stderr.write(f"hpcpar: warning: {said}\n")

    def operands(self, inputs: Text) -> Sequence[Tensor]:
        return [x for x in (inputs.tokens, inputs.positions, inputs.documents) if x is not None]

    def forward(self, model: nn.Module, inputs: Text) -> Tensor:
        """Return logits (N, S, vocabulary)."""
        return model(inputs.tokens, inputs.positions, inputs.documents)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.transpose(1, 2), target, ignore_index=self.job.loss.ignore_index)

    def count(self, inputs: Text, target: Tensor) -> float:
        """Return the number of targets that are not ignored; no message."""
        return float(inputs.counted)

    def rates(self, samples_per_second: float) -> dict[str, float]:
        return {"samples_per_s": samples_per_second, "tokens_per_s": samples_per_second * self.job.data.sequence}

    def score(self, batches: TextBatches) -> Score:
        return CodeLength(batches.loader.dataset.raw_bytes)

    def sample(self, given: Sequence[int] | None = None) -> tuple[int, ...]:
        """Return (sequence,); `given` is one length, that of the configuration.

        Raises
        ------
        ConfigError
            It is another.
        """
        if given and tuple(given) != (self.job.data.sequence,):
            raise ConfigError(f"the length of a text is data.sequence, {self.job.data.sequence}; got {tuple(given)}")
        return (self.job.data.sequence,)

    def outline(self, sample: Sequence[int]) -> Outline:
        shape, data = (self.job.data.batch, *sample), self.job.data

        def forward(model: nn.Module, inputs: Sequence[Tensor]) -> Tensor:
            rest = list(inputs[1:])
            positions = rest.pop(0) if data.restart_positions else None
            return self.forward(model, Text(inputs[0], positions, rest.pop(0) if data.documents else None, 0))

        return Outline(
            self.make_model,
            self.loss,
            shape,
            shape,
            input_dtype=np.int64,
            target_dtype=np.int64,
            forward=forward,
            further=[lambda s: s.tokens] * data.restart_positions + [lambda s: s.samples] * data.documents,
            place_data=lambda spread: (spread.tokens, spread.tokens),
            split=("sequence", 1),
        )
