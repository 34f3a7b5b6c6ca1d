"""What a plan of a whole network refuses: each mistake is named on all ranks, with what would be right, and at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import hpcpar as hp
from hpcpar.layout.layout import Layout, LayoutError
from hpcpar.models import SpaceTime, SpaceTimeConfig, Spread, UNet3d, ViT3d, gpt, place
from hpcpar.nn import Linear, Module
from hpcpar.parallel import Placement, parallelize
from hpcpar.testing import collective_assert, shared_mesh
from hpcpar.transport import counter

NETWORKS: dict[str, Callable[[], Module]] = {
    "gpt": lambda: gpt(16, width=8, layers=1, heads=2, max_positions=8),
    "vit": lambda: ViT3d(1, outputs=1, width=12, depth=1, heads=2, patch=4),
    "space and time": lambda: SpaceTime(SpaceTimeConfig(3, 2, 4, 4, width=8, layers=1, heads=2)),
    "unet": lambda: UNet3d(1, 2, 2, 1),
}
SCHEMES = ("switch", "auto", "ring", "all_to_all", "gather")


def on_a_mesh(name: str) -> tuple[hp.Mesh, Module]:
    mesh = shared_mesh(model=hp.current_mesh().size)
    with mesh:
        return mesh, NETWORKS[name]()


def layouts(model: Module) -> dict[str, Layout]:
    return {name: p.layout for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("context", "foo", f"context is one of {', '.join(SCHEMES)}, got 'foo'"),
        ("order", "zig", "order is one of natural, zigzag, got 'zig'"),
        ("sequence_parallel", "yes", "sequence_parallel is True or False, got 'yes'"),
        ("shard_weights", 1, "shard_weights is True or False, got 1"),
        ("batch", "batch", r"batch is a tuple of names of axes, like \('batch',\), got 'batch'"),
        ("channels", ["model"], r"channels is a tuple of names of axes, like \(\"batch\",\), got \['model'\]"),
        ("sequence", (1,), "sequence is a tuple of names"),
        ("space", ("depth", "height", "width"), r"space\[0\] is a tuple of names of axes, like \('depth',\)"),
        ("space", (("depth",),), r"space is three tuples .* got \(\('depth',\),\)"),
        ("space", (("batch",), (), ()), "the axis 'batch' is named twice in batch and space"),
        ("sequence", ("batch",), "the axis 'batch' is named twice in batch and sequence"),
    ],
)
def test_a_field_that_is_none_of_its_choices_is_named_with_them(field: str, value: object, said: str) -> None:
    mesh, model = on_a_mesh("gpt")
    with pytest.raises((TypeError, ValueError), match=f"^Spread: (the axis|{field}).*") as raised:
        place(model, mesh, Spread(**{field: value}))
    with pytest.raises((TypeError, ValueError), match=said):
        raise raised.value


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("field", ["batch", "channels", "sequence", "space"])
def test_an_axis_that_the_mesh_does_not_have_is_refused_unless_it_is_a_usual_one(name: str, field: str) -> None:
    mesh, model = on_a_mesh(name)
    before = layouts(model)
    wrong = (("modle",), (), ()) if field == "space" else ("modle",)
    with counter.counting() as sent, pytest.raises(hp.MeshError) as raised:
        place(model, mesh, Spread(**{field: wrong}))
    where = "space[0]" if field == "space" else field
    said = f"place: Spread.{where} names the axis 'modle', the mesh has model; did you mean model?"
    collective_assert(mesh.world, str(raised.value) == said, str(raised.value))
    assert not sent and layouts(model) == before
    place(model, mesh, Spread(batch=("batch",), space=(("depth",), (), ("width",)), sequence=("sequence",)))


@pytest.mark.parametrize("name", ["gpt", "vit", "unet"])
def test_a_scheme_that_the_model_does_not_serve_is_refused_with_those_it_does(name: str) -> None:
    """On one rank too, where nothing is split."""
    mesh, model = on_a_mesh(name)
    with pytest.raises(ValueError, match="context of a .* is one of auto, ring, all_to_all, gather, got 'switch'"):
        place(model, mesh, Spread(context="switch"))
    mesh, model = on_a_mesh("space and time")
    place(model, mesh, Spread(context="switch"))


@pytest.mark.parametrize(
    ("name", "path", "option", "choices"),
    [
        ("gpt", "blocks.0.attention", "context", SCHEMES[1:]),
        ("gpt", "blocks.0.attention", "order", ("natural", "zigzag")),
        ("gpt", "", "order", ("natural", "zigzag")),
        ("vit", "blocks.0.attention", "context", SCHEMES[1:]),
        ("space and time", "blocks.0.space.attention", "context", SCHEMES[1:]),
    ],
)
def test_an_option_of_a_placement_is_one_of_the_modules_choices(
    name: str, path: str, option: str, choices: tuple[str, ...]
) -> None:
    _, model = on_a_mesh(name)
    module = dict(model.named_modules())[path]
    with pytest.raises(ValueError, match=f"{option} is one of {', '.join(choices)}, got 'foo'"):
        parallelize(model, {path: Placement(options={option: "foo"})})
    assert getattr(module, option) in choices
    parallelize(model, {path: Placement(options={option: choices[-1]})})
    assert getattr(module, option) == choices[-1]


def test_a_model_on_another_mesh_and_one_without_a_plan_are_refused() -> None:
    mesh, model = on_a_mesh("gpt")
    again = hp.Mesh(**mesh.shape)
    with pytest.raises(LayoutError, match=r"place: embedding.weight lies on .*, the plan on another.*two calls"):
        place(model, again)
    again.free()
    with mesh, pytest.raises(TypeError, match="a Linear has no plan of its own"):
        place(Linear(2, 2), mesh)
