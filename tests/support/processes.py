"""Ranks in processes of their own, over the real transport, told what to do through a pipe."""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import multiprocessing.context
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from tests.support import broken_wire
from tests.support.caches import Model, Shape, pool
from tests.support.commands import kvferry
from tests.support.gates import Gates
from tests.support.hosts import Host, enter
from tests.support.real_transport import PRELOADED
from tests.support.resources import Resources, resources
from tests.support.waiting import PATIENCE_S, eventually

from kvferry import DecodeEndpoint, PrefillEndpoint, RankCoordinates, Receiver, Sender, Settings
from kvferry.errors import KVFerryError
from kvferry.plan.packing import BlockShape
from kvferry.staging.kernels import StartArray
from kvferry.testing import KnownContents, Pool
from kvferry.testing.probe import probe

Pages: TypeAlias = list[int]

ANSWER_S = 90.0
"""How long a process has for one answer."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a process says to a question.

    Attributes:
        value: the result; None if it failed.
        error: the exception's type and text, if it failed.
        error_type: its type's name.
    """

    value: Any = None
    error: str | None = None
    error_type: str | None = None


@dataclass(frozen=True, slots=True)
class End:
    """How a transfer ended.

    Attributes:
        state: its name; of one that has not ended, where it stands.
        error: the exception's type and text, if it failed.
    """

    state: str
    error: str = ""


class _Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


