"""Every group runs with small sizes and gives the figures it promises; contestants that compute something else fail."""

import importlib.util
import json
import math

import numpy as np
import pytest

from hpcpar import kernels
from hpcpar.bench import suite, training
from hpcpar.bench.cases import CHANNELS, Case, data, networks, parse
from hpcpar.bench.options import Options
from hpcpar.bench.process import BenchError, Worker
from hpcpar.bench.training import differences, distance, judge
from hpcpar.cli.main import main

pytestmark = pytest.mark.spawns_mpi
QUICK = Options(quick=True, repeats=1)
torch_is_here = importlib.util.find_spec("torch") is not None


def figures(*groups):
    found = suite.run(groups, QUICK)
    assert len({(m.group, m.name) for m in found}) == len(found), "two figures of one name"
    for m in found:
        assert m.value is not None or m.note, m
        # differences of two times may be of either sign; everything else is an amount
        assert m.value is None or math.isfinite(m.value), m
        assert m.value is None or m.value > 0 or m.group in ("ops", "share", "memory"), m
    return {m.name: m.value for m in found if m.group in groups}


def names_with(found, text):
    return [name for name in found if text in name]


def test_kernels_of_both_networks_in_three_passes():
    found = figures("kernels")
    for kind in ("forward", "backward data", "backward weights"):
        assert len([n for n in found if n.startswith("CosmoFlow") and n.endswith(f": {kind}")]) == 7
        assert len([n for n in found if n.startswith("U-Net") and n.endswith(f": {kind}")]) == 8
    for word in ("max pooling", "average pooling", "batch norm", "leaky ReLU", "AdamW", "SGD"):
        assert names_with(found, word)


def test_operations_in_both_passes():
    found = figures("ops")
    assert sorted(found) == sorted(
        f"{op}: {words}, above NumPy"
        for op in ("add", "linear", "relu")
        for words in ("forward", "forward and backward")
    )


def test_attention_beside_torch_and_products_in_every_dtype():
    found = figures("attention")
    assert len(names_with(found, "forward")) == 8
    compared = names_with(found, "hpcpar / torch")
    assert len(compared) == 4 and all((found[name] is not None) == torch_is_here for name in compared)
    for dtype in kernels.COMPUTE_DTYPES:
        rates = names_with(found, f": {dtype}")
        assert len(rates) == 3 and all((found[r] is None) == bool(kernels.compute_missing(dtype)) for r in rates)


@pytest.mark.watchdog(600)  # starts many processes
def test_steps_beside_torch_compute_the_same_gradients():
    found = figures("steps")
    for label in ("CosmoFlow", "U-Net"):
        assert found[f"{label}: hpcpar"] > 0
        compared = names_with(found, f"{label}: hpcpar / torch")
        assert len(compared) == 3
        assert all((found[name] is not None) == torch_is_here for name in compared)
        if torch_is_here:
            assert all(0 < found[name] < 1e-4 for name in names_with(found, f"{label}: gradients"))
            assert len(names_with(found, f"{label}: gradients")) == 4  # ours and three of torch, from float64
        both = torch_is_here and not kernels.bfloat16_missing()
        assert (found[f"{label}, bfloat16: hpcpar / torch autocast at its best"] is not None) == both
        if both:
            assert found[f"{label}, bfloat16: hpcpar / hpcpar in float32"] > 0
            assert 0 < found[f"{label}, bfloat16: gradients from those of float32"] < 0.5


def test_the_distance_of_gradients_weighs_every_array_by_its_norm():
    exact = {"a": np.array([3.0, 0.0], np.float32), "b": np.array([4.0], np.float32)}
    assert distance(exact, exact) == 0
    moved = {"a": np.array([3.0, 0.3], np.float32), "b": np.array([4.4], np.float32)}
    assert distance(moved, exact) == pytest.approx(0.1)


@pytest.mark.watchdog(600)  # starts many processes
def test_two_ranks():
    found = figures("ranks")
    for label in ("CosmoFlow", "U-Net"):
        assert found[f"{label}: depth split over 2 ranks / 1 rank"] > 0
        assert found[f"{label}: 2 independent runs of 1 rank at once / 2 / 1 rank"] > 0
        assert 0 < found[f"{label}, depth split: gradients, 1 rank - float64"] < 1e-4
        assert 0 < found[f"{label}, depth split: gradients, split - float64"] < 1e-4
        assert (found[f"{label}: batch split over 2 ranks / torch DDP at its best"] is not None) == torch_is_here
        if torch_is_here:
            assert 0 < found[f"{label}, batch split: gradients, hpcpar - float64"] < 1e-4
            assert 0 < found[f"{label}, batch split: gradients, DDP - float64"] < 1e-4
    assert names_with(found, "gradient all-reduce") and names_with(found, "halo exchange")
    assert len(names_with(found, "summed: ")) == 5


