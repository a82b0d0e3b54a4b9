"""How caches of vLLM's are to be read, by what specs and names say; and layers of which several have one number."""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.crossing import cross

from kvferry import GroupPages, TokenShare, interleaved
from kvferry.engines.vllm.caches import CacheGroup, HeldPart, ModelShape
from kvferry.engines.vllm.forms import CacheForm, forms_of, is_the_same_everywhere, role_of
from kvferry.engines.vllm.layouts import describe
from kvferry.engines.vllm.states import WHOLE_REQUEST, ring_of
from kvferry.errors import IncompatiblePeerError, LayoutError
from kvferry.layout import Entry, Interval, RankCoordinates, TokenPartition
from kvferry.layout.shard import RankLayout
from kvferry.plan import check_exchangeable
from kvferry.plan.proof import prove
from kvferry.testing.network import LocalNetwork

ATTENTION, INDEX = "model.layers.1.self_attn.attn", "model.layers.1.self_attn.indexer.k_cache"
TOKENS, BLOCKS = 8, 5


def spec(kind: str = "FullAttentionSpec", *, mode: str = "NONE", role: str | None = None, **changes: Any) -> Any:
    attributes = {
        "num_kv_heads": 1 if "MLA" in kind else 4,
        "num_head_slots": None,
        "state_content_bytes": None,
        "tokens_per_state": 1,
        "head_size": 64,
        "head_size_v": 0 if "MLA" in kind else 64,
        "dtype": torch.bfloat16,
        "kv_quant_mode": SimpleNamespace(name=mode),
        "cache_role": SimpleNamespace(value=role),
    }
    return type(kind, (SimpleNamespace,), {})(**attributes | changes)


BY_TOKEN = CacheForm()
LATENTS: dict[str, Any] = {"kind": "MLAAttentionSpec", "dtype": torch.uint8}


@pytest.mark.parametrize(
    ("made", "form"),
    [
        (spec(), BY_TOKEN),
        (spec(dtype=torch.uint8, mode="FP8_PER_TENSOR"), BY_TOKEN),
        (spec(dtype=torch.int8, mode="INT8_PER_TOKEN_HEAD", state_content_bytes=136), BY_TOKEN),
        (spec(dtype=torch.uint8, mode="INT4_PER_TOKEN_HEAD", state_content_bytes=72), BY_TOKEN),
        (spec(**LATENTS, mode="FP8_PER_TENSOR", cache_dtype_str="fp8_ds_mla", state_content_bytes=656), BY_TOKEN),
        (spec(**LATENTS, mode="NVFP4_DS_MLA", cache_dtype_str="nvfp4_ds_mla", state_content_bytes=352), BY_TOKEN),
        (
            spec(**LATENTS, mode="FP8_PER_TENSOR", cache_dtype_str="fp8_ds_mla", state_content_bytes=584),
            CacheForm(packing="vLLM's THEIRS"),
        ),
        (
            spec(**LATENTS, mode="NVFP4_DS_MLA", cache_dtype_str="nvfp4_ds_mla", state_content_bytes=288),
            CacheForm(packing="vLLM's THEIRS"),
        ),
        (spec(**LATENTS), CacheForm(packing="vLLM's THEIRS")),
        (spec("MLAAttentionSpec", tokens_per_state=5), CacheForm("kv", Fraction(5), "vLLM's THEIRS")),
        (spec(**LATENTS, tokens_per_state=4), CacheForm("kv", Fraction(4), "vLLM's THEIRS")),
        (spec(tokens_per_state=Fraction(1, 4)), CacheForm("kv", Fraction(1, 4))),
    ],
)
def test_tokens_are_told_apart_where_their_scales_are_their_own(made: Any, form: CacheForm):
    assert forms_of(ATTENTION, made, SimpleNamespace(), "THEIRS") == (form,)


@pytest.mark.parametrize(
    "made",
    [
        spec(dtype=torch.uint8, mode="TURBOQUANT_4BIT_NC", state_content_bytes=70),
        spec(dtype=torch.uint8, mode="ULTRAQUANT_4BIT", state_content_bytes=68),
        spec(dtype=torch.uint8, mode="NVFP4", state_content_bytes=36, num_head_slots=8),
        spec(num_head_slots=2, state_content_bytes=512),
    ],
)
def test_an_order_that_nobody_says_is_the_backends_and_the_ranks_own(made: Any):
    (form,) = forms_of(ATTENTION, made, SimpleNamespace(), "THEIRS")
    assert (form.packing, form.has_heads, form.part is None) == ("vLLM's THEIRS", False, False)


