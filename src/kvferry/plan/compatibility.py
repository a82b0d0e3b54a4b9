"""Whether two sides can exchange caches at all; asked once, when they connect."""

from __future__ import annotations

from kvferry.errors import IncompatiblePeerError
from kvferry.layout import Component, RankLayout


def check_exchangeable(source: RankLayout, destination: RankLayout, *, source_name: str, destination_name: str) -> None:
    """Refuses two layouts that describe different caches.

    Args:
        source_name, destination_name: how messages call the two sides.

    Raises:
        IncompatiblePeerError: naming everything that differs, with both values.
    """
    differences = []
    theirs = {shard.component.name: shard.component for shard in source.shards}
    ours = {shard.component.name: shard.component for shard in destination.shards}
    if theirs.keys() != ours.keys():
        differences.append(f"components: {source_name} has {sorted(theirs)}, {destination_name} has {sorted(ours)}")
    for name in sorted(theirs.keys() & ours.keys()):
        differences += _component_differences(theirs[name], ours[name], source_name, destination_name)
    if source.page_tokens != destination.page_tokens:
        differences.append(
            f"page size: {source_name} has {source.page_tokens} tokens a page, "
            f"{destination_name} {destination.page_tokens}"
        )
    if differences:
        raise IncompatiblePeerError("the two sides cannot exchange caches: " + "; ".join(differences))


def _component_differences(theirs: Component, ours: Component, source_name: str, destination_name: str) -> list[str]:
    differences = []
    if theirs.dtype != ours.dtype:
        differences.append(f"dtype of {theirs.name!r}: {source_name} {theirs.dtype}, {destination_name} {ours.dtype}")
    if theirs.axes != ours.axes:
        differences.append(
            f"axes of {theirs.name!r}: {source_name} ({', '.join(map(str, theirs.axes))}), "
            f"{destination_name} ({', '.join(map(str, ours.axes))})"
        )
    return differences
