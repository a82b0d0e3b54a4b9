"""Weights that SGLang replaces while a server runs: what a rank says of them from then on.

A server that is updated from a directory says what one says that starts with it. Weights that come otherwise, from a
trainer's processes, are in no file: what counts is the version that it names with them (`weight_version`), and where it
names none, how often they were replaced. Two servers that were updated alike agree, whatever they started with.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

from kvferry.engines.fingerprint import short_text
from kvferry.engines.sglang.identity import weights_of
from kvferry.engines.sglang.termination import managers_of
from kvferry.errors import KVFerryError
from kvferry.loggers import logger_of

log = logger_of(__name__)

_HALF_WAY = "are being replaced"


class Weights:
    """What a rank says of its weights. For its scheduler's thread."""

    def __init__(self, said: str) -> None:
        """Begins with those that the server has loaded.

        Args:
            said: identifies them, by their files.
        """
        self._base, self._changes, self._are_of_files = said, 0, True
        self._unknown = ""
        self._session: list[str | None] | None = None

    @property
    def said(self) -> str:
        """Identifies them, to compare them with others."""
        if self._unknown:
            return self._unknown
        return short_text(f"{self._base}, replaced in place {self._changes} times" if self._changes else self._base)

    def came_from(self, files: str) -> None:
        """They are those of files, by what identifies these."""
        self._base, self._changes, self._are_of_files, self._unknown = files, 0, True, ""

    def came(self, version: str | None) -> None:
        """They were replaced by others, which are in no file; the version is None where they have no name."""
        if self._session is not None:
            self._session.append(version)
        elif version is None:
            self._changes, self._are_of_files, self._unknown = self._changes + 1, False, ""
        else:
            self._base, self._changes, self._are_of_files, self._unknown = f"weight_version {version}", 0, False, ""

    def are_named(self, version: str) -> None:
        """An operator names them. What is in files is known better by these."""
        if self._session is None and not self._are_of_files:
            self.came(version)

    def are_unknown(self, why: str) -> None:
        """They are no other server's, whatever that has: an update has failed, or is under way."""
        self._unknown = f"{why} ({secrets.token_hex(4)})"

    def session_begins(self) -> None:
        """They are replaced piece by piece from now on."""
        self._session = []
        self.are_unknown(_HALF_WAY)

    def session_ends(self) -> None:
        """They are whole again: all pieces have come, or another process has written them."""
        pieces, self._session = self._session or [], None
        if self._unknown.startswith(_HALF_WAY):
            self.came(next((each for each in reversed(pieces) if each is not None), None))


# ---- hooks on SGLang's SchedulerWeightUpdaterManager ----------------------------------------------------------------


def around_update(original: Callable[..., Any], updater: Any, request: Any) -> Any:
    """Around all that replaces weights: from files, or from other processes."""
    manager = _manager_of(updater.scheduler)
    if manager is None:
        return original(updater, request)
    weights, session = manager.weights, updater._session
    try:
        result = original(updater, request)
    except BaseException:
        _renew(manager, lambda: weights.are_unknown("an update has failed"))
        raise
    path = getattr(request, "model_path", None)
    if not result.success:
        # SGLang says so before it has touched anything: nothing to read, or no session.
        is_untouched = result.message.startswith("Failed to get ") or (
            path is None and _wants_session(request, session)
        )
        if not is_untouched:
            _renew(manager, lambda: weights.are_unknown("an update has failed"))
    elif path is not None:
        _renew(manager, lambda: weights.came_from(weights_of(path, None, request.load_format, None)))
    elif session is None:
        _renew(manager, lambda: weights.came(request.weight_version))
    else:
        weights.came(request.weight_version)
    return result


def _wants_session(request: Any, session: Any) -> bool:
    return session is None and hasattr(request, "selector")


def around_begin(original: Callable[..., Any], updater: Any, request: Any) -> Any:
    """Around the beginning of what replaces weights piece by piece."""
    manager, result = _manager_of(updater.scheduler), original(updater, request)
    if manager is not None and result.success:
        _renew(manager, manager.weights.session_begins)
    return result


def around_end(original: Callable[..., Any], updater: Any, request: Any) -> Any:
    """Around its end."""
    manager, result = _manager_of(updater.scheduler), original(updater, request)
    if manager is not None and result.success:
        _renew(manager, manager.weights.session_ends)
    return result


def after_naming(_: Any, scheduler: Any, request: Any) -> None:
    """After an operator has named the weights."""
    manager = _manager_of(scheduler)
    if manager is not None:
        _renew(manager, lambda: manager.weights.are_named(request.new_version))


def _manager_of(scheduler: Any) -> Any:
    """Returns the manager of ours that a scheduler has; None if it has none."""
    return next((each for each in managers_of(scheduler) if hasattr(each, "renew_weights")), None)


def _renew(manager: Any, change: Callable[[], None]) -> None:
    """Changes what is known of the weights, and says so to peers. SGLang has them by now: it goes on in any case."""
    change()
    try:
        manager.renew_weights()
    except KVFerryError as error:
        log.error("peers were not told that the weights were replaced: %s", error)
