"""Keeps a rank registered at any registry: when it asks for its lease, and the thread that does.

When it asks, after a grant, after a failure, and when the registry was away, says `Renewals`, which neither waits nor
asks nor reads a clock.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

from kvferry.control.registry import Grant, Registry
from kvferry.errors import (
    RankReplacedError,
    RegistrationRefusedError,
    RegistryAccessError,
    RegistryUnreachableError,
    SettingsError,
    UsageError,
)
from kvferry.loggers import logger_of
from kvferry.protocol.wire.registrations import RankRegistration

LONGEST_BUSY_S = 60.0
"""The longest wait where a registry does not answer in time, again and again: it is reached after a minute."""

_LOOK_S = 2.0
"""How often to look whether the registry has closed a connection."""


class Renewals:
    """How long a rank waits until it asks again.

    With a grant the registry says how many seconds the ranks that it has should take to come back all together. A wait
    after a failure is never shorter than that on average, whatever has failed: so a registry that returns, or has too
    much to do, has no more ranks coming in a second than it said.
    """

    def __init__(
        self, *, shortest_retry_s: float = 0.1, longest_retry_s: float = 2.0, jitter: Callable[[], float] | None = None
    ) -> None:
        """Begins with nothing granted.

        Args:
            shortest_retry_s: the wait after the first failure, in seconds; it doubles with each one that follows.
            longest_retry_s: where the doubling ends, in seconds. Each wait is shortened at random by up to a
                half, so that the ranks of an engine do not all return at once.
            jitter: by what a wait is multiplied; a random number between a half and one by default.

        Raises:
            SettingsError: if the waits are not positive, or the first is above the second.
        """
        if not 0 < shortest_retry_s <= longest_retry_s <= threading.TIMEOUT_MAX:
            raise SettingsError(
                f"shortest_retry_s is {shortest_retry_s} and longest_retry_s is {longest_retry_s}: both must "
                "be positive, and the first not above the second"
            )
        self._shortest_retry_s = shortest_retry_s
        self._longest_retry_s = longest_retry_s
        self._retry_s = shortest_retry_s
        self._return_s = 0.0
        self._jitter = jitter or _jitter

    def granted(self, grant: Grant) -> float:
        """Returns how long to wait after a lease was granted."""
        self._retry_s = self._shortest_retry_s
        self._return_s = grant.return_s
        return grant.renew_s

    def failed(self, *, timed_out: bool = False) -> float:
        """Returns how long to wait after a failure.

        Args:
            timed_out: whether the registry took the request and did not answer in time. It may have more to do than it
                can: what it answers then is answered to those who have given up. What helps is to ask less, so the
                waits begin with the longest of the others, and go on doubling up to `LONGEST_BUSY_S`.
        """
        if timed_out:
            self._retry_s = max(self._retry_s, self._longest_retry_s)
        longest_s = max(LONGEST_BUSY_S, self._longest_retry_s) if timed_out else self._longest_retry_s
        # Shortened by a quarter on average, so that all ranks together take as long as the registry said.
        wait_s = max(min(self._retry_s, longest_s), self._return_s * 4 / 3) * self._jitter()
        self._retry_s = min(2 * self._retry_s, max(LONGEST_BUSY_S, self._longest_retry_s))
        return wait_s

    def hung_up(self) -> float:
        """Returns how long to wait where the registry seems to have restarted: anything up to what it said."""
        return (2 * self._jitter() - 1) * self._return_s


def _jitter() -> float:
    return random.uniform(0.5, 1.0)  # noqa: S311 - spreads load, guards nothing


class LeaseKeeper:
    """Keeps one rank registered, from a daemon thread, until it is closed.

    It renews when the registry told it to: at a third of the lease, or later where there are many ranks. It reports
    every failure and tries again: after a short time first, then less and less often, or when the registry tells of
    changes. A registry that restarted receives the registration with the next renewal, or before: the keeper notices
    that its connection was closed. Both the registry and it see to it that many ranks do not come back all at once.

    Args:
        client: the registry; the keeper does not close it.
        registration: what to register.
        on_problem: called from the keeper's thread with every new problem: one that has another type or
            message than the problem before, or that comes after a success. It should return soon.
        renewals: says how long to wait; with its usual times by default.
        on_drain: called once, from the keeper's thread, when an operator has told the rank to drain.
        now: the time, in seconds of a clock that never goes back.

    Attributes:
        registered: set while the registry holds the rank's lease, as far as this side knows: from a success
            until a refusal, until the lease would have run out, or until close.
        last_error: the latest failure since the last success, or None.
        replaced: that another start of the rank has its place, as far as this side knows: from the refusal that says so
            until a success, or None.
        woken: set to let the keeper look at once.
    """

    def __init__(
        self,
        client: Registry,
        registration: RankRegistration,
        on_problem: Callable[[Exception], None],
        *,
        renewals: Renewals | None = None,
        on_drain: Callable[[], None] = lambda: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._renewals = renewals or Renewals()
        self.registered = threading.Event()
        self.last_error: Exception | None = None
        self.replaced: RankReplacedError | None = None
        self._client = client
        self._registration = registration
        self._on_problem = on_problem
        self._on_drain = on_drain
        self._was_told_to_drain = False
        self._lease_ends_at = 0.0
        self._now = now
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self.woken = threading.Event()
        self._is_watching = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begins to register and returns at once; `registered` is set on success.

        Raises:
            UsageError: if the keeper was started or closed before.
        """
        with self._lock:
            if self._thread is not None or self._closing.is_set():
                raise UsageError("this lease keeper was started or closed before: make a new one")
            registration = self._registration
            name = f"kvferry-lease-{registration.engine}-{registration.engine_rank}"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()

    def update(self, registration: RankRegistration) -> None:
        """Registers something else of the rank from now on; at once, on the keeper's thread."""
        self._registration = registration
        self.woken.set()

    def close(self, timeout_s: float = 6.0) -> bool:
        """Removes the registration if the registry can be reached, and ends the thread. May be called again.

        Args:
            timeout_s: how long to wait for the thread, in seconds. A request in progress and the removal each
                take as long as the client's timeouts allow, and looking up the registry's name may take
                longer.

        Returns:
            Whether the thread ended in time. If not, it still ends by itself, and so does the lease.
        """
        with self._lock:
            self._closing.set()
            self.woken.set()
            thread = self._thread
        if thread is None:
            return True
        thread.join(timeout_s)
        return not thread.is_alive()

    def __enter__(self) -> LeaseKeeper:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._closing.is_set():
            wait_s = self.renew()
            if not self.registered.is_set() and not self._is_watching:
                self._watch()
            self._wait(wait_s)
            self.woken.clear()
        self.remove()

    def _watch(self) -> None:
        """Has changes told, from now on or, where that fails, from the next try on."""
        try:
            self._client.watch(self._changed)
        except Exception as error:
            self._report(error)
        else:
            self._is_watching = True

    def _wait(self, wait_s: float) -> None:
        """Waits so long, or until the keeper is woken, or the registry seems to have restarted."""
        until = self._now() + wait_s
        while (left_s := until - self._now()) > 0 and not self.woken.wait(min(left_s, _LOOK_S)):
            # Without a lease the next try is near anyway.
            if self.registered.is_set() and self._client.has_hung_up:
                self.woken.wait(min(until - self._now(), self._renewals.hung_up()))
                return

    def _changed(self, engine: str | None) -> None:
        """Tries again at once, where the registry may take now what it did not take before."""
        if engine in (None, self._registration.engine) and not self.registered.is_set():
            self.woken.set()

    def renew(self) -> float:
        """Tries to register; returns how long to wait until the next try. Only for what runs the keeper."""
        # The lease runs from when the registry got the request: counted from here, it is never overrated.
        asked_at = self._now()
        try:
            grant = self._client.grant(self._registration)
        except Exception as error:
            if isinstance(error, RankReplacedError):
                self.replaced = error
            is_unwanted = isinstance(error, (RegistrationRefusedError, RegistryAccessError))
            if is_unwanted or self._now() >= self._lease_ends_at:
                self.registered.clear()
            self._report(error)
            return self._renewals.failed(timed_out=isinstance(error, RegistryUnreachableError) and error.timed_out)
        self._lease_ends_at = asked_at + grant.lease_s
        self.last_error = self.replaced = None
        self.registered.set()
        if not self._was_told_to_drain and self._client.drains(self._registration.incarnation):
            self._was_told_to_drain = True
            self._tell("on_drain", self._on_drain)
        return self._renewals.granted(grant)

    def remove(self) -> None:
        """Ends the lease, if the registry can be reached. Only for what runs the keeper."""
        self.registered.clear()
        registration = self._registration
        try:
            self._client.remove(registration.engine, registration.engine_rank, registration.incarnation)
        except Exception as error:
            self._report(error)

    def _report(self, error: Exception) -> None:
        previous, self.last_error = self.last_error, error
        if previous is not None and (type(previous), str(previous)) == (type(error), str(error)):
            return
        self._tell("on_problem", self._on_problem, error)

    def _tell(self, name: str, callback: Callable[..., None], *said: object) -> None:
        """Calls the caller back, whose mistake must not cost the rank its lease."""
        try:
            callback(*said)
        except Exception:
            logger_of(__name__).exception("%s raised an error when it was called with %r", name, said)
