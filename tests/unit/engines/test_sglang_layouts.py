"""SGLang's lists of buffers as layouts: what lies where, who holds which part, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvferry.engines.sglang.layouts import Buffers, Caches, StateBuffer, describe
from kvferry.errors import LayoutError
from kvferry.layout import Device, Entry, Interval, MemoryKind, RankCoordinates, Shard

PAGE_TOKENS = 4
HEAD_BYTES = 8


def buffers(
    count: int, *, first: int = 0x10000, page_bytes: int = PAGE_TOKENS * 2 * HEAD_BYTES, pages: int = 10
) -> Buffers:
    size = pages * page_bytes
    return Buffers(tuple(first + number * size for number in range(count)), (size,) * count, (page_bytes,) * count)


def described(caches: Caches, device: Device = Device(), **coordinates: int) -> dict[str, Shard]:  # noqa: B008 - frozen
    layout = describe(caches, RankCoordinates(**coordinates), device)
    return {shard.component.name: shard for shard in layout.shards}


HEADS = Caches(kv=buffers(6), page_tokens=PAGE_TOKENS, kv_heads=4)


def test_keys_come_first_and_values_behind_them():
    shards = described(HEADS, tp_size=2, tp_rank=1)
    assert shards.keys() == {"k", "v"}
    assert shards["k"].addresses == HEADS.kv.addresses[:3]
    assert shards["v"].addresses == HEADS.kv.addresses[3:]
    for shard in shards.values():
        assert shard.box == (Interval(0, 3), Interval(2, 4), Interval(0, HEAD_BYTES))
        assert shard.strides == (HEAD_BYTES, 1)
        assert (shard.paging.num_pages, shard.paging.page_stride) == (10, PAGE_TOKENS * 2 * HEAD_BYTES)
        assert shard.paging.token_stride == 2 * HEAD_BYTES


def test_more_ranks_than_heads_hold_the_same_heads():
    caches = replace(HEADS, kv_heads=2, kv=buffers(6, page_bytes=PAGE_TOKENS * HEAD_BYTES))
    held = [described(caches, tp_size=4, tp_rank=rank)["k"].box[1] for rank in range(4)]
    assert held == [Interval(0, 1), Interval(0, 1), Interval(1, 2), Interval(1, 2)]


def test_latents_are_whole_everywhere():
    caches = Caches(kv=buffers(3, page_bytes=PAGE_TOKENS * 24), page_tokens=PAGE_TOKENS, kv_heads=None)
    for rank in range(2):
        shard = described(caches, tp_size=2, tp_rank=rank)["latent"]
        assert shard.box == (Interval(0, 3), Interval(0, 1), Interval(0, 24))


def test_a_pipeline_stage_holds_its_layers():
    shard = described(replace(HEADS, first_layer=3, layers=6), pp_size=2, pp_rank=1)["k"]
    assert (shard.component.axes[0].size, shard.box[0]) == (6, Interval(3, 6))


def test_a_window_has_pages_of_its_own():
    caches = replace(HEADS, window=buffers(4, first=0x90000, pages=5), window_tokens=12)
    shard = described(caches, tp_size=2)["window v"]
    assert (shard.group, shard.component.window_tokens, shard.paging.num_pages) == ("window", 12, 5)


def test_a_draft_models_cache_may_be_missing_on_the_other_side():
    shards = described(replace(HEADS, draft=buffers(2, first=0x90000)), tp_size=2, tp_rank=1)
    draft = shards["draft 1"]
    assert draft.component.is_optional
    assert draft.group == shards["k"].group
    assert draft.box[1] == Interval(1, 2)


def state(layer: int, **changes: int | tuple[int, ...]) -> StateBuffer:
    values = {"address": 0x90000 + 960 * layer, "length": 960, "item_bytes": 96, "layer": layer, "channels": 8}
    return StateBuffer(**{**values, **changes})  # type: ignore[arg-type]


def test_recurrent_state_is_divided_by_channel():
    shard = described(replace(HEADS, state=(state(0), state(1))), tp_size=2, tp_rank=1)["state 0"]
    assert shard.component.entry is Entry.REQUEST
    assert shard.box == (Interval(0, 2), Interval(0, 1), Interval(8, 16), Interval(0, 12))
    assert shard.paging.num_pages == 10


def test_blocks_of_a_convolution_are_divided_each_for_itself():
    both = tuple(state(layer, blocks=(4, 12)) for layer in range(2))
    shards = described(replace(HEADS, state=both), tp_size=2, tp_rank=1)
    first, second = shards["state 0, block 0"], shards["state 0, block 1"]
    assert (first.box[2], second.box[2]) == (Interval(2, 4), Interval(6, 12))
    assert second.addresses[0] == first.addresses[0] + 2 * 12


def test_layers_that_begin_again_are_state_of_another_kind():
    other = tuple(state(layer, address=0xA0000 + 960 * layer) for layer in range(2))
    shards = described(replace(HEADS, state=(state(0), state(1), *other)))
    assert {"state 0", "state 1"} <= shards.keys()


def test_state_that_is_not_divided_is_whole_everywhere():
    shard = described(replace(HEADS, state=(state(0, channels=0),)), tp_size=2, tp_rank=1)["state 0"]
    assert shard.box == (Interval(0, 1), Interval(0, 1), Interval(0, 1), Interval(0, 96))


def test_the_device_is_kept():
    device = Device(MemoryKind.VRAM, 3)
    assert {shard.device for shard in described(HEADS, device).values()} == {device}


@pytest.mark.parametrize(
    ("caches", "coordinates", "words"),
    [
        (replace(HEADS, kv=buffers(5)), {}, "5 buffers are not keys and values"),
        (replace(HEADS, page_tokens=5), {}, r"pages of 5 tokens have \[64\] bytes"),
        (replace(HEADS, kv_heads=3), {}, "16 bytes a token are not those of 3 heads"),
        (replace(HEADS, kv_heads=0), {}, "0 heads"),
        (replace(HEADS, state=(state(0, channels=7),)), {}, "96 bytes a slot are not 1 rows of 7 channels"),
        (replace(HEADS, state=(state(0, blocks=(4, 4)),)), {"tp_size": 2}, r"not blocks of \[4, 4\] channels"),
        (replace(HEADS, state=(state(0),)), {"pp_size": 2}, "--pp-size 1"),
        (replace(HEADS, draft=buffers(2)), {"pp_size": 2}, "--pp-size 1"),
    ],
)
def test_what_does_not_fit_is_named(caches: Caches, coordinates: dict[str, int], words: str):
    with pytest.raises(LayoutError, match=words):
        describe(caches, RankCoordinates(**coordinates), Device())


def test_lists_of_different_lengths_are_refused():
    with pytest.raises(LayoutError, match="2 buffers have 1 lengths and 2 item sizes"):
        Buffers((1, 2), (3,), (4, 5))
    with pytest.raises(LayoutError, match="a buffer of 3 bytes has items of 4"):
        Buffers((1,), (3,), (4,))
