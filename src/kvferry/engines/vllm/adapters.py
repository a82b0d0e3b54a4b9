"""What LoRA adapters were when vLLM loaded them, which may be another thing than what lies at their paths by now.

vLLM knows an adapter by its number, loads it when it is first needed or told to, may drop it and load it once more, and
never looks whether its files have changed. So what is remembered of an adapter is what its files were then, and a
request is compared by it only as long as they are the same: whatever has been loaded meanwhile was loaded from them.
Where they are not, nobody knows what is loaded, and the request is like no other until vLLM is told to load it anew.
What a request's own step loads is looked at twice more: when it is scheduled, and when it has been computed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias
from uuid import uuid4

from kvferry.engines.checkpoints import adapter_identity, identified, model_directory
from kvferry.engines.vllm.aside import FoundAside
from kvferry.loggers import logger_of

log = logger_of(__name__)

_MOST_READS = 8

Files: TypeAlias = frozenset[tuple[str, int, int, int]]
"""What lies in a directory: names, sizes, times of change and inodes. None of anything that is no directory."""


@dataclass(frozen=True, slots=True)
class _Adapter:
    """What an adapter is.

    Attributes:
        path: where it lies, as vLLM was told: a path, or a name of the hub's.
        files: what lay there when it was read.
        text: identifies it.
    """

    path: str
    files: Files
    text: str

    def is_what(self, there: _Adapter) -> bool:
        """Whether whatever was loaded since is this. With files gone, nothing else can have been."""
        return self.text == there.text or (self.path == there.path and there.files <= self.files)


class Adapters:
    """The adapters of an engine, owned by its scheduler's thread. Files are read aside."""

    def __init__(self) -> None:
        self.replaced: Callable[[str], None] = lambda _: None
        """Told the name of an adapter that has become another. What was computed with it is not to be used."""
        self._loaded: dict[int, _Adapter] = {}  # by vLLM's number
        self._texts: dict[str, str] = {}  # by name, as vLLM's prefix cache knows them
        self._unscheduled: set[int] = set()  # of those, by number, what no step loads yet
        # By request, what its steps load, or another's did of which nobody knows that they are over.
        self._unproved: dict[str, tuple[int, _Adapter]] = {}
        # At the files of adapters, by the request that needs them.
        self._looks: FoundAside[_Adapter] = FoundAside("kvferry-vllm-adapters")

    def is_known(self, request: Any) -> bool:
        """Whether `identity` would read no file for a request. What it needs is read from now on, aside.

        Not at once where its adapter has become another: what vLLM found of it in its prefix cache was the other's.
        """
        lora = getattr(request, "lora_request", None)
        if lora is None:
            return True
        look = self._look(request, lora)
        if not look.done():
            return False
        is_loaded = lora.lora_int_id in self._loaded and lora.lora_int_id not in self._unscheduled
        if (lora.load_inplace or not is_loaded) and files_in(lora.lora_path) != look.result().files:
            self._looks.forget(request.request_id)  # vLLM is about to load what was written since
            if not is_loaded:
                self._loaded.pop(lora.lora_int_id, None)
            self._look(request, lora)
            return False
        return not self._adopted(lora, look.result())

    def identity(self, request: Any) -> str:
        """Identifies a request's adapter; empty without one. Waits for it to be read, unless it is known."""
        found = self.scheduled(request)
        if found is None:
            return ""
        lora = request.lora_request
        loaded = self._loaded[lora.lora_int_id]
        if loaded.is_what(found):
            return loaded.text
        log.error(
            "request %s is not exchanged: the files of LoRA adapter %r in %s have changed since vLLM loaded them, and "
            "it may have either: load it again with load_inplace, on every server",
            request.request_id,
            lora.lora_name,
            lora.lora_path,
        )
        return f"unknown {uuid4().hex}"

    def scheduled(self, request: Any) -> _Adapter | None:
        """Takes that vLLM loads a request's adapter now, unless it has it. Waits for that to be read.

        Returns what lies there; None without one.
        """
        lora = getattr(request, "lora_request", None)
        if lora is None:
            return None
        found = self._look(request, lora).result()
        self._adopted(lora, found)
        self._looks.forget(request.request_id)
        number = lora.lora_int_id
        is_being_loaded = number in self._unscheduled or any(number == each for each, _ in self._unproved.values())
        if lora.load_inplace or is_being_loaded:  # in place, each of its steps loads it
            self._unscheduled.discard(number)
            self._unproved[request.request_id] = number, found
        return found

    def ended(self, request: str) -> None:
        """Takes that nobody asks about a request any more."""
        self._looks.forget(request)

    @property
    def are_proved(self) -> bool:
        """Whether nothing is being loaded that is to be looked at once more."""
        return not self._unproved

    def computed(self, request: Any) -> None:
        """Takes that a request with an adapter has been computed, so that vLLM has loaded it by now.

        Of what steps of other requests load that says nothing.
        """
        lora = request.lora_request
        _, seen = self._unproved.pop(request.request_id, (0, None))
        if seen is None:
            return
        if seen.is_what(_Adapter(lora.lora_path, files_in(lora.lora_path), "")):
            return
        if _is_downloaded(lora.lora_path, seen.files):
            self._adopt(lora, _read(lora, None, may_be_named=False))
        else:
            self._adopt(lora, _Adapter(seen.path, seen.files, f"unknown {uuid4().hex}"))

    def loaded(self, lora: Any, before: Files) -> None:
        """Takes that vLLM was told to load an adapter, and has.

        Args:
            lora: vLLM's request for it.
            before: what lay at its path before it was loaded.
        """
        if lora.lora_int_id in self._loaded and not (lora.load_inplace or lora.lora_int_id in self._unscheduled):
            return  # it was loaded already
        found = _read(lora, None, may_be_named=self._may_be_named(lora))
        if found.files != before and not _is_downloaded(lora.lora_path, before):
            found = _Adapter(found.path, found.files, f"unknown {uuid4().hex}")
        self._adopt(lora, found)
        self._unscheduled.discard(lora.lora_int_id)

    def unloaded(self, number: int) -> None:
        """Takes that vLLM was told to drop an adapter."""
        self._loaded.pop(number, None)
        self._looks.forget_all()

    def kept(self, listed: Callable[[], Collection[int]], used: Collection[int]) -> None:
        """Takes which adapters vLLM still has: it drops them where weights are replaced, and loads them anew.

        Args:
            listed: returns their numbers.
            used: those of requests that may load them, of which nobody would know.
        """
        known = self._loaded.keys() - self._unscheduled.union(used)
        for number in known.difference(listed()) if known else ():
            self.unloaded(number)

    def _look(self, request: Any, lora: Any) -> Future[_Adapter]:
        loaded = self._loaded.get(lora.lora_int_id)
        find = partial(_read, lora, loaded, may_be_named=self._may_be_named(lora))
        return self._looks.look(request.request_id, find)

    def _may_be_named(self, lora: Any) -> bool:
        """Whether an adapter that cannot be read is what its name says: not once another may have had the name."""
        return not lora.load_inplace and lora.lora_name not in self._texts

    def _adopted(self, lora: Any, found: _Adapter) -> bool:
        """Takes what an adapter is that vLLM loads with a request. Returns whether it was another before."""
        loaded = self._loaded.get(lora.lora_int_id)
        if loaded is None or (lora.load_inplace and not loaded.is_what(found)):
            self._unscheduled.add(lora.lora_int_id)
            return self._adopt(lora, found)
        return False

    def _adopt(self, lora: Any, found: _Adapter) -> bool:
        before = self._texts.get(lora.lora_name, found.text)
        self._loaded[lora.lora_int_id], self._texts[lora.lora_name] = found, found.text
        self._unproved = {name: each for name, each in self._unproved.items() if each[0] != lora.lora_int_id}
        if before == found.text:
            return False
        self._looks.forget_all()  # they were at files before
        log.warning("LoRA adapter %r has become another: what was computed with it is used no more", lora.lora_name)
        self.replaced(lora.lora_name)
        return True


