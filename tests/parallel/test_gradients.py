"""Gradient synchronisation: complete gradients, few messages, true means over unequal micro-batches."""

import numpy as np
import pytest

import hpcpar as hp
from hpcpar import Layout, nn
from hpcpar.parallel import GradientSync
from hpcpar.testing import assert_close_everywhere
from hpcpar.transport import counter


def array(*shape, seed=1):
    return np.random.default_rng(seed).standard_normal(shape)


def network(split=True):
    hp.manual_seed(2)
    net = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 3))
    if split:
        hp.parallelize(net, {"0": hp.Column("model"), "2": hp.Row("model")})
    return net


def mean_loss(net, x, y):
    layout = Layout("batch")
    return nn.MSELoss()(net(hp.tensor(x, layout=layout)), hp.tensor(y, layout=layout))


def gradients(net):
    return {name: parameter.grad.numpy() for name, parameter in net.named_parameters()}


def torch_gradients(net, x, y):
    torch = pytest.importorskip("torch", reason="torch is the oracle")
    t = torch.nn
    layers = [t.Linear(6, 10), t.GELU(), t.Linear(10, 8, bias=False), t.BatchNorm1d(8), t.Linear(8, 3)]
    twin = t.Sequential(*layers).double()
    state = {name: torch.tensor(value) for name, value in net.state_dict(numpy=True).items()}
    twin.load_state_dict(state)
    torch.nn.functional.mse_loss(twin(torch.tensor(x)), torch.tensor(y)).backward()
    return {name: parameter.grad.numpy() for name, parameter in twin.named_parameters()}


@pytest.mark.parametrize("bucket_bytes", [1, 200, 4 << 20])
@pytest.mark.parametrize("overlap", [True, False])
def test_gradients_equal_those_of_torch_and_have_the_layouts_of_the_parameters(mesh, bucket_bytes, overlap):
    net, x, y = network(), array(7, 6), array(7, 3, seed=2)
    expected = torch_gradients(net, x, y)
    sync = GradientSync(net, bucket_bytes=bucket_bytes, overlap=overlap)
    sync.backward(mean_loss(net, x, y))
    for name, parameter in net.named_parameters():
        assert parameter.grad.layout == parameter.layout
        assert_close_everywhere(mesh.world, parameter.grad.numpy(), expected[name], 1e-11, name)


def test_overlap_changes_no_bit(mesh):
    x, y = array(7, 6), array(7, 3, seed=2)
    results = []
    for overlap in (True, False):
        net = network()
        GradientSync(net, bucket_bytes=300, overlap=overlap).backward(mean_loss(net, x, y))
        results.append(gradients(net))
    for name, value in results[0].items():
        assert np.array_equal(value, results[1][name])


def test_large_gradients_are_summed_where_they_lie_and_small_ones_packed(mesh):
    net = nn.Sequential(nn.Conv3d(16, 128, 5), nn.Flatten(), nn.Linear(128, 2))  # 2 MB of weights first, in float64
    x = hp.tensor(array(6, 16, 5, 5, 5), layout=Layout("batch"))
    (net(x) ** 2).sum().backward()
    expected = gradients(net)
    net.zero_grad()
    sync = GradientSync(net)
    with sync.accumulate():
        sync.backward((net(x) ** 2).sum())
    held = net[0].weight.grad.shard
    with counter.counting() as sent:
        sync.finish()
    assert np.shares_memory(held, net[0].weight.grad.shard)
    for name, value in gradients(net).items():
        assert_close_everywhere(mesh.world, value, expected[name], 1e-12, name)
    if mesh.shape["batch"] > 1:
        assert sent["all_reduce", "batch"].messages == 2


def test_bytes_are_those_of_the_partial_gradients_in_as_many_messages_as_buckets(mesh):
    net = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))
    batch, numbers = mesh.shape["batch"], 6 * 10 + 10 + 10 * 3 + 3
    for bucket_bytes, buckets in ((1 << 30, 1), (1, 4)):
        net.zero_grad()
        sync = GradientSync(net, bucket_bytes=bucket_bytes)
        loss = mean_loss(net, array(7, 6), array(7, 3, seed=2))
        with counter.counting() as sent:
            sync.backward(loss)
        sync.close()
        if batch == 1:
            assert not sent
        else:
            tally = sent.pop(("all_reduce", "batch"))
            assert not sent
            assert tally.messages == buckets
            assert tally.bytes == pytest.approx(2 * (batch - 1) / batch * numbers * 8, rel=1e-14)


