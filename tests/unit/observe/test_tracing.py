"""A window of what happens, and the trace that is made of it."""

from __future__ import annotations

import threading
import time
from typing import TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.observe.records import PartRecord, WriteRecord
from kvferry.observe.status import Side
from kvferry.observe.tracing import COLOURS, Recorder, Span, Window, chrome_trace
from kvferry.plan import TransferPath

Recorded: TypeAlias = tuple[list[Span], int] | None


def write(at: float) -> WriteRecord:
    part = PartRecord(at + 1, at + 2, at + 3, at + 4, at + 6, 1000, 5, "worker-0")
    return WriteRecord("decode-0", TransferPath.STAGED, "why", 1000, 1, at, at + 1, at + 6, 0.0, 0.0, (part,))


def test_nothing_is_kept_while_nobody_records():
    recorder = Recorder()
    recorder.wrote(1, [write(0.0)])
    assert recorder.record(0.01) == ([], 0)


def test_what_ends_in_the_window_is_there_with_its_phases():
    recorder, found = Recorder(), list[Recorded]()
    thread = threading.Thread(target=lambda: found.append(recorder.record(0.3)))
    thread.start()
    while not recorder.is_on:
        time.sleep(0.001)
    assert recorder.record(0.01) is None, "one at a time"
    now = time.monotonic()
    recorder.wrote(6, [write(now - 100)])  # was through before, and is told of late
    recorder.wrote(7, [write(now - 5)])
    thread.join()
    recorder.wrote(8, [write(now)])
    (recorded,) = found
    assert recorded is not None
    spans, left_out = recorded
    assert left_out == 0
    assert {span.room for span in spans} == {7}
    lengths = {span.phase: round(span.end_s - span.begin_s, 3) for span in spans}
    assert lengths == {"queue": 1.0, "credit": 1.0, "gather": 1.0, "post": 1.0, "wire": 3.0}
    assert abs(max(span.end_s for span in spans) - time.time()) < 5, "in seconds since 1970"
    assert {span.row for span in spans if span.phase == "gather"} == {"worker-0"}


@st.composite
def spans(draw: st.DrawFn) -> list[Span]:
    """Spans between a few moments: many begin exactly when others end, and many last less than a viewer shows."""
    moments = sorted(draw(st.lists(st.floats(0.0, 1e-4), min_size=2, max_size=20, unique=True)))
    moments = sorted({1e9 + each for each in moments} | {1e9 + 1.0})
    places = st.tuples(st.integers(0, len(moments) - 2), st.integers(1, 3))
    return [
        Span(phase, row, 1, moments[first], moments[min(first + length, len(moments) - 1)], what=str(number))
        for number, (phase, row, (first, length)) in enumerate(
            draw(
                st.lists(
                    st.tuples(st.sampled_from(sorted(COLOURS)), st.sampled_from(["wire", "worker-0"]), places),
                    max_size=40,
                )
            )
        )
    ]


@given(spans())
def test_no_two_pieces_of_a_row_overlap_and_none_is_lost(given: list[Span]):
    trace = chrome_trace([Window(Side.PREFILL, "p", 0, "e", given, 0)])
    pieces = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    lengths = {each["args"]["what"]: each["dur"] for each in pieces}
    assert lengths.keys() == {span.what for span in given}
    for span in given:
        assert lengths[span.what] == pytest.approx((span.end_s - span.begin_s) * 1e6, abs=1.5)
    for each in pieces:
        assert isinstance(each["ts"], int), "viewers count in nanoseconds, and drop what overlaps by one"
        assert isinstance(each["dur"], int)
    ends: dict[int, float] = {}
    for each in sorted(pieces, key=lambda event: event["ts"]):
        assert each["ts"] >= ends.get(each["tid"], 0.0)
        ends[each["tid"]] = each["ts"] + each["dur"]
    names = {event["tid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    assert set(names) == {each["tid"] for each in pieces}
    assert len(set(names.values())) == len(names)


def test_endpoints_share_a_time_line():
    here = Window(Side.PREFILL, "p", 0, "e", [Span("wire", "wire", 1, 100.0, 101.0)], 0)
    there = Window(Side.DECODE, "d", 1, "f", [Span("scatter", "s", 1, 100.5, 102.0)], 0)
    trace = chrome_trace([here, there])["traceEvents"]
    assert [(each["pid"], each["ts"]) for each in trace if each["ph"] == "X"] == [(1, 0.0), (2, 500_000.0)]
    assert [each["args"]["name"] for each in trace if each["name"] == "process_name"] == ["prefill p/0", "decode d/1"]


def test_an_empty_trace_is_a_trace():
    assert chrome_trace([]) == {"traceEvents": [], "displayTimeUnit": "ms"}
