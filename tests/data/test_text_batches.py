"""Windows of texts: every token predicted once an epoch, and the same batches under every mesh and order."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

import hpcpar as hp
from hpcpar.data import DataError, Position, TextBatches, TextDataset
from hpcpar.data.text import make_text
from hpcpar.data.text_dataset import IGNORED, OUTSIDE
from hpcpar.layout.sequence import zigzag
from hpcpar.transport.counter import counter

SIZES = (7, 3, 30, 1, 12, 26)
WINDOW = 8


@pytest.fixture
def text(shared_path: Path, comm) -> Path:
    """Six documents in two files: 54 + 6 tokens with their begins, and what is left."""
    if comm.rank == 0:
        (shared_path / "source").mkdir()
        for i, size in enumerate(SIZES):
            (shared_path / "source" / f"{i}.txt").write_bytes(bytes(range(40 * i, 40 * i + size)))
        make_text(shared_path / "text", shared_path / "source", validation=0, test=0, file_bytes=50)
    comm.barrier()
    return shared_path / "text" / "train"


def whole(dataset: TextDataset) -> list:
    return [dataset.read(i, np.arange(dataset.sequence)) for i in range(len(dataset))]


@pytest.mark.serial
def test_every_token_is_predicted_once_from_the_one_before(text):
    with TextDataset(text, WINDOW) as dataset:
        windows = whole(dataset)
        assert len(dataset.paths) == 2 and dataset.targets == sum(SIZES) + len(SIZES)
        assert dataset.raw_bytes == sum(SIZES) and (dataset.vocabulary, dataset.end) == (257, 256)
        counted = [dataset.counted(i) for i in range(len(dataset))]
    assert [int((w.targets != IGNORED).sum()) for w in windows] == counted and sum(counted) == dataset.targets
    stream = [t for w in windows for t in w.targets.tolist() if t != IGNORED]
    expected = []
    for i, size in enumerate(SIZES):
        expected += [*range(40 * i, 40 * i + size), 256]  # its bytes, and that it ends there
    assert stream == expected
    for w in windows:
        known = w.targets[:-1] != IGNORED
        np.testing.assert_array_equal(w.tokens[1:][known], w.targets[:-1][known])


@pytest.mark.serial
def test_documents_and_positions_begin_with_each_document_or_window(text):
    with TextDataset(text, WINDOW) as dataset:
        first, second, *_, last = whole(dataset)[:6]  # the first file has 45 tokens
        documents = [dataset.documents(i, np.arange(WINDOW)) for i in range(6)]
    assert first.tokens.tolist() == [256, *range(7)] and documents[0].tolist() == [0] * 8
    assert second.tokens.tolist() == [256, 40, 41, 42, 256, 80, 81, 82]
    assert documents[1].tolist() == [1, 1, 1, 1, 2, 2, 2, 2]
    assert second.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    behind = last.targets == IGNORED
    assert behind.any() and (documents[5][behind] == OUTSIDE).all() and (last.tokens[behind] == 256).all()
    assert last.positions.max() < WINDOW


@pytest.mark.serial
def test_any_places_of_a_window_are_read_and_no_others(text):
    with TextDataset(text, 20) as dataset:
        every = whole(dataset)
        for order in (zigzag(20, 3), np.arange(20)[::-1], np.array([5]), np.zeros(0, np.int64)):
            for i, window in enumerate(every):
                before = dataset.bytes_read
                part = dataset.read(i, order)
                for name in ("tokens", "targets", "positions"):
                    np.testing.assert_array_equal(getattr(part, name), getattr(window, name)[order], err_msg=name)
                assert dataset.bytes_read - before <= 2 * 2 * order.size
        before = dataset.bytes_read
        dataset.read(0, np.arange(10, 20))
        assert dataset.bytes_read - before == 2 * 11


@pytest.mark.serial
def test_what_is_no_text_is_refused(text, tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["tokens"] = np.zeros(3)
    with pytest.raises(DataError, match="no file of tokens"):
        TextDataset(tmp_path, 8)
    with h5py.File(text / "00000.h5") as old, h5py.File(tmp_path / "x.h5", "w") as new:
        for name in old:
            new[name] = old[name][()]
        new.attrs.update(old.attrs)
        new.attrs["vocabulary"] = 300
    with pytest.raises(DataError, match="x.h5 has another vocabulary than"):
        TextDataset([text / "00000.h5", tmp_path / "x.h5"], 8)
    with h5py.File(tmp_path / "x.h5", "r+") as file:
        file["offsets"][-1] += 1
    with pytest.raises(DataError, match=r"its documents have \d+ tokens, and \d+ are there"):
        TextDataset(tmp_path, 8)


def arrays(batches: TextBatches) -> list:
    """Tokens, positions, documents, targets of each batch, whole, and what counts."""
    return [
        (*(t.numpy() for t in (text.tokens, text.positions, text.documents, target)), text.counted)
        for text, target in batches
    ]


@pytest.mark.parametrize("axes", [{"batch": -1}, {"sequence": -1}, {"model": -1}], ids=str)
@pytest.mark.parametrize("order", ["natural", "zigzag"])
def test_batches_are_the_same_under_every_mesh_and_order(text, axes, order):
    options = {"seed": 4, "documents": True, "restart": True}
    alone, mesh = hp.Mesh(everybody=-1), hp.Mesh(**axes)
    with TextDataset(text, WINDOW) as dataset:
        expected = arrays(TextBatches(dataset, 5, hp.Layout(), mesh=alone, **options))
        layout = hp.Layout(*[a if a in mesh.shape else None for a in ("batch", "sequence")])
        batches = TextBatches(dataset, 5, layout, mesh=mesh, order=order, **options)
        with counter.counting() as sent:
            pairs = list(batches)
        assert not sent, "every rank reads its own block"
        assert all(text.documents.shard.shape[1] == WINDOW for text, _ in pairs), "keys of all are met on every rank"
        places = zigzag(WINDOW, mesh.shape.get("sequence", 1)) if order == "zigzag" else np.arange(WINDOW)
        batches.position = Position()
        for (*found, counted), (*whole_batch, all_counted) in zip(arrays(batches), expected, strict=True):
            assert counted == all_counted
            for block, entire in zip(found, whole_batch, strict=True):
                np.testing.assert_array_equal(block, entire[:, places])
        assert len(pairs[-1][1].shape) == 2 and sum(c for *_, c in expected) == dataset.targets
    alone.free()
    mesh.free()


def test_options_leave_out_what_the_model_is_not_to_see(text):
    mesh = hp.Mesh(batch=-1)
    with TextDataset(text, WINDOW) as dataset:
        batches = TextBatches(dataset, 4, hp.Layout("batch"), mesh=mesh, shuffle=False, ignore_index=-1)
        pairs = list(batches)
        batches.close()
    assert all(text.positions is None and text.documents is None for text, _ in pairs)
    targets = np.concatenate([target.numpy() for _, target in pairs])
    assert (targets == -1).sum() == len(targets) * WINDOW - sum(SIZES) - len(SIZES) and (targets >= -1).all()
    mesh.free()


def test_resuming_goes_on_with_the_next_window_even_with_another_batch_size(text):
    mesh = hp.Mesh(sequence=-1)
    layout = hp.Layout(None, "sequence")
    with TextDataset(text, WINDOW) as dataset:
        batches = TextBatches(dataset, 2, layout, mesh=mesh, seed=9)
        stream = batches.stream()
        unbroken = np.concatenate([next(stream)[0].tokens.numpy() for _ in range(9)])
        batches.close()
        batches = TextBatches(dataset, 3, layout, mesh=mesh, seed=9)
        batches.position = Position(0, 4)
        stream = batches.stream()
        resumed = np.concatenate([next(stream)[0].tokens.numpy() for _ in range(2)])
        batches.close()
    np.testing.assert_array_equal(resumed, unbroken[4:10])
    mesh.free()
