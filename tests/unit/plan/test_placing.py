"""Where a receiver has the units that writers name."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.errors import MessageError
from kvferry.layout import RankLayout, TokenShare, attention_components, interleaved, shard_from_tensors
from kvferry.plan import Unit
from kvferry.plan.requests.demands import demands_of
from kvferry.plan.requests.moved_blocks import UnitPlaces, pack_units
from kvferry.plan.routes import route_between


def test_a_group_with_every_token_takes_none_of_its_prefix_and_says_which_tokens_came():
    """The rank has every other token of the rest, by which positions count otherwise."""
    k, _ = attention_components(num_layers=1, num_kv_heads=1, head_dim=2, dtype="int8")
    draft = attention_components(num_layers=1, num_kv_heads=1, head_dim=2, dtype="int8", prefix="draft ")[0]
    dims = ("page", "token", "head", "dim")
    shards = (
        shard_from_tensors(k, [np.zeros((9, 4, 1, 2), np.int8)], dims=dims),
        shard_from_tensors(draft, [np.zeros((9, 4, 1, 2), np.int8)], dims=dims, group="draft", has_every_token=True),
    )
    layout = RankLayout(shards=shards, tokens=TokenShare(interleaved(2), 1))
    asked = demands_of(layout, {"kv": [5, 6], "draft": [3, 7]}, prefix_tokens=6, tokens=10, where="room 1")
    places, route = UnitPlaces(layout, asked, 10), route_between(layout, "draft", layout, "draft")
    units = pack_units(np.array([6, 7, 8]))
    found = places.find(units, route, unit=Unit.TOKEN)
    assert [each.tolist() for each in found] == [[2, 3, 0], [3, 3, 7]]
    assert places.describe(units, 0, 3, route, unit=Unit.TOKEN).endswith("group 'draft'), tokens 6 to 8")
    with pytest.raises(
        MessageError, match="units 5 to 5 of 1 tokens in group 'draft' are not among the positions 6 to"
    ):
        places.find(pack_units(np.array([5])), route, unit=Unit.TOKEN)
