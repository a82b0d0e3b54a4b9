"""Weights that SGLang replaces while a server runs: what a rank says of them from then on.

A server that is updated from a directory says what one says that starts with it. Weights that come otherwise, from a
trainer's processes, are in no file: what counts is the version that it names with them (`weight_version`), and where it
names none, how often they were replaced. Two servers that were updated alike agree, whatever they started with.

An update may leave the prefix cache as it is. What that holds would go on under the new weights' name, so until it is
flushed such a server has nobody's. What SGLang stores below it, a flush leaves: from the first update on, a server that
stores anything, or begins to, has nobody's for good.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvferry.engines.fingerprint import short_text
from kvferry.engines.sglang.identity import weights_of
from kvferry.engines.sglang.termination import managers_of
from kvferry.errors import KVFerryError
from kvferry.loggers import logger_of

log = logger_of(__name__)

_HALF_WAY = "are being replaced"
_FAILED = "an update has failed"
_VERSION = "weight_version "
_NOT_FLUSHED = "Weights were updated, but the cache was not flushed"
"""What SGLang says of an update that is whole but for this."""

_UPDATE, _START, _FLUSH = "update", "start", "flush"
"""What ends a doubt: the next update that is whole, the server's next start, a flush."""


@dataclass(slots=True)
class _Session:
    """An update that comes piece by piece.

    Attributes:
        versions: what its pieces so far are called.
        has_drafts: whether some are a draft model's. It may share weights with the model, but no name.
        is_broken: whether some are missing.
    """

    versions: list[str | None] = field(default_factory=list)
    has_drafts: bool = False
    is_broken: bool = False


class Weights:
    """What a rank says of its weights. For its scheduler's thread.

    They are called by what came last, and how often they were replaced without a name since. In doubt, and while a
    session is open, they are nobody else's.

    Attributes:
        is_changing: whether an update is under way, in which a flush says nothing yet of what they will be.
        was_flushed: whether the cache was, in the last update.
        were_replaced: whether they are others than the server has started with.
    """

    def __init__(self, said: str) -> None:
        """Begins with those that the server has loaded.

        Args:
            said: identifies them, by their files.
        """
        self._name, self._changes = said, 0
        self._doubts = dict.fromkeys((_UPDATE, _START, _FLUSH), "")
        self._own = secrets.token_hex(4)  # no other server's
        self._session: _Session | None = None
        self.is_changing = self.was_flushed = self.were_replaced = False

    @property
    def said(self) -> str:
        """Identifies them, to compare them with others."""
        doubts = (_HALF_WAY if self._session is not None else "", *self._doubts.values())
        if doubt := next(filter(None, doubts), ""):
            return f"{doubt} ({self._own})"
        return short_text(f"{self._name}, replaced in place {self._changes} times" if self._changes else self._name)

    def came_from(self, files: str) -> None:
        """They are those of files, by what identifies these, and of what a session that is open adds to them."""
        self._name, self._changes, self._doubts[_UPDATE] = files, 0, ""
        if self._session is not None:
            self._session = _Session()

    def came(self, version: str | None) -> None:
        """They were replaced by others, which are in no file; the version is None where they have no name."""
        if self._session is not None:
            self._session.versions.append(version)
            return
        self._doubts[_UPDATE] = ""
        if version is None:
            self._changes += 1
        else:
            self._name, self._changes = f"{_VERSION}{version}", 0

    def drafts_came(self) -> None:
        """Those of a draft model were replaced, within a session."""
        if self._session is not None:
            self._session.has_drafts = True

    def are_named(self, version: str) -> None:
        """An operator names them. What is in files is known better by these, and what is unknown stays so."""
        are_of_files = not self._changes and not self._name.startswith(_VERSION)
        if self._session is None and not are_of_files and not self._doubts[_UPDATE]:
            self.came(version)

    def are_unknown(self, why: str) -> None:
        """They are no other server's, whatever that has, until an update is whole."""
        self._doubts[_UPDATE] = why
        if self._session is not None:
            self._session.is_broken = True

    def update_failed(self) -> None:
        """They are unknown, and those of the next update are not the ones that this should have brought."""
        self.are_unknown(_FAILED)
        if self._session is None:
            self._changes += 1

    def cache_stays(self) -> None:
        """Requests may be answered from what those before have computed."""
        self._doubts[_FLUSH] = "the prefix cache is of those before: flush it"

    def store_stays(self) -> None:
        """Requests may find what those before have computed in a store that no flush empties."""
        self._doubts[_START] = (
            "what --hicache-storage-backend, a linker or LMCache stores is of those before: empty it, and start the "
            "server again"
        )

    def cache_is_flushed(self) -> None:
        """All that is cached from now on is theirs."""
        self._doubts[_FLUSH], self.was_flushed = "", True

    def session_begins(self) -> None:
        """They are replaced piece by piece from now on."""
        self._session, self.was_flushed = _Session(), False

    def session_ends(self) -> None:
        """All pieces have come, or another process has written them."""
        session, self._session = self._session or _Session(), None
        if session.is_broken or (session.has_drafts and not session.versions):
            self._changes += 1  # without a name, and what is unknown stays so
        else:
            self.came(next((each for each in reversed(session.versions) if each is not None), None))


