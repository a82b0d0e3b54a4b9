"""Medians over the rounds. Ratios are taken inside a round, where both were measured side by side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from kvferry.applications.bench.commands import Way
from kvferry.applications.bench.measure import Measured, Round, Run
from kvferry.applications.bench.options import BY_LAYER, DIRECT, BenchOptions, variant_of
from kvferry.applications.bench.pattern import Checked
from kvferry.applications.bench.pool import block_bytes

GB = 1e9
MIXED = "mixed"


@dataclass(frozen=True, slots=True)
class Exposed:
    """What of a transfer is left when its prompt is computed: what the first token waits for.

    Attributes:
        seconds: percentiles, by their number.
        share: median ratio to what is left where the whole prompt is sent at its end, by the same path.
        limit_s: the least that is possible by the bulk write's throughput: all of it where the whole prompt is sent at
            its end; else what takes longer than computing, and the last range of layers.
    """

    seconds: dict[int, float]
    share: float
    limit_s: float


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured of a variant that went. Throughputs in bytes a second, times in seconds.

    Attributes:
        path: how the bytes travelled: one way, or `MIXED`.
        why: why they went that way, in words.
        efficiency: median ratio of the throughput to the bulk write's.
        to_direct: median ratio of the throughput to the direct variant's; None without one.
        submit_s: percentiles, by their number.
        latency_s: likewise.
        descriptors: median of a request's.
        writes: likewise.
        exposed: where a prefill is played that computes layer by layer.
    """

    path: str
    why: str
    bytes_per_s: float
    bulk_bytes_per_s: float
    memory_copy_bytes_per_s: float
    efficiency: float
    to_direct: float | None
    submit_s: dict[int, float]
    latency_s: dict[int, float]
    cpu_s_per_gb: float
    interpreter_s_per_gb: float | None
    descriptors: int
    writes: int
    request_bytes: int
    all_latencies_s: tuple[float, ...]
    exposed: Exposed | None


@dataclass(frozen=True, slots=True)
class Case:
    """One variant of one case.

    Attributes:
        block_bytes: bytes that lie together on both sides, on average.
        checked: what was found of the bytes.
        figures: None if the variant cannot do it.
        refusal: why it cannot.
    """

    options: BenchOptions
    variant: str
    block_bytes: float
    checked: Checked
    figures: Figures | None
    refusal: str | None

    @property
    def name(self) -> str:
        """The case in a few words."""
        return self.options.name

    @property
    def is_exact(self) -> bool | None:
        """Whether bytes were checked and all of them were right; None if none moved."""
        if self.figures is None:
            return None
        return self.checked.checked_bytes > 0 and self.checked.wrong_bytes == 0


def all_exact(cases: Iterable[Case]) -> bool:
    """Whether at least one variant moved bytes, and no byte was wrong."""
    verdicts = [case.is_exact for case in cases if case.is_exact is not None]
    return bool(verdicts) and all(verdicts)


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


def path_and_why(ways: Iterable[Way]) -> tuple[str, str]:
    """How bytes travelled, and for every path the reason that most of its bytes had."""
    amounts: dict[str, dict[str, int]] = {}
    for way in ways:
        reasons = amounts.setdefault(way.path, {})
        reasons[way.why] = reasons.get(way.why, 0) + way.num_bytes
    chosen = {path: max(reasons, key=lambda why: reasons[why]) for path, reasons in sorted(amounts.items())}
    if len(chosen) == 1:
        return next(iter(chosen.items()))
    total = sum(sum(reasons.values()) for reasons in amounts.values())
    shares = (f"{path} ({sum(amounts[path].values()) / total:.0%}): {why}" for path, why in chosen.items())
    return MIXED, "; ".join(shares)


def summarise(measured: Measured) -> list[Case]:
    """One case for every variant."""
    options = measured.options
    size = block_bytes(options)
    return [
        Case(
            options=options,
            variant=variant,
            block_bytes=size,
            checked=measured.checked[variant],
            figures=_figures(measured, variant) if variant not in measured.refused else None,
            refusal=measured.refused.get(variant),
        )
        for variant in options.variants
    ]


def _figures(measured: Measured, variant: str) -> Figures:
    rounds = measured.rounds
    bulk, runs = bulk_of(rounds), [each.runs[variant] for each in rounds]
    speeds = [run.bytes_per_s for run in runs]
    has_direct = all(DIRECT in each.runs for each in rounds)
    direct = [each.runs[DIRECT].bytes_per_s for each in rounds] if has_direct else None
    latencies = tuple(seconds for run in runs for seconds in run.latencies_s)
    path, why = path_and_why(way for run in runs for way in run.ways)
    request_bytes = runs[0].num_bytes // len(runs[0].latencies_s)
    return Figures(
        path=path,
        why=why,
        bytes_per_s=median(speeds),
        bulk_bytes_per_s=median(bulk),
        memory_copy_bytes_per_s=median(each.memory_copy for each in rounds),
        efficiency=median_ratio(speeds, bulk),
        to_direct=None if direct is None else median_ratio(speeds, direct),
        submit_s=percentiles(tuple(seconds for run in runs for seconds in run.submit_s), 50, 99),
        latency_s=percentiles(latencies, 50, 95, 99),
        cpu_s_per_gb=median(run.cpu_s / (run.num_bytes / GB) for run in runs),
        interpreter_s_per_gb=_interpreter_s_per_gb(runs),
        descriptors=round(median(count for run in runs for count in run.descriptors)),
        writes=round(median(count for run in runs for count in run.writes)),
        request_bytes=request_bytes,
        all_latencies_s=latencies,
        exposed=_exposed(measured, variant, request_bytes / median(bulk)) if measured.options.layer_time_ms else None,
    )


def _exposed(measured: Measured, variant: str, wire_s: float) -> Exposed:
    options, rounds = measured.options, measured.rounds
    runs, whole = ([each.runs[name] for each in rounds] for name in (variant, variant.removesuffix(BY_LAYER)))
    limit_s = wire_s
    if variant_of(variant).is_by_layer:
        compute_s = options.layer_time_ms / 1e3 * options.model.num_layers
        ranges = min(options.layer_ranges, options.model.num_layers)
        limit_s = max(0.0, wire_s - compute_s) + wire_s / ranges
    return Exposed(
        seconds=percentiles(tuple(seconds for run in runs for seconds in run.exposed_s), 50, 95),
        share=median_ratio([median(run.exposed_s) for run in runs], [median(run.exposed_s) for run in whole]),
        limit_s=limit_s,
    )


def _interpreter_s_per_gb(runs: Sequence[Run]) -> float | None:
    known = [run.interpreter_s / (run.num_bytes / GB) for run in runs if run.interpreter_s is not None]
    return median(known) if len(known) == len(runs) else None
