"""Real transports between two processes: bytes arrive exact and before their notification, and a dead peer is an error.

This file is also the program of the second process: it registers poisoned memory and answers one line of JSON for every
line that it reads.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from queue import Empty, Queue
from typing import Any

import numpy as np
import pytest

from kvferry.errors import PeerDisconnectedError, TransportError, TransportUnavailableError
from kvferry.layout import Device, Region
from kvferry.transport import NixlTransport, PreparedList, TransferHandle, TransferReport, Transport
from kvferry.transport.mooncake.transport import MooncakeTransport

POISON = 0xEE
DEADLINE_S = 60.0
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Way:
    """A transport, made in a certain way.

    Attributes:
        of: its class.
        writes: makes that of a process that writes.
        is_shared: whether several connections share a large write.
        cause: what its library raises once a connection is gone; "" if it raises nothing.
        broken: what is said of a write whose connection breaks between two processes that live.
        element: bytes of a range that are so many that a connection to a frozen process cannot send those it has.
    """

    of: type[Transport]
    writes: Callable[[str], Transport]
    is_shared: bool
    cause: str = "nixlRemoteDisconnectError"
    broken: str = r"connection to second-\w+ is gone"
    element: int = 1 << 15


WAYS = {
    "nixl": Way(NixlTransport, NixlTransport, is_shared=False),
    "nixl as prefill endpoints have it": Way(
        NixlTransport, lambda name: NixlTransport(name, threads=2, only_writes=True), is_shared=True
    ),
    "mooncake": Way(
        MooncakeTransport,
        MooncakeTransport,
        is_shared=True,
        cause="",
        broken=r"writing to second-\w+: Mooncake failed",
        element=1 << 22,  # a connection sends one range at a time
    ),
}


def rows(address: int, *specs: tuple[int, int, int, int]) -> Any:
    return np.array([(address + at, length, 0, stride, count) for at, length, stride, count in specs], np.uint64)


def digest(memory: Any) -> str:
    return hashlib.sha256(memory).hexdigest()


def until(what: str, ready: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + DEADLINE_S
    while not (answer := ready()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {what} within {DEADLINE_S} s")
        time.sleep(2e-4)
    return answer


def finish(transport: Transport, transfer: TransferHandle) -> TransferReport:
    report: TransferReport = until("end of a write", lambda: transport.poll(transfer))
    transport.release(transfer)
    return report


def keep_trying(attempt: Callable[[], object]) -> None:
    """Until it raises."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        attempt()
        time.sleep(2e-4)
    pytest.fail(f"nothing failed within {DEADLINE_S} s")


# --- the second process


def second_process(way: str, name: str, size: int) -> None:
    transport = WAYS[way].of(name)  # type: ignore[call-arg]
    memory = np.full(size, POISON, np.uint8)
    transport.register([Region(memory.ctypes.data, size)], Device())
    waiting: list[tuple[str, bytes]] = []

    def answer(**fields: Any) -> None:
        sys.stdout.write(json.dumps(fields) + "\n")
        sys.stdout.flush()

    def notifications(count: int) -> list[tuple[str, str]]:
        def enough() -> bool:
            waiting.extend(transport.take_notifications())
            return len(waiting) >= count

        until(f"{count} notifications", enough)
        taken = [(sender, text.hex()) for sender, text in waiting]
        waiting.clear()
        return taken

    answer(metadata=transport.metadata().hex(), address=memory.ctypes.data)
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "wait":  # and hash at once: the bytes must all be there
            taken = notifications(order["count"])
            answer(notifications=taken, digest=digest(memory))
        elif order["do"] == "fill":
            memory[:] = order["value"]
            answer()
        elif order["do"] == "count":
            answer(count=int((memory == order["value"]).sum()))
        elif order["do"] == "write back":
            peer = transport.connect(bytes.fromhex(order["metadata"]))
            local = transport.prepare(rows(memory.ctypes.data, (0, size, size, 1)), None)
            remote = transport.prepare(rows(order["address"], (0, size, size, 1)), peer)
            zero = np.zeros(1, np.int32)
            transfer = transport.post(local, zero, remote, zero, b"back")
            answer(total_bytes=finish(transport, transfer).total_bytes)
    transport.close()


