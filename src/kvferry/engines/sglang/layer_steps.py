"""Layers that leave while SGLang's model computes the next ones: KVFERRY_LAYER_RANGES on a prefill server.

Before a step SGLang's scheduler asks of every request whether a prefix of it may be sent early; our hook on that says
which pages the step will compute. Then the model reads the buffers of one layer after the other from the pool, which
asks a counter first, made for caches that are still being loaded. A layer is read once its own keys and values are in
its buffer, so that all layers before it are there. After the step SGLang hands the pages in, as it always does, and
what has not left yet leaves with them.

Where the model reads nothing from the pool, as with a prompt whose latents nobody needs again, all leaves then.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry import MemoryKind, RankLayout
from kvferry.engines.device_events import DeviceEvent
from kvferry.engines.layer_ranges import LayerRanges
from kvferry.engines.sglang import compressed
from kvferry.engines.sglang.caches import DRAFT
from kvferry.engines.sglang.layouts import DENSE, KV_GROUP
from kvferry.errors import UsageError
from kvferry.loggers import logger_of

log = logger_of(__name__)


class LayerSteps:
    """Follows the model through its layers, in the place of the pool's counter. The scheduler's thread owns it."""

    def __init__(
        self,
        pool: Any,
        ranges: LayerRanges,
        layer_ids: Sequence[int],
        make_event: Callable[[], DeviceEvent] | None,
    ) -> None:
        """Takes the counter's place.

        Args:
            pool: SGLang's, of keys and values.
            ranges: of the layers.
            layer_ids: SGLang's numbers of the layers that have keys and values in pages, in order: those of `ranges`.
            make_event: makes an event of what the device has queued until now; None where there is no device.
        """
        self.ranges = ranges
        self._pool = pool
        self._layer_ids = layer_ids
        self._make_event = make_event
        self._counter: Any = None  # SGLang's own, where caches are loaded layer by layer
        self._senders: list[Any] = []  # of the step that runs, or is about to
        self._reached = -1  # how many of `layer_ids` the model is through with in it; -1 before it begins
        self._computed = 0  # ranges of layers that it is through with
        self._is_off = False
        self._take_place()

    def _take_place(self) -> None:
        if self._pool.layer_transfer_counter is not self:
            self._counter = self._pool.layer_transfer_counter
            self._pool.register_layer_transfer_counter(self)

    def __getattr__(self, name: str) -> Any:
        """What else SGLang asks of the counter that was there."""
        return getattr(self._counter, name)

    def announce(self, sender: Any, pages: NDArray[Any], ready: DeviceEvent | None) -> None:
        """Says before a step which pages of a request it will compute; see `KVFerrySender.begin_step`."""
        if self._is_off:
            return
        self._take_place()  # a cache on the host brings a counter of its own when it starts
        if self._reached >= 0:
            self._senders, self._reached, self._computed = [], -1, 0
        if sender.begin_step(pages, ready):
            self._senders.append(sender)

    def wait_until(self, threshold: int) -> None:
        """Called by the pool before a layer is read.

        Args:
            threshold: the layer's number, counted from this rank's first.
        """
        if self._counter is not None:
            self._counter.wait_until(threshold)
        if not self._senders:
            return
        reached = bisect_left(self._layer_ids, threshold + self._pool.start_layer)
        if reached < self._reached:
            self._comes_back(reached)
            return
        self._reached = reached
        computed = self.ranges.before(self.ranges.held[min(reached, len(self._layer_ids) - 1)])
        if computed > self._computed:
            self._computed = computed
            event = self._make_event() if self._make_event is not None else None
            for sender in self._senders:
                sender.layers_computed(computed, event)

    def _comes_back(self, reached: int) -> None:
        """The model reads a layer again: it has begun another step, of which no layer may leave, or computes anew."""
        if reached > 0:
            self._is_off = True
            reason = (
                f"the model came back to layer {self._layer_ids[reached]} in one step: KVFERRY_LAYER_RANGES is for "
                "models that do not"
            )
            log.error("%s; from now on layers leave when their step is over", reason)
            for sender in self._senders:
                sender.give_step_up(reason)
        self._senders = []


def layer_steps(args: Any, layout: RankLayout, most: int) -> LayerSteps | None:
    """Follows a rank's model; returns None, and says why, where its layers leave with their step alone.

    Args:
        args: the rank's KVArgs, to which `remember_pools` has added its pools.
        most: into how many ranges its layers are to be divided.

    Raises:
        UsageError: if SGLang computes parts of a step side by side: a layer is read before all of it is there.
        EngineContractError: if SGLang is not what this builds on.
    """
    from sglang.srt.runtime_context import get_exec

    from kvferry.engines.contract import enforce
    from kvferry.engines.sglang.contract import LAYERS, engine_version

    enforce(LAYERS, engine_version(), warns=False)
    if get_exec().overlap.enable_two_batch_overlap:
        raise UsageError(
            "KVFERRY_LAYER_RANGES with --enable-two-batch-overlap: one half of a batch reads a layer while the other "
            "has not computed it. Leave one of them away"
        )
    pool, layer_ids = _pool_of_layers(args.kvferry_pools.target)
    ranges = ranges_of(layout, most)
    # DeepSeek V4 numbers layers by compression: there may be as many numbers, in another order.
    if ranges.count == 1 or len(layer_ids) != len(ranges.held) or type(pool).__name__ == compressed.POOL:
        log.warning(
            "KVFERRY_LAYER_RANGES is %d, but all layers leave when their step is over: %s",
            most,
            "there is but one"
            if ranges.count == 1
            else f"{type(pool).__name__} has {len(layer_ids)} in its own numbers",
        )
        return None
    return LayerSteps(pool, ranges, layer_ids, _event if layout.device.kind is MemoryKind.VRAM else None)


def ranges_of(layout: RankLayout, most: int) -> LayerRanges:
    """Divides a rank's layers: of keys and values, and of what lies in pages of theirs and has their numbers.

    Windows and recurrent state SGLang hands in once, with the last step; a draft model comes after the model; and
    layers that SGLang lists apart have numbers of their own, which do not say when they are computed.
    """
    at_the_end = {
        shard.component.name
        for shard in layout.shards
        if shard.group != KV_GROUP or shard.component.name.startswith((DRAFT, DENSE))
    }
    return LayerRanges.of(layout, most, apart_from=at_the_end)


def _pool_of_layers(pool: Any) -> tuple[Any, list[int]]:
    """Returns the pool that asks the counter, and its numbers of the layers that it has in pages."""
    full = getattr(pool, "full_kv_pool", None)
    if full is not None and hasattr(pool, "layers_mapping"):  # beside sliding windows: layers have their numbers in it
        pool = full
    numbers = getattr(pool, "full_attention_layer_id_mapping", None)  # beside recurrent state: those of the model
    return pool, [*range(pool.start_layer, pool.start_layer + pool.layer_num)] if numbers is None else sorted(numbers)


def _event() -> DeviceEvent:
    import torch

    # A thread waits for it: it is to sleep meanwhile, not to spin on a processor that the scheduler wants.
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record()
    recorded: DeviceEvent = event
    return recorded


def announce(_: None, scheduler: Any, request: Any, allow_send: bool = True) -> None:
    """Says before a step which pages of a request it will compute, where layers are to leave one by one.

    They are those that SGLang hands in after the step, if it has handed in all that was computed before. With
    overlapping steps it has not where a prompt's next step begins: that step's pages leave at its end.

    Args:
        request: as it schedules it.
        allow_send: false while pages of the request may still be loaded from the host.
    """
    sender = getattr(request, "disagg_kv_sender", None)
    steps = getattr(getattr(sender, "kv_mgr", None), "layer_steps", None)
    if steps is None or not allow_send or request.pending_bootstrap:
        return
    allocator = scheduler.token_to_kv_pool_allocator
    page_tokens = allocator.page_size
    start, prompt = request.start_send_idx, len(request.origin_input_ids)
    stop = min(request.extend_end, prompt)
    if stop < prompt:
        stop -= stop % page_tokens  # a page that is not full leaves with the step that fills it
    if stop <= start or start < request.prefix_len - request.prefix_len % page_tokens:
        return
    rows = scheduler.req_to_token_pool.req_to_token[request.kv.req_pool_idx, start:stop]
    places = allocator.translate_kv_indices_for_transfer(rows)
    steps.announce(sender, *_on_host(places[::page_tokens] // page_tokens))


def _on_host(numbers: Any) -> tuple[NDArray[Any], DeviceEvent | None]:
    """Copies numbers from the device, for which the scheduler does not wait: they are there after the event."""
    if not numbers.is_cuda:
        return np.asarray(numbers), None
    import torch

    copied = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    copied.copy_(numbers, non_blocking=True)
    return copied.numpy(), _event()
