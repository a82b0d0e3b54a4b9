"""Judges what the demo's ranks reported: are the bytes the same, are the tokens the same, and how fast was it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvferry.cli.demo.options import DemoOptions, EngineShape
from kvferry.cli.demo.ranks import Decoded, Described, Ended, Received, Sent, Undivided
from kvferry.cli.demo.run import Outcome
from kvferry.endpoint.stats import WriteRecord, busy_s
from kvferry.layout import Component, RankLayout
from kvferry.plan import Piece, elect_writer, pieces_for_receiver, prove

Shards = dict[int, dict[str, NDArray[np.uint8]]]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The demo's result.

    Attributes:
        tokens_match: whether every request's tokens equal the undivided model's.
        bytes_checked: bytes of received pages that were compared with the sender's.
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
        for component in options.components:
            truth, conflicts = _whole(component, options.prefill, sent)
            mismatched += conflicts
            for coordinates in options.decode.coordinates:
                expected = _part(component, options.decode, coordinates.engine_rank, truth)
                actual = received[coordinates.engine_rank][component.name]
                checked += expected.size
                mismatched += int((expected != actual).sum()) if expected.shape == actual.shape else expected.size
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


def _index(component: Component, shape: EngineShape, engine_rank: int) -> tuple[slice, ...]:
    """Where a rank's part lies in an array [layer, token, ...] of the whole component."""
    held = shape.held(component, shape.coordinates[engine_rank])
    intervals = [held.get(axis.name) for axis in component.axes]
    slices = [slice(part.start, part.stop) if part is not None else slice(None) for part in intervals]
    return (slices[0], slice(None), *slices[1:])


def _whole(component: Component, shape: EngineShape, sent: Shards) -> tuple[NDArray[np.uint8], int]:
    """The whole component as the prefill ranks hold it, and how many bytes two of them disagree about."""
    sizes = [axis.size for axis in component.axes]
    sizes[-1] *= component.element_bytes
    tokens = next(shard[component.name].shape[1] for shard in sent.values() if shard[component.name].size)
    whole = np.zeros((sizes[0], tokens, *sizes[1:]), np.uint8)
    is_known = np.zeros(whole.shape, np.bool_)
    conflicts = 0
    for engine_rank, shard in sent.items():
        part = shard[component.name]
        if part.size:
            where = _index(component, shape, engine_rank)
            conflicts += int((is_known[where] & (whole[where] != part)).sum())
            whole[where] = part
            is_known[where] = True
    return whole, conflicts + int((~is_known).sum())


def _part(component: Component, shape: EngineShape, engine_rank: int, whole: NDArray[np.uint8]) -> NDArray[np.uint8]:
    part = whole[_index(component, shape, engine_rank)]
    return part if part.size else np.empty((0,), np.uint8)


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
    links: dict[tuple[int, int], list[str]] = {}
    for request in options.requests:
        sources = _layouts(outcome, "prefill", request.prefill_engine)
        receivers = _layouts(outcome, "decode", request.decode_engine)
        prove(sources, receivers, room=request.room)
        for receiver, layout in receivers.items():
            for piece in pieces_for_receiver(sources, layout):
                writer = elect_writer(piece, room=request.room, receiver=receiver)
                parts = links.setdefault((writer, receiver), [])
                if (text := _describe(options, piece)) not in parts:
                    parts.append(text)
    return links


def _layouts(outcome: Outcome, side: str, engine: int) -> dict[int, RankLayout]:
    return {
        name.coordinates.group_rank: described.layout
        for name, described in outcome.of(Described, side)
        if name.engine == engine
    }


def _describe(options: DemoOptions, piece: Piece) -> str:
    """A piece without its component's name and without axes that are never divided."""
    component = next(each for each in options.components if each.name == piece.component)
    words = []
    for axis, interval in zip(component.axes, piece.box, strict=True):
        if axis.name in ("layer", "head"):
            last = interval.stop - 1
            words.append(f"{axis.name} {interval.start}" + (f"-{last}" if last > interval.start else ""))
    return " ".join(words)
