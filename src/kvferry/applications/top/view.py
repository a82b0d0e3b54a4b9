"""`kvferry top`: a table of endpoints, what is wrong, and the oldest rooms, once or again and again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Literal

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvferry.applications.command_line import interruptible
from kvferry.applications.top.asking import Asker, Sample, addresses, present
from kvferry.errors import ConfigurationError
from kvferry.observe.logs import clock_time
from kvferry.observe.settings import ObserveSettings
from kvferry.observe.status import EndpointStatus, LostPeerStatus, RoomStatus
from kvferry.settings import Settings

_ONCE_S = 0.5
_SHORTEST_REASON = 12


def run(given: Sequence[str], *, interval_s: float, once: bool, console: Console) -> bool:
    """Shows endpoints until Ctrl-C or SIGTERM, or once.

    Returns:
        Whether anybody answered, at the end.

    Raises:
        ConfigurationError: if there is no address, or one makes no sense.
    """
    port = Settings().of(ObserveSettings).observe_port
    if not given and not port:
        raise ConfigurationError(
            "no address: name the endpoints, such as `kvferry top 9470-9477`; endpoints answer when they are started "
            "with KVFERRY_OBSERVE_PORT"
        )
    with closing(Asker(addresses(given) if given else present(int(port or 0)))) as asker:
        return _once(asker, console) if once else _live(asker, interval_s, console)


def _once(asker: Asker, console: Console) -> bool:
    before = asker.ask()
    time.sleep(_ONCE_S)
    now = asker.ask()
    console.print(page(now, rates(before, now), width=console.width, most_rooms=1000))
    return _anybody(now)


def _live(asker: Asker, interval_s: float, console: Console) -> bool:
    before: list[Sample] = []
    now = asker.ask()
    with (
        suppress(KeyboardInterrupt),
        interruptible(),
        Live(console=console, screen=console.is_terminal, auto_refresh=False) as live,
    ):
        while True:
            space = max(3, console.height - len(now) - 8)
            live.update(page(now, rates(before, now), width=console.width, most_rooms=space), refresh=True)
            time.sleep(interval_s)
            before, now = now, asker.ask()
    return _anybody(now)


def _anybody(samples: Sequence[Sample]) -> bool:
    return any(sample.status is not None for sample in samples)


@dataclass(frozen=True, slots=True)
class Rates:
    """What has moved since the sample before, in bytes a second.

    Attributes:
        endpoint: of an endpoint, by address; while its wire was busy.
        room: of a room, by address and number.
    """

    endpoint: Mapping[str, float]
    room: Mapping[tuple[str, int], float]


def rates(before: Sequence[Sample], now: Sequence[Sample]) -> Rates:
    """Compares two rounds of samples. Endpoints that were not there before, or have started anew, have no rate."""
    earlier = {sample.address: sample for sample in before}
    endpoints: dict[str, float] = {}
    rooms: dict[tuple[str, int], float] = {}
    for sample in now:
        old = earlier.get(sample.address)
        if old is None or old.status is None or sample.status is None or old.status.endpoint != sample.status.endpoint:
            continue
        seconds = sample.taken_at - old.taken_at
        if seconds <= 0:
            continue
        endpoints[sample.address] = max(0.0, sample.sent_bytes - old.sent_bytes) / seconds
        moved = {room.room: room.moved_bytes for room in old.status.rooms}
        for room in sample.status.rooms:
            rooms[sample.address, room.room] = max(0, room.moved_bytes - moved.get(room.room, 0)) / seconds
    return Rates(endpoints, rooms)


def troubles(samples: Sequence[Sample]) -> Iterator[str]:
    """What is wrong, a sentence each; the worst first."""
    for sample in samples:
        if sample.status is None:
            yield f"{sample.address} {sample.problem}"
    for sample in samples:
        status = sample.status
        if status is None:
            continue
        name = f"{status.side.value} {status.engine}/{status.rank}"
        for thread in status.threads:
            if not thread.is_alive:
                yield f"{name}: thread {thread.name} has ended ({thread.last_failure or 'without an error'})"
            if thread.held_up_by:
                yield f"{name}: thread {thread.name} is held up by {thread.held_up_by}"
        if status.problem:
            yield f"{name}: {status.problem}"
        yield from (f"{name}: {peer.name} is not found: {peer.problem}" for peer in status.peers if peer.problem)
        for peer in status.silent_peers:
            yield (
                f"{name} has received nothing from {peer.name} for {peer.silent_s:.1f} s, "
                f"since {clock_time(peer.silent_s)}: "
                f"stopped, overloaded or cut off? Its rooms fail after {status.peer_timeout_s:g} s"
            )
        if status.quarantined_pages:
            yield (
                f"{name}: {status.quarantined_pages} pages are quarantined, the first for "
                f"{_duration(status.quarantine_s)}: a write may still touch them"
            )
        for lost in status.quarantine:
            yield f"{name}: {_quarantine(lost)}"
        if status.staging.waiting_rooms:
            yield f"{name}: {status.staging.waiting_rooms} rooms wait for staging memory (KVFERRY_STAGING_RING_MIB)"


def _quarantine(lost: LostPeerStatus) -> str:
    """What a lost prefill rank keeps from being used, and what would free it."""
    kept = f"{lost.endpoint}, lost for {_duration(lost.lost_for_s)}, keeps {lost.pages} pages and "
    kept += f"{_size(lost.ring_bytes)} of staging memory in quarantine"
    if lost.proof:
        return f"{kept}; it has ended (proof: {lost.proof}), and they come back within seconds"
    hint = f" (not asked: {lost.problem})" if lost.problem else ""
    return f"{kept} until it is proved to have ended, by {'; or by '.join(lost.frees)}{hint}"


def page(samples: Sequence[Sample], found: Rates, *, width: int, most_rooms: int) -> RenderableType:
    """All of it.

    Args:
        width: of the terminal, in columns.
        most_rooms: rooms that there is space for.
    """
    parts: list[RenderableType] = [_endpoints(samples, found)]
    wrong = list(troubles(samples))
    parts += [Text(f"! {each}", style="bold red") for each in wrong[:8]]
    if len(wrong) > 8:
        parts.append(Text(f"! and {len(wrong) - 8} more", style="bold red"))
    parts.append(_rooms(samples, found, width=width, most=most_rooms))
    return Group(*parts)


def _endpoints(samples: Sequence[Sample], found: Rates) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("side")
    table.add_column("engine", overflow="ellipsis", no_wrap=True, max_width=16)
    for name in ("rank", "rooms", "sent", "staging", "peers"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("is", no_wrap=True)
    for sample in samples:
        status = sample.status
        if status is None:
            table.add_row("?", sample.address, "", "", "", "", "", Text("not there", style="red"))
            continue
        ready = sum(peer.is_ready for peer in status.peers)
        table.add_row(
            status.side.value,
            status.engine,
            str(status.rank),
            str(sum(status.states.values())),
            _rate(found.endpoint.get(sample.address)),
            _share(status.staging.used_bytes, status.staging.total_bytes),
            f"{ready}/{len(status.peers)}",
            _health(status),
        )
    return table


def _health(status: EndpointStatus) -> Text:
    if not status.is_healthy:
        return Text("not well", style="red")
    if status.is_draining:
        return Text("drained" if status.is_drained else "draining", style="yellow")
    if status.silent_peers:
        return Text("missing peers", style="yellow")
    return Text("well", style="green")


@dataclass(frozen=True, slots=True)
class _Line:
    """A room at an endpoint.

    Attributes:
        rate: in bytes a second, if it is known.
    """

    status: EndpointStatus
    room: RoomStatus
    rate: float | None

    @property
    def where(self) -> str:
        return f"{self.status.side.value[0]} {self.status.engine}/{self.status.rank}"


@dataclass(frozen=True, slots=True)
class _Column:
    """What is shown of a room.

    Attributes:
        cell: its text.
        from_width: the narrowest terminal that has space for it.
        most: columns of the terminal that it gets.
    """

    title: str
    cell: Callable[[_Line], str]
    justify: Literal["left", "right"] = "right"
    from_width: int = 0
    most: int = 20


_STATES = {"bootstrapping": "bootstrap", "waiting for input": "waiting", "transferring": "transfer"}

_COLUMNS = (
    _Column("room", lambda line: str(line.room.room)),
    _Column("at", lambda line: line.where, "left", most=14),
    _Column("state", lambda line: _STATES.get(line.room.state, line.room.state), "left"),
    _Column("age", lambda line: _duration(line.room.age_s)),
    _Column("chunks", lambda line: str(line.room.chunks), from_width=100),
    _Column("moved", lambda line: _size(line.room.moved_bytes)),
    _Column("rate", lambda line: _rate(line.rate)),
    _Column("path", lambda line: line.room.path or "-", "left", from_width=100),
)


def _rooms(samples: Sequence[Sample], found: Rates, *, width: int, most: int) -> RenderableType:
    lines = [
        _Line(sample.status, room, found.room.get((sample.address, room.room)))
        for sample in samples
        if sample.status is not None
        for room in sample.status.rooms
    ]
    if not lines:
        return Text("\nno rooms are open", style="dim")
    lines.sort(key=lambda line: -line.room.age_s)
    table, left = Table(box=None, pad_edge=False, header_style="bold"), width
    shown, columns = lines[:most], [column for column in _COLUMNS if width >= column.from_width]
    for column in columns:
        needed = min(column.most, max(len(column.title), *(len(column.cell(line)) for line in shown)))
        table.add_column(column.title, justify=column.justify, no_wrap=True, min_width=needed, max_width=needed)
        left -= needed + 2
    table.add_column("waits for", overflow="ellipsis", no_wrap=True, max_width=max(left, _SHORTEST_REASON))
    for line in shown:
        table.add_row(*(column.cell(line) for column in columns), line.room.waits_for)
    rest = [Text(f"and {len(lines) - most} more, opened later", style="dim")] if len(lines) > most else []
    return Group("", table, *rest)


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.0f} h"


def _size(num_bytes: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.0f} {unit}" if unit == "B" or num_bytes >= 99.5 else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def _rate(bytes_per_s: float | None) -> str:
    return "-" if not bytes_per_s else f"{_size(bytes_per_s)}/s"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "-"
