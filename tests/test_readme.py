"""The README's Python example runs as it stands, and gives the same loss on any number of ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
LOSS = 0.002030
"""What one process gets after five steps."""


def example() -> str:
    """Return the example's source."""
    return re.search(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL).group(1)


def test_the_example_of_the_readme_trains_and_its_loss_does_not_depend_on_the_ranks(capsys):
    names: dict = {}
    exec(compile(example(), "README.md", "exec"), names)
    assert "loss" in capsys.readouterr().out
    assert names["loss"].item() == pytest.approx(LOSS, rel=1e-3)
    names["mesh"].free()


def test_every_command_that_the_readme_names_exists():
    from hpcpar.cli.main import COMMANDS

    named = set(re.findall(r"`hpcpar (\w+)", README.read_text(encoding="utf-8")))
    assert named and named <= set(COMMANDS)


def test_every_file_that_the_readme_links_to_exists():
    links = re.findall(r"\]\(((?!http)[^)]+)\)", README.read_text(encoding="utf-8"))
    assert links and all((README.parent / link).exists() for link in links)
