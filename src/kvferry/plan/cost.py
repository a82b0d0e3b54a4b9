"""What it costs to move a chunk to a peer, directly or through staging memory, and which way is faster.

A model with a few constants, not a measurement: what matters is how many pieces the bytes are in. Every descriptor of a
direct write costs time whatever its size; gathering small runs into staging memory costs far less for each, but touches
all bytes twice more. The caller gives the machine's constants.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvferry.errors import SettingsError

STAGED_ADVANTAGE = 1.5
"""How many times faster than the direct path the staged one must look to be taken."""


class TransferPath(str, Enum):
    """Which way bytes go. Between the first two the cost model chooses; the third is only taken where it is forced."""

    DIRECT = "direct"
    STAGED = "staged"
    MAPPED = "mapped"


@dataclass(frozen=True, slots=True)
class PathCosts:
    """The constants of a machine and its wire.

    The defaults were measured with NIXL 1.5.1 between two processes of one host with two cores, pages in main memory:
    a small descriptor took 1.6 to 2.4 us and bulk writes ran at 5 GB/s. Staged, in sub-chunks of 1 MiB, slices of 512,
    1,024 and 2,048 bytes ran at 1.9, 2.3 and 2.5 GB/s end to end, which a line of 86 ns a slice and 2.8 GB/s fits
    within 2 %; gathering and scattering took about the same. Other machines differ: take ratios from here, no more.

    Attributes:
        seconds_per_descriptor: cost of each descriptor of a direct write, after merging.
        wire_bytes_per_s: speed of direct writes with large descriptors.
        bulk_bytes_per_s: speed of one write from staging memory to staging memory.
        gather_bytes_per_s: into staging memory.
        scatter_bytes_per_s: out of it.
        seconds_per_run: cost of every run that is gathered, and again of scattering it.
        seconds_per_write: cost of posting one write with its notification.
        is_one_memory: whether processors of one machine do all the copying on both sides. Then gathering, writing and
            scattering compete for its memory, and gain nothing from going on at the same time.

    Raises:
        SettingsError: if a constant is not positive; seconds_per_run may be 0.
    """

    seconds_per_descriptor: float = 2e-6
    wire_bytes_per_s: float = 5e9
    bulk_bytes_per_s: float = 5e9
    gather_bytes_per_s: float = 2.8e9
    scatter_bytes_per_s: float = 2.8e9
    seconds_per_run: float = 86e-9
    seconds_per_write: float = 25e-6
    is_one_memory: bool = False

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if value < 0 or (value == 0 and name not in ("seconds_per_run", "is_one_memory")):
                raise SettingsError(f"{name} is {value}: a cost is positive")


@dataclass(frozen=True, slots=True)
class WriteSize:
    """What one rank has to send to another.

    Attributes:
        num_bytes: bytes to send.
        runs: contiguous runs that they lie in, by the plan.
        descriptors: what is left of the runs once neighbours on both sides are merged.
        bulk_writes: writes that carry them through staging memory.

    Raises:
        SettingsError: if there are not at least as many runs as descriptors, or a number is not positive.
    """

    num_bytes: int
    runs: int
    descriptors: int
    bulk_writes: int

    def __post_init__(self) -> None:
        if not 1 <= self.descriptors <= self.runs <= self.num_bytes or self.bulk_writes < 1:
            raise SettingsError(
                f"{self.descriptors} descriptors, merged from {self.runs} runs, of {self.num_bytes} bytes in "
                f"{self.bulk_writes} bulk writes make no sense"
            )


@dataclass(frozen=True, slots=True)
class Choice:
    """The faster path, and why.

    Attributes:
        path: the one to take.
        direct_s: what the direct path would take, in seconds.
        staged_s: what the staged one would.
        reason: why, in words.
    """

    path: TransferPath
    direct_s: float
    staged_s: float
    reason: str


def estimate(size: WriteSize, costs: PathCosts) -> dict[TransferPath, float]:
    """Estimates how long a write takes on each path, in seconds.

    Through staging memory, gathering, writing and scattering of successive sub-chunks overlap: the slowest sets the
    pace, and one sub-chunk goes through the others before or after it. Where one memory does it all, the steps add up.
    """
    direct = (
        costs.seconds_per_write
        + size.descriptors * costs.seconds_per_descriptor
        + size.num_bytes / costs.wire_bytes_per_s
    )
    gather = size.num_bytes / costs.gather_bytes_per_s + size.runs * costs.seconds_per_run
    write = size.num_bytes / costs.bulk_bytes_per_s + size.bulk_writes * costs.seconds_per_write
    scatter = size.num_bytes / costs.scatter_bytes_per_s + size.runs * costs.seconds_per_run
    steps = (gather + write + scatter,) if costs.is_one_memory else (gather, write, scatter)
    slowest = max(steps)
    return {TransferPath.DIRECT: direct, TransferPath.STAGED: slowest + (sum(steps) - slowest) / size.bulk_writes}


def choose(size: WriteSize, costs: PathCosts) -> Choice:
    """Chooses the faster path for a write: direct, which needs no memory, unless staged is faster by far.

    Speeds measured in a few milliseconds are a third off at times; where the choice matters, the paths differ by more.
    """
    seconds = estimate(size, costs)
    direct, staged = seconds[TransferPath.DIRECT], seconds[TransferPath.STAGED]
    path = TransferPath.STAGED if STAGED_ADVANTAGE * staged < direct else TransferPath.DIRECT
    how_direct = f"{_count(size.descriptors, 'descriptor')} of {size.num_bytes // size.descriptors:,} bytes"
    how_staged = f"gathering {_count(size.runs, 'run')}, {_count(size.bulk_writes, 'bulk write')} and scattering"
    if path is TransferPath.DIRECT:
        faster = "faster" if direct < staged else "not much slower"
        reason = f"{how_direct} ({_time(direct)}) are {faster} than {how_staged} ({_time(staged)})"
    else:
        reason = f"{how_staged} ({_time(staged)}) is faster than {how_direct} ({_time(direct)})"
    return Choice(path, direct, staged, reason)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"
