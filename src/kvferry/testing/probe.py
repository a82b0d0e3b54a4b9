"""A window on endpoints, transfers and transports, for tests: what no caller needs, such as rooms, links and peers.

`probe(endpoint)` is what tests look through, so that they say what they ask and not where it lies; nothing else reaches
inside. It holds nothing of its own, and hands out the parts themselves: whoever plants a fault changes the one that it
belongs to.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from typing import Any, overload

from kvferry.control.registry import Registry
from kvferry.endpoint import DecodeEndpoint, PrefillEndpoint
from kvferry.endpoint.base import EndpointTelemetry
from kvferry.endpoint.decode.context import DecodeContext
from kvferry.endpoint.decode.driver import DecodeDriver
from kvferry.endpoint.decode.links import Links
from kvferry.endpoint.decode.rooms import ReceivingRooms
from kvferry.endpoint.prefill.admission import Admission
from kvferry.endpoint.prefill.context import PrefillContext
from kvferry.endpoint.prefill.decode_ranks import DecodePeer, DecodeRanks
from kvferry.endpoint.prefill.driver import PrefillDriver, Registration
from kvferry.endpoint.prefill.room_actor import RoomActor
from kvferry.endpoint.prefill.rooms import SendingRooms
from kvferry.endpoint.transfer import Transfer
from kvferry.errors import KVFerryError
from kvferry.protocol.transfer.pending_messages import PendingOpens
from kvferry.protocol.transfer.room_table import RoomTable
from kvferry.protocol.transfer.states import TransferState
from kvferry.transport import InProcessNetwork, InProcessTransport


class _Probe:
    """What an endpoint of either side shows."""

    def __init__(self, endpoint: PrefillEndpoint | DecodeEndpoint) -> None:
        self._endpoint = endpoint

    @property
    def now(self) -> float:
        """The time on the endpoint's own clock, in seconds."""
        return self._endpoint._platform.now()

    @property
    def telemetry(self) -> EndpointTelemetry:
        """What is told what happens."""
        return self._endpoint._telemetry

    @property
    def rooms_lock(self) -> threading.Lock:
        """Guards the table of rooms."""
        return self._endpoint._driver.rooms._lock

    @property
    def closers(self) -> threading.RLock:
        """Held by whoever closes the endpoint."""
        return self._endpoint._closers


class PrefillProbe(_Probe):
    """What a prefill endpoint shows."""

    def __init__(self, endpoint: PrefillEndpoint) -> None:
        super().__init__(endpoint)
        self.driver: PrefillDriver = endpoint._driver
        self.registration: Registration = endpoint._registration

    @property
    def rooms(self) -> SendingRooms:
        """All rooms, and decode ranks' messages about them."""
        return self.driver.rooms

    @property
    def table(self) -> RoomTable[RoomActor]:
        """The rooms that are open, and what is kept for others."""
        return self.rooms.table

    @property
    def pending(self) -> PendingOpens:
        """What decode ranks have opened, and the caller has not."""
        return self.table.pending

    @property
    def ranks(self) -> DecodeRanks:
        """What is known of decode ranks."""
        return self.driver.ranks

    @property
    def peers(self) -> list[DecodePeer]:
        """The connections to decode ranks."""
        return self.ranks.peers()

    @property
    def admission(self) -> Admission:
        """The direct writes that are open, and those that wait to be."""
        return self.driver.context.admission

    @property
    def context(self) -> PrefillContext:
        """What the endpoint's parts share."""
        return self.driver.context

    @property
    def port(self) -> int:
        """Where it listens for decode ranks."""
        return self.driver.channel.port


class DecodeProbe(_Probe):
    """What a decode endpoint shows."""

    def __init__(self, endpoint: DecodeEndpoint) -> None:
        super().__init__(endpoint)
        self.driver: DecodeDriver = endpoint._driver
        self.registry: Registry = endpoint._registry_client

    @property
    def rooms(self) -> ReceivingRooms:
        """All rooms, and what they rely on."""
        return self.driver.rooms

    @property
    def links(self) -> Links:
        """Those to prefill engines, in use and given up."""
        return self.rooms.links

    @property
    def context(self) -> DecodeContext:
        """What the endpoint's parts share."""
        return self.driver.context


class TransferProbe:
    """What a transfer shows."""

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer

    @property
    def ended(self) -> Future[None]:
        """Done once the transfer has ended."""
        return self._transfer._ended

    def update(self, state: TransferState, error: KVFerryError | None = None, *, pages_reusable: bool = False) -> None:
        """Does what the room's thread does when the room has come further."""
        self._transfer._update(state, error, pages_reusable=pages_reusable)


class TransportProbe:
    """What a transport between endpoints of one process shows."""

    def __init__(self, transport: InProcessTransport) -> None:
        self._transport = transport

    @property
    def network(self) -> InProcessNetwork:
        """What connects it."""
        return self._transport._network

    @property
    def connected(self) -> Collection[str]:
        """The names of the peers that it is connected to."""
        return tuple(self._transport._connections)

    @property
    def num_lists(self) -> int:
        """How many prepared lists it holds."""
        return sum(len(lists) for lists in self._transport._lists.values())

    @property
    def untaken(self) -> Sequence[tuple[str, bytes]]:
        """Notifications that came, and that nobody has taken."""
        return tuple(self._transport._notifications)

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return self._transport._closed


@overload
def probe(inspected: PrefillEndpoint) -> PrefillProbe: ...
@overload
def probe(inspected: DecodeEndpoint) -> DecodeProbe: ...
@overload
def probe(inspected: Transfer) -> TransferProbe: ...
@overload
def probe(inspected: InProcessTransport) -> TransportProbe: ...
def probe(inspected: PrefillEndpoint | DecodeEndpoint | Transfer | InProcessTransport) -> Any:
    """Opens the window on an endpoint, a transfer or a transport."""
    match inspected:
        case PrefillEndpoint():
            return PrefillProbe(inspected)
        case DecodeEndpoint():
            return DecodeProbe(inspected)
        case Transfer():
            return TransferProbe(inspected)
        case _:
            return TransportProbe(inspected)
