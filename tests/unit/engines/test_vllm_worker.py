"""What a worker reports after a step, and which pages it makes of blocks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from tests.support.engines import new_engine_name
from tests.support.waiting import eventually

from kvferry import GroupPages, RankCoordinates, Settings, TransferState, attention_components, shard_from_tensors
from kvferry.engines.layer_ranges import LayerRanges
from kvferry.engines.vllm import worker as worker_module
from kvferry.engines.vllm.layouts import DescribedCaches
from kvferry.engines.vllm.stats import MEMORY, NOT_OPENED
from kvferry.engines.vllm.steps import BlocksToReceive, BlocksToSend, GroupBlocks, Step
from kvferry.engines.vllm.worker import WorkerSide
from kvferry.errors import QueueFullError, TransferError
from kvferry.layout import Device, MemoryKind, RankLayout
from kvferry.testing import LocalNetwork

PAGE_TOKENS = 16


class Receiver:
    """As much of a room as it takes; counts how often it is looked at."""

    def __init__(self, pages: dict[str, GroupPages]) -> None:
        self.pages = pages
        self.state = TransferState.WAITING_FOR_INPUT
        self.error: Exception | None = None
        self.looks = 0
        self.callbacks: list[Callable[[], None]] = []
        self._are_pages_reusable = False

    @property
    def pages_reusable(self) -> bool:
        self.looks += 1
        return self._are_pages_reusable

    @property
    def stats(self) -> Any:
        class Stats:
            opened_at, ended_at = 1.0, 2.0

        return Stats()

    def add_change_callback(self, callback: Callable[[], None]) -> None:
        self.callbacks.append(callback)

    def abort(self, reason: str) -> None:
        pass  # as where it has ended

    def end(self, state: TransferState, *, pages_reusable: bool = True) -> None:
        self.state, self._are_pages_reusable = state, pages_reusable
        for callback in self.callbacks:
            callback()


class Decode:
    """As much of an endpoint as it takes."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.opened: list[Receiver] = []
        self.expected: list[tuple[int, str]] = []
        self.refused: list[int] = []
        self.is_full = False
        self.quarantined_pages = 0
        self.end_at_once: TransferState | None = None

    def open(self, room: int, pages: dict[str, GroupPages], **_: Any) -> Receiver:
        if self.is_full:
            raise QueueFullError("so many rooms are open")
        receiver = Receiver(pages)
        if self.end_at_once is not None:
            receiver.end(self.end_at_once)
        self.opened.append(receiver)
        return receiver

    def expect(self, room: int, *, engine: str) -> None:
        self.expected.append((room, engine))

    def refuse(self, room: int, reason: str, *, engine: str) -> None:
        self.refused.append(room)

    def close(self) -> None:
        pass

    def status(self) -> Any:
        return SimpleNamespace(quarantined_pages=self.quarantined_pages)


def described(pages_per_block: int) -> DescribedCaches:
    (component, _) = attention_components(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32")
    tensor = np.zeros((64, PAGE_TOKENS, 1, 8), np.float32)
    shard = shard_from_tensors(component, [tensor], dims=("page", "token", "head", "dim"))
    layout = RankLayout(shards=(shard,))
    return DescribedCaches(layout, {group.name: pages_per_block for group in layout.groups})


Started = tuple[WorkerSide, Decode, str]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Started]:
    monkeypatch.setattr(worker_module, "DecodeEndpoint", Decode)

    def started(pages_per_block: int = 1) -> Started:
        caches = described(pages_per_block)
        side = WorkerSide(
            caches,
            RankCoordinates(),
            Settings(),
            engine="e",
            sends=False,
            receives=True,
            fingerprint={},
        )
        return side, cast(Decode, side.decode), caches.layout.groups[0].name

    return started


def receive(side: WorkerSide, group: str, *names: str, blocks: Sequence[int] = (3,), tokens: int = PAGE_TOKENS) -> None:
    side.receive(
        Step(
            receive=[
                BlocksToReceive(name, number, "there", 0, tokens, {group: GroupBlocks(0, blocks)})
                for number, name in enumerate(names)
            ]
        )
    )


def test_a_step_looks_at_the_requests_of_which_something_has_happened_and_at_no_other(start: Callable[..., Started]):
    side, decode, group = start()
    names = [f"request {number}" for number in range(1000)]
    receive(side, group, *names)
    side.results(())
    for receiver in decode.opened:
        receiver.looks = 0
    assert side.results(()).received == set()
    decode.opened[500].end(TransferState.SUCCESS)
    decode.opened[7].end(TransferState.FAILED)
    decode.opened[8].end(TransferState.FAILED, pages_reusable=False)
    results = side.results(())
    assert (results.received, results.failed) == ({"request 500", "request 7"}, {"request 7"})
    assert [receiver.looks for receiver in decode.opened if receiver.looks] == [1, 1, 1]
    decode.opened[8].end(TransferState.FAILED)
    assert side.results(()).failed == {"request 8"}
    assert side.results(()).received == set()