@pytest.mark.watchdog(600)  # starts many processes
def test_memory_is_measured_beside_the_formula():
    found = figures("memory")
    assert found["CosmoFlow: formula"] > 0
    assert found["import hpcpar"] > 0


@pytest.mark.watchdog(600)  # starts many processes
def test_shares_of_a_step_add_up():
    found = figures("share")
    for label in ("CosmoFlow", "U-Net"):
        shares = [value for name, value in found.items() if name.startswith(label)]
        assert len(shares) == 3
        assert sum(shares) == pytest.approx(1)  # of one step, as one repeat was asked for
        assert found[f"{label}: time in kernels"] > 0


def test_the_command_writes_a_file_and_tables(tmp_path, capsys):
    path = tmp_path / "run.json"
    assert main(["bench", "ops", "--quick", "--repeats", "1", "--json", str(path)]) == 0
    facts = json.loads(path.read_text())
    assert facts["quick"] and facts["packages"]["numpy"] == np.__version__
    assert {m["group"] for m in facts["measures"]} == {"machine", "ops"}
    shown = capsys.readouterr().out
    assert "relu: forward and backward" in shown and "at most" in shown


def test_an_unknown_group_is_named():
    with pytest.raises(ValueError, match="'speed'; the groups are kernels, attention, ops"):
        suite.run(["speed"], QUICK)


@pytest.mark.watchdog(600)  # starts many processes
def test_other_gradients_end_the_run():
    case = networks(quick=True)[0]
    with training._arena(case) as arena:
        arena.add("hpcpar", training.ours(case))
        arena.add("with more samples", training.ours(Case("cosmoflow", 8, 2, batch=2)))
        with pytest.raises(BenchError, match="gradients of with more samples and float64 differ by"):
            arena.compare("steps", "CosmoFlow", case, "hpcpar", QUICK)


def test_gradients_farther_from_float64_than_those_beside_them_end_the_run():
    far = {"hpcpar": {"w": 7e-4, "b": 1e-7}, "best": {"w": 3e-4, "b": 1e-8}, "plain": {"w": 4e-4, "b": 1e-8}}
    judge("CosmoFlow", far, "hpcpar")  # not farther than twice the farthest of the others
    far["plain"]["w"] = 2e-4
    with pytest.raises(BenchError, match="gradient of w of hpcpar is 7.0e-04 from that of float64, more than 6.1e-04"):
        judge("CosmoFlow", far, "hpcpar")
    judge("CosmoFlow", far, "best")
    far["best"]["b"] = 0.1
    with pytest.raises(BenchError, match="gradients of best and float64 differ by 1.0e-01 in b"):
        judge("CosmoFlow", far, "hpcpar")


def test_a_contestant_that_fails_shows_what_it_said():
    worker = Worker(["-c", "raise SystemExit('nothing to be done')"])
    with worker, pytest.raises(BenchError, match="nothing to be done"):
        worker.ask("step")


def test_differences_are_relative_to_each_array():
    a = {"small": np.array([1e-6, 0.0]), "large": np.array([100.0])}
    b = {"small": np.array([1e-6, 1e-7]), "large": np.array([100.1])}
    assert differences(a, b) == pytest.approx({"small": 0.0995, "large": 0.000999}, rel=1e-3)
    assert differences(a, a) == {"small": 0, "large": 0}
    assert differences({"x": np.array([np.nan])}, {"x": np.array([1.0])}) == {"x": float("inf")}
    with pytest.raises(BenchError, match="other names"):
        differences(a, {"small": a["small"]})


def test_a_case_is_the_same_behind_a_command_line():
    case = networks(quick=False)[1].with_batch(3)
    assert parse(case.text()) == case
    x, y = data(Case("unet3d", 4, 2, batch=3))
    assert x.shape == (3, CHANNELS["unet3d"], 4, 4, 4) and y.shape == (3, 4, 4, 4)
    assert np.array_equal(x, data(Case("unet3d", 4, 2, batch=3))[0])
