"""hpcpar generate: from a run directory and from a folder of the Hugging Face libraries, on one rank and on several."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mpi4py import MPI

import hpcpar as hp
from hpcpar.cli.main import main
from hpcpar.data.text import make_text
from hpcpar.models import llama, save_pretrained
from hpcpar.testing import mpi_run
from hpcpar.train.config import dump_job, make_job

SETTINGS = ["--tokens", "12", "--prompt", "the cat", "--prompt", "a", "--seed", "3"]


@pytest.fixture
def trained(shared_path: Path, comm: MPI.Comm) -> Path:
    """The run directory of a small decoder, trained on all ranks."""
    source, path = shared_path / "source", shared_path / "job.toml"
    if comm.rank == 0:
        source.mkdir()
        for i in range(4):
            (source / f"{i}.txt").write_text("the cat is a cat. " * 8)
        make_text(shared_path / "text", source, validation=0, test=0)
        table = {
            "run": {"steps": 3, "dtype": "float64", "dir": str(shared_path / "run")},
            "model": {"name": "gpt", "width": 16, "layers": 1, "heads": 4, "max_positions": 40},
            "data": {"format": "tokens", "train": str(shared_path / "text" / "train"), "sequence": 16, "batch": 4},
            "optim": {"name": "adamw", "lr": 0.01},
            "loss": {"name": "cross_entropy"},
            "checkpoint": {"every": 3},
        }
        path.write_text(dump_job(make_job(table)))
    comm.barrier()
    assert main(["train", str(path)]) == 0
    return shared_path / "run"


def written(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    capsys.readouterr()
    assert main(["generate", *map(str, words)]) == 0
    return capsys.readouterr().out


def test_a_trained_run_writes_and_only_rank_0_speaks(
    trained: Path, comm: MPI.Comm, capsys: pytest.CaptureFixture[str]
) -> None:
    text = written(capsys, trained, *SETTINGS)
    if comm.rank:
        assert text == ""
        return
    first, second = text.removesuffix("\n").split("\n\n")[:2]
    assert first.startswith("the cat") and second.startswith("a")
    assert len(text) > len("the cat" + "a") + 3


@pytest.mark.spawns_mpi
def test_ranks_and_seeds(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone = written(capsys, trained, *SETTINGS)
    assert written(capsys, trained, *SETTINGS) == alone
    assert written(capsys, trained, *SETTINGS[:-1], "4") != alone
    greedy = written(capsys, trained, "--tokens", 9, "--temperature", 0, "--prompt", "the ")
    assert greedy == written(capsys, trained, "--tokens", 9, "--top-k", 1, "--prompt", "the ")
    together = mpi_run(2, ["-m", "hpcpar", "generate", str(trained), *SETTINGS]).check()
    assert together.stdout == alone


@pytest.mark.serial
def test_a_folder_of_the_libraries_writes_in_its_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="a tokenizer.json is read by tokenizers (extra: text)")
    words = ["<unk>", "</s>", "the", "cat", "is", "a"]
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    hp.manual_seed(1)
    with hp.Mesh(batch=1):
        save_pretrained(llama(6, 8, 1, 2, kv_heads=1, hidden=8, init_std=0.5), tmp_path)
    assert main(["generate", str(tmp_path), "--prompt", "the"]) == 2
    assert "has no tokenizer.json, which says what the tokens mean" in capsys.readouterr().err
    (tmp_path / "tokenizer.json").write_text("{}")
    assert main(["generate", str(tmp_path), "--prompt", "the"]) == 2
    assert f"{tmp_path / 'tokenizer.json'} is no tokenizer.json" in capsys.readouterr().err
    made.save(str(tmp_path / "tokenizer.json"))
    about = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**about, "bos_token_id": 1, "eos_token_id": [0, 1]}))
    text = written(capsys, tmp_path, "--prompt", "the cat", "--tokens", 5, "--temperature", 1.5)
    assert text.startswith("the cat") and set(text.split()) <= set(words)
    assert main(["generate", str(tmp_path / "nothing")]) == 2
    assert "is no run directory (with config.toml) and no folder" in capsys.readouterr().err
