"""Staging memory that runs short while rooms are open."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.support.caches import Model, Shape
from tests.support.engines import Engines, Requests
from tests.support.waiting import eventually

from kvferry.errors import IncompatiblePeerError, RegistrationError, TransportError
from kvferry.protocol.wire import messages
from kvferry.testing.probe import probe


def test_a_prefill_rank_that_gets_no_more_memory_goes_on_with_what_it_has(
    pair: Callable[..., Requests], caplog: pytest.LogCaptureFixture
):
    """A slot, for two receivers: the second would have more taken for it."""
    tight = {"staging_chunk_mib": 0.5 / 1024, "staging_ring_mib": 0.5 / 1024}
    requests = pair(Model(layers=4, heads=4), Shape(), Shape(tp=2), path="staged", **tight)
    requests.connect()

    def refuse() -> None:
        raise RegistrationError("the card has no room for more memory")

    transport = requests.prefill.transports[0]
    transport.on_register = refuse
    request = requests.begin_held()  # has the slot
    eventually("the other was refused more", lambda: "no room for more memory" in caplog.text)
    transport.held = False
    request.wait()
    requests.check(request)


def test_two_that_ask_for_more_memory_at_once_do_not_get_more_than_there_may_be(engines: Callable[..., Engines]):
    """The second asks while the first one's is being registered."""
    sizes = {"staging_ring_mib": 1, "staging_chunk_mib": 1, "staging_memory_mib": 3}  # one, one to measure, one more
    prefill = engines(path="staged", **sizes).prefill(Model(layers=4, heads=4))
    staging, transport = probe(prefill.endpoints[0]).context.staging, prefill.transports[0]
    second: list[Any] = []

    def ask_again() -> None:
        transport.on_register = None
        second.append(staging.more_memory())

    transport.on_register = ask_again
    assert staging.more_memory() is not None
    assert second == [None]


def test_a_prefill_rank_that_refuses_again_and_again_takes_no_more_memory(engines: Callable[..., Engines]):
    both = engines(staging_ring_mib=1.0, staging_chunk_mib=0.25, staging_memory_mib=4.0)
    refuses, serves = both.prefill(Model(), path="direct"), both.prefill(Model(), path="staged")
    decode = both.decode(Model(), path="staged")
    for _ in range(10):
        with pytest.raises(IncompatiblePeerError, match="path"):
            Requests(refuses, decode).connect()
    Requests(serves, decode).run(1)
    assert probe(decode.endpoints[0]).context.staging.taken_bytes == 2 << 20, "a ring for each of the two"


@pytest.mark.parametrize("after_failure", [False, True])
def test_a_span_that_is_released_after_a_failed_write_is_kept_until_what_had_been_sent_has_had_time_to_arrive(
    pair: Callable[..., Requests], after_failure: bool
):
    """Who was frozen meanwhile reads both from its sockets when it thaws, and perhaps the release first."""
    requests = pair(path="staged", staging_ring_mib=1.0, staging_chunk_mib=0.25, quarantine_s=0.4)
    requests.connect()
    driver = probe(requests.decode.endpoints[0]).driver
    name = requests.prefill.transports[0].endpoint_name
    ring = driver.context.staging.rings[name]
    released = messages.SpanReleased(
        endpoint=name, epoch=ring.epoch, start=0, begin=0, stop=64, after_failure=after_failure
    )
    positions: list[int] = []
    began_at = time.monotonic()

    def take(now: float) -> None:
        driver.rooms.arrivals.span_released(released)
        positions.append(ring.reading.position)

    driver.context.submit(take)
    eventually("it has come", lambda: positions)
    assert positions == [0 if after_failure else 64]
    eventually("it is given back", lambda: ring.reading.position == 64)
    assert (time.monotonic() - began_at > 0.35) is after_failure


def test_a_room_that_waits_for_memory_that_another_ranks_failed_write_may_read_is_not_given_up_for_that(
    engines: Callable[..., Engines],
):
    """Memory of this side is not free for longer than a write may take: not by the receiver's fault, and it passes."""
    both = engines(path="staged", staging_ring_mib=2**-8, staging_chunk_mib=2**-8, staging_memory_mib=2**-7)
    prefill = both.prefill(Model(), quarantine_s=1.2, write_timeout_s=0.6, gather_workers=1)
    broken, sound = (Requests(prefill, both.decode(Model())) for _ in range(2))
    for room, each in enumerate((broken, sound), start=1):
        each.run(room)
    transport = prefill.transports[0]
    transport.promises = replace(transport.promises, posts_all_or_nothing=False)

    def fail_once(peer: str) -> None:
        transport.on_post = None
        raise TransportError(f"the connection to {peer} was reset")

    transport.on_post = fail_once
    request = broken.new(3)
    broken.open_decode(request)
    broken.open_prefill(request)
    broken.submit(request)
    request.wait_ended()
    failed_at = time.monotonic()
    sound.run(4)
    assert time.monotonic() - failed_at > 0.9, "it found memory, and has not waited for what the write may read"
