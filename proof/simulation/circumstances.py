"""What there is in a world, and what may go wrong there, as its seed says."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from kvferry.plan.packing import aligned
from kvferry.protocol.transfer.states import Waits
from kvferry.settings import Settings
from proof.simulation.memory import HEAD_DIM, HEADS, KINDS, MOST_TOKENS, Shape
from proof.simulation.processes import Process

_DRAWN = (
    "crash",
    "freeze",
    "close",
    "cut",
    "registry",
    "abort",
    "write fails",
    "notify fails",
    "connect fails",
    "send fails",
    "copy fails",
    "late",
    "duplicate",
    "reorder",
    "clock",
    "absent",
    "miscount",
)

_DRAWN_APART: Mapping[str, tuple[float, float]] = {
    "refuse": (0.125, 0.4),
    "another prompt": (1.0, 1 / 64),
    "change callback": (1 / 16, 0.5),
    "ready": (1 / 16, 0.3),
    "queue": (1 / 16, 0.4),
}
"""By kind, the share of worlds that have it, and the share of their requests that meet it."""

_STRUCK_APART: Mapping[str, tuple[float, float]] = {
    "frozen receiver": (1 / 8, 0.1),
    "freeze of a writer": (1 / 16, 0.05),
    "freeze while it settles": (1 / 16, 0.1),
    "leave": (1 / 16, 0.02),
    "raising post": (1 / 4, 0.2),
    "measuring write": (1 / 16, 0.4),
    "unproved end": (1 / 16, 0.02),
    "silent line": (1 / 16, 0.02),
    "lost flow": (1 / 16, 0.02),
    "second start": (1 / 16, 0.01),
    "close waits": (1 / 16, 0.05),
}
"""By kind, the share of worlds that have it, and how often it befalls a step, or a call, of theirs."""

_HEALED = frozenset({"unproved end", "silent line", "lost flow", "second start"})
"""What must be over after a while: in worlds with these more requests come, and later."""

RARE = (*_DRAWN_APART, *_STRUCK_APART)
"""Kinds of trouble that few worlds have."""

TROUBLES = (*_DRAWN, *RARE)
"""What may go wrong. Every world has its own few, so that each also comes alone."""

LINGER_S = 2.5
"""For how long the wire may carry on with the writes of a process that was killed."""

THAW_S = 0.8 * LINGER_S
"""Within how long after its thaw a process has what its sockets had held meanwhile."""

LEASE_S = 1.0

WAITS = Waits(bootstrap_s=3.0, waiting_s=4.0, write_s=2.0, peer_s=1.5, heartbeat_s=0.5, quarantine_s=1.2 * LINGER_S)

_LONGEST_WRITE_S = 0.6  # on a slow wire, alone
_ALL_WRITES_S = 1.0  # likewise, of all requests together: half of the deadline of a write, which is noticed in steps
_STAGED_PADDING = 3  # at most so many times the bytes cross where segments are aligned

_PAGES = 16
_LATE_REQUESTS = 4
_SOON_AGAIN = 5
_MOST_RINGS = 8


@dataclass(frozen=True, slots=True)
class Limits:
    """How large a world is, and what of it is left out: for shrinking.

    Attributes:
        steps: before the end is begun.
        without_troubles: kinds of trouble that are left out.
        without_requests: numbers of requests that are left out.
        without_faults: numbers of single faults that are left out.
    """

    steps: int = 400
    without_troubles: frozenset[str] = frozenset()
    without_requests: frozenset[int] = frozenset()
    without_faults: frozenset[int] = frozenset()


@dataclass(slots=True, eq=False)
class Engine:
    """An engine of either kind.

    Attributes:
        shapes: of its ranks.
        ranks: these, in their present lives.
    """

    name: str
    is_prefill: bool
    shapes: list[Shape]
    settings: Settings
    ranks: list[Process] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What does not change in a world.

    Attributes:
        odds: how often each kind of trouble befalls a step.
        pace_s: the longest time that passes at once while there is something to do.
        mail_odds: how often a step is about messages.
        wire_runs_alone: whether writes go on while their process is frozen, as on a network card.
        wire_bytes_per_s: what the wire carries, of all writes together; None if that takes no time. No deadline passes
            for it: all that there is to write takes less.
        layers: of the model.
        engines: by name.
        machines: how many there are.
        requests: how many may come.
        comes_within_s: the longest time between two requests.
        rooms: how many room numbers there are.
    """

    odds: dict[str, float]
    pace_s: float
    mail_odds: float
    wire_runs_alone: bool
    wire_bytes_per_s: float | None
    layers: int
    engines: dict[str, Engine]
    machines: int
    requests: int
    comes_within_s: float
    rooms: int


