"""docs/design/benchmarks.md from what was measured: pure, so that tests can read it.

A run is one JSON object: the machine, every step's command and what it printed, or why it failed. The page has one
section for each kind of device, between marks; what stands outside them is written by hand and stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Run: TypeAlias = Mapping[str, Any]
Result: TypeAlias = Mapping[str, Any]
Verdict: TypeAlias = "tuple[str, bool]"

MOST_STEADY_GROWTH_BYTES = 1 << 20
"""Growth with every transfer, over all of them, below this is called none: an allocator keeps about so much more or
less from one moment to the next."""

MOST_GROWTH_BYTES = 8 << 20
"""The same of all growth, also what is made once: no more than a staging ring of the default size."""

TITLES = {"cpu": "CPU memory", "cuda": "One GPU"}


class NotMeasuredError(Exception):
    """There is no figure; the message says why."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table of what must be reached.

    Attributes:
        case: what is measured.
        target: what must be reached, in words.
        judge: what was measured, in words, and whether it is enough. Raises `NotMeasuredError` without a figure.
    """

    case: str
    target: str
    judge: Callable[[Run], Verdict]


def result_of(run: Run, step: str) -> Result:
    """What a step printed.

    Raises:
        NotMeasuredError: if it failed or was left out.
    """
    found = run["steps"].get(step)
    if found is None:
        raise NotMeasuredError("left out")
    if "error" in found:
        raise NotMeasuredError(found["error"])
    result: Result = found["result"]
    return result


def figures_of(run: Run, step: str, variant: str, page_tokens: int, pages: str) -> Mapping[str, Any]:
    """One case of a step that ran `kvferry bench`.

    Raises:
        NotMeasuredError: if there is none, the variant was refused, or a byte was wrong.
    """
    for case in result_of(run, step)["cases"]:
        if (case["variant"], case["prefill_page_tokens"], case["pages"]) == (variant, page_tokens, pages):
            if case["refused"] is not None:
                raise NotMeasuredError(f"refused: {case['refused']}")
            if not case["exact"]:
                raise NotMeasuredError(f"{case['bytes_wrong']:,} bytes were wrong")
            return case  # type: ignore[no-any-return]
    raise NotMeasuredError(f"no {variant} variant")


def _field(step: str, variant: str, page_tokens: int, pages: str, name: str) -> Callable[[Run], float]:
    def value(run: Run) -> float:
        found = figures_of(run, step, variant, page_tokens, pages)[name]
        if found is None:
            raise NotMeasuredError(f"no {name}")
        return float(found)

    return value


def _at_least(value: Callable[[Run], float], limit: float, unit: str) -> Callable[[Run], Verdict]:
    def judge(run: Run) -> Verdict:
        found = value(run)
        return f"{number(found)}{unit}", found >= limit

    return judge


def _at_most(value: Callable[[Run], float], limit: float, unit: str) -> Callable[[Run], Verdict]:
    def judge(run: Run) -> Verdict:
        found = value(run)
        return f"{number(found)}{unit}", found <= limit

    return judge


def number(value: float) -> str:
    """Three digits, without an exponent."""
    decimals = next((digits for digits, limit in enumerate((100, 10, 1)) if abs(value) >= limit), 3)
    return f"{value:,.{decimals}f}"


def _submit(run: Run) -> Verdict:
    sizes = result_of(run, "submit")["sizes"]
    p50, p99 = (max(size["submit_us"][name] for size in sizes) for name in ("p50", "p99"))
    return f"p50 {number(p50)} us, p99 {number(p99)} us in the slowest of {len(sizes)} sizes", p50 <= 10 and p99 <= 50


def _blocking(run: Run) -> Verdict:
    waits, returns = (
        figures_of(run, "steady", variant, 16, "scattered")["submit_us"]["p50"] for variant in ("synchronous", "auto")
    )
    ratio = waits / returns
    return f"{number(ratio)}x ({number(waits)} us against {number(returns)} us)", ratio >= 1000


def _steadiness(run: Run) -> float:
    latency = figures_of(run, "steady", "auto", 16, "scattered")["latency_ms"]
    return float(latency["p99"] / latency["p50"])


def _idle(run: Run) -> float:
    found = result_of(run, "idle")
    return float(found["prefill_percent"] + found["decode_percent"])


def _first(run: Run) -> float:
    return float(result_of(run, "first")["more_ms"])


def _growth(run: Run) -> Verdict:
    found = result_of(run, "growth")
    growth, steady = (
        {side: found[f"{side}_{kind}_bytes"] for side in ("prefill", "decode")} for kind in ("growth", "steady_growth")
    )
    grown = ", ".join(
        f"{side} {number(growth[side] / 2**20)} MiB (steadily {number(steady[side] / 2**20)})" for side in growth
    )
    is_none = max(steady.values()) <= MOST_STEADY_GROWTH_BYTES and max(growth.values()) <= MOST_GROWTH_BYTES
    return f"{grown} in {found['counted']:,} transfers", is_none


def rows(device: str) -> list[Row]:
    """The table of what must be reached on a kind of device."""
    table = [
        Row(
            f"equal TP, {page_tokens}-token pages, {pages}",
            f"{limit} of the bulk write",
            _at_least(_field(step, "auto", page_tokens, pages, "efficiency"), limit, ""),
        )
        for step, page_tokens, pages, limit in (
            ("equal", 16, "scattered", 0.9),
            ("equal", 16, "contiguous", 0.9),
            ("equal", 64, "scattered", 0.9),
            ("equal", 64, "contiguous", 0.9),
            ("one-token", 1, "contiguous", 0.9),
            ("one-token", 1, "scattered", 0.35),
        )
    ]
    for step in ("2->1", "1->2", "4->2"):
        case = f"TP {step}, 16-token pages, scattered"
        auto = (step, "auto", 16, "scattered")
        table += [
            Row(case, "0.35 of the bulk write", _at_least(_field(*auto, "efficiency"), 0.35, "")),
            Row(case, "4x the direct path", _at_least(_field(*auto, "ratio_to_direct"), 4, "x")),
            Row(case, "at most 1.0 CPU-s a GB, both sides", _at_most(_field(*auto, "cpu_s_per_gb"), 1.0, " CPU-s/GB")),
        ]
        if device == "cuda":
            staged = _field(step, "staged", 16, "scattered", "efficiency")
            table.append(Row(f"{case}, staged", "0.8 of the bulk write", _at_least(staged, 0.8, "")))
    return [
        *table,
        Row("caller's time for a submit, any size", "p50 10 us, p99 50 us", _submit),
        Row("blocking of the caller, synchronous against asynchronous", "1,000x", _blocking),
        Row("p99 / p50 of latency at steady load", "at most 2", _at_most(_steadiness, 2, "")),
        Row("idle pair of endpoints", "at most 1 % of a core", _at_most(_idle, 1, " %")),
        Row("first transfer to a new peer, 128 regions of 6,144 pages", "50 ms more", _at_most(_first, 50, " ms more")),
        Row("growth of memory with the number of transfers", "none", _growth),
    ]


def section(run: Run) -> str:
    """The section of one kind of device, without its marks."""
    device = run["device"]
    lines = [f"## {TITLES[device]}", "", *_machine(run), "", "### What must be reached", ""]
    lines += ["| case | must reach | measured | reached |", "|---|---|---|---|"]
    for row in rows(device):
        try:
            measured, is_reached = row.judge(run)
            verdict = "yes" if is_reached else "**no**"
        except NotMeasuredError as error:
            measured, verdict = _one_line(str(error)), "not measured"
        except (KeyError, TypeError) as error:
            measured, verdict = f"an output without what is looked for: {_one_line(str(error))}", "not measured"
        lines.append(f"| {row.case} | {row.target} | {measured} | {verdict} |")
    lines += ["", "### All cases", "", *_cases(run), "", "### Commands", "", "```", *_commands(run), "```", ""]
    return "\n".join(lines)


def _machine(run: Run) -> Iterable[str]:
    machine = run["machine"]
    for name, value in machine.items():
        yield f"* {name}: {value}"
    yield f"* measured in {run['seconds']:.0f} s, every byte checked: {'all right' if is_exact(run) else 'SOME WRONG'}"


def is_exact(run: Run) -> bool:
    """Whether no step saw a wrong byte."""
    return all(step["result"].get("exact", True) for step in run["steps"].values() if "result" in step)


def _cases(run: Run) -> Iterable[str]:
    columns = ["case", "variant", "path", "GB/s", "bulk", "efficiency", "x direct", "CPU-s/GB"]
    yield f"| {' | '.join(columns)} |"
    yield "|" + "---|" * len(columns)
    for name, step in run["steps"].items():
        for case in step.get("result", {}).get("cases", ()):
            label = case["case"] + (" (steady)" if name == "steady" else "")
            yield f"| {' | '.join([label, case['variant'], *_cells(case)])} |"


def _cells(case: Mapping[str, Any]) -> list[str]:
    if case["refused"] is not None:
        return [f"refused: {_one_line(case['refused'])}", *[""] * 5]
    ratio = case["ratio_to_direct"]
    return [
        case["path"],
        number(case["gb_per_s"]),
        number(case["bulk_gb_per_s"]),
        number(case["efficiency"]),
        "" if ratio is None else number(ratio),
        number(case["cpu_s_per_gb"]),
    ]


def _commands(run: Run) -> Sequence[str]:
    return [step["command"] for step in run["steps"].values()]


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "/")


def with_section(page: str, device: str, written: str) -> str:
    """The page with a device's section made anew. One that it does not have comes at the end."""
    start, stop = f"<!-- {device} -->", f"<!-- /{device} -->"
    block = f"{start}\n{written}{stop}"
    if start not in page:
        return f"{page.rstrip()}\n\n{block}\n"
    before, rest = page.split(start, 1)
    return before + block + rest.split(stop, 1)[1]
