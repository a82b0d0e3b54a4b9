"""Whatever two sides lay out differently: every byte of the decode side is right, and no other has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.support.caches import Model, Shape
from tests.support.engines import WAIT_S, Engines, Request, Requests

from kvferry import GroupPages, RankCoordinates, RankLayout, TokenPartition, TokenShare, contiguous, interleaved, zigzag
from kvferry.errors import IncompatiblePeerError, LayoutError, PageError, TransferFailedError, UsageError
from kvferry.plan import Unit
from kvferry.pools.places import first_needed, positions_of
from kvferry.testing.probe import probe

PLAIN = Model(layers=2, heads=2, head_dim=3, dtype="int16")
WINDOWED = Model(layers=3, heads=2, head_dim=2, window_tokens=10, dtype="uint8")
HYBRID = Model(layers=3, heads=4, head_dim=2, window_tokens=9, has_state=True, dtype="float16")
PACKED = Model(layers=2, heads=4, head_dim=2, is_packed=True, dtype="uint8")
LATENT = Model(layers=2, latent_dim=7, dtype="float32")
DRAFTED = Model(layers=3, heads=2, head_dim=2, draft_layers=1, dtype="int8")
UNDRAFTED = Model(layers=3, heads=2, head_dim=2, dtype="int8")

LENGTHS = (1, 3, 4, 16, 17, 29)
"""Of requests: inside a page, a whole page, and one token more."""


def pages(size: int, **changes: Any) -> Shape:
    return Shape(page_tokens=size, pages=40, **changes)


def partitioned(partition: TokenPartition, size: int = 4, **changes: Any) -> Shape:
    return Shape(partition=partition, page_tokens=size, pages=40, **changes)


def wanted_bytes(requests: Requests, request: Request) -> int:
    """Bytes of the tokens and of the state that the decode ranks need."""
    total = 0
    for pool in requests.decode.pools:
        positions = positions_of(pool.layout.tokens, request.tokens)
        for shard in pool.layout.shards:
            start = first_needed(shard.component.window_tokens, request.tokens, request.prefix_tokens)
            count = 1 if shard.group == "state" else sum(position >= start for position in positions)
            total += count * shard.bytes_per_page // shard.paging.page_tokens
    return total


# ---- pages of unlike sizes ---------------------------------------------------------------------------------------


@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize("says_tokens", [True, False], ids=["length said", "length not said"])
@pytest.mark.parametrize(
    ("here", "there"),
    [(4, 16), (16, 4), (4, 12), (12, 4), (6, 4), (5, 7), (1, 8), (4, 4)],
    ids=lambda size: str(size),
)
def test_pages_of_unlike_sizes(pair: Callable[..., Requests], here: int, there: int, says_tokens: bool):
    requests = pair(PLAIN, pages(here, tp=2), pages(there))
    for room, tokens in enumerate(LENGTHS):
        requests.run_tokens(room, tokens, cuts=(7, 18), says_tokens=says_tokens)
        for prefix_tokens in {1, tokens // 2, tokens - 1, tokens}:
            requests.run_tokens(
                100 * room + prefix_tokens, tokens, prefix_tokens=prefix_tokens, cuts=(5,), says_tokens=says_tokens
            )


@pytest.mark.parametrize("model", [LATENT, HYBRID], ids=["latent", "hybrid"])
def test_pages_of_unlike_sizes_in_other_caches(pair: Callable[..., Requests], model: Model):
    requests = pair(model, pages(6, tp=2, pp=2), pages(4, heads_first=True))
    for room, tokens in enumerate(LENGTHS):
        requests.run_tokens(room, tokens, prefix_tokens=tokens // 3, cuts=(13,))


def test_nothing_travels_twice_and_little_in_vain(pair: Callable[..., Requests]):
    """Where the length is known, no more than the rest of a unit travels beside what is needed."""
    requests = pair(PLAIN, pages(6, tp=2), pages(4))
    token_bytes = requests.decode.pools[0].bytes_per_page // 4
    for room, (tokens, prefix) in enumerate([(29, 0), (29, 7), (12, 12), (13, 12), (6, 3)]):
        request = requests.run_tokens(room, tokens, prefix_tokens=prefix)
        sent = sum(sender.stats.total_bytes for sender in request.senders)
        least = wanted_bytes(requests, request)
        assert least <= sent <= least + token_bytes, "the unit of the last token is whole"


def test_what_lies_behind_the_last_token_stays_in_its_page(pair: Callable[..., Requests]):
    """A page of 16 tokens of which 3 are a request's is not filled by four pages of the other side."""
    requests = pair(PLAIN, pages(16), pages(4))
    request = requests.run_tokens(1, 3)
    assert sum(len(each) for each in request.destination_pages) == 1
    requests.run_tokens(2, 17)


