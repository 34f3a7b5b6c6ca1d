"""hpcpar checkpoint: what it prints, its exit status, and training from imported weights."""

import numpy as np
import pytest

from hpcpar.cli.main import main
from hpcpar.testing.small_job import read_weights, write_small_job

pytestmark = pytest.mark.serial


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with checkpoints of steps 2 and 3."""
    folder = tmp_path_factory.mktemp("job")
    job = write_small_job(folder)
    assert main(["train", str(job), "--set", "run.steps=3", "--set", "checkpoint.every=2"]) == 0
    return folder / "run"


def test_show(run, capsys):
    assert main(["checkpoint", "show", str(run)]) == 0
    shown = capsys.readouterr().out
    assert "step       3" in shown and "samples    10 (epoch 2, 0 of 5)" in shown and "AdamW, 3 steps" in shown
    assert "model/down0.conv1.weight" in shown and "2 x 1 x 3 x 3 x 3" in shown and "optimizer/exp_avg" in shown
    assert main(["checkpoint", "show", str(run / "checkpoints" / "step-00000002"), "--configuration"]) == 0
    assert 'name = "unet3d"' in capsys.readouterr().out


def test_verify_tells_whole_from_damaged(run, tmp_path, capsys):
    assert main(["checkpoint", "verify", str(run)]) == 0
    assert capsys.readouterr().out.count(": whole, ") == 2
    shard = run / "checkpoints" / "step-00000002" / "shard-00000.h5"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-100])
    try:
        assert main(["checkpoint", "verify", str(run)]) == 1
    finally:
        shard.write_bytes(whole)
    shown = capsys.readouterr().out
    assert shown.count(": whole, ") == 1 and "step-00000002: DAMAGED: " in shown


def test_a_place_without_checkpoints(tmp_path, capsys):
    for action in ("show", "verify"):
        assert main(["checkpoint", action, str(tmp_path)]) == 2
        assert f"{tmp_path}: there is no checkpoint in it" in capsys.readouterr().err


def test_training_begins_from_imported_weights(run, tmp_path, capsys):
    pytest.importorskip("safetensors.numpy", reason="the package safetensors is not installed")
    file, folder = tmp_path / "m.safetensors", tmp_path / "imported"
    assert main(["checkpoint", "export", str(run), str(file)]) == 0
    assert main(["checkpoint", "import", str(file), str(folder)]) == 0
    words = ["--set", f"run.dir={tmp_path / 'run'}", "--set", "run.steps=1", "--set", "optim.lr=0.0"]
    assert main(["train", str(run.parent / "job.toml"), *words, "--resume", str(folder)]) == 0
    assert "it holds weights alone" in capsys.readouterr().out
    before = read_weights(run)
    for name, value in read_weights(tmp_path / "run").items():
        if "running" not in name and "tracked" not in name:
            np.testing.assert_allclose(value, before[name], rtol=1e-15, err_msg=name)


def test_sizes(capsys, run, tmp_path):
    assert main(["checkpoint", "export", str(run), str(tmp_path), "--shard-size", "5 parsecs"]) == 2
    assert "'5 parsecs' is no size; write 500MB or 5GB" in capsys.readouterr().err
