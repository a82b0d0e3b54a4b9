"""Ranks over pools of SGLang's own, and requests that cross between them: what SGLang cannot compute on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sglang.srt.disaggregation import utils
from sglang.srt.disaggregation.base.conn import KVArgs, KVPoll, StateType
from tests.real_engines.sglang.crossings import wait
from tests.real_engines.sglang.ranks import DECODE, PREFILL, Model, Rank
from tests.real_engines.sglang.test_ranks import Pair, assert_fails

from kvferry.engines.sglang.pools import around_managers

PAGES, LAYERS, HEADS, HEAD_DIM = 12, 3, 4, 64
SLOTS = 6
SIZES = [(1, 1), (2, 1), (1, 2), (4, 2)]


@dataclass(frozen=True)
class Part:
    """A buffer of a pool.

    Attributes:
        bytes: its items, of which each is a page, or the slot of a request.
        heads: the axis that ranks divide; None where each has all.
        of: what its items are numbered by.
        total: how many heads there are on all ranks.
        label: tells its content from others'; None for its number on the rank.
        first: the number of its first item.
    """

    bytes: np.ndarray[Any, Any]
    heads: int | None = None
    of: str = "pages"
    total: int = HEADS
    label: int | None = None
    first: int = 0


def part(tensor: torch.Tensor, *shape: int, heads: int | None = None, of: str = "pages") -> Part:
    return Part(tensor.view(torch.uint8).numpy().reshape(shape or tuple(tensor.view(torch.uint8).shape)), heads, of)


def by_token(
    tensor: torch.Tensor, page: int, *, heads: int | None = 1, of: str = "pages", first: int = 0, count: int = PAGES
) -> Part:
    """So many pages of a buffer with tokens before heads, which other layers may lie between."""
    pages = tensor.view(torch.uint8).unflatten(0, (-1, page))[first : first + count]
    return Part(pages.numpy(), heads, of, first=first)


def items(tensor: torch.Tensor, rows: int, *, of: str = "pages") -> Part:
    """A buffer whose items are so many rows of it; those that are no whole item belong to nobody."""
    whole = tensor[: len(tensor) // rows * rows].view(torch.uint8)
    return Part(whole.reshape(len(whole) // rows, -1).numpy(), None, of)


class PoolRank(Rank):
    """A rank with a pool of SGLang's, and perhaps one of a draft model's.

    Attributes:
        first_window, first_slot: where a request's window and its slot may begin, in one region with its pages.
    """

    first_window = first_slot = 0

    def __init__(
        self,
        model: Model,
        pool: Any,
        parts: Sequence[Part],
        *,
        tp: int,
        tp_rank: int,
        draft: Any = None,
        requests: Any = None,
    ) -> None:
        super().__init__(model, tp=tp, tp_rank=tp_rank)
        self.pool, self.parts, self.draft, self.requests = pool, parts, draft, requests

    @property
    def arguments(self) -> KVArgs:
        """As SGLang's scheduler fills them in, by SGLang's own functions."""
        args = super().arguments
        args.page_size = self.pool.page_size
        args.kv_layout = utils.get_pd_kv_layout(self.pool)
        lists = [list(each) for each in self.listed()]
        if self.draft is not None:
            of_draft = self.draft.get_contiguous_buf_infos()
            args.num_draft_entries = len(of_draft[0])
            lists = [one + list(other) for one, other in zip(lists, of_draft, strict=True)]
        args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens = lists
        queue = SimpleNamespace(scheduler=SimpleNamespace(sliding_window_size=self.model.window_tokens))
        around_managers(lambda _: utils.setup_state_kv_args(args, self.pool, self.draft, LAYERS, self.requests), queue)
        return args

    def listed(self) -> Sequence[Any]:
        """What SGLang lists of keys and values, or of latents."""
        return utils.get_kv_transfer_buf_infos(self.pool)  # type: ignore[no-any-return]

    def content(self, seed: int, number: int, item: int) -> np.ndarray[Any, Any]:
        """What this rank has of one item of one buffer."""
        each = self.parts[number]
        shape = list(each.bytes.shape[1:])
        if each.heads is not None:
            shape[each.heads] = each.total
        label = number if each.label is None else each.label
        whole: np.ndarray[Any, Any] = np.random.default_rng([seed, label, item]).integers(0, 256, shape, np.uint8)
        return whole if each.heads is None else whole.take(self._heads_of(each), each.heads)

    def _heads_of(self, each: Part) -> range:
        return self._heads(each.total)


class Crossing:
    """One request, in chunks, and what SGLang hands in for it.

    Attributes:
        asks_for: where the decode side's keys and values are to go.
    """

    asks_for = "pages"

    def __init__(self, pair: Pair, room: int, pages: int, *, held: int = 0, tokens: int | None = None) -> None:
        """Begins it.

        Args:
            held: pages that the decode side has already.
            tokens: that the prompt has; so many pages if None.
        """
        self.pair, self.room, self.held = pair, room, held
        random = np.random.default_rng(room)
        model = pair.model
        self.tokens = pages * model.page_tokens if tokens is None else tokens
        first = max(held * model.page_tokens, self.tokens - model.window_tokens, 0) // model.page_tokens
        self.ranks: list[list[Any]] = [[*side.ranks] for side in (pair.prefill, pair.decode)]
        self.sides: list[dict[str, Any]] = [
            {
                "pages": random.permutation(PAGES)[:pages],
                "window": random.permutation(PAGES)[: pages - first] + ranks[0].first_window,
                "slots": [slot + ranks[0].first_slot],
            }
            for ranks, slot in zip(self.ranks, (2, 4), strict=True)
        ]
        for side, ranks in zip(self.sides, self.ranks, strict=True):
            if getattr(ranks[0].pool, "compress_state_pools", None):
                side |= self._compressed(ranks[0].pool, side, first)
        for rank in self.ranks[0]:
            for number, each in enumerate(rank.parts):
                each.bytes[:] = 55
                for index, item in enumerate(self.sides[0][each.of]):
                    each.bytes[item - each.first] = rank.content(room, number, index)
            rank.rooms[1] = room
        for rank in self.ranks[1]:
            for each in rank.parts:
                each.bytes[:] = 77

    def _compressed(self, pool: Any, side: dict[str, Any], first: int) -> dict[str, list[int]]:
        """Where DeepSeek V4 keeps a request's last tokens, by SGLang's own functions.

        Args:
            first: how many of the request's pages come before those of its window.
        """
        (slot,), page = side["slots"], pool.swa_page_size
        found = {"pending": pool.request_state_transfer_indices(slot, self.tokens).tolist()}
        positions = np.arange(self.tokens)
        if pool._unified_kv:
            ring = pool.unified_swa_ring_size
            found["ring"] = [slot * ring + each % ring for each in positions[-pool.sliding_window :].tolist()]
        for state in pool.compress_state_pools:
            of_request = [torch.full((self.tokens,), slot), torch.from_numpy(positions)]
            if state is not None and state.ratio == 2:
                where = state.translate_from_req_position_to_state_loc(*of_request)
                found["pair"] = where[-2:].tolist() if self.tokens % 2 else []
            elif state is not None and state.ratio == 4 and pool._unified_kv:
                found["overlap"] = state.translate_from_req_position_to_state_loc(*of_request)[-8:].tolist()
            elif state is not None and state.ratio == 4:
                found["overlap"] = []
                for number, of_window in enumerate(side["window"].tolist(), first):
                    here = of_window * page + positions[number * page : (number + 1) * page][-8:] % page
                    found["overlap"] += state.translate_from_swa_loc_to_state_loc(torch.from_numpy(here)).tolist()
        return found

    def states(self, manager: Any, side: int) -> list[Any]:
        """As SGLang's scheduler hands them in."""
        given = self.sides[side]
        by_type = {
            StateType.DSA: given["pages"][self.held :],
            StateType.DSA_TAIL: [given["slots"][0], 1, 1, 0, 0, 3],
            StateType.BLOCK_SCALE: given["pages"],
            StateType.BLOCK_SCALE_SWA: given["window"],
            StateType.SWA: given["window"],
            StateType.SWA_RING: self._places(side),
            StateType.DSV4_REQUEST_STATE: np.array(given.get("pending", []), np.int32),
            StateType.REQUEST_ROW: np.array(given["slots"], np.int32),
            StateType.MAMBA: [np.array(given["slots"], np.int32)],
            StateType.QSA_PENDING: np.array(given["slots"], np.int32),
            StateType.QSA_COMPRESSED: given["pages"],
            StateType.MINIMAX_INDEX_K: given["pages"][self.held :],
            StateType.MINIMAX_DENSE_KV: given["pages"],
        }
        return [by_type[each] for each in manager.state_types]

    def _places(self, side: int) -> np.ndarray[Any, Any]:
        """The places of a window in the request's ring, by position."""
        pool = self.ranks[side][0].pool
        places = getattr(pool, "unified_swa_ring_size", 1)
        positions = np.arange(max(0, self.tokens - self.pair.model.window_tokens), self.tokens)
        in_ring: np.ndarray[Any, Any] = self.sides[side]["slots"][0] * places + positions % places
        return in_ring.astype(np.int32)

    def run(self) -> None:
        pair, room = self.pair, self.room
        prefix = self.held * pair.model.page_tokens
        senders = [pair.sender(each, room, tokens=self.tokens) for each in pair.prefill.managers]
        receivers = [pair.receiver(each, room, tokens=self.tokens) for each in pair.decode.managers]
        for receiver in receivers:
            pages = np.array(self.sides[1][self.asks_for][self.held :], np.int32)
            receiver.send_metadata(pages, 1, self.states(receiver.kv_mgr, 1), decode_prefix_len=prefix)
        wait(lambda: [each.poll() for each in senders], KVPoll.WaitingForInput)
        for sender in senders:
            pages = np.array(self.sides[0]["pages"][self.held :], np.int32)
            assert sender.pop_decode_prefix_len() == prefix
            sender.init(len(pages), 1)
            begun = max(0, min(2, len(pages) - 1))
            sender.send(pages[:begun], None)
            sender.send(pages[begun:], self.states(sender.kv_mgr, 0))
        wait(lambda: [each.poll() for each in receivers], KVPoll.Success)
        wait(lambda: [each.poll() for each in senders], KVPoll.Success)
        for sender in senders:
            sender.clear()
        for receiver in receivers:
            receiver.clear()
        for rank in self.ranks[1]:
            for number, each in enumerate(rank.parts):
                skipped = self.held if each.of == "pages" else 0
                arrived = [item - each.first for item in self.sides[1][each.of][skipped:]]
                for index, item in enumerate(arrived):
                    np.testing.assert_array_equal(each.bytes[item], rank.content(room, number, skipped + index))
                others = [item for item in range(len(each.bytes)) if item not in arrived]
                assert (each.bytes[others] == 77).all()


def begin(pair: Pair, make: Any, prefill_tp: int, decode_tp: int, **decode: Any) -> None:
    for mode, tp, changes in ((PREFILL, prefill_tp, {}), (DECODE, decode_tp, decode)):
        for tp_rank in range(tp):
            rank = make(tp=tp, tp_rank=tp_rank, **changes)
            pair.model = rank.model if mode is PREFILL else pair.model
            pair.start(mode, rank)


def assert_request_fails(pair: Pair, words: str) -> None:
    """Asserts that a request fails, since the two sides cannot exchange caches, and what is said."""
    (manager,) = pair.decode.managers
    pair.sender(pair.prefill.managers[0], 1)
    receiver = pair.receiver(manager, 1, tokens=16)
    if receiver.poll() != KVPoll.Failed:
        receiver.send_metadata(np.array([0], np.int32), 1, [[0]] * len(manager.state_types))
    assert_fails(lambda: [receiver.poll()], [receiver], words)
