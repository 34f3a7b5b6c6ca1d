"""Optimizers against torch over several steps, parameters replicated and split; their state under other layouts."""

import numpy as np
import pytest

import hpcpar as hp
from hpcpar import Layout, nn
from hpcpar.nn.state import relayout_
from hpcpar.optim import SGD, Adam, AdamW, schedules
from hpcpar.parallel import GradientSync
from hpcpar.testing import assert_close_everywhere

CASES = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
    ("SGD", {"lr": 0.05, "momentum": 0.8, "nesterov": True, "weight_decay": 0.02}),
    ("SGD", {"lr": 0.01, "maximize": True}),
    ("Adam", {"lr": 0.02}),
    ("Adam", {"lr": 0.02, "betas": (0.7, 0.95), "eps": 1e-4, "weight_decay": 0.1, "amsgrad": True}),
    ("AdamW", {"lr": 0.02}),
    ("AdamW", {"lr": 0.02, "weight_decay": 0.2, "amsgrad": True, "maximize": True}),
]
OPTIMIZERS = {"SGD": SGD, "Adam": Adam, "AdamW": AdamW}


def in_words(value):
    return value if isinstance(value, str) else " ".join(f"{k}={v}" for k, v in value.items())


def network():
    """A net whose parameters are split by columns, by rows, kernel first in memory, and replicated."""
    hp.manual_seed(1)
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 6), nn.Tanh(), nn.Linear(6, 3))
    hp.parallelize(net, {"0": hp.Row("model"), "3": hp.Column("model"), "5": hp.Row("model")})
    return net


def twin_of(net):
    torch = pytest.importorskip("torch", reason="torch is the oracle")
    t = torch.nn
    twin = t.Sequential(t.Conv2d(2, 4, 3), t.ReLU(), t.Flatten(), t.Linear(16, 6), t.Tanh(), t.Linear(6, 3)).double()
    twin.load_state_dict({name: torch.tensor(value) for name, value in net.state_dict(numpy=True).items()})
    return torch, twin


def batches(count):
    rng = np.random.default_rng(5)
    return [(rng.standard_normal((5, 2, 4, 4)), rng.standard_normal((5, 3))) for _ in range(count)]


def train(net, optimizer, data):
    sync = GradientSync(net)
    for x, y in data:
        optimizer.zero_grad()
        layout = Layout("batch")
        sync.backward(nn.MSELoss()(net(hp.tensor(x, layout=layout)), hp.tensor(y, layout=layout)))
        optimizer.step()
    sync.close()


@pytest.mark.parametrize(("name", "options"), CASES, ids=in_words)
def test_five_steps_equal_those_of_torch(mesh, name, options):
    net = network()
    torch, twin = twin_of(net)
    train(net, OPTIMIZERS[name](net.named_parameters(), **options), batches(5))
    other = getattr(torch.optim, name)(twin.parameters(), **options)
    for x, y in batches(5):
        other.zero_grad()
        torch.nn.functional.mse_loss(twin(torch.tensor(x)), torch.tensor(y)).backward()
        other.step()
    for parameter, (key, expected) in zip(net.parameters(), twin.named_parameters(), strict=True):
        assert_close_everywhere(mesh.world, parameter.numpy(), expected.detach().numpy(), 1e-11, key)


def test_groups_have_options_of_their_own(mesh):
    net = network()
    torch, twin = twin_of(net)
    groups = [{"params": net[0].parameters(), "lr": 0.5}, {"params": [*net[3].parameters(), *net[5].parameters()]}]
    train(net, SGD(groups, lr=0.1, momentum=0.9), batches(3))
    rest = [*twin[3].parameters(), *twin[5].parameters()]
    other = torch.optim.SGD([{"params": twin[0].parameters(), "lr": 0.5}, {"params": rest}], lr=0.1, momentum=0.9)
    for x, y in batches(3):
        other.zero_grad()
        torch.nn.functional.mse_loss(twin(torch.tensor(x)), torch.tensor(y)).backward()
        other.step()
    for parameter, expected in zip(net.parameters(), twin.parameters(), strict=True):
        assert_close_everywhere(mesh.world, parameter.numpy(), expected.detach().numpy(), 1e-11)