def test_a_prefix_may_end_anywhere(pair: Callable[..., Requests]):
    requests = pair(PLAIN, pages(8, tp=2), pages(8))
    for prefix_tokens in range(25):
        requests.run_tokens(prefix_tokens, 24, prefix_tokens=prefix_tokens, cuts=(9, 16))


def test_a_prefix_that_reaches_into_a_chunk_leaves_the_rest_of_the_page_to_single_tokens(
    pair: Callable[..., Requests],
):
    requests = pair(PLAIN, pages(8), pages(8))
    request = requests.run_tokens(1, 32, prefix_tokens=13, cuts=(16,))
    assert len(request.senders[0].stats.writes) == 2
    assert sum(write.total_bytes for write in request.senders[0].stats.writes) == wanted_bytes(requests, request)
    both = requests.run_tokens(2, 32, prefix_tokens=13)
    assert len(both.senders[0].stats.writes) == 2, "one of tokens and one of pages"
    assert both.receivers[0].stats.chunks == 2


def test_counts_of_any_integer_kind_are_taken(pair: Callable[..., Requests]):
    requests = pair(PLAIN, pages(8), pages(8))
    requests.wipe()
    request = requests.request(1, 32, prefix_tokens=13)
    own = request.destination_pages[0]
    request.receivers.append(
        requests.decode.endpoints[0].open(
            1,
            own,
            engine=requests.prefill.name,
            prefix_tokens=np.int64(13),
            tokens=np.uint16(32),
        )
    )
    requests.open_prefill(request)
    requests.advance(request, 32)
    request.wait()
    requests.check_every_byte(request)


# ---- several groups ----------------------------------------------------------------------------------------------


