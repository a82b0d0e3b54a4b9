"""A request on a decode rank."""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import Any

from numpy.typing import NDArray
from sglang.srt.disaggregation.base.conn import KVPoll, KVTransferDestination
from sglang.srt.disaggregation.common.conn import CommonKVReceiver

from kvferry import DecodeEndpoint, GroupPages, Receiver, TransferState
from kvferry.engines.sglang.conditions import Prompt, current
from kvferry.engines.sglang.hisparse import JointReceiver
from kvferry.engines.sglang.hooks import CREATE_RECEIVER
from kvferry.engines.sglang.layouts import INDEX_GROUP, KV_GROUP
from kvferry.engines.sglang.manager import KVFerryManager
from kvferry.engines.sglang.transfers import (
    CLOSED,
    POLLS,
    give_up,
    is_paged,
    may_report_failure,
    page_numbers,
    state_pages,
    whole_pages,
    why_not_its_own,
)
from kvferry.engines.sglang.versions import completed
from kvferry.errors import EngineContractError, EngineEndedError, KVFerryError, UsageError


@completed
class KVFerryReceiver(CommonKVReceiver):  # type: ignore[misc]
    """Made and called by SGLang's scheduler. Nothing here waits.

    Attributes:
        transfer: fetches the request's cache; None before it is asked for.
    """

    kv_mgr: KVFerryManager
    conclude_state: int | None

    def __init__(self, mgr: KVFerryManager, bootstrap_addr: str, bootstrap_room: int | None = None) -> None:
        """Remembers the request, and begins to look its prefill server up."""
        self._room = bootstrap_room
        number = None if bootstrap_room is None else mgr.number_of(bootstrap_room, self)
        super().__init__(mgr, bootstrap_addr, number)
        self.transfer: Receiver | JointReceiver | None = None
        self._seen: TransferState | None = None  # what SGLang's table has of the transfer's state, unless it has ended
        self._failed_at: float | None = None
        self._reason: str | None = None  # why it fails without a transfer, once the group's other ranks know why, too
        self._aux_index: int | None = None
        self._engine = ""
        self._has_refused = number != bootstrap_room  # the prefill server's is the other request's, or there is none
        self._connection: Future[None] | None = None  # once its server was looked up
        self._made_at = time.monotonic()
        self.bootstrap_infos: list[dict[str, Any]] = []  # SGLang counts the ranks that it waits for: none
        self._prompt = Prompt(0, {})
        self._problem: KVFerryError | None = None  # said once the prefill side can be told of it
        try:
            self._prompt = current(CREATE_RECEIVER)
        except KVFerryError as error:
            self._problem = error
        if number != bootstrap_room:
            self._fail(why_not_its_own(bootstrap_room))
        else:
            mgr.try_ensure_parallel_info(bootstrap_addr)

    @property
    def supports_host_destination(self) -> bool:
        """Whether SGLang may give pages of its host pools."""
        return self.kv_mgr.supports_host_destination

    def init(self, prefill_dp_rank: int) -> None:
        """Takes the prefill engine's name from the look-up of its server, and connects to it.

        Until that is done SGLang gives the request no pages: no other request waits for them behind a server that is
        not there.
        """
        if self.conclude_state == KVPoll.Failed or self._reason is not None:
            return
        try:
            self.kv_mgr.prefill_servers.check_dp_rank(self.bootstrap_addr, prefill_dp_rank)
            self.prefill_dp_rank = prefill_dp_rank
            self._engine = self.kv_mgr.prefill_servers.engine_at(self.bootstrap_addr)
            if self._problem is not None:
                raise self._problem
        except KVFerryError as error:
            self._refuse(str(error))
            self._fail_with_others(str(error))
            return
        self._look()

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: list[Any] | None = None,
        decode_prefix_len: int | None = None,
        destination: KVTransferDestination = KVTransferDestination.DEVICE,
        device_kv_indices: Any = None,
    ) -> None:
        """Opens the room, and so requests the cache.

        Args:
            destination: where the pages are: page numbers of the host's pools are not the device's.
        """
        if self.conclude_state == KVPoll.Failed:
            return
        pages = page_numbers(kv_indices)  # copied, and checked, where the room is opened
        prefix_tokens = decode_prefix_len or 0
        try:
            if self.kv_mgr.is_released:
                raise UsageError(
                    "the memory of SGLang's caches was given away (release_memory_occupation), and is not back yet "
                    "(resume_memory_occupation)"
                )
            if device_kv_indices is not None:
                raise UsageError("kvferry does not write to host memory and to the device in one room of SGLang's")
            if self.kv_mgr.caches.is_hisparse:
                if prefix_tokens:
                    raise EngineContractError(f"with HiSparse SGLang says that {prefix_tokens} tokens are here already")
                self._open_apart(pages, state_indices)
            else:
                into_host = destination != KVTransferDestination.DEVICE
                endpoint = self.kv_mgr.host if into_host else self.kv_mgr.decode
                self._open_at(endpoint, pages, state_indices, prefix_tokens)
        except KVFerryError as error:
            self._refuse(str(error))
            self._fail(str(error))
            return
        self._aux_index = aux_index

    def _open_at(
        self, endpoint: DecodeEndpoint, pages: NDArray[Any], state_indices: list[Any] | None, prefix_tokens: int
    ) -> None:
        """Opens the room at one endpoint."""
        place, groups = self.kv_mgr.place, self.kv_mgr.caches.groups
        prefix_pages = prefix_tokens // place.page_tokens
        kept = place.kept(pages, first=prefix_pages, tokens=self._prompt.tokens)
        own = {KV_GROUP: GroupPages(kept.pages)} if KV_GROUP in groups else {}
        whole = whole_pages(place, groups, pages, first=prefix_pages, tokens=self._prompt.tokens)
        states = state_pages(
            self.kv_mgr.state_types,
            state_indices,
            prefix_pages + len(pages),
            last=pages,
            index=whole.get(INDEX_GROUP),
            rings=self.kv_mgr.caches.rings,
            tokens=self._prompt.tokens,
        )
        self.transfer = self._open(endpoint, {**own, **whole, **states}, prefix_tokens)
        self.kv_mgr.receives(self.bootstrap_room, self.transfer)

    def _open_apart(self, host_pages: NDArray[Any], state_indices: list[Any] | None) -> None:
        """Opens the room at both endpoints of a rank with HiSparse.

        Args:
            host_pages: where what sparse attention reads goes.
            state_indices: where all else goes; what is numbered by tokens has one page number for all kinds.
        """
        types = self.kv_mgr.state_types
        of_tokens = [
            page_numbers(given) for kind, given in zip(types, state_indices or [], strict=True) if is_paged(kind)
        ]
        if not of_tokens or any(len(each) != len(host_pages) for each in of_tokens):
            raise EngineContractError(
                f"SGLang hands in {len(host_pages)} pages of host memory and {[len(each) for each in of_tokens]} of "
                f"the device for {[each.name for each in types]}: as many are needed"
            )
        states = state_pages(types, state_indices, len(host_pages), last=of_tokens[0])

        joint = JointReceiver([self._open(self.kv_mgr.host, {KV_GROUP: GroupPages(host_pages)})])
        self.transfer = joint  # from here on host pages may be written to, whatever comes of the others
        self.kv_mgr.receives(self.bootstrap_room, joint)
        try:
            joint.parts.append(self._open(self.kv_mgr.decode, {KV_GROUP: GroupPages(of_tokens[0]), **states}))
        except KVFerryError as error:
            joint.abort(f"the rank's other endpoint refused the room: {error}")
            raise

    def _open(self, endpoint: DecodeEndpoint, groups: dict[str, GroupPages], prefix_tokens: int = 0) -> Receiver:
        place = self.kv_mgr.place
        theirs = self.kv_mgr.prefill_servers.page_tokens(self.bootstrap_addr)
        # Pages of another size do not fill this side's last one, and of that, ranks that divide pages have unequal
        # parts. Pages of the same size move whole: SGLang's checksums are of whole pages.
        counts_tokens = place.token_parts > 1 or theirs != self.kv_mgr.kv_args.page_size
        return endpoint.open(
            self.bootstrap_room,
            groups,
            engine=self._engine,
            prefill_dp_rank=self.prefill_dp_rank,
            prefix_tokens=prefix_tokens,
            tokens=self._prompt.tokens if counts_tokens else None,
            depends_on=self._prompt.depends_on,
        )

    def poll(self) -> int:
        """Returns the state of the transfer. On success the first token is in SGLang's metadata buffers."""
        if self.conclude_state is None and self.transfer is None:
            self._look()
        if self.conclude_state is not None:
            return int(self.conclude_state)
        transfer, room = self.transfer, self.bootstrap_room
        status = self.kv_mgr.request_status.get(room, KVPoll.Failed)
        if transfer is not None and transfer.state is not self._seen and status != KVPoll.Failed:
            state = transfer.state
            status = self._status_of(transfer)
            self.kv_mgr.update_status(room, status)
            self._seen = None if state.is_final else state
        if status in (KVPoll.Success, KVPoll.Failed):
            self.conclude_state = status
        return int(status)

    def _look(self) -> None:
        """Looks how far the prefill server is that the request has no pages for yet."""
        if self._reason is not None:
            self._fail_with_others(self._reason)
            return
        if self.kv_mgr.is_closed:
            self._fail_with_others(CLOSED)
            return
        if not self._engine:
            now = time.monotonic()
            reason = self.kv_mgr.prefill_servers.why_not_found(self.bootstrap_addr, self._made_at, now)
            if reason is not None:
                self._fail_with_others(reason)
            return
        if self._connection is None:
            if self.kv_mgr.is_released:
                return
            try:
                self._connection = self.kv_mgr.prefill_servers.connection(self._engine, self.prefill_dp_rank)
            except KVFerryError as problem:  # such as a name that no engine can have: anybody may announce one
                self._fail_with_others(f"the prefill server at {self.bootstrap_addr}: {problem}")
                return
        if not self._connection.done():
            return
        error = self._connection.exception()
        if error is None:
            self.kv_mgr.update_status(self.bootstrap_room, KVPoll.WaitingForInput)
            return
        # Also where requests name the server by another address.
        self.kv_mgr.prefill_servers.forget(self.bootstrap_addr)
        if not isinstance(error, EngineEndedError):  # else nobody is there to be told
            self._refuse(str(error))
        self._fail_with_others(f"the prefill server at {self.bootstrap_addr}: {error}")

    def abort(self) -> None:
        """Gives the request up. Where SGLang takes pages back at once, it hears of that when nothing writes to them."""
        transfer, is_deferred = self.transfer, self.kv_mgr.enable_deferred_decode_kv_release
        if is_deferred or self.conclude_state is not None or transfer is None or transfer.pages_reusable:
            super().abort()
        else:
            give_up(transfer, "SGLang gave the request up")  # and `poll` concludes it

    def fail(self, reason: str) -> None:
        """Fails the request on both sides. May be called from any thread: whoever polls it meanwhile has the reason."""
        self._fail(reason)
        self.ensure_abort_notified()

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        """Aborts the transfer on both sides; its pages come back when the manager allows it.

        SGLang calls it for failures, and its `abort` does.
        """
        give_up(self.transfer, "SGLang gave the request up")
        self._refuse("SGLang gave the request up before it had pages for it")
        self.abort_notified = self.transfer is not None

    def clear(self) -> None:
        """Forgets the request, which SGLang is done with. From then on the room's number may be another request's."""
        super().clear()
        if self._room is not None:
            self.kv_mgr.rooms.free(self._room, self)
        give_up(self.transfer, "SGLang is through with the request")
        self._refuse("SGLang is through with the request, and never had pages for it")
        self.kv_mgr.received(self.bootstrap_room)
        self._owns_bootstrap_room = False

    @property
    def is_over(self) -> bool:
        """Whether SGLang is done with the request, or it has its cache."""
        has_cache = self.transfer is not None and self.transfer.state is TransferState.SUCCESS
        return has_cache or not self._owns_bootstrap_room

    def is_abort_release_safe(self) -> bool:
        """Whether no write can reach the pages any more."""
        return self.transfer is None or self.transfer.pages_reusable

    def _status_of(self, transfer: Receiver | JointReceiver) -> int:
        state = transfer.state
        if state is TransferState.FAILED:
            return self._status_of_failed(transfer)
        # In SGLang, Bootstrapping is the state before it has given pages.
        if state is TransferState.BOOTSTRAPPING:
            return int(KVPoll.WaitingForInput)
        if state is TransferState.SUCCESS and self._aux_index is not None:
            try:
                self.kv_mgr.metadata_rows.write(self._aux_index, transfer.aux)
            except KVFerryError as error:
                self._fail(str(error))
                return int(KVPoll.Failed)
        return int(POLLS[state])

    def _status_of_failed(self, transfer: Receiver | JointReceiver) -> int:
        reason = f"the prefill server at {self.bootstrap_addr}: {transfer.error}"
        may_report = self._may_report(reason)
        # Without deferred releases SGLang would take the pages back at once.
        if not may_report or not (self.kv_mgr.enable_deferred_decode_kv_release or transfer.pages_reusable):
            return int(KVPoll.Transferring)
        self._fail(reason)
        return int(KVPoll.Failed)

    def _refuse(self, reason: str) -> None:
        """Tells the prefill server, once, that a room that was not opened never will be."""
        if self.transfer is None and self._owns_bootstrap_room and not self._has_refused:
            self._has_refused = True
            dp_rank = getattr(self, "prefill_dp_rank", 0)  # SGLang says it with `init`
            self.kv_mgr.prefill_servers.refuse(self.bootstrap_addr, self.bootstrap_room, dp_rank, reason)

    def _fail_with_others(self, reason: str) -> None:
        """Fails a request that has no transfer, once the other ranks of the group know why, too."""
        self._reason = reason
        if self._may_report(reason):
            self._fail(reason)

    def _may_report(self, reason: str) -> bool:
        """Has a reason ready for whoever reports it first; returns whether the other ranks have had time to do so."""
        self.kv_mgr.record_failure(self.bootstrap_room, reason)
        self._failed_at = self._failed_at or time.monotonic()
        return may_report_failure(self.kv_mgr.attn_tp_size, self._failed_at)

    def _fail(self, reason: str) -> None:
        self.kv_mgr.record_failure(self.bootstrap_room, reason)
        self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Failed)
        self.conclude_state = KVPoll.Failed