class Peer:
    """The second process, from outside."""

    def __init__(self, way: str, name: str, size: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, way, name, str(size)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._lines: Queue[str] = Queue()
        threading.Thread(target=self._read, daemon=True).start()
        started = self.answer()
        self.metadata, self.address = bytes.fromhex(started["metadata"]), started["address"]

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):  # libraries log there, too
                self._lines.put(line)

    def answer(self) -> Any:
        try:
            return json.loads(self._lines.get(timeout=DEADLINE_S))
        except Empty:
            pytest.fail(f"the second process (exit status {self.process.poll()}) did not answer in {DEADLINE_S} s")

    def order(self, do: str, **fields: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **fields}) + "\n")
        self.process.stdin.flush()

    def wait(self, count: int) -> Any:
        self.order("wait", count=count)
        return self.answer()

    def fill(self, value: int) -> None:
        self.order("fill", value=value)
        self.answer()

    def count(self, value: int) -> int:
        """How many bytes of its memory have a value."""
        self.order("count", value=value)
        return int(self.answer()["count"])

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(DEADLINE_S)


@contextmanager
def peer_of(way: str, name: str, size: int) -> Iterator[Peer]:
    made = Peer(way, name, size)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.wait(DEADLINE_S)
        for pipe in (made.process.stdin, made.process.stdout):
            if pipe is not None:
                pipe.close()


@contextmanager
def progressing(transport: Transport) -> Iterator[None]:
    """Takes notifications all the time, as the thread of an endpoint does that has rooms open."""
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(1e-3):
            transport.take_notifications()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


# --- the tests


def unique(name: str) -> str:
    return f"{name}-{uuid.uuid4().hex[:8]}"


class Here:
    """Our own transport and memory."""

    def __init__(self, way: Way, size: int) -> None:
        self.way = way
        self.transport = way.writes(unique("first"))
        self.memory = np.random.default_rng(7).integers(0, 256, size, np.uint8)
        self.transport.register([Region(self.address, size)], Device())

    @property
    def address(self) -> int:
        return int(self.memory.ctypes.data)

    def lists(self, name: str, there: Peer, ours: Any, theirs: Any) -> tuple[PreparedList, PreparedList]:
        return (
            self.transport.prepare(rows(self.address, *ours), None),
            self.transport.prepare(rows(there.address, *theirs), name),
        )

    def write(self, lists: tuple[PreparedList, PreparedList], here: Any, there: Any, text: bytes) -> TransferReport:
        transfer = self.transport.post(lists[0], np.array(here, np.int32), lists[1], np.array(there, np.int32), text)
        return finish(self.transport, transfer)


