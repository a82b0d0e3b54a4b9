"""The decode side's shell: binds protocol, plan, transport and control together for one rank."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from typing import SupportsIndex

from kvferry.control.registry import Registry
from kvferry.endpoint.base import Endpoint
from kvferry.endpoint.construction import checked_room
from kvferry.endpoint.decode.driver import DecodeDriver
from kvferry.endpoint.runtime.platform import Closing, Platform
from kvferry.endpoint.runtime.threads import check_may_wait
from kvferry.endpoint.transfer import Receiver
from kvferry.layout import RankCoordinates, RankLayout
from kvferry.observe.status import EndpointStatus, Side
from kvferry.plan.requests.page_numbers import AnyPages
from kvferry.protocol.links.link import LinkKey
from kvferry.settings import Settings
from kvferry.transport import Transport


class DecodeEndpoint(Endpoint):
    """One rank of a decode engine: asks prefill engines for requests' caches and receives them.

    A thread of its own does all I/O; `open` and reading a state never do any. The object is a context manager, and its
    methods may be called from any thread.
    """

    _side = Side.DECODE
    _driver: DecodeDriver

    def __init__(
        self,
        layout: RankLayout,
        *,
        engine: str = "decode",
        coordinates: RankCoordinates | None = None,
        settings: Settings | None = None,
        transport: Transport | None = None,
        registry: Registry | None = None,
        fingerprint: Mapping[str, str] | None = None,
        platform: Platform | None = None,
    ) -> None:
        """Registers the memory and starts the thread. Prefill engines are looked up when a room first asks for one.

        Args:
            layout: what this rank caches and where. The memory must live as long as the endpoint.
            engine: this engine's name, for messages.
            coordinates: this rank's place in the engine; the only rank by default.
            settings: read from the environment if None.
            transport: made as the settings say if None; closed with the endpoint.
            registry: where prefill engines are looked up, as the settings say if None; closed with the endpoint.
            fingerprint: what the caches are beyond their layout, as for `PrefillEndpoint`.
            platform: the machine; this one if None.

        Raises:
            LayoutError: if layout and coordinates disagree, or a field of the fingerprint is impossible.
            SettingsError: if a setting is impossible, or no engine can have that name.
            TransportError: if the transport is missing or the memory cannot be registered.
        """
        super().__init__(layout, engine, coordinates, settings, transport, fingerprint, platform)
        self._has_closed = False
        with ExitStack() as undo:
            undo.callback(self.transport.close)
            self._registry_client = registry or self._platform.registry(self.settings, self.settings.registry_address)
            self._registry_client.load()  # now, before a room waits for it
            self._driver = DecodeDriver(
                self._identity,
                self.transport,
                self.settings,
                platform=self._platform,
                observer=self._telemetry.observer,
                registry=self._registry_client,
            )
            undo.pop_all()
            undo.callback(self.close)
            self._telemetry.start()
            undo.pop_all()

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
        instance: str | None = None,
    ) -> Receiver:
        """Asks a prefill engine for a request's cache. Returns at once and does no I/O.

        Every rank of this rank's data-parallel group must open the room. The pages belong to the transfer until
        `pages_reusable`.

        Args:
            room: the request's number on both sides. `PrefillEndpoint.open` says when it may be used again.
            pages: page numbers in this rank's pool for what is missing here, in order; none if nothing is: then only
                aux data and completion come. With several groups a mapping from every group's name to page numbers, or
                to `GroupPages` that say with which page of the request they start. A window's pages start with the page
                of its first token, the group of a request's state has one slot.
            engine: the prefill engine's name.
            prefill_dp_rank: the data-parallel group there that has the request.
            prefix_tokens: tokens at the start of the request that this side already holds. The pages start with the
                one that holds the next token, and what they hold before it stays as it is.
            tokens: how many tokens the request has. Without it the last page counts as full. Needed with context
                parallelism, and with windows unless their `GroupPages` say where they start.
            share_tokens: how many of these the engine keeps on this rank, as for `PrefillEndpoint.open`.
            depends_on: digests of what the request's cache depends on, as for `PrefillEndpoint.open`.
            instance: the start of the prefill engine that has the request (`PrefillEndpoint.instance`), where its
                answer has told. The room fails as soon as another start is found under the engine's name.

        Raises:
            RoomExistsError: if a transfer with this number is still open here.
            QueueFullError: if so many rooms are open that another one would be too many.
            PageError: if page numbers are wrong, not as many as the tokens take, the prefix ends inside a packed page,
                or the layout gives this rank another number of tokens than share_tokens.
            UsageError: if the room's number is out of range, share_tokens is needed and None, a digest is impossible,
                or the process was forked from the endpoint's.
            SettingsError: if no engine can have that name.
            EndpointDrainingError: if the endpoint drains.
            EndpointClosedError: if the endpoint was closed.
        """
        self._check_process()
        receiver = None
        try:
            number, key, rooms = checked_room(room), LinkKey(engine, prefill_dp_rank), self._driver.rooms
            opened = rooms.made(number, pages, prefix_tokens, tokens, share_tokens, depends_on, instance)
            receiver = opened.receiver
            rooms.add(opened, key)
            return receiver
        except BaseException as error:
            self._not_opened(receiver, error)
            raise

    def expect(self, room: SupportsIndex, *, engine: str = "prefill", prefill_dp_rank: int = 0) -> None:
        """Tells a prefill engine that a request waits here, which will open a room when it can have pages.

        The engine keeps the request's cache until then, beyond bootstrap_timeout_s, and for as long after this rank was
        last heard of. Call `open` or `refuse` in the end: nothing else takes it back. Returns at once and does no I/O,
        and nothing once the endpoint is closed.

        Args:
            room: the request's number on both sides.
            engine: the prefill engine's name.
            prefill_dp_rank: the data-parallel group there that has the request.

        Raises:
            UsageError: if the number is out of range, or the process was forked from the endpoint's.
            SettingsError: if no engine can have that name.
            LayoutError: if prefill_dp_rank is negative.
        """
        self._check_process()
        self._driver.rooms.expect(checked_room(room), LinkKey(engine, prefill_dp_rank))

    def refuse(self, room: SupportsIndex, reason: str, *, engine: str = "prefill", prefill_dp_rank: int = 0) -> None:
        """Tells a prefill engine that this rank will not open a room, for a caller that cannot.

        The room fails there at once and names the reason, which is in words, also where it is opened within
        bootstrap_timeout_s. Where a transfer of that number is open here it goes on, and the refusal is for the
        number's next use. Returns at once and does no I/O, and nothing once the endpoint is closed.

        Raises:
            UsageError: if the number is out of range, or the process was forked from the endpoint's.
            SettingsError: if no engine can have that name.
            LayoutError: if prefill_dp_rank is negative.
        """
        self._check_process()
        self._driver.rooms.refuse(checked_room(room), LinkKey(engine, prefill_dp_rank), reason)

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
            KVFerryError: if it cannot be reached or refuses otherwise; TransferTimeoutError if it is not there in time.
            SettingsError: if no engine can have that name.
            UsageError: if the process was forked from the endpoint's, or the thread is one of kvferry's own.
            EndpointClosedError: if the endpoint was closed.
        """
        self._check_process()
        check_may_wait("connect()")
        limit_s = self.settings.bootstrap_timeout_s if timeout_s is None else timeout_s
        self._driver.rooms.links.wait_ready(LinkKey(engine, prefill_dp_rank), limit_s)

    def connecting(self, engine: str = "prefill", *, prefill_dp_rank: int = 0) -> Future[None]:
        """Begins to connect to a prefill engine, unless it is connected. Returns at once and does no I/O.

        Returns:
            What has a result once the engine is connected, and an exception, as `connect` raises it, if that fails or
            takes longer than bootstrap_timeout_s. It is not to be cancelled.

        Raises:
            SettingsError: if no engine can have that name.
            UsageError: if the process was forked from the endpoint's.
            EndpointClosedError: if the endpoint was closed.
        """
        self._check_process()
        return self._driver.rooms.links.connecting(LinkKey(engine, prefill_dp_rank))

    def release(self, endpoint: str) -> None:
        """Takes the caller's word that a lost prefill rank has ended: that its process cannot write any more.

        What it might have written to comes back `quarantine_s` later. If the process runs after all, it may overwrite
        what then belongs to others. `kvferry release` says the same to all decode ranks.

        Args:
            endpoint: the prefill rank's name, as in the status's `quarantine`.

        Raises:
            UsageError: if nothing waits for that rank's end, or an operator's word does not count here (end_proofs).
        """
        self._driver.rooms.links.quarantine.take_word(endpoint)

    def status(self) -> EndpointStatus:
        """Returns a snapshot of the endpoint, for people and tools."""
        now, rooms = self._platform.now(), self._driver.rooms
        return self._status(
            now,
            rooms=list(rooms.open.values()),
            peers=rooms.links.statuses(now),
            staging=self._driver.staging,
            quarantine=rooms.quarantine(now),
        )

    def _go_on_draining(self) -> None:
        self._driver.rooms.drain()

    def _closing(self) -> Closing:
        if self._has_closed:
            return
        yield from self._driver.closing(self._platform.now() + self.settings.close_timeout_s)
        if not self._driver.has_ended:
            return
        self._telemetry.close()
        self._registry_client.close()
        self.transport.close()
        self._has_closed = True
