"""A draft model's cache, byte for byte between pools of SGLang's own, cut by any rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.disaggregation import utils
from sglang.srt.disaggregation.base.conn import KVArgs
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.speculative.eagle_utils import build_tree_kernel_efficient, default_tree_mask_mode
from tests.real_engines.sglang.pool_ranks import PAGES, SIZES, Crossing, Part, PoolRank, begin, part
from tests.real_engines.sglang.ranks import DECODE, PREFILL, Model
from tests.real_engines.sglang.test_companions import alone
from tests.real_engines.sglang.test_ranks import Pair, pair
from tests.support.crossings import cross

from kvferry.engines.sglang.metadata_rows import MetadataRows
from kvferry.engines.sglang.pools import around_managers

__all__ = ["alone", "pair"]  # fixtures

pytestmark = pytest.mark.timeout(60)

PAGE, LAYERS, HEADS = 4, 2, 4


class DraftedRank(PoolRank):
    """A rank with a draft model of one layer, whose heads are as many as SGLang's runner says."""

    def __init__(
        self,
        *,
        tp: int,
        tp_rank: int,
        heads: int | None,
        divided: tuple[int, int] | None = None,
        layers: range = range(LAYERS),
        is_last: bool = True,
        page: int = PAGE,
        **options: Any,
    ) -> None:
        """Makes its pools.

        Args:
            heads: of the draft model; None if it has latents.
            divided: which part of the draft's heads the rank has, of how many, if not that of its other heads.
            layers: of the model, those of a pipeline stage.
            is_last: whether it is the stage that has the draft.
            page: tokens in a page.
        """
        self._divided = divided or (tp_rank, tp)
        given = {"page_size": page, "dtype": torch.float16, "device": "cpu", "enable_memory_saver": False}
        of_heads = {**given, "head_dim": 8, "enable_alt_stream": False}
        size = (PAGES - 1) * page
        pool = MHATokenToKVPool(
            size, head_num=max(1, HEADS // tp), layer_num=len(layers), start_layer=layers.start, **of_heads
        )
        parts = [
            _part(buffer, page, HEADS, 100 * kind + layer)
            for kind, buffers in enumerate((pool.k_buffer, pool.v_buffer))
            for layer, buffer in zip(layers, buffers, strict=True)
        ]
        self.draft_pool: Any = None
        self._draft_heads = heads
        if heads is not None:
            self.draft_pool = MHATokenToKVPool(
                size, head_num=max(1, heads // self._divided[1]), layer_num=1, **of_heads
            )
            drafts = [
                _part(each, page, heads, 200 + kind)
                for kind, each in enumerate((*self.draft_pool.k_buffer, *self.draft_pool.v_buffer))
            ]
        else:
            self.draft_pool = MLATokenToKVPool(size, kv_lora_rank=16, qk_rope_head_dim=8, layer_num=1, **given)
            drafts = [Part(part(each, PAGES, page * 48).bytes, label=200) for each in self.draft_pool.kv_buffer]
        self._drafts = drafts if is_last else []
        model = Model(heads=HEADS, page_tokens=page, layers=LAYERS)
        super().__init__(model, pool, [*parts, *self._drafts], tp=tp, tp_rank=tp_rank)
        self.options = options

    @property
    def arguments(self) -> KVArgs:
        args = super().arguments
        draft = self.draft_pool if self._drafts else None
        for name, added in zip(("ptrs", "lens", "item_lens"), self.draft_pool.get_contiguous_buf_infos(), strict=True):
            name = f"kv_{name}" if name == "item_lens" else f"kv_data_{name}"
            setattr(args, name, [*getattr(args, name), *(added if draft is not None else ())])
        args.num_draft_entries = len(self._drafts)
        config = SimpleNamespace(get_total_num_kv_heads=lambda: self._draft_heads)
        worker = SimpleNamespace(_draft_model_runners=lambda: (SimpleNamespace(model_config=config),))
        scheduler = SimpleNamespace(sliding_window_size=None, draft_worker=worker if draft is not None else None)
        around_managers(
            lambda _: utils.setup_state_kv_args(args, self.pool, draft, LAYERS), SimpleNamespace(scheduler=scheduler)
        )
        return args

    def _heads_of(self, each: Part) -> range:
        index, count = self._divided if any(each is draft for draft in self._drafts) else (self.tp_rank, self.tp)
        start = index * each.total // count
        return range(start, start + max(1, each.total // count))


def _part(buffer: torch.Tensor, page: int, heads: int, label: int) -> Part:
    return Part(part(buffer, PAGES, page, buffer.shape[1], 16).bytes, 1, "pages", heads, label)


@pytest.mark.parametrize("path", ["direct", "staged"])
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), SIZES)
@pytest.mark.parametrize("heads", [2, 8, None], ids=["2 heads", "8 heads", "latents"])
def test_a_draft_models_cache_is_cut_by_its_own_heads(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, path: str, prefill_tp: int, decode_tp: int, heads: int | None
):
    """Before, it needed as many tensor-parallel ranks on the other side."""
    monkeypatch.setenv("KVFERRY_PATH", path)
    begin(pair, lambda **where: DraftedRank(heads=heads, **where), prefill_tp, decode_tp)
    Crossing(pair, 1, 5).run()
    Crossing(pair, 2, 7, held=3).run()


def test_a_draft_model_is_divided_among_context_parallel_ranks(pair: Pair):
    """It knows no context parallelism: SGLang divides its heads among all ranks of a request."""
    for number in range(4):
        cp_rank, tp_rank = divmod(number, 2)
        where: dict[str, Any] = {"attn_cp_size": 2, "attn_cp_rank": cp_rank, "tp_size": 4, "tp_rank_of_all": number}
        rank = DraftedRank(tp=2, tp_rank=tp_rank, heads=4, divided=(number, 4), **where)
        pair.model = rank.model
        pair.start(PREFILL, rank)
    pair.start(DECODE, DraftedRank(tp=1, tp_rank=0, heads=4))
    for room in range(1, 5):
        Crossing(pair, room, 5).run()


def test_a_draft_model_is_sent_by_the_last_pipeline_stage(pair: Pair):
    """SGLang has it there alone, and on the prefill side only."""
    for stage in range(2):
        rank = DraftedRank(tp=1, tp_rank=0, heads=4, layers=range(stage, stage + 1), is_last=stage == 1)
        pair.model = rank.model
        pair.start(PREFILL, rank, pp=2, stage=stage)
    for tp_rank in range(2):
        pair.start(DECODE, DraftedRank(tp=2, tp_rank=tp_rank, heads=4))
    Crossing(pair, 1, 5).run()
    Crossing(pair, 2, 7, held=3).run()


def test_a_draft_model_that_the_other_side_lacks_stays_behind(pair: Pair):
    begin(pair, lambda **where: DraftedRank(heads=4, **where), 2, 1, is_last=False)
    Crossing(pair, 1, 5).run()


@pytest.mark.parametrize("heads", [4, None], ids=["heads", "latents"])
def test_pages_may_differ_in_size(pair: Pair, heads: int | None):
    """Whole requests, in chunks and behind a prefix; and nothing else is written."""
    begin(pair, lambda page=16, **where: DraftedRank(heads=heads, page=page, **where), 2, 1, page=32)
    sides = (pair.prefill.managers, pair.decode.managers)
    cross(*([(each.place.coordinates, each.caches.layout) for each in managers] for managers in sides))


def _metadata(hidden_size: int) -> tuple[utils.MetadataBuffers, MetadataRows]:
    """SGLang's buffers where a draft takes hidden states of that size, and ours over them."""
    buffers = utils.MetadataBuffers(
        4, hidden_size, torch.bfloat16, max_sampling_mask_tokens=8, output_dsa_topk_indices_dim=0
    )
    addresses, _, row_bytes = buffers.get_buf_infos()
    return buffers, MetadataRows(tuple(addresses), tuple(row_bytes))


def test_what_a_draft_begins_with_comes_with_the_first_token():
    """Its first proposals and the model's hidden states, to the row of another request."""
    (sent, from_rows), (received, to_rows) = _metadata(96), _metadata(96)
    seed = {"output_topk_p": 16, "output_topk_index": 16, "output_hidden_states": 96}
    for number, (name, width) in enumerate(seed.items(), 1):
        getattr(sent, name)[3] = torch.arange(width) + number
    to_rows.write(1, from_rows.read(3))
    for name in seed:
        assert torch.equal(getattr(received, name)[1], getattr(sent, name)[3]), name
        assert not getattr(received, name)[[0, 2, 3]].any(), name


def test_a_draft_on_one_side_alone_is_seen_in_the_rows():
    """Of which two servers compare the sizes before any request is computed."""
    assert _metadata(96)[1].row_bytes != _metadata(16)[1].row_bytes


def test_sglang_cannot_draft_here_since_its_kernels_for_cpus_are_in_no_package():
    """Every kind of draft is verified as a tree. The day this fails, a pair of engines can draft: let one do so."""
    numbers = torch.tensor
    tree = (numbers([5]), [numbers([[-1, 0]])], numbers([[0]]), numbers([[7]]), numbers([3]))
    with pytest.raises(RuntimeError, match=r"sgl_kernel\.build_tree_kernel_efficient_cpu was called, and is not here"):
        build_tree_kernel_efficient(*tree, 3, 1, 1, 2, default_tree_mask_mode())
