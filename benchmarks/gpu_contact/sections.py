"""What is asked at the first contact, in the order of what teaches most, each with its command and its limit.

The limits add up to less than one command on a lent machine may take. Steps are those of docs/gpu.md: does it work,
what does each step cost, end to end, the engine beside it, the limit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

TOTAL_S = 570.0
"""What all sections of a run may take together: a machine that is lent ends a command after 600 s."""

STEPS = {
    1: "Does it work?",
    2: "What does each step cost?",
    3: "End to end",
    4: "The engine beside it",
    5: "The limit",
}

LEAST_STAGED = 0.5
LEAST_EQUAL = 0.8
MOST_LOST = 0.03


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was expected, and whether it is so; None where the answer does not say.

    Attributes:
        expected: what.
        is_so: whether.
        stops: whether nothing else is worth measuring where it is not so.
    """

    expected: str
    is_so: bool | None
    stops: bool = False


Result = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Section:
    """One question.

    Attributes:
        name: a word for it.
        step: which of the five steps it belongs to.
        question: what is asked.
        command: the program and its arguments.
        limit_s: how long it may take.
        environment: variables that are set for it.
        needs: a program without which it is left out; "" needs none.
        is_for_gpu: whether it makes no sense on a CPU.
        expected: what the answer should be, for who reads the plan.
        judge: what its result must be.
    """

    name: str
    step: int
    question: str
    command: tuple[str, ...]
    limit_s: float
    environment: Mapping[str, str] = field(default_factory=dict)
    needs: str = ""
    is_for_gpu: bool = False
    expected: str = ""
    judge: Callable[[Result], Iterator[Verdict]] | None = None

    def verdicts(self, result: Result | None) -> list[Verdict]:
        """Returns what must be, and whether it is; nothing where there is no result."""
        return [] if self.judge is None or result is None else list(self.judge(result))


def _exact(result: Result) -> Iterator[Verdict]:
    yield Verdict("every byte is right", bool(result["exact"]))


def _mapped(result: Result) -> Iterator[Verdict]:
    """A write between two processes of one host."""
    yield from _exact(result)
    ways = result["ways"]
    if result["device"] == "cuda":
        taken = any("cuda_ipc" in way["config"] for way in ways) if ways else None
        yield Verdict("UCX takes cuda_ipc", taken)
    emulated = any(way["emulated"] for way in ways) if ways else None
    yield Verdict("nothing is emulated by software", None if emulated is None else not emulated, stops=True)


def _unmapped(result: Result) -> Iterator[Verdict]:
    """The same with memory of which nothing is promised but that bytes arrive."""
    yield from _exact(result)
    if result["device"] == "cuda":
        capable = result["legacy_ipc_capable"]
        yield Verdict("memory of expandable_segments is not capable of the older CUDA IPC, as feared", capable is False)


def _kernels(result: Result) -> Iterator[Verdict]:
    large = [row for row in result["rows"] if row["mib"] == 64 and row["shape"].startswith("16 runs of 1 KiB")]
    for row in large:
        yield Verdict(
            f"gathers of 64 MiB reach {LEAST_STAGED} of the device's copies", row["gather_of_copy"] >= LEAST_STAGED
        )


def _bench(least_auto: float) -> Callable[[Result], Iterator[Verdict]]:
    def judge(result: Result) -> Iterator[Verdict]:
        yield from _exact(result)
        cases = {case["variant"]: case for case in result["cases"] if case["refused"] is None}
        auto = cases.get("auto")
        if auto is None or auto["efficiency"] is None:
            return
        yield Verdict(f"auto reaches {least_auto} of the bulk write", auto["efficiency"] >= least_auto)
        forced = [cases[name]["gb_per_s"] for name in ("direct", "staged") if name in cases]
        if forced:
            yield Verdict("auto is within a tenth of the better path", auto["gb_per_s"] >= 0.9 * max(forced))

    return judge


def _beside(result: Result) -> Iterator[Verdict]:
    yield Verdict("a decode step computes the same", bool(result["exact"]))
    lost = result["lost_beside_against"]["apart"]["step p50"]
    yield Verdict(f"a decode step loses at most {MOST_LOST:.0%} beside transfers against apart", lost <= MOST_LOST)


def _capture(result: Result) -> Iterator[Verdict]:
    steps = [row for row in result["rows"] if row["beside"] != "load NIXL"]  # UCX ends captures in every mode
    for mode in dict.fromkeys(row["mode"] for row in steps):
        is_well = not any(row["capture"] or row["step"] for row in steps if row["mode"] == mode)
        yield Verdict(f"captures in the mode {mode} go on beside every step but loading NIXL", is_well)


def _probe(name: str, device: str, *flags: str) -> tuple[str, ...]:
    rehearsal = ("--tiny",) if device == "cpu" else ()
    return (sys.executable, "-m", f"benchmarks.gpu_contact.probes.{name}", "--device", device, *rehearsal, *flags)


def _bench_command(device: str, *flags: str) -> tuple[str, ...]:
    shape = "--preset small --tokens 64" if device == "cpu" else "--preset qwen3-32b --tokens 1024 --in-flight 4"
    common = ("--device", device, "--page-size", "16", "--repetitions", "1", "--json")
    return (sys.executable, "-m", "kvferry", "bench", *shape.split(), *common, *flags)


def _sized(chunk_mib: int, ring_mib: int, workers: int) -> dict[str, str]:
    return {
        "KVFERRY_STAGING_CHUNK_MIB": str(chunk_mib),
        "KVFERRY_STAGING_RING_MIB": str(ring_mib),
        "KVFERRY_GATHER_WORKERS": str(workers),
    }