class Rank:
    """What runs in the process: one endpoint at a time."""

    def __init__(self) -> None:
        self.pool: Pool | None = None
        self.endpoint: PrefillEndpoint | DecodeEndpoint | None = None
        self.transfers: dict[int, tuple[Sender | Receiver, Pages]] = {}
        self.prefixes: dict[int, int] = {}
        self.gates = Gates()
        self._log = _Lines()
        logging.getLogger("kvferry").addHandler(self._log)

    def start_prefill(
        self,
        model: Model,
        shape: Shape,
        coordinates: RankCoordinates,
        engine: str,
        settings: dict[str, Any],
        *,
        is_registered: bool = True,
    ) -> None:
        """Starts it, and waits until the registry knows it unless told otherwise."""
        self.stop()
        self.pool = pool(model, shape, coordinates)
        endpoint = PrefillEndpoint(
            self.pool.layout, engine=engine, coordinates=coordinates, settings=Settings(**{"workers": 2} | settings)
        )
        self.endpoint = endpoint
        if is_registered:
            assert endpoint.wait_registered(ANSWER_S / 2), endpoint.registry_error

    def start_decode(
        self, model: Model, shape: Shape, coordinates: RankCoordinates, engine: str, settings: dict[str, Any]
    ) -> None:
        self.stop()
        self.pool = pool(model, shape, coordinates)
        self.endpoint = DecodeEndpoint(
            self.pool.layout, engine=engine, coordinates=coordinates, settings=Settings(**settings)
        )

    def send(self, room: int, pages: Pages, ends: list[int], *, is_complete: bool = True) -> None:
        """Fills the pages and submits them in chunks that end at `ends`; the request goes on if not complete."""
        assert isinstance(self.endpoint, PrefillEndpoint)
        assert self.pool is not None
        self.pool.fill(KnownContents(room), pages)
        sender = self.endpoint.open(room)
        self.transfers[room] = sender, pages
        start = 0
        for end in ends:
            is_last = is_complete and end == ends[-1]
            sender.submit(np.array(pages[start:end]), last=is_last, aux=b"token %d" % room if is_last else None)
            start = end

    def receive(self, room: int, pages: Pages, engine: str, *, prefix_tokens: int = 0) -> None:
        """Asks for what lies behind the prefix; the pages begin with the one that holds the prefix's last tokens."""
        assert isinstance(self.endpoint, DecodeEndpoint)
        receiver = self.endpoint.open(room, np.array(pages), engine=engine, prefix_tokens=prefix_tokens)
        self.transfers[room] = receiver, pages
        self.prefixes[room] = prefix_tokens

    def wait(self, room: int) -> int:
        """Waits for a transfer; returns how many bytes of it are wrong."""
        transfer, pages = self.transfers[room]
        transfer.wait(ANSWER_S / 2)
        assert self.pool is not None
        prefix_tokens = self.prefixes.get(room, 0)
        if isinstance(transfer, Receiver):
            assert transfer.aux == b"token %d" % room
        wrong = self.pool.wrong_bytes(KnownContents(room), pages, prefix_tokens=prefix_tokens, elsewhere=False)
        return sum(each.num_bytes for each in wrong)

    def open_sender(self, room: int, pages: Pages) -> None:
        """Fills the pages and opens the room, without submitting anything."""
        assert isinstance(self.endpoint, PrefillEndpoint)
        assert self.pool is not None
        self.pool.fill(KnownContents(room), pages)
        self.transfers[room] = self.endpoint.open(room), pages

    def submit(self, room: int, start: int, stop: int, *, last: bool) -> None:
        """Submits some of the pages."""
        sender, pages = self.transfers[room]
        assert isinstance(sender, Sender)
        sender.submit(np.array(pages[start:stop]), last=last, aux=b"token %d" % room if last else None)

    def abort(self, room: int) -> None:
        """Gives it up."""
        self.transfers[room][0].abort("the test wants it so")

    def end(self, room: int, timeout_s: float) -> End:
        """Waits for a transfer's end, whatever it is, and no longer than told."""
        transfer, _ = self.transfers[room]
        with contextlib.suppress(TimeoutError, KVFerryError):
            transfer.wait(timeout_s)
        error = transfer.error
        return End(transfer.state.name, "" if error is None else f"{type(error).__name__}: {error}")

    def wait_reusable(self, room: int, timeout_s: float) -> bool:
        """Waits until the room's pages may be used again; whether they may."""
        return self.transfers[room][0].wait_pages_reusable(timeout_s)

    def reuse(self, room: int, timeout_s: float) -> bool:
        """Waits until the room's pages may be used again, and uses them for something else at once; whether it did."""
        assert self.pool is not None
        may = self.wait_reusable(room, timeout_s)
        if may:
            self.pool.wipe_pages(self.transfers[room][1])
        return may

    def changed(self, room: int) -> int:
        """How many bytes of the room's pages have changed since they were reused."""
        assert self.pool is not None
        return self.pool.touched_bytes(self.transfers[room][1])

    def open_rooms(self) -> int:
        """How many the endpoint still knows."""
        assert self.endpoint is not None
        return self.endpoint.open_rooms

    def early_rooms(self) -> int:
        """How many rooms decode ranks have asked a prefill rank for that it has not opened."""
        assert isinstance(self.endpoint, PrefillEndpoint)
        return len(probe(self.endpoint).pending)

    def peers(self, engine: str) -> set[str]:
        """Endpoints of an engine that this rank is connected with, as far as it knows."""
        if isinstance(self.endpoint, PrefillEndpoint):
            return {peer.name for peer in probe(self.endpoint).peers if peer.name.startswith(f"{engine}-")}
        assert isinstance(self.endpoint, DecodeEndpoint)
        links = probe(self.endpoint).links.current
        return {peer.endpoint for link in links if link.key.engine == engine for peer in link.peers}

    def connections(self) -> dict[str, int]:
        """By the decode rank that it is with, the number of the connection that a prefill rank has now."""
        assert isinstance(self.endpoint, PrefillEndpoint)
        return {peer.name: peer.attempt for peer in probe(self.endpoint).peers}

    def registry_url(self) -> str:
        """Where the registry is that a prefill rank announces itself to."""
        assert isinstance(self.endpoint, PrefillEndpoint)
        return self.endpoint.registry_url

    def endpoint_name(self) -> str:
        """What peers call this rank's endpoint."""
        assert self.endpoint is not None
        return self.endpoint.status().endpoint

    def waits_for_credit(self) -> bool:
        """Whether any room of a prefill rank waits for a decode rank's staging memory."""
        assert isinstance(self.endpoint, PrefillEndpoint)
        attachments = [peer.attachment for peer in probe(self.endpoint).peers]
        staged = [each.paths.staged for each in attachments if each is not None]
        return any(each.peer.ring.num_waiting for each in staged if each is not None)

    def control_port(self) -> int:
        """Where a prefill rank listens."""
        assert isinstance(self.endpoint, PrefillEndpoint)
        return probe(self.endpoint).port

    def registered(self, timeout_s: float) -> bool:
        """Waits until the registry knows a prefill rank."""
        assert isinstance(self.endpoint, PrefillEndpoint)
        return self.endpoint.wait_registered(timeout_s)

    def shut_gate(self, place: str, key: Any) -> None:
        """See `Gates`."""
        self.gates.shut(place, key)

    def gate_reached(self, place: str, key: Any) -> bool:
        """See `Gates`."""
        return self.gates.reached(place, key, ANSWER_S / 2)

    def open_gates(self) -> None:
        """See `Gates`."""
        self.gates.open_all()

    def resources(self) -> Resources:
        """What the process holds."""
        return resources()

    def observe_url(self) -> str:
        """Where the endpoint shows itself."""
        assert self.endpoint is not None
        assert self.endpoint.observe_url is not None
        return self.endpoint.observe_url

    def logged(self) -> list[str]:
        """What was logged since the last call."""
        lines, self._log.said = self._log.said, []
        return lines

    def is_healthy(self) -> bool:
        """Whether every thread of the endpoint runs."""
        return self.endpoint is not None and self.endpoint.is_healthy

    def spoil(self, page: int) -> None:
        """Changes the first byte of a page's keys in layer 0, as soon as it has arrived and before it is compared."""
        assert isinstance(self.endpoint, DecodeEndpoint)
        assert self.pool is not None
        checks = probe(self.endpoint).context.staging.checks
        assert checks is not None
        kernels, element = checks.memory.kernels, self.pool.elements(self.pool.layout.shards[0], 0)[page]
        gather = kernels.gather

        def spoil_and_gather(starts: StartArray, shape: BlockShape, address: int) -> None:
            if element.ctypes.data in starts.tolist():
                element[0, 0, 0] ^= 1
                kernels.gather = gather  # type: ignore[method-assign]
            gather(starts, shape, address)

        kernels.gather = spoil_and_gather  # type: ignore[method-assign]

    def state(self, room: int) -> tuple[str, bool, int]:
        transfer, _ = self.transfers[room]
        chunks = transfer.stats.chunks if isinstance(transfer, Receiver) else 0
        return transfer.state.name, transfer.pages_reusable, chunks

    def wire_is_slow(self, bytes_per_s: float) -> None:
        """Receives no faster; as with the three that follow, only in a process that began with that library."""
        broken_wire.is_slow(bytes_per_s)

    def wire_breaks(self, after_bytes: int) -> None:
        """Breaks the first connection that has sent so many bytes from now on."""
        broken_wire.breaks(after_bytes)

    def wire_refuses(self, after_puts: int) -> None:
        """Lets a post fail in the middle: UCX refuses a put after so many from now on."""
        broken_wire.refuses(after_puts)

    def is_wire_broken(self) -> bool:
        return broken_wire.is_broken()

    def touched(self) -> int:
        """How many bytes of the whole pool were ever written."""
        assert self.pool is not None
        return self.pool.touched_bytes({group.name: range(group.num_pages) for group in self.pool.layout.groups})

    def command(self, *arguments: str) -> tuple[int, str]:
        """Runs a command of `kvferry` with this process's network and variables; its exit code and what it printed."""
        ran = kvferry(*arguments)
        return ran.returncode, ran.stdout + ran.stderr

    def control_address(self) -> str:
        """What decode ranks are told to connect to."""
        assert isinstance(self.endpoint, PrefillEndpoint)
        return self.endpoint.control_address

    def stop(self) -> None:
        self.gates.open_all()
        if self.endpoint is not None:
            self.endpoint.close()
        self.endpoint, self.pool = None, None
        self.transfers.clear()
        self.prefixes.clear()


