"""SGLang's manager, sender and receiver between unequal ranks, each in a process of its own, over NIXL."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sglang.srt.disaggregation.base.conn import KVPoll
from tests.real_engines.sglang.crossings import wait
from tests.real_engines.sglang.processes import START_S, RankProcess

from kvferry.applications.up.supervision import free_ports
from kvferry.engines.sglang.bootstrap import KVFerryBootstrapServer

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(params=[(2, 1), (1, 2)], ids=["2 to 1", "1 to 2"])
def ranks(request: pytest.FixtureRequest) -> Iterator[tuple[list[RankProcess], list[RankProcess]]]:
    prefill_tp, decode_tp = request.param
    (port,) = free_ports(1)
    bootstrap = KVFerryBootstrapServer("127.0.0.1", port)
    prefill = [RankProcess("prefill", port, prefill_tp, rank) for rank in range(prefill_tp)]
    decode = [RankProcess("decode", port, decode_tp, rank) for rank in range(decode_tp)]
    try:
        for each in (*prefill, *decode):
            each.answer(START_S)
        yield prefill, decode
    finally:
        for each in (*decode, *prefill):
            each.close()
        bootstrap.close()


def test_caches_arrive(ranks: tuple[list[RankProcess], list[RankProcess]]):
    prefill, decode = ranks

    def polls(side: list[RankProcess], what: str) -> list[int]:
        return [min(each.do(what)) for each in side]

    for room in range(1, 5):
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
