"""What kvferry reads from SGLang's pools: heads by layer, blocks of convolutions, orders, and what is refused."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.sglang_pools import Lists, StateType, heads_pool, mamba_pool, model_config, named, remembered
from torch.nn import Module, Sequential

from kvferry import Device, Entry, Interval, RankCoordinates, Shard
from kvferry.engines.sglang.cache_kinds import KINDS
from kvferry.engines.sglang.caches import Block, Caches
from kvferry.engines.sglang.layers import loaded_modules, totals_by_layer
from kvferry.engines.sglang.layouts import SHARE, describe
from kvferry.engines.sglang.pools import caches_of
from kvferry.errors import LayoutError, UsageError

HEAD_BYTES = 8
LAYERS = 2
REFUSED = {kind.name: str(kind.refusal) for kind in KINDS.kinds if kind.refusal is not None}
ORDER = "MHATokenToKVPool with kv_cache_layout "
STATE = "StateType."


def refused(prefix: str) -> list[Any]:
    """What is refused of the names with that prefix, and a name that nobody knows. Without one: classes of pools."""
    names = [
        name.removeprefix(prefix)
        for name in REFUSED
        if name.startswith(prefix) and (prefix or not (" " in name or name.startswith(STATE)))
    ]
    return [*(pytest.param(name, marks=pytest.mark.shows("sglang", prefix + name)) for name in names), "NEW_KIND"]


def assert_refused(name: str, error: LayoutError) -> None:
    assert name in str(error)
    assert REFUSED.get(name, "which kvferry's plug-in for SGLang 0.5.23 does not know") in str(error)
    assert "It transfers MHATokenToKVPool, " in str(error)


def read(
    args: Any,
    model: Any,
    *,
    recurrent: Any = None,
    totals: Mapping[int, frozenset[int]] | None = None,
    tp: int = 1,
    rank: int = 0,
) -> Caches:
    return caches_of(args, model, recurrent, totals or {}, place=RankCoordinates(tp_rank=rank, tp_size=tp))


def shards(caches: Caches, *, tp: int = 1, rank: int = 0) -> dict[str, Shard]:
    layout = describe(caches, RankCoordinates(tp_rank=rank, tp_size=tp), Device())
    return {shard.component.name: shard for shard in layout.shards}


def windowed(full: int, windows: int) -> Any:
    """The KVArgs of a rank with so many heads in layers with full attention, and in those with windows."""
    lists = Lists()
    lists.attention(LAYERS, full * HEAD_BYTES)
    lists.window(LAYERS, windows * HEAD_BYTES)
    pool = named("SWAKVPool", full_kv_pool=heads_pool(full), swa_kv_pool=heads_pool(windows))
    return lists.in_pools(pool)


def plain(held: int, **pool: Any) -> Any:
    lists = Lists()
    lists.attention(LAYERS, held * HEAD_BYTES)
    return lists.in_pools(heads_pool(held, **pool))


# ---- heads ----------------------------------------------------------------------------------------------------------


def test_layers_with_windows_have_heads_of_their_own():
    for rank in range(2):
        caches = read(windowed(1, 1), model_config(1, 2), tp=2, rank=rank)
        described = shards(caches, tp=2, rank=rank)
        assert described["k"].box[1] == Interval(0, 1)  # one head, on both ranks
        assert described["window k"].box[1] == Interval(rank, rank + 1)
        assert described["window k"].component.axes[1].size == 2


def test_a_windows_length_is_the_schedulers():
    """A model's configuration may count the token that attends, and SGLang gives no page for that one more token."""
    args = windowed(1, 1)
    remembered(args, args.kvferry_pools.target, window_tokens=7)
    described = shards(read(args, model_config(1, window_tokens=8)))
    assert {name: each.component.window_tokens for name, each in described.items()} == {
        "k": None,
        "v": None,
        "window k": 7,
        "window v": 7,
    }


def test_a_window_that_the_scheduler_does_not_know_is_refused():
    args = windowed(1, 1)
    remembered(args, args.kvferry_pools.target, window_tokens=None)
    with pytest.raises(LayoutError, match="SGLang lists layers with sliding windows, and its scheduler no window"):
        read(args, model_config(1))


def test_one_rank_holds_all_heads_whatever_the_configuration_says():
    described = shards(read(windowed(1, 2), model_config(1)))
    assert [described[name].component.axes[1].size for name in ("k", "window k")] == [1, 2]
    assert shards(read(plain(3), model_config(4)))["k"].component.axes[1].size == 3


