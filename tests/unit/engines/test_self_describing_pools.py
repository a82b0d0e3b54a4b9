"""Views of pools carry all that the plug-in for SGLang derives today, and nothing that it does not need."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from prototypes.described_layout import layout_of
from prototypes.self_describing_pools import CacheView, Share
from tests.property.test_described_sglang import SIZES, Convolution, Model, described_rank, fits, models
from tests.support.views import views_of

from kvferry import Axis, Component, Entry, Interval, Paging, RankLayout, Shard, TokenShare, interleaved
from kvferry.errors import LayoutError


@given(models(), st.sampled_from(SIZES), st.data())
def test_views_carry_what_the_plug_in_derives(model: Model, size: int, data: st.DataObject):
    assume(fits(model, size))
    layout = described_rank(model, data.draw(st.integers(0, size - 1)), size).layout
    assert layout_of(views_of(layout), layout.device) == layout


SHARE_OF_TOKENS = TokenShare(interleaved(2), 1)


def odd() -> RankLayout:
    """What few pools have: an order of its own, a draft model, and all tokens where ranks divide those of others."""
    shard = Shard(
        component=Component(
            name="draft index",
            axes=(Axis("layer", 5), Axis("byte", 48)),
            dtype="uint8",
            entry=Entry.PAGE,
            packing="twisted",
            is_optional=True,
        ),
        box=(Interval(2, 4), Interval(0, 48)),
        addresses=(4096, 8192),
        strides=(1,),
        paging=Paging(page_tokens=16, num_pages=3, page_stride=64, token_stride=0),
        group="index",
        has_every_token=True,
    )
    return RankLayout(shards=(shard,), tokens=SHARE_OF_TOKENS)


def layouts() -> list[RankLayout]:
    window = Model(4, 8)
    state = Model(2, convolution=Convolution("mixer", 8))
    return [odd(), *(described_rank(model, 1, 2).layout for model in (window, state))]


OTHERWISE: dict[str, Any] = {
    "name": lambda name: f"{name} of another",
    "group": lambda _: "others",
    "entry": lambda entry: "request" if entry == "token" else "token",
    "layers": lambda layers: Share(layers.start, layers.total + 1),
    "addresses": lambda addresses: tuple(each + (1 << 30) for each in addresses),
    "axes": lambda axes: (replace(axes[0], name="another"), *axes[1:]),
    "page_tokens": lambda tokens: tokens + 1,
    "num_pages": lambda pages: pages + 1,
    "page_stride": lambda stride: 2 * stride,
    "token_stride": lambda stride: stride + 1,
    "packing": lambda packing: None if packing else "another",
    "window_tokens": lambda tokens: None if tokens else 4,
    "is_draft": lambda is_draft: not is_draft,
    "has_every_token": lambda has: not has,
}


@pytest.mark.parametrize("attribute", OTHERWISE)
def test_every_attribute_of_a_view_is_needed(attribute: str):
    """A layout is another one, or refused, where one view says it otherwise."""
    for layout in layouts():
        first = views_of(layout)[0]
        wrong: CacheView = replace(first, **{attribute: OTHERWISE[attribute](getattr(first, attribute))})
        assert read(first, layout) == layout
        assert read(wrong, layout) != layout


def read(view: CacheView, layout: RankLayout) -> RankLayout | str:
    """A layout with this view in the place of its first one, or why there is none."""
    try:
        return layout_of([view, *views_of(layout)[1:]], layout.device, layout.tokens)
    except LayoutError as refusal:
        return str(refusal)


def test_every_attribute_is_tried_but_where_memory_is_which_says_whose_layout_it_is():
    assert {*CacheView.__dataclass_fields__} - {*OTHERWISE} == {"memory"}
    assert {each.memory for each in views_of(odd())} == {"host"}
