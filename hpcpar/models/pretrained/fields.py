"""The fields of a foreign ``config.json``: what is there, what must be so, and all that is wrong at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpcpar.models.decoder_config import DecoderConfig


class Fields:
    """Looks fields up and collects faults, which `config` raises together."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        self.table, self.faults = table, []

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field; null counts as absent."""
        value = self.table.get(name)
        return default if value is None else value

    def number(self, name: str, default: int | None = None) -> int:
        """Return a size; without a default it must be there."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.faults.append(f"{name} is {value!r}, a size was expected")
            return 1
        return value

    def choice(self, name: str, known: Mapping[str, str], default: str) -> str:
        """Return our word for theirs."""
        value = self.get(name, default)
        if value not in known:
            self.faults.append(f"{name} is {value!r}; known are {', '.join(known)}")
            return next(iter(known.values()))
        return known[value]

    def must_be(self, name: str, wanted: Any) -> None:
        """Note a field that asks for what a Decoder does not do."""
        value = self.get(name, wanted)
        if value != wanted:
            self.faults.append(f"{name} is {value!r}, a Decoder has it {wanted!r}")

    def dropout(self, names: Sequence[str], default: float) -> float:
        """Return the one probability that several fields have in common."""
        values = {self.get(name, default) for name in names}
        if len(values) > 1:
            shown = ", ".join(f"{name} {self.get(name, default)}" for name in names)
            self.faults.append(f"a Decoder has one dropout, got {shown}; give dropout= to load_pretrained")
        return float(max(values))

    def config(self, **values: Any) -> DecoderConfig:
        """Return the configuration, or raise a ValueError with all faults."""
        if self.faults:
            raise ValueError(f"config.json of a {self.get('model_type')}: {'; '.join(self.faults)}")
        return DecoderConfig(**values)
