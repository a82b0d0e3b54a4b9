"""What pipeline stages of a decode server agree on: SGLang's own consensus and queue, on two stages without a model.

Each test says what SGLang alone makes of the same.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.disaggregation import decode, utils
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.decode import DecodeTransferQueue
from sglang.srt.managers.scheduler_pp_mixin import SchedulerPPMixin

from kvferry.engines.sglang import consensus

OURS: dict[str, Callable[..., Any]] = {
    "_pp_pd_get_decode_transferred_ids": consensus.agree_on_ended,
    "process_decode_transfer_queue": consensus.take_ended,
    "process_prealloc_queue": consensus.admit,
}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stage has one rank, and so nobody to agree with within it."""
    for module in (decode, utils):
        monkeypatch.setattr(module, "all_reduce_flags", lambda flags, group, op: flags)
    monkeypatch.setattr(decode, "prepare_abort", lambda req, message, **_: None)


class Receiver:
    """A transfer in the state that a test gives it."""

    def __init__(self) -> None:
        self.state = KVPoll.WaitingForInput
        self.reason = "its own"
        self.abort_notified = False
        self.kv_mgr = SimpleNamespace(enable_deferred_decode_kv_release=False)

    def poll(self) -> int:
        return int(self.state)

    def fail(self, reason: str) -> None:
        self.state, self.reason = KVPoll.Failed, reason

    def failure_exception(self) -> None:
        raise RuntimeError(self.reason)

    def clear(self) -> None: ...


class Transfers(DecodeTransferQueue):  # type: ignore[misc]
    """SGLang's queue, with pages that are only counted."""

    def __init__(self, stage: Stage) -> None:
        self.queue: list[Any] = []
        self.gloo_group, self.tp_rank, self.enable_staging = None, 0, False
        self.scheduler, self.tree_cache = stage, None
        self.enable_deferred_kv_release = False
        self._deferred_releases: list[Any] = []
        self.metadata_buffers = SimpleNamespace(clear_slot=lambda _: None)
        self.req_to_metadata_buffer_idx_allocator = SimpleNamespace(free=lambda _: None)
        self._stage = stage

    def _poll_with_metadata_gate(self) -> list[int]:
        return [each.kv_receiver.poll() for each in self.queue]

    def _commit_transfer_to_req(self, decode_req: Any) -> None: ...

    def _clean_hicache_prefetch_resources(self, decode_req: Any) -> None: ...

    def _release_request(self, decode_req: Any) -> None:
        self._stage.free += 1


class Waiting:
    """Requests without pages: admits those that are ready, first come first served, while there is memory."""

    def __init__(self, stage: Stage) -> None:
        self.queue: list[Any] = []
        self.retracted_queue: list[Any] = []
        self._stage = stage

    def note_destinations_queued(self, count: int) -> None: ...

    def pop_preallocated(self, *, pp_good_rids: list[str], pp_bad_rids: list[str]) -> tuple[list[Any], list[Any]]:
        given = [each for each in self.queue if each.req.rid in {*pp_good_rids, *pp_bad_rids}]
        failed = [each for each in given if each.req.rid in pp_bad_rids or each.req.finished_reason]
        ready = [each for each in given if each not in failed]
        admitted = ready[: self._stage.free]
        self._stage.free -= len(admitted)
        self.queue = [each for each in self.queue if each not in failed and each not in admitted]
        return admitted, failed


class Stage(SchedulerPPMixin):  # type: ignore[misc]
    """A stage's scheduler, as far as the consensus goes."""

    def __init__(self, index: int, *, free: int = 8) -> None:
        self.free = free
        self.pp_group = SimpleNamespace(is_first_rank=index == 0)
        self.enable_hisparse = self.enable_decode_hicache = False
        self.attn_cp_cpu_group = self.attn_tp_cpu_group = None
        self.metrics_reporter = SimpleNamespace(enable_metrics=False)
        self.output_streamer = SimpleNamespace(stream_output=lambda *_: None)
        self.waiting_queue: list[Any] = []
        self.inbox: deque[Any] = deque()
        self.disagg_decode_prealloc_queue = Waiting(self)
        self.disagg_decode_transfer_queue = Transfers(self)
        self.receivers: dict[str, Receiver] = {}

    def add(self, rid: str) -> None:
        self.receivers[rid] = Receiver()
        req = SimpleNamespace(rid=rid, finished_reason=None, bootstrap_room=1, return_logprob=False)
        self.disagg_decode_prealloc_queue.queue.append(
            SimpleNamespace(
                req=req,
                kv_receiver=self.receivers[rid],
                metadata_buffer_index=0,
                host_staged=False,
                hicache_restore_status=None,
            )
        )

    def _pp_recv_pyobj_from_prev_stage(self) -> Any:
        return self.inbox.popleft()

    @property
    def kept(self) -> list[str]:
        """What is in its transfer queue."""
        return [each.req.rid for each in self.disagg_decode_transfer_queue.queue]

    @property
    def computed(self) -> list[str]:
        return [each.rid for each in self.waiting_queue]


