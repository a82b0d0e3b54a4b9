"""Judges what the demo's ranks reported: are the bytes the same, are the tokens the same, and how fast was it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from kvferry.applications.demo.options import DemoOptions, EngineShape, slices
from kvferry.applications.demo.pool import DECODE_POISON, Contents
from kvferry.applications.demo.ranks import Decoded, Described, Ended, Received, Sent, Undivided
from kvferry.applications.demo.reference.caches import array_shape, entries_kept
from kvferry.applications.demo.run import Outcome
from kvferry.layout import Box, Interval, RankLayout, ShardedComponent
from kvferry.observe.records import WriteRecord, busy_s
from kvferry.plan import Piece, elect_writer, pieces_for_receiver, prove

Shards = dict[int, dict[str, Contents]]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The demo's result.

    Attributes:
        tokens_match: whether every request's tokens equal the undivided model's.
        bytes_checked: bytes of received tokens and states that were compared with the sender's.
        bytes_mismatched: of those, how many differed, and bytes elsewhere in the pools that somebody changed.
        total_bytes: bytes that travelled.
        descriptors: descriptors that were posted, after merging.
        transfer_ms: for every request, from the submission of its last chunk to its arrival on every decode rank.
        gb_per_s: bytes that travelled, by the time in which any write was on its way.
        links: what every prefill rank sent to every decode rank: (prefill rank, decode rank) -> parts.
    """

    tokens_match: bool
    bytes_checked: int
    bytes_mismatched: int
    total_bytes: int
    descriptors: int
    transfer_ms: tuple[float, ...]
    gb_per_s: float
    links: dict[tuple[int, int], list[str]]
    answers: dict[int, list[int]]

    @property
    def holds(self) -> bool:
        """Whether the demo succeeded."""
        return self.tokens_match and self.bytes_mismatched == 0 and self.bytes_checked > 0


def judge(options: DemoOptions, outcome: Outcome) -> Verdict:
    """Compares everything that arrived with everything that was sent.

    Raises:
        ProofError: if the plan that was carried out is wrong.
    """
    checked = mismatched = 0
    for request in options.requests:
        sent = _shards(outcome, Sent, "prefill", request.prefill_engine, request.room)
        received = _shards(outcome, Received, "decode", request.decode_engine, request.room)
        for sharded in options.components:
            kept = entries_kept(sharded.component, len(request.token_ids))
            whole, conflicts = _whole(sharded, options.prefill, sent)
            mismatched += conflicts
            for coordinates in options.decode.coordinates:
                expected = _part(sharded, whole, options.decode.held(sharded, coordinates))
                actual = received[coordinates.engine_rank][sharded.component.name]
                checked += expected.cut(kept).size
                mismatched += _wrong_bytes(expected, actual, kept)
    mismatched += sum(ended.damaged_bytes for side in ("prefill", "decode") for _, ended in outcome.of(Ended, side))
    answers = {decoded.room: decoded.token_ids for _, decoded in outcome.of(Decoded, "decode")}
    undivided = {answer.room: answer.token_ids for _, answer in outcome.of(Undivided, "undivided")}
    writes = [write for _, sent_ in outcome.of(Sent, "prefill") for write in sent_.stats.writes]
    total_bytes = sum(write.total_bytes for write in writes)
    return Verdict(
        tokens_match=answers == undivided and len(answers) == len(options.requests),
        bytes_checked=checked,
        bytes_mismatched=mismatched,
        total_bytes=total_bytes,
        descriptors=sum(write.descriptors for write in writes),
        transfer_ms=tuple(_transfer_ms(outcome, request.room) for request in options.requests),
        gb_per_s=_rate(total_bytes, writes),
        links=_links(options, outcome),
        answers=answers,
    )


def _rate(total_bytes: int, writes: list[WriteRecord]) -> float:
    return total_bytes / busy_s(writes) / 1e9 if writes else 0.0


def _shards(outcome: Outcome, kind: type[Sent] | type[Received], side: str, engine: int, room: int) -> Shards:
    """What every rank of an engine reported of a room, by engine rank."""
    return {
        name.coordinates.engine_rank: report.shard
        for name, report in outcome.of(kind, side)
        if name.engine == engine and report.room == room
    }


def _where(sharded: ShardedComponent, box: Box) -> tuple[slice, ...]:
    """Where a rank's part lies in bytes [layer, entry, ...] of the whole component."""
    *others, last = slices(box)
    width = sharded.component.element_bytes
    return (*others, slice(last.start * width, last.stop * width))


