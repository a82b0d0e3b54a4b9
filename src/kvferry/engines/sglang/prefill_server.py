"""What a decode rank has looked up of prefill servers, and its connections to them."""

from __future__ import annotations

import math
from collections.abc import Callable, MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any

import msgspec
from sglang.srt.disaggregation.common.conn import PrefillServerInfo
from sglang.srt.utils.network import NetworkAddress

from kvferry import DecodeEndpoint, Settings
from kvferry.engines.sglang.directory import Directory, ask, get, registry_url
from kvferry.engines.sglang.look_ups import LookUps
from kvferry.errors import IncompatiblePeerError, RegistryError, RegistryUnreachableError, UsageError, quoted

_ANY_RANK = "prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"
_MOST_RANKS = 4096
_ANSWER = msgspec.json.Decoder(dict[str, Any])


@dataclass(frozen=True, slots=True)
class PrefillServer:
    """What a decode rank has looked up of a prefill server.

    Attributes:
        engine: its name; empty if it does not run kvferry.
        info: what its bootstrap server says of it.
        refusal: why the two cannot work together; None if they can.
    """

    engine: str
    info: PrefillServerInfo
    refusal: str | None

    @property
    def is_divided(self) -> bool:
        """Whether one of its tensor-parallel ranks has a part of the layers, or of a request's pages, alone."""
        return self.info.pp_size > 1 or getattr(self.info, "enable_kv_cache_sharding", False)

    def http_url(self, address: str) -> str | None:
        """Returns where it takes requests, by its bootstrap server's address; None if it does not say."""
        port = getattr(self.info, "prefill_http_port", None)
        return None if port is None else str(NetworkAddress(NetworkAddress.parse(address).host, port).to_url())


def described(bootstrap_address: str) -> PrefillServerInfo:
    """Requests what a prefill server's bootstrap server says of it. What this SGLang has no field for is ignored.

    Raises:
        RegistryUnreachableError: if nothing answers.
        RegistryError: if the server is not ready, or does not say what this SGLang must know.
    """
    answer = get(bootstrap_address, f"/route?{_ANY_RANK}")
    if answer.status != 200:
        said = quoted(RegistryError(answer.body[:200].decode(errors="replace")))
        raise RegistryError(
            f"the bootstrap server at {bootstrap_address} is not ready (status {answer.status}): {said}"
        )
    try:
        told = _ANSWER.decode(answer.body)
        info = PrefillServerInfo(
            **{each.name: told[each.name] for each in fields(PrefillServerInfo) if each.name in told}
        )
        ranks = (info.attn_tp_size, info.attn_cp_size, info.dp_size, info.pp_size)
        if min(ranks) < 1 or math.prod(ranks) > _MOST_RANKS:
            raise ValueError(f"it has {' x '.join(map(str, ranks))} ranks")
        return info
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
        problem = quoted(error)
        raise RegistryError(
            f"what the bootstrap server at {bootstrap_address} says of its server is not understood: {problem}; is it "
            "another SGLang than this one?"
        ) from error


