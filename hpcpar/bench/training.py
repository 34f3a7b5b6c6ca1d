"""Whole training steps: ours on one rank, split in depth and in samples, beside torch. Gradients are compared first.

A ratio is only given where the contestants compute the same gradients from the same weights, as exactly: all are
compared with those of float64.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from hpcpar import kernels
from hpcpar.bench.cases import Case, networks
from hpcpar.bench.measure import Measure, in_turns, missing, ratio, spread
from hpcpar.bench.options import Options
from hpcpar.bench.process import BenchError, Worker

SAME = 2e-2
"""What rounding to float32 may change of the gradient of a parameter, relative to its norm, in the deepest network."""

FARTHER = 2.0
"""How much farther ours may be than torch's: in float32 from the gradients of float64, in bfloat16 from float32's."""

HALF_ALONE = 0.1
"""What rounding to bfloat16 may change of all gradients together, where there is nothing to compare ours with."""

FLOOR = 1e-5
"""By how much more, relative to the norm of each gradient: where both are nearly exact, chance decides."""

_EXACT: dict[Case, dict[str, np.ndarray]] = {}

RAISED_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
TORCH = {
    "best": "torch at its best (channels_last_3d, fused AdamW, malloc thresholds raised)",
    "channels_last": "torch as users get it, channels_last_3d",
    "plain": "torch as users get it, NCDHW",
}
LABELS = {"cosmoflow": "CosmoFlow", "unet3d": "U-Net"}
NO_TORCH = "torch is not installed"


def steps(options: Options) -> list[Measure]:
    """One rank, one thread, beside torch in three styles."""
    found: list[Measure] = []
    for case in networks(options.quick):
        label = LABELS[case.network]
        with _arena(case) as arena:
            arena.add("hpcpar", ours(case))
            for style in TORCH if has_torch() else ():
                arena.add(style, theirs(case, arena.weights, style))
            found += arena.compare("steps", label, case, "hpcpar", options) if has_torch() else []
            seconds = arena.race(options)
        found.append(_step_time("steps", f"{label}: hpcpar", seconds["hpcpar"]))
        for style, words in TORCH.items():
            name = f"{label}: hpcpar / {words}"
            if style not in seconds:
                found.append(missing("steps", name, "ratio", NO_TORCH))
                continue
            found.append(_step_time("steps", f"{label}: {words}", seconds[style]))
            found.append(ratio("steps", name, seconds["hpcpar"], seconds[style]))
        found += _half(case.in_bfloat16(), f"{label}, bfloat16", options)
    return found


def _half(case: Case, label: str, options: Options) -> list[Measure]:
    """The same step with products of bfloat16, beside torch's autocast and float32.

    Rounding flips gates of ReLU and pooling, so gradients in bfloat16 are far from each other; both are compared with
    float32, whose gradients are compared with torch's elsewhere.
    """
    name = f"{label}: hpcpar / torch autocast at its best"
    reason = kernels.bfloat16_missing() or ("" if has_torch() else NO_TORCH)
    if reason:
        return [missing("steps", name, "ratio", reason)]
    with _arena(case) as arena:
        arena.add("float32", ours(replace(case, half=False)))
        arena.add("hpcpar", ours(case))
        arena.add("autocast", theirs(case, arena.weights, "best"))
        arena.add("native", ours(case, env={"HPCPAR_BFLOAT16": "native"}))
        exact, mine, other, _ = arena.gradients().values()
        far, theirs_far = distance(mine, exact), distance(other, exact)
        # torch's autocast has given NaN on a busy machine: that must not pass for a limit, nor end the run
        allowed = FARTHER * theirs_far if theirs_far == theirs_far else HALF_ALONE
        if not far <= allowed:
            raise BenchError(f"{label}: gradients are {far:.1e} from those of float32, more than {allowed:.1e}")
        seconds = arena.race(options)
    words = f"torch's autocast is {theirs_far:.1e} from them"
    return [
        Measure("steps", f"{label}: gradients from those of float32", far, "relative", note=words),
        _step_time("steps", f"{label}: hpcpar", seconds["hpcpar"]),
        _step_time("steps", f"{label}: torch autocast at its best", seconds["autocast"]),
        ratio("steps", f"{label}: hpcpar / hpcpar in float32", seconds["hpcpar"], seconds["float32"]),
        ratio("steps", f"{label}: hpcpar / with instructions for bfloat16", seconds["hpcpar"], seconds["native"]),
        ratio("steps", name, seconds["hpcpar"], seconds["autocast"]),
    ]


def split_depth(options: Options) -> list[Measure]:
    """A sample split in depth over all ranks, beside one rank; and what the machine allows.

    Cores share memory and, often, their clock. So many independent steps of one rank at once show what is left of each:
    their time, parted by their number, is what a split without messages and rims could reach.
    """
    found: list[Measure] = []
    for case in networks(options.quick):
        label = LABELS[case.network]
        with _arena(case) as arena:
            arena.add("1 rank", ours(case))
            arena.add("split", ours(case, "depth", options.ranks))
            found += arena.compare("ranks", f"{label}, depth split", case, "split", options)
            arena.add("at once", ours(case, copies=options.ranks))
            seconds = arena.race(options)
        found.append(_step_time("ranks", f"{label}: 1 rank", seconds["1 rank"]))
        limit = [took / options.ranks for took in seconds["at once"]]
        words = f"{label}: {options.ranks} independent runs of 1 rank at once / {options.ranks} / 1 rank"
        found.append(ratio("ranks", words, limit, seconds["1 rank"], "what this machine allows a split"))
        found.append(_step_time("ranks", f"{label}: depth split over {options.ranks} ranks", seconds["split"]))
        name = f"{label}: depth split over {options.ranks} ranks / 1 rank"
        found.append(ratio("ranks", name, seconds["split"], seconds["1 rank"]))
    return found


def split_batch(options: Options) -> list[Measure]:
    """As many samples as ranks, split over them, beside torch's data-parallel training of the same samples."""
    found: list[Measure] = []
    for case in networks(options.quick):
        case, label = case.with_batch(options.ranks), LABELS[case.network]
        name = f"{label}: batch split over {options.ranks} ranks / torch DDP at its best"
        if not has_torch():
            found.append(missing("ranks", name, "ratio", NO_TORCH))
            continue
        with _arena(case) as arena:
            arena.add("hpcpar", ours(case, "batch", options.ranks))
            arena.add("DDP", theirs(case, arena.weights, "best", options.ranks, arena.folder))
            found += arena.compare("ranks", f"{label}, batch split", case, "hpcpar", options)
            seconds = arena.race(options)
        words = f"batch split over {options.ranks} ranks, {options.ranks} samples"
        found.append(_step_time("ranks", f"{label}: {words}", seconds["hpcpar"]))
        found.append(_step_time("ranks", f"{label}: torch DDP (gloo) at its best, same samples", seconds["DDP"]))
        found.append(ratio("ranks", name, seconds["hpcpar"], seconds["DDP"]))
    return found


