"""A decode rank that receives into host memory: SGLang's manager, sender and receiver, over host pools of SGLang's own.

SGLang restores what came there to the device by kernels that a CPU has not: that is not tried here.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.disaggregation.base.conn import KVArgs, KVPoll, KVTransferDestination
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host.group import HostPoolGroup, PoolEntry
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from tests.real_engines.sglang.crossings import Members, wait
from tests.real_engines.sglang.pool_ranks import HEAD_DIM, HEADS, LAYERS, PAGES, PoolRank, part
from tests.real_engines.sglang.ranks import DECODE, PREFILL, Model
from tests.real_engines.sglang.test_ranks import Pair, assert_fails, pair
from tests.support.waiting import eventually

from kvferry.engines.sglang.bootstrap import KVFerryBootstrapServer
from kvferry.errors import LayoutError
from kvferry.transport.inprocess import InProcessTransport

pytestmark = pytest.mark.timeout(60)

__all__ = ["pair"]  # a fixture

PAGE = 4
HOST_PAGES = 20


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What SGLang's pools ask of the rank that they are on."""
    monkeypatch.setattr(memory_pool, "get_parallel", lambda: SimpleNamespace(attn_dcp_size=1))


class HostRank(PoolRank):
    """A rank with pools of SGLang's: on its device, and, where it receives, in host memory."""

    def __init__(self, *, tp: int, tp_rank: int, window: bool, has_host: bool) -> None:
        common: dict[str, Any] = {
            "page_size": PAGE,
            "dtype": torch.float16,
            "head_num": max(1, HEADS // tp),
            "head_dim": HEAD_DIM,
            "device": "cpu",
            "enable_memory_saver": False,
            "enable_alt_stream": False,
        }
        size = (PAGES - 1) * PAGE
        if window:
            pool: Any = SWAKVPool(
                size,
                size,
                swa_attention_layer_ids=[0],
                full_attention_layer_ids=[1, 2],
                **common,
                token_to_kv_pool_class=MHATokenToKVPool,
            )
            self.device = {PoolName.KV: pool.full_kv_pool, PoolName.SWA: pool.swa_kv_pool}
        else:
            pool = MHATokenToKVPool(size, layer_num=LAYERS, **common)
            self.device = {PoolName.KV: pool}
        model = Model(heads=HEADS, page_tokens=PAGE, layers=LAYERS, window_tokens=2 * PAGE)
        super().__init__(model, pool, [], tp=tp, tp_rank=tp_rank)
        entries = [self._host(name, each) for name, each in self.device.items()] if has_host else []
        self.hosts = HostPoolGroup(entries) if has_host else None

    def _host(self, name: PoolName, device: MHATokenToKVPool) -> PoolEntry:
        host = MHATokenToKVPoolHost(
            device.get_device_pool_infos()[0].buffer_info,
            1.0,
            0,
            PAGE,
            "layer_first",
            pin_memory=False,
            device_capacity_tokens=HOST_PAGES * PAGE,
            start_layer=0,
            end_layer=device.layer_num,
            pool_label=name.value,
        )
        return PoolEntry(name, host, device, lambda layer: layer, is_primary_index_anchor=name is PoolName.KV)

    @property
    def arguments(self) -> KVArgs:
        """As SGLang's scheduler fills them in; what is about host pools is from its DecodePreallocQueue."""
        args = super().arguments
        if self.hosts is not None:
            device, there = self.hosts.get_contiguous_buf_infos({PoolName.KV})
            assert device == (args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens)
            args.host_kv_data_ptrs, args.host_kv_data_lens, args.host_kv_item_lens = there
            if args.state_types:
                _, there = self.hosts.get_contiguous_buf_infos({PoolName.SWA})
                args.host_state_data_ptrs, args.host_state_data_lens, args.host_state_item_lens = (
                    [each] for each in there
                )
        return args

    def pages(self, name: PoolName, destination: str) -> list[np.ndarray[Any, Any]]:
        """The buffers of one pool, page by page: (page, token, head, byte)."""
        if destination == "host":
            assert self.hosts is not None
            tensors = self.hosts.get_pool(name).host_kv_data_refs
        else:
            pool = self.device[name]
            tensors = pool.k_buffer + pool.v_buffer
        return [part(each, len(each) // PAGE, PAGE, len(each[0]), 2 * HEAD_DIM).bytes for each in tensors]

    def whole(self, name: PoolName, layer: int, page: int, seed: int) -> np.ndarray[Any, Any]:
        """What this rank has of one page of a request in one buffer."""
        random = np.random.default_rng([seed, list(PoolName).index(name), layer, page])
        return random.integers(0, 256, (PAGE, HEADS, 2 * HEAD_DIM), np.uint8)[:, list(self._heads(HEADS))]


class Crossing:
    """One request, whose cache arrives in host memory or on the device."""

    def __init__(self, pair: Members, room: int, destination: str, pages: int = 6) -> None:
        self.pair, self.room, self.destination = pair, room, destination
        self.ranks: list[list[Any]] = [[*side.ranks] for side in (pair.prefill, pair.decode)]
        random = np.random.default_rng(room)
        windows = PoolName.SWA in self.ranks[0][0].device
        self.of = {PoolName.KV: pages} | ({PoolName.SWA: 2} if windows else {})
        most = HOST_PAGES if destination == "host" else PAGES
        self.source = {name: random.permutation(PAGES)[:count] for name, count in self.of.items()}
        self.there = {name: random.permutation(most)[:count] for name, count in self.of.items()}
        for rank in self.ranks[0]:
            for name, numbers in self.source.items():
                for layer, buffer in enumerate(rank.pages(name, "device")):
                    for index, page in enumerate(numbers):
                        buffer[page] = rank.whole(name, layer, index, room)
            rank.rooms[1] = room
        for rank in self.ranks[1]:
            for name in self.of:
                for kind in ("device", "host"):
                    for buffer in rank.pages(name, kind):
                        buffer[:] = 77
        tokens = pages * PAGE
        self.senders = [pair.sender(each, room, tokens=tokens) for each in pair.prefill.managers]
        self.receivers = [pair.receiver(each, room, tokens=tokens) for each in pair.decode.managers]

    def ask(self) -> None:
        destination = KVTransferDestination(self.destination)
        for receiver in self.receivers:
            assert receiver.supports_host_destination
            receiver.send_metadata(
                self.there[PoolName.KV].astype(np.int32),
                1,
                self._window(self.there),
                decode_prefix_len=0,
                destination=destination,
            )
        wait(lambda: [each.poll() for each in self.senders], KVPoll.WaitingForInput)

    def send(self) -> None:
        for sender in self.senders:
            sender.init(self.of[PoolName.KV], 1)
            pages = self.source[PoolName.KV].astype(np.int32)
            sender.send(pages[:2], None)
            sender.send(pages[2:], self._window(self.source))

    def _window(self, side: dict[PoolName, Any]) -> list[Any]:
        return [side[PoolName.SWA].astype(np.int32)] if PoolName.SWA in side else []

    def run(self) -> None:
        self.ask()
        self.send()
        wait(lambda: [each.poll() for each in self.receivers], KVPoll.Success)
        wait(lambda: [each.poll() for each in self.senders], KVPoll.Success)
        for sender in self.senders:
            sender.clear()
        for receiver in self.receivers:
            receiver.clear()
        self.check()

    def check(self) -> None:
        for rank in self.ranks[1]:
            for name, numbers in self.there.items():
                for layer, buffer in enumerate(rank.pages(name, self.destination)):
                    for index, page in enumerate(numbers):
                        np.testing.assert_array_equal(buffer[page], rank.whole(name, layer, index, self.room))
                    others = [page for page in range(len(buffer)) if page not in numbers]
                    assert (buffer[others] == 77).all()
                for buffer in rank.pages(name, "device" if self.destination == "host" else "host"):
                    assert (buffer == 77).all()


def begin(pair: Pair, prefill_tp: int = 1, decode_tp: int = 1, *, window: bool = False) -> None:
    for mode, tp in ((PREFILL, prefill_tp), (DECODE, decode_tp)):
        for tp_rank in range(tp):
            rank = HostRank(tp=tp, tp_rank=tp_rank, window=window, has_host=mode is DECODE)
            pair.model = rank.model
            pair.start(mode, rank)


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (2, 1), (1, 2), (4, 2)])
@pytest.mark.parametrize("path", ["direct", "staged"])
@pytest.mark.parametrize("window", [False, True], ids=["full", "windows"])
def test_a_cache_arrives_where_sglang_wants_it(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, path: str, prefill_tp: int, decode_tp: int, window: bool
):
    monkeypatch.setenv("KVFERRY_PATH", path)
    begin(pair, prefill_tp, decode_tp, window=window)
    assert all(each.supports_host_destination for each in pair.decode.managers)
    for room, destination in enumerate(["host", "device", "host"], 1):
        Crossing(pair, room, destination).run()
    Crossing(pair, 1, "device").run()  # the number again, elsewhere


def test_host_pages_are_kept_until_nobody_writes(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    """SGLang's limit on that wait is for the device alone: a receiver says itself when host pages are safe."""
    begin(pair)
    crossing = Crossing(pair, 1, "host")
    crossing.ask()
    (receiver,) = crossing.receivers
    with monkeypatch.context() as hanging:
        hanging.setattr(InProcessTransport, "poll", lambda *_: None)
        crossing.send()
        wait(lambda: [each.poll() for each in crossing.senders], KVPoll.Transferring)
        receiver.abort()
        assert_fails(lambda: [receiver.poll()], [receiver], "Aborted")
        assert not receiver.is_abort_release_safe()
    eventually("the write has ended", receiver.is_abort_release_safe)
    receiver.clear()


def test_a_rank_without_host_pools_says_so(pair: Pair):
    """SGLang refuses to start with the option on then."""
    pair.begin(Model())
    (manager,) = pair.decode.managers
    receiver = pair.receiver(manager, 1)
    assert not manager.supports_host_destination
    assert not receiver.supports_host_destination
    receiver.send_metadata(np.arange(3, dtype=np.int32), 0, destination=KVTransferDestination.HOST)
    assert_fails(lambda: [receiver.poll()], [receiver], "did not say where a request's cache could be in host memory")


def test_host_pages_of_other_bytes_are_refused(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    get = HostPoolGroup.get_contiguous_buf_infos

    def halved(group: HostPoolGroup, names: Any) -> Any:
        device, (pointers, lengths, items) = get(group, names)
        return device, (pointers, lengths, [each // 2 for each in items])

    monkeypatch.setattr(HostPoolGroup, "get_contiguous_buf_infos", halved)
    with pytest.raises(LayoutError, match=r"host-receive-threshold: pages of keys and values have .* leave it at 1"):
        begin(pair)


def test_pages_are_kept_where_their_number_is_used_again_at_the_other_endpoint(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
):
    """A write of the first prefill server hangs, and a gateway tries again at another: its success freed the pages."""
    begin(pair)
    monkeypatch.setenv("KVFERRY_REGISTRY_HOST", "127.0.0.2")
    bootstrap = KVFerryBootstrapServer("127.0.0.2", pair.port)
    other = Members(monkeypatch, pair.port, pair.model, host="127.0.0.2")
    try:
        other.start(PREFILL, HostRank(tp=1, tp_rank=0, window=False, has_host=False))
        other.decode = pair.decode
        first = Crossing(pair, 1, "device")
        first.ask()
        (receiver,), (manager,) = first.receivers, pair.decode.managers
        hung, poll = pair.prefill.managers[0].prefill.transport, InProcessTransport.poll
        with monkeypatch.context() as hanging:
            hanging.setattr(
                InProcessTransport, "poll", lambda each, *given: None if each is hung else poll(each, *given)
            )
            first.send()
            wait(lambda: [each.poll() for each in first.senders], KVPoll.Transferring)
            receiver.abort()
            assert_fails(lambda: [receiver.poll()], [receiver], "Aborted")
            second = Crossing(other, 1, "host")
            second.ask()
            second.send()
            wait(lambda: [each.poll() for each in second.receivers], KVPoll.Success)
            for each in second.receivers:
                each.clear()
            assert not receiver.is_abort_release_safe()
            assert not manager.is_abort_release_safe(1, 0)
        eventually("the write has ended", manager.is_abort_release_safe, 1, 0)
        manager.clear_deferred_abort_state(1)
        assert not manager._receivers
    finally:
        other.close()
        bootstrap.close()
