"""The prefill side's shell: binds protocol, plan, transport and control together for one rank."""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import SupportsIndex

from kvferry.control.ends import ListeningEnd
from kvferry.control.owning_process import OwningProcess
from kvferry.control.registry_client import LeaseKeeper, RegistryClient
from kvferry.control.registry_server import RegistryServer
from kvferry.endpoint.actors import Waker
from kvferry.endpoint.admission import Admission
from kvferry.endpoint.attachment import Attachment
from kvferry.endpoint.construction import checked_room, create_transport, deadlines, endpoint_name
from kvferry.endpoint.decode_peers import DecodePeer, DecodePeers
from kvferry.endpoint.early_warnings import UnaskedRooms
from kvferry.endpoint.observing import EndpointTelemetry, endpoint_status
from kvferry.endpoint.paths import SendingStaging
from kvferry.endpoint.platform import Platform, SystemPlatform
from kvferry.endpoint.sender import Sender
from kvferry.endpoint.sending import OpenReceived, RefusalReceived, RoomContext, SendingRoom, released_span
from kvferry.endpoint.threads import Loop, RunningLoop, ThreadHealth
from kvferry.endpoint.timers import Timers
from kvferry.endpoint.workers import WorkerPool
from kvferry.errors import (
    EndpointClosedError,
    KVFerryError,
    PeerDisconnectedError,
    PeerError,
    QueueFullError,
    RoomExistsError,
    TransferAbortedError,
    UnknownRoomError,
    UsageError,
)
from kvferry.layout import RankCoordinates, RankLayout
from kvferry.observe.status import EndpointStatus, Side, StagingStatus
from kvferry.plan import check_share_tokens, check_token_share
from kvferry.protocol import messages
from kvferry.protocol.bounded import forget_oldest
from kvferry.protocol.fingerprint import checked_fingerprint
from kvferry.protocol.moves import request_of
from kvferry.protocol.pending_opens import PendingMessage
from kvferry.protocol.refusals import DecodeRank
from kvferry.protocol.registrations import RankRegistration, check_engine_name
from kvferry.protocol.request_conditions import checked_conditions
from kvferry.protocol.room_table import RoomTable
from kvferry.protocol.sender import (
    OpenRetransmitted,
    ReceiverAborted,
    ReceiverLost,
    ReceiverVerified,
    SenderAbortRequested,
    SenderMachine,
    SenderTick,
)
from kvferry.settings import Settings, bracketed
from kvferry.transport import Transport

log = logging.getLogger(__name__)

_OWNED = "this prefill endpoint"
_TICK_S = 0.1
_MOST_BROKEN_OFF = 1 << 12  # names of decode ranks: a thousand times as many as may be frozen at a time
_ROOMS_OPEN_MS = 100
_IDLE_MS = 1000
_CONNECTING_MS = 5
_CONNECTING_S = 1.0  # after a decode rank has asked for it; while its bytes move, workers make the progress
_LAST_MOMENT_S = 1.0  # for workers to end that have no room any more, however long writes took


@dataclass(frozen=True, slots=True)
class _GivenUp:
    """A decode rank that was given up.

    Attributes:
        rank: which it is; None if it had not attached.
        error: why.
    """

    rank: DecodeRank | None
    error: KVFerryError


