"""Draws a plan: prefill ranks left, decode ranks right, and every part in the colour of the rank that writes it.

Each rank has a panel for every kind of state: its frame is the whole model, layers from top to bottom and, where tensor
parallelism divides something, that from left to right. What the rank holds is filled. With context parallelism the
tokens of a part run from left to right inside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import ceil, lcm
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch, Rectangle
from matplotlib.path import Path as Curve
from numpy.typing import NDArray

from kvferry.applications.plan.report import numbers_in_words, side_in_words, verdict
from kvferry.applications.plan.study import Pair, Side, Study
from kvferry.layout import Axis, Component, Entry, Interval, Shard, ShardedComponent, TokenPartition, TokenShare
from kvferry.layout.interval import Box, volume

_PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#7F6BB3")
"""Told apart by colour-blind readers too."""

_MANY_COLOURS = "viridis"
_INK, _FAINT, _FRAME, _HELD = "#1a1a1a", "#5f5f5f", "#b5b5b5", "#e8e8e8"
_LISTED_RANKS, _RANKS_IN_COLUMN, _RANKS_WITH_RANGES = 16, 8, 8
_MOST_RIBBONS, _MOST_LABELS = 160, 20
_MOST_TOKENS_DRAWN = 4096
_HEADER, _KINDS, _FOOTER, _MARGIN, _GAP = 0.95, 0.62, 0.92, 0.35, 0.14
_PANEL_WIDTHS = {1: 2.6, 2: 1.7, 3: 1.35, 4: 1.1}


@dataclass(frozen=True, slots=True)
class Kind:
    """Components that every side divides alike, and that are drawn as one.

    Attributes:
        members: the components.
        across: the axis that tensor parallelism divides; None if it divides nothing.
    """

    members: tuple[ShardedComponent, ...]
    across: Axis | None

    @property
    def title(self) -> str:
        """The components' names."""
        names = [member.component.name for member in self.members]
        return ", ".join(names) if len(names) <= 3 else f"{', '.join(names[:2])} + {len(names) - 2} more"

    @property
    def subtitle(self) -> str:
        """What runs down and across."""
        layers = f"{len(self.members[0].layers)} layers"
        return layers if self.across is None else f"{layers} x {self.across.size} {self.across.name}s"

    @property
    def remark(self) -> str:
        """What of a request it is that travels, if not every token."""
        component = self.members[0].component
        if component.entry is Entry.REQUEST:
            return "one slot a request"
        return "" if component.window_tokens is None else f"last {component.window_tokens} tokens"

    def across_of(self, component: Component, box: Box) -> tuple[float, float]:
        """Where a box starts and stops from left to right, as parts of the whole."""
        for axis, interval in zip(component.axes, box, strict=True):
            if self.across is not None and axis.name == self.across.name:
                return interval.start / axis.size, interval.stop / axis.size
        return 0.0, 1.0


def kinds_of(study: Study) -> tuple[Kind, ...]:
    """The kinds of state that travel."""
    kinds: dict[object, Kind] = {}
    for sharded in study.prefill.components:
        if sharded.component.name in study.absent:
            continue
        component = sharded.component
        across = next((axis for axis in component.axes if axis.name == sharded.tp_axis), None)
        key = sharded.layers, across, component.window_tokens, component.entry, component.is_optional
        earlier = kinds[key].members if key in kinds else ()
        kinds[key] = Kind((*earlier, sharded), across)
    return tuple(kinds.values())


def draw(study: Study, file: Path) -> None:
    """Draws a plan to a file, in the format that its name ends in."""
    # Text stays text in SVG, and the same plan gives the same file.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "kvferry", "hatch.linewidth": 0.5}):
        metadata = {"Date": None} if file.suffix.lower() == ".svg" else {}
        _Picture(study).figure.savefig(file, dpi=140, metadata=metadata)