# ---- hooks on SGLang's SchedulerWeightUpdaterManager ----------------------------------------------------------------


def around_update(original: Callable[..., Any], updater: Any, request: Any) -> Any:
    """Around all that replaces weights: from files, or from other processes."""
    manager = _manager_of(updater.scheduler)
    if manager is None:
        return original(updater, request)
    weights, session = manager.weights, updater._session
    path = getattr(request, "model_path", None)
    before = _read(request) if path is not None and os.path.isdir(path) else None  # the hub's may come only now
    weights.is_changing, weights.was_flushed = True, False
    try:
        result = original(updater, request)
    except BaseException:
        _renew(manager, weights.update_failed)
        raise
    finally:
        weights.is_changing = False
    if not result.success and not result.message.startswith(_NOT_FLUSHED):
        # SGLang says so before it has touched anything: no session, or nothing to read, unless a draft model says that,
        # whose turn comes after the model's.
        is_untouched = (
            (session is None and hasattr(request, "selector"))
            if path is None
            else result.message.startswith("Failed to get ") and updater.draft_worker is None
        )
        if not is_untouched:
            _renew(manager, weights.update_failed)
        return result
    if path is not None:
        files = _read(request)
        weights.came_from(files)
        if before not in (None, files):
            weights.are_unknown("their files were written while SGLang read them: update again")
    elif getattr(request, "selector", None) == "draft":
        weights.drafts_came()
    else:
        weights.came(request.weight_version)
    if path is not None or session is None:
        _renew(manager, lambda: _look_at_cache(weights, updater))
    return result


def _read(request: Any) -> str:
    """Identifies what SGLang reads from files, which it does at the revision that the server was started with."""
    from sglang.srt.runtime_context import get_model

    return weights_of(request.model_path, get_model().revision, request.load_format, None)


def around_begin(original: Callable[..., Any], updater: Any, request: Any) -> Any:
    """Around the beginning of what replaces weights piece by piece."""
    manager, result = _manager_of(updater.scheduler), original(updater, request)
    if manager is not None and result.success:
        _renew(manager, manager.weights.session_begins)
        if request.selector == "draft":
            manager.weights.drafts_came()
    return result


def around_end(original: Callable[..., Any], updater: Any, request: Any) -> Any:
    """Around its end."""
    manager, result = _manager_of(updater.scheduler), original(updater, request)
    if manager is not None and result.success:
        manager.weights.session_ends()
        _renew(manager, lambda: _look_at_cache(manager.weights, updater))
    return result