def test_unequal_micro_batches_give_the_gradients_of_one_large_batch(mesh):
    hp.manual_seed(2)
    net = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))
    hp.parallelize(net, {"0": hp.Column("model"), "2": hp.Row("model")})
    x, y = array(9, 6), array(9, 3, seed=2)
    sync = GradientSync(net)
    sync.backward(mean_loss(net, x, y), weight=9)
    whole = gradients(net)
    net.zero_grad()
    with counter.counting() as sent:
        with sync.accumulate():
            sync.backward(mean_loss(net, x[:4], y[:4]), weight=4)
            sync.backward(mean_loss(net, x[4:5], y[4:5]), weight=1)
        partial = {name: parameter.grad.layout.partial for name, parameter in net.named_parameters()}
        sync.backward(mean_loss(net, x[5:], y[5:]), weight=4)
    for name, value in gradients(net).items():
        assert_close_everywhere(mesh.world, value, whole[name], 1e-13, name)
    if mesh.shape["batch"] > 1:
        assert all("batch" in axes for axes in partial.values())
    # once for each kind of gradient, not once a micro-batch: beside it only the three losses' sums go over batch
    over_batch = sent.get(("all_reduce", "batch"))
    assert (over_batch.messages if over_batch else 0) == (4 if mesh.shape["batch"] > 1 else 0)


def test_masked_means_weigh_by_what_they_count(mesh):
    net = nn.Linear(5, 4)
    x, target = array(8, 5), np.random.default_rng(3).integers(0, 4, 8)
    target[[0, 1, 2, 6]] = -100

    def loss(part):
        layout = Layout("batch")
        logits = net(hp.tensor(x[part], layout=layout))
        return hp.functional.cross_entropy(logits, hp.tensor(target[part], layout=layout))

    sync = GradientSync(net)
    sync.backward(loss(slice(None)))
    whole = gradients(net)
    net.zero_grad()
    with sync.accumulate():
        sync.backward(loss(slice(0, 5)), weight=2)
    sync.backward(loss(slice(5, 8)), weight=2)
    for name, value in gradients(net).items():
        assert_close_everywhere(mesh.world, value, whole[name], 1e-13, name)


def test_a_single_weighted_batch_is_not_rounded(mesh):
    x, y = array(7, 6), array(7, 3, seed=2)
    results = []
    for weight in (None, 7):
        net = network()
        GradientSync(net).backward(mean_loss(net, x, y), weight=weight)
        results.append(gradients(net))
    assert all(np.array_equal(results[0][name], results[1][name]) for name in results[0])


def test_unused_parameters_get_zeros_or_nothing(mesh):
    net = nn.ModuleDict({"used": nn.Linear(4, 3), "idle": nn.Linear(4, 3), "frozen": nn.Linear(4, 3)})
    net["frozen"].requires_grad_(False)
    for unused in ("zero", "skip"):
        net.zero_grad()
        sync = GradientSync(net, unused=unused)
        sync.backward(net["used"](hp.tensor(array(5, 4), layout=Layout("batch"))).sum())
        sync.close()
        idle = net["idle"].weight.grad
        assert (idle is None) if unused == "skip" else not idle.numpy().any()
        assert net["frozen"].weight.grad is None
        assert net["used"].weight.grad.layout == net["used"].weight.layout


def test_a_parameter_that_only_an_earlier_micro_batch_used_is_reduced_too(mesh):
    net = nn.ModuleDict({"a": nn.Linear(4, 3, bias=False), "b": nn.Linear(4, 3, bias=False)})
    x = array(6, 4)
    sync = GradientSync(net)
    with sync.accumulate():
        sync.backward(net["a"](hp.tensor(x, layout=Layout("batch"))).sum())
    sync.backward(net["b"](hp.tensor(x, layout=Layout("batch"))).sum())
    expected = np.broadcast_to(x.sum(0), (3, 4))
    for name in "ab":
        assert_close_everywhere(mesh.world, net[name].weight.grad.numpy(), expected, 1e-13)


def test_convolution_gradients_keep_their_memory_order(mesh):
    net = nn.Conv2d(3, 4, (2, 3))
    sync = GradientSync(net)
    x = array(5, 3, 6, 6)
    sync.backward(net(hp.tensor(x, layout=Layout("batch"))).sum())
    if mesh.shape["batch"] > 1:
        assert net.weight.grad.shard.strides == net.weight.shard.strides
    windows = np.lib.stride_tricks.sliding_window_view(x, (2, 3), axis=(2, 3))
    expected = np.broadcast_to(windows.sum((0, 2, 3)), (4, 3, 2, 3))
    assert_close_everywhere(mesh.world, net.weight.grad.numpy(), expected, 1e-13)


