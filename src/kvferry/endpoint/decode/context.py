"""What all parts of a decode endpoint share."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.control.ends import ConnectingEnd
from kvferry.control.registry import Registry
from kvferry.endpoint.runtime.callers_code import Callbacks
from kvferry.endpoint.runtime.platform import Platform
from kvferry.endpoint.runtime.workers import Settling
from kvferry.observe.records import Observer
from kvferry.protocol.wire.field_types import Identity
from kvferry.settings import Settings
from kvferry.staging.receiving import ReceivingStaging
from kvferry.transport import Transport


@dataclass(kw_only=True, eq=False, slots=True)
class DecodeContext:
    """What a decode endpoint was made with, its end of the peer channel, and the way to its thread.

    Attributes:
        identity: who it is, to its peers; its fingerprint may be renewed.
        transport: takes what arrives.
        registry: where prefill engines are looked up.
        staging: the memory that prefill ranks write to.
        observer: notified of what happens.
        callbacks: calls the caller back when transfers change.
        end: what connections are made with.
        settling: counts the time in which what failed writes had sent may arrive here.
        inbox: work for the endpoint's thread, which calls it with the time.
    """

    identity: Identity
    transport: Transport
    registry: Registry
    settings: Settings
    staging: ReceivingStaging
    platform: Platform
    observer: Observer
    callbacks: Callbacks = field(init=False)
    end: ConnectingEnd = field(init=False)
    settling: Settling = field(init=False)
    inbox: deque[Callable[[float], None]] = field(init=False, default_factory=deque)

    def __post_init__(self) -> None:
        self.callbacks = Callbacks(self.platform, self.thread_name)
        self.end = self.platform.connect_as(self.identity.endpoint, self.settings)
        self.settling = Settling(self.settings.quarantine_s, self.platform.now)

    @property
    def thread_name(self) -> str:
        """The name of the endpoint's thread, with which those of the others begin."""
        return f"kvferry-decode-{self.identity.coordinates.engine_rank}"

    def submit(self, work: Callable[[float], None]) -> None:
        """Runs work soon, on the endpoint's thread, with the time as its argument. May be called from any thread."""
        self.inbox.append(work)
        self.end.wake()
