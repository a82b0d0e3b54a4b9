"""The prefill side's shell: binds protocol, plan, transport and control together for one rank."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import SupportsIndex

from kvferry.endpoint.base import Endpoint
from kvferry.endpoint.construction import checked_room
from kvferry.endpoint.prefill.driver import PrefillDriver, Registration
from kvferry.endpoint.runtime.platform import Closing, Platform
from kvferry.endpoint.transfer import Sender
from kvferry.layout import RankCoordinates, RankLayout
from kvferry.loggers import logger_of
from kvferry.observe.status import EndpointStatus, Side
from kvferry.settings import Settings
from kvferry.transport import Transport

log = logger_of(__name__)


class PrefillEndpoint(Endpoint):
    """One rank of a prefill engine: sends the caches of requests to whichever decode ranks ask for them.

    Threads of its own move bytes and messages; `open`, `Sender.submit` and reading a state never do I/O. The object is
    a context manager, and its methods may be called from any thread.

    Attributes:
        control_address: where decode ranks reach it.
        registry_url: where the registry is that it announces itself to: its own, if it runs one.
        instance: the name of this start of the engine; None if it was given none.
    """

    _side = Side.PREFILL
    _driver: PrefillDriver
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
        announces: bool = True,
        instance: str | None = None,
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
            announces: whether decode ranks may find this rank, and attach to it, from now on; otherwise from
                `announce` on. Attaching copies on the pool's device and looks at events there, on other threads: an
                engine that captures CUDA graphs waits until it has.
            instance: names this start of the engine, the same on all its ranks: visible ASCII, at most 128 characters.
                A decode side that is told it with a request (`DecodeEndpoint.open`) need not wait where the engine was
                started anew since. None names none.
            platform: the machine; this one if None.

        Raises:
            LayoutError: if layout and coordinates disagree on context parallelism, or a field of the fingerprint is
                impossible.
            SettingsError: if a setting is impossible, no engine or instance can have that name, or a port is taken.
            TransportError: if the transport is missing or the memory cannot be registered.
        """
        super().__init__(layout, engine, coordinates, settings, transport, fingerprint, platform)
        self.instance = instance
        hosts = self.engine_rank == 0 and self.settings.registry_url is None if host_registry is None else host_registry
        with ExitStack() as undo:
            undo.callback(self.transport.close)
            self._registration = Registration(self.settings, self._platform, instance, hosts_registry=hosts)
            undo.callback(self._registration.close)
            self._driver = PrefillDriver(
                self._identity,
                self.transport,
                self.settings,
                platform=self._platform,
                observer=self._telemetry.observer,
                registration=self._registration,
            )
            undo.pop_all()
        self._start(announces=announces)

    def _start(self, *, announces: bool) -> None:
        """Lets others see it, and find it; closes it where that fails."""
        self.registry_url = self._registration.registry_url
        self.control_address = self._driver.channel.address
        with ExitStack() as undo:
            undo.callback(self.close)
            log.info(
                "prefill rank %d of %r: decode ranks are told %s", self.engine_rank, self.engine, self.control_address
            )
            self._telemetry.start()
            if announces:
                self.announce()  # last: whoever finds it is served
            undo.pop_all()

    def announce(self) -> None:
        """Lets decode ranks find this rank, unless they can already. Returns at once."""
        self._registration.announce(self._identity, self.control_address, self._drain_by_order)

    def wait_registered(self, timeout_s: float) -> bool:
        """Waits until this rank is registered; False if it is not after timeout_s. See `registry_error`."""
        return self._registration.wait(timeout_s)

    @property
    def registry_error(self) -> Exception | None:
        """Why this rank could not be registered, or its lease renewed; None if there was no problem."""
        return self._registration.error

    def status(self) -> EndpointStatus:
        """Returns a snapshot of the endpoint, for people and tools."""
        now, error, staging = self._platform.now(), self._registration.error, self._driver.staging
        return self._status(
            now,
            problem=f"not registered: {error}" if error is not None else "",
            address=self.control_address,
            rooms=self._driver.rooms.all(),
            peers=[peer.status(now) for peer in self._driver.ranks.peers()],
            staging=staging,
            pending_rooms=self._driver.rooms.table.num_pending,
            bytes_in_flight=self._driver.context.admission.num_bytes + staging.used_bytes,
        )

    def _go_on_draining(self) -> None:
        self._driver.drain()
        self._driver.wake()

    @property
    def _not_found(self) -> str:
        if self._registration.is_registered:
            return ""
        error = self._registration.error
        return f"not registered: {error or 'the registry has not answered yet'}"

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
                transfer failed before every decode rank had opened it, the number rests for bootstrap_timeout_s more;
                after one that succeeded, other decode ranks that open it are refused until it is open here again.
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
            EndpointDrainingError: if the endpoint drains, and no decode rank has opened the room here; or if another
                start of the rank has registered in its place.
            EndpointClosedError: if the endpoint was closed.
        """
        self._check_process()
        sender = None
        try:
            opened = self._driver.rooms.made(checked_room(room), tokens, share_tokens, depends_on)
            sender = opened.sender
            self._driver.rooms.add(opened)
            return sender
        except BaseException as error:
            self._not_opened(sender, error)
            raise

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
        self._check_process()
        self._driver.rooms.refuse(checked_room(room), reason)

    def sender(self, room: int) -> Sender:
        """Returns the open transfer of that number.

        Raises:
            UnknownRoomError: if there is none, or it has ended.
        """
        return self._driver.rooms.sender(room)

    def _closing(self) -> Closing:
        self._driver.rooms.close()
        deadline = self._platform.now() + self.settings.close_timeout_s
        try:
            yield lambda: not self.open_rooms, deadline
        finally:  # also when the thread that closes is interrupted
            self._registration.leave()  # before the close message, so that no decode rank connects anew
            self._driver.close_down()
        yield from self._driver.closing(deadline)
        self._registration.close()
        self._telemetry.close()
        self._driver.raise_release_error()