class Processes:
    """Starts both, of one kind."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.way = WAYS[name]

    @contextmanager
    def here(self, size: int) -> Iterator[Here]:
        made = Here(self.way, size)
        yield made
        made.transport.close()

    def peer(self, name: str, size: int) -> AbstractContextManager[Peer]:
        return peer_of(self.name, name, size)


IN_QUICK = "nixl as prefill endpoints have it"  # tests/contract has the others in one process


@pytest.fixture(params=[pytest.param(way, marks=() if way == IN_QUICK else pytest.mark.full) for way in WAYS])
def processes(request: pytest.FixtureRequest) -> Processes:
    try:
        WAYS[request.param].of.check_available()
    except TransportUnavailableError as error:
        pytest.skip(str(error))
    return Processes(request.param)


def test_sixteen_mebibytes_arrive_exact_and_before_their_notification(processes: Processes):
    size, name = 16 * MIB, unique("second")
    with processes.here(size) as first, processes.peer(name, size) as second:
        assert first.transport.connect(second.metadata) == name
        lists = first.lists(name, second, [(0, size, size, 1)], [(0, size, size, 1)])
        for number in range(3):
            first.memory[: 1 + number] ^= 0xFF
            expected = digest(first.memory)
            second.order("wait", count=1)  # it hashes as soon as it is notified
            report = first.write(lists, [0], [0], b"bulk %d" % number)
            first.memory[-1] ^= 0xFF  # ours again once poll said done
            arrived = second.answer()
            assert report.total_bytes == size
            assert arrived["digest"] == expected
            assert arrived["notifications"] == [[first.transport.endpoint_name, (b"bulk %d" % number).hex()]]


@pytest.mark.full  # the contract has it in one process
def test_strided_rows_arrive_in_their_places_and_nothing_else_changes(processes: Processes):
    size, name = 8 * MIB, unique("second")
    ours, theirs = [(8, 512, 1024, 4000), (5 * MIB, 64, 96, 1000)], [(0, 512, 512, 5000), (4 * MIB, 64, 640, 2000)]
    generator = np.random.default_rng(3)
    from_, to = generator.permutation(4000)[:3000], generator.permutation(5000)[:3000]
    more_from, more_to = generator.permutation(1000)[:700], generator.permutation(2000)[:700]
    with processes.here(size) as first, processes.peer(name, size) as second:
        first.transport.connect(second.metadata)
        lists = first.lists(name, second, ours, theirs)
        expected = np.full(size, POISON, np.uint8)
        for source, destination in zip(from_.tolist(), to.tolist(), strict=True):
            expected[512 * destination :][:512] = first.memory[8 + 1024 * source :][:512]
        for source, destination in zip(more_from.tolist(), more_to.tolist(), strict=True):
            expected[4 * MIB + 640 * destination :][:64] = first.memory[5 * MIB + 96 * source :][:64]
        second.order("wait", count=1)
        report = first.write(lists, [*from_, *(4000 + more_from)], [*to, *(5000 + more_to)], b"strided")
        arrived = second.answer()
        assert arrived["digest"] == digest(expected)
        assert report.total_bytes == 3000 * 512 + 700 * 64


@pytest.mark.full  # the contract has it in one process
def test_many_writes_and_notifications_arrive_once_each(processes: Processes):
    size, name = MIB, unique("second")
    with processes.here(size) as first, processes.peer(name, size) as second:
        first.transport.connect(second.metadata)
        lists = first.lists(name, second, [(0, 4096, 4096, 256)], [(0, 4096, 4096, 256)])
        for index in range(256):
            first.write(lists, [index], [255 - index], b"write %d" % index)
            first.transport.notify(name, b"alone %d" % index)
        arrived = second.wait(512)
        texts = [bytes.fromhex(text) for sender, text in arrived["notifications"]]
        assert sorted(texts) == sorted(
            [b"%s %d" % (kind, index) for kind in (b"write", b"alone") for index in range(256)]
        )
        assert {sender for sender, _ in arrived["notifications"]} == {first.transport.endpoint_name}
        assert arrived["digest"] == digest(np.ascontiguousarray(first.memory.reshape(256, 4096)[::-1]))


@pytest.mark.full  # the contract has it in one process
def test_the_other_process_writes_back(processes: Processes):
    size, name = MIB, unique("second")
    with processes.here(size) as first, processes.peer(name, size) as second:
        second.order("write back", metadata=first.transport.metadata().hex(), address=first.address)
        received = until("notification", first.transport.take_notifications)
        assert received == [(name, b"back")]
        assert set(first.memory.tolist()) == {POISON}
        assert second.answer()["total_bytes"] == size


def fails(first: Here, attempt: Callable[[], object], said: str = r"connection to second-\w+ is gone") -> None:
    """Repeats until the broken connection is noticed; what it raises must be that, and soon."""
    with pytest.raises(PeerDisconnectedError if "gone" in said else TransportError, match=said) as caught:
        keep_trying(attempt)
    if first.way.cause:
        assert type(caught.value.__cause__).__name__ == first.way.cause


def test_a_killed_peer_is_an_error_and_its_successor_of_the_same_name_is_reached(processes: Processes):
    size, name = MIB, unique("second")
    zero = np.zeros(1, np.int32)
    with processes.here(size) as first:
        with processes.peer(name, size) as second, processes.peer(unique("other"), size) as other:
            first.transport.connect(second.metadata)
            survivor = first.transport.connect(other.metadata)
            lists = first.lists(name, second, [(0, size, size, 1)], [(0, size, size, 1)])
            first.write(lists, [0], [0], b"alive")
            second.wait(1)
            second.kill()

            def post() -> None:
                finish(first.transport, first.transport.post(lists[0], zero, lists[1], zero, b"dead"))

            fails(first, post)
            fails(first, lambda: first.transport.notify(name, b"dead"))
            # The dead peer is nobody else's trouble.
            lists = first.lists(survivor, other, [(0, size, size, 1)], [(0, size, size, 1)])
            first.write(lists, [0], [0], b"survivor")
            assert other.wait(1)["digest"] == digest(first.memory)
            first.transport.disconnect(name)
            first.transport.disconnect(name)
        with processes.peer(name, size) as third:
            assert first.transport.connect(third.metadata) == name
            lists = first.lists(name, third, [(0, size, size, 1)], [(0, size, size, 1)])
            first.write(lists, [0], [0], b"successor")
            assert third.wait(1)["digest"] == digest(first.memory)


@pytest.mark.full
def test_a_successor_is_reached_without_disconnecting_first(processes: Processes):
    size, name = MIB, unique("second")
    with processes.here(size) as first:
        with processes.peer(name, size) as second:
            first.transport.connect(second.metadata)
            second.kill()
        with processes.peer(name, size) as third:
            first.transport.connect(third.metadata)
            lists = first.lists(name, third, [(0, size, size, 1)], [(0, size, size, 1)])
            first.write(lists, [0], [0], b"successor")
            assert third.wait(1)["digest"] == digest(first.memory)


@pytest.mark.full
def test_connecting_to_the_dead_is_an_error_sooner_or_later_and_no_hang(processes: Processes):
    """Whether connecting notices at once is the backend's affair; using the connection must."""
    size, name = MIB, unique("second")
    with processes.here(size) as first:
        with processes.peer(name, size) as second:
            metadata = second.metadata
            second.kill()

        def connect_and_notify() -> None:
            first.transport.connect(metadata)
            first.transport.notify(name, b"anyone?")

        with pytest.raises(TransportError):
            keep_trying(connect_and_notify)
        with processes.peer(name, size) as third:
            assert first.transport.connect(third.metadata) == name
            first.transport.notify(name, b"hello")
            with progressing(first.transport):
                third.wait(1)