@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def test_state_has_names_and_layouts_of_the_parameters(mesh, kind):
    net = network()
    optimizer = OPTIMIZERS[kind](net, lr=0.1, **({"momentum": 0.9} if kind == "SGD" else {}))
    train(net, optimizer, batches(1))
    state = optimizer.state_dict()["state"]
    assert list(state) == [name for name, _ in net.named_parameters()]
    for name, parameter in net.named_parameters():
        for value in state[name].values():
            if isinstance(value, hp.Tensor):
                assert value.layout == parameter.layout
                assert value.shard.strides == parameter.shard.strides
    assert state["0.weight"].keys() == ({"momentum_buffer"} if kind == "SGD" else {"step", "exp_avg", "exp_avg_sq"})


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
@pytest.mark.parametrize("whole", [True, False])
def test_training_goes_on_from_a_saved_state_under_another_layout(mesh, kind, whole):
    options = {"lr": 0.05, **({"momentum": 0.9} if kind == "SGD" else {})}
    net = network()
    optimizer = OPTIMIZERS[kind](net, **options)
    train(net, optimizer, batches(3)[:2])
    weights, saved = net.state_dict(numpy=True), optimizer.state_dict()
    if whole:  # what a checkpoint holds: whole arrays
        saved["state"] = {
            name: {k: v.numpy() if isinstance(v, hp.Tensor) else v for k, v in entries.items()}
            for name, entries in saved["state"].items()
        }
    second = network()
    for _, parameter in second.named_parameters():
        relayout_(parameter, Layout())
    second.load_state_dict(weights)
    other = OPTIMIZERS[kind](second, **options)
    other.load_state_dict(saved)
    assert other.steps == 2
    train(net, optimizer, batches(3)[2:])
    train(second, other, batches(3)[2:])
    for (name, a), b in zip(net.named_parameters(), second.parameters(), strict=True):
        assert_close_everywhere(mesh.world, b.numpy(), a.numpy(), 1e-12, name)


def test_state_follows_a_parameter_to_a_new_layout(mesh):
    first, second = network(), network()
    optimizers = [SGD(net, lr=0.1, momentum=0.9) for net in (first, second)]
    for net, optimizer in zip((first, second), optimizers, strict=True):
        train(net, optimizer, batches(2)[:1])
    hp.parallelize(second, {"3": hp.Row("model"), "5": hp.Column("model", input=Layout("batch"))})
    for net, optimizer in zip((first, second), optimizers, strict=True):
        train(net, optimizer, batches(2)[1:])
    for (name, a), b in zip(first.named_parameters(), second.parameters(), strict=True):
        assert_close_everywhere(mesh.world, b.numpy(), a.numpy(), 1e-12, name)


def test_a_schedule_sets_the_rate_of_each_step(mesh):
    weight = nn.Parameter(np.zeros(1), hp.tensor(np.zeros(1)).sig)
    optimizer = SGD([("w", weight)], lr=schedules.step(1.0, 2, 0.1))
    rates = []
    for _ in range(5):
        before = weight.numpy().item()
        weight.grad = hp.tensor(np.ones(1))
        rates.append(optimizer.lr())
        optimizer.step()
        assert before - weight.numpy().item() == pytest.approx(rates[-1])
    assert rates == pytest.approx([1, 1, 0.1, 0.1, 0.01])
    again = SGD([("w", weight)], lr=schedules.step(1.0, 2, 0.1))
    again.load_state_dict(optimizer.state_dict())
    assert again.lr() == pytest.approx(0.01)


def test_a_scaled_step_is_the_step_of_scaled_gradients(mesh):
    results = []
    for scale in (1.0, 0.25):
        weight = nn.Parameter(np.arange(4.0), hp.tensor(np.zeros(4)).sig)
        optimizer = AdamW([("w", weight)], lr=0.1)
        weight.grad = hp.tensor(np.array([1.0, -2.0, 0.5, 3.0]) / scale)
        optimizer.step(grad_scale=scale)
        results.append(weight.numpy())
    assert np.array_equal(*results)


def test_parameters_without_gradient_stay(mesh):
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    before = net.state_dict(numpy=True)
    optimizer = SGD(net, lr=0.1, weight_decay=0.5)
    net[1](hp.tensor(np.ones((2, 3)))).sum().backward()
    optimizer.step()
    after = net.state_dict(numpy=True)
    assert np.array_equal(after["0.weight"], before["0.weight"])
    assert not np.array_equal(after["1.weight"], before["1.weight"])


def test_mistakes_are_named(mesh):
    net = nn.Linear(3, 2)
    optimizer = SGD(net, lr=0.1)
    net(hp.tensor(np.ones((4, 3)), layout=Layout("batch"))).sum().backward()
    if mesh.shape["batch"] > 1:
        with pytest.raises(RuntimeError, match=r"gradient of weight lies as .*partial='batch'.*GradientSync"):
            optimizer.step()
    with pytest.raises(ValueError, match="no parameter"):
        SGD([], lr=0.1)
    with pytest.raises(ValueError, match="two parameters are called 'bias'"):
        SGD([*nn.Linear(2, 2).parameters(), *nn.Linear(2, 2).parameters()], lr=0.1)
    with pytest.raises(ValueError, match="has no option 'momentun'"):
        SGD([{"params": net.parameters(), "momentun": 0.9}], lr=0.1)
    with pytest.raises(ValueError, match="lr is a schedule or a number of at least 0"):
        SGD(net, lr=-1)
    with pytest.raises(ValueError, match="nesterov needs a momentum"):
        SGD(net, nesterov=True)
    with pytest.raises(ValueError, match="betas lie in"):
        Adam(net, betas=(0.9, 1.0))
    saved = SGD(nn.Linear(3, 3, bias=False), lr=0.1).state_dict()
    with pytest.raises(ValueError, match="the groups hold other parameters"):
        optimizer.load_state_dict(saved)
