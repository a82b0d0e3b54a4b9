"""What happens when vLLM's engine process is told to end."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from math import inf
from types import FrameType
from typing import Any, cast

import pytest
from tests.support.vllm_conditions import made_up
from tests.unit.engines.test_vllm_worker import described

from kvferry import RankCoordinates, Settings
from kvferry.engines.vllm import worker as worker_module
from kvferry.engines.vllm.scheduling import SchedulerSide
from kvferry.engines.vllm.steps import Step
from kvferry.engines.vllm.termination import drain_timeout_s, letting_all_come, watch_for_termination
from kvferry.engines.vllm.worker import WorkerSide

Handler = Callable[[int, FrameType | None], None]


@pytest.fixture
def handled() -> Iterator[Callable[[Any], None]]:
    """Sets what a SIGTERM does, until the end of the test."""
    before = signal.getsignal(signal.SIGTERM)
    yield lambda handler: cast(None, signal.signal(signal.SIGTERM, handler))
    signal.signal(signal.SIGTERM, before)


def vllms(happened: list[str]) -> Handler:
    def handler(_: int, __: FrameType | None) -> None:
        happened.append("vLLM")

    handler.__module__ = "vllm.v1.engine.core"
    return handler


def test_a_sigterm_is_noticed_before_vllm_handles_it(handled: Callable[[Any], None]):
    happened: list[str] = []
    handled(vllms(happened))
    assert watch_for_termination(lambda: happened.append("ours"))
    os.kill(os.getpid(), signal.SIGTERM)
    assert happened == ["ours", "vLLM"]


@pytest.mark.parametrize("handler", [signal.SIG_DFL, signal.SIG_IGN, lambda *_: None])
def test_a_program_that_has_the_engine_in_itself_keeps_its_own_handler(handled: Callable[[Any], None], handler: Any):
    handled(handler)
    assert not watch_for_termination(lambda: None)
    assert signal.getsignal(signal.SIGTERM) == handler


def test_workers_hear_of_it_with_the_next_step():
    scheduler = SchedulerSide((), engine="e", may_send=True, may_receive=False, conditions=made_up())
    assert not scheduler.take_step({}, ()).drains
    scheduler.drain()
    assert scheduler.take_step({}, ()).drains


class Decode:
    def __init__(self, *_: Any, **__: Any) -> None:
        self.drained: list[tuple[float | None, float]] = []

    def drain(self, timeout_s: float | None = None, *, grace_s: float = 0.0) -> None:
        self.drained.append((timeout_s, grace_s))

    def close(self) -> None:
        pass


def test_an_endpoint_that_drains_still_takes_the_rooms_of_requests_that_the_engine_has(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(worker_module, "DecodeEndpoint", Decode)
    side = WorkerSide(
        described(1),
        RankCoordinates(),
        Settings(),
        engine="e",
        sends=False,
        receives=True,
        fingerprint={},
        drain_timeout_s=7.0,
    )
    decode = cast(Decode, side.decode)
    side.receive(Step())
    assert decode.drained == []
    for _ in range(3):
        side.receive(Step(drains=True))
    assert decode.drained == [(7.0, inf)], "once"


@pytest.mark.parametrize(("given_s", "expected_s"), [(0, 0), (2, 1), (30, 28), (600, 60)])
def test_rooms_are_given_up_before_vllm_kills_the_process(given_s: int, expected_s: float):
    assert drain_timeout_s(Settings(drain_timeout_s=60.0), given_s) == expected_s


def test_an_operators_drain_waits_for_what_the_engine_brings_unless_it_is_set_otherwise():
    assert letting_all_come(Settings()).drain_grace_s == inf
    assert letting_all_come(Settings(drain_grace_s=3.0)).drain_grace_s == 3.0
