"""SGLang's lists of buffers as layouts: what lies where, who holds which part, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvferry import RankLayout, TokenShare, interleaved
from kvferry.engines.sglang.caches import Attention, Block, Buffers, Caches, Heads, Stage, Stages, StateBuffer, Uncut
from kvferry.engines.sglang.layouts import SHARE, describe
from kvferry.engines.sglang.placement import Part, Placement
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


def heads(total: int | None, held: int = 2, head_bytes: int = HEAD_BYTES) -> Heads:
    return Heads(held, total, head_bytes, head_bytes)


HEADS = Caches(kv=Attention(buffers(6), heads(4)), page_tokens=PAGE_TOKENS)


def test_keys_come_first_and_values_behind_them():
    shards = described(HEADS, tp_size=2, tp_rank=1)
    assert shards.keys() == {"k", "v"}
    assert shards["k"].addresses == HEADS.kv.buffers.addresses[:3]
    assert shards["v"].addresses == HEADS.kv.buffers.addresses[3:]
    for shard in shards.values():
        assert shard.box == (Interval(0, 3), Interval(2, 4), Interval(0, HEAD_BYTES))
        assert shard.strides == (HEAD_BYTES, 1)
        assert (shard.paging.num_pages, shard.paging.page_stride) == (10, PAGE_TOKENS * 2 * HEAD_BYTES)
        assert shard.paging.token_stride == 2 * HEAD_BYTES


def test_more_ranks_than_heads_hold_the_same_heads():
    caches = replace(HEADS, kv=Attention(buffers(6, page_bytes=PAGE_TOKENS * HEAD_BYTES), heads(2, held=1)))
    held = [described(caches, tp_size=4, tp_rank=rank)["k"].box[1] for rank in range(4)]
    assert held == [Interval(0, 1), Interval(0, 1), Interval(1, 2), Interval(1, 2)]


def test_latents_are_whole_everywhere():
    caches = Caches(kv=Attention(buffers(3, page_bytes=PAGE_TOKENS * 24), None), page_tokens=PAGE_TOKENS)
    for rank in range(2):
        shard = described(caches, tp_size=2, tp_rank=rank)["latent"]
        assert shard.box == (Interval(0, 3), Interval(0, 1), Interval(0, 24))


def test_a_pipeline_stage_holds_its_layers():
    caches = replace(HEADS, kv=Attention(buffers(6), heads(2)), stages=Stages(Stage(3, 6)))
    shard = described(caches, pp_size=2, pp_rank=1)["k"]
    assert (shard.component.axes[0].size, shard.box[0]) == (6, Interval(3, 6))


def test_a_window_has_pages_of_its_own():
    caches = replace(HEADS, window=Attention(buffers(4, first=0x90000, pages=5), heads(4)), window_tokens=12)
    shard = described(caches, tp_size=2)["window v"]
    assert (shard.group, shard.component.window_tokens, shard.paging.num_pages) == ("window", 12, 5)


def test_a_draft_models_cache_may_be_missing_on_the_other_side():
    caches = replace(HEADS, draft=buffers(2, first=0x90000), draft_heads=heads(4))
    shards = described(caches, tp_size=2, tp_rank=1)
    draft = shards["draft 1"]
    assert draft.component.is_optional
    assert draft.group == shards["k"].group
    assert (draft.component.axes[1].size, draft.box[1]) == (4, Interval(2, 4))


def test_a_draft_models_heads_that_nobody_counts_are_the_share_of_their_rank():
    caches = replace(HEADS, draft=buffers(2, first=0x90000), draft_heads=heads(None))
    draft = described(caches, tp_size=2, tp_rank=1)["draft 0"]
    assert (draft.component.axes[1].name, draft.box[1]) == (SHARE, Interval(1, 2))


def test_a_draft_models_latents_are_whole_everywhere():
    shards = described(replace(HEADS, draft=buffers(2, first=0x90000)), tp_size=2, tp_rank=1)
    assert shards["draft 1"].box == (Interval(0, 1), Interval(0, 1), Interval(0, 2 * HEAD_BYTES))


def test_a_draft_model_may_be_on_the_last_stage_alone():
    """All ranks of an engine must agree on their components, but for those that the other side may lack as well."""
    last = replace(HEADS, draft=buffers(2, first=0x90000), draft_heads=heads(2), kv=Attention(buffers(6), heads(2)))
    stages = [replace(HEADS, kv=last.kv, stages=Stages(Stage(0, 6))), replace(last, stages=Stages(Stage(3, 6)))]
    layouts = [describe(each, RankCoordinates(pp_size=2, pp_rank=stage), Device()) for stage, each in enumerate(stages)]
    assert len({layout.digest for layout in layouts}) == 1


# ---- pipeline stages ------------------------------------------------------------------------------------------------


def test_stages_hold_their_layers_of_every_kind():
    caches = replace(
        HEADS,
        kv=Attention(buffers(6), heads(2)),
        window=Attention(buffers(4, first=0x90000), heads(2)),
        state=(replace(state(0), blocks=None, address=0xB0000), replace(state(5), blocks=None, address=0xC0000)),
        stages=Stages(Stage(3, 6), window=Stage(4, 9), state=Stage(6, 8)),
    )
    shards = described(caches, pp_size=3, pp_rank=1)
    held = {name: (shard.component.axes[0].size, shard.box[0]) for name, shard in shards.items()}
    assert held == {
        "k": (6, Interval(3, 6)),
        "v": (6, Interval(3, 6)),
        "window k": (9, Interval(4, 6)),
        "window v": (9, Interval(4, 6)),
        "state 0": (8, Interval(6, 8)),
    }


@pytest.mark.parametrize("lacks", ["kv", "window"])
def test_a_stage_may_lack_layers_of_a_kind(lacks: str):
    """It names the component all the same, with as many pages as its pool has for none of them."""
    there = replace(HEADS, kv=Attention(buffers(6), heads(2)), stages=Stages(Stage(0, 3), window=Stage(0, 2)))
    there = replace(there, window=Attention(buffers(4, first=0x90000), heads(2)), window_tokens=8)
    none = Attention(buffers(0), heads(2), pages=77)
    here = replace(there, kv=none) if lacks == "kv" else replace(there, window=none)
    layouts = [describe(each, RankCoordinates(pp_size=2), Device()) for each in (here, there)]
    assert layouts[0].digest == layouts[1].digest
    name = "k" if lacks == "kv" else "window k"
    (shard,) = layouts[0].shards_of(name)
    assert (len(shard.box[0]), shard.paging.num_pages) == (0, 77)


# ---- tokens that ranks divide ---------------------------------------------------------------------------------------


def apart(caches: Caches, *, goes_round: bool = False) -> RankLayout:
    part = Part()
    where = RankCoordinates(cp_size=4, cp_rank=3)
    share = TokenShare(interleaved(4), 3)
    return describe(caches, Placement(where, part, part, Part(3, 4), share, goes_round=goes_round), Device())


LATENTS = Caches(kv=Attention(buffers(3, page_bytes=PAGE_TOKENS * 24), None), page_tokens=PAGE_TOKENS)


def test_latents_may_be_divided_by_token():
    layout = apart(LATENTS)
    assert layout.tokens == TokenShare(interleaved(4), 3)
    assert layout.shards[0].box == (Interval(0, 3), Interval(0, 1), Interval(0, 24))


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"window": Attention(buffers(2, first=0x90000), heads(2)), "window_tokens": 4}, "sliding windows"),
        ({"scales": Attention(buffers(2, first=0x90000), heads(2))}, "scales of blocks"),
        ({"index": Attention(buffers(2, first=0x90000), None)}, "an index"),
        ({"uncut": (Uncut("pooled", (0,), 3, buffers(1, first=0x90000), "an order", "kv"),)}, "an index"),
        ({"uncut": (Uncut("rings", (0,), 3, buffers(1, first=0x90000), "an order", "window ring"),)}, "an index"),
    ],
)
def test_what_nobody_has_tried_where_ranks_divide_tokens_is_refused_there(more: dict[str, Any], what: str):
    with pytest.raises(LayoutError, match=f"4 ranks divide the tokens .*{what}.* leave --dcp-size"):
        apart(replace(LATENTS, **more))


INDEX: dict[str, Any] = {"uncut": (Uncut("index", (0,), 3, buffers(1, first=0x90000), "an order", "index"),)}
DRAFT: dict[str, Any] = {
    "draft": buffers(2, page_bytes=4 * PAGE_TOKENS * 20, first=0x90000),
    "draft_heads": Heads(1, 4, 20, 20),
}


@pytest.mark.parametrize(("more", "what"), [(INDEX, "an index"), (DRAFT, "a draft model")], ids=["index", "draft"])
def test_where_pages_go_round_an_index_and_a_draft_are_refused(more: dict[str, Any], what: str):
    with pytest.raises(LayoutError, match=f"{what}.* leave --dcp-size"):
        apart(replace(LATENTS, **more), goes_round=True)


def test_an_index_has_every_token_where_ranks_divide_them():
    layout = apart(replace(LATENTS, **INDEX))
    (index,) = layout.shards_of("index")
    assert (index.group, index.has_every_token, index.paging.page_tokens) == ("index", True, PAGE_TOKENS)
    assert not layout.shards[0].has_every_token


def test_a_draft_has_every_token_and_its_own_heads_where_ranks_divide_tokens():
    """SGLang's draft never joins the ranks that divide tokens: all of them divide its heads."""
    layout = apart(replace(LATENTS, **DRAFT))
    for shard in layout.shards[1:]:
        assert (shard.group, shard.has_every_token, shard.paging.page_tokens) == ("draft", True, 4 * PAGE_TOKENS)
        assert shard.box[1] == Interval(3, 4)


