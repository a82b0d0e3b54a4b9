"""Hosts: namespaces with interfaces of their own, and a network between them that fails as it is told.

A host has its own network, process numbers, mounts, name and shared memory, as a pod has. Its interfaces are TUN
devices: every packet comes to this process, which hands it on, late, rarely, slowly or not at all. So a fault is a
value, the same on every kernel, where `tc netem` and packet filters need modules that many do not have.

    with Network() as network:
        here, there = network.host("a", "10.7.0.1"), network.host("b", "10.7.0.2")
        network.links[here, there] = Link(delay_s=0.05, loss=0.01)
        here.process()  # a RankProcess that runs there
"""

from __future__ import annotations

import ctypes
import functools
import heapq
import itertools
import os
import random
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import TypeAlias

import pytest
from tests.support.namespaces import NAMESPACES, refusal
from tests.support.waiting import eventually

_TUN = Path("/dev/net/tun")
_MAIN = Path(__file__).with_name("host_main.py")
_LARGEST_PACKET_BYTES = 65536
_LONGEST_QUEUE_S = 1.0
"""What would wait longer for a slow link is dropped, as by a switch with so much memory."""

_LONGEST_SLEEP_S = 0.5


@functools.cache
def why_no_hosts() -> str:
    """Returns why hosts cannot be made here, and what helps; empty if they can."""
    for tool, package in (("unshare", "util-linux"), ("nsenter", "util-linux"), ("mount", "mount"), ("ip", "iproute2")):
        if shutil.which(tool) is None:
            return f"no hosts can be made here without {tool}: apt-get install {package}"
    if problem := refusal(*NAMESPACES):
        return f"no hosts can be made here: {problem}: run the tests as root, in a container with --privileged"
    try:
        os.close(os.open(_TUN, os.O_RDWR))
    except OSError as error:
        return (
            f"no interfaces of hosts can be made here: {_TUN}: {error.strerror}: run the tests as root, with the "
            "device (modprobe tun; docker run --cap-add NET_ADMIN --device /dev/net/tun)"
        )
    return ""


def skip_without_hosts() -> None:
    """Skips the module that calls this, while it is imported, where hosts cannot be made."""
    if problem := why_no_hosts():
        pytest.skip(problem, allow_module_level=True)


@dataclass(frozen=True, slots=True)
class Link:
    """What becomes of packets from one host to another; the way back is a link of its own.

    Attributes:
        delay_s: how much later they arrive.
        loss: the share that does not.
        bytes_per_s: how many fit through; None is no bound.
        is_cut: whether none arrives.
    """

    delay_s: float = 0.0
    loss: float = 0.0
    bytes_per_s: float | None = None
    is_cut: bool = False


@dataclass(slots=True)
class _Forgotten:
    """TCP connections between two hosts that the network knows no more.

    Attributes:
        lost: the ways on which what belongs to them is dropped.
        port: only those to this one are forgotten, if it is given.
        but: those to this one are not.
        made_since: those that are known, by both of their ends.
    """

    lost: set[tuple[Host, Host]]
    port: int | None
    but: int | None
    made_since: set[bytes] = field(default_factory=set)

    def drops(self, packet: bytes, way: tuple[Host, Host]) -> bool:
        """Whether a packet is dropped. Takes note of the connection that it begins, if any."""
        is_v6 = packet[0] >> 4 == 6
        protocol, start = (packet[6], 40) if is_v6 else (packet[9], 4 * (packet[0] & 15))
        if protocol != socket.IPPROTO_TCP:
            return False
        hosts = (packet[8:24], packet[24:40]) if is_v6 else (packet[12:16], packet[16:20])
        ports = packet[start : start + 2], packet[start + 2 : start + 4]
        numbers = [int.from_bytes(each, "big") for each in ports]
        if self.port not in (None, *numbers) or self.but in numbers:
            return False
        connection = b"".join(sorted(host + port for host, port in zip(hosts, ports, strict=True)))
        if packet[start + 13] & 0x12 == 0x02:  # SYN without ACK
            self.made_since.add(connection)
        return way in self.lost and connection not in self.made_since


Addresses: TypeAlias = str | Sequence[str]


