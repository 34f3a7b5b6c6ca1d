"""Spans: kept in order, bounded, under the phase and module they belong to, and free where nobody records."""

import threading
from contextlib import nullcontext

import pytest

from hpcpar import scope
from hpcpar.trace import Event, Recorder, active, recorder, span

pytestmark = pytest.mark.serial


@pytest.fixture
def recording():
    mine = Recorder(capacity=5)
    recorder.activate(mine)
    yield mine
    recorder.activate(None)


def test_nothing_is_made_where_nobody_records():
    assert active() is None
    assert span("forward") is span("backward") and isinstance(span("forward"), nullcontext)


def test_a_phase_names_what_is_inside_and_ends_when_an_error_leaves_it(recording):
    with span("forward"):
        scope.enter("enc1.conv")
        with span("tile", "compute"):
            pass
        scope.leave()
    with pytest.raises(KeyError), span("backward"):
        raise KeyError
    with span("report", "io"):
        pass
    shown = [(e.name, e.category, e.module, e.phase) for e in recording.events]
    assert shown == [
        ("tile", "compute", "enc1.conv", "forward"),
        ("forward", "phase", "", "forward"),
        ("backward", "phase", "", "backward"),
        ("report", "io", "", ""),
    ]
    tile, forward = recording.events[0], recording.events[1]
    assert forward.begin <= tile.begin <= tile.end <= forward.end


def test_the_latest_spans_stay_and_the_others_are_counted(recording):
    for i in range(8):
        with span(str(i)):
            pass
    assert [e.name for e in recording.events] == ["3", "4", "5", "6", "7"]
    assert recording.dropped == 3


def test_seconds_in_nested_spans_count_once(recording):
    spans = [(1, 9, "wait"), (2, 4, "halo"), (8, 12, "halo"), (20, 30, "compute"), (40, 41, "wait")]
    for begin, end, category in spans:
        recording.events.append(Event(begin, end, category, "", "", "", recording.main))
    recording.events.append(recording.events[-1]._replace(thread=-1, begin=50, end=90))  # the first one is dropped
    assert recording.seconds("wait", "halo") == pytest.approx((2 + 4 + 1) / 1e9)


def test_another_thread_has_no_part_in_phases_and_modules(recording):
    def read():
        with span("read", "io"):
            pass

    with span("forward"):
        scope.enter("enc1")
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
        scope.leave()
    (event,) = (e for e in recording.events if e.name == "read")
    assert (event.module, event.phase) == ("", "") and event.thread != recording.main