def test_half_precision_gradients_are_summed_in_single(mesh):
    batch = mesh.shape["batch"]
    weight = nn.Parameter(np.zeros(4, np.float16), hp.tensor(np.zeros(4)).sig)
    module = nn.Module()
    module.w = weight
    sync = GradientSync(module)
    # 2048 + 1 is 2048 in half precision: added one by one, the ones would be lost
    rows = np.ones((max(batch, 2), 4), np.float16)
    rows[0] = 2048
    loss = (hp.tensor(rows, layout=Layout("batch")) * weight).sum()
    sync.backward(loss)
    assert weight.grad.dtype == np.float16
    if batch == len(rows):
        assert weight.grad.numpy().tolist() == [float(np.float16(2048 + batch - 1))] * 4


def test_misuse_is_named(mesh):
    net, x, y = network(), array(7, 6), array(7, 3, seed=2)
    sync = GradientSync(net)
    mean_loss(net, x, y).backward()
    with pytest.raises(RuntimeError, match=r"a second gradient of .*accumulate\(\)"):
        mean_loss(net, x, y).backward()
    sync.close()
    net.zero_grad()
    sync = GradientSync(net)
    sync.backward(mean_loss(net, x, y), weight=7)
    with pytest.raises(RuntimeError, match="zero_grad"):
        sync.backward(mean_loss(net, x, y), weight=7)
    with pytest.raises(ValueError, match="a mean is over something"):
        sync.backward(mean_loss(net, x, y), weight=0)
    with pytest.raises(ValueError, match="'zero' or 'skip'"):
        GradientSync(net, unused="ignore")


def test_a_discarded_backward_leaves_nothing_behind(mesh):
    net, x, y = network(), array(7, 6), array(7, 3, seed=2)
    sync = GradientSync(net, bucket_bytes=100)
    sync.backward(mean_loss(net, x, y))
    expected = gradients(net)
    net.zero_grad()
    mean_loss(net, 5 * x, y).backward()
    sync.discard()
    assert all(parameter.grad is None for parameter in net.parameters())
    sync.backward(mean_loss(net, x, y))
    assert all(np.array_equal(value, expected[name]) for name, value in gradients(net).items())


def test_one_sync_at_a_time_sums_the_gradients_of_a_parameter(mesh):
    net, x, y = network(), array(7, 6), array(7, 3, seed=2)

    def step():  # as a function that is called for each of several phases has it
        net.zero_grad()
        sync = GradientSync(net)
        sync.backward(mean_loss(net, x, y))
        return gradients(net)

    expected = step()
    for name, found in step().items():
        np.testing.assert_array_equal(found, expected[name])
    first = GradientSync(net)
    with pytest.raises(RuntimeError, match=r"another one sums the gradients of .*close\(\) it first"):
        GradientSync(net[4])
    first.close()
    second = GradientSync(net)
    for _ in range(2):
        net.zero_grad()
        second.backward(mean_loss(net, x, y))
        for name, found in gradients(net).items():
            np.testing.assert_array_equal(found, expected[name])
    assert all(len(parameter.hooks) == 1 for parameter in net.parameters())


@pytest.mark.parametrize("bucket_bytes", [1, 4 << 20])
@pytest.mark.parametrize("accumulating", [False, True])
def test_after_an_error_inside_backward_a_new_step_begins(mesh, bucket_bytes, accumulating):
    net, x, y = network(), array(7, 6), array(7, 3, seed=2)
    sync = GradientSync(net, bucket_bytes=bucket_bytes)
    sync.backward(mean_loss(net, x, y), weight=7)
    expected = gradients(net)

    def fail(parameter):
        raise ArithmeticError("on all ranks")

    for _ in range(2):
        net.zero_grad()
        hooks = net[0].weight.hooks
        net[0].weight.on_gradient(fail)
        with pytest.raises(ArithmeticError):
            if accumulating:
                with sync.accumulate():
                    sync.backward(mean_loss(net, x, y), weight=3)
            else:
                sync.backward(mean_loss(net, x, y), weight=3)
        net[0].weight.hooks = hooks
        net.zero_grad()
        sync.backward(mean_loss(net, x, y), weight=7)
        for name, found in gradients(net).items():
            np.testing.assert_array_equal(found, expected[name])