@pytest.mark.parametrize(
    ("held", "claimed", "tp"),
    [
        (1, None, 2),
        (2, 2, 2),  # more than the configuration gives each rank
        (1, 4, 2),  # fewer
        (1, 3, 2),  # neither divided nor shared evenly
        (2, 1, 4),
    ],
)
def test_heads_that_pool_and_configuration_do_not_agree_on_are_their_ranks(
    held: int, claimed: int | None, tp: int, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.WARNING):
        caches = read(plain(held), model_config(claimed), tp=tp, rank=1)
    assert f"SGLang's pool of layers with full attention has {held} KV heads on rank 1 of {tp}" in caplog.text
    described = shards(caches, tp=tp, rank=1)
    assert described.keys() == {"k", "v"}
    for shard in described.values():
        assert [axis.name for axis in shard.component.axes] == ["layer", SHARE, "byte"]
        assert shard.box[1:] == (Interval(1, 2), Interval(0, held * HEAD_BYTES))


def test_layers_of_two_kinds_in_one_pool_are_their_ranks():
    # As with --disable-hybrid-swa-memory: each rank has one head of every layer, whatever total that is a part of.
    caches = read(plain(1), model_config(1, 2), tp=2)
    assert caches.kv.heads is not None
    assert caches.kv.heads.total is None


def test_what_projections_say_counts_more_than_the_configuration():
    # Four heads by the configuration, eight by the layers themselves: on eight ranks each has one of its own.
    totals = {0: frozenset({8}), 1: frozenset({8})}
    caches = read(plain(1), model_config(4), totals=totals, tp=8, rank=5)
    assert shards(caches, tp=8, rank=5)["k"].box[1] == Interval(5, 6)


def test_projections_of_one_pool_that_differ_leave_it_open():
    caches = read(plain(1), model_config(4), totals={0: frozenset({4}), 1: frozenset({8})}, tp=8)
    assert caches.kv.heads is not None
    assert caches.kv.heads.total is None


def test_each_pool_is_asked_for_its_own_layers():
    args = windowed(1, 1)
    pool = args.kvferry_pools.target
    pool.full_kv_pool.model_layer_ids, pool.swa_kv_pool.model_layer_ids = (0, 3), (1, 2)
    totals = {layer: frozenset({2 if layer in (1, 2) else 1}) for layer in range(4)}
    caches = read(args, model_config(4), totals=totals, tp=2)
    assert caches.kv.heads is not None
    assert caches.window is not None
    assert caches.window.heads is not None
    assert (caches.kv.heads.total, caches.window.heads.total) == (1, 2)


class Attention(Module):
    """As a model of SGLang's makes it: a projection, and the attention itself."""

    def __init__(self, layer: int, total: int, *, says_itself: bool = False) -> None:
        super().__init__()
        self.attn, self.qkv_proj = Module(), Module()
        self.attn.layer_id, self.attn.tp_k_head_num = layer, 1  # type: ignore[assignment]
        (self if says_itself else self.qkv_proj).total_num_kv_heads = total  # type: ignore[assignment]


def test_projections_are_found_from_their_layers():
    model = Sequential(Attention(0, 1), Attention(1, 2, says_itself=True))
    assert totals_by_layer(model.modules()) == {0: {1}, 1: {2}}
    draft = Attention(0, 4)  # numbered from 0 again
    assert totals_by_layer([*model.modules(), *draft.modules()]) == {0: {1, 4}, 1: {2}}
    assert draft in list(loaded_modules())


def test_a_module_that_is_only_begun_is_passed_over():
    begun = Module.__new__(Module)
    assert begun not in list(loaded_modules())
    assert isinstance(totals_by_layer(loaded_modules()), dict)


def test_heads_that_fill_other_bytes_are_refused():
    lists = Lists()
    lists.attention(LAYERS, 3 * HEAD_BYTES)
    caches = read(lists.in_pools(heads_pool(2)), model_config(2))
    with pytest.raises(LayoutError, match="k: 24 bytes a token are not those of 2 heads of 8 bytes"):
        shards(caches)


def test_keys_and_values_may_differ_in_size():
    lists = Lists()
    lists.attention(LAYERS, 2 * 24, 2 * 16)
    described = shards(read(lists.in_pools(heads_pool(2, 24, 16, item=2)), model_config(2)))
    assert [described[name].component.axes[2].size for name in ("k", "v")] == [24, 16]


def test_latents_are_whole_on_every_rank():
    lists = Lists()
    lists.latents(3, 24)
    described = shards(read(lists.in_pools(named("MLATokenToKVPool")), model_config(128), tp=2, rank=1), tp=2, rank=1)
    assert described["latent"].box == (Interval(0, 3), Interval(0, 1), Interval(0, 24))


# ---- orders ---------------------------------------------------------------------------------------------------------


