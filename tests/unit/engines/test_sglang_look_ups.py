"""Prefill servers are looked up in the background, and whoever waits for one knows why, and for how long."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from tests.support.waiting import eventually

from kvferry.engines.sglang import look_ups
from kvferry.engines.sglang.look_ups import SILENT_S, LookUps, Problem, take_over
from kvferry.errors import EngineEndedError, RegistryError, RegistryUnreachableError


class Servers:
    """Stand for whatever answers at addresses.

    Attributes:
        answers: what they say, or raise; those without an answer do not answer until `ended`.
    """

    def __init__(self) -> None:
        self.answers: dict[str, str | Exception] = {}
        self.ended = threading.Event()
        self.asked: list[str] = []
        self.found: dict[str, str] = {}
        self.look_ups = LookUps(self._look_up, self.found)

    def _look_up(self, address: str) -> str:
        self.asked.append(address)
        if address not in self.answers:
            self.ended.wait()
        answer = self.answers.get(address, "late")
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def servers() -> Iterator[Servers]:
    made = Servers()
    yield made
    made.ended.set()
    made.look_ups.close()


def test_a_server_is_looked_up_once_and_found(servers: Servers):
    servers.answers["a:1"] = "information"
    assert not servers.look_ups.is_found("a:1")
    eventually("it is found", servers.look_ups.is_found, "a:1")
    assert (servers.found, servers.asked) == ({"a:1": "information"}, ["a:1"])


def test_servers_that_do_not_answer_hold_up_none_that_has(servers: Servers):
    servers.answers["good:1"] = "information"
    servers.look_ups.is_found("good:1")
    eventually("it is found", servers.look_ups.is_found, "good:1")
    for number in range(100):
        assert not servers.look_ups.is_found(f"silent-{number}:1")
    assert not servers.look_ups.is_found("silent-0:1")
    del servers.found["good:1"]
    eventually("it is found again", servers.look_ups.is_found, "good:1")
    assert servers.asked.count("silent-0:1") == 1


def test_more_silent_addresses_than_are_looked_up_at_once_are_refused_in_words_and_not_queued(servers: Servers):
    for number in range(1000):
        assert not servers.look_ups.is_found(f"silent-{number}:1")
    problem = servers.look_ups.problem("silent-999:1", 0.0)
    assert problem is not None
    assert "other addresses that have never answered are being looked up" in str(problem.error)
    assert problem.wait_s(300.0) == SILENT_S
    assert servers.look_ups.problem("silent-0:1", 0.0) is None
    servers.ended.set()
    eventually("one is found", servers.look_ups.is_found, "silent-0:1")
    assert "silent-999:1" not in servers.asked


def test_a_server_that_is_first_asked_for_does_not_wait_for_silent_ones(servers: Servers):
    servers.answers["good:1"] = "information"
    for number in range(100):
        assert not servers.look_ups.is_found(f"silent-{number}:1")
    eventually("it is found", servers.look_ups.is_found, "good:1")


def test_a_failure_is_of_those_who_have_waited_for_it_and_not_tried_again_at_once(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
):
    error = servers.answers["a:1"] = RegistryError("not ready")
    assert not servers.look_ups.is_found("a:1")
    eventually("it has failed", servers.look_ups.problem, "a:1", 0.0)
    problem = servers.look_ups.problem("a:1", 0.0)
    assert problem is not None
    assert problem.error is error
    assert servers.look_ups.problem("a:1", problem.at + 1e-3) is None, "somebody who came later has not waited for it"
    for _ in range(5):
        assert not servers.look_ups.is_found("a:1")
    assert len(servers.asked) == 1
    servers.answers["a:1"] = "information"
    monkeypatch.setattr(look_ups, "AGAIN_S", 0.0)
    eventually("it is looked up again", servers.look_ups.is_found, "a:1")
    assert servers.look_ups.problem("a:1", 0.0) is None


def test_problems_are_bounded_whatever_addresses_requests_name(servers: Servers, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(look_ups, "_MOST_PROBLEMS", 3)
    for number in range(10):
        servers.answers[f"a:{number}"] = EngineEndedError("refused")
        servers.look_ups.is_found(f"a:{number}")
        eventually("it has failed", servers.look_ups.problem, f"a:{number}", 0.0)
    assert len(servers.look_ups.problems) == 3


@pytest.mark.parametrize(
    ("error", "longest_s", "wait_s"),
    [
        (EngineEndedError("refused"), 300.0, 0.0),
        (RegistryUnreachableError("silent"), 300.0, SILENT_S),
        (RegistryUnreachableError("silent"), 3.0, 3.0),
        (RegistryError("not ready"), 300.0, 300.0),
    ],
)
def test_who_has_ended_is_not_waited_for_and_who_is_silent_not_for_long(
    error: Exception, longest_s: float, wait_s: float
):
    assert Problem(error, 0.0).wait_s(longest_s) == wait_s


def test_sglangs_queue_asks_with_every_turn_and_gives_nobody_up_by_itself():
    queue = SimpleNamespace(_ensure_retry_interval=1.0, _max_ensure_retries=15)
    take_over(queue)
    queue._ensure_retry_count["a:1"] = queue._ensure_last_attempt_time["a:1"] = 1
    assert vars(queue) == {
        "_ensure_retry_interval": 0.0,
        "_max_ensure_retries": math.inf,
        "_ensure_retry_count": {},
        "_ensure_last_attempt_time": {},
    }
