"""How fast requests move end to end by the sizes of staging memory, each way for so long, and what they wait for.

The benchmark's own ranks, in the same processes for all sizes: every turn goes over its memory again and again until
2 s have passed, in turn with a bulk write, and all bytes are checked. The first case has the sizes that an endpoint
takes by itself, and every path. Seconds by cause are those of all parts of all requests, so more than have passed.

    python -m benchmarks.gpu_contact.probes.transfers [--device cpu --tiny] [--prefill-tp 2] [--trace]
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgspec
from benchmarks.gpu_contact.probes.common import FOLDER, Clock, DeviceName, parser, tell_and_exit

from kvferry.applications.bench import commands
from kvferry.applications.bench.measure import Measurement, Place, Run
from kvferry.applications.bench.options import BenchArguments, BenchOptions, prepare
from kvferry.applications.bench.ranks import DecodeRank, PrefillRank, RankMaker
from kvferry.applications.bench.report import case_data
from kvferry.applications.bench.summary import summarise
from kvferry.applications.bench.teams import LocalTeam, Teams
from kvferry.endpoint import Receiver, Sender
from kvferry.observe.status import Side
from kvferry.observe.tracing import Span, Window, chrome_trace

LEAST_S = 2.0
"""How long a turn takes at least: one pass over four requests is 13 ms at 80 GB/s, of which a tenth is noise."""

SIZES = (
    *((64, 512, 2), (16, 256, 2), (64, 1024, 4), (16, 1024, 4), (64, 256, 2), (64, 512, 4)),
    *((16, 512, 2), (16, 256, 4), (64, 1024, 2), (16, 512, 4), (16, 1024, 2), (64, 256, 4)),
)
"""MiB of a sub-chunk and of a ring, and gather workers: what is most worth knowing first."""

_TRACED = 12
"""Requests in a trace: enough to see what waits for what, few enough to bring back."""

_SHOWN = (
    *("variant", "gb_per_s", "efficiency", "bulk_gb_per_s", "latency_ms", "cpu_s_per_gb", "interpreter_s_per_gb"),
    *("path", "refused", "exact"),
)


_VARIABLES = ("KVFERRY_STAGING_CHUNK_MIB", "KVFERRY_STAGING_RING_MIB", "KVFERRY_GATHER_WORKERS")
_MOST = {"KVFERRY_STAGING_MEMORY_MIB": "8192"}  # four workers with rings of 1 GiB take more than an endpoint may


class Note(msgspec.Struct, frozen=True):
    """Where the time of a rank's last turn went.

    Attributes:
        seconds: of all parts of all requests, by cause.
        spans: those of the first requests.
    """

    seconds: dict[str, float]
    spans: list[Span]


@dataclass(frozen=True, kw_only=True)
class SizedOptions(BenchOptions):
    """A case with sizes of its own.

    Attributes:
        environment: the settings that say them.
        notes: the folder where ranks leave what their last requests waited for.
    """

    environment: Mapping[str, str]
    notes: Path


class SizedPrefill(PrefillRank):
    """Takes the sizes of its case, and notes where the time went."""

    def answer(self, command: commands.Command) -> commands.Answer:
        _take_sizes(self._planned, command)
        answered = super().answer(command)
        if isinstance(answered, commands.Sent):
            _note(self._options, self.side_name, (sent(*each) for each in enumerate(self.transfers)))
        return answered


class SizedDecode(DecodeRank):
    """Takes the sizes of its case, and notes where the time went."""

    def answer(self, command: commands.Command) -> commands.Answer:
        _take_sizes(self._planned, command)
        answered = super().answer(command)
        if isinstance(answered, commands.Received):
            _note(self._options, self.side_name, (received(*each) for each in enumerate(self.transfers)))
        return answered


def _take_sizes(planned: Sequence[BenchOptions], command: commands.Command) -> None:
    """Sets the variables of a case that begins: endpoints are made with what they say."""
    if isinstance(command, commands.Prepare):
        case = planned[command.case]
        assert isinstance(case, SizedOptions)
        for name in (*_VARIABLES, *_MOST):
            os.environ.pop(name, None)
        os.environ.update(case.environment)


def _note(case: BenchOptions, side: str, spans: Iterable[Iterable[Span]]) -> None:
    assert isinstance(case, SizedOptions)
    found = [span for of_one in spans for span in of_one]
    waits: dict[str, float] = {}
    for span in found:
        waits[span.phase] = waits.get(span.phase, 0.0) + span.end_s - span.begin_s
    note = Note(waits, [span for span in found if span.room < _TRACED])
    (case.notes / f"{side}-{os.getpid()}.json").write_bytes(msgspec.json.encode(note))


def sent(number: int, sender: Sender) -> Iterator[Span]:
    """Yields where the time of a request went that was sent."""
    for write in sender.stats.writes:
        yield Span("queue", "queue", number, write.submitted_at, write.posted_at)
        for part in write.parts:
            yield Span("credit", "credit", number, part.ready_at, part.begun_at, part.num_bytes)
            yield Span("gather", part.thread, number, part.begun_at, part.gathered_at, part.num_bytes)
            yield Span("post", part.thread, number, part.gathered_at, part.posted_at, part.num_bytes)
            yield Span("wire", "wire", number, part.posted_at, part.landed_at, part.num_bytes)


def received(number: int, receiver: Receiver) -> Iterator[Span]:
    """Yields where the time of a request went that was received."""
    for placed in receiver.stats.placed:
        yield Span("arrival", "arrival", number, placed.arrived_at, placed.begun_at, placed.num_bytes)
        yield Span("scatter", placed.thread, number, placed.begun_at, placed.done_at, placed.num_bytes)


class MeasurementByTime(Measurement):
    """Has every turn but the first, in which connections are made, take so long."""

    def __init__(self, planned: Sequence[BenchOptions], case: int, teams: Teams, least_s: float) -> None:
        super().__init__(planned, case, teams, Place("both", None, shares_clock=True), print)
        self._least_s = least_s
        self._seen: set[str] = set()

    def run(self, variant: str, *, passes: int) -> tuple[Run, tuple[list[commands.Sent], list[commands.Received]]]:
        found = super().run(variant, passes=passes)
        if variant in self._seen:
            while (seconds := found[0].seconds) < self._least_s:
                passes = math.ceil(passes * min(64, max(1.2 * self._least_s / seconds, 1.1)))
                found = super().run(variant, passes=passes)
        self._seen.add(variant)
        return found


def cases(
    given: BenchOptions, sizes: Iterable[tuple[int, int, int]], variants: Sequence[str], notes: Path
) -> Iterator[SizedOptions]:
    """Yields every path with an endpoint's own sizes, and then what is staged with each of some sizes."""
    common = {field.name: getattr(given, field.name) for field in fields(given)} | {"notes": notes}
    yield SizedOptions(**common | {"variants": tuple(variants)}, environment={})
    for size in sizes:
        environment = dict(zip(_VARIABLES, map(str, size), strict=True)) | _MOST
        yield SizedOptions(**common | {"variants": ("staged",)}, environment=environment)


