"""What published models cache, against numbers worked out by hand from their configurations."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest

from kvferry.layout import (
    Component,
    Entry,
    Interval,
    RankCoordinates,
    ShardedComponent,
    VirtualPools,
    all_coordinates,
    stage_of,
    virtual_layout,
)
from kvferry.models import ModelCache, read_model_cache, with_block_scales

CONFIGS = Path(__file__).parents[2] / "data" / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.json"))


def published(name: str) -> ModelCache:
    return read_model_cache(CONFIGS / f"{name}.json")


def entry_bytes(components: tuple[ShardedComponent, ...], entry: Entry) -> int:
    return sum(
        prod(axis.size for axis in each.component.axes) * each.component.element_bytes
        for each in components
        if each.component.entry is entry
    )


def component(cache: ModelCache, name: str) -> Component:
    return sharded(cache, name).component


def sharded(cache: ModelCache, name: str) -> ShardedComponent:
    return {each.component.name: each for each in (*cache.components, *cache.draft)}[name]


def sizes(cache: ModelCache, name: str) -> dict[str, int]:
    return {axis.name: axis.size for axis in component(cache, name).axes}


BYTES = {
    # name: (bytes a token, bytes a request, bytes a token of the draft)
    "llama-3.1-8b": (32 * 2 * 8 * 128 * 2, 0, 0),
    "qwen3-32b": (262_144, 0, 0),
    "qwen3-235b-a22b": (94 * 2 * 4 * 128 * 2, 0, 0),
    # Gated delta nets: a float32 matrix a value head; convolutions of 3 bfloat16 columns a query, key or value channel.
    "qwen3-next-80b-a3b": (24_576, 36 * (32 * 128 * 128 * 4 + (2048 + 2048 + 4096) * 3 * 2), 0),
    "qwen3.5-27b": (65_536, 48 * (48 * 128 * 128 * 4 + (2048 + 2048 + 6144) * 3 * 2), 4_096),
    "deepseek-v3": (70_272, 0, 1_152),
    # 1,152 bytes of latent, 128 of index key and 4 of its scale.
    "deepseek-v3.2": (61 * 1_284, 0, 1_284),
    "gpt-oss-20b": (49_152, 0, 0),
    "gpt-oss-120b": (73_728, 0, 0),
    "gemma-3-4b-it": (34 * 2 * 4 * 256 * 2, 0, 0),
    "gemma-3-27b-it": (507_904, 0, 0),
    "mistral-7b-v0.1": (131_072, 0, 0),
    "mistral-small-24b-2501": (163_840, 0, 0),
    "mistral-small-3.1-24b": (163_840, 0, 0),
    # 5,120 channels of x, 128 of B, 128 of C, all float32 as the checkpoint is.
    "mamba2-2.7b": (0, 64 * (80 * 64 * 128 * 4 + (5120 + 128 + 128) * 3 * 4), 0),
    "nemotron-h-8b": (16_384, 24 * (128 * 64 * 128 * 4 + (8192 + 1024 + 1024) * 3 * 2), 0),
    "jamba-v0.1": (16_384, 28 * (8192 * 16 * 4 + 8192 * 3 * 2), 0),
    "minimax-text-01": (40_960, 70 * 64 * 128 * 128 * 2, 0),
    "minimax-m2": (253_952, 0, 12_288),
}


def test_every_configuration_has_its_numbers():
    assert set(NAMES) == set(BYTES)


@pytest.mark.parametrize("name", NAMES)
def test_the_bytes_of_a_token_and_of_a_request(name: str):
    cache = published(name)
    token, request, draft = BYTES[name]
    assert entry_bytes(cache.components, Entry.TOKEN) == token
    assert entry_bytes(cache.components, Entry.REQUEST) == request
    assert entry_bytes(cache.draft, Entry.TOKEN) == draft
    assert entry_bytes(cache.draft, Entry.REQUEST) == 0


def test_bytes_that_are_written_out():
    assert BYTES["llama-3.1-8b"][0] == 131_072
    assert BYTES["qwen3-next-80b-a3b"][1] == 77_266_944
    assert BYTES["deepseek-v3.2"][0] == 78_324
    assert BYTES["nemotron-h-8b"][1] == 102_137_856


LAYERS: dict[str, tuple[int, dict[str, list[int]]]] = {
    "qwen3-32b": (64, {"k v": list(range(64))}),
    "qwen3-next-80b-a3b": (
        48,
        {
            "k v": [3, 7, 11, 15, 19, 23, 27, 31, 35, 39, 43, 47],
            "state conv_q conv_k conv_v": [each for each in range(48) if each % 4 != 3],
        },
    ),
    "qwen3.5-27b": (
        64,
        {
            "k v": list(range(3, 64, 4)),
            "state conv_q conv_k conv_v": [each for each in range(64) if each % 4 != 3],
            "draft_k draft_v": [64],
        },
    ),
    "deepseek-v3.2": (
        61,
        {
            "latent index_k index_k_scale": list(range(61)),
            "draft_latent draft_index_k draft_index_k_scale": [61],
        },
    ),
    "gpt-oss-20b": (24, {"k v": list(range(1, 24, 2)), "window_k window_v": list(range(0, 24, 2))}),
    "gemma-3-27b-it": (
        62,
        {
            "k v": [5, 11, 17, 23, 29, 35, 41, 47, 53, 59],
            "window_k window_v": [each for each in range(62) if each % 6 != 5],
        },
    ),
    "mistral-7b-v0.1": (32, {"window_k window_v": list(range(32))}),
    "mistral-small-24b-2501": (40, {"k v": list(range(40))}),
    "mamba2-2.7b": (64, {"state conv_x conv_b conv_c": list(range(64))}),
    "nemotron-h-8b": (
        52,
        {
            "k v": [7, 18, 29, 40],
            "state conv_x conv_b conv_c": [
                *(0, 2, 4, 6, 9, 11, 13, 15, 17, 20, 22, 24),
                *(26, 28, 31, 33, 35, 37, 39, 42, 44, 46, 48, 50),
            ],
        },
    ),
    "jamba-v0.1": (
        32,
        {"k v": [4, 12, 20, 28], "state conv": [each for each in range(32) if each % 8 != 4]},
    ),
    "minimax-text-01": (
        80,
        {"k v": list(range(7, 80, 8)), "state": [each for each in range(80) if each % 8 != 7]},
    ),
    "minimax-m2": (62, {"k v": list(range(62)), "draft_k draft_v": [62, 63, 64]}),
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_components_and_the_layers_that_have_them(name: str):
    num_layers, expected = LAYERS[name]
    cache = published(name)
    assert cache.num_layers == num_layers
    found = {each.component.name: list(each.layers) for each in (*cache.components, *cache.draft)}
    assert found == {each: layers for names, layers in expected.items() for each in names.split()}


def test_what_the_axes_of_each_kind_are():
    next_cache, nemotron = published("qwen3-next-80b-a3b"), published("nemotron-h-8b")
    assert sizes(next_cache, "k") == {"layer": 12, "head": 2, "dim": 256}
    assert sizes(next_cache, "state") == {"layer": 36, "head": 32, "key_dim": 128, "value_dim": 128}
    assert sizes(next_cache, "conv_q") == {"layer": 36, "head": 16, "channel": 128, "width": 3}
    assert sizes(next_cache, "conv_k") == sizes(next_cache, "conv_q")
    assert sizes(next_cache, "conv_v") == {"layer": 36, "head": 32, "channel": 128, "width": 3}
    assert sizes(nemotron, "state") == {"layer": 24, "head": 128, "head_dim": 64, "state_size": 128}
    assert sizes(nemotron, "conv_x") == {"layer": 24, "head": 128, "channel": 64, "width": 3}
    assert sizes(nemotron, "conv_b") == {"layer": 24, "group": 8, "channel": 128, "width": 3}
    assert sizes(published("jamba-v0.1"), "state") == {"layer": 28, "channel": 8192, "state_size": 16}
    assert sizes(published("jamba-v0.1"), "conv") == {"layer": 28, "channel": 8192, "width": 3}
    assert sizes(published("deepseek-v3"), "latent") == {"layer": 61, "latent": 576}
    assert sizes(published("deepseek-v3.2"), "index_k_scale") == {"layer": 61, "block": 1}
    assert sizes(published("gemma-3-27b-it"), "window_v") == {"layer": 52, "head": 16, "dim": 128}


def test_windows_are_of_the_layers_that_have_them_alone():
    gemma = published("gemma-3-27b-it")
    assert component(gemma, "window_k").window_tokens == component(gemma, "window_v").window_tokens == 1024
    assert component(gemma, "k").window_tokens is None
    assert component(published("gpt-oss-120b"), "window_k").window_tokens == 128
    assert component(published("mistral-7b-v0.1"), "window_k").window_tokens == 4096


def test_dtypes_are_those_of_the_model_the_engine_and_the_state():
    path = CONFIGS / "qwen3-next-80b-a3b.json"
    cache = read_model_cache(path, cache_dtype="float8_e4m3fn")
    names = {each.component.name: each.component.dtype for each in cache.components}
    assert names == {
        "k": "float8_e4m3fn",
        "v": "float8_e4m3fn",
        "state": "float32",
        "conv_q": "bfloat16",
        "conv_k": "bfloat16",
        "conv_v": "bfloat16",
    }
    assert component(read_model_cache(path, state_dtype="bfloat16"), "state").dtype == "bfloat16"
    assert component(published("deepseek-v3.2"), "index_k").dtype == "float8_e4m3fn"
    assert component(published("deepseek-v3.2"), "index_k_scale").dtype == "float32"
    assert component(published("gpt-oss-120b"), "k").dtype == "bfloat16"


def test_convolutions_keep_as_many_columns_as_the_engine_does():
    for extra in (0, 1, 3):
        cache = read_model_cache(CONFIGS / "nemotron-h-8b.json", extra_conv_columns=extra)
        assert {sizes(cache, name)["width"] for name in ("conv_x", "conv_b", "conv_c")} == {3 + extra}


def test_what_tensor_parallelism_divides():
    assert {each.component.name: each.tp_axis for each in published("nemotron-h-8b").components} == {
        "k": "head",
        "v": "head",
        "state": "head",
        "conv_x": "head",
        "conv_b": "group",
        "conv_c": "group",
    }
    assert {each.tp_axis for each in published("deepseek-v3.2").components} == {None}
    assert {each.tp_axis for each in published("jamba-v0.1").components} == {"head", "channel"}
    assert {each.tp_axis for each in published("qwen3.5-27b").components} == {"head"}
    assert {each.tp_axis for each in published("minimax-text-01").components} == {"head"}


def held(cache: ModelCache, name: str, coordinates: RankCoordinates, stages: int | tuple[int, ...] = 1) -> str:
    stage = stage_of(coordinates, cache.layers_per_stage(stages))
    each = sharded(cache, name)
    return each.component.describe(each.held(coordinates, stage))


def test_the_boxes_that_ranks_hold():
    qwen = published("qwen3-next-80b-a3b")
    last_of_four = RankCoordinates(tp_rank=3, tp_size=4)
    assert held(qwen, "k", last_of_four) == "layer [0, 12) head [1, 2) dim [0, 256)"
    assert held(qwen, "state", last_of_four) == "layer [0, 36) head [24, 32) key_dim [0, 128) value_dim [0, 128)"
    assert held(qwen, "conv_q", last_of_four) == "layer [0, 36) head [12, 16) channel [0, 128) width [0, 3)"
    # Stages of 10 and 38 layers: layers 3 and 7 of the first have attention, the other 8 do not.
    first = RankCoordinates(pp_rank=0, pp_size=2)
    assert held(qwen, "k", first, (10, 38)) == "layer [0, 2) head [0, 2) dim [0, 256)"
    second = RankCoordinates(pp_rank=1, pp_size=2)
    assert held(qwen, "conv_v", second, (10, 38)) == "layer [8, 36) head [0, 32) channel [0, 128) width [0, 3)"
    # 8 groups on 16 ranks: two neighbours have the same.
    nemotron = published("nemotron-h-8b")
    boxes = [held(nemotron, "conv_b", RankCoordinates(tp_rank=rank, tp_size=16)) for rank in (4, 5, 6)]
    assert boxes[0] == boxes[1] == "layer [0, 24) group [2, 3) channel [0, 128) width [0, 3)"
    assert boxes[2] == "layer [0, 24) group [3, 4) channel [0, 128) width [0, 3)"
    deepseek = published("deepseek-v3")
    assert held(deepseek, "latent", RankCoordinates(tp_rank=5, tp_size=8)) == "layer [0, 61) latent [0, 576)"


def test_the_last_stage_has_the_draft_and_the_others_nothing_of_it():
    deepseek = published("deepseek-v3")
    assert deepseek.layers_per_stage(4) == (15, 15, 15, 17)
    for rank in range(4):
        box = held(deepseek, "draft_latent", RankCoordinates(pp_rank=rank, pp_size=4), 4)
        assert box == ("layer [0, 1) latent [0, 576)" if rank == 3 else "layer [0, 0) latent [0, 576)")
        main = held(deepseek, "latent", RankCoordinates(pp_rank=rank, pp_size=4), 4)
        assert main == f"layer [{rank * 15}, {61 if rank == 3 else rank * 15 + 15}) latent [0, 576)"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tp_size", [1, 2, 3, 8, 16])
@pytest.mark.parametrize("pp_size", [1, 3])
def test_every_part_is_held_by_some_rank(name: str, tp_size: int, pp_size: int):
    cache = published(name)
    layers = cache.layers_per_stage(pp_size)
    ranks = all_coordinates(tp_size=tp_size, pp_size=pp_size)
    for each in (*cache.components, *cache.draft):
        stages = [each.held(rank, stage_of(rank, layers))[0] for rank in ranks if rank.tp_rank == 0]
        assert [index for stage in stages for index in range(stage.start, stage.stop)] == list(range(len(each.layers)))
        for number, axis in enumerate(each.component.axes[1:], start=1):
            parts = [each.held(rank, Interval(0, cache.num_layers))[number] for rank in ranks if rank.pp_rank == 0]
            assert {index for part in parts for index in range(part.start, part.stop)} == set(range(axis.size))
            assert axis.name == each.tp_axis or set(parts) == {Interval(0, axis.size)}


@pytest.mark.parametrize("name", NAMES)
def test_every_cache_can_be_laid_out(name: str):
    cache = published(name)
    pools = VirtualPools(num_pages=4, layers_per_stage=cache.layers_per_stage())
    layout = virtual_layout((*cache.components, *cache.draft), RankCoordinates(), pools)
    windows = {each.component.window_tokens for each in cache.components}
    groups = {"kv" if window is None else f"window-{window}" for window in windows}
    if not BYTES[name][0]:
        groups = set()
    assert {group.name for group in layout.groups} == groups | ({"state"} if BYTES[name][1] else set())


def test_scales_beside_quantised_keys_and_values():
    quantised = read_model_cache(CONFIGS / "gemma-3-27b-it.json", cache_dtype="float8_e4m3fn")
    cache = with_block_scales(quantised, block=32)
    names = [each.component.name for each in cache.components]
    assert names == ["k", "k_scale", "v", "v_scale", "window_k", "window_k_scale", "window_v", "window_v_scale"]
    assert sizes(cache, "k_scale") == {"layer": 10, "head": 16, "block": 4}
    assert component(cache, "k_scale").dtype == "float32"
    scale = sharded(cache, "window_v_scale")
    assert (scale.tp_axis, scale.layers) == ("head", sharded(cache, "window_v").layers)
    assert scale.component.window_tokens == 1024


def test_scales_of_latents_come_beside_those_of_index_keys():
    cache = with_block_scales(
        read_model_cache(CONFIGS / "deepseek-v3.2.json", cache_dtype="float8_e4m3fn"), block=128, dtype="bfloat16"
    )
    assert [each.component.name for each in cache.components] == ["latent", "latent_scale", "index_k", "index_k_scale"]
    # 576 elements are 4 blocks of 128 and a half one.
    assert sizes(cache, "latent_scale") == {"layer": 61, "block": 5}
    assert component(cache, "latent_scale").dtype == "bfloat16"
    assert component(cache, "index_k_scale").dtype == "float32"
    assert component(cache, "draft_latent_scale").is_optional
    assert sharded(cache, "draft_latent_scale").layers == (61,)
