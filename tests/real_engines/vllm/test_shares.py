"""Context parallelism: vLLM's own classes decide which blocks a request has and in which slot of which rank a token is.

No engine starts: vLLM cannot run context parallelism on a CPU. Its cache manager gives out the blocks and finds
prefixes, and its kernels run in Triton's interpreter.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from math import gcd, lcm
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.v1.worker.gpu.block_table as second_runner
from tests.real_engines.vllm.kernels import first_runners, interpreted
from tests.support.vllm_ranks import BLOCKS, Deployment, Engine, Kind, Request, dealt, plugged_in, transfer
from triton.runtime.interpreter import InterpretedFunction
from vllm.config import VllmConfig, model, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.core import single_type_kv_cache_manager
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, resolve_dcp_kv_block_size
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MLAAttentionSpec
from vllm.v1.request import Request as VllmRequest
from vllm.v1.worker.gpu import pcp_manager

from kvferry.engines.vllm.configuration import groups_of
from kvferry.engines.vllm.shares import GroupRank, place_of
from kvferry.testing.network import LocalNetwork

LATENTS = (Kind((0, 1), heads=1),)
TWO_HEADS = (Kind((0, 1), heads=2),)
DRAFTING = (*LATENTS, Kind((0,), heads=4, is_draft=True, is_shared=False))
"""Each rank of decode context parallelism has all of the draft's cache, as of DFlash's."""


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalNetwork]:
    interpreted(monkeypatch)
    init_none_hash(sha256)
    with plugged_in(monkeypatch) as found:
        yield found


class ManagedEngine(Engine):
    """An engine whose blocks vLLM's cache manager gives out."""

    def __init__(self, network: LocalNetwork, name: str, kinds: Sequence[Kind], made: Deployment, *, sends: bool):
        super().__init__(network, name, kinds, made, sends=sends, slots=first_runners)
        groups = [
            KVCacheGroupSpec([kind.name(layer) for layer in kind.layers], spec_of(kind, made.block_tokens))
            for kind in kinds
        ]
        config = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)
        sizes = SimpleNamespace(decode_context_parallel_size=made.dcp, prefill_context_parallel_size=made.pcp)
        assert groups_of(config, sizes) == self._groups(None), "vLLM's own words for it are understood so"
        spans = [resolve_dcp_kv_block_size(group.kv_cache_spec, made.dcp) for group in groups]
        self.manager = KVCacheManager(
            config,
            max_model_len=1024,
            scheduler_block_size=lcm(*spans),
            hash_block_size=gcd(*spans),
            dcp_world_size=made.dcp,
        )
        self._hasher = get_request_block_hasher(gcd(*spans), sha256)
        self._hits: dict[int, Any] = {}
        self._running: list[VllmRequest] = []

    def prefix(self, tokens: int) -> int:
        """Returns how many tokens of a prompt vLLM finds in its cache."""
        blocks, count = self.manager.get_computed_blocks(self._request("look", tokens))[:2]
        self._hits[tokens] = blocks
        return int(count)

    def _request(self, name: str, tokens: int) -> VllmRequest:
        params = SamplingParams(max_tokens=1)
        return VllmRequest(name, list(range(tokens)), params, None, block_hasher=self._hasher)

    def allocate(self, request: Request, first: int, *, computed: int, external: int) -> None:
        for each in self._running:
            self.manager.free(each)
        theirs = self._request(request.request_id, request.num_prompt_tokens)
        self._running = [theirs]
        prefix = computed - external
        allocated = self.manager.allocate_slots(
            theirs,
            theirs.num_tokens - computed,
            num_new_computed_tokens=prefix,
            new_computed_blocks=self._hits[theirs.num_tokens] if prefix else None,
            num_external_computed_tokens=external,
        )
        assert allocated is not None
        self.tables[request.request_id] = [list(table) for table in self.manager.get_blocks(theirs.request_id).blocks]
        self.scheduler.allocated(request, self.tables[request.request_id], external)


def spec_of(kind: Kind, block_tokens: int) -> Any:
    sizes: dict[str, Any] = {"block_size": block_tokens, "num_kv_heads": kind.heads, "dtype": torch.float32}
    sizes["dcp_sharded"] = kind.is_shared
    if kind.heads == 1:
        return MLAAttentionSpec(**sizes, head_size=6)
    return FullAttentionSpec(**sizes, head_size=3)


@pytest.mark.parametrize(
    ("kinds", "here", "there"),
    [
        (TWO_HEADS, Deployment(tp=4, dcp=2, turn=2), Deployment()),
        (TWO_HEADS, Deployment(tp=2), Deployment(tp=4, dcp=2, turn=4)),
        (LATENTS, Deployment(tp=4, dcp=4, turn=4), Deployment(tp=2, dcp=2, turn=1)),
        (LATENTS, Deployment(tp=2, dcp=2, turn=8, block_tokens=8), Deployment(tp=4, dcp=4, turn=2)),
        (DRAFTING, Deployment(tp=4, dcp=2, turn=4), Deployment()),
        (DRAFTING, Deployment(), Deployment(tp=4, dcp=4, turn=2)),
        (LATENTS, Deployment(pcp=2), Deployment()),
        (LATENTS, Deployment(tp=2, pcp=2, dcp=4, turn=2), Deployment(tp=2)),
        (LATENTS, Deployment(), Deployment(pcp=2, dcp=2, turn=4)),
    ],
    ids=str,
)
def test_tokens_arrive_in_the_slots_that_vllm_looks_in(
    network: LocalNetwork, kinds: tuple[Kind, ...], here: Deployment, there: Deployment
):
    """With prefixes that the decode side's cache manager finds, of blocks that stand for tokens on several ranks."""
    prefill = ManagedEngine(network, "prefill", kinds, here, sends=True)
    decode = ManagedEngine(network, "decode", kinds, there, sends=False)
    prefixes = []
    try:
        for tokens in (3, 18, 27, 45, 46):
            decode.wipe()
            prefixes.append(decode.prefix(tokens))
            decode.check(transfer(prefill, decode, tokens, prefixes[-1]), tokens - 1, prefixes[-1])
    finally:
        decode.close()
        prefill.close()
    span = there.block_tokens * there.dcp
    assert prefixes[-1] == 45 // span * span, "vLLM finds whole blocks of all ranks"