def sections(device: str = "cuda", tests: Sequence[str] = ()) -> list[Section]:
    """Returns everything that can be asked, the grid last, which is only run by name.

    Args:
        device: "cuda"; "cpu" rehearses with sizes whose figures mean nothing.
        tests: files with tests marked `gpu`.
    """
    python, unequal = (
        sys.executable,
        ("--prefill-tp", "2", "--decode-tp", "1", "--variants", "direct,staged,mapped,auto"),
    )
    pytest = (python, "-m", "pytest", "-m", "gpu", "-v", "-p", "no:cacheprovider")
    found = [
        Section("smi", 1, "Which GPU is there?", ("nvidia-smi",), 10, needs="nvidia-smi", is_for_gpu=True),
        Section("doctor", 1, "What does kvferry see?", (python, "-m", "kvferry", "doctor", "--json"), 30),
        Section(
            "bulk",
            1,
            "Which way do 64 MiB take between two processes?",
            _probe("bulk", device),
            30,
            expected="every byte is right, and cuda_ipc; where software emulates writes, all that follows is left out",
            judge=_mapped,
        ),
        Section(
            "bulk-vmm",
            1,
            "And from memory of expandable segments?",
            _probe("bulk", device),
            30,
            {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
            is_for_gpu=True,
            expected="every byte is right, not by cuda_ipc, and far slower",
            judge=_unmapped,
        ),
        Section(
            "unequal",
            3,
            "TP 2 to 1: direct, staged, mapped, auto",
            _bench_command(device, *unequal),
            45,
            expected=f"every byte is right; auto reaches {LEAST_STAGED} of the bulk write, and chooses the better path",
            judge=_bench(LEAST_STAGED),
        ),
        Section(
            "kernels",
            2,
            "How fast are gathers?",
            _probe("kernels", device, "--seconds", "24"),
            35,
            expected=f"at 64 MiB, {LEAST_STAGED} of the device's own copies or more; at 8 MiB far less",
            judge=_kernels,
        ),
        Section(
            "direct",
            2,
            "What does a descriptor cost?",
            _probe("direct", device, "--seconds", "30"),
            45,
            expected="every byte is right; lists make small descriptors cheaper",
            judge=_exact,
        ),
        Section(
            "tests",
            1,
            "Do the tests that need a GPU pass?",
            (*pytest, "--durations=15", *tests),
            70,
            is_for_gpu=True,
            expected="all pass",
        ),
        Section(
            "capture",
            4,
            "What may an endpoint do beside a capture?",
            _probe("capture", device),
            60,
            expected="captures in every mode go on, but for those while NIXL is loaded",
            judge=_capture,
        ),
        Section(
            "beside",
            4,
            "What does a decode step lose?",
            _probe("beside", device, "--seconds", "15"),
            40,
            expected=f"at most {MOST_LOST:.0%} of the median step",
            judge=_beside,
        ),
        Section("gather-call", 2, "What is one gather call made of?", _probe("gather_call", device), 20),
        Section(
            "unequal-large",
            3,
            "TP 2 to 1, staged, with large sub-chunks",
            _bench_command(device, *unequal[:-1], "staged"),
            30,
            _sized(64, 512, 1),
            expected=f"{LEAST_STAGED} of the bulk write",
            judge=_bench(LEAST_STAGED),
        ),
        Section(
            "equal",
            3,
            "Equal TP: direct, auto",
            _bench_command(device, "--variants", "direct,auto"),
            35,
            expected=f"auto reaches {LEAST_EQUAL} of the bulk write",
            judge=_bench(LEAST_EQUAL),
        ),
        Section(
            "fused",
            5,
            "Pages into pages of another process by one kernel",
            _probe("fused", device),
            25,
            expected="every byte is right; faster than gather, copy and scatter together",
            judge=_exact,
        ),
        Section("first-write", 2, "What does the first write cost?", _probe("first_write", device), 20, judge=_exact),
        Section(
            "priority",
            4,
            "Does a stream's priority help?",
            _probe("priority", device),
            15,
            expected="gathers wait for one matrix product, whatever their priority",
        ),
        Section(
            "sanitizer",
            1,
            "Do kernels keep within their memory?",
            (
                *("compute-sanitizer", "--error-exitcode=9", *pytest),
                *("-k", "odd_shapes", "tests/unit/staging/test_on_gpu.py"),
            ),
            25,
            needs="compute-sanitizer",
            is_for_gpu=True,
            expected="no error",
        ),
    ]
    return [*found, *_grid(device, unequal)]


def _grid(device: str, unequal: tuple[str, ...]) -> Iterator[Section]:
    for chunk_mib in (8, 32, 64):
        for ring_mib in (32, 256, 512):
            for workers in (1, 2):
                if ring_mib >= 2 * chunk_mib:
                    yield Section(
                        f"grid-{chunk_mib}-{ring_mib}-{workers}",
                        3,
                        f"Sub-chunks of {chunk_mib} MiB, rings of {ring_mib}, {workers} gather workers",
                        _bench_command(device, *unequal[:-1], "staged"),
                        30,
                        _sized(chunk_mib, ring_mib, workers),
                        judge=_exact,
                    )


def chosen(every: Sequence[Section], names: Sequence[str]) -> list[Section]:
    """Returns those that are named, in the order of their names; without names all but the grid.

    Raises:
        ValueError: for a name that none has; `grid` is all of the grid.
    """
    if not names:
        return [section for section in every if not section.name.startswith("grid-")]
    found = []
    for name in names:
        those = [section for section in every if section.name == name]
        if name == "grid":
            those = [section for section in every if section.name.startswith("grid-")]
        if not those:
            raise ValueError(f"{name!r} is none of {', '.join(section.name for section in every)}, or grid for those")
        found += those
    return found
