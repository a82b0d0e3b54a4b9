"""How much control traffic it takes to open one long room between many ranks, by how the request's pages lie.

Nothing is sent: every decode rank's link is made against prefill ranks that answer at once, and what it would send for
the room is encoded and counted. Prints, for pages that lie together, in runs of 64, and without any neighbours: the
messages, how many of them carry page numbers, and the bytes of all. With --json, the same as JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json

import numpy as np

from kvferry.layout import RankCoordinates, RankLayout, ShardedComponent, VirtualPools, all_coordinates, virtual_layout
from kvferry.layout.component import attention_components
from kvferry.plan import Piece
from kvferry.plan.requests.demands import demands_of
from kvferry.protocol.links.link import Link, LinkKey
from kvferry.protocol.transfer.events import SendOpen
from kvferry.protocol.transfer.receiver import ReceiverMachine
from kvferry.protocol.transfer.states import Deadlines
from kvferry.protocol.wire import codec, field_types, messages
from kvferry.protocol.wire.field_types import Identity
from kvferry.protocol.wire.registrations import RankRegistration
from kvferry.protocol.wire.versions import PROTOCOL_VERSION

LAYERS = 4
PROCESS = field_types.ProcessIdentity(machine="", pid=1, started=1)
DEADLINES = Deadlines(bootstrap_s=60.0, waiting_s=60.0, write_s=60.0)


class NoRings:
    """No staging memory."""

    def offer(self, endpoint: str, source: RankLayout, pieces: tuple[Piece, ...]) -> messages.Staging:
        """Offers nothing."""
        return messages.Staging()

    def metadata(self) -> bytes:
        """Returns nothing."""
        return b""

    def attached(self, endpoint: str) -> None:
        """Records nothing."""


def layout_of(coordinates: RankCoordinates, page_tokens: int, num_pages: int) -> RankLayout:
    """A rank's part of a model with a KV head for each rank."""
    components = attention_components(
        num_layers=LAYERS, num_kv_heads=coordinates.tp_size, head_dim=128, dtype="bfloat16"
    )
    sharded = [ShardedComponent(component=each, layers=tuple(range(LAYERS)), tp_axis="head") for each in components]
    return virtual_layout(
        sharded, coordinates, VirtualPools(page_tokens=page_tokens, num_pages=num_pages, layers_per_stage=(LAYERS,))
    )


def ready_link(receiver: RankCoordinates, layout: RankLayout, sources: dict[RankCoordinates, RankLayout]) -> Link:
    """The link of a decode rank to prefill ranks that have all answered."""
    identity = Identity(f"d{receiver.engine_rank}", "decode", receiver, layout, "none", "host")
    link = Link(
        LinkKey("prefill", 0),
        identity,
        NoRings(),
        next_attempt=itertools.count(1).__next__,
        can_prove_end=lambda _: True,
        deadline=60.0,
    )
    registrations = tuple(
        RankRegistration(
            engine="prefill",
            incarnation=f"p{each.engine_rank}",
            coordinates=each,
            control_address=f"tcp://p{each.engine_rank}:1",
            layout_digest="-",
            started_at=0.0,
            protocol_version=PROTOCOL_VERSION,
        )
        for each in sources
    )
    link.resolved(registrations, 0.0)
    addresses = dict(zip(sources, link.addresses, strict=True))
    for place, address in addresses.items():
        welcome = messages.Welcome(
            endpoint=f"p{place.engine_rank}",
            engine="prefill",
            coordinates=place,
            layout=sources[place],
            transport="none",
            process=PROCESS,
        )
        link.received(address, welcome)
    for place, address in addresses.items():
        attached = messages.Attached(endpoint=f"p{place.engine_rank}", attempt=link.attempt, only_staged=False)
        link.received(address, attached)
    return link


def measured(ranks: int, tokens: int, page_tokens: int) -> dict[str, dict[str, int]]:
    """Counts what opening one room takes, by how its pages lie."""
    pages = -(-tokens // page_tokens)
    sources = {each: layout_of(each, page_tokens, 2 * pages) for each in all_coordinates(tp_size=ranks)}
    cases = {
        "together": np.arange(pages),
        "runs of 64": np.arange(pages) + np.arange(pages) // 64,
        "scattered": 2 * np.arange(pages),
    }
    counts = {name: {"messages": 0, "with pages": 0, "bytes": 0} for name in cases}
    for receiver, layout in sources.items():
        link = ready_link(receiver, layout, sources)
        for name, numbers in cases.items():
            groups = demands_of(layout, numbers, prefix_tokens=0, tokens=tokens, where="")
            machine = ReceiverMachine(1, rank=receiver.engine_rank, deadlines=DEADLINES, now=0.0)
            for command in machine.handle(link.connected(1), 0.0):
                assert isinstance(command, SendOpen)
                message = messages.OpenRoom(
                    room=1,
                    generation=2**62,
                    receivers=ranks,
                    tokens=tokens,
                    groups=tuple(group for group in groups if group.name in command.groups),
                )
                counts[name]["messages"] += 1
                counts[name]["with pages"] += bool(message.groups)
                counts[name]["bytes"] += len(codec.encode_body(message))
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=64, help="of either side")
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--page-tokens", type=int, default=16)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    counts = measured(arguments.ranks, arguments.tokens, arguments.page_tokens)
    if arguments.json:
        print(json.dumps(counts))
        return
    print(f"one room of {arguments.tokens} tokens, pages of {arguments.page_tokens}, TP {arguments.ranks} to the same")
    for name, each in counts.items():
        print(f"{name:12} {each['messages']:6} messages, {each['with pages']:5} with pages, {each['bytes']:12,} bytes")


if __name__ == "__main__":
    main()
