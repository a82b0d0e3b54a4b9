"""A prefill and a decode rank whose pools are on a fake device, and an engine's streams on both sides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec.structs import replace
from proof.device import DeviceTransport, FakeDevice, FakeResources
from proof.device.ordering import Ranges
from tests.support.caches import Model, Shape, pool
from tests.support.engines import WAIT_S, new_engine_name
from tests.support.waiting import eventually

from kvferry import DecodeEndpoint, InProcessNetwork, PrefillEndpoint, RankCoordinates, Receiver, Sender, Settings
from kvferry.endpoint.runtime.platform import SystemPlatform
from kvferry.layout import Device, MemoryKind
from kvferry.pools.places import TakenPages
from kvferry.testing import KnownContents, Pool

GPU = Device(MemoryKind.VRAM, 0)
SETTINGS: dict[str, Any] = {
    "workers": 1,
    "queues": 1,
    "nixl_threads": 1,
    "gather_workers": 1,
    "scatter_workers": 1,
    "path": "staged",
    "staging_ring_mib": 4 / 1024,
    "staging_chunk_mib": 1 / 1024,
}


class FakePlatform(SystemPlatform):
    """This machine, with a fake device in it."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self.staging = FakeResources(device)


def on_gpu(model: Model, shape: Shape) -> Pool:
    """The pool of an engine's only rank, whose layout says that it is on a GPU."""
    made = pool(model, shape, RankCoordinates())
    layout = replace(made.layout, shards=tuple(replace(shard, device=GPU) for shard in made.layout.shards))
    return Pool(layout, memory=made, blocks=made.blocks)


@dataclass(frozen=True, slots=True)
class Request:
    """A request on its way, and the pages that each side has for it."""

    room: int
    tokens: int
    sender: Sender
    receiver: Receiver
    source: Mapping[str, TakenPages]
    target: Mapping[str, TakenPages]


class OnDevice:
    """Two ranks that order the heads of a page differently, so that runs are short."""

    def __init__(
        self, registry_url: str, device: FakeDevice, *, polls: int = 0, announces: bool = True, **settings: Any
    ) -> None:
        self.device = device
        network = InProcessNetwork()
        model = Model(layers=4, heads=4, head_dim=8)
        self.source, self.target = (on_gpu(model, Shape(pages=32, heads_first=each)) for each in (False, True))
        self.engine_of_prefill, self.engine_of_decode = (
            device.stream(f"the {side} engine's stream") for side in ("prefill", "decode")
        )
        chosen = Settings(**{"registry_url": registry_url, **SETTINGS, **settings})
        self.name = new_engine_name("prefill")
        self.prefill = PrefillEndpoint(
            self.source.layout,
            engine=self.name,
            settings=chosen,
            transport=DeviceTransport(network, device, polls=polls),
            announces=announces,
            platform=FakePlatform(device),
        )
        assert not announces or self.prefill.wait_registered(WAIT_S)
        self.decode = DecodeEndpoint(
            self.target.layout,
            settings=chosen,
            transport=DeviceTransport(network, device),
            platform=FakePlatform(device),
        )

    def __enter__(self) -> OnDevice:
        return self

    def __exit__(self, *error: object) -> None:
        self.device.finish()
        self.decode.close()
        self.prefill.close()

    def begin(self, room: int, tokens: int) -> Request:
        """Opens a room, computes the request on the engine's stream, and hands it in with an event."""
        source, target = self.source.pages_for(tokens), self.target.pages_for(tokens)
        self.target.mark()
        receiver = self.decode.open(room, target, engine=self.name, tokens=tokens)
        sender = self.prefill.open(room, tokens=tokens)
        contents = KnownContents(room)
        self.engine_of_prefill.launch(
            f"the prefill step of room {room}",
            lambda: self.source.fill(contents, source, tokens=tokens),
            writes=bytes_of(self.source, source),
        )
        event = self.engine_of_prefill.record_event()
        sender.submit({name: each.pages for name, each in source.items()}, last=True, ready=event)
        return Request(room, tokens, sender, receiver, source, target)

    def overwrite(self, request: Request) -> None:
        """Computes another prompt in the pages that a request had, once they are this side's again."""
        eventually("the pages are this side's again", lambda: request.sender.pages_reusable)
        self.engine_of_prefill.launch(
            f"the next prompt in the pages of room {request.room}",
            lambda: self.source.wipe_pages({name: each.pages for name, each in request.source.items()}),
            writes=bytes_of(self.source, request.source),
        )
        self.engine_of_prefill.synchronize()

    def request(self, room: int, tokens: int) -> Sender:
        """Transfers a request, reads it in a decode step, and reuses its pages."""
        request = self.begin(room, tokens)
        request.sender.wait(WAIT_S)
        request.receiver.wait(WAIT_S)
        eventually("the pages are this side's", lambda: request.receiver.pages_reusable)
        self.engine_of_decode.launch(
            f"the decode step of room {room}",
            lambda: self.target.check(KnownContents(room), request.target, tokens=tokens),
            reads=bytes_of(self.target, request.target),
        )
        self.overwrite(request)
        self.engine_of_decode.synchronize()
        return request.sender


def bytes_of(made: Pool, pages: Mapping[str, TakenPages]) -> Ranges:
    """Every byte of some pages."""
    found: list[tuple[int, int]] = []
    for shard in made.layout.shards:
        assert shard.paging is not None
        for address in shard.addresses:
            for page in pages[shard.group].pages:
                start = address + int(page) * shard.paging.page_stride
                found.append((start, start + shard.paging.page_stride))
    return np.array(sorted(found), np.int64)
