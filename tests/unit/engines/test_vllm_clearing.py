"""Blocks that are loaded into pools full of NaN: nothing of them is left that a kernel might read as NaN.

Requests go through the whole plug-in, from one scheduler's block tables to another's. Both sides' pools are poisoned:
what shares a page with a token may travel with it.
"""

from __future__ import annotations

import math
from collections.abc import Set as AbstractSet
from fractions import Fraction
from functools import partial

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.support.tiers import examples
from tests.support.vllm_ranks import UNTOUCHED, Deployment, Engine, Kind, Request, plugged_in, transfer, value

from kvferry import Interval, RankCoordinates
from kvferry.engines.vllm.blocks import LoadedBlocks, copy_blocks
from kvferry.engines.vllm.caches import CacheGroup, HeldPart, ModelShape
from kvferry.engines.vllm.forms import CacheForm, CachePart
from kvferry.engines.vllm.layouts import describe
from kvferry.engines.vllm.steps import BlocksToReceive, GroupBlocks

FULL, WINDOW, CHUNK, STATE, DRAFT = (
    Kind((0,)),
    Kind((1, 2), window=9),
    Kind((1, 2), chunk=16),
    Kind((3,), has_state=True),
    Kind((0,), heads=2, is_draft=True),
)
LATENT = Kind((0, 1), heads=1)