class Host:
    """A host.

    Attributes:
        name: its name.
        addresses: those by which others reach it.
        inside: how the command line of a program that runs there begins.
        namespaces: files of its namespaces, for processes that enter them.
    """

    def __init__(self, name: str, interfaces: Mapping[str, Sequence[str]], addresses: Sequence[str]) -> None:
        """Starts it.

        Args:
            interfaces: the addresses of each, by name.
            addresses: those by which others reach it.
        """
        self.name, self.addresses = name, tuple(addresses)
        self._socket, theirs = socket.socketpair()
        command: list[str] = ["unshare", *NAMESPACES, "--kill-child", sys.executable, "-I", "-S", str(_MAIN), name]
        command += [f"{each}={','.join(addresses)}" for each, addresses in interfaces.items()]
        with theirs:
            self._process = subprocess.Popen(command, stdin=theirs.fileno())
        said, wires, _, _ = socket.recv_fds(self._socket, 1, len(interfaces))
        assert said, f"host {name} did not start"
        self.wires = dict(zip(wires, interfaces, strict=True))
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        self._first = int(children[0])
        self.inside = ("nsenter", f"--target={self._first}", "--net", "--mount", "--pid", "--uts", "--ipc")
        self.namespaces = tuple(f"/proc/{self._first}/ns/{each}" for each in ("net", "uts", "ipc", "pid", "mnt"))

        # As long as it is open no other host gets the number of this namespace, which would prove that it is gone.
        self._numbers = os.open(f"/proc/{self._first}/ns/pid", os.O_RDONLY)

    @property
    def address(self) -> str:
        """The first of its addresses."""
        return self.addresses[0]

    def kill(self) -> None:
        """Ends all that runs there at once. May be called again."""
        self._process.kill()  # and its child with it: the first process of the host
        self._process.wait()
        eventually(f"{self.name} has ended", lambda: not Path(f"/proc/{self._first}/ns/net").exists())
        self._socket.close()

    def close(self) -> None:
        """Ends it, and gives everything back."""
        self.kill()
        for each in (*self.wires, self._numbers):
            os.close(each)