def after_release(_: Any, updater: Any, request: Any) -> None:
    """After SGLang has given memory away: weights without a backup do not come back with it."""
    manager = _manager_of(updater.scheduler)
    if manager is None or not updater.memory_saver_adapter.enabled:
        return
    from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS
    from sglang.srt.runtime_context import get_exec

    is_weights = not request.tags or GPU_MEMORY_TYPE_WEIGHTS in request.tags
    if is_weights and not get_exec().features.enable_weights_cpu_backup:
        why = "their memory was given away without --enable-weights-cpu-backup: update them"
        _renew(manager, lambda: manager.weights.are_unknown(why))


def after_checking(_: Any, updater: Any, request: Any) -> None:
    """After SGLang's `/weights_checker`, which may draw weights by chance."""
    manager = _manager_of(updater.scheduler)
    is_reset = request.action == "reset_tensors" and request.selector != "draft"
    if manager is not None and is_reset and updater._session is None:
        _renew(manager, lambda: manager.weights.are_unknown("they were reset by /weights_checker: update them"))


def after_flush(is_flushed: bool, scheduler: Any, *_: Any, **__: Any) -> None:
    """After SGLang has flushed its caches, which it does within updates, too."""
    manager = _manager_of(scheduler)
    if manager is not None and is_flushed:
        _renew_where_new(manager, manager.weights.cache_is_flushed)


def after_attaching(result: Any, scheduler: Any, *_: Any) -> None:
    """After a store was attached: what it has may have been stored before an update that did not see it."""
    manager = _manager_of(scheduler)
    if manager is not None and result.success and manager.weights.were_replaced:
        _renew_where_new(manager, manager.weights.store_stays)


def after_naming(_: Any, scheduler: Any, request: Any) -> None:
    """After an operator has named the weights."""
    manager = _manager_of(scheduler)
    if manager is not None:
        _renew_where_new(manager, lambda: manager.weights.are_named(request.new_version))


def _look_at_cache(weights: Weights, updater: Any) -> None:
    """Looks whether requests may find what was computed before an update, or will: whoever runs leaves it behind."""
    from sglang.srt.managers.mm_schedule import embedding_cache

    if embedding_cache is not None:
        embedding_cache.clear()  # SGLang has what images were embedded to by their digests alone, and flushes none
    scheduler = updater.scheduler
    cache = scheduler.tree_cache
    weights.were_replaced = True
    has_linker = getattr(cache, "linker", None) is not None
    offloads = getattr(scheduler, "decode_offload_manager", None) is not None  # into a store that prefill servers read
    stores = getattr(cache, "enable_storage", False) or getattr(scheduler, "enable_lmcache", False)
    if has_linker or offloads or stores:
        weights.store_stays()
    cached = cache.evictable_size() + cache.protected_size()
    if getattr(cache, "cache_controller", None) is not None:
        cached = cached or not weights.was_flushed  # sizes are the device's: host memory may have more
    is_kept = any(each.holds_kv for each in cache.session_records().values())  # also without a prefix cache
    if is_kept or (not scheduler.disable_radix_cache and (cached or not updater.is_fully_idle(ignore_waiting=True))):
        weights.cache_stays()
    else:
        weights.cache_is_flushed()


def _manager_of(scheduler: Any) -> Any:
    """Returns the manager of ours that a scheduler has; None if it has none."""
    return next((each for each in managers_of(scheduler) if hasattr(each, "renew_weights")), None)


def _renew_where_new(manager: Any, change: Callable[[], None]) -> None:
    """Changes what is said of weights that stay. Within an update that is not said before its end."""
    said = manager.weights.said
    change()
    if manager.weights.said != said and not manager.weights.is_changing:
        _tell(manager)


def _renew(manager: Any, change: Callable[[], None]) -> None:
    """Changes what is known of the weights, and says so to peers."""
    change()
    _tell(manager)


def _tell(manager: Any) -> None:
    """Says to peers what the weights are. SGLang has them by now: it goes on in any case."""
    try:
        manager.renew_weights()
    except KVFerryError as error:
        log.error("peers were not told that the weights were replaced: %s", error)
