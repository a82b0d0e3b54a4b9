"""Endpoints of two releases serve each other; what one requires and the other does not know is refused by name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec
import pytest
from tests.support.caches import Model, Shape
from tests.support.engines import WAIT_S, Engines, Requests
from tests.support.waiting import eventually

from kvferry.endpoint import base
from kvferry.endpoint.runtime.platform import SystemPlatform
from kvferry.errors import IncompatiblePeerError, TransferFailedError
from kvferry.protocol.wire import codec
from kvferry.protocol.wire.field_types import Identity
from kvferry.protocol.wire.versions import SPOKEN, Versions
from kvferry.testing.probe import probe

NEXT = Versions(SPOKEN.oldest, SPOKEN.newest + 1)


@contextmanager
def release(
    versions: Versions = SPOKEN, *, requires: tuple[str, ...] = (), features: frozenset[str] = frozenset()
) -> Iterator[None]:
    """Endpoints that are made meanwhile are of another release, or require something of their peers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SystemPlatform, "versions", versions)
        patch.setattr(base, "Identity", partial(Identity, requires=requires, features=features))
        yield


@pytest.mark.parametrize("path", ["direct", "staged"])
@pytest.mark.parametrize(
    ("prefill", "decode"), [((SPOKEN, NEXT), (NEXT,)), ((NEXT,), (SPOKEN,))], ids=["decode newer", "prefill newer"]
)
def test_releases_one_version_apart_serve_each_other(
    engines: Callable[..., Engines],
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    prefill: tuple[Versions, ...],
    decode: tuple[Versions, ...],
):
    """Also where the ranks of one engine are of both, as while it is upgraded rank by rank."""
    spoken: set[int] = set()
    encode = codec.encode

    def noted(message: Any, version: int) -> bytes:
        spoken.add(version)
        return encode(message, version)

    monkeypatch.setattr(codec, "encode", noted)
    both, model, shape = engines(path=path, checksums=True), Model(), Shape(tp=len(prefill))
    name, source = None, None
    for rank, versions in enumerate(prefill):
        with release(versions):
            part = both.prefill(model, shape, name=name, ranks=[rank])
        if source is None:
            source, name = part, part.name
        else:
            source.pools += part.pools
            source.transports += part.transports
            source.endpoints += part.endpoints
    assert source is not None
    with release(*decode):
        requests = Requests(source, both.decode(model))
    for room in range(3):
        requests.run(room)
    assert spoken == {one.shared_with(other) for one in prefill for other in decode}
    assert all(endpoint.is_healthy for endpoint in (*source.endpoints, *requests.decode.endpoints))


@pytest.mark.parametrize(("prefill", "decode"), [(("faster rooms",), ()), ((), ("faster rooms",))], ids=["p", "d"])
def test_what_a_peer_requires_and_this_release_does_not_know_is_refused_when_they_connect(
    engines: Callable[..., Engines], prefill: tuple[str, ...], decode: tuple[str, ...]
):
    both, model = engines(), Model()
    with release(requires=prefill):
        source = both.prefill(model)
    with release(requires=decode):
        sink = both.decode(model)
    peer = r"prefill rank 0 of 'prefill\S*'" if prefill else r"refused: decode rank 0 of 'decode\S*'"
    says = rf"{peer} requires 'faster rooms', which kvferry \S+ of this side does not know: upgrade kvferry on this"
    with pytest.raises(IncompatiblePeerError, match=says):
        sink.endpoints[0].connect(source.name, timeout_s=WAIT_S)
    sender = source.endpoints[0].open(1)
    with pytest.raises(TransferFailedError, match="requires 'faster rooms'"):
        sink.endpoints[0].open(1, [0], engine=source.name).wait(WAIT_S)
    eventually("the prefill side has the reason", lambda: "requires 'faster rooms'" in str(sender.error))


class RoomApplauded(msgspec.Struct, tag=True):
    """A message of a later release."""

    room: int


def test_a_message_of_a_type_that_a_decode_rank_does_not_know_leaves_the_link_as_it_is(
    engines: Callable[..., Engines], caplog: pytest.LogCaptureFixture
):
    both, model = engines(), Model()
    requests = Requests(both.prefill(model), both.decode(model))
    requests.connect()
    prefill, decode = requests.prefill.endpoints[0], requests.decode.endpoints[0]
    link = probe(decode).links.current[0]
    body = msgspec.msgpack.encode(RoomApplauded(room=7))
    channel = probe(prefill).ranks.channels.channel_to(decode.transport.endpoint_name)
    with caplog.at_level(logging.WARNING):
        probe(prefill).driver.channel.send(decode.transport.endpoint_name, RoomApplauded(room=7))  # type: ignore[arg-type]
        for numbered in channel.send(msgspec.Raw(body)):
            probe(prefill).driver.channel.send(decode.transport.endpoint_name, numbered)
        eventually("both came", lambda: caplog.text.count("'RoomApplauded', which kvferry") == 2)
    assert probe(decode).links.current == (link,)
    requests.run(1)
