"""SGLang's manager, sender and receiver between unequal ranks, each in a process of its own, over NIXL."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from sglang.srt.disaggregation.base.conn import KVPoll
from tests.real_engines.sglang.crossings import wait
from tests.real_engines.sglang.processes import START_S, RankProcess

from kvferry.applications.up.supervision import free_ports
from kvferry.engines.sglang.bootstrap import KVFerryBootstrapServer

pytestmark = [pytest.mark.servers, pytest.mark.full, pytest.mark.timeout(600)]


Sides = tuple[list[RankProcess], list[RankProcess]]


@contextmanager
def started(prefill_tp: int, decode: Sequence[tuple[int, int, Mapping[str, Any]]]) -> Iterator[Sides]:
    """Ranks of both sides.

    Args:
        decode: the tensor-parallel size and rank of each decode rank, and what SGLang's code is told about it.
    """
    (port,) = free_ports(1)
    bootstrap = KVFerryBootstrapServer("127.0.0.1", port)
    of_prefill = [RankProcess("prefill", port, prefill_tp, rank) for rank in range(prefill_tp)]
    of_decode = [RankProcess("decode", port, *each) for each in decode]
    try:
        for each in (*of_prefill, *of_decode):
            each.answer(START_S)
        yield of_prefill, of_decode
    finally:
        for each in (*of_decode, *of_prefill):
            each.close()
        bootstrap.close()


def cross(prefill: list[RankProcess], decode: list[RankProcess], room: int) -> None:
    """Has a request cross from all ranks of one side to all of these of the other."""

    def polls(side: list[RankProcess], what: str) -> list[int]:
        return [min(each.do(what)) for each in side]

    for each in (*prefill, *decode):
        each.do("begin", room)
    wait(lambda: polls(decode, "received"), KVPoll.WaitingForInput)
    for each in decode:
        each.do("ask")
    wait(lambda: polls(prefill, "sent"), KVPoll.WaitingForInput)
    for each in prefill:
        each.do("send")
    wait(lambda: polls(decode, "received"), KVPoll.Success)
    wait(lambda: polls(prefill, "sent"), KVPoll.Success)
    for each in decode:
        each.do("check")
    for each in (*prefill, *decode):
        each.do("clear")


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 1), (1, 2)], ids=["2 to 1", "1 to 2"])
def test_caches_arrive(prefill_tp: int, decode_tp: int):
    with started(prefill_tp, [(decode_tp, rank, {}) for rank in range(decode_tp)]) as (prefill, decode):
        for room in range(1, 5):
            cross(prefill, decode, room)


def test_tensor_parallel_ranks_send_to_each_group_of_data_parallel_attention():
    """TP 4 to 4 groups of one rank each, as with DP 4, TP 4 and EP 4: experts are divided, and no cache."""
    groups = [(1, 0, {"attn_dp_size": 4, "attn_dp_rank": rank, "num_dp_ranks": 4, "tp_size": 4}) for rank in range(4)]
    with started(4, groups) as (prefill, decode):
        for room in range(1, 9):
            cross(prefill, [decode[room % 4]], room)
