"""Runs of sub-chunks of pools in CPU memory, each in one call of compiled code (`blocks.c`)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path

from kvferry.errors import KVFerryError
from kvferry.staging.host import COMPILED, Group, HostKernels, described
from kvferry.staging.kernels import Watch, unwatched
from kvferry.staging.runs import Comings, Runs, Step
from kvferry.transport import Transport
from kvferry.transport.compiled_posts import Posted, Wire

SLICE_BYTES = 1 << 20
"""Of what is gathered, and written, while it is in a processor's cache: staged transfers between processes of a machine
took 0.35 to 0.39 CPU seconds a GB, not 0.41 to 0.48, and moved a quarter more."""

MOST_STEPS = 8

_POINTER, _NUMBER, _SECONDS = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
_NOT_MADE, _HALF_POSTED = 1, 2


class _Step(ctypes.Structure):
    _fields_ = (
        ("groups", ctypes.POINTER(Group)),
        ("num_groups", _NUMBER),
        ("packed", _POINTER),
        ("length", _NUMBER),
        ("to", ctypes.c_uint64),
        ("notification", ctypes.c_char_p),
        ("notification_length", _NUMBER),
        ("handles", _POINTER * 2),
        ("num_handles", _NUMBER),
        ("ended", _NUMBER),
        ("ended_bytes", _NUMBER),
        ("is_notified", _NUMBER),
        ("problem", _NUMBER),
        ("begun_at", _SECONDS),
        ("posted_at", _SECONDS),
        ("posting_s", _SECONDS),
    )


class CompiledRuns(Runs):
    """Runs steps in compiled code. What that could not begin is begun again by the interpreter, which says why."""

    def __init__(
        self,
        kernels: HostKernels,
        transport: Transport,
        now: Callable[[], float],
        *,
        library: Path = COMPILED,
        watch: Watch = unwatched,
    ) -> None:
        """As for `Runs`.

        Args:
            library: the compiled code.
            watch: is put around each call of it.

        Raises:
            OSError: if there is no compiled code.
            AttributeError: if that is another library.
        """
        super().__init__(kernels, transport, now, most_steps=MOST_STEPS)
        self._host = kernels
        run = ctypes.CDLL(str(library)).kvferry_run
        run.argtypes = (
            ctypes.POINTER(Wire),
            ctypes.POINTER(_Step),
            _NUMBER,
            _NUMBER,
            ctypes.POINTER(_NUMBER),
        )
        run.restype = _NUMBER
        self._run = watch(run)

    def steps_to(self, receiver: str) -> int:
        try:
            return self.most_steps if self._transport.compiled_way(receiver) is not None else 1
        except KVFerryError:
            return 1

    def run(self, steps: Sequence[Step], receiver: str, comings: Comings) -> int:
        made = (_Step * len(steps))()
        try:
            for step in steps:
                self._host.check_all(step.blocks)
            way = self._transport.compiled_way(receiver)
            kept = [_describe(step, each) for step, each in zip(steps, made, strict=True)]
        except Exception:  # nothing was posted: the interpreter says why, if it meets it, too
            way = None
        if way is None:  # one: nothing is polled between those of a run
            return super().run(steps[:1], receiver, comings)
        slice_bytes = SLICE_BYTES if way.copies_as_it_posts else max(step.source.length for step in steps)
        begun: int = self._run(way.wire, made, len(steps), slice_bytes, comings.count)
        del kept
        for step, each in zip(steps[:begun], made, strict=False):
            if each.problem == _NOT_MADE and not each.num_handles:
                self._do(step, receiver)
                continue
            if step.gathered_at is None:
                # Slices are gathered and posted in turns: shown as if all were gathered first.
                step.begun_at, step.gathered_at = each.begun_at, each.posted_at - each.posting_s
            step.posted_at = each.posted_at
            step.transfer = way.adopt(_posted(each), step.notification)
        return begun or super().run(steps[:1], receiver, comings)


def _describe(step: Step, made: _Step) -> list[object]:
    """Describes a step for compiled code. Returns what must be kept till it is done."""
    groups, kept = described(step.blocks)
    made.groups, made.num_groups = groups, len(groups)
    made.packed, made.length, made.to = step.source.address, step.source.length, step.address
    made.notification, made.notification_length = step.notification, len(step.notification)
    return kept


def _posted(step: _Step) -> Posted:
    handles = step.handles[: step.num_handles]
    return Posted(
        ended=step.ended,
        ended_bytes=step.ended_bytes,
        posting_s=step.posting_s,
        handles=handles,
        is_notified=bool(step.is_notified),
        is_made=step.problem != _NOT_MADE,
        is_half_posted=step.problem == _HALF_POSTED,
    )
