"""OpenTelemetry spans of transfers, joined across prefill and decode.

The decode side begins a span when a room is opened, under whatever span its caller is in, and its context travels with
the room's handshake (W3C Trace Context); the prefill side's span is a child of it, and linked to the one that its own
caller is in. Spans go to the tracer provider that the process has set up; without one they go nowhere.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from opentelemetry import context, propagate, trace
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode

from kvferry._version import __version__
from kvferry.observe.records import Observer, Outcome, ReceiverStats, SenderStats, WriteRecord, outcome_of

_HEADER = "traceparent"


@dataclass(slots=True)
class _Sending:
    """A room that is sent.

    Attributes:
        caller: the span that our caller was in when it opened the room; not valid if it was in none.
        parent: the decode side's, as it travels; empty until a decode rank has sent it.
    """

    caller: trace.SpanContext
    parent: str = ""


class Spans(Observer):
    """Makes a span for every transfer, and for every write in it.

    Attributes:
        receiving: spans of rooms that have not ended, by number.
        sending: likewise, of rooms to be sent.
    """

    def __init__(self, engine: str, rank: int) -> None:
        self._tracer = trace.get_tracer("kvferry", __version__)
        self._about: dict[str, str | int] = {"kvferry.engine": engine, "kvferry.rank": rank}
        # Guards both tables: rooms are opened by callers, and end in threads of ours.
        self._lock = threading.Lock()
        self.receiving: dict[int, Span] = {}
        self.sending: dict[int, _Sending] = {}

    def begin_receiving(self, room: int) -> str:
        span = self._tracer.start_span(
            "kvferry.receive", kind=SpanKind.CONSUMER, attributes={**self._about, "kvferry.room": room}
        )
        carrier: dict[str, str] = {}
        propagate.inject(carrier, trace.set_span_in_context(span, context.Context()))
        with self._lock:
            self.receiving[room] = span
        return carrier.get(_HEADER, "")

    def begin_sending(self, room: int) -> None:
        with self._lock:
            self.sending[room] = _Sending(trace.get_current_span().get_span_context())

    def requested(self, room: int, trace_context: str) -> None:
        with self._lock:
            sending = self.sending.get(room)
            if sending is not None and not sending.parent:
                sending.parent = trace_context

    def received(self, room: int, stats: ReceiverStats, error: Exception | None) -> None:
        with self._lock:
            span = self.receiving.pop(room, None)
        if span is None:
            return
        offset_s = _offset_s()
        if stats.first_arrival_at is not None:
            span.add_event("first arrival", timestamp=_nanoseconds(stats.first_arrival_at, offset_s))
        span.set_attributes({"kvferry.chunks": stats.chunks, "kvferry.outcome": outcome_of(error).value})
        _end(span, stats.ended_at, offset_s, error)

    def sent(self, room: int, stats: SenderStats, error: Exception | None) -> None:
        with self._lock:
            sending = self.sending.pop(room, None)
        if sending is None:
            return
        offset_s = _offset_s()
        parent = propagate.extract({_HEADER: sending.parent}, context.Context()) if sending.parent else None
        span = self._tracer.start_span(
            "kvferry.send",
            context=parent,
            kind=SpanKind.PRODUCER,
            attributes={
                **self._about,
                "kvferry.room": room,
                "kvferry.bytes": stats.total_bytes,
                "kvferry.outcome": outcome_of(error).value,
            },
            links=[Link(sending.caller)] if sending.caller.is_valid else [],
            start_time=_nanoseconds(stats.opened_at, offset_s),
        )
        inside = trace.set_span_in_context(span, context.Context())
        for write in stats.writes:
            self._write(write, inside, offset_s)
        _end(span, stats.ended_at, offset_s, error)

    def _write(self, write: WriteRecord, parent: context.Context, offset_s: float) -> None:
        span = self._tracer.start_span(
            "kvferry.write",
            context=parent,
            kind=SpanKind.CLIENT,
            attributes={
                "kvferry.path": write.path.value,
                "kvferry.why": write.why,
                "kvferry.receiver": write.receiver,
                "kvferry.bytes": write.total_bytes,
                "kvferry.descriptors": write.descriptors,
            },
            start_time=_nanoseconds(write.submitted_at, offset_s),
        )
        span.add_event("posted", timestamp=_nanoseconds(write.posted_at, offset_s))
        span.end(_nanoseconds(write.done_at, offset_s))


def _offset_s() -> float:
    """Returns the seconds that the steady clock lacks of the time since 1970."""
    return time.time() - time.monotonic()


def _nanoseconds(at: float, offset_s: float) -> int:
    return int((at + offset_s) * 1e9)


def _end(span: Span, ended_at: float | None, offset_s: float, error: Exception | None) -> None:
    if error is not None and outcome_of(error) is not Outcome.ABORTED:
        span.record_exception(error)
        span.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {error}"))
    span.end(None if ended_at is None else _nanoseconds(ended_at, offset_s))
