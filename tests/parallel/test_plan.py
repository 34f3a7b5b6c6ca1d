"""Plans of layouts: the model's values stay, the layouts become what the plan says, mistakes are named."""

import numpy as np
import pytest

import hpcpar as hp
from hpcpar import Layout, LayoutError, nn
from hpcpar.parallel import describe
from hpcpar.testing import assert_close_everywhere


class Mlp(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return self.down(self.up(x).tanh())


def model():
    hp.manual_seed(9)
    return nn.Sequential(Mlp(6), Mlp(6), nn.LayerNorm(6))


PLAN = {"*.up": hp.Column("model"), "*.down": hp.Row("model", out=Layout("batch"))}


def test_values_stay_and_layouts_become_those_of_the_plan(mesh):
    net = model()
    before = net.state_dict(numpy=True)
    kept = list(net.parameters())
    assert hp.parallelize(net, PLAN) is net
    assert all(a is b for a, b in zip(kept, net.parameters(), strict=True))
    for name, value in net.state_dict(numpy=True).items():
        assert np.array_equal(value, before[name])
    expected = {
        "up.weight": Layout("model"),
        "up.bias": Layout("model"),
        "down.weight": Layout(None, "model"),
        "down.bias": Layout(),
    }
    for name, layout in expected.items():
        for block in "01":
            parameter = net.get_parameter(f"{block}.{name}")
            assert parameter.layout == layout.on(parameter.shape, mesh.shape)


def test_the_result_and_the_gradients_stay_the_same(mesh):
    x = np.random.default_rng(1).standard_normal((7, 6))

    def run(plan):
        net = nn.Sequential(*list(model())[:2])
        hp.parallelize(net, plan)
        y = net(hp.tensor(x, layout=Layout("batch")))
        hp.parallel.GradientSync(net).backward((y * y).sum())
        return {"y": y.numpy(), **{n: p.grad.numpy() for n, p in net.named_parameters()}}

    plain, split = run({}), run(PLAN)
    for name, value in plain.items():
        assert_close_everywhere(mesh.world, split[name], value, 1e-12, name)


def test_later_entries_win_and_layouts_may_be_given_outright(mesh):
    net = model()
    hp.parallelize(
        net,
        {
            "?.up": hp.Column("model"),
            "0.up": hp.Placement(weight=Layout(None, "model"), input=Layout("batch")),
            "2.*": Layout("model"),
        },
    )
    n = mesh.shape["model"]
    split = Layout("model") if n > 1 else Layout()
    assert net[1].up.weight.layout == split
    assert net[0].up.weight.layout == (Layout(None, "model") if n > 1 else Layout())
    assert net[0].up.bias.layout == split  # from the first entry: the second did not speak of it
    assert net[0].up.layout == Layout("batch")
    assert net[2].weight.layout == net[2].bias.layout == split


def test_convolutions_split_as_their_channels(mesh):
    net = nn.Sequential(nn.Conv2d(4, 6, 3), nn.ConvTranspose2d(6, 4, 2))
    for kind, entries in ((hp.Column, (0, 1)), (hp.Row, (1, 0))):
        hp.parallelize(net, {"*[01]": kind("model")})
        for module, dim in zip(net, entries, strict=True):
            expected = Layout(*[None] * dim, "model").on(module.weight.shape, mesh.shape)
            assert module.weight.layout == expected


def test_mistakes_are_named_before_anything_changes(mesh):
    net = model()
    cases = [
        ({"0.upp": hp.Column("model")}, ValueError, r"'0.upp' matches no module; near names: 0.up"),
        ({"0.up.wieght": Layout("model")}, ValueError, "matches no parameter; near names: 0.up.weight"),
        ({"2": hp.Row("model")}, ValueError, "LayerNorm .* has no rows"),
        ({"0.up": hp.Placement(kernel=Layout("model"))}, ValueError, "no parameter 'kernel'; it has weight, bias"),
        ({"0.up": "model"}, TypeError, "is given a str"),
        ({"0.up": hp.Column("modle")}, LayoutError, "0.up.weight: .*'modle'"),
        ({"0.up.bias": Layout(None, "model")}, LayoutError, "0.up.bias"),
        ({"0.up": hp.Placement(out=Layout("bach"))}, LayoutError, "out of 0.up: .*'bach'; the mesh has "),
        ({"0.up": hp.Row("model", input=Layout("bach"))}, LayoutError, "input of 0.up: .*'bach'; the mesh has "),
        ({"0.up": hp.Placement(options={"layout": Layout("bach")})}, LayoutError, "layout of 0.up: .*'bach'"),
        ({"0.up": hp.Placement(options={"contxt": "ring"})}, ValueError, "Linear .0.up. has no option 'contxt'"),
        ({"0.up": hp.Placement(options={"forward": "ring"})}, ValueError, "Linear .0.up. has no option 'forward'"),
        ({"0.up": hp.Placement(options={"weight": 1.0})}, ValueError, "Linear .0.up. has no option 'weight'"),
    ]
    for wrong, kind, message in cases:
        with pytest.raises(kind, match=message):
            hp.parallelize(net, {"1.up": hp.Column("model"), **wrong})
    assert all(parameter.layout == Layout() for parameter in net.parameters())
    with pytest.raises(TypeError, match="weight is a Layout"):
        hp.Placement(weight="model")


def test_description_lists_every_parameter_and_adds_up(mesh):
    net = model()
    hp.parallelize(net, PLAN)
    lines = describe(net).splitlines()
    assert lines[0].split() == ["name", "shape", "layout", "shard"]
    assert [line.split()[0] for line in lines[1:-1]] == [name for name, _ in net.named_parameters()]
    here = sum(p.shard.size for p in net.parameters())
    assert lines[-1] == f"{sum(p.numel() for p in net.parameters())} parameters, {here} on this rank"
    assert f"(12, 6)  {net[0].up.weight.layout!r}" in lines[1]