class PrefillEndpoint:
    """One rank of a prefill engine: sends the caches of requests to whichever decode ranks ask for them.

    Threads of its own move bytes and messages; `open`, `Sender.submit` and reading a state never do I/O. The object is
    a context manager, and its methods may be called from any thread.

    Attributes:
        layout: what this rank caches and where.
        engine: the engine's name.
        coordinates: this rank's place in the engine.
        engine_rank: its number among all ranks of the engine.
        fingerprint: what its caches are beyond their layout.
        settings: what it was made with.
        transport: moves its bytes.
        control_address: where decode ranks reach it.
        registry_url: where the registry is that it announces itself to: its own, if it runs one.
    """

    control_address: str
    registry_url: str

    def __init__(
        self,
        layout: RankLayout,
        *,
        engine: str = "prefill",
        coordinates: RankCoordinates | None = None,
        settings: Settings | None = None,
        transport: Transport | None = None,
        host_registry: bool | None = None,
        fingerprint: Mapping[str, str] | None = None,
        platform: Platform | None = None,
    ) -> None:
        """Registers the memory, starts the threads and announces the rank; the registry may come up later.

        Args:
            layout: what this rank caches and where. The memory must live as long as the endpoint.
            engine: the engine's name, by which decode endpoints find it.
            coordinates: this rank's place in the engine; the only rank by default.
            settings: read from the environment if None.
            transport: made as the settings say if None; closed together with the endpoint.
            host_registry: whether to run the registry in this process. By default the engine's first rank does,
                unless `registry_url` is set.
            fingerprint: what the caches are beyond their layout, a short text for every field, such as the weights that
                compute them and the type of their numbers. Decode ranks that say another of any field are refused,
                unless the setting may_differ names it. Field names are the caller's own, but for those that need not
                agree: `engine` and `attention_backend`, and `speculative_model` where only one side says it.
            platform: the machine; this one if None.

        Raises:
            LayoutError: if layout and coordinates disagree on context parallelism, or a field of the fingerprint is
                impossible.
            SettingsError: if a setting is impossible, no engine can have that name, or a port is taken.
            TransportError: if the transport is missing or the memory cannot be registered.
        """
        check_engine_name(engine)  # before anything is taken: the registration would check it last
        self._owning_process = OwningProcess()
        self.layout = layout
        self.engine = engine
        self.coordinates = coordinates or RankCoordinates()
        check_token_share(layout, self.coordinates)
        self.fingerprint = checked_fingerprint(fingerprint)
        self.settings = settings or Settings()
        self.engine_rank = self.coordinates.engine_rank
        self._platform = platform or SystemPlatform()
        self._now = self._platform.now
        self.transport = transport or create_transport(self.settings, endpoint_name(engine, self.engine_rank))
        self._deadlines = deadlines(self.settings)
        self._started_at = self._now()
        self._telemetry = EndpointTelemetry(Side.PREFILL, engine, self.engine_rank, self.settings, self.status)
        self._observer = self._telemetry.observer
        self._peers = DecodePeers(self._make_peer)
        # Guards the table: a message for a room goes either to it, or is kept until the room is opened.
        self._rooms_lock = threading.Lock()
        self._table: RoomTable[SendingRoom] = RoomTable(
            max_pending=self.settings.max_pending_opens,
            most_page_bytes=int(self.settings.max_pending_opens_mib * 2**20),
            keep_s=self.settings.bootstrap_timeout_s,
        )
        # Numbers of the last failed writes, by decode rank; the latest stand last.
        self._broken_off_to: dict[str, int] = {}
        self._failure_numbers = itertools.count(1)
        self._given_up: dict[str, _GivenUp] = {}  # decode ranks that may come back; the latest stand last
        self._failed_writes: deque[tuple[Attachment, Exception]] = deque()  # whose connections broke
        self._outbox: deque[tuple[str, messages.Message]] = deque()
        self._admission = Admission(
            most_bytes=int(self.settings.direct_mib * 2**20),
            most_bytes_of_one=int(self.settings.direct_receiver_mib * 2**20),
            stalls_after_s=self.settings.write_timeout_s / 2,
            now=self._now,
        )
        self._timers: Timers[SendingRoom] = Timers()
        self._room_context = RoomContext(
            transport=self.transport,
            admission=self._admission,
            observer=self._observer,
            coordinates=self.coordinates,
            page_groups=layout.groups,
            now=self._now,
            send=self._send,
            open_room=self._open_room,
            abort_room=self._abort_room,
            refuse_room=self._room_refused,
            write_failed=self._write_failed,
            broken_off=self._broken_off,
            was_broken_off=self._was_broken_off,
            forget_room=self._forget_room,
            set_deadline=self._timers.set,
        )
        self._is_closed = False
        self._closers = threading.RLock()  # lets one caller of `close` after the other do what is left to do
        self._is_closing_down = False  # rooms are not waited for any more
        self._is_lingering = False  # closed, with writes still in flight
        self._release_error: Exception | None = None
        self._connecting_until = 0.0
        self._next_tick_at = 0.0
        self._last_tick_at = float("inf")
        self._longest_wait_s = 0.0
        self._registry: RegistryServer | None = None
        self._registry_client: RegistryClient | None = None
        self._lease: LeaseKeeper | None = None
        self._channel: ListeningEnd | None = None
        self._threads: tuple[RunningLoop, ...] = ()
        try:
            self._start(host_registry)
            self._start_threads()
        except BaseException:
            self._release_registry()
            self._release_memory()
            raise
        try:
            self._telemetry.start()
            self._announce()  # last: decode ranks that find this rank are served
        except BaseException:
            self.close()
            raise

    def _start(self, host_registry: bool | None) -> None:
        settings = self.settings
        self._process_identity = self._platform.identity(settings)
        self._staging = SendingStaging(settings, self.layout, self.transport, self._platform)
        self.transport.register(self.layout.regions(), self.layout.device)
        self._channel = self._platform.listen(settings)
        advertised_port = settings.advertise_port or self._channel.port
        self.control_address = f"tcp://{bracketed(settings.advertise_host or settings.host)}:{advertised_port}"
        if host_registry is None:
            host_registry = self.engine_rank == 0 and settings.registry_url is None
        if host_registry:
            self._registry = self._platform.serve_registry(settings)
        self.registry_url = self._registry.url if self._registry else settings.registry_address
        self._registry_client = self._platform.registry(settings, self.registry_url)
        self._unasked = UnaskedRooms(
            f"prefill rank {self.engine_rank} of {self.engine!r}",
            f"Does the decode side look for an engine named {self.engine!r}, at the registry {self.registry_url}?",
        )

    def _start_threads(self) -> None:
        name = f"kvferry-prefill-{self.engine_rank}"
        self._workers = WorkerPool(
            self.settings.workers,
            self.settings.used_queues,
            self.transport,
            self._staging.source_memories,
            settle_s=self.settings.quarantine_s,
            platform=self._platform,
            name=name,
        )
        self._waker = Waker(self._workers.queues)
        try:
            waker = self._platform.start(f"{name}-waker", self._waker)
            self._threads = self._platform.start(f"{name}-control", _Control(self)), waker
        except BaseException:
            self._workers.stop()
            self._waker.stop()
            raise

    def _announce(self) -> None:
        assert self._registry_client is not None
        registration = RankRegistration(
            engine=self.engine,
            incarnation=self.transport.endpoint_name,
            coordinates=self.coordinates,
            control_address=self.control_address,
            layout_digest=self.layout.digest,
            protocol_version=messages.PROTOCOL_VERSION,
        )
        self._lease = self._platform.keep_registered(self._registry_client, registration, self._on_registry_problem)

    def _on_registry_problem(self, error: Exception) -> None:
        log.error("prefill rank %d of %r is not registered: %s", self.engine_rank, self.engine, error)

    # ---- for callers --------------------------------------------------------------------------------------------

    def wait_registered(self, timeout_s: float) -> bool:
        """Waits until this rank is registered; False if it is not after timeout_s. See `registry_error`."""
        assert self._lease is not None
        return self._lease.registered.wait(timeout_s)

    @property
    def registry_error(self) -> Exception | None:
        """Why this rank could not be registered, or its lease renewed; None if there was no problem."""
        assert self._lease is not None
        return self._lease.last_error

    @property
    def is_healthy(self) -> bool:
        """Whether every thread of the endpoint runs; `health` has more."""
        return all(thread.is_alive for thread in self.health)

    @property
    def health(self) -> tuple[ThreadHealth, ...]:
        """Health of every thread of the endpoint."""
        return tuple(thread.health for thread in (*self._threads, *self._workers.threads))

    @property
    def observe_url(self) -> str | None:
        """Where metrics and status are served; None where no setting asks for it."""
        return self._telemetry.url

    def status(self) -> EndpointStatus:
        """Returns a snapshot of the endpoint, for people and tools."""
        now = self._now()
        with self._rooms_lock:
            rooms = list(self._table.rooms.values())
        peers = self._peers.all()
        rings = [peer.attachment.paths.staged for peer in peers if peer.attachment is not None]
        error = self._lease.last_error if self._lease is not None else None
        return endpoint_status(
            Side.PREFILL,
            self.settings,
            engine=self.engine,
            rank=self.engine_rank,
            endpoint=self.transport.endpoint_name,
            up_s=now - self._started_at,
            problem=f"not registered: {error}" if error is not None else "",
            rooms=[room.status(now) for room in rooms],
            peers=[peer.status(now) for peer in peers],
            staging=StagingStatus(
                total_bytes=sum(staged.peer.ring.num_bytes for staged in rings if staged is not None),
                used_bytes=sum(staged.peer.ring.in_use for staged in rings if staged is not None),
                waiting_rooms=sum(room.waits_for_memory for room in rooms),
            ),
            threads=self.health,
            fingerprint=self.fingerprint,
        )

    @property
    def open_rooms(self) -> int:
        """Number of rooms that have not ended, or still have writes in flight."""
        with self._rooms_lock:
            return len(self._table.rooms)

    def open(
        self,
        room: SupportsIndex,
        *,
        tokens: int | None = None,
        share_tokens: int | None = None,
        depends_on: Mapping[str, bytes] | None = None,
    ) -> Sender:
        """Opens a room: this rank will send a request's cache under this number. Does no I/O.

        Args:
            room: the request's number on both sides, below 2**63. It may be used again once the transfer has ended on
                every rank of both sides, and not before: it is the only thing that says which request is meant. If the
                transfer failed before every decode rank had opened it, the number rests for bootstrap_timeout_s more.
            tokens: how many tokens the request has, compared with the decode side's number. Needed where context
                parallelism divides a request by its length: there another length would mean other tokens.
            share_tokens: how many of these the engine keeps on this rank, by its own count; compared with the layout's.
                Needed where tokens is, since engines round in more than one way.
            depends_on: digests of what the request's cache depends on, by name: its prompt, its LoRA adapter, and the
                like; at most 8, of at most 32 bytes. The room fails on both sides before anything is sent if the decode
                side's request has another digest of any name, or none. Names are singular and complete the sentence
                "the decode side's request has another LoRA adapter".

        Raises:
            RoomExistsError: if a transfer with this number is still open here.
            QueueFullError: if so many rooms are open that another one would be too many.
            UsageError: if the number is out of range, tokens or share_tokens is needed and None, a digest is
                impossible, or the process was forked from the endpoint's.
            PageError: if the layout gives this rank another number of tokens than share_tokens.
            EndpointClosedError: if the endpoint was closed.
        """
        self._owning_process.check(_OWNED)
        try:
            return self._open(checked_room(room), tokens, share_tokens, depends_on)
        except KVFerryError as error:
            self._observer.refused(error)
            raise

    def _open(
        self, room: int, tokens: int | None, share_tokens: int | None, depends_on: Mapping[str, bytes] | None
    ) -> Sender:
        if tokens is None and self.layout.tokens.partition.depends_on_length:
            raise UsageError(
                f"room {room}: this rank's share of a request depends on its length ({self.layout.tokens.partition}): "
                "say how many tokens it has (tokens=...)"
            )
        check_share_tokens(self.layout.tokens, tokens, share_tokens, where=f"room {room}")
        machine = SenderMachine(
            room,
            rank=self.engine_rank,
            deadlines=self._deadlines,
            now=self._now(),
            tokens=tokens,
            depends_on=checked_conditions(depends_on, where=f"room {room}"),
        )
        with self._rooms_lock:
            if self._is_closed:
                raise EndpointClosedError(f"room {room}: the endpoint is closed")
            if room in self._table.rooms:
                raise RoomExistsError(f"room {room} is already open on prefill rank {self.engine_rank}")
            if len(self._table.rooms) >= self.settings.max_rooms:
                raise QueueFullError(
                    f"room {room}: {len(self._table.rooms)} rooms are open on prefill rank {self.engine_rank} already "
                    "(KVFERRY_MAX_ROOMS): open it when others have ended"
                )
            opened = SendingRoom(machine, self._workers, self._room_context, self.settings)
            self._timers.set(opened, machine.deadline)
            self._unasked.opened(room, self._now())
            self._observer.begin_sending(room)
            for receiver, message in self._table.add(opened):
                self._deliver(opened, receiver, message)
        return opened.sender

    def refuse(self, room: SupportsIndex, reason: str) -> None:
        """Tells decode ranks that this rank will not send a request's cache, for a caller that cannot open its room.

        Those that have opened the room, or do so within bootstrap_timeout_s, fail at once and name the reason, instead
        of waiting until then. Where a transfer of that number is open here it goes on, and the next use of the number
        is refused. Does no I/O, and nothing once the endpoint is closed.

        Args:
            room: the request's number on both sides.
            reason: why, in words.

        Raises:
            UsageError: if the number is out of range, or the process was forked from the endpoint's.
        """
        self._owning_process.check(_OWNED)
        number = checked_room(room)
        error = TransferAbortedError(f"room {number} was refused by the prefill side: {reason}")
        with self._rooms_lock:
            refused = [] if self._is_closed else self._table.refuse(number, error, self._now())
        for receiver, message in refused:
            self._refuse_room(receiver, message, error)

    def sender(self, room: int) -> Sender:
        """Returns the open transfer of that number.

        Raises:
            UnknownRoomError: if there is none, or it has ended.
        """
        with self._rooms_lock:
            found = self._table.rooms.get(room)
        if found is None:
            raise UnknownRoomError(f"room {room} is not open on prefill rank {self.engine_rank}")
        return found.sender

    def close(self) -> None:
        """Aborts open rooms, waits up to close_timeout_s for writes in flight, and gives everything back.

        Where writes hang for longer it returns all the same: the control thread gives everything back when they have
        ended, and sends the close messages. Until then neither the memory nor the control port may be used again.
        May be called again: where an exception interrupted it, Ctrl-C for one, the next call finishes.
        Does nothing in a process that was forked from the endpoint's: all of it is the parent's.
        """
        if not self._owning_process.is_this:
            return
        with self._closers:
            for holds, until in self._closing():
                self._platform.wait_until(holds, until)
        error, self._release_error = self._release_error, None
        if error is not None:
            raise error

    def _closing(self) -> Iterator[tuple[Callable[[], bool], float]]:
        """Closes step by step: yields what to wait for, and until when at most.

        Each step may be repeated: it may have been interrupted anywhere.
        """
        with self._rooms_lock:
            self._is_closed = True
            rooms = list(self._table.rooms.values())
            pending = self._table.close()
        deadline = self._now() + self.settings.close_timeout_s
        for room in rooms:
            room.post(SenderAbortRequested("the prefill endpoint was closed"))
        for receiver, message in pending:
            self._refuse_room(receiver, message, EndpointClosedError("the prefill endpoint was closed"))
        try:
            yield lambda: not self.open_rooms, deadline
        finally:  # also when the thread that closes is interrupted
            if self._lease is not None:
                self._lease.close()  # before the close message, so that no decode rank connects anew
            self._is_closing_down = True
            self._wake()
        if not self.open_rooms:
            yield lambda: not self._workers.running, max(self._now(), deadline) + _LAST_MOMENT_S
        if self._workers.running:
            # Taking memory away under a write corrupts whatever lives there next: better to keep all of it.
            self._is_lingering = True
            log.error(
                "writes are still on their way, %d rooms' too; the endpoint stays until they end", self.open_rooms
            )
        else:
            yield lambda: not any(thread.is_alive for thread in self._threads), float("inf")
        self._release_registry()
        self._telemetry.close()

    def __enter__(self) -> PrefillEndpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _release_registry(self) -> None:
        if self._lease is not None:
            self._lease.close()
        if self._registry_client is not None:
            self._registry_client.close()
        if self._registry is not None:
            self._registry.close()

    def _release_memory(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self.transport.close()

    # ---- for rooms, from any worker -----------------------------------------------------------------------------

    def _send(self, receiver: str, message: messages.Message) -> None:
        """Sends a control message, from the control thread, soon."""
        self._outbox.append((receiver, message))
        self._wake()

    def _open_room(self, receiver: str, message: messages.OpenRoom) -> None:
        """Takes a decode rank's open request: for the room, or until it is opened here."""
        with self._rooms_lock:
            known = self._table.given_to(receiver, message)
            if known is not None:  # also where the receiver is lost by now: nobody else knows whether it is drained
                known.post(OpenRetransmitted(receiver, message.generation))
                return
        attachment, given_up = self._attachment(receiver), self._given_up.get(receiver)
        try:
            if attachment is None:
                # Else it hears of that with its next heartbeat, and loses every room that it opens until then.
                self._send(receiver, messages.Pong(endpoint=self.transport.endpoint_name, attached=False))
                why = "" if given_up is None else f", since it was given up: {given_up.error}"
                raise PeerDisconnectedError(f"{receiver} must attach before it opens rooms{why}")
            elected = attachment.elected(message.room, self.coordinates.group_rank)
            request_of(message, attachment.layout, elected, where=f"room {message.room} on {receiver}")
        except KVFerryError as error:
            self._refuse_open(receiver, message, error)
            rank = self._rank(receiver)
            if rank is not None:  # the room fails there, and nobody will open it here
                self._not_opened(receiver, rank, message.room, message.generation, str(error))
            return
        try:
            with self._rooms_lock:
                room = self._table.open_request(receiver, message, self._now(), rank=_rank_of(attachment))
                if room is not None:
                    room.post(OpenReceived(attachment, message))
        except KVFerryError as error:
            self._refuse_open(receiver, message, error)

    def _refuse_open(self, receiver: str, message: messages.OpenRoom, error: KVFerryError) -> None:
        with self._rooms_lock:
            self._table.refused(receiver, message, error, self._now())
        self._refuse_room(receiver, message, error)

    def _abort_room(self, receiver: str, message: messages.AbortRoom) -> None:
        """Takes back such an open request, and answers when nothing can be written for it any more."""
        with self._rooms_lock:
            room = self._table.abort(receiver, message, self._now())
            if room is not None:
                self._deliver(room, receiver, message)
                return
        self._drained(receiver, message.room, message.generation)

    def _room_refused(self, receiver: str, message: messages.RefuseRoom) -> None:
        """Takes a decode rank's refusal: for the room, or until it is opened here."""
        with self._rooms_lock:
            room = self._table.refused_by(receiver, message, self._now())
            if room is not None:
                room.post(RefusalReceived(receiver, message))

    def _write_failed(self, attachment: Attachment, error: Exception) -> None:
        """A write failed. Where a connection broke, the decode rank is given up: only connecting anew mends it."""
        if isinstance(error, PeerDisconnectedError):
            self._failed_writes.append((attachment, error))
            self._wake()

    def _broken_off(self, receiver: str) -> None:
        """Remembers a decode rank to which a write failed of which something had been sent."""
        with self._rooms_lock:
            self._broken_off_to.pop(receiver, None)
            self._broken_off_to[receiver] = next(self._failure_numbers)
            forget_oldest(self._broken_off_to, _MOST_BROKEN_OFF)

    def _was_broken_off(self, receiver: str) -> bool:
        return receiver in self._broken_off_to

    def _last_failure_to(self, receiver: str) -> int:
        return self._broken_off_to.get(receiver, 0)

    def _forget_room(self, room: SendingRoom) -> None:
        """Drops a room that is done."""
        with self._rooms_lock:
            self._table.remove(room, self._now())

    # ---- the control thread -------------------------------------------------------------------------------------

    def _control(self, *, may_wait: bool) -> bool:
        """One turn of the control thread; whether there will be another."""
        assert self._channel is not None
        wait_ms = self._longest_wait_ms()
        self._longest_wait_s = wait_ms / 1000
        self._channel.wait(wait_ms if may_wait else 0)
        now = self._now()
        for identity, data in self._channel.receive():
            self._receive_one(identity, data, now)
        while self._failed_writes:
            self._connection_broke(*self._failed_writes.popleft())
        self._flush()
        if now >= self._next_tick_at:
            self._next_tick_at = now + _TICK_S
            self._tick(now)
        if self._is_closing_down and self._has_closed():
            return False
        # No decode rank sends any, but connections need progress. Last, since rooms must end also where it fails.
        self.transport.take_notifications()
        return True

    def _longest_wait_ms(self) -> int:
        """Returns how long the control thread may wait, unless a message or `_wake` ends that."""
        if self._is_closing_down or self._now() < self._connecting_until:
            return _CONNECTING_MS
        return _IDLE_MS if self._table.is_quiet else _ROOMS_OPEN_MS

    def _has_closed(self) -> bool:
        """Closes the endpoint once no write is in flight. Returns True when it has."""
        if self.open_rooms:
            return False
        self._workers.stop()
        if self._workers.running:
            return False
        for receiver in (*(peer.name for peer in self._peers.all()), *self._given_up):
            after_failure = self._was_broken_off(receiver)
            self._send(receiver, messages.Closed(endpoint=self.transport.endpoint_name, after_failure=after_failure))
        self._flush()
        self._waker.stop()
        try:
            self._release_memory()
        except Exception as error:  # for `close` to raise
            self._release_error = error
            if self._is_lingering:
                log.exception("what the endpoint had could not be given back")
        return True

    def _wake(self) -> None:
        """Lets the control thread have a turn, soon."""
        assert self._channel is not None
        self._channel.wake()

    @property
    def _has_to_do(self) -> bool:
        """Whether the control thread has anything to do, as long as nothing has come."""
        may_leave = self._is_closing_down and not self.open_rooms
        return bool(self._outbox or self._failed_writes) or self._now() >= self._next_tick_at or may_leave

    def _flush(self) -> None:
        assert self._channel is not None
        while self._outbox:
            receiver, message = self._outbox.popleft()
            try:
                self._channel.send(receiver, messages.encode(message))
            except KVFerryError as error:
                # A closed endpoint misses neither a close message nor the answer to a heartbeat or to a verified room.
                is_moot = isinstance(message, (messages.Closed, messages.Pong, messages.Confirmed))
                level = logging.DEBUG if is_moot else logging.WARNING
                log.log(level, "%s to %s was lost: %s", type(message).__name__, receiver, error)

    def _receive_one(self, identity: str, data: bytes, now: float) -> None:
        try:
            self._receive(identity, data, now)
        except Exception:
            log.exception("a message from %s met an unexpected error; the others go on", identity)

    def _receive(self, identity: str, data: bytes, now: float) -> None:
        try:
            message = messages.decode_to_prefill(data)
        except PeerError as error:
            log.warning("dropped a message from %s: %s", identity, error)
            return
        peer = self._peers.get(identity)
        if peer is not None:
            peer.last_message_at = now
        match message:
            case messages.Hello() if self._is_lingering:
                pass  # the decode rank looks the engine up again, and may find a successor
            case messages.Hello():
                self._send(identity, self._welcome())
            case messages.Attach():
                self._attach(identity, message)
            case messages.Detach() if peer is not None and peer.attempt > message.attempt:
                pass
            case messages.Detach():
                self._given_up.pop(identity, None)
                self._lose(identity, PeerDisconnectedError("it was closed"))
            case messages.Ping():
                attached = peer is not None and peer.attachment is not None and not self._is_lingering
                self._send(identity, messages.Pong(endpoint=self.transport.endpoint_name, attached=attached))
                self._repeat_released(peer)
            case messages.IsGone(process):
                if self._platform.is_gone(process):
                    self._send(identity, messages.Gone(process=process))
            case messages.OpenRoom() | messages.AbortRoom():
                self._room_message(identity, message)
            case messages.RefuseRoom():
                self._take_refusal(identity, message)
            case messages.RoomVerified():
                self._room_verified(identity, message)
            case messages.Credit():
                attachment = self._attachment(identity)
                if attachment is not None:
                    attachment.paths.credited(message.epoch, message.position)

    def _room_message(self, identity: str, message: messages.OpenRoom | messages.AbortRoom) -> None:
        with self._rooms_lock:
            is_unopened = isinstance(message, messages.AbortRoom) and self._table.is_unopened(identity, message)
            is_considered = self._table.is_new(identity, message)
        if isinstance(message, messages.AbortRoom):
            self._abort_room(identity, message)
            if is_unopened:
                self._never_opened(identity, message)
        elif is_considered:
            self._open_room(identity, message)
        else:
            log.debug("dropped a late duplicate of %s's open request for room %d", identity, message.room)

    def _never_opened(self, identity: str, message: messages.AbortRoom) -> None:
        """Takes an abort whose open request did not come, or was dropped, for a refusal."""
        rank = self._rank(identity)
        if rank is not None:
            self._not_opened(identity, rank, message.room, message.generation, message.reason)

    def _not_opened(self, identity: str, rank: DecodeRank, room: int, generation: int, reason: str) -> None:
        """Ends a room that a decode rank will not open, as if it had refused it."""
        refusal = messages.RefuseRoom(
            endpoint=self.transport.endpoint_name,
            engine=rank.engine,
            coordinates=rank.coordinates,
            room=room,
            generation=generation,
            reason=reason,
        )
        with self._rooms_lock:
            is_new = self._table.is_new_refusal(identity, refusal)
        if is_new:  # the same open request may come again
            self._room_refused(identity, refusal)

    def _take_refusal(self, identity: str, message: messages.RefuseRoom) -> None:
        if message.endpoint == self.transport.endpoint_name:  # else it was for an earlier start, which has ended
            with self._rooms_lock:
                is_new = self._table.is_new_refusal(identity, message)
            if is_new:
                self._room_refused(identity, message)
        self._drained(identity, message.room, message.generation)

    def _room_verified(self, identity: str, message: messages.RoomVerified) -> None:
        with self._rooms_lock:
            room = self._table.rooms.get(message.room)
            if room is not None:  # else the room has ended
                room.post(ReceiverVerified(identity, message.generation))
        self._send(
            identity,
            messages.Confirmed(
                endpoint=self.transport.endpoint_name,
                room=message.room,
                generation=message.generation,
                writer=self.engine_rank,
            ),
        )

    def _welcome(self) -> messages.Welcome:
        return messages.Welcome(
            endpoint=self.transport.endpoint_name,
            engine=self.engine,
            coordinates=self.coordinates,
            layout=self.layout,
            transport=self.transport.name,
            process=self._process_identity,
            fingerprint=self.fingerprint,
        )

    def _attach(self, identity: str, message: messages.Attach) -> None:
        problem = self._why_not_attached(identity, message)
        if problem is None:
            self._connecting_until = self._now() + _CONNECTING_S
            self._given_up.pop(identity, None)
            with self._rooms_lock:
                dropped = self._table.attached(identity, message.attempt)
            rank = DecodeRank(message.engine, message.coordinates)
            for room, generation in dropped:
                reason = "it connects anew, and has given up what it had opened"
                self._not_opened(identity, rank, room, generation, reason)
            self._peers.attach(message)
            return
        self._observer.refused(problem)
        refused = messages.Refused(
            endpoint=self.transport.endpoint_name,
            attempt=message.attempt,
            error=type(problem).__name__,
            reason=str(problem),
        )
        self._send(identity, refused)

    def _why_not_attached(self, identity: str, message: messages.Attach) -> KVFerryError | None:
        if message.endpoint != identity:
            return PeerError(f"endpoint {message.endpoint!r} speaks through the connection of {identity!r}")
        if self._is_lingering:
            return EndpointClosedError("the prefill endpoint was closed")
        if self._peers.get(identity) is None and len(self._peers) >= self.settings.max_decode_ranks:
            return PeerError(f"{len(self._peers)} decode ranks are connected already (KVFERRY_MAX_DECODE_RANKS)")
        return None

    def _make_peer(self, name: str, attempt: int, earlier: DecodePeer | None) -> DecodePeer:
        return DecodePeer(
            name,
            self._workers.queue_of(name.encode()),
            attempt=attempt,
            earlier=earlier,
            transport=self.transport,
            layout=self.layout,
            coordinates=self.coordinates,
            staging=self._staging,
            fingerprint=self.fingerprint,
            may_differ=self.settings.fields_that_may_differ,
            send=self._send,
            broken_off=self._broken_off,
            last_failure_to=self._last_failure_to,
            observer=self._observer,
            now=self._now(),
        )

    def _attachment(self, receiver: str) -> Attachment | None:
        """Returns what is prepared for the decode rank of that name; None if it is not connected."""
        peer = self._peers.get(receiver)
        return peer.attachment if peer is not None else None

    def _rank(self, receiver: str) -> DecodeRank | None:
        """Returns which decode rank has that name; None if it has not attached."""
        attachment, given_up = self._attachment(receiver), self._given_up.get(receiver)
        return _rank_of(attachment) if attachment is not None else given_up.rank if given_up is not None else None

    def _repeat_released(self, peer: DecodePeer | None) -> None:
        """Retransmits which spans are released: a connection that broke may have lost it."""
        staged = peer.attachment.paths.staged if peer is not None and peer.attachment is not None else None
        if peer is not None and staged is not None:
            for released in staged.peer.ring.released:
                self._send(peer.name, released_span(self.transport.endpoint_name, staged.peer.epoch, released))

    def _deliver(self, room: SendingRoom, identity: str, message: PendingMessage | messages.RefuseRoom) -> None:
        """Hands a message to its room."""
        if isinstance(message, messages.RefuseRoom):
            room.post(RefusalReceived(identity, message))
            return
        if isinstance(message, messages.AbortRoom):
            room.post(ReceiverAborted(identity, message.generation, message.reason, message.error))
            return
        attachment = self._attachment(identity)
        if attachment is not None:  # else it was lost meanwhile, and waits for no answer
            room.post(OpenReceived(attachment, message))

    def _refuse_room(self, identity: str, message: messages.OpenRoom, error: KVFerryError) -> None:
        self._observer.refused(error)
        self._send(
            identity,
            messages.RoomFailed(
                room=message.room,
                generation=message.generation,
                writer=self.engine_rank,
                error=type(error).__name__,
                reason=str(error),
            ),
        )
        self._drained(identity, message.room, message.generation)

    def _drained(self, identity: str, room: int, generation: int) -> None:
        self._send(
            identity,
            messages.Drained(
                endpoint=self.transport.endpoint_name,
                room=room,
                generation=generation,
                writer=self.engine_rank,
                after_failure=self._was_broken_off(identity),  # in a room of which nothing is known any more
            ),
        )

    def _lose(self, identity: str, error: KVFerryError) -> None:
        """Fails a decode rank's rooms and forgets it."""
        rank = self._rank(identity)
        self._peers.remove(identity)
        with self._rooms_lock:
            rooms, aborts = self._table.forget_receiver(identity, self._now())
        for room in rooms:
            room.post(ReceiverLost(identity, error))
        if rank is not None:
            for message in aborts:
                self._not_opened(identity, rank, message.room, message.generation, message.reason)

    def _connection_broke(self, attachment: Attachment, error: Exception) -> None:
        peer = self._peers.get(attachment.receiver)
        if peer is not None and peer.attachment is attachment:  # else it was given up, or made anew, meanwhile
            self._give_up(peer.name, PeerDisconnectedError(f"the connection for its bytes broke: {error}"))

    def _give_up(self, receiver: str, error: KVFerryError) -> None:
        """Loses a decode rank that may live: the answer to its next heartbeat makes it connect anew."""
        log.error("lost decode rank %s: %s", receiver, error)
        self._observer.peer_lost(receiver, error)
        attachment = self._attachment(receiver)
        self._given_up[receiver] = _GivenUp(_rank_of(attachment) if attachment is not None else None, error)
        forget_oldest(self._given_up, self.settings.max_decode_ranks)
        self._lose(receiver, error)

    def _tick(self, now: float) -> None:
        self._admission.tick()
        with self._rooms_lock:
            expired = self._table.expired(now)
        for room in self._timers.due(now):
            room.post(SenderTick())
        self._unasked.look(now, is_unasked=self._is_unasked, decode_ranks=len(self._peers))
        for receiver, message in expired:
            reason = (
                f"prefill rank {self.engine_rank} was not asked to send room {message.room} within "
                f"{self.settings.bootstrap_timeout_s:g} s (KVFERRY_BOOTSTRAP_TIMEOUT_S)"
            )
            self._refuse_room(receiver, message, UnknownRoomError(reason))
        # While this process was frozen, or had no processor, it received nothing: that does not count as silence.
        late_s = max(0.0, now - self._last_tick_at - self._longest_wait_s - 2 * _TICK_S)
        self._last_tick_at = now
        for peer in self._peers.all():
            peer.last_message_at = min(now, peer.last_message_at + late_s)
            silence_s = now - peer.last_message_at
            peer.report_silence(silence_s, 2 * self.settings.heartbeat_interval_s)
            if silence_s > self.settings.peer_timeout_s:
                silent = f"silent for {silence_s:.1f} s (KVFERRY_PEER_TIMEOUT_S)"
                self._give_up(peer.name, PeerDisconnectedError(silent))

    def _is_unasked(self, room: int) -> bool:
        """Whether a room is open, and no decode rank has opened it."""
        with self._rooms_lock:
            opened = self._table.rooms.get(room)
        return opened is not None and not opened.generations


def _rank_of(attachment: Attachment) -> DecodeRank:
    return DecodeRank(attachment.engine, attachment.coordinates)


class _Control(Loop):
    """The control thread of an endpoint."""

    reads_input = True

    def __init__(self, endpoint: PrefillEndpoint) -> None:
        self._endpoint = endpoint

    def has_work(self) -> bool:
        return self._endpoint._has_to_do

    def turn(self, *, may_wait: bool) -> bool:
        return self._endpoint._control(may_wait=may_wait)