def test_a_peer_that_is_killed_in_the_middle_of_a_write_ends_it(processes: Processes, monkeypatch: pytest.MonkeyPatch):
    """Over TCP, where a frozen peer keeps a write on its way for as long as we like."""
    monkeypatch.setenv("UCX_TLS", "tcp")  # read when the agents are made; the second process inherits it
    size, name = 64 * MIB, unique("second")
    with processes.here(size) as first, processes.peer(name, size) as second:
        first.transport.connect(second.metadata)
        lists = first.lists(name, second, [(0, size, size, 1)], [(0, size, size, 1)])
        first.write(lists, [0], [0], b"alive")
        assert second.wait(1)["digest"] == digest(first.memory)
        os.kill(second.process.pid, signal.SIGSTOP)
        zero = np.zeros(1, np.int32)
        transfer = first.transport.post(lists[0], zero, lists[1], zero, b"never")
        for _ in range(100):
            assert first.transport.poll(transfer) is None
            time.sleep(1e-3)
        second.kill()
        fails(first, lambda: first.transport.poll(transfer))
        with pytest.raises(PeerDisconnectedError):
            first.transport.poll(transfer)  # and it stays so
        first.transport.release(transfer)
        first.transport.disconnect(name)


def unsent_bytes(connection: socket.socket) -> int:
    """What our side of a connection has not sent, or the other has not acknowledged."""
    answer = fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4))
    return int.from_bytes(answer, sys.byteorder)


