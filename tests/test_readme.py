"""The Python examples of the README and of docs/your-own.md run as they stand, with the same numbers on any ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
OWN = README.parent / "docs" / "your-own.md"
LOSS = 0.002030
"""What one process gets after five steps."""


def examples(page: Path) -> list[str]:
    """Return the sources of a page's Python examples."""
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def test_the_example_of_the_readme_trains_and_its_loss_does_not_depend_on_the_ranks(capsys):
    names: dict = {}
    exec(compile(examples(README)[0], "README.md", "exec"), names)
    assert "loss" in capsys.readouterr().out
    assert names["loss"].item() == pytest.approx(LOSS, rel=1e-3)
    names["mesh"].free()


@pytest.mark.parametrize(
    ("place", "name", "expected"),
    [(0, "loss", 1.101359), (1, "energy", 2115.42970324), (1, "norm", 265345.067738), (2, "top", 0.824649635987)],
    ids=["a network", "operations", "their gradient", "a stencil"],
)
def test_examples_of_your_own_give_what_one_process_gets(place, name, expected):
    names: dict = {}
    exec(compile(examples(OWN)[place], OWN.name, "exec"), names)
    value = names[name]
    assert getattr(value, "item", lambda: value)() == pytest.approx(expected, rel=1e-6 if place == 0 else 1e-11)
    names["mesh"].free()


def test_every_command_that_the_readme_names_exists():
    from hpcpar.cli.main import COMMANDS

    named = set(re.findall(r"`hpcpar (\w+)", README.read_text(encoding="utf-8")))
    assert named and named <= set(COMMANDS)


PAGES = [README, README.parent / "data" / "README.md", *sorted(OWN.parent.rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(README.parent)))
def test_every_file_that_a_page_links_to_exists(page):
    links = re.findall(r"\]\(((?!http)[^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []
    assert links or page != README
