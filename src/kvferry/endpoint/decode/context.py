"""What all parts of a decode endpoint share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvferry.control.ends import ConnectingEnd
from kvferry.control.registry_client import RegistryClient
from kvferry.endpoint.runtime.platform import Platform
from kvferry.endpoint.runtime.settling import Settling
from kvferry.observe.observer import Observer
from kvferry.protocol.wire.rank_identity import Identity
from kvferry.settings import Settings
from kvferry.staging.receiving import ReceivingStaging
from kvferry.transport import Transport


@dataclass(frozen=True, slots=True)
class DecodeContext:
    """What a decode endpoint was made with, and what its driver has for the rest.

    Attributes:
        identity: who it is, to its peers.
        transport: takes what arrives.
        registry: where prefill engines are looked up.
        settings: what it was made with.
        staging: the memory that prefill ranks write to.
        end: what connections are made with.
        settling: counts the time in which what failed writes had sent may arrive here.
        platform: the machine.
        observer: notified of what happens.
        submit: runs work soon, on the endpoint's thread, with the time as its argument. From any thread.
    """

    identity: Identity
    transport: Transport
    registry: RegistryClient
    settings: Settings
    staging: ReceivingStaging
    end: ConnectingEnd
    settling: Settling
    platform: Platform
    observer: Observer
    submit: Callable[[Callable[[float], None]], None]

    @property
    def thread_name(self) -> str:
        """The name of the endpoint's thread, with which those of the others begin."""
        return f"kvferry-decode-{self.identity.coordinates.engine_rank}"
