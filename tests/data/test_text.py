"""Texts as tokens: which documents there are, how they are parted, and what the files hold."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np
import pytest

from hpcpar.data import DataError, Sharing
from hpcpar.data.text import make_text
from hpcpar.data.text_sources import find_documents, part_documents
from hpcpar.data.text_tokens import ByteTokens, FileTokens, make_tokens

BOOK = b"preface\nA1:1 In the beginning\nA1:2 and so on\nA2:1 the end\nB1:1 again, A1:1 within a line\n"


@pytest.fixture
def folder(shared_path: Path, comm) -> Path:
    """Nine files of 10, 20, ... bytes, an empty one, one of another kind, and one in a folder that is left out."""
    source = shared_path / "source"
    if comm.rank == 0:
        (source / "inner" / "site-packages").mkdir(parents=True)
        for i in range(1, 9):
            (source / f"f{i}.py").write_bytes(bytes([64 + i]) * (10 * i))
        (source / "inner" / "f9.py").write_bytes("grün\n".encode() * 15)
        (source / "inner" / "site-packages" / "other.py").write_bytes(b"other")
        (source / "empty.py").touch()
        (source / "picture.png").write_bytes(b"png")
    comm.barrier()
    return source


def tokenizer_text() -> str:
    """A vocabulary of whole words, made here."""
    tokenizers = pytest.importorskip("tokenizers", reason="a tokenizer.json is read by tokenizers (extra: text)")
    words = ["<unk>", "the", "end", "beginning", "In", "and", "so", "on"]
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return made.to_str()


def contents(path: Path) -> dict:
    with h5py.File(path) as file:
        return {**{name: data[()] for name, data in file.items()}, **file.attrs}


@pytest.mark.serial
def test_documents_are_the_files_of_a_folder_in_name_order(folder):
    found = find_documents(folder, "*.py", ["*site-packages/*"])
    assert [d.name for d in found] == [*(f"f{i}.py" for i in range(1, 9)), "inner/f9.py"]
    assert [d.size for d in found] == [10, 20, 30, 40, 50, 60, 70, 80, 90]
    assert found[1].read() == b"B" * 20
    with pytest.raises(DataError, match=r"holds no document: no file '\*.txt'"):
        find_documents(folder, "*.txt")
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        find_documents(folder / "nothing")


@pytest.mark.serial
def test_documents_begin_where_a_line_begins_as_told(tmp_path):
    path = tmp_path / "book.txt"
    path.write_bytes(BOOK)
    found = find_documents(path, split_at=r"\w+:1 ")
    texts = [d.read() for d in found]
    assert b"".join(texts) == BOOK and [t[:5] for t in texts] == [b"prefa", b"A1:1 ", b"A2:1 ", b"B1:1 "]
    assert found[1].name == "book.txt[8:45]"
    with pytest.raises(DataError, match="no regular expression"):
        find_documents(path, split_at="(")


@pytest.mark.serial
def test_parts_hold_whole_documents_up_to_their_share(folder):
    documents = find_documents(folder, "*.py", ["*site-packages/*"])
    parts = part_documents(documents, {"validation": 0.2, "test": 0.3}, seed=1)
    assert list(parts) == ["train", "validation", "test"]
    assert sorted(d.name for part in parts.values() for d in part) == [d.name for d in documents]
    bytes_of = {part: sum(d.size for d in chosen) for part, chosen in parts.items()}
    assert 0 < bytes_of["validation"] <= 90 and 0 < bytes_of["test"] <= 135
    again = part_documents(documents, {"validation": 0.2, "test": 0.3}, seed=2)
    assert again != parts, "the draw depends on the seed"
    assert list(part_documents(documents, {"validation": 0.0, "test": 0.0})) == ["train"]
    smallest = part_documents(documents, {"validation": 0.001, "test": 0})
    assert [d.size for d in smallest["validation"]] == [10], "a part with a share is never empty"
    with pytest.raises(DataError, match="2 documents cannot be parted into training, validation and test"):
        part_documents(documents[:2], {"validation": 0.1, "test": 0.1})
    with pytest.raises(ValueError, match="leave something for training"):
        part_documents(documents, {"validation": 0.5, "test": 0.5})


@pytest.mark.serial
def test_a_single_document_is_cut_by_position_at_lines(tmp_path):
    path = tmp_path / "one.txt"
    path.write_bytes(b"".join(b"line %02d\n" % i for i in range(100)))
    parts = part_documents(find_documents(path), {"validation": 0.1, "test": 0.2})
    texts = {part: chosen[0].read() for part, chosen in parts.items()}
    assert list(texts) == ["train", "validation", "test"] and b"".join(texts.values()) == path.read_bytes()
    assert [len(t) for t in texts.values()] == [568, 80, 152]
    assert all(t.endswith(b"\n") for t in texts.values())
    path.write_bytes(b"no line")
    with pytest.raises(DataError, match="too short"):
        part_documents(find_documents(path), {"validation": 0.1, "test": 0.2})


@pytest.mark.serial
def test_bytes_are_tokens_and_documents_lie_between_ends(tmp_path):
    path = tmp_path / "book.txt"
    path.write_bytes(BOOK)
    (made,) = make_text(tmp_path / "out", path, split_at=r"\w+:1 ", validation=0, test=0)
    data = contents(made)
    texts = [d.read() for d in find_documents(path, split_at=r"\w+:1 ")]
    assert data["tokens"].dtype == np.uint16 and (data["vocabulary"], data["end"]) == (257, 256)
    assert data["tokens"].tolist() == [t for text in texts for t in (256, *text)] + [256]
    assert data["bytes"].tolist() == [len(t) for t in texts]
    np.testing.assert_array_equal(np.diff(data["offsets"]), data["bytes"] + 1)
    assert data["names"].tobytes().decode().split("\n")[0] == "book.txt[0:8]" and data["tokenizer"].size == 0
    assert ByteTokens().decode(data["tokens"]) == BOOK.decode()


@pytest.mark.serial
def test_a_tokenizer_goes_into_the_files(tmp_path):
    text = tokenizer_text()
    (tmp_path / "tokenizer.json").write_text(text)
    (tmp_path / "book.txt").write_bytes(BOOK)
    (made,) = make_text(
        tmp_path / "out", tmp_path / "book.txt", tokenizer=tmp_path / "tokenizer.json", validation=0, test=0
    )
    data = contents(made)
    assert (data["vocabulary"], data["end"]) == (9, 8), "no end among its words: a new token behind them"
    assert data["tokenizer"].tobytes().decode() == text and data["bytes"].tolist() == [len(BOOK)]
    assert FileTokens(text).decode([1, 2, 8]) == "the end"
    assert make_tokens(tmp_path / "tokenizer.json", "and").end == 5
    with pytest.raises(DataError, match="no token '<eos>'"):
        make_tokens(tmp_path / "tokenizer.json", "<eos>")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=f"{tmp_path / 'tokenizer.json'} is no tokenizer.json"):
        make_tokens(tmp_path / "tokenizer.json")


def test_files_made_together_are_those_that_one_process_makes(folder, shared_path, tmp_path_factory, comm):
    options = {"pattern": "*.py", "validation": 0.2, "test": 0.1, "file_bytes": 100}
    lines = []
    paths = make_text(shared_path / "out", folder, **options, sharing=Sharing(comm.rank, comm.size, lines.append))
    comm.barrier()
    names = [path.relative_to(shared_path / "out") for path in paths]
    assert len(names) > 3 and all(path.exists() for path in paths)
    assert f"{len(paths[comm.rank :: comm.size])} files written, 0 already there" in lines[-1]
    assert lines[-1].endswith(f" (rank {comm.rank} of {comm.size})") == (comm.size > 1)
    alone = tmp_path_factory.mktemp("alone")
    make_text(alone, folder, **options)
    for name in [*names, Path("dataset.json")]:
        assert (shared_path / "out" / name).read_bytes() == (alone / name).read_bytes()
    told = json.loads((alone / "dataset.json").read_text())["sets"]
    assert sum(part["bytes"] for part in told.values()) == 455
    make_text(alone, folder, **options, sharing=Sharing(report=lines.append))
    assert "0 files written" in lines[-1]


def test_counts_brought_together_are_those_of_all_ranks(folder, shared_path, comm):
    lines, out = [], shared_path / "counted"
    together = Sharing(comm.rank, comm.size, lines.append, comm.allgather)
    options = {"pattern": "*.py", "file_bytes": 100, "sharing": together}
    paths = make_text(out, folder, **options)
    comm.barrier()
    if comm.rank == comm.size - 1:
        paths[0].unlink()  # a file of rank 0, whichever rank takes it away
    comm.barrier()
    make_text(out, folder, **options)
    files = len(paths)
    assert lines == [
        f"text: {files} files written, 0 already there, in {out}",
        f"text: 1 files written, {files - 1} already there, in {out}",
    ]


@pytest.mark.ranks(min=2)
def test_ranks_that_see_other_documents_are_told_so_together(folder, tmp_path, shared_path, comm):
    own = tmp_path / "own"
    own.mkdir()
    for i in range(3 + (comm.rank == 1)):
        (own / f"f{i}.py").write_bytes(b"x" * 10)
    together = Sharing(comm.rank, comm.size, gather=comm.allgather)
    with pytest.raises(DataError, match="3 of 30 bytes on rank 0, 4 of 40 bytes on rank 1; let all of them read one"):
        make_text(shared_path / "out", own, sharing=together)
    assert not list((shared_path / "out").rglob("*.h5"))


@pytest.mark.serial
def test_files_of_another_set_are_not_mixed_in(folder, tmp_path):
    make_text(tmp_path, folder, pattern="f*.py", file_bytes=100)
    with pytest.raises(DataError, match=r"train/0000\d.h5, which is no file of this set"):
        make_text(tmp_path, folder, pattern="f*.py")
    with pytest.raises(DataError, match="made from other parameters"):
        make_text(tmp_path, folder, pattern="f*.py", file_bytes=100, seed=5)