@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize("skips_windows", [False, True], ids=["whole", "skipping"])
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        pytest.param(pages(4), pages(4), id="1-to-1"),
        pytest.param(pages(4, tp=2), pages(4, tp=4), id="tp2-to-tp4"),
        pytest.param(pages(4, tp=4), pages(8, tp=2), id="tp4-to-tp2-pages-4-to-8"),
        pytest.param(pages(4, tp=3, pp=3), pages(4, pp=2, stages=(1, 2)), id="uneven"),
    ],
)
def test_windows_and_state_of_a_hybrid(
    pair: Callable[..., Requests], prefill: Shape, decode: Shape, skips_windows: bool
):
    requests = pair(HYBRID, prefill, decode)
    for room, tokens in enumerate(LENGTHS):
        for prefix_tokens in {0, tokens // 2, tokens}:
            requests.run_tokens(
                100 * room + prefix_tokens,
                tokens,
                prefix_tokens=prefix_tokens,
                cuts=(5, 12, 20),
                skips_windows=skips_windows,
            )


def test_only_the_window_travels(pair: Callable[..., Requests]):
    requests = pair(WINDOWED, pages(4), pages(4))
    request = requests.run_tokens(1, 32)
    sent = {name: len(kept.pages) for name, kept in request.destination[0].items()}
    assert sent == {"kv": 8, "window-10": 3}
    token_bytes = {shard.group: 0 for shard in requests.decode.pools[0].layout.shards}
    for shard in requests.decode.pools[0].layout.shards:
        token_bytes[shard.group] += shard.bytes_per_page // 4
    assert request.senders[0].stats.total_bytes == 32 * token_bytes["kv"] + 12 * token_bytes["window-10"]


def test_a_windows_pages_may_start_earlier_where_the_caller_says_so(pair: Callable[..., Requests]):
    requests = pair(WINDOWED, pages(4), pages(4))
    requests.wipe()
    request = requests.request(1, 32)
    own = request.destination[0]
    pending = np.setdiff1d(np.arange(40), np.concatenate([each.pages for each in own.values()]))[:2]
    first = own["window-10"].start - 2
    decode = requests.decode.endpoints[0]
    given = GroupPages([*pending, *own["window-10"].pages], start=first)
    request.receivers.append(
        decode.open(1, {"kv": own["kv"].pages, "window-10": given}, engine=requests.prefill.name, tokens=32)
    )
    requests.open_prefill(request)
    requests.advance(request, 32)
    request.wait()
    requests.check_every_byte(request)
    assert requests.decode.pools[0].touched_bytes(pending) == 0


def test_without_a_length_a_windows_pages_say_where_they_start(pair: Callable[..., Requests]):
    requests = pair(WINDOWED, pages(4), pages(4))
    requests.wipe()
    request = requests.request(1, 32)
    own = request.destination[0]
    given = {name: GroupPages(kept.pages, start=kept.start) for name, kept in own.items()}
    request.receivers.append(requests.decode.endpoints[0].open(1, given, engine=requests.prefill.name))
    requests.open_prefill(request)
    requests.advance(request, 20, skips_windows=True)
    requests.advance(request, 32)
    request.wait()
    requests.check_every_byte(request)


def test_state_travels_with_the_chunk_that_hands_it_in(pair: Callable[..., Requests]):
    requests = pair(HYBRID, pages(4, tp=2), pages(4))
    requests.wipe()
    request = requests.request(1, 16)
    requests.open_decode(request, says_tokens=True)
    requests.open_prefill(request)
    for count, group in enumerate(("kv", "window-9", "state")):
        requests.let_leave(request, count)
        for sender, own in zip(request.senders, request.source, strict=True):
            sender.submit({group: own[group]}, last=group == "state")
    request.wait()
    requests.check_every_byte(request)
    assert [len(sender.stats.writes) for sender in request.senders] == [3, 3]


def test_a_state_that_is_not_wanted_is_left_alone(pair: Callable[..., Requests]):
    requests = pair(HYBRID, pages(4), pages(4))
    requests.wipe()
    request = requests.request(1, 16)
    own = request.destination[0]
    request.receivers.append(
        requests.decode.endpoints[0].open(
            1,
            {"kv": own["kv"].pages, "window-9": own["window-9"].pages, "state": []},
            engine=requests.prefill.name,
            tokens=16,
        )
    )
    requests.open_prefill(request)
    requests.advance(request, 16)
    request.wait()
    absent = [shard.component.name for shard in requests.decode.pools[0].layout.shards if shard.group == "state"]
    requests.check_every_byte(request, absent=absent)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [(Shape(tp=2), Shape()), (Shape(), Shape(tp=3)), (partitioned(contiguous(2)), partitioned(interleaved(3), tp=2))],
    ids=["tp2-to-1", "1-to-tp3", "cp2-to-cp3-tp2"],
)
def test_a_model_with_state_alone(pair: Callable[..., Requests], prefill: Shape, decode: Shape):
    """Every rank under context parallelism has the state; one of them sends it."""
    requests = pair(Model(layers=2, heads=6, has_state=True, has_attention=False), prefill, decode)
    for room, (tokens, prefix_tokens) in enumerate([(1, 0), (17, 5), (17, 17)]):
        request = requests.run_tokens(room, tokens, prefix_tokens=prefix_tokens, cuts=(9,))
        assert sum(sender.stats.total_bytes for sender in request.senders) == wanted_bytes(requests, request)


def test_a_forgotten_slot_fails_the_room_on_both_sides(pair: Callable[..., Requests]):
    requests = pair(HYBRID, pages(4), pages(4))
    request = requests.request(1, 16)
    requests.open_decode(request, says_tokens=True)
    requests.open_prefill(request)
    own = request.source[0]
    request.senders[0].submit({"kv": own["kv"], "window-9": own["window-9"]}, last=True)
    request.wait_ended()
    for transfer in (*request.senders, *request.receivers):
        assert "group 'state': 0 slots of the request where the receiver has room for 1" in str(transfer.error)
        assert transfer.wait_pages_reusable(WAIT_S)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"kv": [0]}, r"room 1: no pages for group \['state', 'window-9'\]; say \[\] where nothing is missing here"),
        ({"kv": [0], "window-9": [0], "state": [0, 1]}, "room 1, group 'state': 2 slots for one request"),
        ({"kv": [0], "window-9": [0], "state": [0], "swa": []}, r"room 1: no group \['swa'\]"),
        ([0], "hand in a mapping of their names to page numbers"),
        (
            {"kv": [0, 1], "window-9": [0], "state": [0]},
            "room 1, group 'kv': 2 pages where tokens 0 to 4 .* take 1 pages",
        ),
    ],
)
def test_pages_that_do_not_fit_the_groups_are_refused_when_a_room_is_opened(
    pair: Callable[..., Requests], given: Any, says: str
):
    decode = pair(HYBRID, pages(4), pages(4)).decode.endpoints[0]
    with pytest.raises(PageError, match=says):
        decode.open(1, given, tokens=4)
    assert decode.open_rooms == 0


