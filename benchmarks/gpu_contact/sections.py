"""What is asked of a machine with a GPU, in two parts and in the order of what teaches most, each with its limit.

The first part asks what is right, the second how fast it is; what is in neither is asked by name. The limits of a part
add up to less than one command on a lent machine may take. On a CPU every section runs as well, with what stands in
for the device there. Steps: does it work, what does each step cost, end to end, the engine beside it, the limit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

TOTAL_S = {1: 350.0, 2: 330.0}
"""What the sections of each part may take together: a machine is lent for fifteen minutes, its start included."""

NAMED_S = 570.0
"""The same of sections that are asked by name: a machine that is lent ends a command after 600 s."""

STEPS = {
    1: "Does it work?",
    2: "What does each step cost?",
    3: "End to end",
    4: "The engine beside it",
    5: "The limit",
}

LEAST_STAGED = 0.5
LEAST_EQUAL = 0.8
MOST_LOST = {"p50": 0.03, "p99": 0.1}
LEAST_BESIDE = 0.8
"""Of the GB/s apart, beside a decode step: steps that lose nothing while transfers stand still say nothing."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was expected, and whether it is so; None where the answer does not say.

    Attributes:
        expected: what.
        is_so: whether.
        stops: whether nothing else that goes over a wire is worth measuring where it is not so.
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
        part: of the visit, 1 or 2; 0 is asked by name.
        needs: a program without which it is left out; "" needs none.
        needs_wire: whether it measures writes by a transport, and nothing where software emulates them.
        expected: what the answer should be, for who reads the plan.
        judge: what its result must be.
    """

    name: str
    step: int
    question: str
    command: tuple[str, ...]
    limit_s: float
    environment: Mapping[str, str] = field(default_factory=dict)
    part: int = 0
    needs: str = ""
    needs_wire: bool = False
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


def _transfers(least: float) -> Callable[[Result], Iterator[Verdict]]:
    def judge(result: Result) -> Iterator[Verdict]:
        yield from _exact(result)
        moved = [row for row in result["rows"] if row["refused"] is None]
        staged = [row["efficiency"] for row in moved if row["variant"] == "staged"]
        if staged:
            yield Verdict(f"staged reaches {least} of the bulk write with some sizes", max(staged) >= least)
        by_itself = {row["variant"]: row["gb_per_s"] for row in moved if row["chunk/ring/workers"] == "as they are"}
        forced = [by_itself[name] for name in ("direct", "staged") if name in by_itself]
        if "auto" in by_itself and forced:
            yield Verdict("auto is within a tenth of the better path", by_itself["auto"] >= 0.9 * max(forced))

    return judge


def _beside(result: Result) -> Iterator[Verdict]:
    yield Verdict("a decode step computes the same", bool(result["exact"]))
    speeds = result["gb_per_s"]
    yield Verdict(
        f"transfers beside it reach {LEAST_BESIDE} of those apart",
        speeds["beside"] >= LEAST_BESIDE * speeds["apart"] > 0,
    )
    for kind, most in MOST_LOST.items():
        lost = result["lost_beside_against"]["apart"][f"step {kind}"]
        yield Verdict(f"a decode step loses at most {most:.0%} at {kind} beside transfers against apart", lost <= most)


def _killed(result: Result) -> Iterator[Verdict]:
    for row in result["rows"]:
        yield Verdict(f"the {row['other']} computes on when the {row['killed']} is killed", row["well"])
        yield Verdict(f"its memory is at rest when the {row['killed']} has gone", row["at_rest"])


def _capture(result: Result) -> Iterator[Verdict]:
    steps = [row for row in result["rows"] if row["beside"] != "load NIXL"]  # UCX ends captures in every mode
    for mode in dict.fromkeys(row["mode"] for row in steps):
        is_well = not any(row["capture"] or row["step"] for row in steps if row["mode"] == mode)
        yield Verdict(f"captures in the mode {mode} go on beside every step but loading NIXL", is_well)


def _probe(name: str, device: str, *flags: str) -> tuple[str, ...]:
    rehearsal = ("--tiny",) if device == "cpu" else ()
    return (sys.executable, "-m", f"benchmarks.gpu_contact.probes.{name}", "--device", device, *rehearsal, *flags)


def sections(device: str = "cuda", tests: Sequence[str] = ()) -> list[Section]:
    """Returns everything that can be asked.

    Args:
        device: "cuda"; "cpu" rehearses, with what stands in for the device and sizes whose figures mean nothing.
        tests: files with tests marked `gpu`.
    """
    has_gpu = device == "cuda"
    python = sys.executable
    pytest = (python, "-m", "pytest", "-v", "-p", "no:cacheprovider")
    made_up = (*pytest, "tests/unit/staging/test_order_on_device.py")  # the same code, on a device without hardware
    null_device = (python, "-m", "benchmarks.interpreter_seconds", "--json")
    odd_shapes = (*pytest, "-m", "gpu", "-k", "odd_shapes", "tests/unit/staging/test_on_gpu.py")
    return [
        Section(
            "smi",
            1,
            "Which GPU is there?",
            ("nvidia-smi",) if has_gpu else ("nproc",),
            10,
            part=1,
            needs="nvidia-smi" if has_gpu else "",
        ),
        Section("doctor", 1, "What does kvferry see?", (python, "-m", "kvferry", "doctor", "--json"), 40, part=1),
        Section(
            "bulk",
            1,
            "Which way do 64 MiB take between two processes?",
            _probe("bulk", device),
            30,
            part=1,
            expected="every byte is right, and cuda_ipc; where software emulates it, what needs a wire is left out",
            judge=_mapped,
        ),
        Section(
            "tests",
            1,
            "Do the tests that need a GPU pass?",
            (*pytest, "-m", "gpu", "--durations=15", *tests) if has_gpu else made_up,
            80,
            part=1,
            expected="all pass",
        ),
        Section(
            "sanitizer",
            1,
            "Do kernels keep within their memory?",
            ("compute-sanitizer", "--error-exitcode=9", *odd_shapes)
            if has_gpu
            else (*made_up, "-k", "ordered or order"),
            30,
            part=1,
            needs="compute-sanitizer" if has_gpu else "",
            expected="no error",
        ),
        Section(
            "capture",
            4,
            "What may an endpoint do beside a capture in the mode that engines take?",
            _probe("capture", device, "--mode", "global"),
            45,
            part=1,
            expected="captures go on, but for those while NIXL is loaded",
            judge=_capture,
        ),
        Section(
            "beside",
            4,
            "What does a decode step lose, and do transfers go on beside it?",
            _probe("beside", device, "--seconds", "20"),
            50,
            part=1,
            needs_wire=True,
            expected="at most 3 % of the median step and 10 % of the 99th percentile",
            judge=_beside,
        ),
        Section(
            "null-device",
            2,
            "What does a gigabyte cost the interpreter on this machine's cores, without device and wire?",
            (
                *null_device,
                "--chunk-mib",
                "16",
                "64",
                "--tokens",
                *(("16384",) if has_gpu else ("512", "--rounds", "1")),
            ),
            60,
            part=1,
            expected="0.031 to 0.036 s a GB, as on two cores",
        ),
        Section(
            "unequal",
            3,
            "TP 2 to 1 by sizes, at least 2 s a turn",
            _probe("transfers", device, "--prefill-tp", "2", "--seconds", "75", "--trace"),
            95,
            part=2,
            needs_wire=True,
            expected=f"every byte is right; {LEAST_STAGED} of the bulk write; seconds by cause and one trace",
            judge=_transfers(LEAST_STAGED),
        ),
        Section(
            "equal",
            3,
            "TP 1 to 1 by sizes, at least 2 s a turn",
            _probe("transfers", device, "--seconds", "50"),
            70,
            part=2,
            needs_wire=True,
            expected=f"every byte is right; {LEAST_EQUAL} of the bulk write",
            judge=_transfers(LEAST_EQUAL),
        ),
        Section(
            "killed",
            5,
            "What becomes of the other process when one is killed in a mapped copy?",
            _probe("killed", device),
            49,
            part=2,
            expected="it computes on, and its memory is at rest",
            judge=_killed,
        ),
        Section(
            "mps",
            3,
            "And under MPS: does the GPU's taking turns cost it, or the code?",
            _probe("mps", device, "--seconds", "20"),
            45,
            part=2,
            needs="nvidia-cuda-mps-control" if has_gpu else "",
            needs_wire=True,
            judge=_exact,
        ),
        Section(
            "ncu",
            2,
            "What bounds the kernels at three widths of rows?",
            (
                *(("ncu", "--set", "basic", "-k", "regex:copy_", "-c", "12") if has_gpu else ()),
                *_probe("widths", device),
            ),
            35,
            part=2,
            needs="ncu" if has_gpu else "",
            expected="memory; the log has the counters",
            judge=_exact,
        ),
        Section(
            "locked",
            4,
            "And beside a thread that keeps the interpreter's lock?",
            _probe("beside", device, "--seconds", "12", "--keeps-lock"),
            35,
            part=2,
            needs_wire=True,
            expected="transfers slow down, and the step computes the same",
            judge=_exact,
        ),
        Section(
            "bulk-vmm",
            1,
            "And 64 MiB from memory of expandable segments?",
            _probe("bulk", device),
            30,
            {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
            expected="every byte is right, not by cuda_ipc, and far slower",
            judge=_unmapped,
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
            needs_wire=True,
            expected="every byte is right; lists make small descriptors cheaper",
            judge=_exact,
        ),
        Section("gather-call", 2, "What is one gather call made of?", _probe("gather_call", device), 20),
        Section(
            "fused",
            5,
            "Pages into pages of another process by one kernel",
            _probe("fused", device),
            25,
            expected="every byte is right; faster than gather, copy and scatter together",
            judge=_exact,
        ),
        Section(
            "first-write",
            2,
            "What does the first write cost?",
            _probe("first_write", device),
            20,
            needs_wire=True,
            judge=_exact,
        ),
        Section(
            "priority",
            4,
            "Does a stream's priority help?",
            _probe("priority", device),
            15,
            expected="gathers wait for one matrix product, whatever their priority",
        ),
    ]


def of_part(every: Sequence[Section], part: int | None) -> list[Section]:
    """Returns the sections of a part; of None, all."""
    return [section for section in every if part is None or section.part == part]


def chosen(every: Sequence[Section], names: Sequence[str]) -> list[Section]:
    """Returns those that are named, in the order of their names.

    Raises:
        ValueError: for a name that none has.
    """
    by_name = {section.name: section for section in every}
    if unknown := next((name for name in names if name not in by_name), None):
        raise ValueError(f"{unknown!r} is none of {', '.join(by_name)}")
    return [by_name[name] for name in names]