def test_an_order_depends_on_the_pages_of_a_kernel_and_on_whether_they_are_shuffled():
    layer = SimpleNamespace(kv_cache=torch.zeros(BLOCKS, 64, 132, dtype=torch.uint8), uses_shuffled_layout=True)
    (form,) = forms_of(INDEX, spec(**LATENTS), layer, "THEIRS")
    assert form.packing == "vLLM's THEIRS, in pages of 64 entries, shuffled"


def index_of(*, width: int = 132, entries: int = 1, shuffled: bool = False, is_nvidia: bool = True) -> CacheForm:
    layer = SimpleNamespace(kv_cache=torch.zeros(BLOCKS, 64, width), uses_shuffled_layout=shuffled)
    made = spec(**LATENTS, head_size=width, tokens_per_state=entries)
    (form,) = forms_of(INDEX, made, layer, "DEEPSEEK_V32_INDEXER", is_nvidia=is_nvidia)
    assert form.packing is not None, "as a whole it is compared by name in any case"
    return form


def test_how_pages_are_cut_is_said_of_an_index_that_is_known_alone():
    assert index_of().token_parts == (128, 4)
    for other in (index_of(width=68), index_of(entries=4), index_of(shuffled=True), index_of(is_nvidia=False)):
        assert other.token_parts == ()


@pytest.mark.parametrize(
    ("name", "role", "expected"),
    [
        (ATTENTION, None, "kv"),
        ("model.layers.3.attn", "sparse", "kv"),
        ("cache_only_layers.3", None, "kv"),
        ("model.layers.3.self_attn.1.attn", "sparse", "self_attn.1.attn"),
        (INDEX, "indexer", "self_attn.indexer.k_cache"),
        ("model.layers.3.self_attn.index", "indexer", "self_attn.index"),
        ("model.layers.3.attn.swa_cache", "sparse", "attn.swa_cache"),
        ("layers.3.attn.indexer.compressor.state_cache", None, "attn.indexer.compressor.state_cache"),
    ],
)
def test_what_a_cache_is_beside_others_follows_from_its_own_name(name: str, role: str | None, expected: str):
    assert role_of(name, spec(role=role)) == expected


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (spec("MLAAttentionSpec"), True),
        (spec("SlidingWindowMLASpec"), True),
        (spec("MLAAttentionSpec", num_kv_heads=2), False),
        (spec(num_kv_heads=1), False),
        (spec("HiddenStateCacheSpec", num_kv_heads=3), True),
    ],
)
def test_what_every_rank_has_is_told_by_its_spec(made: Any, expected: bool):
    assert is_the_same_everywhere(made) is expected


def described(
    caches: dict[str, tuple[torch.Tensor, CacheForm]],
    *,
    groups: tuple[CacheGroup, ...] = (),
    tp: int = 1,
    rank: int = 0,
) -> RankLayout:
    """Layers in one group, of which every rank has the same."""
    groups = groups or (CacheGroup("group 0", tuple(caches), TOKENS),)
    return describe(
        {name: cache for name, (cache, _) in caches.items()},
        groups,
        ModelShape(3),
        RankCoordinates(tp_rank=rank, tp_size=tp),
        heads=dict.fromkeys(caches, HeldPart(1, Interval(0, 1))),
        forms={name: (form,) for name, (_, form) in caches.items()},
        num_blocks=BLOCKS,
    ).layout


def sparse(*, tp: int = 1, rank: int = 0, index_page: str = "vLLM's") -> RankLayout:
    caches = {}
    for number in range(3):
        attention, index = (name.replace("1", str(number), 1) for name in (ATTENTION, INDEX))
        caches[attention] = torch.zeros(BLOCKS, 1, TOKENS, 12), BY_TOKEN
        form = CacheForm("self_attn.indexer.k_cache", packing=index_page)
        caches[index] = torch.zeros(BLOCKS, 1, TOKENS, 6, dtype=torch.uint8), form
    return described(caches, tp=tp, rank=rank)


