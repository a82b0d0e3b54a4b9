"""Judges what the demo's ranks reported: are the bytes the same, are the tokens the same, and how fast was it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.applications.demo.options import DemoOptions
from kvferry.applications.demo.ranks import DECODE_POISON, Answered, Ended, Moved
from kvferry.applications.demo.run import Outcome, RankName
from kvferry.layout import RankLayout
from kvferry.observe.records import busy_s
from kvferry.plan import Piece, elect_writer, pieces_for_receiver, prove
from kvferry.plan.requests.page_numbers import AnyPages
from kvferry.pools.contents import CopiedContents, Elements
from kvferry.pools.places import entries_kept, places
from kvferry.pools.pool import Pool


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
        page_tokens, num_tokens = options.prefill.page_tokens, len(request.token_ids)
        sent = CopiedContents(-(-num_tokens // page_tokens) * page_tokens)
        for name, report in _of_room(outcome, "prefill", request.prefill_engine, request.room):
            mismatched += _add(sent, outcome.pool(name), report.pages)
        for name, report in _of_room(outcome, "decode", request.decode_engine, request.room):
            found = _compare(outcome.pool(name), report.pages, sent, num_tokens)
            checked, mismatched = checked + found[0], mismatched + found[1]
    mismatched += sum(ended.damaged_bytes for side in ("prefill", "decode") for _, ended in outcome.of(Ended, side))
    answers = {decoded.room: decoded.token_ids for _, decoded in outcome.of(Answered, "decode")}
    undivided = {answer.room: answer.token_ids for _, answer in outcome.of(Answered, "undivided")}
    writes = [write for _, report in outcome.of(Moved, "prefill") for write in report.stats.writes]
    total_bytes = sum(write.total_bytes for write in writes)
    return Verdict(
        tokens_match=answers == undivided and len(answers) == len(options.requests),
        bytes_checked=checked,
        bytes_mismatched=mismatched,
        total_bytes=total_bytes,
        descriptors=sum(write.descriptors for write in writes),
        transfer_ms=tuple(_transfer_ms(outcome, request.room) for request in options.requests),
        gb_per_s=total_bytes / busy_s(writes) / 1e9 if writes else 0.0,
        links=_links(options, outcome),
        answers=answers,
    )


def _of_room(outcome: Outcome, side: str, engine: int, room: int) -> list[tuple[RankName, Any]]:
    """What every rank of an engine reported of a room."""
    return [(name, each) for name, each in outcome.of(Moved, side) if name.engine == engine and each.room == room]


def _add(sent: CopiedContents, pool: Pool, pages: AnyPages) -> int:
    """Adds what a prefill rank's pages hold; returns the bytes of all parts about which another rank disagrees."""
    conflicts = 0
    for shard, index, where, positions in places(pool.layout, pages, None, None):
        elements = pool.elements(shard, index)[where]
        try:
            sent.add(shard, shard.box[0].start + index, positions, elements)
        except ValueError:
            conflicts += elements.nbytes
    return conflicts


def _compare(pool: Pool, pages: AnyPages, sent: CopiedContents, num_tokens: int) -> tuple[int, int]:
    """How many bytes a request needs of a decode rank, and how many are wrong in its pages there.

    Those must be the sender's, and what is beside them untouched or the sender's as well.
    """
    checked = wrong = 0
    for shard, index, where, positions in places(pool.layout, pages, None, None):
        kept = entries_kept(shard.component, num_tokens)
        is_needed = (positions >= kept.start) & (positions < kept.stop)
        is_known = positions < sent.tokens
        got = _bytes(pool.elements(shard, index)[where])
        differs = np.ones(got.shape, np.bool_)
        differs[is_known] = got[is_known] != _bytes(sent.of(shard, shard.box[0].start + index, positions[is_known]))
        differs[~is_needed] &= got[~is_needed] != DECODE_POISON
        checked += got[is_needed].size
        wrong += int(differs.sum())
    return checked, wrong


def _bytes(elements: Elements) -> NDArray[np.uint8]:
    """The bytes of every entry, [entry, byte]."""
    return np.ascontiguousarray(elements).view(np.uint8).reshape(len(elements), -1)


def _transfer_ms(outcome: Outcome, room: int) -> float:
    # Of the ranks that sent something: one that was elected for nothing may come to the request after it has arrived.
    submitted = [
        report.stats.last_submitted_at
        for name, report in outcome.of(Moved, "prefill")
        if report.room == room and (report.stats.writes or name.coordinates.is_aux_writer)
    ]
    ended = [r.stats.ended_at for _, r in outcome.of(Moved, "decode") if r.room == room]
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
    count = len(options.components)  # what a part is of goes without saying where it is of all
    return {
        pair: [part if len(names) == count else f"{', '.join(names)}: {part}" for part, names in parts.items()]
        for pair, parts in links.items()
    }


def _layouts(outcome: Outcome, side: str, engine: int) -> dict[int, RankLayout]:
    return {
        name.coordinates.group_rank: outcome.pool(name).layout
        for name, _ in outcome.of(Ended, side)
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
