"""Spans of OpenTelemetry: one trace from the decode side's caller to the prefill side's writes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from tests.support.caches import Model
from tests.support.engines import Engines, Requests
from tests.support.waiting import eventually

from kvferry.errors import ConfigurationError
from kvferry.observe import spans as spans_module
from kvferry.testing.probe import probe


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> tuple[TracerProvider, InMemorySpanExporter]:
    """A tracer provider of the test's own, and what it is given."""
    kept = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    return provider, kept


def by_name(kept: InMemorySpanExporter) -> dict[str, list[ReadableSpan]]:
    found: dict[str, list[ReadableSpan]] = {}
    for span in kept.get_finished_spans():
        found.setdefault(span.name, []).append(span)
    return found


def test_both_sides_are_one_trace(pair: Callable[..., Requests], spans: tuple[TracerProvider, InMemorySpanExporter]):
    provider, kept = spans
    requests = pair(Model(), traces=True)
    tracer = provider.get_tracer("a gateway")
    request = requests.new(1, 6)
    with tracer.start_as_current_span("decode's request") as outer:
        requests.open_decode(request)
    with tracer.start_as_current_span("prefill's request") as other:
        requests.open_prefill(request)
    requests.submit(request, 0, 2, last=False)
    requests.let_leave(request, 1)
    requests.submit(request, 2, 6)
    request.wait()
    eventually("all have ended", lambda: len(kept.get_finished_spans()) == 6)
    found = by_name(kept)
    (receive,), (send,) = found["kvferry.receive"], found["kvferry.send"]
    trace_id = outer.get_span_context().trace_id
    assert {span.context.trace_id for span in (receive, send, *found["kvferry.write"])} == {trace_id}
    assert receive.parent is not None
    assert send.parent is not None
    assert receive.parent.span_id == outer.get_span_context().span_id
    assert send.parent.span_id == receive.context.span_id
    assert [link.context.span_id for link in send.links] == [other.get_span_context().span_id]
    assert len(found["kvferry.write"]) == 2
    for write in found["kvferry.write"]:
        assert write.parent is not None
        assert write.parent.span_id == send.context.span_id
        assert send.start_time <= write.start_time <= write.end_time <= send.end_time  # type: ignore[operator]
    attributes: dict[str, Any] = dict(send.attributes or {})
    assert attributes["kvferry.bytes"] == 6 * requests.prefill.pools[0].bytes_per_page
    assert attributes["kvferry.outcome"] == "success"
    assert attributes["kvferry.room"] == 1


def test_a_failure_is_one_with_its_cause(
    pair: Callable[..., Requests], spans: tuple[TracerProvider, InMemorySpanExporter]
):
    _, kept = spans
    requests = pair(Model(), traces=True, bootstrap_timeout_s=0.3)
    sender = requests.prefill.endpoints[0].open(1)
    eventually("it fails for nobody came", lambda: sender.state.is_final)
    eventually("its span has ended", lambda: len(kept.get_finished_spans()) == 1)
    (span,) = kept.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR
    assert "TransferTimeoutError" in str(span.status.description)
    assert span.parent is None


def test_nothing_is_left_of_rooms_that_are_over(
    pair: Callable[..., Requests], spans: tuple[TracerProvider, InMemorySpanExporter]
):
    requests = pair(Model(), traces=True)
    for room in range(5):
        requests.run(room)
    for endpoint in (requests.prefill.endpoints[0], requests.decode.endpoints[0]):
        observers = probe(endpoint).telemetry.observer.observers  # type: ignore[attr-defined]
        (observer,) = [each for each in observers if isinstance(each, spans_module.Spans)]
        eventually("none is kept", lambda at=observer: not at.receiving and not at.sending)


def test_nothing_travels_unless_it_is_asked_for(pair: Callable[..., Requests]):
    requests = pair(Model())
    assert probe(requests.decode.endpoints[0]).telemetry.observer.begin_receiving(1) == ""


def test_what_is_missing_is_named(engines: Callable[..., Engines], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "kvferry.observe.spans")
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigurationError, match=r"KVFERRY_TRACES.*pip install opentelemetry-api"):
        engines(traces=True).decode(Model())
