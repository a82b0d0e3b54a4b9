"""Prefill servers that requests have named, looked up in the background.

Requests may name any address. A decode rank's scheduler begins a look-up, never waits for one, and asks what has become
of it with its next turn; meanwhile the request has no pages.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from kvferry.errors import EngineEndedError, RegistryUnreachableError
from kvferry.loggers import logger_of

log = logger_of(__name__)

AGAIN_S = 1.0
"""How long after a look-up that failed the next one begins."""

SILENT_S = 15.0
"""How long a request waits for a server that does not answer: as long as SGLang's own looks."""

_THREADS = 4
MOST_STRANGERS = 128
"""Addresses that never answered are looked up at once, a thread each, beside servers that did; none waits for others'
silence in a queue."""

_TOO_MANY = f"{MOST_STRANGERS} other addresses that have never answered are being looked up"

_MOST_PROBLEMS = 1024


def take_over(queue: Any) -> None:
    """Has SGLang ask us with every turn what was found: when to look, and how long requests wait, is ours to say.

    Args:
        queue: a DecodePreallocQueue, which else asks once a second, and gives up after 15 times without a reason.
    """
    queue._ensure_retry_interval = 0.0
    queue._max_ensure_retries = math.inf
    queue._ensure_retry_count, queue._ensure_last_attempt_time = _Nothing(), _Nothing()


class _Nothing(dict[str, Any]):
    """Keeps nothing: what SGLang would note of every address that a request names, and is ours to know."""

    def __setitem__(self, address: str, noted: Any) -> None:
        """Leaves it out."""


def hold_unanswered(original: Callable[..., Any], queue: Any, waiting: dict[str, list[Any]]) -> Any:
    """Keeps requests back until their servers have said, in the background, which data-parallel ranks have them.

    SGLang asks so before its turn, and then waits for the answer, or for another where requests came or went meanwhile.
    Around `_ensure_prefill_info`, which says whose servers are known, and who waits.

    Args:
        queue: a DecodePreallocQueue.
        waiting: its requests, by their servers' addresses.
    """
    ready, held = original(queue, waiting)
    if not isinstance(queue._ensure_retry_count, _Nothing):  # another backend's
        return ready, held
    queue.prefetch_prefill_dp_rank_queries()
    questions = queue._prefill_dp_rank_queries
    for address, requests in list(ready.items()):
        asking = [each for each in requests if queue._resolve_prefill_dp_rank(each.req) is None]
        rooms, answer = questions.get(address, ((), None))
        if not asking:
            continue
        kept = requests
        if answer is not None and answer.done():
            if rooms == tuple(each.req.bootstrap_room for each in asking[: len(rooms)]):
                questions[address] = rooms, _understood(answer)
                kept = asking[len(rooms) :]
            else:
                del questions[address]
        held.extend(kept)
        others = {id(each) for each in kept}
        ready[address] = [each for each in requests if id(each) not in others]
    return {address: requests for address, requests in ready.items() if requests}, held


def _understood(answer: Future[Any]) -> Future[dict[str, int]]:
    """Returns the answer without what is none: anybody may have given it."""
    said = answer.result()
    understood: Future[dict[str, int]] = Future()
    understood.set_result(
        {room: rank for room, rank in said.items() if type(rank) is int} if isinstance(said, dict) else {}
    )
    return understood


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a look-up has failed."""

    error: Exception
    at: float

    def wait_s(self, longest_s: float) -> float:
        """Returns how long a request waits for the server all the same.

        Args:
            longest_s: where the server is there, and not ready.
        """
        if isinstance(self.error, EngineEndedError):
            return 0.0
        return min(SILENT_S, longest_s) if isinstance(self.error, RegistryUnreachableError) else longest_s


class LookUps:
    """Looks servers up by address, for a scheduler's thread.

    Attributes:
        problems: why servers are not known, by address.
    """

    def __init__(self, look_up: Callable[[str], Any], found: MutableMapping[str, Any]) -> None:
        """Has looked nothing up yet.

        Args:
            look_up: looks one server up. Blocks; called on threads of ours.
            found: gets what it returns, by address.
        """
        self._look_up = look_up
        self._found = found
        self._have_answered: set[str] = set()
        # Guards what follows: the scheduler begins look-ups, which end on threads of ours.
        self._lock = threading.Lock()
        self._under_way: set[str] = set()
        self.problems: OrderedDict[str, Problem] = OrderedDict()
        self._pool = ThreadPoolExecutor(_THREADS, "kvferry-sglang-look-up")
        self._strangers = ThreadPoolExecutor(MOST_STRANGERS, "kvferry-sglang-look-up-new")

    def is_found(self, address: str) -> bool:
        """Whether a server was looked up; if not, that begins unless it is under way or has just failed."""
        if address in self._found:
            return True
        with self._lock:
            problem = self.problems.get(address)
            has_just_failed = problem is not None and time.monotonic() < problem.at + AGAIN_S
            if has_just_failed or address in self._under_way:
                return False
            is_stranger = address not in self._have_answered
            if is_stranger and len(self._under_way - self._have_answered) >= MOST_STRANGERS:
                self._note(address, RegistryUnreachableError(_TOO_MANY))
                return False
            self._under_way.add(address)
        pool = self._strangers if is_stranger else self._pool
        pool.submit(self._run, address)
        return False

    def problem(self, address: str, since: float) -> Problem | None:
        """Returns why the last look-up failed, if one has since then."""
        problem = self.problems.get(address)
        return problem if problem is not None and problem.at >= since else None

    def close(self) -> None:
        """Begins no look-up any more. Those under way are not waited for: they may be asking who does not answer."""
        for pool in (self._pool, self._strangers):
            pool.shutdown(wait=False, cancel_futures=True)

    def _run(self, address: str) -> None:
        found, problem = None, None
        try:
            found = self._look_up(address)
        except Exception as error:  # whatever a server answers, the scheduler goes on
            log.error("the prefill server at %s cannot be used: %s", address, error)
            problem = error
        with self._lock:
            self._under_way.discard(address)
            self.problems.pop(address, None)
            if found is not None:
                self._found[address] = found
                self._have_answered.add(address)
            elif problem is not None:
                self._note(address, problem)

    def _note(self, address: str, error: Exception) -> None:
        self.problems[address] = Problem(error, time.monotonic())
        while len(self.problems) > _MOST_PROBLEMS:
            self.problems.popitem(last=False)