@pytest.mark.parametrize(
    "model", [Model(layers=4, heads=2, head_dim=3), HYBRID, PACKED], ids=["plain", "hybrid", "packed"]
)
@pytest.mark.parametrize(("here", "there"), [(True, False), (False, True), (True, True)])
def test_layers_of_two_groups_may_share_memory(pair: Callable[..., Requests], model: Model, here: bool, there: bool):
    requests = pair(model, pages(4, tp=2, is_aliased=here), pages(4, is_aliased=there))
    for room, tokens in enumerate(LENGTHS):
        requests.run_tokens(room, tokens, cuts=(9,))
    assert (
        len({group.name for group in requests.decode.pools[0].layout.groups if group.name.startswith("kv")})
        == 1 + there
    )


@pytest.mark.parametrize(("here", "there"), [(True, False), (False, True), (True, True)])
def test_layers_of_a_draft_model_travel_only_where_both_sides_have_them(
    engines: Callable[..., Engines], here: bool, there: bool
):
    both = engines()
    prefill = both.prefill(DRAFTED if here else UNDRAFTED, Shape(tp=2))
    requests = Requests(prefill, both.decode(DRAFTED if there else UNDRAFTED))
    for room in range(3):
        requests.run_tokens(room, 10, absent=() if here and there else ("draft k", "draft v"))


# ---- context parallelism -------------------------------------------------------------------------------------------


