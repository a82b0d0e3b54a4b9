"""The decode side's shell: binds protocol, plan, transport and control together for one rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import SupportsIndex

from kvferry.control.registry_client import RegistryClient
from kvferry.endpoint.base import Endpoint
from kvferry.endpoint.construction import checked_room
from kvferry.endpoint.decode.context import DecodeContext
from kvferry.endpoint.decode.driver import DecodeDriver
from kvferry.endpoint.runtime.platform import Closing, Platform
from kvferry.endpoint.transfer import Receiver
from kvferry.errors import (
    EndpointClosedError,
    LayoutError,
)
from kvferry.layout import RankCoordinates, RankLayout
from kvferry.observe.status import EndpointStatus, Side, ThreadStatus
from kvferry.plan import check_share_tokens
from kvferry.plan.requests.chunks import AnyPages
from kvferry.plan.requests.demands import demands_of
from kvferry.protocol.links.link import LinkKey
from kvferry.protocol.transfer.receiver import ReceiverMachine
from kvferry.protocol.wire.registrations import check_engine_name
from kvferry.protocol.wire.request_conditions import checked_conditions
from kvferry.settings import Settings
from kvferry.staging.receiving import ReceivingStaging
from kvferry.transport import Transport

_OWNED = "this decode endpoint"


class DecodeEndpoint(Endpoint):
    """One rank of a decode engine: asks prefill engines for requests' caches and receives them.

    A thread of its own does all I/O; `open` and reading a state never do any. The object is a context manager, and its
    methods may be called from any thread.
    """

    _side = Side.DECODE

    def __init__(
        self,
        layout: RankLayout,
        *,
        engine: str = "decode",
        coordinates: RankCoordinates | None = None,
        settings: Settings | None = None,
        transport: Transport | None = None,
        registry: RegistryClient | None = None,
        fingerprint: Mapping[str, str] | None = None,
        platform: Platform | None = None,
    ) -> None:
        """Registers the memory and starts the thread. Prefill engines are looked up when a room first asks for one.

        Args:
            layout: what this rank caches and where. The memory must live as long as the endpoint.
            engine: this engine's name, for messages.
            coordinates: this rank's place in the engine; the only rank by default.
            settings: read from the environment if None.
            transport: made as the settings say if None; closed together with the endpoint.
            registry: where prefill engines are looked up, as the settings say if None; closed together with the
                endpoint.
            fingerprint: what the caches are beyond their layout, as for `PrefillEndpoint`. Prefill engines that say
                another of any field are refused, unless the setting may_differ names it.
            platform: the machine; this one if None.

        Raises:
            LayoutError: if layout and coordinates disagree on context parallelism, or a field of the fingerprint is
                impossible.
            SettingsError: if a setting is impossible, or no engine can have that name.
            TransportError: if the transport is missing or the memory cannot be registered.
        """
        super().__init__(
            layout,
            engine=engine,
            coordinates=coordinates,
            settings=settings,
            transport=transport,
            fingerprint=fingerprint,
            platform=platform,
        )
        self._has_closed = False
        try:
            if registry is None:
                registry = self._platform.registry(self.settings, self.settings.registry_address)
            self._registry_client = registry
            self._registry_client.load()  # now, before a room waits for it
            staging = ReceivingStaging(self.settings, layout, self.transport, self._platform.staging)
            self.transport.register(layout.regions(), layout.device)
        except BaseException:
            self.transport.close()
            raise
        context = DecodeContext(
            identity=self._identity,
            transport=self.transport,
            registry=self._registry_client,
            settings=self.settings,
            staging=staging,
            platform=self._platform,
            observer=self._telemetry.observer,
        )
        self._driver = DecodeDriver(context)
        try:
            self._telemetry.start()
        except BaseException:
            self.close()
            raise

    def open(
        self,
        room: SupportsIndex,
        pages: AnyPages,
        *,
        engine: str = "prefill",
        prefill_dp_rank: int = 0,
        prefix_tokens: int = 0,
        tokens: int | None = None,
        share_tokens: int | None = None,
        depends_on: Mapping[str, bytes] | None = None,
    ) -> Receiver:
        """Asks a prefill engine for a request's cache. Returns at once and does no I/O.

        Every rank of this rank's data-parallel group must open the room. The pages belong to the transfer until
        `pages_reusable`.

        Args:
            room: the request's number on both sides. `PrefillEndpoint.open` says when it may be used again.
            pages: page numbers in this rank's pool for the part of the request that is missing here, in order. Empty
                if nothing is missing: then only aux data and completion come. With several groups a mapping from every
                group's name to page numbers, or to `GroupPages` that say with which page of the request they start. A
                window's pages start with the page of its first token, the group of a request's state has one slot.
            engine: the prefill engine's name.
            prefill_dp_rank: the data-parallel group there that has the request.
            prefix_tokens: tokens at the start of the request that this side already holds. The pages start with the
                one that holds the next token, and what they hold before it stays as it is.
            tokens: how many tokens the request has. Without it the last page counts as full. Needed with context
                parallelism, and with windows unless their `GroupPages` say where they start.
            share_tokens: how many of these, the prefix included, the engine keeps on this rank, by its own count;
                compared with the layout's. Needed where context parallelism divides a request by its length, since
                engines round in more than one way.
            depends_on: digests of what the request's cache depends on, by name, as for `PrefillEndpoint.open`: the room
                fails on both sides before anything is sent if the prefill side's request has others.

        Raises:
            RoomExistsError: if a transfer with this number is still open here.
            QueueFullError: if so many rooms are open that another one would be too many.
            PageError: if page numbers are wrong, not as many as the tokens take, the prefix ends inside a packed page,
                or the layout gives this rank another number of tokens than share_tokens.
            UsageError: if the room's number is out of range, share_tokens is needed and None, a digest is impossible,
                or the process was forked from the endpoint's.
            SettingsError: if no engine can have that name.
            EndpointClosedError: if the endpoint was closed.
        """
        self._owning_process.check(_OWNED)
        with self._refusals_observed():
            number = checked_room(room)
            where = f"room {number}"
            key = _link_key(engine, prefill_dp_rank, where=where)
            groups = demands_of(self.layout, pages, prefix_tokens=prefix_tokens, tokens=tokens, where=where)
            check_share_tokens(self.layout.tokens, tokens, share_tokens, where=where)
            machine = ReceiverMachine(
                number, rank=self.engine_rank, deadlines=self._deadlines, now=self._platform.now()
            )
            return self._driver.rooms.add(
                machine,
                key,
                groups,
                tokens=None if tokens is None else int(tokens),  # a plain integer, which is what travels
                depends_on=checked_conditions(depends_on, where=where),
            )

    def refuse(self, room: SupportsIndex, reason: str, *, engine: str = "prefill", prefill_dp_rank: int = 0) -> None:
        """Tells a prefill engine that this rank will not open a room, for a caller that cannot.

        The room fails there at once and names the reason, instead of waiting for bootstrap_timeout_s; also where it is
        opened within that time. Where a transfer of that number is open here it goes on, and the refusal is for the
        number's next use. Returns at once and does no I/O, and nothing once the endpoint is closed.

        Args:
            room: the request's number on both sides.
            reason: why, in words.
            engine: the prefill engine's name.
            prefill_dp_rank: the data-parallel group there that has the request.

        Raises:
            UsageError: if the number is out of range, or the process was forked from the endpoint's.
            SettingsError: if no engine can have that name.
            LayoutError: if prefill_dp_rank is negative.
        """
        self._owning_process.check(_OWNED)
        number = checked_room(room)
        key = _link_key(engine, prefill_dp_rank, where=f"room {number}")
        self._driver.rooms.refuse(number, key, reason)

    def receiver(self, room: int) -> Receiver:
        """Returns the open transfer of that number.

        Raises:
            UnknownRoomError: if there is none, or it has ended.
        """
        return self._driver.rooms.receiver(room)

    def connect(self, engine: str = "prefill", *, prefill_dp_rank: int = 0, timeout_s: float | None = None) -> None:
        """Connects to a prefill engine and waits until it is ready, so that the first room need not.

        Args:
            timeout_s: the longest wait; None stands for bootstrap_timeout_s.

        Raises:
            IncompatiblePeerError: if the two sides cannot exchange caches, naming both values.
            KVFerryError: if the engine cannot be reached or refuses for another reason.
            TransferTimeoutError: if it is not there in time.
            SettingsError: if no engine can have that name.
            UsageError: if the process was forked from the endpoint's.
            EndpointClosedError: if the endpoint was closed.
        """
        self._owning_process.check(_OWNED)
        check_engine_name(engine)
        if self._driver.rooms.is_closed:
            raise EndpointClosedError("the endpoint is closed")
        limit_s = self.settings.bootstrap_timeout_s if timeout_s is None else timeout_s
        self._driver.rooms.links.wait_ready(LinkKey(engine, prefill_dp_rank), limit_s)

    def release(self, endpoint: str) -> None:
        """Takes the caller's word that a lost prefill rank has ended: that its process cannot write any more.

        What it might have written to comes back `quarantine_s` later. If the process runs after all, it may overwrite
        what then belongs to others. `kvferry release` says the same to all decode ranks.

        Args:
            endpoint: the prefill rank's name, as in the status's `quarantine`.

        Raises:
            UsageError: if nothing waits for the end of such a rank, or an operator's word does not count here
                (end_proofs).
        """
        self._driver.rooms.links.quarantine.take_word(endpoint)

    def status(self) -> EndpointStatus:
        """Returns a snapshot of the endpoint, for people and tools."""
        now = self._platform.now()
        return self._status(
            now,
            problem="",
            rooms=self._driver.rooms.statuses(now),
            peers=self._driver.rooms.links.statuses(now),
            staging=self._driver.staging,
            quarantine=self._driver.rooms.quarantine(now),
        )

    @property
    def open_rooms(self) -> int:
        """Number of rooms that have not ended, still quarantine pages, or may still be open on a prefill rank."""
        return len(self._driver.rooms.open)

    @property
    def health(self) -> tuple[ThreadStatus, ...]:
        """Health of every thread of the endpoint."""
        return self._driver.health

    def _closing(self) -> Closing:
        if self._has_closed:
            return
        deadline = self._platform.now() + self.settings.close_timeout_s
        self._driver.rooms.close()
        # Also rooms whose pages are reusable: prefill ranks may still write into staging memory for them.
        yield lambda: not self.open_rooms, deadline
        yield from self._driver.closing()
        self._telemetry.close()
        self._registry_client.close()
        self.transport.close()
        self._has_closed = True


def _link_key(engine: str, prefill_dp_rank: int, *, where: str) -> LinkKey:
    """Returns which group of a prefill engine is meant; raises as `DecodeEndpoint.refuse` does."""
    check_engine_name(engine)
    if prefill_dp_rank < 0:
        raise LayoutError(f"{where}: prefill_dp_rank is {prefill_dp_rank}: it must not be negative")
    return LinkKey(engine, prefill_dp_rank)
