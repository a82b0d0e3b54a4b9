"""Two doctors: one listens with memory to write into, the other writes there, asks what came, and says how fast.

`python -m kvferry.applications.doctor.probe` writes to one that it starts in another process, `... probe HOST:PORT` to
that one, and `... probe cuda` from the first GPU's memory to memory of a process that has it, too.
"""

from __future__ import annotations

import multiprocessing
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from typing import TypeAlias

import msgspec

from kvferry._version import __version__
from kvferry.applications.bench.options import checked_device
from kvferry.applications.bench.pool import Storage, allocate
from kvferry.applications.command_line import interruptible
from kvferry.applications.partner import Caller, Listener, Message, calling, listening
from kvferry.endpoint.construction import create_transport
from kvferry.errors import IncompatiblePeerError, PeerDisconnectedError
from kvferry.findings import Finding, error, good, warning
from kvferry.hosts import bracketed, is_wildcard
from kvferry.layout import Device, MemoryKind, Region
from kvferry.settings import Settings
from kvferry.transport import Diagnosis, Transport

MEMORY_BYTES = 64 << 20
ANSWER_S = 20.0
_SILENCE_S = 60.0
"""After which another may come."""
_BULK_BYTES = (1 << 20, 8 << 20, MEMORY_BYTES)
"""Sizes of a large write. A wire that takes long for one of them is not given a larger one."""

GPU = "cuda"
"""In place of an address: both processes are here, and use the first GPU's memory."""

_LONG_WRITE_S = 0.5
_SMALL_BYTES = 4 << 10
_ROUNDS = 5
_ROUNDS_S = 3.0
"""No round is begun after that: on a wire that is slow one tells enough."""
_SMALL_ROUNDS = 50

_LONGEST_S = 60.0
_SLOW_BYTES_PER_S = 0.5e9


class Hello(Message, frozen=True):
    """Who writes to who listens: I should like to."""

    version: str


class Ready(Message, frozen=True):
    """The answer: where.

    Attributes:
        metadata: the transport's.
        value: that the memory is to be filled with.
        transport: its name.
    """

    version: str
    metadata: bytes
    address: int
    value: int
    transport: str


class Busy(Message, frozen=True):
    """Or: somebody else is writing."""


class Written(Message, frozen=True):
    """Who writes to who listens: look.

    Attributes:
        num_bytes: how many there should be.
    """

    num_bytes: int = MEMORY_BYTES


class Seen(Message, frozen=True):
    """The answer: whether every byte is right."""

    is_right: bool


ToListener: TypeAlias = Hello | Written
ToWriter: TypeAlias = Ready | Busy | Seen

TO_LISTENER: msgspec.msgpack.Decoder[ToListener] = msgspec.msgpack.Decoder(ToListener)
TO_WRITER: msgspec.msgpack.Decoder[ToWriter] = msgspec.msgpack.Decoder(ToWriter)


def listen(settings: Settings, port: int, tell: Callable[[str], None], device: Device) -> None:
    """Lets one after the other write here, until it is interrupted.

    Args:
        port: to listen on; 0 takes any that is free.
        tell: is told what happens; first the port, as the last word.
        device: of the memory that is written to.

    Raises:
        KVFerryError: if the port cannot be listened on, or the transport is missing.
    """
    memory = allocate(MEMORY_BYTES, device)
    transport = create_transport(settings, f"kvferry-doctor-{secrets.token_hex(4)}", writes=False)
    try:
        transport.register([memory.region], device)
        with listening(
            settings, port, TO_LISTENER, opens=lambda said: isinstance(said, Hello), busy=Busy(), silence_s=_SILENCE_S
        ) as listener:
            tell(f"listening on {settings.host} port {listener.port}")
            _serve(listener, memory, transport, tell)
    finally:
        transport.close()


