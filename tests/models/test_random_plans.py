"""Decoders under random plans: any layout of any weight and of what flows between, and the same loss and gradients.

``HPCPAR_PLANS`` sets how many are drawn (4 by default), ``HPCPAR_SEED`` where they start.
"""

from __future__ import annotations

import os
from functools import cache

import numpy as np
import pytest
from mpi4py import MPI

import hpcpar as hp
from hpcpar import Layout, nn
from hpcpar.models import gpt, llama
from hpcpar.parallel import GradientSync, Placement
from hpcpar.testing import assert_close_everywhere, draw_layout, draw_mesh, operand, run_cases

PLANS = int(os.environ.get("HPCPAR_PLANS", "4"))
SEED = int(os.environ.get("HPCPAR_SEED", "0"))
TEXTS, TOKENS, VOCABULARY, WIDTH = 5, 6, 11, 8
MODELS = {
    "gpt": lambda: gpt(VOCABULARY, width=WIDTH, layers=1, heads=4, max_positions=TOKENS),
    "llama": lambda: llama(VOCABULARY, width=WIDTH, layers=2, heads=4, kv_heads=4, hidden=9),
}
TEXT = np.random.default_rng(2).integers(0, VOCABULARY, (TEXTS, TOKENS + 1))


def build(kind: str, mesh: hp.Mesh) -> nn.Module:
    hp.manual_seed(6)
    with mesh, nn.default_dtype("float64"):
        return MODELS[kind]()


def computed(model: nn.Module, mesh: hp.Mesh, layout: Layout) -> dict[str, np.ndarray]:
    """Losses and gradients of two micro-batches."""
    sync, found = GradientSync(model), {}
    for half, rows in enumerate((slice(0, 3), slice(3, 5))):
        tokens, target = (operand(a[rows], mesh, layout) for a in (TEXT[:, :-1], TEXT[:, 1:]))
        loss = hp.functional.cross_entropy(model(tokens).transpose(1, 2), target)
        found[f"loss {half}"] = loss.numpy()
        if half == 0:
            with sync.accumulate():
                sync.backward(loss, weight=3)
        else:
            sync.backward(loss, weight=2)
    return {**found, **{name: p.grad.numpy() for name, p in model.named_parameters()}}


@cache
def computed_alone(kind: str) -> dict[str, np.ndarray]:
    alone = hp.Mesh(MPI.COMM_SELF)
    values = computed(build(kind, alone), alone, Layout())
    alone.free()
    return values


#: Labels of input, weight and result of a layer, and in which flows input and result lie.
LAYERS = {
    "embedding": ("ns", "vc", "nsc", "tokens", "stream"),
    "q": ("nsc", "hec", "nhse", "stream", "heads"),
    "k": ("nsc", "hec", "nhse", "stream", "heads"),
    "v": ("nsc", "hec", "nhse", "stream", "heads"),
    "o": ("nhse", "che", "nsc", "heads", "stream"),
    "up": ("nsc", "oc", "nso", "stream", "inner"),
    "gate": ("nsc", "oc", "nso", "stream", "inner"),
    "down": ("nso", "co", "nsc", "inner", "stream"),
    "head": ("nsc", "vc", "nsv", "stream", "logits"),
}


def draw_plan(rng: np.random.Generator, model: nn.Module, mesh: hp.Mesh) -> dict[str, Placement]:
    """A plan in which tokens, stream, heads, hidden layer and logits lie anyhow, and every parameter too.

    Only an axis that splits input and weight differently, while the result keeps neither, is taken from the weight.
    """
    flows = {"tokens": draw_layout(rng, (TEXTS, TOKENS), mesh), "heads": draw_layout(rng, (TEXTS, 4, TOKENS), mesh)}
    flows.update({name: draw_layout(rng, (TEXTS, TOKENS, 9), mesh) for name in ("stream", "inner", "logits")})
    context = str(rng.choice(["auto", "ring", "all_to_all", "gather"]))
    plan = {
        "": Placement(input=flows["tokens"], options={"logits": flows["logits"]}),
        "blocks.*.attention": Placement(options={"context": context}),
    }
    for name, module in model.named_modules():
        own = {key: p for key, p in module._parameters.items() if p is not None}
        layer = LAYERS.get(name.rpartition(".")[2])
        layouts = {key: draw_layout(rng, p.shape, mesh) for key, p in own.items() if rng.random() < 0.7}
        if layer is None:
            if own and "position" not in name:  # norms take their weights in any layout
                plan[name] = Placement(**layouts)
            continue
        x, w, y, source, target = layer
        taken = [(x, w, y, flows[source], flows[target])]
        if name == "embedding" and model.head is None:
            taken.append(("nsc", "vc", "nsv", flows["stream"], flows["logits"]))
        if "weight" in layouts:
            for labels in taken:
                layouts["weight"] = settled(mesh, layouts["weight"], *labels)
        if "bias" in layouts and not isinstance(module, nn.Linear):  # added to what lies as the flow does
            layouts["bias"] = Layout(flows[target].entry(1 if y == "nhse" else 2))
        overlap = ("reduce", "scatter", "gather") if rng.random() < 0.3 else None
        keep = str(rng.choice(["moved", "source"]))
        plan[name] = Placement(out=flows[target], keep=keep, overlap=overlap, **layouts)
    return plan


def settled(mesh: hp.Mesh, weight: Layout, x: str, w: str, y: str, source: Layout, target: Layout) -> Layout:
    """The layout of a weight without axes that a product could not settle."""

    def label(axis: str, names: str, layout: Layout) -> str | None:
        return next((c for d, c in enumerate(names) if axis in layout.entry(d)), None)

    lost = []
    for axis in mesh.axes:
        candidates = {label(axis, x, source), label(axis, w, weight)} - {None}
        if len(candidates) > 1 and label(axis, y, target) not in candidates:
            lost.append(axis)
    return Layout(*[tuple(a for a in weight.entry(d) if a not in lost) for d in range(len(w))])


@pytest.mark.watchdog(300)
@pytest.mark.parametrize("kind", MODELS)
def test_a_decoder_computes_the_same_under_random_plans(kind: str) -> None:
    def case(rng: np.random.Generator) -> None:
        mesh = draw_mesh(rng, ("a", "b", "c"))
        model = build(kind, mesh)
        hp.parallelize(model, draw_plan(rng, model, mesh))
        got = computed(model, mesh, draw_layout(rng, (TEXTS, TOKENS), mesh))
        largest = max(np.abs(v).max() for n, v in computed_alone(kind).items() if not n.startswith("loss"))
        for name, value in computed_alone(kind).items():
            if name.endswith("attention.k.bias"):  # exactly 0: softmax does not see it
                assert np.abs(got[name]).max() < 1e-12 * largest
            else:
                assert_close_everywhere(mesh.world, got[name], value, 1e-11, name)

    assert run_cases(case, PLANS, SEED).accepted >= PLANS // 3
