"""What a gateway does: knows from the registry which prefill engines there are, and gives each request to one of them.

An engine that drains, as the registry says, gets no new requests. One of a release that cannot is left out by name.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import TracebackType

from kvferry import EngineView, Settings, create_registry_client
from kvferry.errors import RegistryError

_LOOK_EVERY_S = 0.2


class Gateway:
    """Looks at the registry from a thread of its own, and never waits for it.

    Attributes:
        looks: how many look-ups succeeded.
        problems: how many failed; what was known before goes on to hold.
    """

    def __init__(self, settings: Settings) -> None:
        """Begins to look."""
        self.looks = self.problems = 0
        self._client = create_registry_client(settings, settings.registry_address)
        self._views: dict[str, EngineView] = {}
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gateway", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_closed.wait(_LOOK_EVERY_S):
            try:
                self._views = {each.engine: each for each in self._client.engines()}
                self.looks += 1
            except RegistryError:
                self.problems += 1

    def is_draining(self, engine: str) -> bool:
        """Whether an engine drains, as the registry last said."""
        view = self._views.get(engine)
        return view is not None and view.draining

    def incarnation(self, engine: str) -> str | None:
        """Returns which start of an engine is registered; None if none is, or not all of it."""
        view = self._views.get(engine)
        return view.registrations[0].incarnation if view is not None and view.complete else None

    def choose(self, loads: Mapping[str, int]) -> str | None:
        """Returns the engine for a request: the least loaded one that is registered and not draining; None if none is.

        Args:
            loads: how many requests each engine has.
        """
        able = [each for each in loads if not self.is_draining(each) and self.incarnation(each) is not None]
        return min(able, key=lambda each: loads[each], default=None)

    def __enter__(self) -> Gateway:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_closed.set()
        self._thread.join()
        self._client.close()
