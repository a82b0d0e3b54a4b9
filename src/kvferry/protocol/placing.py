"""Where a receiver has the units that writers name, in one room."""

from __future__ import annotations

from kvferry.layout import RankLayout
from kvferry.plan import Route, Unit
from kvferry.protocol.chunks import Pages
from kvferry.protocol.demands import WantedGroup, wanted_of
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
            wanted = self._wanted(route)
            numbers = self._numbers(units, route, unit)
            found = places_of_units(numbers, route, wanted, self._layout.tokens, unit=unit, tokens=self._tokens)
            if len(self._places) >= _MOST_PLACES:
                self._places.clear()
            self._places[key] = found
        return found

    def describe(self, units: bytes, first: int, stop: int, route: Route, *, unit: Unit) -> str:
        """Some of the units that a writer names, in words: pages and tokens. They were found before.

        Args:
            first, stop: which of them, by their order.
        """
        _, pages = self.find(units, route, unit=unit)
        used = list(dict.fromkeys(pages[first:stop].tolist()))
        if route.has_slots:
            return f"slot {used[0]}"
        unit_tokens = route.granule_tokens if unit is Unit.GRANULE else 1
        numbers = self._numbers(units, route, unit)[first:stop]
        # Where tokens are dealt out, what a rank holds is no range of the request; the first and the last say enough.
        ends = int(numbers[0]) * unit_tokens, (int(numbers[-1]) + 1) * unit_tokens - 1
        share = self._layout.tokens
        block = share.dealing.block(self._tokens)
        low, high = (share.position(local, block=block) for local in ends)
        orders = [local // route.destination_page_tokens for local in ends]
        which = f"page {used[0]} (page {orders[0]} of the request on this rank"
        if len(used) > 1:
            which = f"pages {used[0]} to {used[-1]} (pages {orders[0]} to {orders[1]} of the request on this rank"
        return f"{which}, group {route.destination_group!r}), tokens {low} to {high}"

    def _wanted(self, route: Route) -> WantedGroup:
        return wanted_of(next(group for group in self._groups if group.name == route.destination_group))

    def _numbers(self, units: bytes, route: Route, unit: Unit) -> Pages:
        unit_tokens = route.granule_tokens if unit is Unit.GRANULE else 1
        pages = len(self._wanted(route).pages)
        return unpack_units(units, most=pages * route.destination_page_tokens // unit_tokens)
