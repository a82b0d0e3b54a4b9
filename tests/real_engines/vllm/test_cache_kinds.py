"""The table of caches, and what specs say of heads, against the vLLM that is installed. No engine is started."""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.collecting import shown_in, unshown
from tests.support.vllm_conditions import made_up
from tests.support.vllm_ranks import ALONE
from vllm import SamplingParams
from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionBackend
from vllm.utils.hashing import sha256
from vllm.v1 import kv_cache_interface
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_group_id, get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import Request
from vllm.v1.simple_kv_offload.worker import SimpleCPUOffloadWorker

from kvferry import Interval, RankCoordinates
from kvferry.engines.cache_kinds import names_missing
from kvferry.engines.vllm.cache_kinds import KINDS
from kvferry.engines.vllm.caches import HeldPart, ModelShape, fetches_behind_attention
from kvferry.engines.vllm.configuration import cache_forms, groups_of, heads_of
from kvferry.engines.vllm.connector import KVFerryConnector
from kvferry.engines.vllm.layouts import describe
from kvferry.engines.vllm.parameters import ROOM
from kvferry.engines.vllm.scheduling import SchedulerSide
from kvferry.errors import LayoutError
from kvferry.layout import Entry

BASES = {"KVCacheSpec"}
"""What no layer keeps by itself."""

SIZES: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class LocalSpec(FullAttentionSpec):  # type: ignore[misc]
    """A spec of somebody else's, as vLLM's registry lets them add."""


def config(*specs: Any, num_blocks: int = 4) -> KVCacheConfig:
    """A group for every spec, of one layer."""
    groups = [KVCacheGroupSpec([f"model.layers.{number}.attn"], spec) for number, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)


def test_every_spec_of_vllms_is_in_the_table_and_nothing_else():
    specs = [
        name
        for name, each in vars(kv_cache_interface).items()
        if isinstance(each, type)
        and (issubclass(each, kv_cache_interface.KVCacheSpec) or name == "KVCacheGroupSpec")
        and name not in BASES
    ]
    assert names_missing(KINDS, specs) == []


def test_rows_that_real_engines_show_are_those_that_their_tests_try(pytestconfig: pytest.Config):
    folder = "tests/real_engines/vllm"
    assert [*unshown("vllm", KINDS.kinds, folder, shown_in(folder, KINDS.kinds, pytestconfig))] == []


def test_vllms_own_specs_are_taken_or_refused_by_name():
    taken = groups_of(
        config(
            FullAttentionSpec(**SIZES),
            SlidingWindowSpec(**SIZES, sliding_window=8),
            ChunkedLocalAttentionSpec(**SIZES, attention_chunk_size=32),
            MambaSpec(16, ((4, 4),), (torch.float32,)),
        ),
        ALONE,
    )
    assert [(group.block_tokens, group.window_tokens, group.chunk_tokens, group.has_state) for group in taken] == [
        (16, None, None, False),
        (16, 7, None, False),
        (16, None, 32, False),
        (16, None, None, True),
    ]
    with pytest.raises(
        LayoutError, match=r"'model.layers.1.attn' keep .* of an encoder \(CrossAttentionSpec\).* with any connector"
    ):
        groups_of(config(FullAttentionSpec(**SIZES), CrossAttentionSpec(**SIZES)), ALONE)
    with pytest.raises(LayoutError, match=r"'model.layers.0.attn' keep LocalSpec, which kvferry's plug-in .* not know"):
        groups_of(config(LocalSpec(**SIZES)), ALONE)
    with pytest.raises(LayoutError, match="keep LocalSpec"):
        groups_of(config(UniformTypeKVCacheSpecs(16, {"model.layers.0.attn": LocalSpec(**SIZES)})), ALONE)