class PrefillServers:
    """The prefill servers that a decode rank knows, by their bootstrap addresses.

    Attributes:
        directory: finds their ranks.
    """

    def __init__(
        self,
        settings: Settings,
        found: MutableMapping[str, PrefillServerInfo],
        abort_stock: Callable[[str, PrefillServerInfo, int, int], None],
        refusal: Callable[[PrefillServerInfo, str], str | None],
    ) -> None:
        """Knows none yet.

        Args:
            found: gets what bootstrap servers say, by address.
            abort_stock: tells a server without kvferry that a room will not be opened. May block.
            refusal: returns why a server at an address cannot be worked with; None if it can.
        """
        self._settings = settings
        self._found = found
        self._abort_stock, self._refusal = abort_stock, refusal
        self._servers: dict[str, PrefillServer] = {}
        self._connections: dict[tuple[str, int], Future[None]] = {}  # by engine and data-parallel rank
        self._stock_aborts = ThreadPoolExecutor(1, "kvferry-sglang-stock")
        self.directory = Directory(settings, lost=self.forget)
        self._look_ups = LookUps(self._look_up, found)
        self._decode: DecodeEndpoint | None = None

    def serve(self, decode: DecodeEndpoint) -> None:
        """Takes the endpoint that connects to them, which is made with the directory."""
        self._decode = decode

    def begin_anew(self) -> None:
        """Looks each up again, before an endpoint takes the place of the one that was.

        Where the engines were registered is known meanwhile, to requests that came while there was no endpoint.
        """
        self._look_ups.close()
        earlier, self.directory = self.directory, Directory(self._settings, lost=self.forget)
        self.directory.add_all(earlier)
        self._found.clear()
        self._connections.clear()
        self._look_ups = LookUps(self._look_up, self._found)

    def close(self) -> None:
        """Looks none up any more."""
        self._look_ups.close()
        self._stock_aborts.shutdown(wait=False, cancel_futures=True)

    def is_found(self, address: str) -> bool:
        """Whether a server was looked up; if not, that is done in the background."""
        return self._look_ups.is_found(address)

    def get(self, address: str) -> PrefillServer | None:
        """Returns what was looked up of a server; None if nothing was."""
        return self._servers.get(address)

    def page_tokens(self, address: str) -> int | None:
        """Returns how many tokens are in the pages of a server that was looked up; None if it does not say."""
        page_tokens: int | None = self._servers[address].info.page_size
        return page_tokens

    def why_not_found(self, address: str, since: float, now: float) -> str | None:
        """Returns why a request that has waited for a server since then should wait no longer; None if it should."""
        problem, longest_s = self._look_ups.problem(address, since), self._settings.bootstrap_timeout_s
        if now - since < (longest_s if problem is None else problem.wait_s(longest_s)):
            return None
        if address in self._found:
            return (
                f"the prefill server at {address} was found, and has not said within {now - since:.1f} s which of its "
                "data-parallel ranks has the request's room: was the request sent to it, too?"
            )
        reason = problem.error if problem is not None else "it has not answered yet"
        return f"the prefill server at {address} was not found within {now - since:.1f} s: {reason}"

    def connection(self, engine: str, dp_rank: int) -> Future[None]:
        """Returns what has a result once the ranks of a prefill engine are connected, and an error if they cannot be.

        Raises:
            KVFerryError: as `DecodeEndpoint.connecting`.
        """
        assert self._decode is not None
        key = engine, dp_rank
        known = self._connections.get(key)
        if known is None or (known.done() and known.exception() is not None):
            known = self._connections[key] = self._decode.connecting(engine, prefill_dp_rank=dp_rank)
        return known

    def engine_at(self, address: str) -> str:
        """Returns the name of the prefill engine behind a bootstrap server.

        Raises:
            IncompatiblePeerError: if the two servers cannot work together.
        """
        server = self._servers[address]
        if server.refusal is not None:
            self.forget(address)  # it may come back with other options
            raise IncompatiblePeerError(server.refusal)
        return server.engine

    def check_dp_rank(self, address: str, dp_rank: int) -> None:
        """Checks the data-parallel rank that a request names of a server that was looked up.

        Raises:
            UsageError: if there is none of that number.
        """
        ranks = self._servers[address].info.dp_size
        if not 0 <= dp_rank < ranks:
            raise UsageError(
                f"disagg_prefill_dp_rank {dp_rank} is none of the {ranks} data-parallel ranks of the prefill server at "
                f"{address}: a request must name one from 0 to {ranks - 1}, or none"
            )

    def refuse(self, address: str, room: int, prefill_dp_rank: int, reason: str) -> None:
        """Tells a prefill server that was looked up that a room will not be opened here.

        Args:
            prefill_dp_rank: the data-parallel group there that has the request.
        """
        server = self._servers.get(address)
        if server is not None and not server.engine:
            self._stock_aborts.submit(self._abort_stock, address, server.info, room, prefill_dp_rank)
        elif server is not None and self._decode is not None:
            self._decode.refuse(room, reason, engine=server.engine, prefill_dp_rank=prefill_dp_rank)

    def forget(self, address: str) -> None:
        """Makes the next request look a server up again: another one may have come in its place."""
        self._found.pop(address, None)
        server = self._servers.get(address)
        for key in list(self._connections):
            if server is not None and key[0] == server.engine:
                self._connections.pop(key, None)

    def _look_up(self, address: str) -> PrefillServerInfo:
        """Looks up the prefill server behind a bootstrap server. Runs in the background."""
        engine, refusal = "", None
        try:
            announcement = ask(address)
        except RegistryUnreachableError:
            raise
        except RegistryError as error:
            try:
                info = described(address)
            except RegistryError:
                raise error from None
            refusal = str(error)  # a server of SGLang's, without kvferry
        else:
            assert self._decode is not None
            engine, info = announcement.engine, described(address)
            self.directory.add(engine, registry_url(address, announcement, self._decode.settings), address)
        self._servers[address] = PrefillServer(engine, info, refusal or self._refusal(info, address))
        return info
