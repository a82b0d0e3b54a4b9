"""A request on a prefill rank."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sglang.srt.disaggregation.base.conn import KVPoll, KVTransferMetric
from sglang.srt.disaggregation.common.conn import CommonKVSender

from kvferry import GroupPages, Interval, Sender, TransferState
from kvferry.engines.device_events import AllOf, DeviceEvent
from kvferry.engines.layer_ranges import LayerRanges
from kvferry.engines.sglang.conditions import current
from kvferry.engines.sglang.hooks import CREATE_SENDER
from kvferry.engines.sglang.layouts import INDEX_GROUP, KV_GROUP
from kvferry.engines.sglang.manager import KVFerryManager
from kvferry.engines.sglang.transfers import (
    CLOSED,
    POLLS,
    give_up,
    may_report_failure,
    page_numbers,
    state_pages,
    whole_pages,
    why_not_its_own,
)
from kvferry.engines.sglang.versions import completed
from kvferry.errors import EngineContractError, KVFerryError, QueueFullError


@dataclass(slots=True, eq=False)
class _Step:
    """Pages that the model computes, before SGLang hands them in.

    Attributes:
        ready: after it the device has written them; None if they are there.
        groups: what this rank has of them, once layers leave.
        left: how many ranges of layers of them have left.
        is_over: whether they have been handed in since.
    """

    pages: NDArray[Any]
    ready: DeviceEvent | None
    groups: dict[str, GroupPages] | None = None
    left: int = 0
    is_over: bool = False


@dataclass(slots=True)
class _Chunk:
    """What SGLang hands in at once.

    Attributes:
        state_indices: what it hands in beside keys and values.
        may_end: whether the request ends with it if its pages are the last ones.
        step: the step that computed it, if layers may have left meanwhile.
    """

    pages: Any
    state_indices: list[Any] | None
    may_end: bool
    step: _Step | None


@completed
class KVFerrySender(CommonKVSender):  # type: ignore[misc]
    """Made and called by SGLang's scheduler. Nothing here waits.

    Attributes:
        transfer: sends the request's cache; None where the room could not be opened.
    """

    kv_mgr: KVFerryManager
    aux_index: int
    conclude_state: int | None
    curr_idx: int
    _early_send_wait_event: DeviceEvent | None

    def __init__(
        self,
        mgr: KVFerryManager,
        bootstrap_addr: str,
        bootstrap_room: int,
        req_has_disagg_prefill_dp_rank: bool = False,
    ) -> None:
        """Opens the room, unless the caches have no memory for now."""
        self._room = bootstrap_room
        number = mgr.number_of(bootstrap_room, self)
        super().__init__(mgr, bootstrap_addr, number, req_has_disagg_prefill_dp_rank)
        self.transfer: Sender | None = None
        self._seen: TransferState | None = None  # what SGLang's table has of the transfer's state
        self._failed_at: float | None = None
        # Guards what leaves, and in which order: the scheduler hands pages in, and a thread that waits for the device.
        self._lock = threading.Lock()
        self._early: deque[_Chunk] = deque()  # what the device may still write
        self._step: _Step | None = None
        self._prefix_pages = 0
        self._tokens = 0
        self._token_part: int | None = None
        self.num_kv_indices = 0
        self._depends_on: Mapping[str, bytes] = {}
        if number != bootstrap_room:
            self._opens_later = False
            self._fail(why_not_its_own(bootstrap_room))  # nobody is told: the number is another's, or no room's
            return
        self._opens_later = mgr.is_released  # with the first poll after SGLang has the memory of its caches back
        try:
            prompt = current(CREATE_SENDER)
            self._tokens = prompt.tokens
            self._depends_on = prompt.depends_on
        except KVFerryError as error:
            self._refuse(str(error))
            return
        if not self._opens_later:
            self._open()

    def _open(self) -> None:
        room = self.bootstrap_room
        try:
            self.transfer = self.kv_mgr.prefill.open(room, depends_on=self._depends_on)
        except KVFerryError as error:
            self._refuse(str(error))
            return
        if self.kv_mgr.request_status.get(room) == KVPoll.Failed:  # SGLang has refused it
            self.transfer.abort(self.kv_mgr.failure_records.get(room, "SGLang refused the request"))
        elif self.kv_mgr.stock_peers is not None and (reason := self.kv_mgr.stock_peers.take(room)):
            self.transfer.abort(reason)

    def _refuse(self, reason: str) -> None:
        self.kv_mgr.prefill.refuse(self.bootstrap_room, reason)
        self._opens_later = False
        self._fail(reason)

    @property
    def supports_host_tensor_indices(self) -> bool:
        """Whether SGLang may hand page numbers in before the device has written them, and so need not wait for it."""
        return self.kv_mgr.is_on_device

    def pop_decode_prefix_len(self) -> int:
        """Returns how many tokens the decode side holds already, in whole pages of this side.

        SGLang hands in, and digests, only what follows.
        """
        held = self.transfer.prefix_tokens if self.transfer is not None else None
        page_tokens = self.kv_mgr.place.page_tokens
        self._prefix_pages = (held or 0) // page_tokens
        return self._prefix_pages * page_tokens

    def send(
        self,
        kv_indices: Any,
        state_indices: list[Any] | None = None,
        num_kv_tokens: int | None = None,
        indices_event: DeviceEvent | None = None,
    ) -> None:
        """Hands the next pages of the request in.

        Args:
            indices_event: after it the device has written the page numbers; None if they are there.
        """
        if self.transfer is None or self.conclude_state in (KVPoll.Success, KVPoll.Failed):
            return
        chunk = _Chunk(kv_indices, state_indices, may_end=self._early_send_wait_event is None, step=self._step)
        self._step = None
        events = [each for each in (self._early_send_wait_event, indices_event) if each is not None]
        self._early_send_wait_event = None
        with self._lock:
            if events:
                if indices_event is None:
                    chunk.pages = page_numbers(kv_indices).copy()  # SGLang may use its array again
                self._early.append(chunk)
                self.kv_mgr.device_events.when(AllOf(events), partial(self._computed, chunk))
                return
            # SGLang calls without an event once the device is through with all that it handed in before.
            self._early.append(chunk)
            while self._early:
                self._hand_in(self._early.popleft())

    def _computed(self, chunk: _Chunk, problem: Exception | None) -> None:
        """Hands in a chunk that came early, unless it has left with others since. On the thread of the events."""
        with self._lock:
            if not self._early or self._early[0] is not chunk or self.transfer is None:
                return
            if problem is None:
                self._hand_in(self._early.popleft())
            else:
                self._early.clear()
                self.transfer.abort(f"the device failed: {problem}")

    # ---- layers of a step, which may leave before SGLang hands its pages in -------------------------------------

    def begin_step(self, pages: NDArray[Any], ready: DeviceEvent | None) -> bool:
        """Takes the pages that the next step will compute; returns whether layers of them may leave one by one.

        Args:
            pages: their numbers.
            ready: after it the device has written the numbers; None if they are there.
        """
        if self.transfer is None or self._step is not None or self.conclude_state in (KVPoll.Success, KVPoll.Failed):
            return False
        self._step = _Step(pages, ready)
        return True

    def layers_computed(self, ranges: int, event: DeviceEvent | None) -> None:
        """Sends the first ranges of layers, once the device has come to the event."""
        step = self._step
        if step is None:
            return
        events = [each for each in (step.ready, event) if each is not None]
        if not events:
            self._send_layers(step, ranges, None)
        else:
            self.kv_mgr.device_events.when(AllOf(events), partial(self._send_layers, step, ranges))

    def give_step_up(self, reason: str) -> None:
        """Ends the transfer if layers of the step have left."""
        with self._lock:
            if self._step is not None and self._step.left and self.transfer is not None:
                self.transfer.abort(reason)

    def _send_layers(self, step: _Step, ranges: int, problem: Exception | None) -> None:
        """Sends what has not left of the first ranges of layers. On the scheduler's thread, or that of the events."""
        with self._lock:
            transfer = self.transfer
            if transfer is None or step.is_over or self._early or ranges <= step.left:
                return  # with what waits to be handed in before them, layers leave when the step is over
            if problem is not None:
                transfer.abort(f"the device failed: {problem}")
                return
            try:
                if step.groups is None:
                    step.groups = self._kept(step.pages)
                layers = self._ranges.layers(step.left, ranges)
                transfer.submit(step.groups, layers=layers, token_part=self._token_part)
            except QueueFullError:
                return  # with the next range
            except KVFerryError as error:
                transfer.abort(str(error))
                return
            step.left = ranges

    @property
    def _ranges(self) -> LayerRanges:
        assert self.kv_mgr.layer_steps is not None
        return self.kv_mgr.layer_steps.ranges

    def _rest_of(self, step: _Step, pages: NDArray[Any]) -> Mapping[str, Interval] | None:
        """Returns the layers that are still to leave of a step's pages; None for all. Must be called with the lock.

        Raises:
            EngineContractError: if they are not the pages of which layers have left.
        """
        step.is_over = True
        if not step.left:
            return None
        if not np.array_equal(pages, step.pages):
            raise EngineContractError(
                f"SGLang hands in {len(pages)} pages {pages[:4].tolist()}... after a step that was to compute "
                f"{len(step.pages)} pages {step.pages[:4].tolist()}..., of which layers have left "
                "(KVFERRY_LAYER_RANGES): the request is not exchanged"
            )
        return self._ranges.layers(step.left, self._ranges.count)

    # ---- pages ------------------------------------------------------------------------------------------------------

    def _kept(self, pages: NDArray[Any]) -> dict[str, GroupPages]:
        """Returns what this rank has of the next pages of keys and values; nothing if the model has none."""
        place, first = self.kv_mgr.place, self._prefix_pages + self.curr_idx
        kept = place.kept(pages, first=first, tokens=self._tokens)
        self._token_part = self._token_part if kept.token_part is None else kept.token_part
        own = {KV_GROUP: GroupPages(kept.pages, kept.start)} if KV_GROUP in self.kv_mgr.caches.groups else {}
        return own | whole_pages(place, self.kv_mgr.caches.groups, pages, first=first, tokens=self._tokens)

    def _hand_in(self, chunk: _Chunk) -> None:
        """Hands in the next pages, and with the last ones all the rest. Must be called with the lock."""
        assert self.transfer is not None
        pages = page_numbers(chunk.pages)  # copied where they are kept
        is_last = chunk.may_end and self.curr_idx + len(pages) == self.num_kv_indices
        aux = None
        try:
            layers = None if chunk.step is None else self._rest_of(chunk.step, pages)
            groups = self._kept(pages)
            if is_last:
                total = self._prefix_pages + self.num_kv_indices
                groups |= state_pages(
                    self.kv_mgr.state_types,
                    chunk.state_indices,
                    total,
                    last=pages,
                    index=groups.get(INDEX_GROUP),
                    rings=self.kv_mgr.caches.rings,
                    tokens=self._tokens,
                )
                aux = self.kv_mgr.metadata_rows.read(self.aux_index)
            self.transfer.submit(groups, last=is_last, aux=aux, layers=layers, token_part=self._token_part)
        except KVFerryError as error:
            self.transfer.abort(str(error))
            self._fail(str(error))
        self.curr_idx += len(pages)

    def poll(self) -> int:
        """Returns the state of the transfer."""
        if self._opens_later and self.kv_mgr.is_closed:
            self._refuse(CLOSED)
        if self._opens_later and not self.kv_mgr.is_released:
            self._opens_later = False
            self._open()
        if self.transfer is not None and self.transfer.state is not self._seen and self.conclude_state is None:
            self._look(self.transfer)
        if self.conclude_state is None:
            room = self.bootstrap_room
            known = room in self.kv_mgr.request_status
            status = int(self.kv_mgr.check_status(room)) if known else KVPoll.Failed
            if status not in (KVPoll.Success, KVPoll.Failed):
                return status
            self.conclude_state = status
            self.trace_ctx.trace_req_finish()
        return int(self.conclude_state)

    def poll_pp_consensus(self) -> int:
        """Returns the state of the first pipeline stage, which SGLang hands on to the others.

        SGLang would have the least of all stages, as their own threads report it, since its senders cannot take pages
        before the decode side has given its own. Ours can, and nothing polls the other stages here: each begins when
        the decode side has opened the room there, and one that fails fails on the decode side, which tells all.
        """
        return self.poll()

    def abort(self) -> None:
        """Aborts the transfer. SGLang reuses the pages at once: what is still read from them is discarded."""
        super().abort()
        self._give_up("SGLang gave the request up")

    def clear(self) -> None:
        """Forgets the request, which SGLang is done with."""
        super().clear()
        self.kv_mgr.rooms.free(self._room, self)
        self._give_up("SGLang is through with the request")

    def get_transfer_metric(self) -> KVTransferMetric:
        """Returns how much was transferred, and how long that took."""
        if self.transfer is not None:
            writes = self.transfer.stats.writes
            self._transfer_metric.transfer_total_bytes = sum(each.total_bytes for each in writes)
            if writes:
                begun = min(each.submitted_at for each in writes)
                self._transfer_metric.transfer_latency_s = max(each.done_at for each in writes) - begun
        return self._transfer_metric

    def _give_up(self, reason: str) -> None:
        self._opens_later = False
        with self._lock:
            self._early.clear()
            if self._step is not None:
                self._step.is_over = True
                self._step = None
            give_up(self.transfer, reason)

    def _look(self, transfer: Sender) -> None:
        """Copies the transfer's state to the manager's table, where SGLang's own code reads it, once it has changed."""
        if self.bootstrap_room not in self.kv_mgr.request_status:
            return
        if transfer.state is TransferState.FAILED:
            self.kv_mgr.record_failure(self.bootstrap_room, str(transfer.error))  # ready for whoever reports it first
            self._failed_at = self._failed_at or time.monotonic()
            if not may_report_failure(self.kv_mgr.attn_tp_size * self.kv_mgr.attn_cp_size, self._failed_at):
                return
        self._seen = transfer.state
        self.kv_mgr.update_status(self.bootstrap_room, POLLS[self._seen])

    def _fail(self, reason: str) -> None:
        self.kv_mgr.record_failure(self.bootstrap_room, reason)
        self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Failed)
