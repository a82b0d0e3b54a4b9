"""A way to a port that can be cut, held up and healed: between a decode rank and a prefill rank's peer channel."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any

_PIECE_BYTES = 1 << 16
_HEAD_BYTES = 1024
"""As much of what a client says first as its name is looked for in."""


class _Connection:
    """One client, and our connection to the target on its behalf.

    Attributes:
        head: what the client said first.
        is_forgotten: whether the proxy has forgotten it: neither end hears that the other has closed it.
        lost: the ways on which nothing gets through: whether from the client.
    """

    def __init__(self, client: asyncio.StreamWriter, target: asyncio.StreamWriter) -> None:
        self.head = b""
        self.is_forgotten = False
        self.lost: frozenset[bool] = frozenset()
        self._writers = (client, target)

    def end(self) -> None:
        """At once, so that both ends notice."""
        for writer in self._writers:
            writer.transport.abort()


class ControlProxy:
    """Forwards TCP connections to a port of this machine, from a thread of its own.

    Attributes:
        port: where it listens.
        accepted: how many connections it has forwarded.
        target: the port that it forwards to; None refuses everybody. May be set at any time, for connections to come.
    """

    def __init__(self) -> None:
        self.accepted = 0
        self.target: int | None = None
        self._connections: set[_Connection] = set()
        self._is_cut = False
        self._is_hole = False
        self._struck: bytes | None = None  # only clients that call themselves so; None means everybody
        self._loop = asyncio.new_event_loop()
        self._flows = asyncio.Event()
        self._flows.set()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_forever, name="control-proxy", daemon=True)
        self._thread.start()
        self._server = self._do(asyncio.start_server(self._accept, "127.0.0.1", 0))
        self.port = int(self._server.sockets[0].getsockname()[1])

    def __enter__(self) -> ControlProxy:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def cut(self, name: str | None = None) -> None:
        """Ends connections and refuses new ones until healed.

        Args:
            name: only of clients in whose first bytes this stands, as a decode rank's engine does; None means all.
        """
        self._do(self._cut(None if name is None else name.encode()))

    def hold(self, name: str | None = None) -> None:
        """Forwards nothing until healed; nothing is lost, as when a network drops packets. Else as `cut`."""
        self._do(self._hold(None if name is None else name.encode()))

    def forget(self, *, up: bool = True, down: bool = True, is_hole: bool = False) -> None:
        """Drops what comes through the connections of now, for good and without a word; new ones pass.

        As a NAT, a load balancer or connection tracking does that has forgotten a flow: no end hears of it, not even
        that the other one closes its connection.

        Args:
            up: whether what clients say is dropped.
            down: whether what they are told is.
            is_hole: whether new ones are treated alike until healed.
        """
        lost = frozenset(way for way, is_lost in ((True, up), (False, down)) if is_lost)
        self._do(self._forget(lost, is_hole=is_hole))

    def heal(self) -> None:
        """Lets everything through again."""
        self._do(self._heal())

    @property
    def connections(self) -> int:
        """How many there are now."""
        return len(self._connections)

    @property
    def heads(self) -> list[bytes]:
        """What the clients of connections that are not forgotten said first."""
        return [each.head for each in list(self._connections) if not each.is_forgotten]

    def close(self) -> None:
        """Ends everything."""
        self._do(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _cut(self, name: bytes | None) -> None:
        self._is_cut, self._struck = True, name
        for connection in list(self._connections):
            if self._refuses(connection.head):
                connection.end()

    async def _hold(self, name: bytes | None) -> None:
        self._struck = name
        self._flows.clear()

    async def _forget(self, lost: frozenset[bool], *, is_hole: bool) -> None:
        self._is_hole = is_hole
        for connection in self._connections:
            connection.is_forgotten, connection.lost = True, connection.lost | lost

    async def _heal(self) -> None:
        self._is_cut = self._is_hole = False
        self._flows.set()

    async def _close(self) -> None:
        self._server.close()
        self._flows.set()
        self._closing.set()
        for connection in list(self._connections):
            connection.end()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        await asyncio.wait(others, timeout=5) if others else None

    def _is_struck(self, head: bytes) -> bool:
        return self._struck is None or self._struck in head

    def _refuses(self, head: bytes) -> bool:
        return self._is_cut and self._is_struck(head)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if self.target is None or self._refuses(b""):
                raise ConnectionRefusedError
            from_target, to_target = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.transport.abort()
            return
        connection = _Connection(writer, to_target)
        if self._is_hole:
            connection.is_forgotten, connection.lost = True, frozenset((True, False))
        self._connections.add(connection)
        self.accepted += 1
        try:
            await asyncio.gather(
                self._forward(connection, reader, to_target, is_client=True),
                self._forward(connection, from_target, writer, is_client=False),
            )
        finally:
            self._connections.discard(connection)

    async def _forward(
        self, connection: _Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_client: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while piece := await reader.read(_PIECE_BYTES):
                if is_client and len(connection.head) < _HEAD_BYTES:
                    connection.head += piece
                if self._is_struck(connection.head):
                    await self._flows.wait()
                if self._refuses(connection.head):
                    break
                if is_client in connection.lost:
                    continue
                writer.write(piece)
                await writer.drain()
        if connection.is_forgotten:
            await self._closing.wait()
        connection.end()
