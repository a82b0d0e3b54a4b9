"""Reads the vectors of docs/specification as somebody would who has nothing but the documents: not a line of kvferry.

Every element is looked at by itself, by what it is (component, indices, token), and found in the memory of whoever
holds it: no boxes are intersected, no axes melt, nothing is planned. That is slow, and vectors are small.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from itertools import product
from math import gcd
from typing import Any, TypeAlias

JSON: TypeAlias = dict[str, Any]

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}
WHOLE = {"pattern": [0], "block_tokens": 1, "page_tokens": None}


def moves(vector: JSON) -> list[list[int]]:
    """What moves, by the layouts and the pages: as the vector should list it."""
    copied = sorted(
        (receiver, target, writer, source, size)
        for receiver in range(len(vector["decode"]))
        for there in vector["decode"][receiver]["layout"]["shards"]
        for writer, here in _shards(vector, there["component"]["name"])
        for source, target, size in _between(vector, writer, here, receiver, there)
    )
    joined: list[list[int]] = []
    for receiver, target, writer, source, size in copied:
        here, there = _within(vector["prefill"][writer], source), _within(vector["decode"][receiver], target)
        row = [writer, *here, receiver, *there, size]
        if joined and _goes_on(joined[-1], row):
            joined[-1][6] += size
        else:
            joined.append(row)
    return joined


def _shards(vector: JSON, name: str) -> Iterator[tuple[int, JSON]]:
    for rank, each in enumerate(vector["prefill"]):
        yield from ((rank, shard) for shard in each["layout"]["shards"] if shard["component"]["name"] == name)


def _goes_on(last: list[int], row: list[int]) -> bool:
    return [*last[:2], last[2] + last[6], *last[3:5], last[5] + last[6]] == row[:6]


def _within(rank: JSON, address: int) -> tuple[int, int]:
    """The region that an address is in, and where in it."""
    for number, (begin, length) in enumerate(rank["regions"]):
        if begin <= address < begin + length:
            return number, address - begin
    raise ValueError(f"address {address} is in none of the regions {rank['regions']}")


def regions(rank: JSON) -> list[list[int]]:
    """The regions of a rank, by its layout."""
    found: list[list[int]] = []
    for begin, length in sorted(each for shard in rank["layout"]["shards"] for each in _extents(shard)):
        if found and begin < sum(found[-1]):
            found[-1][1] = max(sum(found[-1]), begin + length) - found[-1][0]
        else:
            found.append([begin, length])
    return found


def _extents(shard: JSON) -> Iterator[tuple[int, int]]:
    page_tokens, num_pages, page_stride, token_stride = shard["paging"]
    counts = [num_pages, page_tokens if token_stride else 1, *(stop - start for start, stop in shard["box"][1:])]
    steps = zip(counts, [page_stride, token_stride, *shard["strides"]], strict=True)
    last = sum((count - 1) * stride for count, stride in steps)
    return ((address, last + BYTES[shard["component"]["dtype"]]) for address in shard["addresses"])


# ---- elements -------------------------------------------------------------------------------------------------------


def _between(vector: JSON, writer: int, here: JSON, receiver: int, there: JSON) -> Iterator[tuple[int, int, int]]:
    """Every element that a rank writes from one of its shards to a shard of a receiver: from where, to where, bytes."""
    component = there["component"]
    pairs = _places(vector, writer, here, receiver, there)
    for index in product(*(range(start, stop) for start, stop in there["box"])):
        if _holds(here, index) and _elected(vector, writer, here, receiver, index) == writer:
            for source, target in pairs:
                yield _address(here, index, *source), _address(there, index, *target), BYTES[component["dtype"]]


def _holds(shard: JSON, index: tuple[int, ...]) -> bool:
    return all(start <= each < stop for each, (start, stop) in zip(index, shard["box"], strict=True))


def _elected(vector: JSON, writer: int, here: JSON, receiver: int, index: tuple[int, ...]) -> int:
    """Of those who hold an element, for the same tokens, the one who sends it."""
    mine = _share(vector["prefill"][writer], here)
    holders = [
        rank
        for rank, shard in _shards(vector, here["component"]["name"])
        if _holds(shard, index) and _share(vector["prefill"][rank], shard)["part"] == mine["part"]
    ]
    return holders[(zlib.crc32(vector["room"].to_bytes(8, "little")) + receiver) % len(holders)]


def _address(shard: JSON, index: tuple[int, ...], page: int, token: int) -> int:
    _, _, page_stride, token_stride = shard["paging"]
    first, *others = (each - start for each, (start, _) in zip(index, shard["box"], strict=True))
    steps = sum(each * stride for each, stride in zip(others, shard["strides"], strict=True))
    address: int = shard["addresses"][first] + page * page_stride + token * token_stride + steps
    return address


# ---- tokens ---------------------------------------------------------------------------------------------------------


def _places(
    vector: JSON, writer: int, here: JSON, receiver: int, there: JSON
) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """The page and the token in it of every entry that moves, on either side."""
    pages = vector["prefill"][writer]["pages"][here["group"]]
    (wanted,) = (each for each in vector["decode"][receiver]["groups"] if each["name"] == there["group"])
    entry, size, other_size = here["component"]["entry"], here["paging"][0], there["paging"][0]
    if entry == "request":
        return [((pages[0], 0), (wanted["pages"][0], 0))] if wanted["stop"] else []
    found = []
    for source, target in _tokens(vector, writer, here, receiver, there, wanted, len(pages) * size):
        order, token = divmod(source, size)
        other_order, other_token = divmod(target, other_size)
        if entry == "token" or token == 0:
            found.append(((pages[order], token), (wanted["pages"][other_order - wanted["first_page"]], other_token)))
    return found


def _tokens(
    vector: JSON, writer: int, here: JSON, receiver: int, there: JSON, wanted: JSON, handed_in: int
) -> list[tuple[int, int]]:
    """The local positions, on either side, of the tokens that move."""
    mine, theirs = _share(vector["prefill"][writer], here), _share(vector["decode"][receiver], there)
    unit = gcd(here["paging"][0], there["paging"][0])
    held, start, stop = wanted["held"], wanted["start"], wanted["stop"]
    enough = vector["tokens"] + 4 * (handed_in + unit)  # positions of the request
    source, target = (_held(each, vector["tokens"], enough) for each in (mine, theirs))
    if mine["partition"] == theirs["partition"]:
        if mine["part"] != theirs["part"]:
            return []
        held, start, stop = (sum(each < limit for each in source) for limit in (held, start, stop))
        low, high = _widened(held, start, stop, unit)
        return [(each, each) for each in range(low, min(high, handed_in))]
    cuts = [_cut(each["partition"]) for each in (mine, theirs)]
    for cut, share in zip(cuts, (mine, theirs), strict=True):
        unit = gcd(unit, cut) if cut is not None and share["partition"] != WHOLE else unit
    low, high = (start, stop) if None in cuts else _widened(held, start, stop, unit)
    there_at = {position: local for local, position in enumerate(target)}
    return [
        (local, there_at[position])
        for local, position in enumerate(source[:handed_in])
        if low <= position < high and position in there_at
    ]


def _widened(held: int, start: int, stop: int, unit: int) -> tuple[int, int]:
    """A range, widened to the units that it touches; nothing that is held already is touched."""
    if start >= stop:
        return start, start
    return max(start // unit * unit, min(held, start)), -(-stop // unit) * unit


def _share(rank: JSON, shard: JSON) -> JSON:
    is_whole = shard["component"]["entry"] == "request" or shard["has_every_token"]
    share: JSON = {"partition": WHOLE, "part": 0} if is_whole else rank["layout"]["tokens"]
    return share


def _cut(partition: JSON) -> int | None:
    cut: int | None = partition["page_tokens" if partition["block_tokens"] is None else "block_tokens"]
    return cut


def _held(share: JSON, tokens: int, enough: int) -> list[int]:
    """The positions of a request that a share has, the first of them at local position 0."""
    pattern, size, page = (share["partition"][name] for name in ("pattern", "block_tokens", "page_tokens"))
    blocks = len(pattern)
    if size is None and page is None:
        size = max(1, -(-tokens // blocks))
    lengths = [size] * blocks
    if page is not None:
        pages, longer = divmod(max(-(-tokens // page), blocks), blocks)
        lengths = [page * (pages + (number < longer)) for number in range(blocks)]
    positions: list[int] = []
    begin = 0
    while begin < enough:
        for part, length in zip(pattern, lengths, strict=True):
            positions += range(begin, begin + length) if part == share["part"] else ()
            begin += length
    return positions
