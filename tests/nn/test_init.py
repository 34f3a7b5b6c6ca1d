"""Initial values: a function of the global index alone, with torch's distributions."""

import math

import numpy as np
import pytest

import hpcpar as hp
from hpcpar import Layout, nn
from hpcpar.nn import init
from hpcpar.testing import shared_mesh

FILLS = [
    init.uniform_,
    init.normal_,
    init.trunc_normal_,
    init.xavier_uniform_,
    init.xavier_normal_,
    init.kaiming_uniform_,
    init.kaiming_normal_,
    lambda t: init.constant_(t, 3.5),
    init.zeros_,
    init.ones_,
]
LAYOUTS = [
    Layout("batch"),
    Layout("model", "batch"),
    Layout(None, None, ("batch", "model")),
    Layout(None, "model", "depth"),
]


@pytest.mark.parametrize("fill", FILLS, ids=lambda f: f.__name__)
def test_weights_are_the_same_under_every_layout(mesh, fill):
    def made(layout):
        hp.manual_seed(11)
        return init.parameter((7, 5, 3), fill, layout=layout)

    whole = made(Layout()).numpy()
    for layout in LAYOUTS:
        assert np.array_equal(made(layout).numpy(), whole)


def test_models_start_alike_under_every_plan_and_on_every_mesh(mesh, comm):
    def state(layouts):
        hp.manual_seed(4)
        model = nn.Sequential(nn.Conv2d(3, 4, 3, layouts=layouts), nn.ConvTranspose2d(4, 3, 2), nn.Linear(6, 5))
        return model.state_dict(numpy=True)

    replicated = state(None)
    split = state({"weight": Layout("model", "batch"), "bias": Layout("batch")})
    alone = hp.Mesh(comm, batch=1, model=1, depth=-1)
    with alone:
        elsewhere = state(None)
    alone.free()
    for name, value in replicated.items():
        assert np.array_equal(split[name], value)
        assert np.array_equal(elsewhere[name], value)
    # and not everything is the same number
    assert len(np.unique(replicated["0.weight"])) > 100


def test_streams_differ_and_the_seed_counts(mesh):
    hp.manual_seed(1)
    first, second = (init.parameter((40,), init.uniform_).numpy() for _ in range(2))
    hp.manual_seed(1)
    again = init.parameter((40,), init.uniform_).numpy()
    hp.manual_seed(2)
    other = init.parameter((40,), init.uniform_).numpy()
    assert np.array_equal(first, again)
    assert not np.isclose(first, second).any()
    assert not np.isclose(first, other).any()


def test_moments_and_bounds(mesh):
    t = hp.tensor(np.empty((40, 25, 20)))
    draws = {f.__name__: f(t).numpy().copy() for f in FILLS[:7]}
    fan_in, fan_out = 25 * 20, 40 * 20
    n = t.numel()
    deviations = {
        "uniform_": math.sqrt(1 / 12),
        "normal_": 1.0,
        "xavier_uniform_": math.sqrt(2 / (fan_in + fan_out)),
        "xavier_normal_": math.sqrt(2 / (fan_in + fan_out)),
        "kaiming_uniform_": math.sqrt(2 / fan_in),
        "kaiming_normal_": math.sqrt(2 / fan_in),
    }
    for name, deviation in deviations.items():
        assert draws[name].std() == pytest.approx(deviation, rel=5 / math.sqrt(n))
    # variance of a normal variable cut at two standard deviations
    density = math.exp(-2) / math.sqrt(2 * math.pi)
    cut = math.sqrt(1 - 4 * density / math.erf(math.sqrt(2)))
    assert draws["trunc_normal_"].std() == pytest.approx(cut, rel=5 / math.sqrt(n))
    assert np.abs(draws["trunc_normal_"]).max() <= 2
    assert draws["uniform_"].min() >= 0 and draws["uniform_"].max() < 1


@pytest.mark.parametrize(
    ("name", "given", "options"),
    [
        ("Linear", (24, 5), {}),
        ("Conv3d", (4, 6, (1, 2, 3)), {"groups": 2}),
        ("ConvTranspose2d", (4, 6, 3), {"groups": 2}),
    ],
)
def test_layers_start_within_the_bounds_of_torch(mesh, name, given, options):
    torch = pytest.importorskip("torch", reason="torch is the oracle")
    module = getattr(nn, name)(*given, **options)
    fan_in, _ = torch.nn.init._calculate_fan_in_and_fan_out(getattr(torch.nn, name)(*given, **options).weight)
    bound = 1 / math.sqrt(fan_in)
    values = np.concatenate([module.weight.numpy().ravel(), module.bias.numpy()])
    assert np.abs(values).max() <= bound
    assert np.abs(values).max() > 0.9 * bound


def test_an_unflattened_weight_starts_as_the_flattened_one(mesh):
    hp.manual_seed(7)
    flat = nn.Linear(24, 5).state_dict(numpy=True)
    hp.manual_seed(7)
    volume = nn.Linear(24, 5, in_dims=(2, 3, 4)).state_dict(numpy=True)
    assert all(np.array_equal(flat[name], volume[name]) for name in flat)


def test_gains_are_those_of_torch():
    torch = pytest.importorskip("torch", reason="torch is the oracle")
    for name in ("linear", "conv3d", "sigmoid", "tanh", "relu", "selu", "leaky_relu"):
        assert init.calculate_gain(name) == torch.nn.init.calculate_gain(name)
    assert init.calculate_gain("leaky_relu", 0.3) == torch.nn.init.calculate_gain("leaky_relu", 0.3)
    with pytest.raises(ValueError, match="no gain for 'maxout'"):
        init.calculate_gain("maxout")


def test_values_drawn_later_by_block_are_those_drawn_at_once() -> None:
    mesh = shared_mesh(a=hp.current_mesh().size)

    def make() -> nn.Module:
        hp.manual_seed(4)
        model = nn.Sequential(nn.Embedding(7, 4, padding_idx=3), nn.Linear(4, 9), nn.LayerNorm(9), nn.Linear(9, 5))
        nn.init.trunc_normal_(model[1].weight, std=0.3)
        nn.init.xavier_uniform_(model[3].weight)
        nn.init.constant_(model[3].bias, 0.25)
        return model

    with mesh:
        at_once = make().state_dict(numpy=True)
        with hp.checked(), nn.init.deferred():  # what waits for values holds none: nothing is moved or compared
            later = make()
            for number, p in enumerate(later.parameters()):
                p.shard[...] = mesh.rank + number
            hp.parallelize(later, {"0": hp.Row("a"), "1": hp.Column("a"), "3": hp.Row("a")})
        assert later[1].weight.shard.shape == later[1].weight.sig.local_shape
        for name, value in later.state_dict(numpy=True).items():
            assert np.array_equal(value, at_once[name]), name
        with nn.init.skipped():
            shapes = {name: p.shape for name, p in make().named_parameters()}
        assert shapes["1.weight"] == (9, 4)
        assert all(np.array_equal(v, at_once[n]) for n, v in make().state_dict(numpy=True).items()), "as before again"
