"""What a decode rank asks for, and what a prefill rank believes of it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.support.shards import byte_shard

from kvferry.errors import PageError
from kvferry.layout import (
    Axis,
    Component,
    Entry,
    RankLayout,
    TokenPartition,
    TokenShare,
    contiguous,
    empty_shard,
    interleaved,
    zigzag,
)
from kvferry.plan import Demand
from kvferry.plan.requests.demands import GroupRequest, demands_of, wanted_groups
from kvferry.plan.requests.page_numbers import GroupPages, PageNumbers
from kvferry.protocol.wire.codec import decode_numbered_to_prefill, encode_body
from kvferry.protocol.wire.messages import OpenRoom

LIMIT = 2**48
WHOLE = TokenShare()


KV = RankLayout(shards=(byte_shard(),))
PACKED = RankLayout(shards=(byte_shard(entry=Entry.PAGE),))
HYBRID = RankLayout(
    shards=(
        byte_shard(),
        byte_shard("w", "window", window_tokens=24, page_tokens=8),
        byte_shard("s", "state", entry=Entry.REQUEST),
    )
)


def partitioned(partition: TokenPartition, part: int) -> RankLayout:
    return RankLayout(shards=(byte_shard(),), tokens=TokenShare(partition, part))


def asked(
    layout: RankLayout, pages: Any, *, prefix_tokens: int = 0, tokens: int | None = None
) -> dict[str, tuple[int, int, int, int, list[int]]]:
    """By group: held, start, stop, first page, pages."""
    made = demands_of(layout, pages, prefix_tokens=prefix_tokens, tokens=tokens, where="room 7")
    assert [group.name for group in made] == [group.name for group in layout.groups]
    return {
        each.name: (each.held, each.start, each.stop, each.first_page, each.pages.numbers().tolist()) for each in made
    }


# ---- asking ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pages", "prefix", "tokens", "expected"),
    [
        ([5, 3], 0, None, (0, 0, 32, 0, [5, 3])),
        ([5, 3], 0, 32, (0, 0, 32, 0, [5, 3])),
        ([5, 3], 0, 17, (0, 0, 17, 0, [5, 3])),
        ([5, 3], 32, None, (32, 32, 64, 2, [5, 3])),
        ([5, 3], 20, None, (20, 20, 48, 1, [5, 3])),
        ([5, 3], 20, 33, (20, 20, 33, 1, [5, 3])),
        ([5], 31, 32, (31, 31, 32, 1, [5])),
        ([], 20, 20, (20, 20, 20, 1, [])),
        ([], 32, 32, (32, 32, 32, 2, [])),
        ([], 20, None, (20, 20, 20, 1, [])),
        ([], 0, 0, (0, 0, 0, 0, [])),
        ([], 0, None, (0, 0, 0, 0, [])),
    ],
)
def test_pages_stand_for_the_tokens_that_are_missing(pages: list[int], prefix: int, tokens: int | None, expected: Any):
    assert asked(KV, pages, prefix_tokens=prefix, tokens=tokens) == {"kv": expected}


@pytest.mark.parametrize(
    ("own", "expected"), [(None, (40, 40, 41, 5, [9])), (0, (0, 17, 41, 2, [6, 7, 8, 9])), (99, (40, 40, 41, 5, [9]))]
)
def test_a_group_may_lack_tokens_that_the_others_have(own: int | None, expected: Any):
    """As a window that a prefix cache does not keep; and never has it more."""
    pages = [6, 7, 8, 9] if own == 0 else [9]
    given = {"kv": [5], "window": GroupPages(pages, held_tokens=own), "state": [1]}
    found = asked(HYBRID, given, prefix_tokens=40, tokens=41)
    assert found["window"] == expected
    assert found["kv"] == (40, 40, 41, 2, [5])


def test_a_group_lacks_no_negative_number_of_tokens():
    given = {"kv": [5], "window": GroupPages([9], held_tokens=-1), "state": [1]}
    with pytest.raises(PageError, match="group 'window': held_tokens is -1"):
        asked(HYBRID, given, prefix_tokens=40, tokens=41)


def test_pages_may_start_before_the_first_token_that_is_needed():
    pages = GroupPages([1, 2, 3], start=0)
    assert asked(KV, {"kv": pages}, prefix_tokens=20) == {"kv": (20, 20, 48, 0, [1, 2, 3])}
    assert asked(KV, {"kv": pages}, prefix_tokens=20, tokens=40) == {"kv": (20, 20, 40, 0, [1, 2, 3])}


@pytest.mark.parametrize("tokens", [None, 64])
def test_pages_may_not_start_behind_it(tokens: int | None):
    says = r"room 7: the pages begin with page 2 .* but the first token that is needed is in page 1"
    with pytest.raises(PageError, match=says):
        asked(KV, {"kv": GroupPages([1, 2], start=2)}, prefix_tokens=20, tokens=tokens)


@pytest.mark.parametrize(
    ("pages", "prefix", "tokens", "says"),
    [
        ([1], 0, 17, "1 pages where tokens 0 to 17 of the request take 2 pages of 16 on this rank"),
        ([1, 2, 3], 0, 17, "3 pages where tokens 0 to 17 of the request take 2 pages"),
        ([1], 32, 32, "1 pages where tokens 32 to 32 of the request take 0 pages"),
        ([1, 2], 17, 32, "2 pages where tokens 17 to 32 of the request take 1 pages"),
        ([], 0, -1, "tokens is -1: it must not be negative"),
        ([], -1, None, "prefix_tokens is -1: it must not be negative"),
        ([], 33, 32, "a prefix of 33 tokens is longer than the request's 32"),
        ([], 1.5, None, "prefix_tokens is 1.5: it must be an integer"),
        ([], 0, "16", "tokens is '16': it must be an integer"),
        ([], LIMIT + 1, None, f"prefix_tokens is {LIMIT + 1}: no request has more than {LIMIT} tokens"),
        ([], 0, 2**70, f"tokens is {2**70}: no request has more"),
        ([40], 0, None, "page 40 at position 0 is out of range: the pool has 40 pages"),
        ([4, 4], 0, None, "page 4 appears 2 times"),
        ({"kv": GroupPages([1], start=-1)}, 0, None, "start is -1: it must not be negative"),
        ({"kv": GroupPages([1], start=-1)}, 0, 16, "start is -1: it must not be negative"),
        ({"kv": GroupPages([1], start=0.5)}, 0, 16, "start is 0.5: it must be an integer"),  # type: ignore[arg-type]
        ({}, 0, None, r"no pages for group \['kv'\]; say \[\] where nothing is missing here"),
        ({"kv": [1], "vk": [2]}, 0, None, r"no group \['vk'\]: this rank's pages are in groups \['kv'\]"),
    ],
)
def test_what_cannot_be_is_refused(pages: Any, prefix: Any, tokens: Any, says: str):
    with pytest.raises(PageError, match=f"^room 7: {says}"):
        asked(KV, pages, prefix_tokens=prefix, tokens=tokens)


def test_no_page_is_asked_for_that_no_message_could_name():
    layout = RankLayout(shards=(byte_shard(window_tokens=8),))
    last = LIMIT // 16 - 1
    assert asked(layout, {"kv": GroupPages([1], start=last)})["kv"][:4] == (0, LIMIT - 16, LIMIT, last)
    with pytest.raises(PageError, match=f"the pages end with token {LIMIT + 16}"):
        asked(layout, {"kv": GroupPages([1], start=last + 1)})


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint8])
def test_counts_of_any_integer_kind_travel(kind: Any):
    made = demands_of(KV, {"kv": GroupPages([1, 2], start=kind(1))}, prefix_tokens=kind(20), tokens=kind(40), where="")
    message = OpenRoom(room=1, generation=2, receivers=1, tokens=40, groups=made)
    assert decode_numbered_to_prefill(encode_body(message)) == message


# ---- several groups --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prefix", "tokens", "start", "first_page", "count"),
    [
        (0, 70, 46, 5, 4),  # 46 lies in the page of 40 to 48
        (0, 20, 0, 0, 3),
        (0, 24, 0, 0, 3),
        (0, 25, 1, 0, 4),
        (50, 70, 50, 6, 3),
        (70, 70, 70, 8, 0),
        (72, 72, 72, 9, 0),
    ],
)
def test_a_windows_pages_begin_with_its_first_token(prefix: int, tokens: int, start: int, first_page: int, count: int):
    kv = list(range(prefix // 16, -(-tokens // 16) if prefix < tokens else prefix // 16))
    own = list(range(count))
    made = asked(HYBRID, {"kv": kv, "window": own, "state": [9]}, prefix_tokens=prefix, tokens=tokens)
    assert made["window"] == (prefix, start, tokens, first_page, own)
    assert made["kv"] == (prefix, prefix, tokens, prefix // 16, kv)
    assert made["state"] == (0, 0, 1, 0, [9])


def test_without_a_length_a_window_starts_where_the_caller_says():
    made = asked(HYBRID, {"kv": [1, 2, 3, 4, 5], "window": GroupPages([7, 8, 9], start=5), "state": []})
    assert made == {
        "kv": (0, 0, 80, 0, [1, 2, 3, 4, 5]),
        "window": (0, 40, 64, 5, [7, 8, 9]),
        "state": (0, 0, 0, 0, []),
    }


@pytest.mark.parametrize(
    ("pages", "says"),
    [
        ({"kv": [1], "window": [0, 1], "state": [0, 1]}, "group 'state': 2 slots for one request: it has one, or []"),
        ({"kv": [1], "window": [0, 1], "state": [40]}, "group 'state': page 40 at position 0 is out of range"),
        (
            {"kv": [1], "window": [0], "state": [0]},
            "group 'window': 1 pages where tokens 0 to 16 of the request take 2",
        ),
        ({"kv": [1], "window": [0, 0], "state": [0]}, "group 'window': page 0 appears 2 times"),
        ({"kv": [1], "state": [0]}, "no pages for group ['window']; say []"),
        ({"state": [0]}, "no pages for group ['kv', 'window']"),
        ([1], "pages are in groups ['kv', 'window', 'state']: hand in a mapping"),
    ],
)
def test_pages_that_do_not_fit_a_group_are_refused_with_its_name(pages: Any, says: str):
    with pytest.raises(PageError) as caught:
        asked(HYBRID, pages, tokens=16)
    assert says in str(caught.value)
    assert str(caught.value).startswith("room 7")


def test_a_group_of_which_a_rank_holds_nothing_needs_no_pages():
    component = Component(name="s", axes=(Axis("layer", 1),), dtype="uint8", entry=Entry.REQUEST)
    layout = RankLayout(shards=(byte_shard(), empty_shard(component, page_tokens=1, num_pages=4, group="state")))
    for pages in ({"kv": [1]}, {"kv": [1], "state": [3]}):
        assert asked(layout, pages)["state"] == (0, 0, 0, 0, [])


# ---- packed pages ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prefix", "tokens"), [(20, None), (20, 40), (31, 32)])
def test_a_prefix_that_ends_inside_a_packed_page_is_refused(prefix: int, tokens: int | None):
    pages = [0] if tokens == 32 else [0, 1]
    with pytest.raises(PageError, match=r"a prefix that ends inside a page of 16 tokens .* 'k' are packed; round"):
        asked(PACKED, pages, prefix_tokens=prefix, tokens=tokens)


@pytest.mark.parametrize("tokens", [None, 20])
def test_a_packed_page_of_which_nothing_is_missing_is_not_cut(tokens: int | None):
    assert asked(PACKED, [], prefix_tokens=20, tokens=tokens)["kv"] == (20, 20, 20, 1, [])


def test_a_share_of_packed_pages_that_is_held_whole_is_not_cut():
    layout = RankLayout(shards=(byte_shard(entry=Entry.PAGE),), tokens=TokenShare(contiguous(2), 0))
    assert asked(layout, [], prefix_tokens=60, tokens=80)["kv"][4] == []


def test_packed_pages_may_be_continued_whole_and_end_anywhere():
    assert asked(PACKED, [4, 5], prefix_tokens=16, tokens=47)["kv"] == (16, 16, 47, 1, [4, 5])
    assert asked(PACKED, [4, 5], prefix_tokens=16)["kv"] == (16, 16, 48, 1, [4, 5])


def test_a_window_may_begin_inside_a_packed_page_of_which_nothing_is_held():
    layout = RankLayout(shards=(byte_shard(entry=Entry.PAGE, window_tokens=24),))
    assert asked(layout, [4, 5], prefix_tokens=32, tokens=60)["kv"] == (32, 36, 60, 2, [4, 5])
    with pytest.raises(PageError, match="are packed"):
        asked(layout, [4, 5], prefix_tokens=33, tokens=60)


# ---- context parallelism -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("partition", [interleaved(2, 16), contiguous(2), zigzag(2)])
def test_a_share_of_the_tokens_needs_their_number(partition: TokenPartition):
    with pytest.raises(PageError, match=r"context parallelism divides a request by token: .* \(tokens=...\)"):
        asked(partitioned(partition, 0), [1])


@pytest.mark.parametrize(
    ("partition", "part", "prefix", "tokens", "first_page", "count"),
    [
        (contiguous(2), 0, 0, 100, 0, 4),  # 50 tokens
        (contiguous(2), 1, 0, 100, 0, 4),
        (contiguous(2), 0, 60, 100, 3, 0),  # all that it holds lies in the prefix
        (contiguous(2), 1, 60, 100, 0, 4),  # 10 of its tokens do
        (contiguous(2), 1, 70, 100, 1, 3),
        (interleaved(2), 0, 0, 33, 0, 2),  # 17
        (interleaved(2), 1, 0, 33, 0, 1),
        (interleaved(2), 1, 32, 33, 1, 0),
        (interleaved(2, 16), 0, 20, 64, 1, 1),  # 0 to 16 are held, 32 to 48 are not
        (zigzag(2), 1, 0, 64, 0, 2),
    ],
)
def test_a_share_takes_the_pages_of_its_own_tokens(
    partition: TokenPartition, part: int, prefix: int, tokens: int, first_page: int, count: int
):
    pages = list(range(count))
    made = asked(partitioned(partition, part), pages, prefix_tokens=prefix, tokens=tokens)
    assert made == {"kv": (prefix, prefix, tokens, first_page, pages)}
    for wrong in (count + 1, count - 1):
        if wrong >= 0:
            with pytest.raises(PageError, match=f"{wrong} pages where tokens {prefix} to {tokens} .* {count} pages"):
                asked(partitioned(partition, part), range(wrong), prefix_tokens=prefix, tokens=tokens)


def test_the_slot_of_a_request_is_nobodys_share():
    layout = RankLayout(
        shards=(byte_shard(), byte_shard("s", "state", entry=Entry.REQUEST)), tokens=TokenShare(contiguous(2), 1)
    )
    assert asked(layout, {"kv": [1], "state": [2]}, tokens=3)["state"] == (0, 0, 1, 0, [2])


# ---- believing -------------------------------------------------------------------------------------------------------


def room(*groups: GroupRequest, tokens: int | None = None, receivers: int = 1) -> OpenRoom:
    return OpenRoom(room=7, generation=1, receivers=receivers, tokens=tokens, groups=groups)


def group(name: str = "kv", *, pages: Sequence[int] = (), held: int = 0, start: int = 0, stop: int = 0, first: int = 0):
    return GroupRequest(name, held, start, stop, first, PageNumbers.of(np.array(pages, np.int64)))


def believed(
    message: OpenRoom, layout: RankLayout = KV, filled: Collection[str] | None = None
) -> dict[str, tuple[Demand, int, list[int]]]:
    """As a prefill rank that fills these groups believes it; all by default."""
    filled = {each.name for each in layout.groups} if filled is None else filled
    wanted = wanted_groups(
        message.groups,
        layout,
        receivers=message.receivers,
        tokens=message.tokens,
        filled=filled,
        where="room 7 on d0",
    )
    return {name: (each.demand, each.first_page, each.pages.numbers().tolist()) for name, each in wanted.items()}


@st.composite
def requests(draw: st.DrawFn) -> tuple[RankLayout, Any, int, int | None]:
    share = draw(
        st.sampled_from(
            [WHOLE, *(TokenShare(each, 1) for each in (contiguous(2), contiguous(2, 8), interleaved(3, 2)))]
        )
    )
    layout = RankLayout(shards=HYBRID.shards, tokens=share)
    tokens = draw(st.integers(0, 200))
    prefix = draw(st.integers(0, tokens))
    positions = [
        position
        for position in range(tokens)
        if share.holds(np.array([position]), block=share.partition.block(tokens))[0]
    ]
    pages: dict[str, Any] = {"state": [1]}
    for name, size, window in (("kv", 16, 10**6), ("window", 8, 24)):
        needed = {index // size for index, position in enumerate(positions) if position >= max(prefix, tokens - window)}
        pages[name] = list(range(len(needed)))
    return layout, pages, prefix, tokens


@given(requests())
def test_what_is_asked_for_is_believed(request: tuple[RankLayout, Any, int, int | None]):
    layout, pages, prefix, tokens = request
    made = demands_of(layout, pages, prefix_tokens=prefix, tokens=tokens, where="")
    message = decode_numbered_to_prefill(encode_body(room(*made, tokens=tokens)))
    assert isinstance(message, OpenRoom)
    for each, (name, wanted) in zip(made, believed(message, layout).items(), strict=True):
        assert each.name == name
        assert wanted == (Demand(each.held, each.start, each.stop), each.first_page, each.pages.numbers().tolist())


def test_a_rank_is_asked_for_what_it_fills_and_nothing_else():
    state = group("state", pages=[1], stop=1)
    assert list(believed(room(state), HYBRID, {"state"})) == ["state"]
    assert believed(room(), HYBRID, set()) == {}
    for message, filled in ((room(), {"state"}), (room(state), set[str]()), (room(state, group()), {"state"})):
        with pytest.raises(PageError, match="this rank fills"):
            believed(message, HYBRID, filled)


def test_pages_may_hold_more_than_is_asked_for():
    assert believed(room(group(pages=[1, 2, 3], start=20, stop=30)))["kv"] == (Demand(0, 20, 30), 0, [1, 2, 3])


STATE, WINDOW = group("state", pages=[1], stop=1), group("window")


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (room(group(), receivers=0), "0 receivers and pages for groups"),
        (room(), r"pages for groups \[\] make no sense: of the decode rank's groups \['kv'\] this rank fills \['kv'\]"),
        (room(group("vk")), r"groups \['vk'\] make no sense"),
        (room(group(), group()), r"groups \['kv', 'kv'\] make no sense"),
        (room(group(), STATE), r"groups \['kv', 'state'\] make no sense"),
        (room(group(pages=[40], stop=16)), "page 40 at position 0 is out of range: the pool has 40 pages"),
        (room(group(pages=[-1], stop=16)), "page -1 at position 0 is out of range"),
        (room(group(pages=[3, 3], stop=32)), "page 3 appears 2 times"),
        (room(group(pages=[3], stop=17)), "1 pages of group 'kv' from page 0 on do not hold tokens 0 to 17"),
        (room(group(pages=[3], start=16, stop=17)), "do not hold tokens 16 to 17"),
        (room(group(pages=[3], first=1, stop=17)), "1 pages of group 'kv' from page 1 on do not hold tokens 0 to 17"),
        (room(group(pages=[3], first=1, start=15, stop=16, held=0)), "do not hold tokens 15 to 16"),
        (room(group(stop=1)), "0 pages of group 'kv' from page 0 on do not hold tokens 0 to 1"),
        (room(group(pages=[3], start=8, stop=4)), "do not hold tokens 8 to 4"),
        (room(group(pages=[3], held=9, start=8, stop=16)), "do not hold tokens 8 to 16"),
        (room(group(pages=[3], stop=LIMIT)), f"do not hold tokens 0 to {LIMIT}"),
        (room(group(pages=[3], start=LIMIT - 1, stop=LIMIT)), f"do not hold tokens {LIMIT - 1} to {LIMIT}"),
        (room(group(pages=[3], first=LIMIT, stop=1)), f"from page {LIMIT} on do not hold tokens 0 to 1"),
        (
            room(group(pages=[3], stop=16), tokens=15),
            "tokens 0 to 16 of group 'kv' are asked for, but the request has 15",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(message: OpenRoom, says: str):
    with pytest.raises(PageError, match=f"^room 7 on d0: .*{says}"):
        believed(message)


@pytest.mark.parametrize(
    ("partition", "tokens", "says"),
    [
        (contiguous(2), None, "say how many tokens it has"),
        (interleaved(2, 16), 40, "1 pages of group 'kv' from page 0 on do not hold tokens 0 to 40"),
        (contiguous(2), 40, "1 pages of group 'kv' from page 0 on do not hold tokens 0 to 40"),
    ],
)
def test_a_share_of_the_tokens_is_checked_by_its_own_positions(
    partition: TokenPartition, tokens: int | None, says: str
):
    message = room(group(pages=[3], stop=40), tokens=tokens)
    with pytest.raises(PageError, match=says):
        believed(message, partitioned(partition, 0))
    right = room(group(pages=[3, 4], stop=40), tokens=40)
    assert believed(right, partitioned(partition, 0))["kv"][2] == [3, 4]


def test_a_slot_that_is_not_there_is_refused():
    layout = RankLayout(shards=(byte_shard("s", "state", entry=Entry.REQUEST),))
    assert believed(room(STATE), layout)["state"] == (Demand(0, 0, 1), 0, [1])
    with pytest.raises(PageError, match="0 pages of group 'state' from page 0 on do not hold tokens 0 to 1"):
        believed(room(replace(STATE, pages=PageNumbers())), layout)