class _Picture:
    """The figure, in inches from the upper left corner."""

    def __init__(self, study: Study) -> None:
        self._study = study
        self._kinds = kinds_of(study)
        self._colours = _colours(len(study.prefill.layouts))
        ranks = max(len(side.layouts) for side in (study.prefill, study.decode))
        self._is_listed = ranks <= _LISTED_RANKS
        self._has_ranges = ranks <= _RANKS_WITH_RANGES
        self._panel_height = 0.34 if self._is_listed and not self._has_ranges else 0.62
        range_lines = (1 if len(self._kinds) == 1 else 2) if self._has_ranges else 0
        self._row_height = self._panel_height + (0.3 + 0.12 * range_lines if range_lines else 0.24)
        self._panel_width = _PANEL_WIDTHS.get(len(self._kinds), 0.95) * (1.0 if self._is_listed else 0.42)
        self._cell_width = len(self._kinds) * (self._panel_width + _GAP) - _GAP
        self._partitioned = drawn_tokens(study.prefill.specification.partition, study.decode.specification.partition)
        columns = [self._columns(side) for side in (study.prefill, study.decode)]
        rows = max(ceil(len(side.layouts) / self._columns(side)) for side in (study.prefill, study.decode))
        widths = [count * (self._cell_width + 0.3) - 0.3 for count in columns]
        self._middle = 2.6 if self._is_listed else 0.9
        self._lefts = (_MARGIN, _MARGIN + widths[0] + self._middle)
        self._body = _HEADER + _KINDS
        self._body_height = rows * self._row_height
        self._width = max(self._lefts[1] + widths[1] + _MARGIN, 9.0)
        self._height = self._body + self._body_height + _FOOTER
        self.figure = Figure(figsize=(self._width, self._height), facecolor="white")
        self._axes: Axes = self.figure.add_axes((0, 0, 1, 1))
        self._axes.set_xlim(0, self._width)
        self._axes.set_ylim(self._height, 0)
        self._axes.axis("off")
        self._draw()

    def _columns(self, side: Side) -> int:
        return 1 if self._is_listed else ceil(len(side.layouts) / _RANKS_IN_COLUMN)

    def _draw(self) -> None:
        study = self._study
        self._header()
        for side, left in zip((study.prefill, study.decode), self._lefts, strict=True):
            self._side_titles(side, left)
            for rank in side.layouts:
                self._rank(side, rank)
        if self._is_listed and len(study.pairs) <= _MOST_RIBBONS:
            self._ribbons()
        else:
            y = self._body + self._body_height / 2
            self._text(self._lefts[1] - self._middle / 2, y, "\u2192", size=28, colour=_FAINT, ha="center", va="center")
        self._footer()

    # ---- around it --------------------------------------------------------------------------------------------------

    def _header(self) -> None:
        study = self._study
        sides = f"{study.prefill.specification.short} \u2192 {study.decode.specification.short}"
        self._text(_MARGIN, 0.36, f"{study.prefill.cache.name}: {sides}", size=15, weight="bold")
        colour = "#00734f" if study.is_proved else "#b00020"
        self._text(_MARGIN, 0.62, verdict(study), size=8.5, colour=colour)

    def _side_titles(self, side: Side, left: float) -> None:
        self._text(left, _HEADER + 0.02, side.name.upper(), size=10, weight="bold", colour=_FAINT)
        if side.specification.dp > 1:
            groups = f"one of {side.specification.dp} data-parallel groups"
            self._text(left + 0.85, _HEADER + 0.02, groups, size=7, colour=_FAINT)
        for column in range(self._columns(side) if self._is_listed else 1):
            for number, kind in enumerate(self._kinds):
                x = left + column * (self._cell_width + 0.3) + number * (self._panel_width + _GAP)
                if not self._is_listed and len(self._kinds) > 1:
                    x, y = left, _HEADER + 0.19 + number * 0.12
                    line = f"{number + 1}: {kind.title}, {kind.subtitle}, {self._remark(kind)}".removesuffix(", ")
                    self._text(x, y, line, size=6.5, colour=_FAINT)
                    continue
                self._text(x, _HEADER + 0.22, kind.title, size=8, weight="bold")
                self._text(x, _HEADER + 0.36, kind.subtitle, size=7, colour=_FAINT)
                self._text(x, _HEADER + 0.49, self._remark(kind), size=7, colour=_FAINT)

    def _remark(self, kind: Kind) -> str:
        """What is special about a kind, in a few words."""
        is_partitioned = self._partitioned > 1 and kind.members[0].component.entry is not Entry.REQUEST
        return ", ".join(filter(None, [kind.remark, "inside a part: tokens, left to right" if is_partitioned else ""]))

    def _footer(self) -> None:
        study, y = self._study, self._body + self._body_height + 0.2
        self._patch(_MARGIN, y - 0.1, 0.26, 0.14, face=self._colours[0])
        self._patch(_MARGIN + 0.28, y - 0.1, 0.26, 0.14, face=self._colours[-1])
        self._text(_MARGIN + 0.62, y, "colour and number: the prefill rank that writes it", size=7.5)
        if any(len(delivery.piece.holders) > 1 for delivery in study.deliveries):
            self._patch(_MARGIN + 3.6, y - 0.1, 0.26, 0.14, face=_HELD, hatch="////")
            words = f"held, but sent by another rank in room {study.request.room}; rooms take turns"
            self._text(_MARGIN + 3.94, y, words, size=7.5)
        lines = [f"{side.name}: {side_in_words(side)}" for side in (study.prefill, study.decode)]
        lines.append(
            f"a request of {study.request.tokens:,} tokens: {_bytes(study.totals.num_bytes)} in "
            f"{study.totals.runs:,} runs; path: {study.path(study.request.pages)}"
        )
        if self._partitioned > 1:
            lines[-1] += f"; {self._partitioned} tokens are drawn"
        for number, line in enumerate(lines):
            self._text(_MARGIN, y + 0.22 + number * 0.16, line, size=7, colour=_FAINT)

    # ---- ranks ------------------------------------------------------------------------------------------------------

    def _place(self, side: Side, rank: int) -> tuple[float, float]:
        """The upper left corner of a rank's panels."""
        left = self._lefts[0] if side is self._study.prefill else self._lefts[1]
        below_title = 0.17
        if not self._is_listed:
            column, row = divmod(rank, _RANKS_IN_COLUMN)
            return left + column * (self._cell_width + 0.3), self._body + row * self._row_height + below_title
        pitch = self._body_height / len(side.layouts)
        return left, self._body + pitch * (rank + 0.5) - self._row_height / 2 + below_title

    def _rank(self, side: Side, rank: int) -> None:
        x, y = self._place(side, rank)
        is_source = side is self._study.prefill
        place = side.place(rank)
        title = f"{side.name} {rank}"
        if self._is_listed:
            self._text(x, y - 0.05, title, size=8.5, weight="bold")
            self._text(x + 0.078 * len(title) + 0.12, y - 0.05, place, size=7, colour=_FAINT)
            self._text(x + self._cell_width, y - 0.05, self._amount(rank, is_source), size=7, colour=_FAINT, ha="right")
        else:
            self._text(x, y - 0.04, title, size=6, weight="bold")
            self._text(x + self._cell_width, y - 0.04, place, size=5, colour=_FAINT, ha="right")
        for number, kind in enumerate(self._kinds):
            self._panel(side, rank, kind, x + number * (self._panel_width + _GAP), y)

    def _amount(self, rank: int, is_source: bool) -> str:
        pairs = [pair for pair in self._study.pairs if rank == (pair.source if is_source else pair.receiver)]
        if not pairs:
            return "sends nothing" if is_source else "receives nothing"
        if self._partitioned > 1:
            return _bytes(sum(pair.travelling.num_bytes for pair in pairs))
        return _amounts(pairs)

    def _panel(self, side: Side, rank: int, kind: Kind, x: float, y: float) -> None:
        width, height = self._panel_width, self._panel_height
        layout, is_source = side.layouts[rank], side is self._study.prefill
        component = kind.members[0].component.name
        self._patch(x, y, width, height, face="white")
        held = [shard for shard in layout.shards_of(component) if volume(shard.box)]
        for shard in held:
            mask = self._held_tokens(side, rank, shard.component)
            rectangle = self._rectangle(kind, shard.component, shard.box, x, y)
            self._stripes(rectangle, mask, face=_HELD, hatch="////")
        sent = [
            each
            for each in self._study.deliveries
            if each.piece.component == component and rank == (each.source if is_source else each.receiver)
        ]
        for delivery in sent:
            mask = self._held_tokens(self._study.prefill, delivery.source, delivery.routed.destination.component)
            mask = mask & self._held_tokens(
                self._study.decode, delivery.receiver, delivery.routed.destination.component
            )
            rectangle = self._rectangle(kind, delivery.routed.destination.component, delivery.piece.box, x, y)
            self._stripes(rectangle, mask, face=self._colours[delivery.source])
            if not is_source:
                self._number(rectangle, mask, delivery.source)
        self._divisions(kind, x, y)
        frame = Rectangle((x, y), width, height, facecolor="none", edgecolor=_FRAME, linewidth=0.6, zorder=4)
        self._axes.add_patch(frame)
        if not held:
            self._text(x + width / 2, y + height / 2, "nothing", size=6.5, colour=_FAINT, ha="center", va="center")
        elif self._has_ranges:
            words = self._ranges(kind, held[0])
            for line, text in enumerate([", ".join(words)] if len(self._kinds) == 1 else words):
                self._text(x, y + height + 0.12 + 0.11 * line, text, size=6.5, colour=_FAINT)

    def _held_tokens(self, side: Side, rank: int, component: Component) -> NDArray[np.bool_]:
        """Which of the tokens that are drawn a rank holds."""
        if component.entry is Entry.REQUEST or self._partitioned == 1:
            return np.ones(1, np.bool_)
        share: TokenShare = side.layouts[rank].tokens
        return share.holds(np.arange(self._partitioned, dtype=np.int64), block=share.partition.block(self._partitioned))

    def _rectangle(
        self, kind: Kind, component: Component, box: Box, x: float, y: float
    ) -> tuple[float, float, float, float]:
        start, stop = kind.across_of(component, box)
        layers: Interval = box[0]
        top, bottom = (edge / component.axes[0].size for edge in (layers.start, layers.stop))
        width, height = self._panel_width, self._panel_height
        return x + start * width, y + top * height, (stop - start) * width, (bottom - top) * height

    def _stripes(
        self, rectangle: tuple[float, float, float, float], mask: NDArray[np.bool_], *, face: str, hatch: str = ""
    ) -> None:
        x, y, width, height = rectangle
        for start, stop in stretches(mask):
            part = width / len(mask)
            self._patch(x + start * part, y, (stop - start) * part, height, face=face, hatch=hatch)

    def _number(self, rectangle: tuple[float, float, float, float], mask: NDArray[np.bool_], source: int) -> None:
        """The writer's number on its part, where there is room for it."""
        x, y, width, height = rectangle
        size = 7.5 if self._has_ranges else 5.5 if self._is_listed else 5.0
        for start, stop in stretches(mask):
            part = width / len(mask)
            if (stop - start) * part < 0.0085 * size * (0.6 + len(str(source))) or height < 0.0135 * size:
                continue
            middle = x + (start + stop) / 2 * part
            colour = _contrast(self._colours[source])
            self._text(middle, y + height / 2, str(source), size=size, colour=colour, ha="center", va="center_baseline")

    def _divisions(self, kind: Kind, x: float, y: float) -> None:
        """A line between what lies side by side, such as heads."""
        if kind.across is None or kind.across.size > 16:
            return
        for index in range(1, kind.across.size):
            at = x + index * self._panel_width / kind.across.size
            self._axes.plot([at, at], [y, y + self._panel_height], color="white", linewidth=0.4, alpha=0.7, zorder=3)

    def _ranges(self, kind: Kind, shard: Shard) -> list[str]:
        """The part that a rank holds, such as heads and layers."""
        words = [
            f"{axis.name}{_range(interval)}"
            for axis, interval in zip(shard.component.axes[1:], shard.box[1:], strict=True)
            if kind.across is not None and axis.name == kind.across.name
        ]
        layers = kind.members[0].layers[shard.box[0].start : shard.box[0].stop]
        return [*words, f"layer{'s' if len(layers) > 1 else ''} {numbers_in_words(layers)}"]

    # ---- between ranks ----------------------------------------------------------------------------------------------

    def _ribbons(self) -> None:
        """A ribbon for every pair, as thick as it has bytes."""
        study = self._study
        most = max((pair.travelling.num_bytes for pair in study.pairs), default=1)
        left = self._lefts[0] + self._cell_width + 0.04
        right = self._lefts[1] - 0.04
        for pair in study.pairs:
            out = self._port(study.prefill, pair.source, [p for p in study.pairs if p.source == pair.source], pair)
            into = self._port(
                study.decode, pair.receiver, [p for p in study.pairs if p.receiver == pair.receiver], pair
            )
            amount = ""
            if len(study.pairs) <= _MOST_LABELS:
                amount = _bytes(pair.travelling.num_bytes) if self._partitioned > 1 else _amounts([pair])
            end = right - 0.1 - 0.05 * len(amount)
            middle = (left + end) / 2
            curve = Curve(
                [(left, out), (middle, out), (middle, into), (end, into), (right, into)],
                [Curve.MOVETO, Curve.CURVE4, Curve.CURVE4, Curve.CURVE4, Curve.LINETO],
            )
            thickness = 1.0 + 5.0 * pair.travelling.num_bytes / most
            self._axes.add_patch(
                PathPatch(
                    curve,
                    facecolor="none",
                    edgecolor=self._colours[pair.source],
                    linewidth=thickness if len(study.pairs) <= 64 else thickness / 3,
                    alpha=0.75,
                    capstyle="butt",
                    zorder=1,
                )
            )
            if amount:
                self._axes.text(
                    right - 0.08,
                    into,
                    amount,
                    fontsize=6.5,
                    color=_INK,
                    ha="right",
                    va="center",
                    zorder=4,
                    bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.85},
                )

    def _port(self, side: Side, rank: int, pairs: Sequence[Pair], pair: Pair) -> float:
        """Where a pair's ribbon begins or ends on a rank, from top to bottom."""
        _, y = self._place(side, rank)
        return y + self._panel_height * (pairs.index(pair) + 0.5) / len(pairs)

    # ---- ink --------------------------------------------------------------------------------------------------------

    def _text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float,
        colour: str = _INK,
        weight: str = "normal",
        ha: str = "left",
        va: str = "baseline",
    ) -> None:
        self._axes.text(x, y, text, fontsize=size, color=colour, fontweight=weight, ha=ha, va=va, zorder=5)

    def _patch(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        face: str,
        hatch: str = "",
    ) -> None:
        edge = "#bdbdbd" if hatch else "none"
        patch = Rectangle((x, y), width, height, facecolor=face, edgecolor=edge, linewidth=0, hatch=hatch or None)
        patch.set_zorder(2)
        self._axes.add_patch(patch)


