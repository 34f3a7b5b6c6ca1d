"""Pictures of a run: curves from ``metrics.jsonl``, and slices from ``prediction.h5`` where the data are volumes."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

LOSSES = ("loss", "val_loss")
DIMS = ("depth", "height", "width")
_MAX_LABELS = 32  # an integer volume with more values than this is drawn as an image, not as classes


def plot_run(run_dir: str | Path, out: str | Path | None = None) -> list[Path]:
    """Draw everything a run directory has data for.

    Parameters
    ----------
    run_dir : path
        Holds ``metrics.jsonl`` (one object a line with ``step`` and figures), and for volumes ``prediction.h5`` with
        the datasets ``input``, ``label`` and ``prediction``, each (D, H, W) or (C, D, H, W).
    out : path, optional
        Where the pictures go; the run directory by default.

    Returns
    -------
    list of Path
        ``curves.png``, and ``slices.png`` for volumes.

    Raises
    ------
    ModuleNotFoundError
        matplotlib is missing.
    FileNotFoundError
        The run directory or its metrics are missing.
    ValueError
        The metrics are not what they should be: which line.
    """
    run_dir = Path(run_dir)
    records = read_metrics(run_dir / "metrics.jsonl")
    _load_matplotlib()
    out = run_dir if out is None else Path(out)
    out.mkdir(parents=True, exist_ok=True)
    drawn = [plot_curves(records, out / "curves.png", title=run_dir.name)]
    if (run_dir / "prediction.h5").exists():
        drawn.append(plot_slices(*read_volumes(run_dir / "prediction.h5"), out / "slices.png"))
    return drawn


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Return the records of a metrics file, in order; each has ``step``.

    A last line without its end, as a run leaves it that is still going on or was stopped, is left out.

    Raises
    ------
    ValueError
        There are no records, or a line is none.
    """
    path = Path(path)
    text = path.read_text(encoding="utf-8")
    lines = text.split("\n")
    records = []
    for number, line in enumerate(lines[:-1], 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            record["step"] + 0
        except (json.JSONDecodeError, TypeError, KeyError):
            raise ValueError(f"{path}, line {number}: expected one JSON object with a number 'step'") from None
        records.append(record)
    if not records:
        raise ValueError(f"{path} has no records yet")
    return records


def series(records: Sequence[dict[str, Any]], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return steps and values of one figure, of the records that have it."""
    pairs = [(r["step"], r[name]) for r in records if isinstance(r.get(name), (int, float))]
    steps, values = zip(*pairs, strict=True) if pairs else ((), ())
    return np.array(steps), np.array(values, dtype=float)


def figures(records: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return the names drawn in each panel: the losses, then each validation figure with its parts (``_0``, ...)."""
    names = list(dict.fromkeys(k for r in records for k, v in r.items() if isinstance(v, (int, float))))
    panels: dict[str, list[str]] = {"loss": [n for n in LOSSES if n in names]}
    for name in names:
        if name.startswith("val_") and name not in LOSSES:
            panels.setdefault(re.sub(r"_\d+$", "", name), []).append(name)
    return list(panels.values())


def plot_curves(records: Sequence[dict[str, Any]], path: Path, title: str = "") -> Path:
    """Draw losses and validation figures against the step, one panel each."""
    pyplot = _load_matplotlib()
    panels = figures(records)
    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(5 * columns, 3.6 * rows), squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, names in zip(axes.flat, panels, strict=False):
        for name in names:
            steps, values = series(records, name)
            axis.plot(steps, values, marker="." if len(steps) < 40 else "", label=name)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        axis.legend(loc="best")
        if names and names[0] == "loss" and _positive(records, names):
            axis.set_yscale("log")
    if title:
        figure.suptitle(title)
    return _save(figure, path)


def read_volumes(path: str | Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return input, label and prediction of a prediction file, each (D, H, W); of channels the first.

    Raises
    ------
    ValueError
        One of them is missing, or their shapes differ.
    """
    import h5py

    with h5py.File(path, "r") as file:
        missing = [name for name in ("input", "label", "prediction") if name not in file]
        if missing:
            raise ValueError(f"{path} has no dataset {', '.join(missing)}; it holds {', '.join(file) or 'nothing'}")
        volumes = [_first_channel(file[name], path) for name in ("input", "label", "prediction")]
    if len({v.shape for v in volumes}) > 1:
        raise ValueError(f"{path}: input, label and prediction have shapes {', '.join(str(v.shape) for v in volumes)}")
    return volumes[0], volumes[1], volumes[2]


def plot_slices(image: np.ndarray, label: np.ndarray, prediction: np.ndarray, path: Path) -> Path:
    """Draw three orthogonal slices through the middle of what is labelled, a row each: input, label and prediction.

    Parameters
    ----------
    image, label, prediction : array (D, H, W)
        Integer labels are drawn as classes, in one set of colours.
    path : Path
        The PNG file.
    """
    pyplot = _load_matplotlib()
    where = centre(label)
    classes = _class_count(label, prediction)
    # rows as high as their planes are, for planes drawn equally wide
    planes = [[np.take(v, where[dim], axis=dim) for v in (image, label, prediction)] for dim in range(3)]
    heights = [row[0].shape[0] / row[0].shape[1] for row in planes]
    figure, axes = pyplot.subplots(
        3, 3, figsize=(9, 3 * sum(heights) + 1), squeeze=False, gridspec_kw={"height_ratios": heights}
    )
    for dim, row in enumerate(planes):
        _draw_plane(axes[dim, 0], row[0], "gray", (float(image.min()), float(image.max())))
        for axis, plane in zip(axes[dim, 1:], row[1:], strict=True):
            if classes:
                _draw_plane(axis, plane, _class_colours(classes), (-0.5, classes - 0.5))
            else:
                _draw_plane(axis, plane, "gray", (float(label.min()), float(label.max())))
        axes[dim, 0].set_ylabel(f"{DIMS[dim]} {where[dim]} of {image.shape[dim]}")
    for axis, name in zip(axes[0], ("input", "label", "prediction"), strict=True):
        axis.set_title(name)
    return _save(figure, path)


def _draw_plane(axis: Any, plane: np.ndarray, colours: Any, limits: tuple[float, float]) -> None:
    axis.imshow(plane, origin="lower", interpolation="nearest", cmap=colours, vmin=limits[0], vmax=limits[1])
    axis.set_xticks([])
    axis.set_yticks([])


def _class_colours(classes: int) -> Any:
    """Black for the background, then distinct colours."""
    from matplotlib import colormaps, colors

    wheel = colormaps["tab20"].colors
    return colors.ListedColormap(["black", *(wheel[(2 * k) % 20 + k // 10 % 2] for k in range(classes - 1))])


def centre(label: np.ndarray) -> tuple[int, int, int]:
    """Return the index nearest to the centre of mass of what is not background; the middle where all is background."""
    found = np.nonzero(label)
    if not len(found[0]):
        return tuple(n // 2 for n in label.shape)
    return tuple(int(round(float(index.mean()))) for index in found)


def _class_count(label: np.ndarray, prediction: np.ndarray) -> int:
    """Number of classes of two label volumes; 0 where they are not labels."""
    if label.dtype.kind not in "iub" or prediction.dtype.kind not in "iub":
        return 0
    top = max(int(label.max(initial=0)), int(prediction.max(initial=0))) + 1
    return max(top, 2) if top <= _MAX_LABELS else 0


def _first_channel(dataset: Any, path: str | Path) -> np.ndarray:
    if dataset.ndim not in (3, 4) or 0 in dataset.shape:
        raise ValueError(
            f"{path}: dataset {dataset.name} has shape {dataset.shape}, expected (D, H, W) or (C, D, H, W)"
        )
    return dataset[()] if dataset.ndim == 3 else dataset[0]


def _positive(records: Sequence[dict[str, Any]], names: Sequence[str]) -> bool:
    values = np.concatenate([series(records, n)[1] for n in names])
    values = values[np.isfinite(values)]
    return bool(values.size and values.min() > 0)


def _save(figure: Any, path: Path) -> Path:
    pyplot = _load_matplotlib()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def _load_matplotlib() -> Any:
    """Return pyplot, drawing to files whatever display there is."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise ModuleNotFoundError("pictures need matplotlib: pip install 'hpcpar[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
