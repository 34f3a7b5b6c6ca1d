"""One weight under two names, as an embedding and the head that shares it: it is trained, reduced and saved once."""

import numpy as np
import pytest

import hpcpar as hp
from hpcpar import Layout, nn, optim
from hpcpar import functional as F
from hpcpar.checkpoint import Folder, Saver
from hpcpar.checkpoint.reading import Checkpoint
from hpcpar.checkpoint.training import collect, restore_model, restore_optimizer
from hpcpar.parallel import GradientSync
from hpcpar.testing import assert_close_everywhere, collective_assert
from hpcpar.transport import counter

torch = pytest.importorskip("torch", reason="torch is the oracle")
tn = torch.nn
WORDS, WIDTH, SAMPLES, TOKENS = 11, 6, 5, 7
TOKENS_IN = np.random.default_rng(1).integers(0, WORDS, (SAMPLES, TOKENS))
TARGETS = np.random.default_rng(2).integers(0, WORDS, (SAMPLES, TOKENS))
SPLITS = {"whole": Layout(), "words": Layout("model"), "columns": Layout(None, "model"), "state": Layout("batch")}


class Bigram(nn.Module):
    """The next word from a word alone."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        return self.head(self.norm(self.tokens(tokens).resolve()))


class Twin(tn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = tn.Embedding(WORDS, WIDTH, dtype=torch.float64)
        self.norm = tn.RMSNorm(WIDTH, dtype=torch.float64)
        self.head = tn.Linear(WIDTH, WORDS, bias=False, dtype=torch.float64)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        return self.head(self.norm(self.tokens(tokens)))


def loss_of(model):
    tokens, targets = (hp.tensor(a, layout=Layout("batch")) for a in (TOKENS_IN, TARGETS))
    return F.cross_entropy(model(tokens).transpose(1, 2), targets)


@pytest.fixture
def twin():
    torch.manual_seed(0)
    return Twin()


@pytest.fixture(params=SPLITS)
def model(request, mesh, twin, adopt):
    """The twin's weights, the shared one split in several ways."""
    made = Bigram()
    adopt(made, twin)
    layout = SPLITS[request.param]
    return hp.parallelize(made, {"tokens": hp.Placement(weight=layout)})


def test_it_is_one_parameter_under_its_first_name_and_both_names_are_in_the_state():
    model = Bigram()
    assert [name for name, _ in model.named_parameters()] == ["tokens.weight", "norm.weight"]
    assert model.head.weight is model.tokens.weight and model.tokens.weight.name == "tokens.weight"
    assert list(model.state_dict()) == list(Twin().state_dict()) == ["tokens.weight", "norm.weight", "head.weight"]
    assert model.state_dict()["head.weight"].shard is model.tokens.weight.shard
    outer = nn.Sequential(nn.Identity(), model)
    assert model.tokens.weight.name == "1.tokens.weight"
    assert [name for name, _ in outer.named_parameters()] == ["1.tokens.weight", "1.norm.weight"]
    with pytest.raises(ValueError, match=r"head\.weight is shared with another module; place it under its first name"):
        hp.parallelize(model, {"head": hp.Column("model")})


def test_contributions_of_both_uses_are_added_and_reduced_once(mesh, model, twin):
    expected = torch.nn.functional.cross_entropy(twin(torch.tensor(TOKENS_IN)).transpose(1, 2), torch.tensor(TARGETS))
    expected.backward()
    calls = []
    model.tokens.weight.on_gradient(calls.append)
    sync = GradientSync(model)
    loss = loss_of(model)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    with counter.counting() as sent:
        sync.backward(loss)
    assert len(calls) == 1
    grad, weight = model.tokens.weight.grad, model.tokens.weight
    assert grad.layout == weight.layout
    assert_close_everywhere(mesh.world, grad.numpy(), twin.tokens.weight.grad.numpy(), 1e-12, "gradient")
    replicas = mesh.shape["batch"]
    if "batch" not in weight.sig.split_axes and replicas > 1:
        elements = weight.shard.size + WIDTH  # and the weight of the norm
        whole = 2 * (replicas - 1) / replicas * elements * 8
        share = sum(tally.bytes for (name, axes), tally in sent.items() if name == "all_reduce" and axes == "batch")
        collective_assert(mesh.world, share <= whole, f"{share} bytes for gradients of {whole}")
    sync.close()


def test_training_equals_torch(mesh, model, twin):
    ours = optim.AdamW(model, 0.1)
    theirs = torch.optim.AdamW(twin.parameters(), 0.1)
    assert list(ours.state) == [] and ours.param_groups[0]["names"] == ["tokens.weight", "norm.weight"]
    sync = GradientSync(model)
    for _ in range(3):
        sync.backward(loss_of(model))
        ours.step()
        ours.zero_grad()
        logits = twin(torch.tensor(TOKENS_IN)).transpose(1, 2)
        torch.nn.functional.cross_entropy(logits, torch.tensor(TARGETS)).backward()
        theirs.step()
        theirs.zero_grad()
    values = model.state_dict(numpy=True)
    for name, wanted in twin.state_dict().items():
        assert_close_everywhere(mesh.world, values[name], wanted.numpy(), 1e-11, name)
    assert list(ours.state) == ["tokens.weight", "norm.weight"]


def test_a_checkpoint_holds_it_once_and_loads_under_another_layout(mesh, model, shared_path):
    optimizer = optim.SGD(model, 0.1, momentum=0.9)
    sync = GradientSync(model)
    sync.backward(loss_of(model))
    optimizer.step()
    tensors, shown, state = collect(model, optimizer)
    assert [name for name in tensors if name.startswith("model/")] == ["model/tokens.weight", "model/norm.weight"]
    path = Saver(Folder(shared_path / "c"), mesh.world).save(1, tensors, state, shown)
    other = Bigram()
    hp.parallelize(other, {"tokens": hp.Placement(weight=Layout("batch", "model"))})
    resumed = optim.SGD(other, 0.1, momentum=0.9)
    checkpoint = Checkpoint(path)
    restore_model(checkpoint, other)
    restore_optimizer(checkpoint, resumed)
    assert other.head.weight is other.tokens.weight
    for name, value in model.state_dict(numpy=True).items():
        np.testing.assert_array_equal(other.state_dict(numpy=True)[name], value)
    speed = [o.state["tokens.weight"]["momentum_buffer"].numpy() for o in (optimizer, resumed)]
    np.testing.assert_array_equal(*speed)