def drawn(draw: random.Random, limits: Limits) -> Circumstances:
    """Circumstances, with everything about them drawn."""
    kinds = draw.sample(_DRAWN, draw.choice([0, 1, 2, 2, 3, 4, 5]))
    odds = {kind: draw.choice([0.003, 0.01, 0.03]) for kind in kinds}
    for kind in limits.without_troubles:
        odds.pop(kind, None)
    pace_s = draw.choice([0.001, 0.01, 0.05])
    mail_odds = draw.choice([0.15, 0.15, 0.03])
    wire_runs_alone = draw.random() < 0.5
    layers = draw.choice([1, 2])
    requests = draw.randint(1, 5)
    # The most bytes of a write, and what may be on its way in all.
    write_bytes = MOST_TOKENS * layers * KINDS * HEADS * HEAD_DIM
    wire_bytes_per_s = max(write_bytes / _LONGEST_WRITE_S, requests * write_bytes * _STAGED_PADDING / _ALL_WRITES_S)
    is_slow = draw.random() < 0.25
    most_bytes = draw.choice([64, 128, _LONGEST_WRITE_S / 2 * wire_bytes_per_s])
    path = draw.choice(["auto", "direct", "staged"])
    engines = {}
    for kind in ("prefill", "decode"):
        for number in range(draw.choice([1, 1, 1, 2])):
            engine = _engine(f"{kind}{number}", kind == "prefill", layers, path, most_bytes, draw)
            engines[engine.name] = engine
    return Circumstances(
        odds=odds,
        pace_s=pace_s,
        mail_odds=mail_odds,
        wire_runs_alone=wire_runs_alone,
        wire_bytes_per_s=wire_bytes_per_s if is_slow else None,
        layers=layers,
        engines=engines,
        machines=draw.choice([1, 1, 2]),
        requests=requests,
        comes_within_s=draw.choice([0.0, 0.5, 6.0]),
        rooms=draw.choice([1, 2, 8]),
    )


def _engine(name: str, is_prefill: bool, layers: int, path: str, most_bytes: float, draw: random.Random) -> Engine:
    tp = draw.choice([1, 1, 2])
    pp = draw.choice([1, 1, layers]) if tp == 1 else 1
    stages = (layers,) if pp == 1 else (1,) * pp
    page_tokens = draw.choice([2, 4])
    shapes = [Shape(layers, tp, rank, stages, page_tokens, _PAGES) for rank in range(tp * pp)]
    chunk = draw.choice([64, 128, 256])
    gather_workers = draw.choice([1, 1, 2])
    # A prefill rank may have no more than it begins with, for measuring and for each of its workers.
    rings = draw.choice([1 + gather_workers, _MOST_RINGS]) if is_prefill else _MOST_RINGS
    settings = _settings(
        path=draw.choice(["auto", path]),
        direct_bytes=most_bytes,
        direct_receiver_bytes=most_bytes * draw.choice([0.5, 1.0]),
        chunk_bytes=chunk,
        ring_bytes=draw.choice([chunk, 2 * chunk, 3 * chunk, 12 * aligned(chunk)]),
        rings=rings,
        workers=draw.choice([1, 2]),
        gather_workers=gather_workers,
        scatter_workers=draw.choice([0, 1, 2]),
        checksums=draw.random() < 0.2,
    )
    return Engine(name, is_prefill, shapes, settings)


def _settings(
    *,
    path: str,
    direct_bytes: float,
    direct_receiver_bytes: float,
    chunk_bytes: int,
    ring_bytes: int,
    rings: int,
    workers: int,
    gather_workers: int,
    scatter_workers: int,
    checksums: bool,
) -> Settings:
    # Copied, not made: to read the environment and validate takes longer than a third of a schedule.
    return _common_settings().model_copy(
        update={
            "path": path,
            "direct_mib": direct_bytes / 2**20,
            "direct_receiver_mib": direct_receiver_bytes / 2**20,
            "staging_chunk_mib": chunk_bytes / 2**20,
            "staging_ring_mib": ring_bytes / 2**20,
            "staging_memory_mib": ring_bytes * rings / 2**20,
            "workers": workers,
            "gather_workers": gather_workers,
            "scatter_workers": scatter_workers,
            "checksums": checksums,
        }
    )


@lru_cache(maxsize=1)
def _common_settings() -> Settings:
    return Settings(
        registry_url="http://registry:1",
        queues=2,
        registry_lease_s=LEASE_S,
        bootstrap_timeout_s=WAITS.bootstrap_s,
        waiting_timeout_s=WAITS.waiting_s,
        write_timeout_s=WAITS.write_s,
        heartbeat_interval_s=WAITS.heartbeat_s,
        peer_timeout_s=WAITS.peer_s,
        close_timeout_s=1.0,
        quarantine_s=WAITS.quarantine_s,
        end_proofs="process,rank,kubernetes,operator",
    )


def for_healing(circumstances: Circumstances) -> Circumstances:
    """Circumstances in which requests come late enough to show what heals, where something is to."""
    if "measuring write" in circumstances.odds:  # where what it had sent lands after the next attempt to connect
        return replace(circumstances, requests=_SOON_AGAIN, comes_within_s=1.0)
    if not _HEALED & circumstances.odds.keys():
        return circumstances
    return replace(circumstances, requests=max(_LATE_REQUESTS, circumstances.requests), comes_within_s=6.0)


def drawn_apart(seed: int, limits: Limits) -> dict[str, float]:
    """What requests or steps meet in the world of a seed, and how often; apart, so that other worlds stay the same."""
    return {
        kind: how_often
        for kind, (of_worlds, how_often) in {**_DRAWN_APART, **_STRUCK_APART}.items()
        if kind not in limits.without_troubles and random.Random(f"{seed} {kind}s").random() < of_worlds
    }