def check(decode: Engine, name: str, tokens: int, prefix: int, absent: AbstractSet[Kind]) -> None:
    """Of every block that was loaded nothing is NaN; what was here before is what it was, and what came is there."""
    made = decode.deployment
    for kind, table in zip(decode.kinds, decode.tables[name], strict=True):
        if kind.has_state:
            continue
        loaded = -(-tokens // (made.block_tokens * decode.sharing(kind)))
        for rank in decode.ranks:
            slots = decode.places(rank, kind, table, tokens)
            held = {slot for slot in slots[:prefix] if slot >= 0}
            first = tokens if kind in absent else max(prefix, kind.first_attended(tokens))
            came = {slot: first + number for number, slot in enumerate(slots[first:]) if slot >= 0}
            for layer in kind.layers:
                cache = rank.caches.get(kind.name(layer))
                if cache is None:
                    continue
                for block in (block for block in table[:loaded] if not block.is_null):
                    for slot in range(block.block_id * made.block_tokens, (block.block_id + 1) * made.block_tokens):
                        found = cell(decode, cache, slot)
                        where = f"layer {layer} on {rank.place.in_model}, slot {slot}; {tokens} tokens, {prefix} here"
                        if slot in held:
                            assert (found == UNTOUCHED).all(), f"{where}: it was here before"
                        elif slot in came:
                            heads = rank.heads[kind.name(layer)]
                            assert torch.equal(found, value(kind, layer, came[slot])[heads.start : heads.stop]), where
                        else:
                            assert found.isfinite().all(), where


def cell(engine: Engine, cache: torch.Tensor, slot: int) -> torch.Tensor:
    page, token = divmod(slot, engine.deployment.block_tokens // engine.deployment.pages_per_block)
    return cache[page, :, token]


def poison(decode: Engine, prefix: int) -> None:
    """Fills every pool; transfers find their prefix in blocks that they are yet to get, so it is written afterwards."""
    decode.wipe(math.nan)
    allocate = decode.allocate

    def allocating(request: Request, first: int, *, computed: int, external: int) -> None:
        allocate(request, first, computed=computed, external=external)
        for _, _, _, _, cells in decode.cells(request.request_id, prefix):
            for found in cells:
                found.fill_(UNTOUCHED)

    decode.allocate = allocating  # type: ignore[method-assign]


def load(
    kinds: tuple[Kind, ...],
    here: Deployment,
    there: Deployment,
    tokens: int,
    prefix: int,
    absent: AbstractSet[Kind] = frozenset(),
) -> None:
    """Loads a prompt and looks at what has become of its blocks. The prefill side lacks the kinds that are absent."""
    theirs = [kind for kind in kinds if kind not in absent]
    with pytest.MonkeyPatch.context() as patch, plugged_in(patch) as network:
        prefill = Engine(network, "prefill", theirs, here, sends=True, layers=4)
        decode = Engine(network, "decode", kinds, there, sends=False, layers=4, clears=True)
        try:
            prefill.wipe(math.nan)
            poison(decode, prefix)
            transfer(prefill, decode, tokens, prefix)
            check(decode, f"{tokens}-{prefix}", tokens - 1, prefix, absent)
        finally:
            decode.close()
            prefill.close()


SMALL, LARGE, DIVIDED = (
    Deployment(block_tokens=4),
    Deployment(block_tokens=16),
    Deployment(block_tokens=16, pages_per_block=4),
)


@pytest.mark.parametrize(
    ("kinds", "here", "there", "tokens", "prefix"),
    [
        ((FULL,), SMALL, LARGE, 50, 0),
        ((FULL,), SMALL, DIVIDED, 50, 0),
        ((FULL,), DIVIDED, SMALL, 50, 0),
        ((FULL,), LARGE, LARGE, 22, 16),
        ((FULL, WINDOW), SMALL, LARGE, 47, 0),
        ((FULL, WINDOW), LARGE, DIVIDED, 47, 32),
        ((FULL, CHUNK), SMALL, LARGE, 39, 0),
        ((FULL, CHUNK), SMALL, DIVIDED, 33, 0),
        ((FULL, STATE), SMALL, LARGE, 39, 0),
        ((LATENT,), SMALL, Deployment(tp=2, dcp=2, turn=2, block_tokens=8), 21, 0),
        ((LATENT,), SMALL, Deployment(tp=4, dcp=4, turn=8, block_tokens=8), 12, 0),
    ],
)
def test_nothing_of_a_loaded_block_is_left_as_it_was(
    kinds: tuple[Kind, ...], here: Deployment, there: Deployment, tokens: int, prefix: int
):
    load(kinds, here, there, tokens, prefix)


def test_a_draft_that_the_other_side_lacks_finds_nothing_of_others():
    """Its layers share the block tables of a request of which only the model's layers come."""
    load((FULL, DRAFT), SMALL, DIVIDED, 50, 16, {DRAFT})


DEPLOYMENTS = st.builds(
    lambda tp, tokens, pages: Deployment(tp=tp, block_tokens=tokens * pages, pages_per_block=pages),
    st.sampled_from((1, 2)),
    st.sampled_from((2, 4, 6)),
    st.sampled_from((1, 2, 3)),
)


@settings(max_examples=examples(20))
@given(
    kinds=st.sampled_from(((FULL,), (FULL, WINDOW), (FULL, CHUNK), (FULL, STATE), (FULL, WINDOW, DRAFT))),
    here=DEPLOYMENTS,
    there=DEPLOYMENTS,
    tokens=st.integers(2, 45),
    held=st.integers(0, 7),
    lacks_draft=st.booleans(),
)
def test_no_load_leaves_nan(
    kinds: tuple[Kind, ...], here: Deployment, there: Deployment, tokens: int, held: int, lacks_draft: bool
):
    """Pages of any two sizes, blocks that kernels divide, prefixes that end with a block; chunks that do, too."""
    chunks = [kind.chunk for kind in kinds if kind.chunk is not None]
    assume(all(chunk % each.block_tokens == 0 for chunk in chunks for each in (here, there)))
    prefix = 0 if STATE in kinds else held * there.block_tokens
    if prefix >= tokens - 1:
        prefix = 0
    load(kinds, here, there, tokens, prefix, {DRAFT} if lacks_draft else set())


BLOCKS, HEADS, PAGE = 6, 2, 4


def cleared(form: CacheForm, dtype: torch.dtype, content: int, *, entries: int = PAGE) -> torch.Tensor:
    """Loads tokens 8 to 18 into two blocks of two pages, and returns which elements of the second one are cleared."""
    size = (2 * BLOCKS, HEADS, entries, content)
    bits = torch.full((*size[:-1], content * dtype.itemsize), 0xFF, dtype=torch.uint8)  # NaN in every type that has one
    group = CacheGroup("group 0", ("model.layers.0.attn",), 2 * PAGE)
    heads = HeldPart(HEADS, Interval(0, HEADS)) if form.has_heads else None
    described = describe(
        {group.layer_names[0]: bits.view(dtype)},
        [group],
        ModelShape(1),
        RankCoordinates(),
        heads={group.layer_names[0]: heads},
        forms={group.layer_names[0]: (form,)},
        num_blocks=BLOCKS,
    )
    load = BlocksToReceive("r", 1, "there", 8, 19, {group.name: GroupBlocks(1, (4, 1))})
    LoadedBlocks(described, [group]).clear(load, ())
    assert bool((bits[[0, 1, 4, 5, 6, 7, 10, 11]] == 0xFF).all()), "others' blocks"
    assert bool((bits[[8, 9]] == 0xFF).all()), "the block that was loaded whole"
    return bits[[2, 3]] == 0  # tokens 16 to 24


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8]
)
def test_every_type_of_numbers(dtype: torch.dtype):
    found = cleared(CacheForm(), dtype, 6)
    assert not found[0, :, :3].any()
    assert found[0, :, 3:].all()
    assert found[1].all()


