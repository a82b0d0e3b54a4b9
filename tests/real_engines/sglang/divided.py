"""Ranks that divide the tokens of a request, or keep the same: pools that SGLang's own classes make, and requests.

What a prefill rank caches is written as SGLang writes it: every rank is given all of a request, and keeps its part.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.layers.dcp.layout import maybe_dcp_kernel_indices
from sglang.srt.mem_cache.allocator.page_interleave import PageInterleavePoolAllocator
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.page_interleave import PageShardSpec
from sglang.srt.mem_cache.page_interleave_pool import PageInterleaveMHATokenToKVPool, PageInterleaveMLATokenToKVPool
from tests.real_engines.sglang.crossings import Members, wait
from tests.real_engines.sglang.pool_ranks import PoolRank
from tests.real_engines.sglang.ranks import Model

PAGE, PAGES, LAYERS, HEADS, HEAD_DIM, LATENT, ROPE = 4, 24, 2, 4, 8, 16, 8
KEYS = Model(heads=HEADS, page_tokens=PAGE, layers=LAYERS)
LATENTS = Model(heads=None, page_tokens=PAGE, layers=LAYERS)
UNTOUCHED = 77

Numbers = NDArray[np.int64]


class DividedRank(PoolRank, ABC):
    """A rank with full attention. Its slots are SGLang's, which are the same on all ranks that divide tokens.

    Attributes:
        page_slots: how many slots a page of SGLang's allocator has.
    """

    def __init__(
        self, model: Model, *, tp: int, tp_rank: int, page: int = PAGE, pool: Any = None, **options: Any
    ) -> None:
        """Makes its pool.

        Args:
            tp: among how many parts heads are divided.
            page: tokens in a page.
            options: what SGLang's code is told about the rank beside that.
        """
        self.page, self.page_slots = page, page
        self._heads_here = max(1, HEADS // tp)
        given = {"page_size": page, "dtype": torch.float16, "layer_num": LAYERS, "device": "cpu"}
        given |= {"enable_memory_saver": False, **(pool or {})}
        if model.heads is None:
            given |= {"kv_lora_rank": LATENT, "qk_rope_head_dim": ROPE}
        else:
            given |= {"head_num": self._heads_here, "head_dim": HEAD_DIM, "enable_alt_stream": False}
        made = self.pool_class(model)((PAGES - 1) * page, **given)
        super().__init__(model, made, (), tp=tp, tp_rank=tp_rank)
        self.options = options

    @staticmethod
    def pool_class(model: Model) -> Any:
        """SGLang's class of the pool."""
        return MLATokenToKVPool if model.heads is None else MHATokenToKVPool

    @property
    def buffers(self) -> list[torch.Tensor]:
        """Those of all layers: of latents, or of keys and then of values."""
        return [*self.pool.kv_buffer] if self.model.heads is None else [*self.pool.k_buffer, *self.pool.v_buffer]

    def whole(self, room: int, number: int, tokens: int) -> torch.Tensor:
        """What of a request belongs into one of its buffers, on all ranks that divide its tokens."""
        random = np.random.default_rng([room, number])
        shape = (tokens, 1, LATENT + ROPE) if self.model.heads is None else (tokens, HEADS, HEAD_DIM)
        made = torch.from_numpy(random.integers(0, 2**15, shape, np.int16)).view(torch.float16)
        return made if self.model.heads is None else made[:, list(self._heads(HEADS))]

    def write(self, room: int, slots: Numbers) -> None:
        """Caches a request, as SGLang has every rank do it."""
        given = torch.from_numpy(slots)
        for layer in range(LAYERS):
            key = self.whole(room, layer, len(slots))
            value = None if self.model.heads is None else self.whole(room, LAYERS + layer, len(slots))
            self.pool.set_kv_buffer(SimpleNamespace(layer_id=layer), given, key, value)

    @abstractmethod
    def rows(self, slots: Numbers) -> tuple[Numbers, Numbers]:
        """Which of the slots are on this rank, by their order, and the rows of its buffers that they are."""

    def check_slots(self, room: int, slots: Numbers, held: int) -> None:
        """Asserts that a request is here, from token `held` on, and that nothing else was written."""
        orders, rows = self.rows(slots)
        needed = orders >= held
        pages = np.unique(rows[needed] // self.page)
        others = [row for row in range(PAGES * self.page) if row // self.page not in pages]
        for number, buffer in enumerate(self.buffers):
            expected = self.whole(room, number, len(slots)).view(torch.int16)
            found = buffer.view(torch.int16)
            np.testing.assert_array_equal(found[rows[needed]], expected[orders[needed]])
            assert (found[others] == UNTOUCHED).all()

    def clear(self) -> None:
        """Fills its buffers with what no request has."""
        for buffer in self.buffers:
            buffer.view(torch.int16).fill_(UNTOUCHED)


class WholeRank(DividedRank):
    """A rank that keeps all tokens of a request."""

    def rows(self, slots: Numbers) -> tuple[Numbers, Numbers]:
        return np.arange(len(slots)), slots


class ShardedRank(DividedRank):
    """A rank of --enable-kv-cache-sharding: pages go round."""

    def __init__(self, model: Model, shards: int, shard: int, **options: Any) -> None:
        spec = PageShardSpec(shard, shards, PAGE, 2 * shards * PAGE, 4 * PAGE)
        group = SimpleNamespace(world_size=shards, rank_in_group=shard, cpu_group=None, device="cpu")
        options |= {"enable_kv_cache_sharding": True, "shard_rank": shard, "shard_size": shards}
        super().__init__(model, pool={"shard_spec": spec, "shard_group": group}, **options)
        self.allocator = PageInterleavePoolAllocator(
            (PAGES - 1) * PAGE, PAGE, shards, torch.float16, "cpu", self.pool, need_sort=False
        )

    @staticmethod
    def pool_class(model: Model) -> Any:
        return PageInterleaveMLATokenToKVPool if model.heads is None else PageInterleaveMHATokenToKVPool

    def allocate(self, tokens: int, first_rank: int) -> Numbers:
        """Slots for a request whose first page is on a rank."""
        none, many = torch.tensor([0]), torch.tensor([tokens])
        slots = self.allocator.alloc_extend(
            none, none, many, many, torch.tensor([-1]), tokens, rotation_bases=[first_rank]
        )
        numbers: Numbers = slots.numpy()
        return numbers

    def rows(self, slots: Numbers) -> tuple[Numbers, Numbers]:
        given, placement = torch.from_numpy(slots), self.pool.placement
        mine = placement.local_mask(given, self.pool.shard_rank)
        return mine.nonzero().flatten().numpy(), placement.local_index(given[mine]).numpy()


class DecodeContextRank(DividedRank):
    """A rank of --dcp-size: tokens go round, and a page of SGLang's has as many of each rank's."""

    def __init__(self, model: Model, dcp: int, dcp_rank: int, **options: Any) -> None:
        super().__init__(model, attn_dcp_size=dcp, attn_dcp_rank=dcp_rank, **options)
        self.page_slots = PAGE * dcp

    def rows(self, slots: Numbers) -> tuple[Numbers, Numbers]:
        dcp, rank = self.options["attn_dcp_size"], self.options["attn_dcp_rank"]
        rows = maybe_dcp_kernel_indices(torch.from_numpy(slots), dcp, rank).numpy()
        return np.arange(rank, len(slots), dcp), rows

    def write(self, room: int, slots: Numbers) -> None:
        # SGLang's own is a kernel for GPUs.
        orders, rows = self.rows(slots)
        for number, buffer in enumerate(self.buffers):
            buffer[rows] = self.whole(room, number, len(slots))[orders]


class WithCompanion(DecodeContextRank):
    """A rank of --dcp-size, or one that keeps all tokens, with something beside that has every token on every rank.

    Attributes:
        MODEL: what it is a rank of.
        HAS_WHOLE_PAGES: whether what it has beside is moved in whole pages.
    """

    MODEL: Model
    HAS_WHOLE_PAGES = False

    def __init__(self, dcp: int, dcp_rank: int, *, page: int, pool: Any = None, **options: Any) -> None:
        super().__init__(self.MODEL, dcp, dcp_rank, tp=1, tp_rank=0, page=page, pool=pool, **options)
        self.page_slots = page * dcp

    @property
    @abstractmethod
    def companion(self) -> Sequence[tuple[torch.Tensor, int]]:
        """Its buffers, by page, and how many tokens such a page has."""

    def write(self, room: int, slots: Numbers) -> None:
        super().write(room, slots)
        for number, (buffer, page) in enumerate(self.companion):
            buffer[slots[::page] // page] = self._companions(room, number, len(slots), page, buffer)

    def check_slots(self, room: int, slots: Numbers, held: int) -> None:
        super().check_slots(room, slots, held)
        for number, (buffer, page) in enumerate(self.companion):
            pages, row = (slots[::page] // page)[held // page :], buffer[0].numel() // page
            expected = self._companions(room, number, len(slots), page, buffer)[held // page :]
            # What lies behind a prompt in its last page need not travel, but where pages are not cut.
            rows = expected.numel() // row if self.HAS_WHOLE_PAGES else len(slots) - held // page * page
            assert torch.equal(buffer[pages].reshape(-1, row)[:rows], expected.reshape(-1, row)[:rows])
            others = np.setdiff1d(np.arange(len(buffer)), pages)
            assert (buffer[others] == UNTOUCHED).all()

    def clear(self) -> None:
        super().clear()
        for buffer, _ in self.companion:
            buffer.fill_(UNTOUCHED)

    def _companions(self, room: int, number: int, tokens: int, page: int, buffer: torch.Tensor) -> torch.Tensor:
        """What a request has in one buffer, page by page: the same on every rank, whatever the size of pages."""
        row = buffer[0].numel() // page
        random = np.random.default_rng([room, 100 + number])
        made = torch.from_numpy(random.integers(0, 256, (-(-tokens // page) * page, row), np.uint8))
        return made.reshape(-1, page * row)


class WithDraft(WithCompanion):
    """With a draft model, whose pages have the tokens of all ranks."""

    MODEL = LATENTS

    def __init__(self, dcp: int, dcp_rank: int, **options: Any) -> None:
        super().__init__(dcp, dcp_rank, page=PAGE, **options)
        given: dict[str, Any] = {"kv_lora_rank": LATENT, "qk_rope_head_dim": ROPE, "layer_num": 1, "device": "cpu"}
        page = PAGE * dcp
        self.draft = MLATokenToKVPool((PAGES - 1) * page, page, dtype=torch.float16, enable_memory_saver=False, **given)

    @property
    def companion(self) -> Sequence[tuple[torch.Tensor, int]]:
        return [(each.view(torch.uint8).reshape(PAGES, -1), self.page_slots) for each in self.draft.kv_buffer]


class WithIndex(WithCompanion):
    """With the index of sparse attention, in pages of 64 tokens."""

    MODEL = Model(heads=None, page_tokens=64, layers=LAYERS)
    HAS_WHOLE_PAGES = True

    def __init__(self, dcp: int, dcp_rank: int, **options: Any) -> None:
        size = (PAGES - 1) * 64
        pool = {"kv_cache_dim": LATENT + ROPE, "index_head_dim": 128}
        pool |= {"index_buf_size": (size + 64) * dcp - 64}  # as SGLang has it
        super().__init__(dcp, dcp_rank, page=64, pool=pool, **options)

    @staticmethod
    def pool_class(model: Model) -> Any:
        return DSATokenToKVPool

    @property
    def companion(self) -> Sequence[tuple[torch.Tensor, int]]:
        return [(each.view(torch.uint8), 64) for each in self.pool.index_k_with_scale_buffer]


class Crossing:
    """A request between two sides, in two chunks, as SGLang's schedulers handle it."""

    def __init__(
        self, pair: Members, room: int, tokens: int, *, held: int = 0, first_rank: int = 0, dp_rank: int = 0
    ) -> None:
        """Caches it on the prefill side.

        Args:
            held: tokens that the decode side has already.
            first_rank: which rank has the first page, where pages go round.
            dp_rank: the data-parallel group of the prefill side that has it.
        """
        self.pair, self.room, self.tokens, self.held, self.dp_rank = pair, room, tokens, held, dp_rank
        self.ranks: list[list[Any]] = [[*side.ranks] for side in (pair.prefill, pair.decode)]
        self.sources = [
            rank.allocate(tokens, first_rank) if isinstance(rank, ShardedRank) else self._slots(rank, 1)
            for rank in self.ranks[0]
        ]
        for rank, slots in zip(self.ranks[0], self.sources, strict=True):
            rank.write(room, slots)
            rank.rooms[1] = room
        for rank in self.ranks[1]:
            rank.clear()

    def _slots(self, rank: DividedRank, side: int) -> Numbers:
        size = rank.page_slots
        pages = 1 + np.random.default_rng([self.room, side]).permutation(PAGES - 1)
        tokens = np.arange(self.tokens)
        return pages[tokens // size] * size + tokens % size

    def _states(self, manager: Any, slots: Numbers, page: int) -> list[Numbers]:
        """What SGLang gives beside the pages of these slots, all of it of an index.

        Args:
            page: by pages of how many slots: by the pool's on the decode side, and by the allocator's on the other.
        """
        return [slots[::page] // page for _ in manager.state_types]

    def run(self, members: slice = slice(None), *, senders_of: slice = slice(None)) -> list[int]:
        """Has it cross, and returns how many bytes each prefill rank sent.

        Args:
            members: the decode ranks that it goes to, such as those of one data-parallel group.
            senders_of: the prefill ranks that have it.
        """
        pair, room = self.pair, self.room
        managers, ranks = pair.decode.managers[members], self.ranks[1][members]
        senders = [pair.sender(each, room, tokens=self.tokens) for each in pair.prefill.managers[senders_of]]
        receivers = [pair.receiver(each, room, tokens=self.tokens, dp_rank=self.dp_rank) for each in managers]
        destinations = [self._slots(rank, 2) for rank in ranks]
        for receiver, rank, slots in zip(receivers, ranks, destinations, strict=True):
            pages = slots[self.held :: rank.page_slots] // rank.page_slots
            states = self._states(receiver.kv_mgr, slots[self.held :], rank.page)
            receiver.send_metadata(pages.astype(np.int32), 1, states, decode_prefix_len=self.held)
        wait(lambda: [each.poll() for each in senders], KVPoll.WaitingForInput)
        for sender, rank, slots in zip(senders, self.ranks[0][senders_of], self.sources[senders_of], strict=True):
            held = sender.pop_decode_prefix_len()
            assert held == self.held // rank.page_slots * rank.page_slots
            pages = (slots[held :: rank.page_slots] // rank.page_slots).astype(np.int32)
            sender.init(len(pages), 1)
            if len(pages) > 2:
                sender.send(pages[:2], None)
            sender.send(
                pages[2:] if len(pages) > 2 else pages, self._states(sender.kv_mgr, slots[held:], rank.page_slots)
            )
        wait(lambda: [each.poll() for each in receivers], KVPoll.Success)
        wait(lambda: [each.poll() for each in senders], KVPoll.Success)
        sent = [each.get_transfer_metric().transfer_total_bytes for each in senders]
        for sender in senders:
            sender.clear()
        for receiver in receivers:
            receiver.clear()
        for rank, slots in zip(ranks, destinations, strict=True):
            rank.check_slots(room, slots, self.held)
        return sent
