"""Medians over the rounds. Ratios are taken inside a round, where both were measured side by side."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

import numpy as np

from kvferry.cli.bench.measure import Measured, Round
from kvferry.cli.bench.options import DIRECT, VARIANTS

GB = 1e9


@dataclass(frozen=True, slots=True)
class Case:
    """One variant of one case. Throughputs in bytes a second, times in seconds.

    Attributes:
        efficiency: median ratio of the throughput to the bulk write's.
        to_direct: median ratio of the throughput to the direct variant's.
        submit_s, latency_s: percentiles, by their number.
        descriptors: median of a request's.
    """

    name: str
    variant: str
    path: str
    bytes_per_s: float
    bulk_bytes_per_s: float
    memory_copy_bytes_per_s: float
    efficiency: float
    to_direct: float
    submit_s: dict[int, float]
    latency_s: dict[int, float]
    cpu_s_per_gb: float
    descriptors: int
    request_bytes: int
    checked_bytes: int
    wrong_bytes: int
    first_wrong: str | None
    all_latencies_s: tuple[float, ...]

    @property
    def is_exact(self) -> bool:
        """Whether bytes were checked and all of them were right."""
        return self.checked_bytes > 0 and self.wrong_bytes == 0


def bulk_of(rounds: tuple[Round, ...]) -> list[float]:
    """The bulk write's throughput in every round: of one write, or in blocks, whichever has the better median."""
    whole, blocks = [each.bulk_whole for each in rounds], [each.bulk_blocks for each in rounds]
    return max(whole, blocks, key=median)


def median_ratio(above: list[float], below: list[float]) -> float:
    """Median over the rounds of one quantity divided by another."""
    return median(first / second for first, second in zip(above, below, strict=True))


def percentiles(values: tuple[float, ...], *wanted: int) -> dict[int, float]:
    """Percentiles, by their number."""
    return {each: float(np.percentile(values, each)) for each in wanted}


def summarise(measured: Measured) -> list[Case]:
    """One case for every variant."""
    rounds = measured.rounds
    bulk = bulk_of(rounds)
    direct = [each.runs[DIRECT.name].bytes_per_s for each in rounds]
    cases = []
    for variant in VARIANTS:
        runs = [each.runs[variant.name] for each in rounds]
        checked = measured.checked[variant.name]
        speeds = [run.bytes_per_s for run in runs]
        latencies = tuple(seconds for run in runs for seconds in run.latencies_s)
        cases.append(
            Case(
                name=measured.options.name,
                variant=variant.name,
                path=variant.path,
                bytes_per_s=median(speeds),
                bulk_bytes_per_s=median(bulk),
                memory_copy_bytes_per_s=median(each.memory_copy for each in rounds),
                efficiency=median_ratio(speeds, bulk),
                to_direct=median_ratio(speeds, direct),
                submit_s=percentiles(tuple(seconds for run in runs for seconds in run.submit_s), 50, 99),
                latency_s=percentiles(latencies, 50, 95, 99),
                cpu_s_per_gb=median(run.cpu_s / (run.num_bytes / GB) for run in runs),
                descriptors=round(median(count for run in runs for count in run.descriptors)),
                request_bytes=runs[0].num_bytes // measured.options.requests,
                checked_bytes=checked.checked_bytes,
                wrong_bytes=checked.wrong_bytes,
                first_wrong=checked.first_wrong,
                all_latencies_s=latencies,
            )
        )
    return cases