def ours(
    case: Case, axis: str = "batch", ranks: int = 1, copies: int = 1, env: Mapping[str, str] | None = None
) -> Worker:
    """Return the contestant of this package: one job, or several at once that know nothing of each other."""
    return Worker(["-m", "mpi4py", "-m", "hpcpar.bench.ours", case.text(), axis], ranks, copies, env)


def theirs(case: Case, weights: Path, style: str, ranks: int = 1, folder: Path | None = None) -> Worker:
    """Return torch as a contestant; above one rank a job of so many processes that meet in `folder`."""
    words = ["-m", "hpcpar.bench.theirs", case.text(), str(weights), style]
    if ranks > 1:
        words += ["{copy}", str(ranks), str(folder / "store")]
    return Worker(words, copies=ranks, env=RAISED_MALLOC if style == "best" else None)


def has_torch() -> bool:
    """Whether torch is installed; it is not imported here."""
    return importlib.util.find_spec("torch") is not None


class Arena:
    """Contestants of one case. The first one gives the weights."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self.weights = folder, folder / "weights.npz"
        self._stack, self._workers = stack, {}

    def add(self, name: str, worker: Worker) -> None:
        """Take a contestant in."""
        self._workers[name] = self._stack.enter_context(worker)
        if len(self._workers) == 1:
            worker.ask("weights", path=str(self.weights))

    def compare(self, group: str, label: str, case: Case, judged: str, options: Options) -> list[Measure]:
        """Return how far the gradients of every contestant are from those of float64.

        Parameters
        ----------
        judged : str
            The contestant whose gradients must not be much farther than those of the others.

        Raises
        ------
        BenchError
            When they are, or when any are farther than rounding explains: then times must not be compared.
        """
        exact = self._exact(case, options)
        far = {name: differences(found, exact) for name, found in self.gradients().items()}
        judge(label, far, judged)
        measures = []
        for name, each in far.items():
            where = max(each, key=each.__getitem__)
            words = f"{label}: gradients, {name} - float64"
            measures.append(Measure(group, words, each[where], "relative", note=f"largest in {where}"))
        return measures

    def _exact(self, case: Case, options: Options) -> dict[str, np.ndarray]:
        """The gradients in float64, from the weights of the first contestant, which are the same in every run."""
        if case not in _EXACT:
            path = self.folder / "exact.npz"
            with ours(case.in_float64(), "batch" if case.local_norm else "depth", options.ranks) as worker:
                worker.ask("load", path=str(self.weights))
                worker.ask("gradients", path=str(path))
            _EXACT[case] = dict(np.load(path))
        return _EXACT[case]

    def gradients(self) -> dict[str, dict[str, np.ndarray]]:
        """Return the gradients of every contestant."""
        found = {}
        for number, (name, worker) in enumerate(self._workers.items()):
            path = self.folder / f"gradients-{number}.npz"
            worker.ask("gradients", path=str(path))
            found[name] = dict(np.load(path))
        return found

    def race(self, options: Options) -> dict[str, list[float]]:
        """Return the seconds of steps that were taken in turns."""
        turns = {name: lambda worker=worker: worker.ask("step") for name, worker in self._workers.items()}
        return in_turns(turns, options.rounds(5), warm_up=2)


@contextmanager
def _arena(case: Case) -> Iterator[Arena]:
    with tempfile.TemporaryDirectory(prefix="hpcpar-bench-") as folder, ExitStack() as stack:
        yield Arena(Path(folder), stack)


def judge(label: str, far: Mapping[str, Mapping[str, float]], judged: str) -> None:
    """Raise BenchError where gradients are wrong, or those of one contestant much farther from float64 than others'.

    Parameters
    ----------
    far : mapping of str to mapping of str to float
        By contestant and parameter: the distance from the gradient in float64, relative to its norm.
    """
    for name, each in far.items():
        where = max(each, key=each.__getitem__)
        if not each[where] < SAME:
            raise BenchError(f"{label}: gradients of {name} and float64 differ by {each[where]:.1e} in {where}")
    others = [each for name, each in far.items() if name != judged]
    for where, mine in far[judged].items():
        allowed = FARTHER * max((each[where] for each in others), default=SAME) + FLOOR
        if not mine <= allowed:
            raise BenchError(
                f"{label}: the gradient of {where} of {judged} is {mine:.1e} from that of float64, "
                f"more than {allowed:.1e}"
            )


def differences(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Return ``|a - b| / |b|`` of each array, in the Euclidean norm; NaN is infinite."""
    if a.keys() != b.keys():
        raise BenchError(f"gradients have other names: {sorted(a.keys() ^ b.keys())}")
    found = {}
    for name in a:
        assert a[name].shape == b[name].shape, f"{name}: {a[name].shape} and {b[name].shape}"
        scale = float(np.linalg.norm(b[name].astype(np.float64))) or 1.0
        distance = float(np.linalg.norm(a[name].astype(np.float64) - b[name])) / scale
        found[name] = distance if distance == distance else float("inf")
    return found


def distance(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> float:
    """Return ``|a - b| / |b|`` of all arrays together, in the Euclidean norm."""
    pairs = [(a[name].astype(np.float64), b[name].astype(np.float64)) for name in b]
    return float(np.sqrt(sum(np.sum((p - q) ** 2) for p, q in pairs) / sum(np.sum(q**2) for _, q in pairs)))


def _step_time(group: str, name: str, seconds: list[float]) -> Measure:
    return spread(group, name, seconds, "ms", 1e3)