@pytest.mark.parametrize("tables", [1, 2], ids=["in one block table", "in two"])
def test_all_layers_of_a_cache_of_several_precisions(tables: int):
    """As with layers that `kv_cache_dtype_skip_layers` names: blocks of one kind may have been the other's."""
    names = [f"model.layers.{number}.attn" for number in range(2)]
    caches = {
        name: torch.full((BLOCKS, HEADS, PAGE, 6 * size), 0xFF, dtype=torch.uint8)
        for name, size in zip(names, (1, 2), strict=True)
    }
    members = [(name,) for name in names] if tables == 2 else [tuple(names)]
    groups = [CacheGroup(f"group {number}", each, PAGE) for number, each in enumerate(members)]
    described = describe(
        {names[0]: caches[names[0]], names[1]: caches[names[1]].view(torch.bfloat16)},
        groups,
        ModelShape(2),
        RankCoordinates(),
        heads=dict.fromkeys(names, HeldPart(HEADS, Interval(0, HEADS))),
        num_blocks=BLOCKS,
    )
    assert [component.name for component in described.layout.components] == ["kv, uint8", "kv, bfloat16"]
    load = BlocksToReceive("r", 1, "there", 0, 6, {group.name: GroupBlocks(0, (4, 1)) for group in groups})
    LoadedBlocks(described, groups).clear(load, ())
    for cache in caches.values():
        assert (cache == 0).nonzero()[:, 0].unique().tolist() == [1]
        assert (cache[1, :, 2:] == 0).all()
        assert not (cache[1, :, :2] == 0).any()


def test_several_entries_for_a_token_and_a_part_of_one():
    found = cleared(CacheForm(tokens_per_entry=Fraction(1, 2)), torch.float32, 6, entries=2 * PAGE)
    assert not found[0, :, :6].any()
    assert found[0, :, 6:].all()
    assert found[1].all()
    # Two tokens share an entry: the second half of it is that of a token that is not there yet.
    form = CacheForm(tokens_per_entry=Fraction(2), part=partial(CachePart.spread, 2))
    shared = cleared(form, torch.float32, 8, entries=PAGE // 2)
    assert not shared[0, :, 0].any()
    assert not shared[0, :, 1, :16].any()
    assert shared[0, :, 1, 16:].all()
    assert shared[1].all()


def test_pages_whose_order_only_the_kernel_knows_are_cleared_where_none_of_it_came():
    """The page with the last token came whole."""
    found = cleared(CacheForm(packing="a kernel's own"), torch.float32, 6)
    assert not found[0].any()
    assert found[1].all()


def test_pages_of_which_it_is_known_where_tokens_lie():
    """All tokens' keys and then all their scales."""
    found = cleared(CacheForm(packing="keys, scales", token_parts=(4, 2)), torch.uint8, 6).flatten(2)
    keys, scales = found[0, :, : 4 * PAGE], found[0, :, 4 * PAGE :]
    assert not keys[:, :12].any()
    assert keys[:, 12:].all()
    assert not scales[:, :6].any()
    assert scales[:, 6:].all()
    assert found[1].all()


def test_other_choices_of_a_request_copy_what_was_cleared_with_what_came():
    """Blocks are copied whole: with the pages of which nothing came."""
    name = "model.layers.0.attn"
    caches = {name: torch.full((2 * BLOCKS, HEADS, PAGE, 6), math.nan)}
    group = CacheGroup("group 0", (name,), 2 * PAGE)
    heads = {name: HeldPart(HEADS, Interval(0, HEADS))}
    described = describe(caches, [group], ModelShape(1), RankCoordinates(), heads=heads, num_blocks=BLOCKS)
    loaded = GroupBlocks(0, (4,))
    caches[name][8, :, :3] = 1.0
    LoadedBlocks(described, [group]).clear(BlocksToReceive("r", 1, "there", 0, 3, {group.name: loaded}), ())
    copy_blocks(described, group.name, loaded, GroupBlocks(0, (1,)))
    assert torch.equal(caches[name][2:4], caches[name][8:10])
    assert caches[name][2:4].isfinite().all()