def measure(
    device: DeviceName, prefill_tp: int, most_sizes: int, *, is_tiny: bool, seconds: float, trace: Path | None
) -> dict[str, Any]:
    """Measures all cases that there is time for."""
    clock = Clock(seconds)
    variants = ["direct", "staged", *(["mapped"] if device == "cuda" else []), "auto"]
    arguments = BenchArguments(
        preset="small" if is_tiny else "qwen3-32b",
        device=device,
        variants=",".join(variants),
        prefill_tp=prefill_tp,
        tokens=64 if is_tiny else 1024,
        requests=5,  # one more than are in flight, so that passes can follow each other
        repetitions=1,
    )
    sizes = [(1, 4, 2)] if is_tiny else list(SIZES)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        planned = list(cases(prepare(arguments)[0], sizes[:most_sizes], variants, Path(folder)))
        makers: Mapping[str, RankMaker] = {"prefill": SizedPrefill, "decode": SizedDecode}
        with (
            LocalTeam("prefill", planned, makers) as prefill,
            LocalTeam("decode", planned, makers) as decode,
        ):
            teams = Teams(prefill, decode)
            for number, options in enumerate(planned):
                sized = "/".join(options.environment.get(name, "") for name in _VARIABLES).strip("/") or "as they are"
                if number and not clock.has_time_for(sized):
                    continue
                measurement = MeasurementByTime(planned, number, teams, 0.05 if is_tiny else LEAST_S)
                for case in summarise(measurement.measure()):
                    data = case_data(case)
                    rows.append({"chunk/ring/workers": sized, **{name: data[name] for name in _SHOWN}})
                found = sorted(Path(folder).glob("*.json"))
                notes = {each.stem: msgspec.json.decode(each.read_bytes(), type=Note) for each in found}
                # Prefill ranks have the same causes, and the decode rank has others.
                rows[-1]["seconds"] = {
                    cause: sum(note.seconds.get(cause, 0.0) for note in notes.values())
                    for cause in dict.fromkeys(cause for note in notes.values() for cause in note.seconds)
                }
                if trace is not None and options.environment:
                    trace.write_text(json.dumps(chrome_trace(list(_windows(notes)))), encoding="utf-8")
                    trace = None
    moved = [row for row in rows if row["refused"] is None]
    return {
        "device": device,
        "prefill_tp": prefill_tp,
        "exact": bool(moved) and all(row["exact"] for row in moved),
        "rows": rows,
        "left_out": clock.left_out,
    }


def _windows(notes: Mapping[str, Note]) -> Iterator[Window]:
    for number, (name, note) in enumerate(notes.items()):
        spans = [span for span in note.spans if span.end_s > span.begin_s]
        yield Window(Side(name.partition("-")[0]), "transfers", number, name, spans, 0)


def main() -> None:
    """Measures and prints."""
    options = parser(__doc__)
    options.add_argument("--prefill-tp", type=int, default=1, help="ranks of the prefill side; the decode side has one")
    options.add_argument("--most-sizes", type=int, default=len(SIZES), help="only the first of the sizes")
    options.add_argument("--trace", action="store_true", help="leave a trace of the first sizes, for Perfetto")
    typed = options.parse_args()
    tell_and_exit(
        measure(
            typed.device,
            typed.prefill_tp,
            typed.most_sizes,
            is_tiny=typed.tiny,
            seconds=typed.seconds,
            trace=Path(os.environ.get(FOLDER, "."), "trace.json") if typed.trace else None,
        )
    )


if __name__ == "__main__":
    main()