def test_an_index_is_a_component_of_its_own_beside_the_latents_of_the_same_layers():
    layout = sparse()
    found = {each.name: (each.entry, each.axes[0].size) for each in layout.components}
    assert found == {"kv": (Entry.TOKEN, 3), "self_attn.indexer.k_cache": (Entry.PAGE, 3)}
    assert [shard.box[0] for shard in layout.shards] == [Interval(0, 3), Interval(0, 3)]
    assert [group.name for group in layout.groups] == ["group 0"], "both have the same pages"


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 2), (2, 1), (4, 2)])
def test_an_index_goes_from_any_number_of_ranks_to_any_other(prefill_tp: int, decode_tp: int):
    sources = {rank: sparse(tp=prefill_tp, rank=rank) for rank in range(prefill_tp)}
    destinations = {rank: sparse(tp=decode_tp, rank=rank) for rank in range(decode_tp)}
    assert prove(sources, destinations, room=3).receivers == decode_tp


KEY, SCALE = 4, 2


def shared_index(partition: TokenPartition) -> tuple[list[torch.Tensor], list[RankLayout]]:
    """An index on ranks that share tokens: a page has the keys of its tokens, and then their scales."""
    caches = [torch.zeros(8, 1, TOKENS, KEY + SCALE, dtype=torch.uint8) for _ in range(partition.num_parts)]
    form = CacheForm("index", packing="vLLM's", token_parts=(KEY, SCALE))
    layouts = [
        describe(
            {INDEX: cache},
            (CacheGroup("group 0", (INDEX,), TOKENS, token_ranks=partition.num_parts),),
            ModelShape(3),
            RankCoordinates(tp_rank=part, tp_size=partition.num_parts),
            heads={INDEX: HeldPart(1, Interval(0, 1))},
            forms={INDEX: (form,)},
            num_blocks=8,
            tokens=TokenShare(partition, part),
        ).layout
        for part, cache in enumerate(caches)
    ]
    return caches, layouts