@pytest.mark.shows("vllm", "RSWASpec")
def test_vllm_gives_away_no_block_of_a_prompt_that_is_attended_to_as_a_whole():
    """So that a prompt is sent as with full attention; only between it and the last tokens are blocks given away."""
    spec = RSWASpec(**SIZES, rswa_window=32)
    (group,) = groups_of(config(spec), ALONE)
    assert (group.gives_blocks_away, group.first_attended(300)) == (False, 0)
    blocks = {"scheduler_block_size": 16, "hash_block_size": 16}
    manager = KVCacheManager(config(spec, num_blocks=64), 1024, **blocks, enable_caching=False)
    request = Request("a", list(range(100)), SamplingParams(max_tokens=200), None)
    for _ in range(20):
        assert manager.allocate_slots(request, 20) is not None
        request.append_output_token_ids([1] * 20)
        request.num_computed_tokens += 20
    (kept,) = manager.get_blocks("a").blocks
    assert not any(block.is_null for block in kept[:7]), "those of the prompt"
    assert any(block.is_null for block in kept[7:])


def test_a_prefix_of_which_full_attention_alone_is_here_is_not_fetched_again():
    """vLLM counts it as here where the connector says that it brings the state behind it; the state is asked for."""
    state = MambaSpec(16, ((64,),), (torch.float32,), mamba_cache_mode="align")
    kept = config(FullAttentionSpec(**SIZES), state, num_blocks=64)
    groups = groups_of(kept, ALONE)
    assert fetches_behind_attention(groups)
    blocks = {"scheduler_block_size": 16, "hash_block_size": 16}
    manager = KVCacheManager(kept, 1024, **blocks, enable_caching=True)
    init_none_hash(sha256)
    prompt, hasher = list(range(100)), get_request_block_hasher(16, sha256)
    first = Request("a", prompt[:70], SamplingParams(max_tokens=1), None, block_hasher=hasher)
    assert manager.allocate_slots(first, 70) is not None
    first.num_computed_tokens = 70
    manager.free(first)
    pool = manager.block_pool
    states = [block for block in pool.blocks if block.block_hash is not None and get_group_id(block.block_hash) == 1]
    pool.evict_blocks({block.block_id for block in states})
    parameters = {"do_remote_prefill": True, "remote_engine_id": "there", ROOM: 9}
    sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": parameters})
    second = Request("b", prompt, sampling, None, block_hasher=hasher)
    assert manager.get_computed_blocks(second)[1] == 0, "without such a connector nothing is taken for here"
    computed, here, _, has_diverged = manager.get_computed_blocks_for_connector(second)
    assert (here, has_diverged) == (64, True)
    side = SchedulerSide(groups, engine="here", may_send=False, may_receive=True, conditions=made_up())
    missing = side.tokens_elsewhere(second, here)
    assert missing == 99 - 64
    assert manager.allocate_slots(
        second, 0, num_new_computed_tokens=here, new_computed_blocks=computed, num_external_computed_tokens=missing
    )
    table = manager.get_blocks("b").blocks
    side.allocated(second, table, missing)
    (asked,) = side.take_step({}, ()).receive
    attention, recurrent = (asked.groups[group.name] for group in groups)
    assert (asked.prefix_tokens, asked.tokens) == (64, 99)
    assert (attention.start, list(attention.blocks)) == (4, [block.block_id for block in table[0][4:7]])
    assert list(recurrent.blocks) == [table[1][6].block_id]


def test_tokens_that_were_fetched_are_counted_as_a_peers():
    connector = object.__new__(KVFerryConnector)
    assert connector.get_external_cache_hit_sources(None, 35) == {CacheHitSource.P2P: 35}


@pytest.mark.shows("vllm", "HiddenStateCacheSpec")
def test_hidden_states_are_a_drafts_and_the_same_on_every_rank():
    """As vLLM names and sizes the layer that keeps them: a head for each layer that they are those of."""
    model, hidden = "model.layers.0.attn", "cache_only_layers.1"
    spec = HiddenStateCacheSpec(block_size=16, num_kv_heads=3, head_size=128, dtype=torch.bfloat16)
    backed = SimpleNamespace(get_attn_backend=lambda: CacheOnlyAttentionBackend)
    kept = KVCacheConfig(
        4, [], [KVCacheGroupSpec([model], FullAttentionSpec(**SIZES)), KVCacheGroupSpec([hidden], spec)]
    )
    vllm_config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={model: backed, hidden: backed})
    )
    layouts = []
    for tp in (1, 2):
        coordinates = RankCoordinates(tp_rank=tp - 1, tp_size=tp)
        heads = heads_of(vllm_config, kept, coordinates)
        assert heads[hidden] == HeldPart(3, Interval(0, 3))
        caches = {name: torch.zeros(4, heads, 16, 128) for name, heads in ((model, 2), (hidden, 3))}
        layouts.append(
            describe(
                caches,
                groups_of(kept, ALONE),
                ModelShape(1, drafts=(hidden,)),
                coordinates,
                heads={**heads, model: HeldPart(2 * tp, Interval(2 * tp - 2, 2 * tp))},
                forms=cache_forms(vllm_config, kept),
                num_blocks=4,
            ).layout
        )
    found = {each.name: each for each in layouts[1].components}
    assert (found["draft"].is_optional, found["draft"].entry) == (True, Entry.TOKEN)
    assert found["draft"] == next(each for each in layouts[0].components if each.name == "draft")