@pytest.mark.sampled(one_in=10)
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        pytest.param(partitioned(contiguous(2)), pages(4), id="contiguous2-to-1"),
        pytest.param(pages(4), partitioned(contiguous(3)), id="1-to-contiguous3"),
        pytest.param(partitioned(contiguous(3, 4)), pages(4), id="whole-pages3-to-1"),
        pytest.param(partitioned(contiguous(3, 4)), pages(16), id="whole-pages3-to-1-pages-4-to-16"),
        pytest.param(pages(4), partitioned(contiguous(3, 4), tp=2), id="1-to-whole-pages3-tp2"),
        pytest.param(
            partitioned(contiguous(2, 8), 8), partitioned(contiguous(3, 4)), id="whole-pages2-to-whole-pages3"
        ),
        pytest.param(partitioned(zigzag(2)), partitioned(contiguous(2, 4)), id="zigzag2-to-whole-pages2"),
        pytest.param(partitioned(interleaved(2)), pages(4), id="interleaved2-to-1"),
        pytest.param(pages(4), partitioned(interleaved(2)), id="1-to-interleaved2"),
        pytest.param(partitioned(interleaved(2, 4)), pages(4), id="interleaved2x4-to-1"),
        pytest.param(partitioned(zigzag(2)), pages(8), id="zigzag2-to-1-pages-4-to-8"),
        pytest.param(partitioned(interleaved(3)), partitioned(interleaved(2)), id="interleaved3-to-interleaved2"),
        pytest.param(partitioned(interleaved(2), 4), partitioned(interleaved(2), 6), id="interleaved2-pages-4-to-6"),
        pytest.param(partitioned(contiguous(2)), partitioned(interleaved(2, 2)), id="contiguous2-to-interleaved2"),
        pytest.param(partitioned(zigzag(2)), partitioned(zigzag(3)), id="zigzag2-to-zigzag3"),
        pytest.param(partitioned(zigzag(2)), partitioned(zigzag(2)), id="zigzag2-to-zigzag2"),
        pytest.param(
            partitioned(contiguous(2), tp=2), partitioned(contiguous(2), 6, tp=4), id="contiguous2-tp2-to-tp4"
        ),
    ],
)
@pytest.mark.parametrize("model", [PLAIN, HYBRID], ids=["plain", "hybrid"])
def test_context_parallelism(pair: Callable[..., Requests], model: Model, prefill: Shape, decode: Shape):
    requests = pair(model, prefill, decode)
    for room, tokens in enumerate(LENGTHS):
        for prefix_tokens in {0, tokens // 2, tokens - 1}:
            requests.run_tokens(100 * room + prefix_tokens, tokens, prefix_tokens=prefix_tokens, cuts=(6, 17))


def test_a_source_that_deals_out_blocks_needs_no_length(pair: Callable[..., Requests]):
    requests = pair(PLAIN, partitioned(interleaved(2)), pages(8))
    for room, tokens in enumerate(LENGTHS):
        requests.run_tokens(room, tokens, says_tokens=False)


@pytest.mark.parametrize("path", ["direct", "staged"])
@pytest.mark.parametrize("by", [1, 2])
def test_tokens_may_be_dealt_anew_in_every_request(pair: Callable[..., Requests], path: str, by: int):
    """An engine may give the first page to any rank: each says which part it has in this request."""
    requests = pair(PLAIN, partitioned(interleaved(3, 4), tp=2), pages(4), path=path)
    for room, tokens in enumerate(LENGTHS):
        requests.deal(by)
        for prefix_tokens in {0, tokens // 8 * 4}:
            requests.run_tokens(100 * room + prefix_tokens, tokens, prefix_tokens=prefix_tokens, cuts=(6, 17))


def test_a_share_that_is_too_short_is_noticed_although_nobody_says_the_length(pair: Callable[..., Requests]):
    """The decode side counts its last page as full, and no more than that."""
    requests = pair(PLAIN, partitioned(interleaved(2, 4)), pages(16))
    request = requests.request(1, 48)
    requests.open_decode(request)
    requests.open_prefill(request)
    request.senders[0].submit(request.source_pages[0][:4], last=True)
    request.senders[1].submit(request.source_pages[1], last=True)
    request.wait_ended()
    assert isinstance(request.senders[0].error, PageError)
    assert "4 pages of 4 tokens of the request where the receiver has room for 6" in str(request.senders[0].error)


def test_a_length_that_is_needed_and_not_said_is_an_error(pair: Callable[..., Requests]):
    requests = pair(PLAIN, partitioned(contiguous(2)), pages(4))
    request = requests.request(1, 16)
    requests.open_decode(request)
    requests.open_prefill(request)
    requests.advance(request, 16)
    request.wait_ended()
    for transfer in (*request.senders, *request.receivers):
        assert "say how many tokens it has, on the decode side (tokens=...)" in str(transfer.error)
    requests.run_tokens(2, 16)


def test_a_prefill_rank_whose_share_depends_on_the_length_says_it(pair: Callable[..., Requests]):
    prefill = pair(PLAIN, partitioned(contiguous(2)), pages(4)).prefill.endpoints[0]
    with pytest.raises(UsageError, match=r"depends on its length .* say how many tokens it has \(tokens=...\)"):
        prefill.open(1)
    with pytest.raises(UsageError, match=r"room 1: this rank's share .* how many tokens .* \(share_tokens=...\)"):
        prefill.open(1, tokens=8)
    prefill.open(1, tokens=8, share_tokens=4).abort()


def test_a_share_can_be_compared_only_with_a_length(pair: Callable[..., Requests]):
    requests = pair(PLAIN, partitioned(interleaved(2)), pages(4))
    prefill, decode = requests.prefill.endpoints[0], requests.decode.endpoints[0]
    for opening in (lambda: prefill.open(1, share_tokens=4), lambda: decode.open(1, [0], share_tokens=4)):
        with pytest.raises(UsageError, match=r"room 1: share_tokens is 4: say how many tokens .* \(tokens=...\)"):
            opening()
    with pytest.raises(PageError, match="of 9 tokens this rank holds 4 by its engine's count, 5 by its layout"):
        prefill.open(1, tokens=9, share_tokens=4)
    prefill.open(1, tokens=9, share_tokens=5).abort()


BYTES = Model(layers=1, heads=1, head_dim=4, dtype="uint8")


@pytest.mark.parametrize("path", ["direct", "staged"])
def test_an_engine_that_gives_out_whole_pages_is_not_taken_for_one_that_divides_by_token(
    pair: Callable[..., Requests], path: str
):
    """45 tokens in pages of 4 are 4 pages on each of 3 ranks, whether these have 16, 16 and 13 tokens or 15 each.

    Without the engine's own count both sides went on, and two thirds of the bytes were those of other tokens.
    """
    requests = pair(BYTES, partitioned(contiguous(3)), pages(4), path=path)
    request = requests.request(1, 45)
    requests.open_decode(request, says_tokens=True)
    for endpoint, share_tokens in zip(requests.prefill.endpoints, (16, 16, 13), strict=True):
        with pytest.raises(PageError, match=rf"of 45 tokens this rank holds {share_tokens} by its engine's count, 15 "):
            endpoint.open(1, tokens=45, share_tokens=share_tokens)
    request.receivers[0].abort()
    assert request.receivers[0].wait_pages_reusable(WAIT_S)
    requests.run_tokens(2, 45)


@pytest.mark.parametrize("path", ["direct", "staged"])
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (partitioned(contiguous(3, 4)), pages(4)),
        (pages(4), partitioned(contiguous(3, 4))),
        (partitioned(contiguous(3, 4)), partitioned(contiguous(3))),
    ],
    ids=["3-to-1", "1-to-3", "to-others-by-token"],
)
def test_whole_pages_that_are_given_out_arrive_at_their_places(
    pair: Callable[..., Requests], path: str, prefill: Shape, decode: Shape
):
    requests = pair(BYTES, prefill, decode, path=path)
    for room, tokens in enumerate((45, 40, 37, 4, 1, 9)):
        requests.wipe()
        request = requests.request(room, tokens)
        requests.open_decode(request, says_tokens=True)
        requests.open_prefill(request)
        requests.advance(request, tokens // 2)
        requests.advance(request, tokens)
        request.wait()
        requests.check_every_byte(request)


def test_pages_that_are_given_out_are_those_of_the_pool(pair: Callable[..., Requests]):
    for size in (16, 6):
        with pytest.raises(LayoutError, match=f"whole pages of 4 tokens, but pages of group 'kv' have {size}: give"):
            pair(PLAIN, partitioned(contiguous(2, 4), size), pages(4))
    pair(PLAIN, partitioned(contiguous(2, 16), 8), pages(4)).run_tokens(1, 37)


def test_sides_that_count_other_tokens_learn_it_from_each_other(pair: Callable[..., Requests]):
    """One token more or less would shift half of the request, unseen, where its length says who holds what."""
    requests = pair(PLAIN, partitioned(contiguous(2)), pages(4))
    request = requests.request(1, 15)
    request.senders += [endpoint.open(1, tokens=16, share_tokens=8) for endpoint in requests.prefill.endpoints]
    requests.open_decode(request, says_tokens=True)
    request.wait_ended()
    for transfer in (*request.senders, *request.receivers):
        assert "16 tokens on prefill rank" in str(transfer.error)
    requests.run_tokens(2, 16)


def test_a_decode_rank_under_context_parallelism_says_the_length(pair: Callable[..., Requests]):
    requests = pair(PLAIN, pages(4), partitioned(interleaved(2)))
    with pytest.raises(PageError, match=r"room 1: context parallelism divides .* say how many it has \(tokens=...\)"):
        requests.decode.endpoints[0].open(1, [0])


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("coordinates", "share"),
    [
        (RankCoordinates(), TokenShare(interleaved(2), 0)),
        (RankCoordinates(cp_rank=1, cp_size=2), TokenShare()),
        (RankCoordinates(cp_rank=1, cp_size=2), TokenShare(interleaved(2), 0)),
        (RankCoordinates(cp_rank=1, cp_size=2), TokenShare(interleaved(3), 1)),
    ],
)
def test_a_layout_that_holds_other_tokens_than_the_coordinates_say_is_refused(
    pair: Callable[..., Requests], side: str, coordinates: RankCoordinates, share: TokenShare
):
    requests = pair()
    existing = (requests.prefill if side == "prefill" else requests.decode).endpoints[0]
    layout = RankLayout(shards=existing.layout.shards, tokens=share)
    parts, part = share.partition.num_parts, share.part
    with pytest.raises(LayoutError) as caught:
        type(existing)(layout, coordinates=coordinates, settings=existing.settings)
    for text in (f"part {part} of {parts} parts", f"cp_rank {coordinates.cp_rank} of cp_size {coordinates.cp_size}"):
        assert text in str(caught.value)


