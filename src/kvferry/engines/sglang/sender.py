"""A request on a prefill rank."""

from __future__ import annotations

from typing import Any

import numpy as np
from sglang.srt.disaggregation.base.conn import KVPoll, KVTransferMetric
from sglang.srt.disaggregation.common.conn import CommonKVSender

from kvferry import GroupPages, Sender, TransferState
from kvferry.engines.sglang.conditions import current
from kvferry.engines.sglang.layouts import KV_GROUP
from kvferry.engines.sglang.manager import KVFerryManager
from kvferry.engines.sglang.names import CREATE_SENDER
from kvferry.engines.sglang.transfers import POLLS, give_up, page_numbers, state_pages
from kvferry.engines.sglang.versions import completed
from kvferry.errors import KVFerryError


@completed
class KVFerrySender(CommonKVSender):  # type: ignore[misc]
    """Made and called by SGLang's scheduler. Nothing here waits."""

    kv_mgr: KVFerryManager
    aux_index: int
    conclude_state: int | None
    curr_idx: int
    _early_send_wait_event: object | None

    def __init__(
        self,
        mgr: KVFerryManager,
        bootstrap_addr: str,
        bootstrap_room: int,
        req_has_disagg_prefill_dp_rank: bool = False,
    ) -> None:
        """Opens the room."""
        super().__init__(mgr, bootstrap_addr, bootstrap_room, req_has_disagg_prefill_dp_rank)
        self._transfer: Sender | None = None
        self._seen: TransferState | None = None  # what SGLang's table has of the transfer's state
        self._pending: list[np.ndarray[Any, Any]] = []
        self._prefix_pages = 0
        self.num_kv_indices = 0
        try:
            self._transfer = mgr.prefill.open(bootstrap_room, depends_on=current(CREATE_SENDER).depends_on)
        except KVFerryError as error:
            mgr.prefill.refuse(bootstrap_room, str(error))
            self._fail(str(error))
            return
        if mgr.request_status.get(bootstrap_room) == KVPoll.Failed:  # SGLang has refused it
            self._transfer.abort(mgr.failure_records.get(bootstrap_room, "SGLang refused the request"))

    def pop_decode_prefix_len(self) -> int:
        """Returns how many tokens the decode side holds already, in whole pages of this side.

        SGLang hands in, and digests, only what follows.
        """
        held = self._transfer.prefix_tokens if self._transfer is not None else None
        page_tokens: int = self.kv_mgr.kv_args.page_size
        self._prefix_pages = (held or 0) // page_tokens
        return self._prefix_pages * page_tokens

    def send(
        self,
        kv_indices: Any,
        state_indices: list[Any] | None = None,
        num_kv_tokens: int | None = None,
        indices_event: object | None = None,
    ) -> None:
        """Hands the next pages of the request in."""
        if self._transfer is None or self.conclude_state in (KVPoll.Success, KVPoll.Failed):
            return
        pages = page_numbers(kv_indices)  # copied where they are kept
        if self._early_send_wait_event is not None:
            # The device may still write pages that come early. The next call comes when it has: they wait for that.
            self._early_send_wait_event = None
            self._pending.append(pages.copy())
            return
        if self._pending:
            pages = np.concatenate([*self._pending, pages])
            self._pending.clear()
        start, self.curr_idx = self.curr_idx, self.curr_idx + len(pages)
        is_last = self.curr_idx == self.num_kv_indices
        groups = {KV_GROUP: GroupPages(pages, self._prefix_pages + start)}
        aux = None
        try:
            if is_last:
                total = self._prefix_pages + self.num_kv_indices
                groups |= state_pages(
                    self.kv_mgr.state_types, state_indices, total, last=pages, ring_places=self.kv_mgr.ring_places
                )
                aux = self.kv_mgr.metadata_rows.read(self.aux_index)
            self._transfer.submit(groups, last=is_last, aux=aux)
        except KVFerryError as error:
            self._transfer.abort(str(error))
            self._fail(str(error))

    def poll(self) -> int:
        """Returns the state of the transfer."""
        if self._transfer is not None and self._transfer.state is not self._seen:
            self._look()
        return self._conclude(self.kv_mgr.check_status)

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
        give_up(self._transfer, "SGLang gave the request up")

    def clear(self) -> None:
        """Forgets the request, which SGLang is done with."""
        super().clear()
        give_up(self._transfer, "SGLang is through with the request")

    def get_transfer_metric(self) -> KVTransferMetric:
        """Returns how much was transferred, and how long that took."""
        if self._transfer is not None:
            writes = self._transfer.stats.writes
            self._transfer_metric.transfer_total_bytes = sum(each.total_bytes for each in writes)
            if writes:
                begun = min(each.submitted_at for each in writes)
                self._transfer_metric.transfer_latency_s = max(each.done_at for each in writes) - begun
        return self._transfer_metric

    def _look(self) -> None:
        """Copies the transfer's state to the manager's table, where SGLang's own code reads it, once it has changed."""
        transfer = self._transfer
        if transfer is None or transfer.state is self._seen or self.conclude_state is not None:
            return
        if self.bootstrap_room not in self.kv_mgr.request_status:
            return
        self._seen = transfer.state
        if self._seen is TransferState.FAILED:
            self._fail(str(transfer.error))
        else:
            self.kv_mgr.update_status(self.bootstrap_room, POLLS[self._seen])

    def _conclude(self, check: Any) -> int:
        if self.conclude_state is not None:
            return int(self.conclude_state)
        room = self.bootstrap_room
        status = int(check(room)) if room in self.kv_mgr.request_status else KVPoll.Failed
        if status in (KVPoll.Success, KVPoll.Failed):
            self.conclude_state = status
            self.trace_ctx.trace_req_finish()
        return status

    def _fail(self, reason: str) -> None:
        self.kv_mgr.record_failure(self.bootstrap_room, reason)
        self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Failed)
