"""Activation recomputation: gradients, hooks, messages and random numbers are those of the plain run, bit for bit."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import hpcpar as hp
from hpcpar import Layout, nn
from hpcpar import functional as F
from hpcpar.parallel import GradientSync
from hpcpar.testing import collective_assert
from hpcpar.trace import Recorder
from hpcpar.trace.instruments import instruments
from hpcpar.transport import counter

SAMPLES, TOKENS, WIDTH, HIDDEN = 5, 6, 4, 12
SPLITS = ("data", "tensor", "sequence", "sharded")


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    hp.manual_seed(0)
    with nn.default_dtype("float64"):
        yield


@pytest.fixture(params=SPLITS)
def split(request) -> str:
    return request.param


@pytest.fixture
def mesh(comm) -> Iterator[hp.Mesh]:
    size = comm.Get_size()
    batch = size // 2 if size % 2 == 0 else size
    with hp.Mesh(comm, batch=batch, model=size // batch) as mesh:
        yield mesh
    mesh.free()


class Block(nn.Module):
    """What a transformer's second half does, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: hp.Tensor) -> hp.Tensor:
        y = self.norm(x)
        y = F.dropout(F.swiglu(self.gate(y), self.up(y)), 0.2, self.training)
        return x + self.down(y)


class Net(nn.Module):
    """Blocks, one weight of which is used outside too."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: hp.Tensor) -> hp.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x) * self.blocks[0].norm.weight


def network(split: str, blocks: int = 3) -> Net:
    hp.manual_seed(1)
    net = Net(blocks)
    if split == "sharded":
        hp.parallelize(net, {"blocks.*.[gud]*.weight": Layout("batch")})
        for parameter in net.parameters():
            parameter.keep = "source"
    elif split != "data":
        stream = Layout("batch", "model" if split == "sequence" else None)
        hidden = Layout("batch", None, "model")
        for name in ("gate", "up"):
            hp.parallelize(net, {f"blocks.*.{name}": hp.Column("model", out=hidden)})
        hp.parallelize(net, {"blocks.*.down": hp.Row("model", out=stream)})
    return net


def data(split: str, requires_grad: bool = True) -> hp.Tensor:
    x = np.random.default_rng(3).standard_normal((SAMPLES, TOKENS, WIDTH))
    layout = Layout("batch", "model" if split == "sequence" else None)
    return hp.tensor(x, layout=layout, requires_grad=requires_grad)


def step(net: nn.Module, x: hp.Tensor, sync: bool = True) -> tuple[list, list[str], dict]:
    """One pass there and back: loss and gradients as bits, the order in which parameters got theirs, and messages."""
    hp.manual_seed(7)
    order: list[str] = []
    names = {p: name for name, p in net.named_parameters()}
    for parameter in net.parameters():
        parameter.grad = None
        parameter.hooks = None
        parameter.on_gradient(lambda p: order.append(names[p]))
    syncing = GradientSync(net) if sync else None
    with counter.counting() as sent:
        y = net(x)
        loss = (y * y).sum().resolve()
        syncing.backward(loss) if sync else loss.backward()
    grads = [p.grad.shard.tobytes() for p in net.parameters()]
    bits = [loss.shard.tobytes(), *grads]
    if x.requires_grad:
        bits.append(x.grad.shard.tobytes())
        x.grad = None
    return bits, order, sent


def counts(sent: dict) -> dict:
    return {key: (tally.messages, tally.bytes) for key, tally in sent.items()}


def marked(how: str) -> Callable[[nn.Module], nn.Module]:
    return {
        "blocks": lambda net: nn.recompute(net, "blocks.*"),
        "parts of blocks": lambda net: nn.recompute(net, "blocks.*.[gun]*"),
        "everything": lambda net: nn.recompute(net),
        "blocks in everything": lambda net: nn.recompute(nn.recompute(net, "blocks.*")),
        "results": lambda net: nn.recompute(net, ops=("swiglu", "rms_norm", "layer_norm", "dropout", "mul", "add")),
        "gates of blocks": lambda net: nn.recompute(net, "blocks.*", ops=("swiglu", "dropout")),
        "results in blocks": lambda net: nn.recompute(nn.recompute(net, "blocks.*"), ops=("swiglu", "rms_norm")),
    }[how]


CASES = [(split, how) for split in SPLITS for how in ("blocks", "results")]
CASES += [
    ("tensor", "parts of blocks"),
    ("data", "everything"),
    ("sequence", "blocks in everything"),
    ("data", "gates of blocks"),
    ("sharded", "results in blocks"),
]


@pytest.mark.parametrize(("split", "how"), CASES)
def test_gradients_and_their_order_are_those_of_the_plain_run(mesh, split, how) -> None:
    x = data(split)
    bits, order, _ = step(network(split), x)
    again, second_order, _ = step(marked(how)(network(split)), x)
    collective_assert(mesh.world, bits == again, "bits differ")
    assert second_order == order and len(order) == len(set(order)) == 3 * 5 + 2


def test_inputs_without_a_gradient_need_none(mesh, split) -> None:
    x = data(split, requires_grad=False)
    bits, order, _ = step(network(split), x)
    again, second_order, _ = step(marked("blocks")(network(split)), x)
    collective_assert(mesh.world, bits == again and order == second_order, "bits or order differ")


@pytest.mark.ranks(min=2)
def test_messages_of_the_forward_pass_are_repeated_but_for_sharded_weights(mesh, split) -> None:
    x = data(split)
    net = network(split)
    with counter.counting() as forward:
        net.blocks[0](x)
    plain = counts(step(network(split), x)[2])
    again = counts(step(marked("blocks")(network(split)), x)[2])
    # a sharded weight is gathered for the second run, which spares gathering it for its gradient
    blocks = 0 if split == "sharded" else 3
    once = counts(forward)
    wanted = {
        key: tuple(n + blocks * m for n, m in zip(plain[key], once.get(key, (0, 0)), strict=True)) for key in plain
    }
    collective_assert(mesh.world, again == {k: pytest.approx(v) for k, v in wanted.items()}, f"{again}, not {wanted}")


@pytest.mark.ranks(min=2)
def test_a_result_that_is_made_again_is_moved_again_once_for_all_that_use_it(mesh) -> None:
    x = data("sequence")
    plain, again = (counts(step(net, x)[2]) for net in (network("sequence"), marked("results")(network("sequence"))))
    p = mesh.shape["model"]
    if p == 1:
        assert plain == again
    else:  # the normalised rows, which gate and up take gathered, in each of the three blocks
        messages, nbytes = (
            after - before
            for before, after in zip(plain["all_gather", "model"], again["all_gather", "model"], strict=True)
        )
        whole = len(range(*x.sig.box[0])) * TOKENS * WIDTH * 8
        here = x.shard.nbytes
        assert (messages, nbytes) == (3, 3 * (whole - here))


def test_a_second_pass_over_a_kept_graph_is_equal(mesh) -> None:
    net, x = marked("blocks")(network("data")), data("data")
    hp.manual_seed(7)
    loss = (net(x) ** 2).sum()
    loss.backward(retain_graph=True)
    first = [p.grad.shard.copy() for p in net.parameters()]
    loss.backward()
    for once, parameter in zip(first, net.parameters(), strict=True):
        np.testing.assert_array_equal(parameter.grad.shard, once + once)
    with pytest.raises(RuntimeError, match="already walked and freed"):
        loss.backward()


# ---- functions


def test_several_results_some_without_a_gradient_and_one_that_is_an_input(mesh) -> None:
    def function(a: hp.Tensor, b: hp.Tensor, scale: float) -> tuple:
        c = F.tanh(a * b) * scale
        return c, F.argmax(c, 1), a, c.exp(), "text", c

    def run(call: Callable[..., tuple]) -> list:
        a, b = (hp.tensor(np.random.default_rng(i).standard_normal((4, 6)), layout=Layout("batch")) for i in (1, 2))
        a.requires_grad_()
        b.requires_grad_()
        c, best, same, e, text, twice = call(function, a, b, scale=0.5)
        assert same is a and text == "text" and not best.requires_grad and c.requires_grad
        ((c * same).sum() + (e * b).sum() + (twice * twice).sum()).backward()
        return [c.shard.tobytes(), e.shard.tobytes(), a.grad.numpy().tobytes(), b.grad.numpy().tobytes()]

    plain = run(lambda f, *args, **kwargs: f(*args, **kwargs))
    assert run(hp.recompute) == plain


def test_a_result_that_nothing_uses_costs_no_second_run(mesh) -> None:
    runs = []

    def function(x: hp.Tensor) -> tuple[hp.Tensor, hp.Tensor]:
        runs.append(hp.recomputing())
        return x * 2.0, x * 3.0

    x = hp.tensor(np.ones(3), requires_grad=True)
    unused = hp.recompute(function, x)
    _, tripled = hp.recompute(function, x)
    (tripled.sum() + x.sum()).backward()
    np.testing.assert_array_equal(x.grad.numpy(), np.full(3, 4.0))
    assert runs == [False, False, True] and len(unused) == 2
    with hp.no_grad():
        assert not hp.recompute(function, x)[0].requires_grad


def test_tensors_that_are_not_arguments_get_their_gradient_too(mesh) -> None:
    x = hp.tensor(np.arange(1.0, 5.0), layout=Layout("batch"), requires_grad=True)
    w = hp.Parameter(np.full(x.shard.shape, 2.0), x.sig)
    outer = x * x
    (hp.recompute(lambda y: y * outer * w, x) + outer * w).sum().backward()
    v = np.arange(1.0, 5.0)
    np.testing.assert_allclose(x.grad.numpy(), 2 * (3 * v**2 + 2 * v))
    np.testing.assert_allclose(w.grad.numpy(), v**3 + v**2)


def test_nothing_inside_is_kept_and_results_are_freed(mesh) -> None:
    held = []

    def function(x: hp.Tensor) -> hp.Tensor:
        y = F.tanh(x)
        held.append(weakref.ref(y.shard))
        return F.exp(y) + x

    x = hp.tensor(np.ones(4), requires_grad=True)
    plain = function(x)
    assert held[0]() is not None, "the tape keeps it"
    y = hp.recompute(function, x)
    assert held[1]() is None
    y.sum().backward()
    assert held[2]() is None, "freed when it was walked"
    del plain


def test_results_that_are_made_again_are_not_kept(mesh) -> None:
    net, x = network("data"), data("data")
    made = []
    net.blocks[1].down.register_forward_pre_hook(lambda _, args: made.append(weakref.ref(args[0].shard)))
    loss = (net(x) ** 2).sum()
    assert made[0]() is not None
    with hp.recompute_results("swiglu", "dropout"):
        loss = (net(x) ** 2).sum()
    assert made[1]() is None
    loss.backward()


def test_random_numbers_go_on_as_if_nothing_had_been_run_again(mesh) -> None:
    x = data("data")
    step(marked("blocks")(network("data")), x)
    after = hp.rand(3).numpy()
    step(network("data"), x)
    np.testing.assert_array_equal(hp.rand(3).numpy(), after)


@pytest.mark.parametrize("how", ["module", "results"])
def test_running_statistics_are_updated_once(mesh, how) -> None:
    x = np.random.default_rng(1).standard_normal((4, 3, 5, 2, 2))

    def run(mark: bool) -> dict:
        hp.manual_seed(2)
        net = nn.Sequential(nn.Conv3d(3, 4, 1), nn.BatchNorm3d(4, momentum=None), nn.Tanh(), nn.Conv3d(4, 2, 1))
        if mark:
            nn.recompute(net, **({"ops": ("batch_norm", "tanh")} if how == "results" else {}))
        for _ in range(2):
            net(hp.tensor(x, layout=Layout("batch"))).sum().backward()
        return {**net.state_dict(numpy=True), **{name: p.grad.numpy() for name, p in net.named_parameters()}}

    plain, again = run(False), run(True)
    for name, value in plain.items():
        np.testing.assert_array_equal(again[name], value, err_msg=name)


def test_the_checked_mode_and_a_function_that_changes_its_mind(mesh, split) -> None:
    seen = []
    for net in (network(split), marked("blocks")(network(split)), marked("results")(network(split))):
        with hp.checked() as checker:
            step(net, data(split))
        seen.append(checker.count)
    assert seen[0] < seen[1] and seen[0] == seen[2], "operations of the second run are checked too"
    weights = [hp.tensor(np.ones(3), requires_grad=True) for _ in range(2)]
    y = hp.recompute(lambda x: x * weights[hp.recomputing()], hp.tensor(np.ones(3)))
    with pytest.raises(RuntimeError, match=r"mul: run again for backward it uses a tensor of shape \(3,\) that it did"):
        y.sum().backward()


def test_a_trace_shows_second_runs_under_their_modules(mesh) -> None:
    recorder = Recorder()
    with instruments(recorder):
        step(marked("blocks")(network("data")), data("data"))
    spans = [e for e in recorder.events if e.category == "operation" and "rms_norm" in e.name]
    assert [e.name for e in spans] == ["rms_norm"] * 3 + ["rms_norm", "rms_norm backward"] * 3
    assert [e.module for e in spans] == [f"blocks.{i}.norm" for i in (0, 1, 2, 2, 2, 1, 1, 0, 0)]
    outer = [e for e in recorder.events if e.name == "recompute backward"]
    for block, run in zip((2, 1, 0), outer, strict=True):
        inside = [e for e in spans[3:] if run.begin <= e.begin and e.end <= run.end]
        assert {e.module for e in inside} == {f"blocks.{block}.norm"} and len(inside) == 2


# ---- marks


def test_marks_are_shown_and_set_on_the_outermost_modules_that_match() -> None:
    net = nn.recompute(network("data"), "blocks.*")
    assert [m.full_name for m in net.modules() if m.recomputed] == ["blocks.0", "blocks.1", "blocks.2"]
    assert repr(net.blocks[0]).splitlines()[1] == "  recompute=True"
    nn.recompute(net, "blocks.1", ops=("gelu", "relu"))
    assert repr(net.blocks[1]).splitlines()[1] == "  recompute=('gelu', 'leaky_relu')"
    nn.recompute(net, "blocks.1", ops=())
    assert not net.blocks[1].recomputed and "recompute" not in repr(net.blocks[1])


def test_wrong_marks_are_named() -> None:
    with pytest.raises(ValueError, match=r"the pattern 'block\.\*' matches no module; near names: blocks"):
        nn.recompute(network("data"), "block.*")
    with pytest.raises(ValueError, match=r"operations are names among add, .*, got \('matmul',\)"):
        nn.recompute(network("data"), ops=("matmul",))
    with pytest.raises(ValueError, match="got 'gelu'"):
        nn.recompute(network("data"), ops="gelu")
