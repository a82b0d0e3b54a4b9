"""Settings of the whole suite: which tier runs, and how much of everything."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import settings
from tests.support.collecting import COLLECTED, collected_item
from tests.support.tiers import Tier, register_profiles

pytest_plugins = ["kvferry.testing.pytest_plugin"]

_MOST_WORKERS = 16
_FEWEST_WORKERS = 5
"""Many tests of the larger tiers wait for processes and deadlines, so that a few more than there are cores pay."""

_FEWEST_WORKERS_QUICK = 3
"""What is quick waits less, and each more imports and collects everything once more."""

_LONGEST_S = 6 * 3600.0
"""For a test of the long tier, which has up to twenty times as much to do."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tier",
        choices=[tier.value for tier in Tier],
        default=Tier.QUICK.value,
        help="How much is proved: quick (make test), full (make test-all) or long (python -m tests.runs long).",
    )
    parser.addoption(
        "--fuzz-seconds", type=float, help="How long each fuzzer of tests/fuzz runs, in seconds; else by the tier."
    )
    parser.addoption("--fuzz-seed", help="Replays one input, or one round, of a fuzzer: what a failure printed.")


def tier_of(config: pytest.Config) -> Tier:
    return Tier(config.getoption("--tier"))


def pytest_configure(config: pytest.Config) -> None:
    register_profiles()
    settings.load_profile(tier_of(config).value)  # before tests are collected: budgets are read then


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Collects tests without looking for garbage, then or later, among a million objects that stay to the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(optionalhook=True)  # whoever runs one test may have no pytest-xdist
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """As many processes as processors that we may use, with `-n auto`."""
    fewest = _FEWEST_WORKERS_QUICK if tier_of(config) is Tier.QUICK else _FEWEST_WORKERS
    return min(max(fewest, len(os.sched_getaffinity(0))), _MOST_WORKERS)


@pytest.hookimpl(tryfirst=True)  # before `-m` and `-k` leave tests out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    long = _left_out(items, Tier.FULL)
    config.stash[COLLECTED] = [collected_item(item, is_long=item in long) for item in items]
    tier = tier_of(config)
    left_out = _left_out(items, tier)
    if tier is Tier.LONG:
        for item in items:
            item.add_marker(pytest.mark.timeout(_LONGEST_S), append=False)  # before its own, which is for less to do
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
    items[:] = sorted((item for item in items if item not in left_out), key=_precedence)


def _left_out(items: Sequence[pytest.Item], tier: Tier) -> set[pytest.Item]:
    beyond: tuple[str, ...] = tier.amount(quick=("full", "long"), full=("long",), long=())
    marked = {item for item in items if any(item.get_closest_marker(mark) for mark in beyond)}
    return marked | set(_not_sampled(items, tier))


def _precedence(item: pytest.Item) -> tuple[bool, bool]:
    """First those that wait most: for faults to be noticed, then for other processes. All else runs meanwhile."""
    return not item.path.name.startswith("test_faults_"), "processes" not in item.path.parts


def _not_sampled(items: Iterable[pytest.Item], tier: Tier) -> Iterator[pytest.Item]:
    """Yields the cases of a parametrized test that its mark `sampled` leaves to a larger tier."""
    seen: Counter[str] = Counter()
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark is not None:
            test = item.nodeid.partition("[")[0]
            if seen[test] % tier.amount(quick=mark.kwargs["one_in"], full=mark.kwargs.get("full", 1), long=1):
                yield item
            seen[test] += 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hands out whole modules, in the order in which they were collected, unless `--dist` asks for single tests."""
    from tests.support.distribution import ByModule

    return ByModule(config, log) if config.getvalue("dist") == "loadscope" else None


@pytest.fixture(scope="session")
def tier(request: pytest.FixtureRequest) -> Tier:
    """The tier that runs."""
    return tier_of(request.config)