# ---- packed pages ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        pytest.param(pages(4, tp=2), pages(4), id="tp2-to-1"),
        pytest.param(pages(4), pages(4, tp=4), id="1-to-tp4"),
        pytest.param(partitioned(interleaved(2, 4)), pages(4), id="interleaved2-to-1"),
        pytest.param(pages(4, tp=2), partitioned(interleaved(2, 4)), id="tp2-to-interleaved2"),
        pytest.param(partitioned(interleaved(2, 4)), partitioned(interleaved(3, 4)), id="interleaved2-to-interleaved3"),
        pytest.param(partitioned(contiguous(2)), partitioned(contiguous(2), tp=2), id="contiguous2-to-contiguous2-tp2"),
        pytest.param(partitioned(contiguous(3, 4)), pages(4), id="whole-pages3-to-1"),
        pytest.param(partitioned(contiguous(3, 4)), partitioned(contiguous(2, 4)), id="whole-pages3-to-whole-pages2"),
        pytest.param(partitioned(interleaved(2, 4)), partitioned(contiguous(3, 4)), id="interleaved2-to-whole-pages3"),
    ],
)
def test_packed_pages_are_cut_by_head_and_moved_whole(pair: Callable[..., Requests], prefill: Shape, decode: Shape):
    requests = pair(PACKED, prefill, decode)
    for room, tokens in enumerate(LENGTHS):
        requests.run_tokens(room, tokens, cuts=(7, 18))
    request = requests.run_tokens(100, 27, prefix_tokens=8)
    sent = sum(sender.stats.total_bytes for sender in request.senders)
    held = sum(len(pages) for pages in request.destination_pages)
    per_page = sum(pool.bytes_per_page for pool in requests.decode.pools) // len(requests.decode.pools)
    assert sent == held * per_page, "every page once"


