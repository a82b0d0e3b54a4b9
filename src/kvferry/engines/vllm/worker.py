"""The connector's side in vLLM's workers: opens rooms, hands pages in, and reports to vLLM what is done.

kvferry's own threads move the bytes, also while the engine does nothing; the methods here only submit and poll.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any, TypeVar

from kvferry import (
    DecodeEndpoint,
    GroupPages,
    MemoryKind,
    PrefillEndpoint,
    RankCoordinates,
    Receiver,
    Settings,
    TransferState,
)
from kvferry.engines.device_events import DeviceEvent, bind_thread
from kvferry.engines.layer_ranges import LayerRanges
from kvferry.engines.vllm.blocks import LoadedBlocks, copy_blocks
from kvferry.engines.vllm.layouts import DescribedCaches
from kvferry.engines.vllm.outgoing import OutgoingRequests, PagesToSend
from kvferry.engines.vllm.stats import MEMORY, TransferLog
from kvferry.engines.vllm.steps import BlocksToReceive, BlocksToSend, GroupBlocks, Step
from kvferry.errors import KVFerryError, TransferError
from kvferry.loggers import logger_of

log = logger_of(__name__)

Result = TypeVar("Result")

_NEEDED = (
    "vLLM needs its blocks for other requests, or is paused, and no decode rank has opened it within "
    "KVFERRY_BOOTSTRAP_TIMEOUT_S: give prefill servers more memory for the queue of decode servers, or take fewer "
    "requests at once"
)


_ONE_RANGE = (
    "KVFERRY_LAYER_RANGES is %d, but all layers leave when their step is over: in which order the model computes them "
    "cannot be told from their names, or there is but one"
)


@dataclass(slots=True)
class _Progress:
    """How far the step that runs has come.

    Attributes:
        ranges: how many ranges of layers it is through with.
        last_layer: the last layer's number; -1 before the first.
        pages: by request, what is to be sent of it, once needed.
    """

    ranges: int = 0
    last_layer: int = -1
    pages: dict[str, dict[str, PagesToSend]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Results:
    """What is reported to vLLM after a step.

    Attributes:
        sent: requests whose blocks are not read any more.
        received: requests whose blocks are not written to any more, whether they were received or failed.
        failed: those of them that failed.
    """

    sent: set[str]
    received: set[str]
    failed: set[str]


@dataclass(slots=True)
class _Load:
    """A request on its way.

    Attributes:
        is_given_up: whether what comes of it is not to be used, even if all does.
    """

    blocks: BlocksToReceive
    receiver: Receiver
    is_given_up: bool = False


class IncomingRequests:
    """The requests that a worker receives: what vLLM hears of them, once nothing is written to their blocks any more.

    Only its main thread calls this. Nothing here looks at a request of which nothing has happened, however many are on
    their way: rooms call back when they change.
    """

    def __init__(self, log: TransferLog, loaded_blocks: LoadedBlocks | None) -> None:
        """Begins with none.

        Args:
            log: is told of those that have ended.
            loaded_blocks: clears what loads leave in their blocks; None where vLLM clears no blocks either.
        """
        self._log = log
        self._loaded_blocks = loaded_blocks
        self._loads: dict[str, _Load] = {}
        self._changed: deque[str] = deque()  # names of those of which something has happened, as often as it has
        self._failed: set[str] = set()  # to be reported as such: those without a room, or whatever has come of them
        self._came: set[str] = set()  # to be reported as received: those that needed no room

    @property
    def receivers(self) -> list[Receiver]:
        """The rooms of those on their way."""
        return [load.receiver for load in self._loads.values()]

    def add(self, blocks: BlocksToReceive, receiver: Receiver) -> None:
        """Takes a request whose room is open."""
        request = blocks.request
        self._loads[request] = _Load(blocks, receiver)
        receiver.add_change_callback(partial(self._changed.append, request))
        self._changed.append(request)  # it may have changed before

    def have_come(self, request: str) -> None:
        """Takes a request whose cache was here."""
        self._came.add(request)

    def fail(self, requests: Iterable[str]) -> None:
        """Takes requests that are to fail, though they were not asked for, or have come."""
        self._failed.update(requests)

    def give_up(self, request: str, reason: str) -> bool:
        """Aborts a request. Returns whether it is on its way here."""
        load = self._loads.get(request)
        if load is None:
            return False
        load.receiver.abort(reason)
        load.is_given_up = True
        return True

    def take_ended(self) -> tuple[set[str], set[str]]:
        """Returns the requests that have ended since the last call, and those of them that failed."""
        failed, self._failed = self._failed, set()
        came, self._came = self._came, set()
        ended = failed | came
        while self._changed:
            request = self._changed.popleft()
            load = self._loads.get(request)
            if load is None or not load.receiver.pages_reusable:
                continue
            del self._loads[request]
            self._log.received(request, load.receiver)
            ended.add(request)
            if load.receiver.state is not TransferState.SUCCESS or load.is_given_up:
                failed.add(request)  # vLLM clears its blocks itself, as it gives them out again
            elif self._loaded_blocks is not None:
                self._loaded_blocks.clear(load.blocks, load.receiver.stats.absent)
        return ended, failed


class WorkerSide:
    """The connector in a worker, owned by its main thread. Only its start and its end wait for anything.

    Attributes:
        log: the figures of transfers.
        prefill: sends; None on a decode server.
        decode: receives; None on a prefill server.
    """

    def __init__(
        self,
        described: DescribedCaches,
        coordinates: RankCoordinates,
        settings: Settings,
        *,
        engine: str,
        instance: str | None = None,
        sends: bool,
        receives: bool,
        fingerprint: Mapping[str, str],
        loaded_blocks: LoadedBlocks | None = None,
        layer_numbers: Mapping[str, int] | None = None,
        drain_timeout_s: float | None = None,
        is_told_late: bool = False,
    ) -> None:
        """Registers the caches and starts what is needed.

        Args:
            instance: the name of this start of it, as its scheduler has it.
            fingerprint: what its caches are beyond their layout.
            loaded_blocks: clears what loads leave in their blocks; None where vLLM clears no blocks either.
            layer_numbers: by the name that vLLM tells when the model is through with a layer, its number; None if
                layers leave with their step alone.
            drain_timeout_s: how long rooms may stay open once the engine takes no new requests.
            is_told_late: as in `OutgoingRequests`.

        Raises:
            KVFerryError: if memory cannot be registered, or a port is taken.
        """
        self._described = described
        self._layout_groups = {group.name: group for group in described.layout.groups}
        self.prefill: PrefillEndpoint | None = None
        self.decode: DecodeEndpoint | None = None
        self._draining: list[PrefillEndpoint | DecodeEndpoint] = []  # those that were told to
        self._drain_timeout_s, self._settles_s = drain_timeout_s, settings.quarantine_s
        self.outgoing: OutgoingRequests | None = None
        self._unreported: set[str] = set()  # requests to be sent whose room could not be opened
        self._needed: set[str] = set()  # those that were given up since vLLM needs their blocks
        self.log = TransferLog()
        self.incoming = IncomingRequests(self.log, loaded_blocks)
        self._layer_numbers = layer_numbers or {}
        self._ranges = LayerRanges.of(described.layout, settings.layer_ranges if layer_numbers else 1)
        if sends and settings.layer_ranges > 1 and self._ranges.count == 1:
            log.warning(_ONE_RANGE, settings.layer_ranges)
        self._step = _Progress()
        self._is_told_late = is_told_late
        given = {"engine": engine, "coordinates": coordinates, "settings": settings, "fingerprint": fingerprint}
        try:
            on_all_processors(partial(self._start, given, instance=instance, sends=sends, receives=receives))
        except BaseException:
            self.close()
            raise

    def _start(self, given: Mapping[str, Any], *, instance: str | None, sends: bool, receives: bool) -> None:
        layout = self._described.layout
        prefill, decode = partial(PrefillEndpoint, layout, **given), partial(DecodeEndpoint, layout, **given)
        bind_thread(layout.device)
        if sends:
            # vLLM registers caches before it captures graphs, and a copy, an allocation or a look at an event on any
            # other thread breaks a capture. So nobody may attach before; on a CPU nothing is captured.
            self.prefill = prefill(instance=instance, announces=layout.device.kind is not MemoryKind.VRAM)
            self.outgoing = OutgoingRequests(self._ranges, layout.device, is_told_late=self._is_told_late)
        if receives:
            self.decode = decode()

    def close(self) -> None:
        """Closes the endpoints, within close_timeout_s; where they drain, once what was sent has arrived."""
        if self.outgoing is not None:
            self.outgoing.close()
        for draining in self._draining:  # what left with the last step may be on its way
            draining.wait_drained(self._settles_s)
        for endpoint in (self.prefill, self.decode):
            if endpoint is not None:
                endpoint.close()

    def release(self) -> None:
        """Closes the endpoints, before vLLM gives the caches' memory back.

        Raises:
            TransferError: if something may still write to the caches, or read them: vLLM must not go on then.
        """
        self.close()
        endpoints = [each for each in (self.prefill, self.decode) if each is not None]
        if pages := sum(each.status().quarantined_pages for each in endpoints):
            raise TransferError(
                f"{pages} pages of vLLM's caches may still be written or read by transfers that have ended here, after "
                "they were told to stop (KVFERRY_CLOSE_TIMEOUT_S): their memory must not be given back"
            )

    # ---- what comes with a step -----------------------------------------------------------------------------------

    def before(self, step: Step) -> None:
        """Drops the pages of preempted requests. Called before the step runs, which may write to their blocks."""
        if self.outgoing is not None and step.preempted:
            self.outgoing.preempt(step.preempted)

    def receive(self, step: Step) -> None:
        """Requests the caches of a step. In the first of an engine that ends with the requests that it has, says so."""
        if step.drains:
            self._drain()
        for room, engine in step.expect.items():
            if self.decode is not None:
                self.decode.expect(room, engine=engine)
        for receiving in step.receive:
            self._receive(receiving)

    def _drain(self) -> None:
        """Shows everyone that this engine is about to leave; it still opens rooms for the requests that it has."""
        for endpoint in (self.prefill, self.decode):
            if endpoint is not None and endpoint not in self._draining:
                endpoint.drain(self._drain_timeout_s, grace_s=inf)
                self._draining.append(endpoint)

    def layer_computed(self, name: str, step: Step, fence: Callable[[], DeviceEvent | None]) -> None:
        """Sends the layers before this one, where a range of them ends. Called once the device has it queued.

        A model that comes back to a layer writes to pages that may have left: their requests are given up.

        Args:
            name: vLLM's name for the layer.
            fence: makes one of what was queued until now.
        """
        number = self._layer_numbers.get(name)
        if number is None or not step.send:
            return
        if number < self._step.last_layer:
            self._comes_back_to(name, step)
            return
        self._step.last_layer = number
        ranges = self._ranges.before(number)
        if ranges > self._step.ranges:
            self._step.ranges = ranges
            reached = fence()
            for sending in step.send:
                self.send(sending, reached, ranges)

    def _comes_back_to(self, name: str, step: Step) -> None:
        """Ends the sending of layers before the end of their step."""
        reason = f"the model came back to layer {name!r} in one step: KVFERRY_LAYER_RANGES is for models that do not"
        log.error("%s; from now on layers leave when their step is over", reason)
        self._layer_numbers = {}
        if self.outgoing is not None and self._step.ranges:
            for sending in step.send:
                self.outgoing.give_up(sending.request, reason)

    def announce(self) -> None:
        """Lets decode ranks find this rank, unless they can already. Called once the engine has captured its graphs."""
        if self.prefill is not None:
            self.prefill.announce()

    def after(self, step: Step, fence: DeviceEvent | None) -> None:
        """Sends what a step computes, and gives up what is not needed. Called once the device has the step queued.

        Args:
            fence: of the step; None if it is done.
        """
        if self.outgoing is not None:
            self.outgoing.step_ended()
        for sending in step.send:
            self.send(sending, fence)
        self._step = _Progress()
        for request, reason in step.give_up.items():
            if not self.incoming.give_up(request, reason) and self.outgoing is not None:
                self.outgoing.give_up(request, reason)
        for request in step.needed:
            if self.outgoing is not None and self.outgoing.give_up(request, _NEEDED, unless_asked_for=True):
                self._needed.add(request)
        self.incoming.fail(step.fail)
        if self.prefill is not None:
            for room, reason in step.refuse.items():
                self.prefill.refuse(room, reason)

    def results(self, finished: Collection[str]) -> Results:
        """Returns what is done.

        Args:
            finished: requests that have ended here since the last call.
        """
        sent: set[str] = set()
        if self.outgoing is not None:
            if finished:
                self.outgoing.keep(finished)
                sent = self._unreported.intersection(finished)
                self._unreported -= sent
            for request, sender in self.outgoing.take_ended().items():
                self.log.sent(request, sender, MEMORY if request in self._needed else "")
                self._needed.discard(request)
                sent.add(request)
        received, failed = self.incoming.take_ended()
        return Results(sent, received, failed)

    # ---- rooms ------------------------------------------------------------------------------------------------------

    def send(self, sending: BlocksToSend, fence: DeviceEvent | None, ranges: int | None = None) -> None:
        """Sends what a step computes: all layers, or those of the first ranges."""
        if self.prefill is None or self.outgoing is None or sending.request in self._unreported:
            return
        pages = self._step.pages.get(sending.request)
        if pages is None:
            pages = {name: self.pages(name, blocks, sending.tokens) for name, blocks in self._here(sending.groups)}
            self._step.pages[sending.request] = pages
        try:
            open_sender = partial(self.prefill.open, sending.room, tokens=sending.tokens, depends_on=sending.depends_on)
            self.outgoing.add(sending.request, open_sender, pages, fence, last=sending.is_last, ranges=ranges)
        except KVFerryError as error:
            log.error("request %s cannot be sent: %s", sending.request, error)
            self.prefill.refuse(sending.room, str(error))
            self._unreported.add(sending.request)
            self.log.not_sent()

    def _receive(self, receiving: BlocksToReceive) -> None:
        assert self.decode is not None
        request = receiving.request
        try:
            if receiving.problem:
                raise KVFerryError(receiving.problem)
            if receiving.copied_from:
                for name, blocks in receiving.copied_from.items():
                    copy_blocks(self._described, name, blocks, receiving.groups[name])
                self.incoming.have_come(request)
                return
            pages = {}
            for name, blocks in self._here(receiving.groups):
                part = self.pages(name, blocks, receiving.tokens, receiving.prefix_tokens)
                pages[name] = GroupPages(part.pages, part.start if len(part.pages) else None, blocks.held_tokens)
            receiver = self.decode.open(
                receiving.room,
                pages,
                engine=receiving.engine,
                prefix_tokens=receiving.prefix_tokens,
                # Where a chunk begins kvferry cannot tell from the number of tokens: the pages that are named count.
                # That both sides count as many tokens is compared by what the request depends on.
                tokens=None if self._described.has_chunks else receiving.tokens,
                depends_on=receiving.depends_on,
                instance=receiving.instance,
            )
        except KVFerryError as error:
            log.error("request %s cannot be received: %s", request, error)
            if not receiving.copied_from:
                self.decode.refuse(receiving.room, str(error), engine=receiving.engine)
            if receiving.is_wanted:
                self.incoming.fail((request,))
                self.log.not_received()
            return
        if receiving.is_wanted:
            self.incoming.add(receiving, receiver)

    def _here(self, groups: Mapping[str, GroupBlocks]) -> Iterator[tuple[str, GroupBlocks]]:
        """Yields the groups of which this pipeline stage has layers."""
        return ((name, blocks) for name, blocks in groups.items() if name in self._described.pages_per_block)

    def pages(self, group: str, given: GroupBlocks, tokens: int, prefix_tokens: int = 0) -> PagesToSend:
        """Returns the pages of blocks, as far as what this rank keeps of the request's tokens reaches.

        There are none where it keeps nothing of those behind the prefix.
        """
        ratio = self._described.pages_per_block[group]
        start, pages = given.start * ratio, given.pages(ratio)
        kept, held = self._described.kept(group, tokens), self._described.kept(group, prefix_tokens)
        most = -(-kept // self._layout_groups[group].page_tokens) - start if held < kept else 0
        return PagesToSend(start, pages[: max(0, most)])


def on_all_processors(function: Callable[[], Result]) -> Result:
    """Runs a function in a thread that may run where the process's parent may, and so may all threads it starts.

    Returns what it returns.

    vLLM binds its workers' main threads to few processors, on CPU to one; threads inherit that.
    """
    with ThreadPoolExecutor(1, "kvferry-vllm-start", initializer=_leave_the_processor) as starter:
        return starter.submit(function).result()


def _leave_the_processor() -> None:
    if hasattr(os, "sched_setaffinity"):
        try:
            os.sched_setaffinity(0, os.sched_getaffinity(0) | os.sched_getaffinity(os.getppid()))
        except OSError as error:
            log.debug("threads stay on the processors of the main thread: %s", error)
