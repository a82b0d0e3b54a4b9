"""Where a receiver has the units that writers name, in one room."""

from __future__ import annotations

from kvferry.layout import RankLayout
from kvferry.plan import Route, Unit
from kvferry.protocol.chunks import Pages
from kvferry.protocol.demands import wanted_of
from kvferry.protocol.loads import places_of_units, unpack_units
from kvferry.protocol.messages import OpenGroup

_MOST_PLACES = 64


class UnitPlaces:
    """Which of its page each unit is, and the page. May be asked from several threads."""

    def __init__(self, layout: RankLayout, groups: tuple[OpenGroup, ...], tokens: int | None) -> None:
        """Args:
        layout: this rank's.
        groups: what the room asked for.
        tokens: how many tokens the request has.
        """
        self._layout = layout
        self._groups = groups
        self._tokens = tokens
        # Those of layer after layer, and of several writers, are the same. Threads that scatter share it: each entry is
        # put there as a whole, and two of them at a time would only work out the same.
        self._places: dict[tuple[str, int, Unit, bytes], tuple[Pages, Pages]] = {}

    def find(self, units: bytes, route: Route, *, unit: Unit) -> tuple[Pages, Pages]:
        """Where units that a writer names lie: which of its page each is, and the page.

        Args:
            units: as they travel in `StagedSegment`.
            route: along which they came.

        Raises:
            MessageError: if the room did not ask for them.
        """
        key = route.destination_group, route.granule_tokens, unit, units
        found = self._places.get(key)
        if found is None:
            wanted = wanted_of(next(group for group in self._groups if group.name == route.destination_group))
            unit_tokens = route.granule_tokens if unit is Unit.GRANULE else 1
            most = len(wanted.pages) * route.destination_page_tokens // unit_tokens
            numbers = unpack_units(units, most=most)
            found = places_of_units(numbers, route, wanted, self._layout.tokens, unit=unit, tokens=self._tokens)
            if len(self._places) >= _MOST_PLACES:
                self._places.clear()
            self._places[key] = found
        return found