def _serve(
    listener: Listener[ToListener],
    memory: Storage,
    transport: Transport,
    tell: Callable[[str], None],
) -> None:
    value = 0
    while True:
        listener.wait()
        for message in listener.receive():
            answer: ToWriter
            if isinstance(message, Hello):
                value = value % 255 + 1
                memory.fill(0)
                answer = Ready(__version__, transport.metadata(), memory.address, value, transport.name)
                tell("a doctor writes")
            else:
                memory.fetch()
                answer = Seen(bool((memory.host[: message.num_bytes] == value).all()))
                tell("every byte is right" if answer.is_right else "not every byte is right")
            with suppress(PeerDisconnectedError):
                listener.send(answer)
            if isinstance(answer, Seen):
                listener.dismiss()


class Measured(msgspec.Struct, frozen=True):
    """What came of it: the best of several rounds, since others may use the machine as well.

    Attributes:
        bytes_per_s: of one large write.
        latency_s: of a small one, from posting to its end here.
        version: of the kvferry on the other side.
    """

    bytes_per_s: float
    latency_s: float
    version: str


_MEASURED = msgspec.json.Decoder(Measured)


def _listen(pipe: Connection, device: Device) -> None:
    with suppress(KeyboardInterrupt), interruptible():
        listen(Settings(), 0, pipe.send, device)


