"""Shows a plan as text for a person, and as one JSON object."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvferry.applications.plan.counting import PagePlacement
from kvferry.applications.plan.study import BALANCED_ROOMS, Pair, Side, Study
from kvferry.layout import Entry, ShardedComponent
from kvferry.plan.cost import TransferPath

SHOWN_RANKS = 16
"""Ranks of a side that the table shows; the rest is summed up."""

_PER = {Entry.TOKEN: "token", Entry.PAGE: "page", Entry.REQUEST: "request"}


# ---- data -----------------------------------------------------------------------------------------------------------


def as_json(study: Study) -> str:
    """The plan as one JSON object."""
    pages = study.request.pages
    slowest = study.slowest(pages)
    balance = study.balance
    return json.dumps(
        {
            "proved": study.is_proved,
            "refuted": study.refuted,
            "model": study.prefill.cache.name,
            "prefill": _side_data(study.prefill),
            "decode": _side_data(study.decode),
            "not_sent": dict(study.absent),
            "request": {"tokens": study.request.tokens, "room": study.request.room, "pages": pages.value},
            "pairs": [_pair_data(pair, pages) for pair in study.pairs],
            "path": study.path(pages),
            "why": None if slowest is None else slowest.choices[pages].reason,
            "direct": {
                "bytes": study.totals.num_bytes,
                "descriptors": study.totals.runs,
                "descriptors_merged": _by_pages(study.totals.descriptors),
                "seconds": study.seconds(TransferPath.DIRECT, pages),
            },
            "staged": {
                "bytes": study.totals.num_bytes,
                "runs_gathered": study.totals.runs,
                "bulk_writes": study.bulk_writes,
                "seconds": study.seconds(TransferPath.STAGED, pages),
            },
            "writers": [
                {"rank": rank, "bytes": num_bytes, "share": round(share, 6)}
                for rank, (num_bytes, share) in enumerate(zip(balance.this_room, balance.shares, strict=True))
            ],
            "planning_s": round(study.planning_s, 6),
            "proof_s": round(study.proof_s, 6),
        }
    )


def _by_pages(counts: dict[PagePlacement, int]) -> dict[str, int]:
    return {pages.value: count for pages, count in counts.items()}


def _side_data(side: Side) -> dict[str, Any]:
    specification = side.specification
    return {
        "ranks": len(side.coordinates),
        "tp": specification.tp,
        "pp": specification.pp,
        "cp": specification.cp,
        "dp": specification.dp,
        "ep": specification.ep,
        "layers_per_stage": list(side.stages),
        "tokens_held": str(specification.partition),
        "page_tokens": side.options.page_tokens,
        "layout": side.options.order.value,
        "components": [
            {
                "name": sharded.component.name,
                "per": _PER[sharded.component.entry],
                "layers": list(sharded.layers),
                "axes": {axis.name: axis.size for axis in sharded.component.axes[1:]},
                "tp_axis": sharded.tp_axis,
                "dtype": sharded.component.dtype,
                "window_tokens": sharded.component.window_tokens,
                "bytes": _entry_bytes(sharded),
            }
            for sharded in side.components
        ],
    }


def _pair_data(pair: Pair, pages: PagePlacement) -> dict[str, Any]:
    return {
        "src": pair.source,
        "dst": pair.receiver,
        "bytes_per_token": pair.bytes_per_token,
        "bytes_per_window_token": pair.bytes_per_window_token,
        "bytes_per_request": pair.bytes_per_request,
        "runs_per_page": pair.runs_per_page,
        "runs_per_slot": pair.runs_per_slot,
        "tokens": pair.travelling.tokens,
        "bytes": pair.travelling.num_bytes,
        "descriptors": pair.travelling.runs,
        "descriptors_merged": _by_pages(pair.travelling.descriptors),
        "bulk_writes": pair.bulk_writes,
        "path": pair.choices[pages].path.value,
    }


# ---- text -----------------------------------------------------------------------------------------------------------


def show(study: Study, console: Console) -> None:
    """The plan for a person."""
    for line in _header(study):
        console.print(Text.from_markup(line), highlight=False)
    console.print(_components(study))
    for title, measure in _measures(study):
        console.print(_matrix(study, title, measure))
    console.print(Text("\n".join(_notes(study)), style="dim"))
    console.print(_paths(study))
    for line in why(study):
        console.print(line, highlight=False, markup=False)
    console.print(_writers(study))
    console.print(verdict(study), highlight=False, style="bold green" if study.is_proved else "bold red", markup=False)


def verdict(study: Study) -> str:
    """Whether the plan is right, in one line."""
    if study.refuted is not None:
        return f"NOT PROVED: {study.refuted}"
    sent = {delivery.piece.component for delivery in study.deliveries}
    ranks = len(study.decode.layouts)
    return (
        f"proved: every destination byte of {_count(len(sent), 'component')} on {_count(ranks, 'rank')} is written "
        f"exactly once ({(study.planning_s + study.proof_s) * 1e3:.0f} ms)"
    )


def _header(study: Study) -> Iterator[str]:
    yield f"[bold]{study.prefill.cache.name}[/], {study.prefill.cache.num_layers} layers"
    for side in (study.prefill, study.decode):
        yield f"  {side.name:8}{side_in_words(side)}"
        specification = side.specification
        if specification.dp > 1:
            yield (
                f"          {specification.dp} data-parallel groups: a request lives in one of them, shown as group 0; "
                "the others hold the same for theirs"
            )
        if specification.ep > 1:
            yield f"          EP {specification.ep} divides weights, and no cache: it changes nothing here"


def side_in_words(side: Side) -> str:
    """How a side is divided, and its pages."""
    ranks, pages = len(side.coordinates), side.options.page_tokens
    partitioned = "" if side.specification.cp == 1 else f", {side.specification.partition}"
    stages = "" if side.specification.pp == 1 else f", stages of {stage_sizes(side.stages)} layers"
    return (
        f"{side.specification.short}: {_count(ranks, 'rank')} a request{stages}{partitioned}, pages of {pages} tokens, "
        f"{side.options.order.value.upper()}"
    )


def stage_sizes(stages: tuple[int, ...]) -> str:
    """Such as "7+8", or "8 x 2" where there are many."""
    if len(stages) > 4 and len(set(stages)) == 1:
        return f"{len(stages)} x {stages[0]}"
    return "+".join(map(str, stages))


def _components(study: Study) -> Table:
    table = Table(title="What is cached")
    for name in ("component", "one entry per", "layers", "entry", "dtype", "TP divides", "bytes, all layers"):
        table.add_column(name, justify="right" if name.startswith("bytes") else "left")
    of_decode = [each for each in study.decode.components if study.absent.get(each.component.name) == "decode"]
    for sharded in (*study.prefill.components, *of_decode):
        component = sharded.component
        window = "" if component.window_tokens is None else f", last {component.window_tokens} only"
        absent = study.absent.get(component.name)
        table.add_row(
            component.name if absent is None else f"{component.name} ({absent} only: not sent)",
            f"{_PER[component.entry]}{window}",
            numbers_in_words(sharded.layers),
            " x ".join(map(str, component.axes[1:])) or "1",
            component.dtype,
            sharded.tp_axis or "nothing",
            f"{_entry_bytes(sharded):,}",
        )
    return table


def _entry_bytes(sharded: ShardedComponent) -> int:
    component = sharded.component
    return prod(axis.size for axis in component.axes) * component.element_bytes


def numbers_in_words(numbers: tuple[int, ...]) -> str:
    """Ascending numbers, shortened: "0-63", "3-47 (12 of them)"."""
    steps = {high - low for low, high in pairwise(numbers)}
    if steps <= {1}:
        return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
    if len(numbers) <= 3:
        return ", ".join(map(str, numbers))
    return f"{numbers[0]}-{numbers[-1]} ({len(numbers)} of them)"


def _measures(study: Study) -> Iterator[tuple[str, Callable[[Pair], int]]]:
    pairs = study.pairs
    if any(pair.bytes_per_token for pair in pairs):
        yield "Bytes per token, who sends to whom", lambda pair: pair.bytes_per_token
    if any(pair.bytes_per_window_token for pair in pairs):
        yield "Of these for tokens of a window alone", lambda pair: pair.bytes_per_window_token
    if any(pair.bytes_per_request for pair in pairs):
        yield "Bytes per request (slots), who sends to whom", lambda pair: pair.bytes_per_request


def _matrix(study: Study, title: str, measure: Callable[[Pair], int]) -> Table:
    values = np.zeros((len(study.prefill.layouts), len(study.decode.layouts)), np.int64)
    for pair in study.pairs:
        values[pair.source, pair.receiver] = measure(pair)
    values = _summed_up(_summed_up(values).T).T
    values = np.column_stack((values, values.sum(axis=1)))
    table = Table("prefill \\ decode", title=title)
    for name in (*_names(study.decode), "sent"):
        table.add_column(name, justify="right")
    for name, row in zip(_names(study.prefill), values.tolist(), strict=True):
        table.add_row(name, *map(_cell, row))
    table.add_section()
    table.add_row("received", *map(_cell, values.sum(axis=0).tolist()))
    return table


def _names(side: Side) -> list[str]:
    """The ranks that are shown, and how many are summed up in the last row or column."""
    ranks = [_rank(side, rank) for rank in sorted(side.layouts)]
    hidden = len(ranks) - SHOWN_RANKS
    return [*ranks[:SHOWN_RANKS], f"{hidden} more"] if hidden > 0 else ranks


def _summed_up(values: NDArray[Any]) -> NDArray[Any]:
    """The rows of ranks that are shown, and the sum of all others where there are any."""
    return np.add.reduceat(values, np.arange(min(len(values), SHOWN_RANKS + 1)))


def _rank(side: Side, rank: int) -> str:
    place = side.place(rank)
    return f"{rank} ({place})" if "," in place else str(rank)


def _cell(value: int) -> str:
    return f"{value:,}" if value else "."


def _notes(study: Study) -> Iterator[str]:
    compact = max(len(study.prefill.layouts), len(study.decode.layouts)) > SHOWN_RANKS
    if compact:
        amounts = [pair.bytes_per_token or pair.bytes_per_request for pair in study.pairs]
        yield (
            f"{len(study.pairs):,} pairs of ranks exchange {min(amounts):,} to {max(amounts):,} bytes; --json lists "
            "them all"
        )
    if study.prefill.specification.cp > 1 or study.decode.specification.cp > 1:
        yield "With context parallelism: the bytes of each token that travels between the two; not all tokens do."
    runs = sorted({pair.runs_per_page for pair in study.pairs if pair.runs_per_page})
    if runs:
        span = f"{runs[0]:,}" if len(runs) == 1 else f"{runs[0]:,} to {runs[-1]:,}"
        yield f"A pair of ranks has {span} runs in a page of the prefill side."


def _paths(study: Study) -> Table:
    totals, request = study.totals, study.request
    table = Table(title=f"A request of {request.tokens:,} tokens, all ranks together")
    table.add_column("path")
    for column in ("bytes", "pieces before merging", "after merging", "if pages lie", "estimate"):
        table.add_column(column, justify="left" if column == "if pages lie" else "right")
    for pages in PagePlacement:
        table.add_row(
            "direct",
            f"{totals.num_bytes:,}",
            f"{totals.runs:,} descriptors",
            f"{totals.descriptors[pages]:,} descriptors",
            pages.value,
            f"{study.seconds(TransferPath.DIRECT, pages) * 1e3:.2f} ms",
        )
    table.add_row(
        "staged",
        f"{totals.num_bytes:,}",
        f"{totals.runs:,} runs gathered",
        f"{study.bulk_writes:,} bulk writes",
        "either way",
        f"{study.seconds(TransferPath.STAGED, request.pages) * 1e3:.2f} ms",
    )
    return table


def why(study: Study) -> Iterator[str]:
    """Which path would be chosen, and why."""
    pages = study.request.pages
    slowest = study.slowest(pages)
    if slowest is None:
        yield "path: none, since nothing travels"
        return
    others = [each for each in PagePlacement if study.path(each) != study.path(pages)]
    yield (
        f"path: {study.path(pages)}, if pages lie {pages.value}. The slowest pair, prefill {slowest.source} to decode "
        f"{slowest.receiver}: {slowest.choices[pages].reason}"
    )
    for other in others:
        yield f"path: {study.path(other)}, if pages lie {other.value}"
    yield "Estimated with constants of one machine; endpoints measure theirs when they connect."


def _writers(study: Study) -> Table:
    balance, room = study.balance, study.request.room
    table = Table(title="Balance over the prefill ranks")
    table.add_column("prefill rank")
    table.add_column(f"bytes in room {room}", justify="right")
    table.add_column(f"share over {BALANCED_ROOMS} rooms", justify="right")
    columns = (_summed_up(np.array(each)).tolist() for each in (balance.this_room, balance.shares))
    for name, num_bytes, share in zip(_names(study.prefill), *columns, strict=True):
        table.add_row(name, f"{num_bytes:,}", f"{share:.1%}")
    table.add_section()
    shares = balance.shares
    table.add_row(
        "least, mean, most",
        f"{min(balance.this_room):,}, {sum(balance.this_room) // len(shares):,}, {max(balance.this_room):,}",
        f"{min(shares):.1%}, {sum(shares) / len(shares):.1%}, {max(shares):.1%}",
    )
    return table


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
