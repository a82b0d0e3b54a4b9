"""How long fuzzers run, from which seeds, and how a failure is replayed."""

from __future__ import annotations

import logging
import random
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from tests.support.tiers import Tier

_BEYOND_S = 120.0
"""What a fuzzer may take beside its budget: to set up, to check, to clean up."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if "fuzz" in item.path.parts:
            item.add_marker(pytest.mark.timeout(fuzz_seconds(config) + _BEYOND_S))


def fuzz_seconds(config: pytest.Config) -> float:
    """How long each fuzzer runs."""
    given: float | None = config.getoption("--fuzz-seconds")
    return Tier(config.getoption("--tier")).amount(quick=2.0, full=20.0, long=300.0) if given is None else given


@dataclass
class Fuzz:
    """One fuzzer's budget.

    Attributes:
        seconds: how long it runs.
        only: the one seed to run; None draws them.
        inputs: how many inputs it has tried; the fuzzer counts.
        seed: of the round that runs.
    """

    seconds: float
    only: str | None
    inputs: int = 0
    seed: str = ""
    started_at: float = field(default_factory=time.monotonic)

    def rounds(self) -> Iterator[random.Random]:
        """A source of chance for every round until the time is up; or for the one to replay."""
        base = secrets.token_hex(4)
        self.started_at = time.monotonic()
        number = 0
        while number == 0 or (self.only is None and time.monotonic() - self.started_at < self.seconds):
            self.seed = self.only or f"{base}-{number}"
            number += 1
            yield random.Random(self.seed)

    def report(self) -> str:
        minutes = max(time.monotonic() - self.started_at, 1e-9) / 60
        return f"{self.inputs} inputs, {self.inputs / minutes:,.0f} a minute"


@pytest.fixture
def fuzz(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Iterator[Fuzz]:
    made = Fuzz(fuzz_seconds(request.config), request.config.getoption("--fuzz-seed"))
    failed_before = request.session.testsfailed
    yield made
    with capsys.disabled():
        print(f"\n{request.node.name}: {made.report()}")
        if request.session.testsfailed > failed_before:
            print(f"the last round was: pytest {request.node.nodeid} --fuzz-seed {made.seed}")


class Alarms(logging.Handler):
    """Keeps what kvferry logs of errors that it did not expect; what it drops it may drop without a word here."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info is not None and len(self.records) < 10:
            self.records.append(self.format(record))


@pytest.fixture
def alarms() -> Iterator[Alarms]:
    """Fails the test at its end if anything unexpected was logged. pytest would keep all the rest in memory."""
    handler, before = Alarms(), {}
    for name in ("kvferry", "asyncio"):  # the registry's event loop tells of what got past the registry
        logger = logging.getLogger(name)
        before[logger] = logger.level
        logger.addHandler(handler)
        logger.setLevel(logging.ERROR)
        logger.propagate = False
    try:
        yield handler
    finally:
        for logger, level in before.items():
            logger.propagate = True
            logger.setLevel(level)
            logger.removeHandler(handler)
    assert not handler.records, "\n".join(handler.records)
