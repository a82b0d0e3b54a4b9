"""Requests that cross between ranks of SGLang's, handled as its two schedulers handle them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sglang.srt.disaggregation.base.conn import KVPoll
from tests.real_engines.sglang.ranks import PREFILL, SERVER_ARGS, Model, Rank, Whole, place, plug_in
from tests.support.waiting import eventually

from kvferry.engines.sglang.conditions import around_requests
from kvferry.engines.sglang.manager import KVFerryManager
from kvferry.engines.sglang.pools import around_managers
from kvferry.engines.sglang.receiver import KVFerryReceiver
from kvferry.engines.sglang.sender import KVFerrySender

WAIT_S = 20.0


@dataclass
class Side:
    """The ranks of one engine."""

    ranks: list[Rank]
    managers: list[KVFerryManager]


class Members:
    """Ranks of a prefill and a decode engine: all of them, or those that this process has."""

    def __init__(self, patch: pytest.MonkeyPatch, port: int, model: Model, *, host: str = "127.0.0.1") -> None:
        plug_in()
        self._patch, self.host, self.port, self.model = patch, host, port, model
        self._begun: list[KVFerryManager] = []
        self.prefill, self.decode = Side([], []), Side([], [])

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def start(self, mode: Any, rank: Rank, *, pp: int = 1, stage: int = 0) -> None:
        """Starts one rank."""
        where = {"tp": rank.tp, "tp_rank": rank.tp_rank, "pp": pp, "pp_rank": stage, **rank.options, "host": self.host}

        def make(_: Any) -> KVFerryManager:
            args = rank.arguments
            args.pp_rank = stage
            return KVFerryManager(args, mode, SERVER_ARGS, rank.model.heads is None)

        with place(self._patch, self.port, rank.model, **where):
            manager = around_managers(make, SimpleNamespace(scheduler=rank.scheduler))
        self._begun.append(manager)
        side = self.prefill if mode is PREFILL else self.decode
        side.ranks.append(rank)
        side.managers.append(manager)

    def sender(self, manager: KVFerryManager, room: int, *, tokens: int = 3) -> KVFerrySender:
        rank = self.prefill.ranks[self.prefill.managers.index(manager)]
        where = {"tp": rank.tp, "tp_rank": rank.tp_rank, "pp": 1, "pp_rank": 0, **rank.options}
        with place(self._patch, self.port, self.model, **where):
            sender: KVFerrySender = self._made(room, lambda: KVFerrySender(manager, self.address, room), tokens=tokens)
            return sender

    def receiver(
        self, manager: KVFerryManager, room: int, *, tokens: int = 3, salt: str | None = None, dp_rank: int = 0
    ) -> KVFerryReceiver:
        eventually("the prefill server is found", lambda: manager.try_ensure_parallel_info(self.address))
        receiver = self.waiting_receiver(manager, room, tokens=tokens, salt=salt)
        receiver.init(dp_rank)
        return receiver

    def waiting_receiver(
        self, manager: KVFerryManager, room: int, *, tokens: int = 3, salt: str | None = None
    ) -> KVFerryReceiver:
        """One whose prefill server SGLang has not looked up."""
        receiver: KVFerryReceiver = self._made(
            room, lambda: KVFerryReceiver(manager, self.address, room), tokens=tokens, salt=salt
        )
        return receiver

    def _made(self, room: int, make: Callable[[], Any], *, tokens: int, salt: str | None = None) -> Any:
        """Makes a sender or a receiver, as SGLang does for a request."""
        req = SimpleNamespace(
            origin_input_ids=[room, *range(1, tokens)],
            output_ids=[],
            input_embeds=None,
            multimodal_inputs=None,
            lora_id=None,
            extra_key=None,
            cache_salt=salt,
        )
        return around_requests(lambda: True)(lambda *_: make(), SimpleNamespace(scheduler=None), req)

    def close(self) -> None:
        for manager in self._begun:
            manager.close()


def wait(polls: Callable[[], list[int]], expected: int) -> None:
    """Polls like a scheduler, which takes the least of all ranks, until that is the expected."""
    deadline = time.monotonic() + WAIT_S
    while (least := min(polls())) != expected:
        assert least != KVPoll.Failed, "it failed"
        assert time.monotonic() < deadline, f"the ranks stand at {polls()}"
        time.sleep(0.002)


class Request:
    """A request that crosses, as SGLang's two schedulers handle it.

    Attributes:
        tokens: of the whole prompt.
        held_tokens: of those, the first ones that the decode side has already, in whole pages of its own.
        pages: of the whole prompt on the prefill side.
        held_pages: of those, the ones that the prefill side need not send.
    """

    def __init__(
        self,
        pair: Members,
        room: int,
        pages: int = 7,
        *,
        held_pages: int = 0,
        tokens: int | None = None,
        held_tokens: int | None = None,
        dp_rank: int = 0,
        dp_size: int = 1,
    ) -> None:
        """Opens it on both sides.

        Args:
            dp_rank: of the prefill side's data-parallel replicas, each of which is one rank where there are several.
            tokens: that the prompt has; so many pages if None.
            held_tokens: as above; so many pages if None.
        """
        self.pair, self.room = pair, room
        model = pair.model
        self.tokens = pages * model.page_tokens if tokens is None else tokens
        self.held_tokens = held_pages * model.page_tokens if held_tokens is None else held_tokens
        self.pages, self.held_pages = -(-self.tokens // model.page_tokens), self.held_tokens // model.page_tokens
        self.whole = Whole(model, self.tokens, seed=room)
        random = np.random.default_rng(room)

        def draw(page_tokens: int, start: int) -> list[int]:
            """Pages for the tokens from `start` on."""
            count = -(-self.tokens // page_tokens) - start // page_tokens
            return [int(page) for page in random.permutation(40)[: max(0, count)]]

        def window(page_tokens: int, held: int) -> list[int]:
            start = max(held, self.tokens - model.window_tokens)
            return draw(page_tokens, start) if model.window_layers else []

        here = model.page_tokens
        there = pair.decode.ranks[0].model.page_tokens if pair.decode.ranks else here
        self.source: list[Any] = [draw(here, 0), window(here, self.held_pages * here), 2]
        self.destination: list[Any] = [draw(there, self.held_tokens), window(there, self.held_tokens), 4]
        self.aux_index = room % 8
        mine = slice(None) if dp_size == 1 else slice(dp_rank, dp_rank + 1)
        for rank in pair.prefill.ranks[mine]:
            rank.fill(self.whole, *self.source)
            rank.rooms[self.aux_index] = room
            rank.tokens[self.aux_index] = 17 + room
        self.senders = [pair.sender(manager, room, tokens=self.tokens) for manager in pair.prefill.managers[mine]]
        self.receivers = [
            pair.receiver(manager, room, tokens=self.tokens, dp_rank=dp_rank) for manager in pair.decode.managers
        ]

    def state_indices(self, side: list[Any]) -> list[Any]:
        model = self.pair.model
        return [side[1]] * bool(model.window_layers) + [[side[2]]] * bool(model.state_layers)

    def ask(self) -> None:
        for receiver in self.receivers:
            receiver.send_metadata(
                np.array(self.destination[0], np.int32),
                self.aux_index,
                self.state_indices(self.destination),
                decode_prefix_len=self.held_tokens,
            )

    def send(self, *, cut: int = 3) -> None:
        """In two chunks, as with chunked prefill: what the decode side does not hold."""
        model = self.pair.model
        held = self.held_pages if model.layers or model.window_layers else 0  # pages that nothing is in are no prefix
        pages = self.source[0][held:]
        cut = min(cut, max(0, len(pages) - 1))
        for sender in self.senders:
            assert sender.pop_decode_prefix_len() == held * model.page_tokens
            sender.init(len(pages), self.aux_index)
            if sender.should_send_kv_chunk(cut, False):
                sender.send(np.array(pages[:cut], np.int32), None)
            sender.send(np.array(pages[cut:], np.int32), self.state_indices(self.source))

    def sent(self) -> list[int]:
        return [sender.poll() for sender in self.senders]

    def received(self) -> list[int]:
        return [receiver.poll() for receiver in self.receivers]

    def run(self) -> None:
        assert set(self.sent()) == {KVPoll.Bootstrapping}
        wait(self.received, KVPoll.WaitingForInput)
        self.ask()
        wait(self.sent, KVPoll.WaitingForInput)
        self.send()
        wait(self.received, KVPoll.Success)
        wait(self.sent, KVPoll.Success)
        self.check()
        self.clear()

    def clear(self) -> None:
        for sender in self.senders:
            sender.clear()
        for receiver in self.receivers:
            receiver.clear()

    def check(self) -> None:
        for rank in self.pair.decode.ranks:
            rank.check(self.whole, *self.destination, held_tokens=self.held_tokens)
            assert rank.rooms[self.aux_index, 0] == self.room
            assert rank.tokens[self.aux_index, 0] == 17 + self.room