class Server:
    """Two stages and a way round."""

    def __init__(self, *stages: Stage, ours: bool) -> None:
        self.stages = stages
        self._ours = ours

    def call(self, stage: Stage, name: str, *given: Any) -> Any:
        original = inspect.unwrap(getattr(SchedulerPPMixin, name))  # the plug-in may be loaded in this process
        return OURS[name](original, stage, *given) if self._ours else original(stage, *given)

    def add(self, *rids: str) -> None:
        for stage in self.stages:
            for rid in rids:
                stage.add(rid)

    def set(self, rid: str, *states: KVPoll) -> None:
        for stage, state in zip(self.stages, states, strict=True):
            stage.receivers[rid].state = state

    def admit(self, *rids: str, bad: Sequence[str] = ()) -> None:
        """All stages have found these ready, and those failed."""
        passed: Any = [list(rids), list(bad)]
        for stage in self.stages:
            passed = self.call(stage, "process_prealloc_queue", passed)

    def turn(self) -> None:
        """Goes round once: what has ended is proposed, agreed on, and taken."""
        proposed: Any = None
        for stage in self.stages:
            if proposed is not None:
                stage.inbox.append(proposed)
            proposed = self.call(stage, "_pp_pd_get_decode_transferred_ids")
        for stage in self.stages:
            proposed = self.call(stage, "process_decode_transfer_queue", proposed)


def server(*, ours: bool = True, free: Sequence[int] = (8, 8)) -> Server:
    return Server(*(Stage(index, free=pages) for index, pages in enumerate(free)), ours=ours)


FAILED, SUCCESS, GOES_ON = KVPoll.Failed, KVPoll.Success, KVPoll.Transferring


@pytest.mark.parametrize(("ours", "kept"), [(False, [[], ["a"]]), (True, [[], []])], ids=["SGLang alone", "kvferry"])
def test_a_failed_transfer_leaves_every_stage(ours: bool, kept: list[list[str]]):
    both = server(ours=ours)
    both.add("a")
    both.admit("a")
    both.set("a", FAILED, FAILED)
    both.turn()
    both.turn()
    assert [stage.kept for stage in both.stages] == kept
    assert [stage.free for stage in both.stages] == [8, 8 - len(kept[1])]


@pytest.mark.parametrize(
    ("ours", "computed"), [(False, [["a"], []]), (True, [[], []])], ids=["SGLang alone", "kvferry"]
)
def test_a_transfer_that_failed_on_one_stage_is_computed_on_none(ours: bool, computed: list[list[str]]):
    both = server(ours=ours)
    both.add("a")
    both.admit("a")
    both.set("a", SUCCESS, FAILED)
    both.turn()
    assert [stage.computed for stage in both.stages] == computed
    if ours:
        reasons = [stage.receivers["a"].reason for stage in both.stages]
        assert reasons == ["the transfer failed on another pipeline stage, which says why in its log", "its own"]
        assert [stage.free for stage in both.stages] == [8, 8]


def test_a_transfer_that_failed_on_the_first_stage_waits_for_the_others():
    both = server()
    both.add("a", "b")
    both.admit("a", "b")
    both.set("a", FAILED, GOES_ON)
    both.set("b", SUCCESS, SUCCESS)
    both.turn()
    assert [(stage.kept, stage.computed) for stage in both.stages] == [(["a"], ["b"])] * 2
    both.set("a", FAILED, SUCCESS)
    both.turn()
    assert [(stage.kept, stage.computed) for stage in both.stages] == [([], ["b"])] * 2


@pytest.mark.parametrize(
    ("ours", "computed"), [(False, [["a"], []]), (True, [["a"], ["a"]])], ids=["SGLang alone", "kvferry"]
)
def test_what_a_later_stage_had_no_memory_for_is_admitted_when_it_has(ours: bool, computed: list[list[str]]):
    """SGLang alone never comes to it: its first stage has the request no longer where it would be proposed from."""
    both = server(ours=ours, free=(8, 0))
    both.add("a")
    both.admit("a")
    assert [stage.kept for stage in both.stages] == [["a"], []]
    both.stages[1].free = 1
    both.admit()
    both.set("a", SUCCESS, SUCCESS)
    both.turn()
    if not ours:
        assert both.stages[1].disagg_decode_prealloc_queue.queue, "it waits for ever"
        return
    assert [stage.computed for stage in both.stages] == computed


def test_nothing_overtakes_what_waits_for_memory():
    """Rows of one batch would be other requests' on the next stage."""
    both = server(free=(8, 1))
    both.add("x", "a", "b")
    both.admit("a", "b")
    both.admit("x")
    assert [stage.kept for stage in both.stages] == [["a", "b", "x"], ["a"]]
    both.stages[1].free = 8
    both.admit()
    both.admit()
    for rid in "abx":
        both.set(rid, SUCCESS, SUCCESS)
    both.turn()
    assert [stage.computed for stage in both.stages] == [["a", "b", "x"]] * 2


def test_what_was_aborted_while_it_waited_for_memory_leaves_both_stages():
    """SGLang alone asks the first stage for ever, since the second has no transfer of it that could have ended."""
    both = server(free=(8, 0))
    both.add("a", "b")
    both.admit("a")
    both.set("a", FAILED, FAILED)
    both.stages[1].disagg_decode_prealloc_queue.queue[0].req.finished_reason = "aborted"
    both.admit()
    both.turn()
    assert [(stage.kept, stage.computed) for stage in both.stages] == [([], []), ([], [])]
    both.stages[1].free = 1
    both.admit("b")
    both.set("b", SUCCESS, SUCCESS)
    both.turn()
    assert [stage.computed for stage in both.stages] == [["b"], ["b"]]


def test_failures_are_not_lost_behind_retracted_requests():
    """SGLang then admits nothing, and forgets what it was told."""
    both = server()
    both.add("a", "b")
    both.stages[1].disagg_decode_prealloc_queue.retracted_queue.append("another request")
    both.admit("a", bad=["b"])
    both.stages[1].disagg_decode_prealloc_queue.retracted_queue.clear()
    both.admit()
    assert [stage.kept for stage in both.stages] == [["a"], ["a"]]
    assert not any(stage.disagg_decode_prealloc_queue.queue for stage in both.stages)