def _read(lora: Any, loaded: _Adapter | None, *, may_be_named: bool) -> _Adapter:
    """Reads what an adapter is, unless it is what was loaded."""
    name, path = f"the adapter {lora.lora_name!r}", lora.lora_path
    for _ in range(_MOST_READS):
        files = files_in(path)
        if loaded is not None and loaded.is_what(_Adapter(path, files, "")):
            return loaded
        text = identified(_directory(path), name, adapter_identity)
        if files_in(path) == files:  # else they were written meanwhile
            if text != name or may_be_named:
                return _Adapter(path, files, text)
            log.error("%s cannot be read in %s, and nobody knows what it is now: it is exchanged no more", name, path)
            break
    return _Adapter(path, files, f"unknown {uuid4().hex}")


def files_in(path: str) -> Files:
    """Returns what lies at an adapter's path."""
    try:
        with os.scandir(_directory(path)) as entries:
            kept = [(each.name, each.stat()) for each in entries if each.is_file()]
    except OSError:
        return frozenset()
    return frozenset((name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in kept)


def _directory(path: str) -> Path:
    """Returns where vLLM looks: at a path, or for the hub's names in its cache."""
    if _is_of_hub(path):
        return model_directory(path, None) or Path(path)
    return Path(os.path.expanduser(path))  # pathlib's raises where there is no such user


def _is_of_hub(path: str) -> bool:
    return not path.startswith("~") and not Path(path).exists() and not Path(path).is_absolute()


def _is_downloaded(path: str, before: Files) -> bool:
    """Whether vLLM has downloaded an adapter to load it: the hub's files do not change once they are there."""
    return not before and _is_of_hub(path)