@pytest.mark.shows("sglang", "MHATokenToKVPool with kv_cache_layout vectorized_5d")
def test_vectors_within_a_page_are_cut_by_head_only():
    args = plain(2, layout="vectorized_5d", item=2)
    shard = shards(read(args, model_config(4), tp=2, rank=1), tp=2, rank=1)["k"]
    page_bytes = 4 * HEAD_BYTES
    assert (shard.component.entry, shard.component.packing) == (
        Entry.PAGE,
        "SGLang's vectorized_5d, elements of 2 bytes",
    )
    assert shard.box == (Interval(0, LAYERS), Interval(2, 4), Interval(0, page_bytes))
    assert shard.strides == (page_bytes, 1)
    assert (shard.paging.page_stride, shard.paging.token_stride) == (2 * page_bytes, 0)


@pytest.mark.parametrize("order", refused(ORDER))
def test_an_order_that_cannot_be_described_is_refused(order: str):
    with pytest.raises(LayoutError) as error:
        read(plain(2, layout=order), model_config(2))
    assert_refused(ORDER + order, error.value)


def test_a_draft_models_order_is_its_own():
    lists = Lists()
    lists.attention(LAYERS, 2 * HEAD_BYTES)
    lists.attention(1, 2 * HEAD_BYTES)
    lists.args.num_draft_entries = 2
    args = lists.in_pools(heads_pool(2), heads_pool(2, layout="vectorized_5d"))
    described = shards(read(args, model_config(2)))
    assert described["draft 0"].component.entry is Entry.PAGE
    assert described["k"].component.entry is Entry.TOKEN


# ---- recurrent state ------------------------------------------------------------------------------------------------

WIDTH = 3  # bytes of a channel of a convolution
STATE_SIZE = 4


def recurrent_config(name: str, groups: int, tp: int, *, heads: int = 8, intermediate: int = 16) -> Any:
    """A configuration as `Mamba2StateShape.create` describes it for so many ranks."""
    extended = groups if groups % tp == 0 else tp
    shape = SimpleNamespace(
        conv_dim=intermediate + 2 * extended * STATE_SIZE,
        intermediate_size=intermediate,
        num_heads=heads,
        state_size=STATE_SIZE,
    )
    return named(name, mamba2_cache_params=SimpleNamespace(shape=shape), n_groups=groups, mamba_n_groups=groups)


