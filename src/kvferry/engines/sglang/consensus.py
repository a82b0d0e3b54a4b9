"""What the pipeline stages of a decode server agree on, for every request.

Stages compute one batch, so that each must have the same requests in the same order. SGLang's agree by what the first
proposes, each passes on, and the last decides: that goes round, and each stage does it, after the one before it. Three
things are lost in SGLang 0.5.22 and 0.5.23, whatever the backend:

* A stage says which transfers it has taken from its queue, and leaves out those that failed. The stages behind it keep
  such a request, its pages and its metadata for ever.
* A transfer that failed on one stage only is computed on the others.
* A request that an earlier stage has admitted, and a later one has no memory for yet, is not proposed again. It and
  all that its client has asked for with it are never answered.

The first makes the third likely: the later stage has less memory from then on. So here stages say which transfers have
failed, too, and a stage admits what it could not before anything that comes later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any


def agree_on_ended(_: Callable[..., Any], scheduler: Any) -> list[list[str]]:
    """Returns the transfers that have ended on all stages up to this one, and those of them that failed on any.

    In the place of `_pp_pd_get_decode_transferred_ids`, which does not tell them apart.
    """
    from sglang.srt.disaggregation.base.conn import KVPoll

    is_first = scheduler.pp_group.is_first_rank
    before, failed_before = (None, ()) if is_first else scheduler._pp_recv_pyobj_from_prev_stage()
    transfers = scheduler.disagg_decode_transfer_queue.queue
    ended, failed = scheduler.get_rids(transfers, False, [KVPoll.Success, KVPoll.Failed], [KVPoll.Failed])
    if before is None:
        return [ended, failed]
    present = _rids(transfers) | _rids(scheduler.disagg_decode_prealloc_queue.queue)
    gone = set(before) - present  # failed here while they waited for memory
    ended_on_all = [rid for rid in before if rid in gone.union(ended)]
    return [ended_on_all, [rid for rid in ended_on_all if rid in gone.union(failed, failed_before)]]


def take_ended(
    original: Callable[..., Any], scheduler: Any, release_rids: list[list[str]] | None
) -> list[list[str]] | None:
    """Takes the transfers that have ended on all stages from the queue; returns those that have left it.

    Around `process_decode_transfer_queue`.

    Args:
        release_rids: what the stages have agreed on, by `agree_on_ended`.
    """
    from sglang.srt.disaggregation.base.conn import KVPoll

    if release_rids is None:
        original(scheduler, None)
        return None
    ended, failed = release_rids
    queue = scheduler.disagg_decode_transfer_queue
    for each in queue.queue:
        if each.req.rid in failed and each.kv_receiver.poll() != KVPoll.Failed:
            each.kv_receiver.fail("the transfer failed on another pipeline stage, which says why in its log")
    original(scheduler, ended)
    remaining = _rids(queue.queue)
    return [[rid for rid in rids if rid not in remaining] for rids in (ended, failed)]


def admit(original: Callable[..., Any], scheduler: Any, prealloc_rids: list[list[str]] | None) -> Any:
    """Admits what this stage could not before, then what comes behind it; returns what was admitted, and what failed.

    Around `process_prealloc_queue`.

    Args:
        prealloc_rids: what the stage before has admitted, and what has failed.
    """
    if prealloc_rids is None or scheduler.pp_group.is_first_rank:
        return original(scheduler, prealloc_rids)
    # What the stage before has admitted, and failed, that this one has not yet, in that order.
    owed: deque[list[list[str]]] | None = getattr(scheduler, "kvferry_owed", None)
    if owed is None:
        owed = scheduler.kvferry_owed = deque()
    owed.append(prealloc_rids)
    taken: list[list[str]] = [[], []]
    while owed:
        good = owed[0][0]
        bad = [rid for _, each in owed for rid in each]
        taken = [[*before, *now] for before, now in zip(taken, original(scheduler, [good, bad]), strict=True)]
        waiting = _rids(scheduler.disagg_decode_prealloc_queue.queue)
        left = [[rid for rid in rids if rid in waiting] for rids in owed[0]]
        if any(left):
            owed[0] = left
            break
        owed.popleft()
    if owed and not any(owed[-1]):
        owed.pop()
    return taken


def _rids(requests: Iterable[Any]) -> set[str]:
    return {each.req.rid for each in requests}