def entries(caches: list[torch.Tensor], partition: TokenPartition, blocks: list[int], tokens: int) -> torch.Tensor:
    """The key and the scale of each token, (token, byte), counted out one token after the other."""
    found, kept = [], [0] * len(caches)
    for token in range(tokens):
        owner = partition.pattern[token // (partition.block_tokens or 1) % len(partition.pattern)]
        page, within = divmod(kept[owner], TOKENS)
        kept[owner] += 1
        flat = caches[owner][blocks[page]].view(-1)
        scale = TOKENS * KEY + within * SCALE
        found.append(torch.cat([flat[within * KEY : (within + 1) * KEY], flat[scale : scale + SCALE]]))
    return torch.stack(found)


@pytest.mark.parametrize("path", ["direct", "staged"])
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (interleaved(2), interleaved(1)),
        (interleaved(1), interleaved(2, 2)),
        (interleaved(2), interleaved(4, 2)),
        (interleaved(2, TOKENS), interleaved(2, 4)),
        (interleaved(2, TOKENS), interleaved(1)),
        (interleaved(2), interleaved(2)),
    ],
    ids=str,
)
def test_an_index_that_says_its_parts_is_cut_between_tokens(path: str, theirs: TokenPartition, ours: TokenPartition):
    """Where ranks of the two sides share tokens otherwise, in whichever way the bytes go."""
    tokens = 27
    (here, sources), (there, destinations) = shared_index(theirs), shared_index(ours)
    blocks, own_blocks = [6, 1, 4, 2], [0, 7, 3, 5]
    for cache in here:
        cache.copy_(torch.randint(1, 256, cache.shape, dtype=torch.uint8))
    pages, own_pages = (-(-tokens // (TOKENS * each.num_parts)) for each in (theirs, ours))
    with LocalNetwork(path=path) as network:
        cross(
            network,
            sources,
            destinations,
            sent={"group 0": GroupPages(blocks[:pages])},
            received={"group 0": GroupPages(own_blocks[:own_pages])},
            tokens=tokens,
        )
    expected = entries(here, theirs, blocks, tokens)
    assert torch.equal(entries(there, ours, own_blocks, tokens), expected)
    assert expected.count_nonzero() == expected.numel()
    for cache in there:
        assert not cache[own_blocks[own_pages:]].any(), "pages of other requests"


def test_another_order_of_an_index_is_refused():
    with pytest.raises(IncompatiblePeerError, match=r"theirs, 8 tokens a page.*ours, 8 tokens a page"):
        check_exchangeable(
            sparse(index_page="theirs"), sparse(index_page="ours"), source_name="a", destination_name="b"
        )


def test_two_caches_of_one_number_and_one_kind_are_refused():
    caches = {name: (torch.zeros(BLOCKS, 1, TOKENS, 12), BY_TOKEN) for name in (ATTENTION, f"{ATTENTION}2")}
    with pytest.raises(LayoutError, match="have the same number"):
        described(caches)


def test_two_attentions_of_a_decoder_layer_are_two_components():
    """As in LongCat-Flash."""
    names = [f"model.layers.{number}.self_attn.{which}.attn" for number in range(3) for which in range(2)]
    caches = {
        name: (torch.zeros(BLOCKS, 1, TOKENS, 12), forms_of(name, spec("MLAAttentionSpec"), None, "X")[0])
        for name in names
    }
    layout = described(caches)
    assert {shard.component.name: shard.box[0] for shard in layout.shards} == {
        "self_attn.0.attn": Interval(0, 3),
        "self_attn.1.attn": Interval(0, 3),
    }


def test_caches_that_differ_in_their_order_alone_are_refused():
    form, other = CacheForm(packing="one"), CacheForm(packing="another")
    caches = {
        f"model.layers.{number}.attn": (torch.zeros(BLOCKS, 1, TOKENS, 12), each)
        for number, each in enumerate((form, other))
    }
    with pytest.raises(LayoutError, match="or the order within a block, alone"):
        described(caches)


def compressed(tokens: int, ratio: int, *, pages_per_block: int = 1, is_packed: bool = False) -> RankLayout:
    """Entries of 8 numbers, each for so many tokens."""
    name = "model.layers.0.attn"
    made = spec("MLAAttentionSpec", tokens_per_state=ratio, head_size=8 if not is_packed else 8 * ratio + 1)
    (form,) = forms_of(name, made, SimpleNamespace(), "THEIRS")
    shape = (BLOCKS * pages_per_block, 1, tokens // pages_per_block // ratio, made.head_size)
    return described({name: (torch.zeros(shape), form)}, groups=(CacheGroup("group 0", (name,), tokens),))


@pytest.mark.parametrize("pages_per_block", [1, 2])
@pytest.mark.parametrize("is_packed", [False, True])
def test_an_entry_for_several_tokens_is_in_a_page_of_as_many_tokens_as_its_block(is_packed: bool, pages_per_block: int):
    (shard,) = compressed(16, 4, pages_per_block=pages_per_block, is_packed=is_packed).shards
    assert shard.component.name == "kv, an entry for 4 tokens"
    assert shard.component.entry is (Entry.PAGE if is_packed else Entry.TOKEN)
    assert shard.paging.page_tokens == 16 // pages_per_block
    assert shard.component.axes[-1].size == (4 // pages_per_block * 33 if is_packed else 2)


def test_entries_for_other_numbers_of_tokens_are_refused():
    with pytest.raises(IncompatiblePeerError, match=r"an entry for 4 tokens.*an entry for 8 tokens"):
        check_exchangeable(compressed(16, 4), compressed(16, 8), source_name="a", destination_name="b")


def test_entries_that_cannot_be_cut_into_tokens_are_refused_with_pages_of_another_size():
    with pytest.raises(IncompatiblePeerError, match=r"16 tokens a page.*32 tokens a page"):
        check_exchangeable(
            compressed(16, 4, is_packed=True), compressed(32, 4, is_packed=True), source_name="a", destination_name="b"
        )


@pytest.mark.parametrize("tokens", [16, 27, 45, 64])
@pytest.mark.parametrize("prefix", [0, 8, 12])
def test_every_entry_whose_tokens_are_all_there_arrives_in_pages_of_another_size(tokens: int, prefix: int):
    name, ratio, content = "model.layers.0.attn", 4, 8
    made = spec("MLAAttentionSpec", tokens_per_state=ratio, head_size=content)
    (form,) = forms_of(name, made, SimpleNamespace(), "THEIRS")

    def side(page: int) -> tuple[torch.Tensor, RankLayout, list[int]]:
        cache = torch.zeros(8, 1, page // ratio, content)
        layout = describe(
            {name: cache},
            (CacheGroup("group 0", (name,), page),),
            ModelShape(1),
            RankCoordinates(),
            heads={name: HeldPart(1, Interval(0, 1))},
            forms={name: (form,)},
            num_blocks=8,
        ).layout
        return cache, layout, [7 - index for index in range(-(-tokens // page))]

    here, here_layout, blocks = side(16)
    there, there_layout, own_blocks = side(32)
    entries = tokens // ratio
    whole = torch.arange(1, entries * content + 1, dtype=torch.float32).view(entries, content)
    for entry in range(entries):
        here[blocks[entry * ratio // 16], 0, entry % (16 // ratio)] = whole[entry]
    with LocalNetwork() as network:
        cross(
            network,
            [here_layout],
            [there_layout],
            sent={"group 0": GroupPages(blocks)},
            received={"group 0": GroupPages(own_blocks[prefix // 32 :])},
            tokens=tokens,
            prefix_tokens=prefix,
        )
    for entry in range(entries):
        found = there[own_blocks[entry * ratio // 32], 0, entry % (32 // ratio)]
        assert torch.equal(found, whole[entry] if entry * ratio >= prefix else torch.zeros(content))


def doubled(tokens: int) -> RankLayout:
    name, form = "model.layers.0.attn", CacheForm(tokens_per_entry=Fraction(1, 2))
    cache = torch.zeros(BLOCKS, 1, 2 * tokens, 6)
    return described({name: (cache, form)}, groups=(CacheGroup("group 0", (name,), tokens),))


def test_several_entries_for_a_token_are_cut_between_tokens():
    """So that blocks of other sizes can be exchanged."""
    here, there = doubled(8), doubled(16)
    (shard,) = here.shards
    assert shard.component.name == "kv, 2 entries a token"
    assert [axis.size for axis in shard.component.axes] == [3, 1, 2, 6]
    assert shard.paging.page_tokens == 8
    assert shard.strides[1:] == (6 * 4, 4), "they lie behind each other"
    assert prove({0: here}, {0: there}, room=3).receivers == 1


def test_entries_that_are_not_as_many_as_their_form_says_are_named():
    name = "model.layers.0.attn"
    with pytest.raises(
        LayoutError, match="8 entries in each of 1 pages where a block has 8 tokens, with an entry for 4"
    ):
        described({name: (torch.zeros(BLOCKS, 1, 8, 6), CacheForm(tokens_per_entry=Fraction(4)))})


def ring(capacity: int) -> RankLayout:
    """A ring beside the latents of its layer."""
    tail = "model.layers.1.self_attn.indexer.tail_cache"
    made = SimpleNamespace(num_heads=2, num_states=capacity, state_content_size_bytes=12, dtype=torch.bfloat16)
    cache = torch.zeros(BLOCKS, 2, capacity, 6, dtype=torch.bfloat16)
    return describe(
        {ATTENTION: torch.zeros(BLOCKS, 1, TOKENS, 12)},
        (CacheGroup("pages", (ATTENTION,), TOKENS), CacheGroup("ring", (tail,), WHOLE_REQUEST, has_state=True)),
        ModelShape(3),
        RankCoordinates(tp_size=4, tp_rank=3),
        heads={ATTENTION: HeldPart(1, Interval(0, 1))},
        states={tail: ring_of(made, cache, "self_attn.indexer.tail_cache")},
        num_blocks=BLOCKS,
    ).layout


def test_a_ring_is_what_a_request_keeps_and_the_same_on_every_rank():
    layout = ring(8)
    (shard,) = layout.shards_of("self_attn.indexer.tail_cache")
    assert (shard.component.entry, shard.group) == (Entry.REQUEST, "ring")
    assert [axis.size for axis in shard.component.axes] == [3, 2, 8, 6]
    assert shard.box[0] == Interval(1, 2)
    with pytest.raises(IncompatiblePeerError, match=r"self_attn.indexer.tail_cache"):
        check_exchangeable(layout, ring(16), source_name="theirs", destination_name="ours")