@contextmanager
def _doctor_here(device: Device) -> Iterator[str]:
    """A doctor that listens in a process of its own; yields its address."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=_listen, args=(theirs, device), daemon=True)
    process.start()
    if not pipe.poll(ANSWER_S):
        raise TimeoutError("the second process did not start")
    host, port = Settings().host, pipe.recv().split()[-1]
    yield f"{'127.0.0.1' if is_wildcard(host) else bracketed(host)}:{port}"
    process.terminate()
    process.join(ANSWER_S)


def _greeted(there: Caller[ToWriter], address: str) -> Ready:
    try:
        found = there.ask(Hello(__version__), ANSWER_S)
    except PeerDisconnectedError as error:
        raise PeerDisconnectedError(
            f"{error}; run `kvferry doctor --listen PORT` there, with KVFERRY_HOST an address of that machine"
        ) from error
    if isinstance(found, Busy):
        raise ConnectionError(f"the doctor at {address} listens to another: try again in a minute")
    if not isinstance(found, Ready):
        raise ConnectionError(f"the doctor at {address} answers something else: {found}")
    return found


def _write(transport: Transport, source: Region, peer: str, address: int) -> float:
    begun_at = time.perf_counter()
    transfer = transport.write(source, peer, address, b"")
    while transport.poll(transfer) is None:
        if time.perf_counter() - begun_at > ANSWER_S:
            raise TimeoutError(f"a write of {source.length} bytes did not end within {ANSWER_S:g} s")
    took_s = time.perf_counter() - begun_at
    transport.release(transfer)
    return took_s


def write_bulk(write: Callable[[int], float]) -> tuple[int, float]:
    """Returns how many bytes were written at a time, and how long that took at best.

    Args:
        write: writes so many, and returns how long that took.
    """
    for num_bytes in _BULK_BYTES:
        took_s = write(num_bytes)
        if took_s > _LONG_WRITE_S:
            break
    rounds_s = [took_s]
    # Also where the first took long: the machine may have been busy just then.
    while len(rounds_s) < _ROUNDS and sum(rounds_s) < _ROUNDS_S:
        rounds_s.append(write(num_bytes))
    return num_bytes, min(rounds_s)


def measure(target: Ready, is_right: Callable[[int], bool], device: Device) -> Measured:
    """Measures what a transport does, from memory of a device to where a doctor listens.

    Args:
        is_right: asks the doctor, once so many bytes are written, whether all of them are there.

    Raises:
        IncompatiblePeerError: if the doctor has another transport.
    """
    memory = allocate(MEMORY_BYTES, device)
    memory.fill(target.value)
    source = memory.region
    transport = create_transport(Settings(), f"kvferry-doctor-sender-{time.time_ns():x}")
    if target.transport != transport.name:
        raise IncompatiblePeerError(
            f"transport: {transport.name} here, {target.transport} there: set KVFERRY_TRANSPORT to the same"
        )
    transport.register([source], device)
    peer = transport.connect(target.metadata)
    num_bytes, bulk_s = write_bulk(
        lambda length: _write(transport, Region(source.address, length), peer, target.address)
    )
    small = Region(source.address, _SMALL_BYTES)
    small_s = min(_write(transport, small, peer, target.address) for _ in range(_SMALL_ROUNDS))
    if not is_right(num_bytes):
        raise ValueError("what arrived is not what was sent")
    transport.close()
    return Measured(num_bytes / bulk_s, small_s, target.version)


def wire(
    environment: Mapping[str, str],
    transport: Diagnosis,
    address: str | None = None,
    kind: MemoryKind = MemoryKind.DRAM,
) -> Iterator[Finding]:
    """Writes bytes into another process, as endpoints with these settings would.

    Args:
        environment: of this process; the one that writes gets it, too.
        transport: of the transport that these settings choose.
        address: host and port of a doctor that listens on another machine; None has a process of this one receive.
        kind: of the memory on both sides; of the first GPU's only where no address is given.
    """
    where = "two processes here" if address is None else f"here and {address}"
    if kind is MemoryKind.VRAM:
        where += ", in a GPU's memory"
    target = [GPU] if kind is MemoryKind.VRAM else [] if address is None else [address]
    command = [sys.executable, "-m", "kvferry.applications.doctor.probe", *target]
    try:
        run = subprocess.run(  # noqa: S603 - this interpreter, and a module of ours
            command,
            env={**environment, **transport.says_more},
            capture_output=True,
            text=True,
            timeout=_LONGEST_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        yield error("wire", f"nothing moved between {where} within {_LONGEST_S:g} s", transport.remedy)
        return
    measured = _measured(run.stdout)
    if measured is None:
        last = (run.stderr or run.stdout).strip().rpartition("\n")[2]
        yield error("wire", f"nothing could be exchanged between {where}: {last}", transport.remedy)
        return
    way = transport.way_taken(run.stdout + run.stderr, is_local=address is None, kind=kind)
    speed = f"{measured.bytes_per_s / 1e9:.1f} GB/s in bulk, {measured.latency_s * 1e6:.0f} us for 4 KiB"
    yield good("wire", f"between {where}: {speed}" + (f"; {way.what}" if way.what else ""))
    if measured.version != __version__:
        yield warning("wire", f"{address} has kvferry {measured.version}, this is {__version__}", "install the same")
    yield from way.problems
    if measured.bytes_per_s < _SLOW_BYTES_PER_S:
        yield warning(
            "wire",
            f"{measured.bytes_per_s / 1e9:.2f} GB/s is slow",
            "is the machine busy? kvferry bench says"
            if address is None
            else "what does the network between them carry?",
        )


def _measured(said: str) -> Measured | None:
    """What the probe has printed, wherever the library printed something as well."""
    for line in said.splitlines():
        if line.startswith("{"):
            with suppress(msgspec.MsgspecError):
                return _MEASURED.decode(line)
    return None


def main() -> None:
    """Measures, and prints a line of JSON."""
    where = sys.argv[1] if len(sys.argv) > 1 else ""
    device = checked_device("cuda" if where == GPU else "cpu")
    with ExitStack() as opened:
        address = opened.enter_context(_doctor_here(device)) if where in ("", GPU) else where
        there = opened.enter_context(calling(Settings(), f"tcp://{address}", TO_WRITER, name="kvferry-doctor"))
        target = _greeted(there, address)
        measured = measure(target, lambda num_bytes: there.ask(Written(num_bytes), ANSWER_S) == Seen(True), device)
    sys.stdout.write("\n" + msgspec.json.encode(measured).decode() + "\n")


if __name__ == "__main__":
    main()