def second_runners(
    blocks: Sequence[int], tokens: int, block_tokens: int, ranks: int, rank: int, turn: int, *, shared: bool = True
) -> list[int]:
    """The slot of every token by the kernel of vLLM's second model runner, where a group need not be shared."""
    table, found = torch.tensor([blocks], dtype=torch.int32), torch.full((1, tokens), -7)
    InterpretedFunction(second_runner._compute_slot_mappings_kernel)[(1, 2)](
        tokens,
        torch.tensor([0], dtype=torch.int32),
        torch.tensor([0, tokens], dtype=torch.int32),
        torch.arange(tokens),
        torch.tensor([table.data_ptr()], dtype=torch.uint64),
        torch.tensor([len(blocks)], dtype=torch.int64),
        torch.tensor([block_tokens], dtype=torch.int32),
        torch.tensor([True]),
        torch.tensor([shared]),
        found,
        tokens,
        rank,
        CP_SIZE=ranks,
        CP_INTERLEAVE=turn,
        PAD_ID=PAD_SLOT_ID,
        TRITON_BLOCK_SIZE=16,
    )
    slots: list[int] = found[0].tolist()
    return slots


@pytest.mark.parametrize("turn", [1, 2, 4])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.usefixtures("network")
def test_both_model_runners_deal_tokens_out_as_the_layout_says(ranks: int, turn: int):
    tokens, block_tokens, blocks = 45, 4, list(range(12, 0, -1))
    for rank in range(ranks):
        expected = dealt(blocks, tokens, block_tokens, ranks, rank, turn)
        for runners in (first_runners, second_runners):
            assert runners(blocks, tokens, block_tokens, ranks, rank, turn) == expected
        whole = dealt(blocks, tokens, block_tokens, 1, 0, 1)
        assert second_runners(blocks, tokens, block_tokens, ranks, rank, turn, shared=False) == whole


@pytest.mark.parametrize(
    ("tp", "pcp", "pp", "dcp"),
    [(4, 1, 1, 2), (4, 1, 2, 4), (2, 1, 1, 1), (1, 2, 1, 1), (2, 2, 1, 2), (2, 2, 2, 4), (1, 4, 1, 4), (6, 1, 2, 3)],
)
def test_vllm_numbers_ranks_as_places_count_on_it(
    monkeypatch: pytest.MonkeyPatch, tp: int, pcp: int, pp: int, dcp: int
):
    """vLLM makes its groups of ranks here, but for what they talk over."""
    made: dict[str, list[list[int]]] = {}

    def make(ranks: list[list[int]], *_: Any, group_name: str, **__: Any) -> Any:
        made[group_name] = ranks
        return SimpleNamespace(rank_in_group=0, world_size=len(ranks[0]))

    for name in ("_TP", "_ETP", "_DCP", "_PCP", "_PP", "_DP", "_EP", "_EPLB", "_ENGRAM_DP"):
        monkeypatch.setattr(parallel_state, name, None)
    monkeypatch.setattr(parallel_state, "init_model_parallel_group", make)
    monkeypatch.setattr(parallel_state, "get_world_group", lambda: SimpleNamespace(local_rank=0, device_group=None))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: tp * pcp * pp)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda *_: 0)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda *_: "gloo")
    with set_current_vllm_config(VllmConfig()):
        parallel_state.initialize_model_parallel(tp, pp, pcp, dcp, backend="gloo")
    places = []
    for worker in range(tp * pcp * pp):
        own = {name: next(group for group in groups if worker in group) for name, groups in made.items()}
        tensor, pipeline, prefill, decode = (
            GroupRank(own[name].index(worker), len(own[name])) for name in ("tp", "pp", "pcp", "dcp")
        )
        places.append(place_of(tensor, pipeline, prefill, decode, 1))
    numbers = [each.in_engine.engine_rank for each in places]
    assert sorted(numbers) == list(range(tp * pcp * pp)), "every worker has a number of its own"
    assert {each.in_engine.pp_size for each in places} == {pp}


@pytest.mark.parametrize(
    ("where", "words"),
    [
        (single_type_kv_cache_manager, "DCP not support sliding window attn now"),
        (single_type_kv_cache_manager, "DCP not support chunked local attn now"),
        (model, "Decode context parallelism for GQA/MQA requires "),
        (model, "`--tensor-parallel-size` ("),
        (pcp_manager, "MRV2 PCP currently supports MLA models only."),
        (pcp_manager, "MRV2 PCP + DCP supports sparse MLA models only."),
    ],
)
def test_what_the_docs_say_that_vllm_forbids_it_forbids_in_these_words(where: ModuleType, words: str):
    """What it comes to allow is then to be tried here."""
    assert words in inspect.getsource(where)


def test_the_deprecated_option_has_taken_effect_when_a_connector_is_made():
    parallel = SimpleNamespace(
        decode_context_parallel_size=2, dcp_kv_cache_interleave_size=16, cp_kv_cache_interleave_size=1
    )
    VllmConfig.adjust_dcp_kv_cache_interleave_size(
        SimpleNamespace(parallel_config=parallel, kv_transfer_config=None), None
    )
    assert parallel.cp_kv_cache_interleave_size == 16