def state(layer: int, **changes: Any) -> StateBuffer:
    values = {"address": 0x90000 + 960 * layer, "length": 960, "item_bytes": 96, "layer": layer, "channels": 8}
    return StateBuffer(**{**values, "blocks": (Block(16, 16),), **changes})


def test_recurrent_state_is_divided_by_channel():
    shard = described(replace(HEADS, state=(state(0), state(1))), tp_size=2, tp_rank=1)["state 0"]
    assert shard.component.entry is Entry.REQUEST
    assert shard.box == (Interval(0, 2), Interval(0, 1), Interval(8, 16), Interval(0, 12))
    assert shard.paging.num_pages == 10


def test_blocks_of_a_convolution_are_divided_each_for_itself():
    both = tuple(state(layer, blocks=(Block(4, 4), Block(12, 6))) for layer in range(2))
    shards = described(replace(HEADS, state=both), tp_size=2, tp_rank=1)
    first, second = shards["state 0, block 0"], shards["state 0, block 1"]
    assert (first.box[2], second.box[2]) == (Interval(2, 4), Interval(6, 12))
    assert second.addresses[0] == first.addresses[0] + 2 * 12


def test_layers_that_begin_again_are_state_of_another_kind():
    other = tuple(state(layer, address=0xA0000 + 960 * layer) for layer in range(2))
    shards = described(replace(HEADS, state=(state(0), state(1), *other)), tp_size=2)
    assert {"state 0", "state 1"} <= shards.keys()


