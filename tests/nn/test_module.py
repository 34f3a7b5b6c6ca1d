"""The tree of modules: names, state, hooks, layouts at the borders; as in torch where torch has it."""

import numpy as np
import pytest

import hpcpar as hp
from hpcpar import Layout, nn
from hpcpar.nn.state import relayout_
from hpcpar.testing import assert_close_everywhere


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x):
        return self.norm(self.conv(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(2), Block(2)])
        self.heads = nn.ModuleDict({"a": nn.Linear(2, 3, bias=False), "b": nn.Identity()})
        self.register_buffer("scale", hp.ones((2,)), persistent=False)
        self.depth = 2

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.heads["a"](x.mean((2, 3)))


def torch_net():
    torch = pytest.importorskip("torch", reason="torch is the oracle")
    tn = torch.nn

    class Block(tn.Module):
        def __init__(self, width):
            super().__init__()
            self.conv = tn.Conv2d(width, width, 3, padding=1)
            self.norm = tn.BatchNorm2d(width)

    class Net(tn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = tn.ModuleList([Block(2), Block(2)])
            self.heads = tn.ModuleDict({"a": tn.Linear(2, 3, bias=False), "b": tn.Identity()})
            self.register_buffer("scale", torch.ones(2), persistent=False)

    return Net().double()


def test_names_shapes_and_order_of_the_state_are_those_of_torch(mesh):
    net, twin = Net(), torch_net()
    shapes, expected = ([(n, tuple(p.shape)) for n, p in m.named_parameters()] for m in (net, twin))
    assert shapes == expected
    assert [n for n, _ in net.named_modules()] == [n for n, _ in twin.named_modules()]
    assert [n for n, _ in net.named_buffers()] == [n for n, _ in twin.named_buffers()]
    values = net.state_dict(numpy=True)
    assert {n: (v.shape, v.dtype) for n, v in values.items()} == {
        n: (tuple(v.shape), v.numpy().dtype) for n, v in twin.state_dict().items()
    }
    assert list(values) == list(twin.state_dict())


def test_representation_is_that_of_torch(mesh):
    torch = pytest.importorskip("torch", reason="torch is the oracle")

    def made(t):
        return t.Sequential(t.Conv3d(1, 2, 3, padding=1, bias=False), t.ReLU(), t.Sequential(t.Linear(3, 4), t.Tanh()))

    assert repr(made(nn)) == repr(made(torch.nn))


def test_parameters_know_their_full_names(mesh):
    net = Net()
    assert all(parameter.name == name for name, parameter in net.named_parameters())
    outer = nn.Sequential(net)
    assert net.blocks[1].conv.full_name == "0.blocks.1.conv"
    assert outer[0].blocks[1].conv.weight.name == "0.blocks.1.conv.weight"


def test_modules_of_a_chain_are_found_and_replaced_by_number(mesh):
    net = nn.Sequential({"first": nn.Linear(2, 3), "second": nn.Tanh()}).append(nn.Linear(3, 1))
    assert [name for name, _ in net.named_children()] == ["first", "second", "2"]
    assert net[-1] is net.get_submodule("2") and net[:2] == [net.first, net.second]
    net[1] = nn.ReLU()
    assert net.second.full_name == "second" and len(net) == 3
    x = np.array([[1.0, -2.0]])
    hidden = np.maximum(x @ net.first.weight.numpy().T + net.first.bias.numpy(), 0)
    expected = hidden @ net[2].weight.numpy().T + net[2].bias.numpy()
    assert_close_everywhere(mesh.world, net(hp.tensor(x)).numpy(), expected, 1e-13)


def test_a_parameter_used_twice_is_trained_once_and_saved_twice(mesh):
    net = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    net[1].weight = net[0].weight
    assert [n for n, _ in net.named_parameters()] == ["0.weight"]
    assert list(net.state_dict()) == ["0.weight", "1.weight"]
    net(hp.tensor(np.ones((2, 3)), layout=Layout("batch"))).sum().backward()
    w = net[0].weight.numpy()
    # d/dW of 1'WWx: two uses of one weight
    x, one = np.ones((2, 3)), np.ones((2, 3))
    expected = one.T @ (x @ w.T) + (one @ w).T @ x
    assert_close_everywhere(mesh.world, net[0].weight.grad.numpy(), expected, 1e-12)


def test_state_survives_a_round_trip_through_another_layout(mesh):
    hp.manual_seed(3)
    first, second = Net(), Net()
    relayout_(second.blocks[0].conv.weight, Layout("model", "batch"))
    relayout_(second.heads["a"].weight, Layout(None, "model"))
    keys = second.load_state_dict(first.state_dict())
    assert keys == ([], [])
    for name, value in first.state_dict(numpy=True).items():
        assert np.array_equal(second.state_dict(numpy=True)[name], value)
    third = Net()
    third.load_state_dict(second.state_dict(numpy=True))
    assert np.array_equal(third.heads["a"].weight.numpy(), first.heads["a"].weight.numpy())


def test_each_rank_reads_only_its_block_of_a_sliceable_value(mesh):
    class Watched:
        def __init__(self, array):
            self.array, self.shape, self.asked = array, array.shape, []

        def __getitem__(self, box):
            self.asked.append(self.array[box].size)
            return self.array[box]

    module = nn.Linear(6, 12, bias=False, layouts={"weight": Layout("model")})
    values = Watched(np.arange(72.0).reshape(12, 6))
    module.load_state_dict({"weight": values})
    assert values.asked == [module.weight.shard.size]
    assert np.array_equal(module.weight.numpy(), values.array)


def test_a_state_that_does_not_fit_changes_nothing(mesh):
    module = nn.Linear(3, 2)
    before = module.weight.numpy()
    good = {"weight": np.ones((2, 3)), "bias": np.ones(2)}
    with pytest.raises(ValueError, match="no value for bias"):
        module.load_state_dict({"weight": good["weight"]})
    with pytest.raises(ValueError, match="nobody takes extra"):
        module.load_state_dict({**good, "extra": np.ones(1)})
    with pytest.raises(ValueError, match=r"bias has shape \(2,\), the value \(3,\)"):
        module.load_state_dict({**good, "bias": np.ones(3)})
    assert np.array_equal(module.weight.numpy(), before)
    keys = module.load_state_dict({"weight": good["weight"], "extra": np.ones(1)}, strict=False)
    assert keys == (["bias"], ["extra"])
    assert np.array_equal(module.weight.numpy(), good["weight"])


def test_an_input_layout_repartitions_and_is_recorded_once(mesh):
    net = nn.Sequential(nn.Identity(), nn.ReLU())
    net[1].layout = Layout(None, "model")
    net[1].out = Layout("model")
    x = hp.tensor(np.arange(24.0).reshape(4, 6) - 10, layout=Layout("batch"))
    for _ in range(2):
        y = net(x)
    assert y.layout == Layout("model").on(y.shape, mesh.shape)
    assert np.array_equal(y.numpy(), np.maximum(x.numpy(), 0))
    lines = nn.relayouts(net)
    moved = [line for line in lines if line.startswith("1: ")]
    # where one axis has all the ranks, or none, a layout may be reached already
    expected = x.layout != Layout(None, "model").on(x.shape, mesh.shape)
    assert len(moved) == expected
    if mesh.shape["model"] > 1:
        start = "1 (out): Layout(None, 'model') -> Layout('model'): all_to_all(model)"
        assert any(line.startswith(start) for line in lines)


def test_an_error_names_the_module_it_came_from(mesh):
    net = nn.Sequential(nn.Identity(), nn.Sequential(nn.Linear(4, 2)))
    with pytest.raises(ValueError, match=r"^1\.0: linear: x of shape"):
        net(hp.tensor(np.ones((2, 3))))
    from hpcpar import scope

    assert scope.current() == ""


def test_hooks_see_and_replace_arguments_and_results(mesh):
    module = nn.Identity()
    before = module.register_forward_pre_hook(lambda m, args: args[0] * 2.0)
    after = module.register_forward_hook(lambda m, args, result: result + 1.0)
    x = hp.tensor(np.ones(3))
    assert module(x).numpy().tolist() == [3, 3, 3]
    before.remove()
    after.remove()
    after.remove()
    assert module(x) is x


def test_train_eval_apply_and_freezing_reach_everything(mesh):
    net = Net()
    net.eval()
    assert not any(module.training for module in net.modules())
    net.train()
    assert all(module.training for module in net.modules())
    seen = []
    net.apply(lambda module: seen.append(type(module).__name__))
    assert seen[-1] == "Net" and seen.count("Block") == 2
    net.requires_grad_(False)
    assert not net(hp.tensor(np.ones((2, 2, 3, 3)))).requires_grad
    net.requires_grad_()
    net(hp.tensor(np.ones((2, 2, 3, 3)))).sum().backward()
    assert all(parameter.grad is not None for parameter in net.parameters())
    net.zero_grad()
    assert all(parameter.grad is None for parameter in net.parameters())


def test_dtype_of_parameters_and_conversion(mesh):
    with nn.default_dtype("float32"):
        net = Net()
    assert {p.dtype for p in net.parameters()} == {np.dtype("float32")}
    strides = net.blocks[0].conv.weight.shard.strides
    net.double()
    assert {p.dtype for p in net.parameters()} == {np.dtype("float64")}
    assert net.blocks[0].norm.running_mean.dtype == np.float64
    assert net.blocks[0].norm.num_batches_tracked.dtype == np.int64
    assert net.blocks[0].conv.weight.shard.strides == tuple(2 * s for s in strides)
    with pytest.raises(TypeError, match="floating"):
        nn.set_default_dtype("int32")


def test_mistakes_in_building_a_tree_are_named(mesh):
    class Forgetful(nn.Module):
        def __init__(self):
            self.layer = nn.Identity()

    with pytest.raises(AttributeError, match=r"call super\(\).__init__\(\)"):
        Forgetful()
    module = nn.Linear(2, 2)
    with pytest.raises(TypeError, match="'weight' of Linear takes a parameter"):
        module.weight = 3
    with pytest.raises(AttributeError, match="no attribute 'wieght'"):
        module.wieght  # noqa: B018
    with pytest.raises(KeyError, match="without dots"):
        module.add_module("a.b", nn.Identity())
    with pytest.raises(KeyError, match="'out' is an attribute of every module"):
        module.out = nn.Identity()
    with pytest.raises(TypeError, match="not a Tensor"):
        module.register_buffer("b", np.ones(2))
    with pytest.raises(ValueError, match="Linear: in_dims"):
        nn.Linear(10, 2, in_dims=(3, 3))
    with pytest.raises(ValueError, match="groups"):
        nn.Conv2d(3, 4, 3, groups=2)


def test_weights_lie_kernel_first_in_memory(mesh):
    weight = nn.Conv3d(4, 6, (2, 3, 5)).weight
    assert weight.shape == (6, 4, 2, 3, 5)
    assert weight.shard.transpose(weight.order).flags.c_contiguous
    relayout_(weight, Layout("model"))
    assert weight.shard.transpose(weight.order).flags.c_contiguous


def test_state_may_hold_plain_numbers():
    norm = nn.BatchNorm1d(2)
    state = {**norm.state_dict(numpy=True), "num_batches_tracked": 7, "running_mean": [1.0, 2.0]}
    norm.load_state_dict(state)
    assert norm.num_batches_tracked.item() == 7 and norm.running_mean.shard.tolist() == [1.0, 2.0]
    with pytest.raises(ValueError, match=r"weight has shape \(2,\), the value \(\)"):
        norm.load_state_dict({**state, "weight": 1})
