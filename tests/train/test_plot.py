"""Curves and slices as PNG, from the files of a run directory."""

import json

import h5py
import numpy as np
import pytest

from hpcpar.train import plot

pytestmark = pytest.mark.serial
pytest.importorskip("matplotlib")

PNG = b"\x89PNG\r\n\x1a\n"


def size_of(path):
    data = path.read_bytes()
    assert data.startswith(PNG)
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


@pytest.fixture
def run_dir(tmp_path):
    records = [{"step": s, "loss": 1.0 / (s + 1), "lr": 0.1, "time": "12:00"} for s in range(30)]
    records[9] |= {"val_loss": 0.5, "val_dice": 0.2}
    records[29] |= {"val_loss": 0.1, "val_dice": 0.9}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return tmp_path


def write_prediction(folder, **changes):
    label = np.zeros((6, 5, 7), np.uint8)
    label[1:4, 2:4, 4:6] = 3
    volumes = {"input": np.random.default_rng(0).random((1, 6, 5, 7)), "label": label, "prediction": label, **changes}
    with h5py.File(folder / "prediction.h5", "w") as file:
        for name, volume in volumes.items():
            if volume is not None:
                file[name] = volume


def test_curves_without_volumes(run_dir, tmp_path):
    (drawn,) = plot.plot_run(run_dir)
    assert drawn == run_dir / "curves.png"
    width, height = size_of(drawn)
    assert width > 1.5 * height  # two panels side by side: losses, Dice


def test_slices_where_there_is_a_prediction(run_dir, tmp_path):
    write_prediction(run_dir)
    drawn = plot.plot_run(run_dir, tmp_path / "pictures")
    assert [p.name for p in drawn] == ["curves.png", "slices.png"] and drawn[0].parent == tmp_path / "pictures"
    width, height = size_of(drawn[1])
    assert width > 500 and height > 500


def test_pictures_differ_where_predictions_do(run_dir):
    write_prediction(run_dir)
    same = plot.plot_run(run_dir)[1].read_bytes()
    write_prediction(run_dir, prediction=np.zeros((6, 5, 7), np.uint8))
    assert plot.plot_run(run_dir)[1].read_bytes() != same


def test_panels_hold_losses_together_and_other_validation_figures_apart(run_dir):
    records = plot.read_metrics(run_dir / "metrics.jsonl")
    assert plot.figures(records) == [["loss", "val_loss"], ["val_dice"]]
    more = [*records, {"step": 30, "val_dice_0": 1.0, "val_dice_1": 0.8, "val_mae": 0.1}]
    assert plot.figures(more)[1:] == [["val_dice", "val_dice_0", "val_dice_1"], ["val_mae"]]
    steps, values = plot.series(records, "val_dice")
    assert steps.tolist() == [9, 29] and values.tolist() == [0.2, 0.9]


def test_a_record_that_is_being_written_is_left_out(run_dir):
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write('{"step": 30, "lo')
    assert plot.read_metrics(run_dir / "metrics.jsonl")[-1]["step"] == 29


@pytest.mark.parametrize("line", ["no json", '{"loss": 1}', "3", '{"step": "one"}'])
def test_a_damaged_record_is_named(run_dir, line):
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match="metrics.jsonl, line 31: expected one JSON object"):
        plot.plot_run(run_dir)


def test_a_run_without_records_says_so(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="no records yet"):
        plot.plot_run(tmp_path)
    with pytest.raises(FileNotFoundError, match="metrics.jsonl"):
        plot.plot_run(tmp_path / "elsewhere")


def test_volumes_that_do_not_fit_are_named(run_dir):
    write_prediction(run_dir, prediction=np.zeros((6, 5, 6), np.uint8))
    with pytest.raises(ValueError, match=r"shapes \(6, 5, 7\), \(6, 5, 7\), \(6, 5, 6\)"):
        plot.plot_run(run_dir)
    write_prediction(run_dir, label=None)
    with pytest.raises(ValueError, match="has no dataset label; it holds input, prediction"):
        plot.plot_run(run_dir)


def test_losses_that_are_not_finite_or_negative_are_drawn_too(run_dir):
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write('{"step": 30, "loss": NaN}\n{"step": 31, "loss": -1.0}\n')
    assert plot.plot_run(run_dir)[0].exists()


def test_slices_go_through_the_middle_of_what_is_labelled():
    label = np.zeros((9, 8, 7), int)
    label[2:5, 6, 1] = 1
    assert plot.centre(label) == (3, 6, 1)
    assert plot.centre(np.zeros((4, 5, 6))) == (2, 2, 3)