def test_a_prefix_inside_a_packed_page_is_refused(pair: Callable[..., Requests]):
    decode = pair(PACKED, pages(4), pages(4)).decode.endpoints[0]
    with pytest.raises(PageError, match="ends inside a page of 4 tokens cannot be continued, since pages of 'kv'"):
        decode.open(1, [0, 1], prefix_tokens=3, tokens=8)


# ---- refused when the sides connect ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("here", "there", "prefill", "decode", "says"),
    [
        pytest.param(
            PACKED,
            Model(2, 4, 2, dtype="uint8"),
            pages(4),
            pages(4),
            ["components", "['kv']", "['k', 'v']"],
            id="names",
        ),
        pytest.param(PACKED, PACKED, pages(4), pages(8), ["axes of 'kv'", "packed 16", "packed 32"], id="packed sizes"),
        pytest.param(
            PACKED,
            PACKED,
            partitioned(interleaved(2, 2)),
            pages(4),
            ["'kv'", "cannot be cut between tokens", "blocks of 2 tokens", "every token"],
            id="packed pages partitioned in halves",
        ),
        pytest.param(
            WINDOWED,
            Model(layers=3, heads=2, head_dim=2, window_tokens=12, dtype="uint8"),
            pages(4),
            pages(4),
            ["window of 'window k'", "the last 10 tokens", "the last 12 tokens"],
            id="window",
        ),
        pytest.param(
            PLAIN,
            Model(layers=2, heads=2, head_dim=3, dtype="float16"),
            pages(4),
            pages(8),
            ["dtype of 'k'", "int16", "float16"],
            id="dtype",
        ),
    ],
)
def test_what_cannot_be_exchanged_is_refused_naming_both_sides(
    engines: Callable[..., Engines], here: Model, there: Model, prefill: Shape, decode: Shape, says: list[str]
):
    both = engines()
    source, destination = both.prefill(here, prefill), both.decode(there, decode).endpoints[0]
    with pytest.raises(IncompatiblePeerError) as caught:
        destination.connect(source.name)
    for text in (*says, f"of '{source.name}'", "this decode rank"):
        assert text in str(caught.value)