def drawn_tokens(one: TokenPartition, other: TokenPartition) -> int:
    """How many tokens show how both sides partition them: the fewest after which nothing new appears."""
    cut = [partition for partition in (one, other) if not partition.is_whole]
    cycles = lcm(
        *(partition.block_tokens * len(partition.pattern) for partition in cut if partition.block_tokens is not None)
    )
    parts = lcm(
        *(len(partition.pattern) * (partition.page_tokens or 1) for partition in cut if partition.block_tokens is None)
    )
    tokens = cycles * parts
    return tokens if tokens <= _MOST_TOKENS_DRAWN else max(parts, _MOST_TOKENS_DRAWN // parts * parts)


def stretches(mask: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Start and stop of every stretch of True."""
    at = 0
    for is_set, group in groupby(mask.tolist()):
        length = len(list(group))
        if is_set:
            yield at, at + length
        at += length


def _colours(count: int) -> tuple[str, ...]:
    if count <= len(_PALETTE):
        return _PALETTE[:count]
    colours = mpl.colormaps[_MANY_COLOURS](np.linspace(0.0, 1.0, count))
    return tuple(mpl.colors.to_hex(colour) for colour in colours)


def _contrast(colour: str) -> str:
    red, green, blue = mpl.colors.to_rgb(colour)
    return "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.55 else _INK


def _range(interval: Interval) -> str:
    return f" {interval.start}" if len(interval) == 1 else f"s {interval.start}-{interval.stop - 1}"


def _amounts(pairs: Iterable[Pair]) -> str:
    """Bytes a token and a request."""
    pairs = list(pairs)
    token, slots = sum(pair.bytes_per_token for pair in pairs), sum(pair.bytes_per_request for pair in pairs)
    words = [f"{_bytes(token)}/token"] if token else []
    if slots:
        words.append(f"{_bytes(slots)}/request")
    return " + ".join(words)


def _bytes(number: int) -> str:
    amount = float(number)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024 or unit == "GiB":
            break
        amount /= 1024
    return f"{amount:.0f} {unit}" if amount == int(amount) or amount >= 100 else f"{amount:.1f} {unit}"