def _serve(connection: Connection, environment: dict[str, str], namespaces: Sequence[str]) -> None:
    os.environ.update(environment)
    if namespaces:
        enter(namespaces)
    gc.freeze()  # what was imported is no garbage: `resources` looks for some, often
    rank = Rank()
    while True:
        try:
            question = connection.recv()
        except (EOFError, ConnectionResetError):
            rank.stop()
            return
        name, arguments, named = question
        try:
            answer = Answer(getattr(rank, name)(*arguments, **named))
        except Exception as error:
            answer = Answer(error=f"{type(error).__name__}: {error}", error_type=type(error).__name__)
        connection.send(answer)


def _preloaded() -> multiprocessing.context.ForkServerContext:
    """Where processes are copies of one that has everything imported and nothing started.

    To start one takes milliseconds instead of seconds.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.processes", "httpcore", "httpx", *PRELOADED])
    return context


class RankProcess:
    """The process, as the test sees it."""

    def __init__(
        self, *, environment: dict[str, str] | None = None, host: Host | None = None, is_fresh: bool = False
    ) -> None:
        """Args:
        environment: variables to set there.
        host: where it runs; here if None.
        is_fresh: whether it is a new program, with the variables of this process, and not a copy of one.
        """
        context = multiprocessing.get_context("spawn") if is_fresh else _preloaded()
        self._connection, theirs = context.Pipe()
        namespaces = host.namespaces if host is not None else ()
        self._process = context.Process(target=_serve, args=(theirs, environment or {}, namespaces), daemon=True)
        self._process.start()
        self._is_child = host is not None
        self.unanswered = 0
        theirs.close()

    @property
    def pid(self) -> int:
        """The process's number, as it is here."""
        assert self._process.pid is not None
        if not self._is_child:
            return self._process.pid
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        return int(children[0])

    def ask(self, method: Callable[..., Any], *arguments: Any, **named: Any) -> None:
        """Asks for a method of `Rank`; `answer` has the result."""
        self._connection.send((method.__name__, arguments, named))
        self.unanswered += 1

    def answer(self, timeout_s: float = ANSWER_S) -> Answer:
        """The answer to the oldest question that was not answered yet."""
        assert self._connection.poll(timeout_s), f"process {self._process.pid} did not answer within {timeout_s:g} s"
        answer: Answer = self._connection.recv()
        self.unanswered -= 1
        return answer

    def do(self, method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Asks and waits. What fails there, fails here."""
        self.ask(method, *arguments, **named)
        answer = self.answer()
        assert answer.error is None, answer.error
        return answer.value

    def kill(self) -> None:
        """Ends it in the middle of whatever it does. May be called again, or where its host has ended."""
        self._process.kill()  # with its child, where it has one
        self._process.join(PATIENCE_S)

    def freeze(self) -> None:
        """Stops it in the middle of whatever it does; returns when it stands still."""
        os.kill(self.pid, signal.SIGSTOP)
        while Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.001)

    def thaw(self) -> None:
        """Lets it go on."""
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        """Lets it end in order, and makes sure that it does."""
        self._connection.close()
        self._process.join(PATIENCE_S / 2)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(PATIENCE_S)


def until(rank: RankProcess, room: int, holds: Callable[[tuple[str, bool, int]], bool]) -> None:
    """Waits until a room's state in a process satisfies something."""
    eventually(f"room {room} is as it should be", lambda: holds(rank.do(Rank.state, room)))
