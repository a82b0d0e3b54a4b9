"""Where rings of any length have a request's last tokens."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from kvferry import GroupPages
from kvferry.engines.sglang.compressed import OVERLAP_TOKENS, Rings
from kvferry.errors import EngineContractError

PAGE = 16
SIDES = Rings(PAGE, window=11, overlap=8, pair=2), Rings(PAGE, window=14, overlap=16, pair=8)
"""Without speculative decoding, and with it."""

SLOT, PAGES = 3, np.array([5, 2, 9, 7])


def written(length: int, tokens: int, *, slot: int = SLOT) -> NDArray[np.int64]:
    """Rings of which one request's has been written token by token: what they have is its position."""
    rings = np.full((slot + 1) * length, -1)
    for position in range(tokens):
        rings[slot * length + position % length] = position
    return rings


def window_of(rings: Rings, tokens: int, count: int = 11) -> NDArray[np.int64]:
    """The places that SGLang names of a window."""
    assert rings.window is not None
    return SLOT * rings.window + np.arange(max(0, tokens - count), tokens) % rings.window


def found(rings: NDArray[np.int64], where: GroupPages) -> list[int]:
    return [int(each) for each in rings[np.asarray(where.pages)]]


@pytest.mark.parametrize("tokens", [1, 3, 7, 8, 11, 13, 40, 41])
@pytest.mark.parametrize("side", SIDES, ids=["short", "long"])
def test_a_request_s_rings_have_its_last_tokens_in_the_order_of_positions(side: Rings, tokens: int):
    assert side.window is not None
    assert side.overlap is not None
    assert side.pair is not None
    window = window_of(side, tokens)
    parts = {
        11: (side.window, side.window_places(window, tokens)),
        OVERLAP_TOKENS: (side.overlap, side.overlap_places(window, tokens)),
        2: (side.pair, side.pair_places(np.array([SLOT]), tokens)),
    }
    for most, (length, where) in parts.items():
        expected = [*range(max(0, tokens - most), tokens)]
        assert found(written(length, tokens), where) == expected
        assert (where.start, where.held_tokens) == (tokens - len(expected), 0)


@pytest.mark.parametrize("tokens", [49, 52, 56, 57, 63, 64])
@pytest.mark.parametrize("first", [0, 2, 3])
@pytest.mark.parametrize("side", SIDES, ids=["short", "long"])
def test_rings_of_pages_have_the_last_tokens_of_each(side: Rings, first: int, tokens: int):
    assert side.overlap is not None
    rings = np.full((10, side.overlap), -1)
    for position in range(tokens):
        rings[PAGES[position // PAGE], position % PAGE % side.overlap] = position
    where = side.overlap_in_pages(PAGES[first:], first, tokens)
    of_pages = [[*range(tokens)][page * PAGE : (page + 1) * PAGE][-OVERLAP_TOKENS:] for page in range(first, 4)]
    assert found(rings.reshape(-1), where) == [position for page in of_pages for position in page]
    assert (where.start, where.held_tokens) == (first * OVERLAP_TOKENS, 0)


def test_nothing_travels_where_nothing_is_left():
    for where in (SIDES[0].pair_places(np.array([], np.int32), 8), SIDES[0].overlap_in_pages(PAGES[:0], 4, 64)):
        assert len(np.asarray(where.pages)) == 0


@pytest.mark.parametrize("shifts", [[1] * 11, [0] * 10 + [11]], ids=["other positions", "two requests' rings"])
def test_places_of_other_tokens_are_refused(shifts: list[int]):
    with pytest.raises(EngineContractError, match="not those of the last 11 of 40 tokens in one ring"):
        SIDES[0].window_places(window_of(SIDES[0], 40) + shifts, 40)


def test_places_without_a_ring_or_more_of_them_than_tokens_are_refused():
    for rings, tokens in ((Rings(PAGE), 40), (SIDES[0], 10)):
        with pytest.raises(EngineContractError, match="SGLang hands in 11 places of a window's ring"):
            rings.window_places(window_of(SIDES[0], 40), tokens)


def test_pages_that_do_not_end_with_the_request_are_refused():
    with pytest.raises(EngineContractError, match="pages 1 to 5 of a window's, and the request has 64 tokens in pages"):
        SIDES[0].overlap_in_pages(PAGES, 1, 64)
