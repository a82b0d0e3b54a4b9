"""A prefill rank, and a decode rank with SGLang's own NIXL that has found it. `test_mixed` has whole engines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import KVTransferError
from sglang.srt.disaggregation.nixl.conn import NixlKVManager
from sglang.srt.utils.network import NetworkAddress
from tests.real_engines.sglang.crossings import WAIT_S, Request, wait
from tests.real_engines.sglang.ranks import Model
from tests.real_engines.sglang.test_ranks import Pair, pair
from tests.support.waiting import eventually

from kvferry.engines.sglang.manager import KVFerryManager

pytestmark = pytest.mark.timeout(40)

__all__ = ["pair"]  # a fixture


ROOM = 7


class StockDecodeRank:
    """What such a rank says to a prefill rank, as far as the prefill rank looks, and what it hears."""

    def __init__(self, prefill: KVFerryManager) -> None:
        self._context = zmq.Context()
        self._answers, self._to_prefill = self._context.socket(zmq.PULL), self._context.socket(zmq.PUSH)
        self._port = self._answers.bind_to_random_port("tcp://127.0.0.1")
        self._to_prefill.connect(NetworkAddress(prefill.local_ip, prefill.rank_port).to_tcp())

    def say(self, *frames: bytes) -> None:
        self._to_prefill.send_multipart(frames)

    def ask(self, room: int) -> None:
        self.say(b"NixlMsgGuard", b"None", b"127.0.0.1", b"%d" % self._port, b"agent", b"its memory")
        self.say(b"NixlMsgGuard", b"%d" % room, b"127.0.0.1", b"%d" % self._port, b"agent", b"pages")

    def heard(self) -> tuple[int, int, str]:
        assert self._answers.poll(round(WAIT_S * 1000)), "no answer"
        tag, room, status, _, reason = self._answers.recv_multipart()
        assert tag == NixlKVManager.kv_status_msg_tag
        return int(room), int(status), reason.decode()

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def stock_rank(pair: Pair) -> Iterator[StockDecodeRank]:
    pair.begin(Model())
    rank = StockDecodeRank(pair.prefill.managers[0])
    yield rank
    rank.close()


@pytest.mark.parametrize("comes", ["first", "second"])
def test_a_decode_rank_without_kvferry_is_answered(pair: Pair, stock_rank: StockDecodeRank, comes: str):
    (manager,) = pair.prefill.managers
    before = pair.sender(manager, ROOM) if comes == "second" else None
    stock_rank.say(b"NixlMsgGuard", b"no number", b"10.0.0.1", b"1")
    stock_rank.ask(ROOM)
    room, status, reason = stock_rank.heard()
    assert (room, status) == (ROOM, KVPoll.Failed)
    assert "the decode server at 127.0.0.1 uses SGLang's own nixl, and the prefill server kvferry" in reason
    sender = before or pair.sender(manager, ROOM)
    eventually("it has failed", lambda: sender.poll() == KVPoll.Failed)
    with pytest.raises(KVTransferError, match="uses SGLang's own nixl, and the prefill server kvferry"):
        sender.failure_exception()


def test_a_decode_rank_without_kvferry_ends_no_room_of_one_with_it(pair: Pair, stock_rank: StockDecodeRank):
    request = Request(pair, ROOM)
    request.ask()
    wait(request.sent, KVPoll.WaitingForInput)
    stock_rank.ask(ROOM)
    stock_rank.heard()
    request.send()
    wait(request.received, KVPoll.Success)
    request.check()
    request.clear()
    Request(pair, ROOM).run()


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_SECRET", "a secret that only these tests have")


@pytest.mark.usefixtures("secret")
def test_with_a_secret_a_decode_rank_without_kvferry_ends_no_room(pair: Pair, stock_rank: StockDecodeRank):
    stock_rank.ask(ROOM)
    stock_rank.heard()
    Request(pair, ROOM).run()