def test_state_that_is_not_divided_is_whole_everywhere():
    shard = described(replace(HEADS, state=(state(0, channels=0),)), tp_size=2, tp_rank=1)["state 0"]
    assert shard.box == (Interval(0, 1), Interval(0, 1), Interval(0, 1), Interval(0, 96))


def test_a_block_that_cannot_be_cut_as_often_is_whole_on_several_ranks():
    caches = replace(HEADS, kv=Attention(buffers(6), heads(8)), state=(state(0, blocks=(Block(24, 4), Block(2, 1))),))
    shards = described(caches, tp_size=4, tp_rank=2)
    assert [shards[f"state 0, block {block}"].box[2] for block in range(2)] == [Interval(12, 18), Interval(0, 2)]


def test_what_nobody_describes_is_the_share_of_its_rank():
    caches = replace(HEADS, kv=Attention(buffers(6), heads(None)), state=(state(0, blocks=None, rows=2, channels=4),))
    shards = described(caches, tp_size=4, tp_rank=3)
    assert shards["k"].box == (Interval(0, 3), Interval(3, 4), Interval(0, 2 * HEAD_BYTES))
    assert shards["state 0"].box == (Interval(0, 1), Interval(0, 2), Interval(3, 4), Interval(0, 48))
    assert {shards[name].component.axes[-2].name for name in shards} == {SHARE}


def test_the_device_is_kept():
    device = Device(MemoryKind.VRAM, 3)
    assert {shard.device for shard in described(HEADS, device, tp_size=2).values()} == {device}


@pytest.mark.parametrize(
    ("caches", "coordinates", "words"),
    [
        (replace(HEADS, kv=Attention(buffers(5), heads(2))), {}, "5 buffers are not keys and values"),
        (replace(HEADS, page_tokens=5), {}, r"pages of 5 tokens have \[64\] bytes"),
        (
            replace(HEADS, kv=Attention(buffers(6), heads(3, held=3))),
            {},
            "16 bytes a token are not those of 3 heads of 8",
        ),
        (replace(HEADS, kv=Attention(buffers(6), heads(4))), {}, "has 2 heads on rank 0 of 1: of a model with 4 there"),
        (replace(HEADS, kv=Attention(buffers(0), heads(4))), {}, "no layer with full attention"),
        (replace(HEADS, state=(state(0, channels=7),)), {"tp_size": 2}, "96 bytes a slot are not 1 rows of 7 channels"),
        (
            replace(HEADS, state=(state(0, blocks=(Block(4, 4), Block(4, 4))),)),
            {"tp_size": 2},
            r"8 channels on rank 0 of 2 are not its parts \[2, 2\] of blocks of \[4, 4\] channels",
        ),
        (
            replace(
                HEADS,
                kv=Attention(buffers(6), heads(2)),
                state=(state(0), state(1), state(0, address=0xC0000, item_bytes=48)),
                stages=Stages(state=Stage(0, 4)),
            ),
            {"pp_size": 2},
            r"needs the same kinds of it: \[1, 2\] layers of this stage",
        ),
        (
            replace(LATENTS, kv=Attention(buffers(0), None), stages=Stages(Stage(0, 3))),
            {"pp_size": 2},
            "no layer of this pipeline stage has latent",
        ),
    ],
)
def test_what_does_not_fit_is_named(caches: Caches, coordinates: dict[str, int], words: str):
    with pytest.raises(LayoutError, match=words):
        describe(caches, RankCoordinates(**coordinates), Device())


def test_blocks_that_cannot_be_cut_are_refused():
    with pytest.raises(LayoutError, match="a block of 9 channels of recurrent state cannot be cut into 2"):
        Block(9, 2)


def test_lists_of_different_lengths_are_refused():
    with pytest.raises(LayoutError, match="2 buffers have 1 lengths and 2 item sizes"):
        Buffers((1, 2), (3,), (4, 5))
    with pytest.raises(LayoutError, match="a buffer of 3 bytes has items of 4"):
        Buffers((1,), (3,), (4,))