def _whole(sharded: ShardedComponent, shape: EngineShape, sent: Shards) -> tuple[Contents, int]:
    """The whole component as the prefill ranks hold it, and how many bytes none holds or two disagree about."""
    component = sharded.component
    first = next(shard[component.name] for shard in sent.values() if shard[component.name].entries.size)
    *sizes, last = array_shape(component, first.entries.shape[1])
    whole = np.zeros((*sizes, last * component.element_bytes), np.uint8)
    is_known = np.zeros(whole.shape, np.bool_)
    conflicts = 0
    for engine_rank, shard in sent.items():
        part = shard[component.name].entries
        if part.size:
            where = _where(sharded, shape.held(sharded, shape.coordinates[engine_rank]))
            conflicts += int((is_known[where] & (whole[where] != part)).sum())
            whole[where] = part
            is_known[where] = True
    return Contents(first.start, whole), conflicts + int((~is_known).sum())


def _part(sharded: ShardedComponent, whole: Contents, box: Box) -> Contents:
    return Contents(whole.start, whole.entries[_where(sharded, box)])


def _wrong_bytes(expected: Contents, actual: Contents, kept: Interval) -> int:
    """Bytes that differ where the request needs them, or are neither untouched nor the sender's in the same pages."""
    needed = expected.cut(kept)
    if not needed.size or not actual.entries.size:
        return max(needed.size, actual.entries.size)
    if actual.cut(kept).shape != needed.shape:
        return needed.size
    is_wrong = actual.entries != DECODE_POISON
    low = max(expected.start, actual.start)
    high = min(expected.start + expected.entries.shape[1], actual.start + actual.entries.shape[1])
    both = Interval(low, high)
    is_wrong[:, low - actual.start : high - actual.start] &= actual.cut(both) != expected.cut(both)
    is_wrong[:, kept.start - actual.start : kept.stop - actual.start] = actual.cut(kept) != needed
    return int(is_wrong.sum())


def _transfer_ms(outcome: Outcome, room: int) -> float:
    # Of the ranks that sent something: one that was elected for nothing may come to the request after it has arrived.
    submitted = [
        report.stats.last_submitted_at
        for name, report in outcome.of(Sent, "prefill")
        if report.room == room and (report.stats.writes or name.coordinates.is_aux_writer)
    ]
    ended = [r.stats.ended_at for _, r in outcome.of(Received, "decode") if r.room == room]
    # Steady clocks of processes on one machine agree.
    return float(1e3 * (max(ended) - max(submitted)))


def _links(options: DemoOptions, outcome: Outcome) -> dict[tuple[int, int], list[str]]:
    """Proves every request's plan, and says who sends what to whom over all of them."""
    links: dict[tuple[int, int], dict[str, list[str]]] = {}
    for request in options.requests:
        sources = _layouts(outcome, "prefill", request.prefill_engine)
        receivers = _layouts(outcome, "decode", request.decode_engine)
        prove(sources, receivers, room=request.room)
        for receiver, layout in receivers.items():
            for piece in pieces_for_receiver(sources, layout):
                writer = elect_writer(piece, room=request.room, receiver=receiver)
                names = links.setdefault((writer, receiver), {}).setdefault(_describe(options, piece), [])
                if piece.component not in names:
                    names.append(piece.component)
    return {pair: [_named(options, names, part) for part, names in parts.items()] for pair, parts in links.items()}


def _named(options: DemoOptions, names: list[str], part: str) -> str:
    """The part, and what it is a part of where that does not go without saying."""
    return part if len(names) == len(options.components) else f"{', '.join(names)}: {part}"


def _layouts(outcome: Outcome, side: str, engine: int) -> dict[int, RankLayout]:
    return {
        name.coordinates.group_rank: described.layout
        for name, described in outcome.of(Described, side)
        if name.engine == engine
    }


def _describe(options: DemoOptions, piece: Piece) -> str:
    """A piece by the model's layers, without its component's name and without axes that are never divided."""
    sharded = next(each for each in options.components if each.component.name == piece.component)
    words = []
    for axis, interval in zip(sharded.component.axes, piece.box, strict=True):
        if axis.name == sharded.component.axes[0].name:
            words.append(f"{axis.name} {_ranges(sharded.layers[interval.start : interval.stop])}")
        elif axis.name == sharded.tp_axis:
            words.append(f"{axis.name} {_ranges(range(interval.start, interval.stop))}")
    return " ".join(words)


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers, such as '0-2,4'."""
    texts = []
    for _, run in groupby(enumerate(numbers), key=lambda numbered: numbered[1] - numbered[0]):
        first, *_, last = [number for _, number in run] * 2
        texts.append(f"{first}-{last}" if last > first else str(first))
    return ",".join(texts)
