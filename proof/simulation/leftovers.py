"""What an endpoint still holds when everything is over: it should be nothing, and one that was closed be gone."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from kvferry.endpoint import DecodeEndpoint, PrefillEndpoint
from kvferry.testing.probe import probe
from proof.simulated_transport import SimulatedTransport
from proof.simulation.processes import Process


def leftovers(process: Process, living: Collection[str], kept: Collection[int]) -> str:
    """What is left, in words; empty if nothing is.

    Args:
        living: the names of all endpoints whose processes live.
        kept: the rooms that a decode rank keeps by right: whoever may write to their pages cannot be proved to be gone.
    """
    endpoint = process.endpoint
    if process.closing is not None:
        return "the endpoint itself, which was closed"
    if isinstance(endpoint, PrefillEndpoint):
        return next(_of_prefill(endpoint, process.transport, living), "")
    return next(_of_decode(endpoint, kept), "")


def _of_prefill(endpoint: PrefillEndpoint, transport: SimulatedTransport, living: Collection[str]) -> Iterator[str]:
    if not probe(endpoint).table.is_quiet:
        yield f"{endpoint.open_rooms} rooms, {len(probe(endpoint).pending)} pending ones"
    admission = probe(endpoint).admission
    if admission.num_bytes or admission.num_waiting:
        yield f"{admission.num_bytes} bytes admitted, {admission.num_waiting} who wait to be"
    for memory in probe(endpoint).context.staging.source_memories:
        if memory._taken or memory.num_waiting:
            yield f"slots {memory._taken}, {memory.num_waiting} who wait for one"
    for peer in probe(endpoint).peers:
        if peer.name not in living:
            yield f"a connection to {peer.name}, which is gone"
        if peer.attachment is None:
            continue
        if peer.attachment._writes:
            yield f"{peer.attachment._writes} writes to {peer.name}"
        staged = peer.attachment.paths.staged
        if transport.connected.get(peer.name) in transport.wire.lost:
            continue  # until the next write finds that out
        if staged is not None and (staged.peer.ring.in_use or staged.peer.ring.num_waiting):
            yield f"{staged.peer.ring.in_use} bytes of the ring of {peer.name}"


def _of_decode(endpoint: DecodeEndpoint, kept: Collection[int]) -> Iterator[str]:
    driver, rooms = probe(endpoint).driver, probe(endpoint).rooms
    used = [link for link, through in rooms.links.rooms_of.items() if any(room.room not in kept for room in through)]
    if rooms.open.keys() - set(kept) or used:
        yield f"{endpoint.open_rooms} rooms, through {len(rooms.links.rooms_of)} links"
    if rooms.expected.rooms:
        yield f"rooms that are expected: {sorted(rooms.expected.rooms)}"
    if rooms.links.are_awaited:
        yield "a caller that waits for a link"
    if driver.context.settling:
        yield "what failed writes had sent, which is still waited for"
    for name, ring in driver.context.staging.rings.items():
        if not ring.is_idle:
            yield f"parts of the ring of {name} that are being read"