def test_tokens_and_packed_pages_of_one_name_are_refused(engines: Callable[..., Engines]):
    """The same component in the two forms: only names and axes of an engine's own choice can be alike."""
    from msgspec.structs import replace
    from tests.support.caches import pool

    from kvferry import DecodeEndpoint, InProcessTransport

    both = engines()
    source = both.prefill(PACKED, pages(4))
    made = pool(Model(2, 4, 2, dtype="uint8"), pages(4), RankCoordinates())
    shard = made.layout.shards[0]
    renamed = RankLayout(shards=(replace(shard, component=replace(shard.component, name="kv")),))
    with (
        DecodeEndpoint(renamed, settings=both.settings(), transport=InProcessTransport(both.network)) as decode,
        pytest.raises(IncompatiblePeerError) as caught,
    ):
        decode.connect(source.name)
    for text in ("layout of 'kv'", "packed pages (test)", "entries for every token", "this decode rank"):
        assert text in str(caught.value)


# ---- lists of single tokens --------------------------------------------------------------------------------------


def test_lists_of_single_tokens_are_made_once_and_only_when_needed(pair: Callable[..., Requests]):
    requests = pair(PLAIN, pages(8), pages(8))
    transport, made = requests.prefill.transports[0], []
    transport.on_prepare = lambda peer: made.append(peer)
    requests.run_tokens(1, 16)
    name = requests.decode.transports[0].endpoint_name
    assert made == ["", name], "whole pages alone need none"
    for room in range(2, 6):
        requests.run_tokens(room, 16, prefix_tokens=3)
    assert made == ["", name] * 2
    attachment = probe(requests.prefill.endpoints[0]).ranks.attachment(name)
    assert attachment is not None
    assert set(attachment.prepared) == {Unit.WHOLE, Unit.TOKEN}
    assert probe(transport).num_lists == 4


def test_a_pair_whose_unit_is_a_token_never_makes_them(pair: Callable[..., Requests]):
    requests = pair(PLAIN, pages(5), pages(7))
    transport, made = requests.prefill.transports[0], []
    transport.on_prepare = lambda peer: made.append(peer)
    for room in range(3):
        requests.run_tokens(room, 29, prefix_tokens=3)
    assert len(made) == 2


def test_all_lists_are_given_back_when_the_decode_rank_leaves(pair: Callable[..., Requests]):
    from tests.support.waiting import eventually

    requests = pair(PLAIN, pages(8), pages(8))
    requests.run_tokens(1, 16, prefix_tokens=3)
    transport = requests.prefill.transports[0]
    assert probe(transport).num_lists == 4
    requests.decode.endpoints[0].close()
    eventually("every list is given back", lambda: not probe(transport).num_lists)
    eventually("and the connection", lambda: not probe(transport).connected)
    assert transport.misused == []


def test_two_workers_that_need_single_tokens_at_once_make_one_list(pair: Callable[..., Requests]):
    import threading

    requests = pair(PLAIN, pages(8), pages(8), workers=4, queues=4)
    requests.connect()
    transport, made, go_on = requests.prefill.transports[0], [], threading.Event()

    def slow(peer: str) -> None:
        made.append(peer)
        go_on.wait(0.2)

    transport.on_prepare = slow
    requests.wipe()
    several = [requests.request(room, 16, prefix_tokens=3) for room in range(8)]
    for request in several:
        requests.open_decode(request)
        requests.open_prefill(request)
    for request in several:
        requests.advance(request, 16)
    for request in several:
        request.wait()
    assert len(made) == 2


@pytest.mark.parametrize("fails_at", [1, 2], ids=["our own", "the peer's"])
def test_lists_that_cannot_be_made_fail_only_the_rooms_that_need_them(pair: Callable[..., Requests], fails_at: int):
    requests = pair(PLAIN, pages(8), pages(8))
    requests.run_tokens(1, 16)
    transport, calls = requests.prefill.transports[0], 0

    def fail(peer: str) -> None:
        nonlocal calls
        calls += 1
        if calls == fails_at:
            raise OSError("no memory for lists")

    transport.on_prepare = fail
    request = requests.request(2, 16, prefix_tokens=3)
    requests.open_decode(request)
    requests.open_prefill(request)
    requests.advance(request, 16)
    with pytest.raises(TransferFailedError, match="no memory for lists"):
        request.senders[0].wait(WAIT_S)
    request.wait_ended()
    assert probe(transport).num_lists == 2, "nothing is left of the attempt"
    requests.run_tokens(3, 16)
    requests.run_tokens(4, 16, prefix_tokens=3)
    assert transport.misused == []
