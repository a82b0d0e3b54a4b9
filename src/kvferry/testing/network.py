"""Endpoints of one process that find and reach one another: for an engine's tests, without NIXL and without a GPU."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from kvferry.control.registry_server import RegistryServer
from kvferry.endpoint import DecodeEndpoint, PrefillEndpoint, Receiver
from kvferry.endpoint.runtime.platform import SystemPlatform
from kvferry.errors import RegistryAccessError, RegistryError
from kvferry.pools.contents import Contents, KnownContents
from kvferry.pools.pool import Pool
from kvferry.settings import Settings
from kvferry.testing.transports import FaultyTransport
from kvferry.transport import InProcessNetwork, Transport

WAIT_S = 60.0
"""How long a test waits for what should take milliseconds: only a failure takes as long, however busy the machine."""

_LOOK_S = 0.05

_FAST: dict[str, Any] = {
    "workers": 2,
    "queues": 2,
    "nixl_threads": 1,
    "gather_workers": 1,
    "scatter_workers": 0,
    "path": "direct",
    "staging_ring_mib": 2.0,
    "staging_chunk_mib": 0.5,
}
"""Settings with which an endpoint starts in milliseconds: few threads, as many on any machine, little memory, and
nothing that is measured first."""


class LocalNetwork:
    """What endpoints of one process need to find and reach one another: a registry, and a network of transports.

    It closes the endpoints that it started, the last first, and the registry in the end. Use it as a context manager,
    or call `close`.

    Attributes:
        transports: connects the transports.
    """

    def __init__(self, registry_url: str | None = None, **settings: Any) -> None:
        """Starts nothing yet.

        Args:
            registry_url: of a registry that runs already; None starts one on a free port when it is first needed.
            settings: of all endpoints, over those that make them start fast.
        """
        self.transports = InProcessNetwork()
        self._platform = SystemPlatform()  # of all endpoints, so that they share a client of the registry
        self._registry_url = registry_url
        self._settings = {**_FAST, **settings}
        self._pools: list[Pool] = []
        self._resources = ExitStack()

    def __enter__(self) -> LocalNetwork:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the endpoints, the last first, and the registry. May be called again."""
        self._resources.close()

    @property
    def registry_url(self) -> str:
        """Where the registry answers."""
        if self._registry_url is None:
            self._registry_url = self._resources.enter_context(RegistryServer(port=0)).url
        return self._registry_url

    def settings(self, **changed: Any) -> Settings:
        """Settings for an endpoint of the network, for engines that make their endpoints themselves."""
        return Settings(**{"registry_url": self.registry_url, **self._settings, **changed})

    def transport(self) -> FaultyTransport:
        """Makes a transport of the network, for engines that make their endpoints themselves."""
        return FaultyTransport(self.transports)

    def prefill(
        self,
        pool: Pool,
        *,
        engine: str = "prefill",
        transport: Transport | None = None,
        fingerprint: Mapping[str, str] | None = None,
        instance: str | None = None,
        **settings: Any,
    ) -> PrefillEndpoint:
        """Starts a prefill rank, and waits until decode ranks can find it.

        Args:
            pool: its memory, which lives as long as the network.
            engine: the engine's name.
            transport: made by `transport` if None.
            fingerprint: what its caches are beyond their layout.
            instance: the name of this start of the engine.
            settings: of this endpoint, over those of the network.

        Raises:
            RegistryAccessError: if the registry refuses it.
            RegistryError: if the registry does not take it in time.
        """
        endpoint = PrefillEndpoint(
            pool.layout,
            engine=engine,
            coordinates=pool.coordinates,
            settings=self.settings(**settings),
            transport=transport or self.transport(),
            fingerprint=fingerprint,
            instance=instance,
            platform=self._platform,
        )
        self._keep(endpoint, pool)
        deadline = time.monotonic() + WAIT_S
        while not endpoint.wait_registered(_LOOK_S):
            error = endpoint.registry_error
            if isinstance(error, RegistryAccessError):
                raise error
            if time.monotonic() > deadline:
                raise RegistryError(f"a prefill rank is not registered after {WAIT_S:g} s: {error}") from error
        return endpoint

    def decode(
        self,
        pool: Pool,
        *,
        engine: str = "decode",
        transport: Transport | None = None,
        fingerprint: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> DecodeEndpoint:
        """Starts a decode rank.

        Args:
            pool: its memory, which lives as long as the network.
            engine: the engine's name.
            transport: made by `transport` if None.
            fingerprint: what its caches are beyond their layout.
            settings: of this endpoint, over those of the network.
        """
        endpoint = DecodeEndpoint(
            pool.layout,
            engine=engine,
            coordinates=pool.coordinates,
            settings=self.settings(**settings),
            transport=transport or self.transport(),
            fingerprint=fingerprint,
            platform=self._platform,
        )
        self._keep(endpoint, pool)
        return endpoint

    def pair(self, prefill: Pool, decode: Pool, **settings: Any) -> Pair:
        """Starts a prefill and a decode rank.

        Args:
            prefill: the memory of one.
            decode: the memory of the other.
            settings: of both, over those of the network.
        """
        transports = self.transport(), self.transport()
        return Pair(
            prefill=self.prefill(prefill, transport=transports[0], **settings),
            decode=self.decode(decode, transport=transports[1], **settings),
            prefill_pool=prefill,
            decode_pool=decode,
            prefill_transport=transports[0],
            decode_transport=transports[1],
        )

    def _keep(self, endpoint: PrefillEndpoint | DecodeEndpoint, pool: Pool) -> None:
        self._pools.append(pool)  # memory must outlive the endpoints
        self._resources.callback(endpoint.close)


@dataclass(frozen=True, slots=True)
class Pair:
    """A prefill and a decode endpoint, the only ranks of their engines, and what they stand on."""

    prefill: PrefillEndpoint
    decode: DecodeEndpoint
    prefill_pool: Pool
    decode_pool: Pool
    prefill_transport: FaultyTransport
    decode_transport: FaultyTransport

    def transfer(
        self, room: int, *, tokens: int, prefix_tokens: int = 0, aux: bytes = b"", contents: Contents | None = None
    ) -> Receiver:
        """Sends a request from pages of the one pool to pages of the other, and checks every byte of the other.

        Args:
            room: the request's number.
            tokens: how many it has.
            prefix_tokens: of those, how many the decode side has already, in pages that nobody looks at.
            aux: what the prefill side sends along.
            contents: what the request holds; made up from the room's number if None.

        Raises:
            KVFerryError: what the transfer failed with, if it did.
            AssertionError: if a byte is not what was to arrive, or changed though nobody was to write there.
        """
        contents = contents or KnownContents(room)
        source = self.prefill_pool.pages_for(tokens, whole_windows=True)
        destination = self.decode_pool.pages_for(tokens, prefix_tokens=prefix_tokens)
        self.prefill_pool.fill(contents, source, tokens=tokens)
        self.decode_pool.mark()
        receiver = self.decode.open(
            room, destination, engine=self.prefill.engine, prefix_tokens=prefix_tokens, tokens=tokens
        )
        sender = self.prefill.open(room, tokens=tokens)
        sender.submit(source, last=True, aux=aux)
        receiver.wait(WAIT_S)
        sender.wait(WAIT_S)
        self.decode_pool.check(contents, destination, tokens=tokens, prefix_tokens=prefix_tokens)
        return receiver