def test_a_request_that_ended_before_anybody_could_be_called_back_is_reported(start: Callable[..., Started]):
    side, decode, group = start()
    decode.end_at_once = TransferState.FAILED
    receive(side, group, "r")
    assert side.results(()).failed == {"r"}
    assert side.results(()).received == set()


def test_what_came_of_a_request_that_was_given_up_is_not_used(start: Callable[..., Started]):
    """All of it may have come before anybody here was told."""
    side, decode, group = start()
    receive(side, group, "given up", "other")
    side.results(())
    for receiver in decode.opened:
        receiver.end(TransferState.SUCCESS)
    side.after(Step(give_up={"given up": "the weights were replaced"}), None)
    results = side.results(())
    assert (results.received, results.failed) == ({"given up", "other"}, {"given up"})
    side.after(Step(fail={"other"}), None)
    results = side.results(())
    assert (results.received, results.failed) == ({"other"}, {"other"})


@pytest.mark.parametrize("pages", [0, 3])
def test_memory_that_may_still_be_written_is_not_given_back(start: Callable[..., Started], pages: int):
    side, decode, _ = start()
    decode.quarantined_pages = pages
    if pages:
        with pytest.raises(TransferError, match="3 pages of vLLM's caches may still be written or read"):
            side.release()
    else:
        side.release()