def hybrid(recurrent: Any, tp: int, *, groups: list[int] | None = None, conv_dim: int | None = None) -> Any:
    """The KVArgs of a rank with one layer of recurrent state: a convolution, and what its heads keep."""
    channels = (recurrent.mamba2_cache_params.shape.conv_dim if conv_dim is None else conv_dim) // tp
    lists = Lists()
    lists.attention(LAYERS, HEAD_BYTES)
    convolution, heads = lists.buffers(1, channels * WIDTH), lists.buffers(1, 8 // tp * 6)
    given = [[*one, *other] for one, other in zip(convolution, heads, strict=True)]
    lists.state(StateType.MAMBA, given, channels=[channels, 8 // tp], rows=[1, 1], layers=[1, 1], groups=[groups, None])
    pool = named(
        "HybridLinearKVPool",
        full_kv_pool=heads_pool(1),
        mamba_pool=mamba_pool([convolution[0]], heads[0]),
    )
    return lists.in_pools(pool)


def convolution_of(caches: Caches, tp: int, rank: int) -> list[tuple[int, Interval, int]]:
    """The size of each block of the convolution, what a rank has of it, and where that begins in its channels."""
    described = shards(caches, tp=tp, rank=rank)
    blocks = [described[f"state 0, block {block}"] for block in range(3)]
    first = caches.state[0].address
    return [(each.component.axes[2].size, each.box[2], (each.addresses[0] - first) // WIDTH) for each in blocks]


@pytest.mark.shows("sglang", "MambaPool")
@pytest.mark.parametrize("name", ["NemotronHConfig", "GraniteMoeHybridConfig", "FalconH1Config", "Mamba2Config"])
def test_a_mixers_convolution_is_cut_into_x_b_and_c(name: str):
    recurrent = recurrent_config(name, 2, 2)
    caches = read(hybrid(recurrent, 2), model_config(1), recurrent=recurrent, tp=2, rank=1)
    assert convolution_of(caches, 2, 1) == [
        (16, Interval(8, 16), 0),
        (8, Interval(4, 8), 8),
        (8, Interval(4, 8), 12),
    ]


def test_one_group_is_on_every_rank():
    recurrent = recurrent_config("GraniteMoeHybridConfig", 1, 4)
    caches = read(hybrid(recurrent, 4), model_config(1), recurrent=recurrent, tp=4, rank=3)
    assert convolution_of(caches, 4, 3) == [
        (16, Interval(12, 16), 0),
        (4, Interval(0, 4), 4),
        (4, Interval(0, 4), 8),
    ]


def test_a_convolution_without_b_and_c_is_one_block():
    shape = SimpleNamespace(conv_dim=16, intermediate_size=16, num_heads=2, state_size=0)
    recurrent = named("Lfm2Config", mamba2_cache_params=SimpleNamespace(shape=shape))
    caches = read(hybrid(recurrent, 2), model_config(1), recurrent=recurrent, tp=2)
    assert caches.state[0].blocks == (Block(16, 16),)


@pytest.mark.shows("sglang", "HybridLinearKVPool")
def test_blocks_that_sglang_names_are_taken():
    recurrent = recurrent_config("Qwen3NextConfig", 2, 2)
    caches = read(hybrid(recurrent, 2, groups=[8, 8, 16]), model_config(1), recurrent=recurrent, tp=2)
    assert caches.state[0].blocks == (Block(8, 8), Block(8, 8), Block(16, 16))
    assert caches.state[1].blocks == (Block(8, 8),)


@pytest.mark.parametrize(
    ("name", "groups", "conv_dim"),
    [
        ("JetNemotronConfig", None, None),  # nobody says what its channels are
        ("Qwen3NextConfig", [8, 8, 8], None),  # blocks that are not all of it
        ("Qwen3NextConfig", [15, 15, 2], None),  # blocks that ranks cannot divide
        ("NemotronHConfig", None, 24),  # another convolution than the configuration's
    ],
)
def test_a_convolution_that_nobody_describes_is_its_ranks(name: str, groups: list[int] | None, conv_dim: int | None):
    recurrent = recurrent_config(name, 2, 2)
    args = hybrid(recurrent, 2, groups=groups, conv_dim=conv_dim)
    caches = read(args, model_config(1), recurrent=recurrent, tp=2, rank=1)
    assert caches.state[0].blocks is None
    shard = shards(caches, tp=2, rank=1)["state 0"]
    assert [axis.name for axis in shard.component.axes] == ["layer", "row", SHARE, "byte"]
    assert shard.box[2:] == (Interval(1, 2), Interval(0, caches.state[0].item_bytes))


def test_state_of_a_kind_of_its_own_is_its_ranks():
    recurrent = recurrent_config("NemotronHConfig", 2, 2)
    args = hybrid(recurrent, 2)
    args.kvferry_pools.target.mamba_pool.mamba_cache.temporal.clear()
    caches = read(args, model_config(1), recurrent=recurrent, tp=2)
    assert caches.state[1].blocks is None


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", refused(""))
def test_a_pool_that_is_not_transferred_is_refused(name: str):
    args = plain(1)
    args.kvferry_pools = SimpleNamespace(target=named(name), draft=None, requests=None)
    with pytest.raises(LayoutError, match="layers of this model keep ") as error:
        read(args, model_config(1))
    assert_refused(name, error.value)


@pytest.mark.parametrize("name", refused(STATE))
def test_state_that_is_not_transferred_is_refused(name: str):
    args = plain(1)
    args.state_types = [type("StateType", (SimpleNamespace,), {})(name=name, value=name.lower())]
    with pytest.raises(LayoutError, match="layers of this model keep ") as error:
        read(args, model_config(1))
    assert_refused(STATE + name, error.value)


def test_two_states_of_one_kind_are_refused():
    args = windowed(1, 1)
    args.state_types *= 2
    with pytest.raises(LayoutError, match="several states of one kind"):
        read(args, model_config(1))


@pytest.mark.parametrize("kind", ["QSATokenToKVPool", "MHATokenToKVPoolFP4"])
def test_a_pool_inside_another_one_is_looked_at(kind: str):
    args = windowed(1, 1)
    args.kvferry_pools.target.swa_kv_pool = named(kind)
    with pytest.raises(LayoutError, match=kind):
        read(args, model_config(1))


def test_windows_of_latents_are_refused():
    args = windowed(1, 1)
    args.kvferry_pools.target.swa_kv_pool = named("MLATokenToKVPool")
    with pytest.raises(LayoutError, match="layers with sliding windows keep their cache in a MLATokenToKVPool"):
        read(args, model_config(1))


@pytest.mark.shows("sglang", "MHATokenToKVPool with native scales")
def test_scales_in_the_order_of_a_kernel_are_refused():
    with pytest.raises(LayoutError, match="choose another --attention-backend") as error:
        read(plain(1, native_k_scale_buffer=[object()]), model_config(1))
    assert_refused("MHATokenToKVPool with native scales", error.value)


def test_recurrent_state_without_a_pool_is_refused():
    recurrent = recurrent_config("NemotronHConfig", 2, 1)
    args = hybrid(recurrent, 1)
    args.kvferry_pools.target.mamba_pool = None
    with pytest.raises(LayoutError, match="SGLang lists recurrent state, and no pool of it"):
        read(args, model_config(1), recurrent=recurrent)


def test_pools_that_nobody_remembered_are_asked_for():
    args = plain(1)
    del args.kvferry_pools
    with pytest.raises(UsageError, match="setup_state_kv_args was not wrapped by kvferry's plug-in"):
        read(args, model_config(1))
