"""Code of the callers' that endpoints run: it raises anything, and keeps the thread that runs it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from kvferry.errors import TransportError
from proof.simulation.adversary import Adversary
from proof.simulation.raised import OF_A_CALLER
from proof.simulation.requests import RankSide, SendSide
from proof.simulation.universe import Universe

_KINDS: tuple[type[BaseException], ...] = (
    ValueError,
    TransportError,
    asyncio.CancelledError,
    KeyboardInterrupt,
    SystemExit,
    GeneratorExit,
)
_CALLBACK_S = (0.3, 2.0, 6.0)  # for which one may block: nothing else waits for callbacks
_SIGNAL_S = 0.3  # the same of signals, for which a worker waits: less than any deadline


class UsersCode:
    """That of the callers in one world."""

    def __init__(self, world: Universe, adversary: Adversary) -> None:
        self._world = world
        self._adversary = adversary
        self._of_callbacks = random.Random(f"{world.seed} which callbacks fail")
        self._of_signals = random.Random(f"{world.seed} which signals fail")

    def _counts(self, kind: str, draw: random.Random) -> bool:
        odds = self._world.circumstances.odds.get(kind)
        return odds is not None and draw.random() < odds and self._adversary.counts(kind)

    def add_callback(self, side: RankSide) -> None:
        """Has a transfer call its caller back, where that is to fail."""
        assert side.transfer is not None
        if self._counts("change callback", self._of_callbacks):
            side.transfer.add_change_callback(lambda: self._called_back(side))
            self._world.threads_changed()  # the first may begin a thread

    def _called_back(self, side: RankSide) -> None:
        draw = self._of_callbacks
        if draw.random() < 0.5:
            self._world.block(draw.choice(_CALLBACK_S), f"a callback of {side.request}")
        if draw.random() < 0.5:
            raise draw.choice(_KINDS)(OF_A_CALLER)

    def signal(self, side: SendSide, is_ready: Callable[[], bool] | None) -> Callable[[], bool] | None:
        """Returns what says whether pages are ready: what a caller has, or what fails first, or instead."""
        if not self._counts("ready", self._of_signals):
            return is_ready
        left, kind = self._of_signals.randint(1, 3), self._of_signals.choice([None, *_KINDS])
        if kind is not None:
            side.request.excused("what says that its pages are ready raises")

        def look() -> bool:
            nonlocal left
            left -= 1
            if kind is None and left == 0:
                self._world.block(self._of_signals.random() * _SIGNAL_S, f"a signal of {side.request}")
            if kind is not None and left <= 0:
                raise kind(OF_A_CALLER)
            return left <= 0 and (is_ready is None or is_ready())

        return look