@contextmanager
def tcp_connections() -> Iterator[list[socket.socket]]:
    """Every TCP connection of this process, with what it has to send; the fullest come first."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found.append(socket.socket(fileno=os.dup(int(name))))
    connections = []
    for each in found:
        with contextlib.suppress(OSError):
            if each.family == socket.AF_INET and each.getpeername():
                connections.append(each)
    try:
        yield sorted(connections, key=unsent_bytes, reverse=True)
    finally:
        for each in found:
            each.close()


def stuck_connections() -> int:
    """How many TCP connections of this process have something to send that the other side does not take."""
    with tcp_connections() as connections:
        return sum(unsent_bytes(connection) > 0 for connection in connections)


@pytest.mark.full
def test_a_connection_that_breaks_between_two_threads_shares_ends_no_write_that_still_moves(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
):
    """Over TCP to a frozen peer, one connection of those that share a write breaks, and both processes live.

    The write goes on as long as a share of it does, and once it is said to have ended, nothing reads our memory.
    """
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")  # so that every thread has one connection
    size, name = 64 * MIB, unique("second")
    before, written, after = 1, 2, 3
    element = processes.way.element
    order = np.random.default_rng(0).permutation(size // element).astype(np.int32)
    with processes.here(size) as first, processes.peer(name, size) as second:
        first.transport.connect(second.metadata)
        lists = first.lists(name, second, [(0, element, element, len(order))], [(0, element, element, len(order))])
        first.memory[:] = before
        first.write(lists, order, order, b"alive")
        second.wait(1)
        first.memory[:] = written
        os.kill(second.process.pid, signal.SIGSTOP)
        transfer = first.transport.post(lists[0], order, lists[1], order, b"broken")
        polls_until, shares = time.monotonic() + DEADLINE_S, 2 if first.way.is_shared else 1
        polls = 0
        while polls < 100 or stuck_connections() < shares:  # a busy machine gives the second thread its turn late
            assert first.transport.poll(transfer) is None
            assert time.monotonic() < polls_until, "not every share waits for the peer"
            time.sleep(1e-3)
            polls += 1
        with tcp_connections() as connections:
            connections[0].shutdown(socket.SHUT_RDWR)
        if first.way.is_shared:
            for _ in range(100):
                assert first.transport.poll(transfer) is None
                time.sleep(1e-3)
        os.kill(second.process.pid, signal.SIGCONT)
        fails(first, lambda: first.transport.poll(transfer), first.way.broken)
        first.memory.reshape(len(order), -1)[order[4:]] = after
        with contextlib.suppress(TransportError):
            first.transport.release(transfer)
        second.fill(before)
        for _ in range(20):  # gives every thread something to do
            with contextlib.suppress(TransportError):
                finish(first.transport, first.transport.post(lists[0], order[:4], lists[1], order[:4], b"next"))
            first.transport.take_notifications()
        assert second.count(after) == 0


@pytest.mark.full
def test_what_was_sent_before_an_error_lands_after_it_and_nothing_more_is_read(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
):
    """Why endpoints wait after a write has failed, over one TCP connection to a frozen peer."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    size, name = 64 * MIB, unique("second")
    before, written, after = 1, 2, 3
    zero = np.zeros(1, np.int32)
    with processes.here(size) as first, processes.peer(name, size) as second:
        first.transport.connect(second.metadata)
        lists = first.lists(name, second, [(0, size, size, 1)], [(0, size, size, 1)])
        first.memory[:] = before
        first.write(lists, [0], [0], b"alive")
        second.wait(1)
        first.memory[:] = written
        os.kill(second.process.pid, signal.SIGSTOP)
        transfer = first.transport.post(lists[0], zero, lists[1], zero, b"broken")
        with tcp_connections() as connections:

            def fullest() -> socket.socket:
                return max(connections, key=unsent_bytes)

            until("bytes on their way", lambda: first.transport.poll(transfer) or unsent_bytes(fullest()) > MIB)
            fullest().shutdown(socket.SHUT_RDWR)
        fails(first, lambda: first.transport.poll(transfer), first.way.broken)
        first.memory[:] = after
        first.transport.release(transfer)
        os.kill(second.process.pid, signal.SIGCONT)
        until("bytes that land", lambda: second.count(written))
        first.transport.take_notifications()
        assert second.count(after) == 0
        assert first.transport.may_deliver_late


if __name__ == "__main__":
    second_process(sys.argv[1], sys.argv[2], int(sys.argv[3]))