def test_vllm_cannot_make_the_manager_of_sinks():
    """With a connector or without one: the reason that is given for refusing them."""
    spec = SinkFullAttentionSpec(16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, sink_len=16)
    with pytest.raises(TypeError, match="needs_kv_cache_zeroing"):
        KVCacheManager(config(spec), 1024, scheduler_block_size=16, hash_block_size=16, enable_caching=False)
    with pytest.raises(LayoutError, match=r"vLLM 0\.32 cannot make the manager"):
        groups_of(config(spec), ALONE)


def test_vllm_asserts_that_no_connector_serves_a_model_with_an_encoder():
    """The reason that is given for refusing them."""
    assert "assert not self.is_encoder_decoder" in inspect.getsource(Scheduler.__init__)
    assert CrossAttentionSpec in vars(kv_cache_interface).values()


def test_heads_are_those_of_each_layers_own_spec(caplog: pytest.LogCaptureFixture):
    """Without any module around a layer, two ranks know of what is the same on both of them alone."""
    larger = FullAttentionSpec(**SIZES | {"num_kv_heads": 4})
    slots = FullAttentionSpec(**SIZES, num_head_slots=2, state_content_bytes=512)
    latent = MLAAttentionSpec(**SIZES | {"num_kv_heads": 1}, max_tp_shards=1)
    kept = config(
        FullAttentionSpec(**SIZES), UniformTypeKVCacheSpecs(16, {"model.layers.1.attn": larger}), slots, latent
    )
    layer = SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: "THEIRS"))
    context = {f"model.layers.{number}.attn": layer for number in range(4)}
    vllm_config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=context))
    with caplog.at_level(logging.WARNING, "kvferry.engines.vllm.connector"):
        one = heads_of(vllm_config, kept, RankCoordinates())
        two = heads_of(vllm_config, kept, RankCoordinates(tp_rank=1, tp_size=2))
    assert list(one.values()) == [
        HeldPart(2, Interval(0, 2)),
        HeldPart(4, Interval(0, 4)),
        None,
        HeldPart(1, Interval(0, 1)),
    ]
    assert list(two.values()) == [None, None, None, HeldPart(1, Interval(0, 1))]
    assert caplog.messages[1] == (
        "it is not known which KV heads this rank holds in 3 of 4 layers, such as 'model.layers.0.attn': their caches "
        "can be exchanged with engines of tensor-parallel size 2 alone, and with others the first request is refused"
    )


@pytest.mark.parametrize(("is_latent", "layout"), [(False, KVCacheLayout.LBHNC), (True, None)])
def test_heads_are_asked_for_outside_of_tokens(is_latent: bool, layout: KVCacheLayout | None):
    vllm_config = SimpleNamespace(model_config=SimpleNamespace(use_mla=is_latent))
    asked = KVFerryConnector.get_required_kvcache_layout(vllm_config)
    assert asked == (layout and layout.name)


def test_vllms_offloading_connectors_want_a_gpu_in_these_words():
    """What it comes to allow on a CPU is then to be run beside ours, as `host_memory` lets one of them be."""
    words = '"CPU Offloading is currently only supported on CUDA-alike "'
    assert words in inspect.getsource(CPUOffloadingSpec.get_worker)
    assert "torch.cuda.Stream.priority_range()" in inspect.getsource(SimpleCPUOffloadWorker.register_kv_caches)
