"""An index beside latents on ranks that share a request's tokens: DeepSeek-V3.2 and GLM-5 with context parallelism.

vLLM's own classes say what the caches are, its cache manager gives the blocks out, and its kernels, in Triton's
interpreter, say which rank has a token, in which slot, and where in a block the token's key and its scale are written.
What is written is made up, and no model runs: vLLM has no sparse attention for context parallelism on a CPU.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.real_engines.vllm.kept_caches import DeepseekV32, Engine, Model, Rank, engines
from tests.real_engines.vllm.kernels import KEY_BYTES, first_runners, interpreted, write_index
from tests.support.vllm_ranks import Deployment, plugged_in
from vllm.config import VllmConfig
from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer
from vllm.v1.attention.backends.mla.flashinfer_mla_sparse import FlashInferMLASparseImpl
from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseImpl
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.request import Request

from kvferry.engines.vllm import configuration
from kvferry.errors import IncompatiblePeerError
from kvferry.plan import check_exchangeable
from kvferry.testing.network import LocalNetwork

LATENT_BYTES, PAGE, LONGEST = 656, 64, 3000


class Glm5(DeepseekV32):
    """Every other layer takes the choice of the one before it, and has no index."""

    def modules(self, config: VllmConfig, tp: int, rank: int) -> dict[str, Any]:
        found = super().modules(config, tp, rank)
        return {name: each for name, each in found.items() if "indexer" not in name or int(name.split(".")[2]) % 2 == 0}


DEEPSEEK = DeepseekV32("deepseek v3.2", 2, PAGE, "fp8_ds_mla", "LBNHC")
GLM = Glm5("glm-5", 3, PAGE, "fp8_ds_mla", "BLNHC")


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalNetwork]:
    interpreted(monkeypatch)
    monkeypatch.setattr(configuration, "current_platform", SimpleNamespace(is_cuda=lambda: True))
    with plugged_in(monkeypatch) as found:
        yield found


class WrittenEngine(Engine):
    """An engine in which every token is written where vLLM's kernels write it."""

    pool_bytes = 6 << 20  # every byte of it is looked at, for every request

    def fill(self, request: Request, tokens: int) -> None:
        for rank in self.ranks:
            self.write(rank, rank.caches, request, tokens)

    def write(self, rank: Rank, caches: dict[str, torch.Tensor], request: Request, tokens: int, mark: int = -1) -> None:
        """Writes a request's first tokens, as far as a rank has them; a mark in all their bytes if one is given."""
        (table,) = self.tables(request.request_id)
        blocks = tuple(block.block_id for block in table)
        slots = slots_of(blocks, tokens, self.made.dcp, rank.place.tokens.part, self.made.turn)
        numbered = zip(slots, request.prompt_token_ids, strict=False)
        held = [(slot, token) for slot, token in numbered if slot != PAD_SLOT_ID]
        if not held:
            return
        places, ids = [slot for slot, _ in held], [token for _, token in held]
        for layer, cache in caches.items():
            if layer.endswith("k_cache"):
                values = made_up(layer, KEY_BYTES + 4)[ids]
                values = torch.full_like(values, mark) if mark >= 0 else values
                scales = values[:, KEY_BYTES:].contiguous().view(torch.int32)[:, 0]
                write_index(cache[:, 0], places, values[:, :KEY_BYTES].contiguous(), scales)
            else:
                values = made_up(layer, LATENT_BYTES)[ids]
                where = torch.tensor(places)
                cache[where // PAGE, 0, where % PAGE] = torch.full_like(values, mark) if mark >= 0 else values

    def check(self, request: Request, tokens: int, before: list[dict[str, torch.Tensor]]) -> None:
        """Looks at every byte: the tokens' own are what this engine would have written, other blocks as before."""
        (table,) = self.tables(request.request_id)
        own = [block.block_id for block in table]
        seen = 0
        for rank, earlier in zip(self.ranks, before, strict=True):
            expected, written = ({name: torch.zeros_like(each) for name, each in earlier.items()} for _ in range(2))
            self.write(rank, expected, request, tokens)
            self.write(rank, written, request, tokens, mark=255)
            for layer, cache in rank.caches.items():
                is_written = written[layer] == 255
                wrong = (cache != expected[layer]) & is_written
                assert not wrong.any(), f"{layer} on {rank.place.in_engine}: {int(wrong.sum())} bytes"
                others = torch.ones(len(cache), dtype=torch.bool)
                others[own] = False
                assert torch.equal(cache[others], earlier[layer][others]), "another request's blocks"
                seen += int(is_written.count_nonzero())
        copies = len(self.ranks) // self.made.dcp
        widths = [KEY_BYTES + 4 if "indexer" in layer else LATENT_BYTES for layer in self.groups[0].layer_names]
        assert seen == tokens * sum(widths) * copies, "every token is on one of the ranks that share it"


@lru_cache(maxsize=16)
def slots_of(blocks: tuple[int, ...], tokens: int, ranks: int, part: int, turn: int) -> list[int]:
    return first_runners(blocks, tokens, PAGE, ranks, part, turn)


def made_up(layer: str, width: int) -> torch.Tensor:
    """What a token has in a layer, by its number in the vocabulary."""
    values = np.random.default_rng([*layer.encode()]).integers(0, 256, (LONGEST, width), np.uint8)
    return torch.from_numpy(values)


def snapshot(engine: Engine) -> list[dict[str, torch.Tensor]]:
    return [{name: cache.clone() for name, cache in rank.caches.items()} for rank in engine.ranks]


ALIKE = [
    (Deployment(tp=2, dcp=2, turn=1), Deployment(tp=2, dcp=2, turn=1)),
    (Deployment(tp=4, dcp=2, turn=16), Deployment(tp=2, dcp=2, turn=16)),
    (Deployment(tp=4, dcp=4, turn=1), Deployment(tp=4, dcp=4, turn=1)),
    (Deployment(pcp=2, dcp=2, turn=1), Deployment(tp=4, dcp=2, turn=1)),
]
"""As many ranks share tokens, in turns of the same length: what one has of a block another has in a block."""

WHOLE_PAGES = [
    (Deployment(tp=2, dcp=2, turn=PAGE), Deployment(tp=2, dcp=2, turn=PAGE)),
    (Deployment(tp=2, dcp=2, turn=PAGE), Deployment()),
    (Deployment(tp=2), Deployment(tp=4, dcp=4, turn=PAGE)),
    (Deployment(tp=4, dcp=2, turn=PAGE), Deployment(tp=4, dcp=4, turn=PAGE)),
    (Deployment(tp=3, dcp=3, turn=PAGE), Deployment(tp=2, pcp=2, dcp=4, turn=PAGE)),
]
"""Ranks take whole pages in turns, so that a page of one side is a page of the other."""

CUT_PAGES = [
    (Deployment(tp=2, dcp=2, turn=1), Deployment()),
    (Deployment(tp=2), Deployment(tp=4, dcp=2, turn=1)),
    (Deployment(tp=4, dcp=2, turn=1), Deployment(tp=4, dcp=4, turn=16)),
    (Deployment(pcp=2, dcp=2, turn=16), Deployment(tp=2, dcp=2, turn=PAGE)),
]
"""The tokens of a page are in several of the other side."""


def sooner_if_small(model: Model, here: Deployment, there: Deployment) -> Any:
    """A case, which is for the long tier where both sides have four ranks: an interpreter runs each one's kernels."""
    return pytest.param(model, here, there, marks=[pytest.mark.long] if here.tp == there.tp == 4 else [])


@pytest.mark.parametrize(
    ("model", "here", "there"),
    [
        *(sooner_if_small(DEEPSEEK, *deployments) for deployments in (*ALIKE, *WHOLE_PAGES, *CUT_PAGES)),
        *((GLM, *deployments) for deployments in (ALIKE[1], CUT_PAGES[1])),
        pytest.param(GLM, *WHOLE_PAGES[3], marks=pytest.mark.long),
    ],
    ids=lambda each: each.name if isinstance(each, Model) else str(each),
)
def test_an_index_arrives_with_its_latents(network: LocalNetwork, model: Model, here: Deployment, there: Deployment):
    """In prompts that end anywhere, of which the decode side has a part already."""
    with engines(network, model, here, there, WrittenEngine) as pair:
        assert isinstance(pair.decode, WrittenEngine)
        assert [group.token_ranks for group in pair.decode.groups] == [there.dcp], "an index is shared as latents are"
        prefixes = []
        for tokens, seed in [(3, 1000), (65, 1500), (200, 2000), (290, 0), (330, 0)]:
            before = snapshot(pair.decode)
            transfer = pair.transfer(tokens, seed)
            prefixes.append(transfer.prefix)
            pair.decode.check(transfer.received, transfer.tokens, before)
            pair.decode.manager.free(transfer.received)
        assert prefixes[:4] == [0, 0, 0, 0]
        span = PAGE * there.dcp
        assert prefixes[4] == 289 // span * span, "vLLM finds whole blocks of all ranks"


@pytest.mark.parametrize(
    ("here", "there", "theirs", "ours"),
    [
        (Deployment(tp=2, dcp=2, turn=1), Deployment(), "blocks of 1 tokens over parts [0, 1]", "every token"),
        (
            Deployment(tp=2, dcp=2, turn=16),
            Deployment(tp=2, dcp=2, turn=PAGE),
            "blocks of 16 tokens over parts [0, 1]",
            "blocks of 64 tokens over parts [0, 1]",
        ),
    ],
    ids=str,
)
def test_pages_whose_order_nobody_says_are_not_cut(
    network: LocalNetwork,
    monkeypatch: pytest.MonkeyPatch,
    here: Deployment,
    there: Deployment,
    theirs: str,
    ours: str,
):
    """Anywhere but on NVIDIA's GPUs, whatever the kernels there do."""
    monkeypatch.setattr(configuration, "current_platform", SimpleNamespace(is_cuda=lambda: False))
    with engines(network, DEEPSEEK, here, there, WrittenEngine) as pair:
        layouts = pair.prefill.described.layout, pair.decode.described.layout
        words = (
            f"cannot be cut between tokens, but prefill has pages of 64 tokens ({theirs}) and decode pages of 64 "
            f"({ours}); give both sides the same, or let ranks that share tokens take whole pages in turns"
        )
        with pytest.raises(IncompatiblePeerError, match=re.escape(words)):
            check_exchangeable(*layouts, source_name="prefill", destination_name="decode")


def test_vllm_divides_the_tokens_of_sparse_attention_where_these_backends_run_it():
    """And on no CPU, in these words: what it comes to allow there is then to be tried with tokens."""
    assert FlashMLASparseImpl.supports_dcp
    assert FlashInferMLASparseImpl.supports_dcp
    assert FlashMLASparseImpl.supports_mtp_with_cp_non_trivial_interleave_size
    assert not FlashInferMLASparseImpl.supports_mtp_with_cp_non_trivial_interleave_size, "turns of 1 where it drafts"
    words = "CPU sparse indexer doesn't support decode/prefill context parallelism yet."
    assert words in inspect.getsource(SparseAttnIndexer.forward_cpu)
