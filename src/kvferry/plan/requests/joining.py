"""Joins chunks of the same pages that have layers which follow each other, so that they leave in one write."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import structs

from kvferry.layout import Interval, Shard
from kvferry.plan.requests.chunks import HandedIn


def components_by_group(shards: Iterable[Shard]) -> dict[str, frozenset[str]]:
    """Returns the names of the components that a rank has in each of its groups."""
    components: dict[str, frozenset[str]] = {}
    for shard in shards:
        components[shard.group] = components.get(shard.group, frozenset()) | {shard.component.name}
    return components


def joined(first: HandedIn, second: HandedIn, components: Mapping[str, frozenset[str]]) -> HandedIn | None:
    """Returns two chunks as one, or None if they are not of the same pages, or do not follow each other.

    The second may have groups that the first lacks, and the other way around: as where recurrent state is there with
    the last layers.

    Args:
        first: the one that was handed in first. The joined one has its number.
        second: the next one.
        components: the names of the components of each group.
    """
    if first.layers is None or second.layers is None or first.completes or first.token_part != second.token_part:
        return None
    layers = dict(first.layers)
    for name, part in second.layers.items():
        union = _union(layers[name], part) if name in layers else part
        if union is None:
            return None
        layers[name] = union
    parts = {group.name: (group, start, pages) for group, start, pages in first.parts}
    for group, start, pages in second.parts:
        known = parts.get(group.name)
        if known is None and components[group.name].isdisjoint(first.layers):
            parts[group.name] = group, start, pages
        elif known is None or known[1:] != (start, pages):
            return None
    lacking = parts.keys() - {group.name for group, _, _ in second.parts}
    if any(not components[name].isdisjoint(second.layers) for name in lacking):
        return None
    return structs.replace(
        second,
        number=first.number,
        parts=tuple(parts.values()),
        submitted_at=first.submitted_at,
        layers=layers,
    )


def _union(first: Interval, second: Interval) -> Interval | None:
    """Returns the interval that two make, in whichever order; None if they make none."""
    low, high = sorted((first, second), key=lambda part: part.start)
    return Interval(low.start, high.stop) if low.stop == high.start else None
