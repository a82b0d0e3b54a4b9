"""Servers with SGLang's own NIXL that have found one with kvferry are told, and need not wait.

A decode server finds the ranks through the bootstrap server, which is SGLang's, and pushes each request's pages to the
ZMQ socket that SGLang's manager opens on every rank. Nothing can cross, so it is answered as by a prefill rank of
SGLang's own that has failed, in words. This rank's room of that number ends as well, unless there is a secret: who
sends here has proven nothing. A room that a decode rank has opened goes on in any case.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from ipaddress import ip_address
from itertools import product
from typing import Any

import msgspec
import zmq
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import ABORT_TAG, PrefillServerInfo
from sglang.srt.utils.network import NetworkAddress

from kvferry.engines.sglang.directory import get
from kvferry.loggers import logger_of

log = logger_of(__name__)

_GUARD = b"NixlMsgGuard"
_STATUS = b"KV_STATUS"
_MOST_EARLY = 4096
_MOST_LOGGED = 256
_LINGER_MS = 1000


class StockPeers:
    """Answers on a thread of its own, which has the socket."""

    def __init__(self, context: Any, socket: Any, keep_s: float, end: Callable[[int, str], bool] | None) -> None:
        """Starts to listen.

        Args:
            socket: its PULL socket, which nobody else uses.
            keep_s: how long the number of a room is kept that SGLang has not opened here yet.
            end: ends this rank's room, if it is here; returns whether it is. None where such peers may end none.
        """
        self._context, self._socket, self._keep_s, self._end = context, socket, keep_s, end
        self._lock = threading.Lock()  # guards `_early`: the scheduler's thread takes from it
        self._early: dict[int, tuple[str, float]] = {}  # why rooms will fail that are not open yet, and until when
        self._logged: set[str] = set()
        self._stop, self._stopped = (context.socket(zmq.PAIR) for _ in range(2))
        self._stopped.bind(f"inproc://{id(self)}")
        self._stop.connect(f"inproc://{id(self)}")
        self._thread = threading.Thread(target=self._listen, name="kvferry-sglang-stock", daemon=True)
        self._thread.start()

    def take(self, room: int) -> str | None:
        """Returns why a room that was opened just now must fail; None if it need not."""
        with self._lock:
            reason, until = self._early.pop(room, (None, 0.0))
        return reason if time.monotonic() < until else None

    def close(self) -> None:
        if self._thread.is_alive():
            self._stop.send(b"")
            self._thread.join()

    def _listen(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._stopped, zmq.POLLIN)
        while (ready := dict(poller.poll())) and self._stopped not in ready:
            frames = self._socket.recv_multipart()
            try:
                self._answer(frames)
            except Exception as error:  # whatever strangers send, the thread goes on
                log.debug("a message to SGLang's port was not understood: %s", error)

    def _answer(self, frames: list[bytes]) -> None:
        if len(frames) < 4 or frames[0] != _GUARD or frames[1] == b"None":  # None: it introduces itself
            return
        room, host, port = int(frames[1]), str(ip_address(frames[2].decode())), int(frames[3])
        reason = (
            f"the decode server at {host} uses SGLang's own nixl, and the prefill server kvferry: give both the same "
            "--disaggregation-transfer-backend, and where that is nixl, KVFERRY_SGLANG_REPLACES_NIXL=1 to both or none"
        )
        if host not in self._logged and len(self._logged) < _MOST_LOGGED:
            self._logged.add(host)
            log.error("requests fail: %s", reason)
        status = str(int(KVPoll.Failed)).encode()
        # Any rank's number does: one that has failed fails the room.
        _send(self._context, host, port, [_STATUS, frames[1], status, b"0", reason.encode()])
        if self._end is None:
            return
        with self._lock:
            self._early[room] = reason, time.monotonic() + self._keep_s
            while len(self._early) > _MOST_EARLY:
                del self._early[next(iter(self._early))]
        if self._end(room, reason):
            self.take(room)


def abort(context: Any, bootstrap_address: str, info: PrefillServerInfo, room: int, dp_rank: int) -> None:
    """Tells the ranks of a prefill server without kvferry that a room ends. One that has not got it yet ignores that.

    Args:
        info: what its bootstrap server says of it.
        dp_rank: the data-parallel group there that has the room.

    Raises:
        RegistryUnreachableError: if the bootstrap server does not answer any more.
    """
    for cp, tp, pp in product(range(info.attn_cp_size), range(info.attn_tp_size), range(info.pp_size)):
        which = f"prefill_dp_rank={dp_rank}&prefill_cp_rank={cp}&target_tp_rank={tp}&target_pp_rank={pp}"
        answer = get(bootstrap_address, f"/route?{which}")
        if answer.status == 200:
            rank = _RANK.decode(answer.body)
            _send(context, rank.rank_ip, rank.rank_port, [ABORT_TAG, str(room).encode()])


class _Rank(msgspec.Struct):
    rank_ip: str
    rank_port: int


_RANK = msgspec.json.Decoder(_Rank)


def _send(context: Any, host: str, port: int, frames: Sequence[bytes]) -> None:
    there = NetworkAddress(host, port)
    with context.socket(zmq.PUSH) as socket:
        socket.linger = _LINGER_MS
        socket.setsockopt(zmq.IPV6, there.is_ipv6)
        socket.connect(there.to_tcp())
        socket.send_multipart(frames, zmq.NOBLOCK)