class Network:
    """Hands packets from host to host.

    Attributes:
        links: from one host to another; whoever is not in it has an ideal one.
        carried: bytes of packets that have arrived, by link.
    """

    def __init__(self, *, seed: int = 0) -> None:
        """Starts without hosts.

        Args:
            seed: of which packets are lost.
        """
        self.links: dict[tuple[Host, Host], Link] = {}
        self.carried: defaultdict[tuple[Host, Host], int] = defaultdict(int)
        self._forgotten: dict[frozenset[Host], _Forgotten] = {}  # between two hosts
        self._random = random.Random(seed)
        self._hosts: dict[bytes, Host] = {}  # by address
        self._wires: dict[bytes, int] = {}
        self._plugged: dict[int, Host] = {}  # by wire
        self._begun: list[Host] = []
        self._late: list[tuple[float, int, bytes, tuple[Host, Host]]] = []
        self._numbers = itertools.count()
        self._free_at: defaultdict[tuple[Host, Host], float] = defaultdict(float)
        self._selector = selectors.DefaultSelector()
        self._lock = threading.RLock()
        self._is_open = True
        self._wakes, self._wake = os.pipe()
        self._selector.register(self._wakes, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="network", daemon=True)
        self._thread.start()

    def host(self, name: str, *addresses: str, nowhere: Mapping[str, str] | None = None) -> Host:
        """Starts a host whose interface eth0 has some addresses, and plugs it in.

        Args:
            nowhere: addresses of further interfaces, by name, whose packets nobody hands on.
        """
        others = {interface: (address,) for interface, address in (nowhere or {}).items()}
        host = Host(name, {"eth0": addresses, **others}, addresses)
        self._begun.append(host)
        with self._lock:
            for wire, interface in host.wires.items():
                self._selector.register(wire, selectors.EVENT_READ, host if interface == "eth0" else None)
        self.plug(host)
        self._look_again()
        return host

    def plug(self, host: Host) -> None:
        """From now on its addresses are this host's, whoever had them before."""
        (wire,) = (wire for wire, interface in host.wires.items() if interface == "eth0")
        with self._lock:
            self._plugged[wire] = host
            for address in host.addresses:
                self._hosts[ip_address(address).packed] = host
                self._wires[ip_address(address).packed] = wire

    def unplug(self, host: Host) -> None:
        """Nothing comes from it, or reaches it, any more: nobody hears a word of it."""
        with self._lock:
            self._plugged = {wire: each for wire, each in self._plugged.items() if each is not host}
            for address in host.addresses:
                if self._hosts.get(packed := ip_address(address).packed) is host:
                    del self._hosts[packed], self._wires[packed]

    def vanish(self, host: Host) -> None:
        """It loses its power."""
        self.unplug(host)
        host.kill()

    def between(self, here: Host, there: Host, link: Link) -> None:
        """Sets both ways."""
        self.links[here, there] = self.links[there, here] = link

    def forget(
        self, here: Host, there: Host, *, port: int | None = None, but: int | None = None, comes_back: bool = False
    ) -> None:
        """Drops what belongs to the TCP connections between two hosts, for good and without a word; new ones pass.

        As a NAT, a load balancer or connection tracking does that has lost its table.

        Args:
            port: only connections to this one.
            but: not connections to this one.
            comes_back: whether what is sent back from there still arrives here.
        """
        with self._lock:
            lost = {(here, there)} if comes_back else {(here, there), (there, here)}
            self._forgotten[frozenset((here, there))] = _Forgotten(lost, port, but)

    def heal(self) -> None:
        """Makes all links ideal. What was forgotten stays so."""
        self.links.clear()

    def close(self) -> None:
        """Ends everything."""
        self._is_open = False
        self._look_again()
        self._thread.join()
        for host in self._begun:
            host.close()
        os.close(self._wake)
        os.close(self._wakes)
        self._selector.close()

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ---- the thread -----------------------------------------------------------------------------------------------

    def _look_again(self) -> None:
        os.write(self._wake, b".")

    def _run(self) -> None:
        while self._is_open:
            due_s = self._late[0][0] - time.monotonic() if self._late else _LONGEST_SLEEP_S
            for key, _ in self._selector.select(max(0.0, due_s)):
                if key.fd == self._wakes:
                    os.read(self._wakes, 64)
                    continue
                for packet in _packets(key.fd):
                    if key.data is not None:  # else its interface leads nowhere
                        with self._lock:
                            self._accept(key.fd, packet)
            with self._lock:
                now = time.monotonic()
                while self._late and self._late[0][0] <= now:
                    _, _, packet, way = heapq.heappop(self._late)
                    self._deliver(packet, way)

    def _accept(self, wire: int, packet: bytes) -> None:
        source, target = self._plugged.get(wire), self._hosts.get(_destination(packet))
        if source is None or target is None:
            return
        way = source, target
        forgotten = self._forgotten.get(frozenset(way))
        if forgotten is not None and forgotten.drops(packet, way):
            return
        link = self.links.get(way)
        if link is None:
            self._deliver(packet, way)
            return
        if link.is_cut or self._random.random() < link.loss:
            return
        arrives_at = now = time.monotonic()
        if link.bytes_per_s is not None:
            begins_at = max(now, self._free_at[way])
            if begins_at > now + _LONGEST_QUEUE_S:
                return
            self._free_at[way] = arrives_at = begins_at + len(packet) / link.bytes_per_s
        heapq.heappush(self._late, (arrives_at + link.delay_s, next(self._numbers), packet, way))

    def _deliver(self, packet: bytes, way: tuple[Host, Host]) -> None:
        wire = self._wires.get(_destination(packet))
        if wire is None or self._plugged.get(wire) is not way[1]:
            return  # it was unplugged meanwhile
        with suppress(OSError):  # its interface is down, or it takes no more: TCP sends again
            os.write(wire, packet)
            self.carried[way] += len(packet)


def _packets(wire: int) -> Iterator[bytes]:
    with suppress(BlockingIOError):
        for _ in range(64):  # others have their turn
            try:
                yield os.read(wire, _LARGEST_PACKET_BYTES)
            except OSError as error:
                if isinstance(error, BlockingIOError):
                    raise
                return  # the interface is down


def _destination(packet: bytes) -> bytes:
    return packet[24:40] if packet[0] >> 4 == 6 else packet[16:20]


def enter(namespaces: Sequence[str]) -> None:
    """Moves this process into namespaces. It goes on in a child: process numbers change with a fork alone.

    For processes of one thread. The parent ends when the child does, and the child with the parent.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    opened = [os.open(each, os.O_RDONLY) for each in namespaces]
    for each in opened:
        if libc.setns(each, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(each)
    if child := os.fork():
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