@pytest.mark.parametrize("ratio", [1, 3])
@pytest.mark.parametrize("blocks", [(), (5,), (9, 2, 4)])
@pytest.mark.parametrize("tokens", [1, PAGE_TOKENS, 5 * PAGE_TOKENS + 1, 1000])
def test_the_pages_of_blocks_reach_as_far_as_the_requests_tokens(
    start: Callable[..., Started], ratio: int, blocks: tuple[int, ...], tokens: int
):
    side, decode, group = start(ratio)
    receive(side, group, "r", blocks=blocks, tokens=tokens)
    pages = [block * ratio + page for block in blocks for page in range(ratio)][: -(-tokens // PAGE_TOKENS)]
    assert np.asarray(decode.opened[0].pages[group].pages).tolist() == pages
    assert decode.opened[0].pages[group].start == (0 if pages else None)


def test_rooms_that_requests_wait_for_are_said(start: Callable[..., Started]):
    side, decode, _ = start()
    side.receive(Step(expect={9: "there", 7: "elsewhere"}))
    assert decode.expected == [(9, "there"), (7, "elsewhere")]


def test_a_room_that_cannot_be_opened_to_receive_is_counted_as_such(start: Callable[..., Started]):
    side, decode, group = start()
    decode.is_full = True
    receive(side, group, "r")
    assert side.results(()).failed == {"r"}
    assert decode.refused == [0]
    figures = side.log.take()
    assert figures is not None
    assert figures["failed_receives"] == {NOT_OPENED: 1}


@pytest.fixture
def prefill(kvferry_registry_url: str) -> Iterator[tuple[WorkerSide, str]]:
    """A worker that sends, with an endpoint of its own that takes one room, and the name of its group of pages."""
    with LocalNetwork(kvferry_registry_url) as network:
        caches, settings = described(1), network.settings(max_rooms=1)
        side = WorkerSide(
            caches,
            RankCoordinates(),
            settings,
            engine=new_engine_name("prefill"),
            sends=True,
            receives=False,
            fingerprint={},
        )
        yield side, caches.layout.groups[0].name
        side.close()


def send(side: WorkerSide, group: str, name: str, room: int) -> None:
    side.after(Step(send=[BlocksToSend(name, room, PAGE_TOKENS, {group: GroupBlocks(0, (3,))}, True)]), None)


def sent_of(side: WorkerSide, *ended: str) -> set[str]:
    sent = [side.results(set(ended)).sent]

    def is_reported() -> bool:
        sent.append(side.results(()).sent)
        return any(sent)

    eventually("it is reported", is_reported)
    return set().union(*sent)


def test_a_request_that_vllm_needs_the_blocks_of_is_given_up_and_said(
    prefill: tuple[WorkerSide, str], caplog: pytest.LogCaptureFixture
):
    side, group = prefill
    send(side, group, "r", 1)
    assert side.results({"r"}).sent == set()
    side.after(Step(needed=["r", "unknown"]), None)
    assert sent_of(side) == {"r"}
    assert "request r was not sent: room 1 was aborted by the prefill side: vLLM needs its blocks" in caplog.text
    figures = side.log.take()
    assert figures is not None
    assert figures["failed_sends"] == {MEMORY: 1}


def test_a_room_that_cannot_be_opened_to_send_is_counted_as_such(prefill: tuple[WorkerSide, str]):
    side, group = prefill
    send(side, group, "r", 1)
    send(side, group, "one too many", 2)
    assert sent_of(side, "one too many") == {"one too many"}
    figures = side.log.take()
    assert figures is not None
    assert figures["failed_sends"] == {NOT_OPENED: 1}


# ---- layers that leave in ranges ------------------------------------------------------------------------------------


class Outgoing:
    """Notes what it is given."""

    def __init__(self, ranges: LayerRanges, bind_thread: Callable[[], None], *, is_told_late: bool) -> None:
        assert not is_told_late
        self.ranges = ranges
        self.bind_thread = bind_thread
        self.given: list[int | str] = []

    def add(self, request: str, opens: Any, groups: Any, fence: Any, *, last: bool, ranges: int | None = None) -> None:
        self.given.append("all" if ranges is None else ranges)

    def give_up(self, request: str, reason: str) -> None:
        self.given.append(reason)

    def step_ended(self) -> None:
        pass

    def close(self) -> None:
        pass


LAYERS = {f"layers.{number}": number for number in range(6)}


Sending = Callable[[dict[str, int]], tuple[WorkerSide, Outgoing, Step]]


@pytest.fixture
def sending(monkeypatch: pytest.MonkeyPatch) -> Sending:
    monkeypatch.setattr(worker_module, "PrefillEndpoint", Decode)
    monkeypatch.setattr(worker_module, "OutgoingRequests", Outgoing)

    def started(numbers: dict[str, int]) -> tuple[WorkerSide, Outgoing, Step]:
        component, _ = attention_components(num_layers=6, num_kv_heads=1, head_dim=8, dtype="float32")
        tensors = [np.zeros((64, PAGE_TOKENS, 1, 8), np.float32) for _ in range(6)]
        shard = shard_from_tensors(component, tensors, dims=("page", "token", "head", "dim"))
        layout = RankLayout(shards=(shard,))
        (group,) = layout.groups
        side = WorkerSide(
            DescribedCaches(layout, {group.name: 1}),
            RankCoordinates(),
            Settings(layer_ranges=3),
            engine="e",
            sends=True,
            receives=False,
            fingerprint={},
            layer_numbers=numbers,
        )
        step = Step(send=[BlocksToSend("r", 1, PAGE_TOKENS, {group.name: GroupBlocks(0, (3,))}, True)])
        return side, cast(Outgoing, side.outgoing), step

    return started


def test_ranges_leave_as_the_model_gets_on_and_the_rest_with_the_step(sending: Sending):
    side, outgoing, step = sending(LAYERS)
    for _ in range(2):
        for name in LAYERS:
            side.layer_computed(name, step, lambda: None)
        side.layer_computed("draft.0", step, lambda: None)
        side.after(step, None)
    assert outgoing.given == [1, 2, "all"] * 2


def test_a_model_that_comes_back_to_a_layer_is_noticed(sending: Sending, caplog: pytest.LogCaptureFixture):
    side, outgoing, step = sending(LAYERS)
    for name in (*LAYERS, "layers.0", *LAYERS):
        side.layer_computed(name, step, lambda: None)
    side.after(step, None)
    given_up = "the model came back to layer 'layers.0' in one step: KVFERRY_LAYER_RANGES is for models that do not"
    assert outgoing.given == [1, 2, given_up, "all"]
    assert f"{given_up}; from now on layers leave when their step is over" in caplog.text


def test_layers_whose_order_nobody_knows_leave_with_their_step(sending: Sending, caplog: pytest.LogCaptureFixture):
    side, outgoing, step = sending({})
    for name in LAYERS:
        side.layer_computed(name, step, lambda: None)
    side.after(step, None)
    assert outgoing.given == ["all"]
    assert "KVFERRY_LAYER_RANGES is 3, but all layers leave when their step is over" in caplog.text


class Announced(Decode):
    """Says when it was announced, and on which thread the device was made its own."""

    def __init__(self, *_: Any, announces: bool, **__: Any) -> None:
        super().__init__()
        self.announced = [announces]

    def announce(self) -> None:
        self.announced.append(True)


@pytest.mark.parametrize("kind", MemoryKind)
def test_on_a_gpu_nobody_can_attach_before_vllm_asks_for_what_it_must_hand_on(
    monkeypatch: pytest.MonkeyPatch, kind: MemoryKind
):
    """vLLM registers caches, captures graphs, and then asks."""
    bound: list[tuple[str, Device]] = []
    monkeypatch.setattr(worker_module, "PrefillEndpoint", Announced)
    monkeypatch.setattr(worker_module, "OutgoingRequests", Outgoing)
    monkeypatch.setattr(
        worker_module, "bind_thread", lambda device: bound.append((threading.current_thread().name, device))
    )
    caches, device = described(1), Device(kind)
    shards = tuple(msgspec.structs.replace(shard, device=device) for shard in caches.layout.shards)
    caches = DescribedCaches(msgspec.structs.replace(caches.layout, shards=shards), caches.pages_per_block)
    settings = Settings()
    side = WorkerSide(caches, RankCoordinates(), settings, engine="e", sends=True, receives=False, fingerprint={})
    endpoint = cast(Announced, side.prefill)
    ((thread, bound_to),) = bound
    assert thread.startswith("kvferry-vllm-start")
    assert bound_to == device
    if kind is MemoryKind.DRAM:
        assert endpoint.announced == [True]
        return
    assert endpoint.announced == [False]
    side.announce()
    assert endpoint.announced == [False, True]
