"""Where the units that writers name lie in a receiver's pages, in one room."""

from __future__ import annotations

from kvferry.layout import RankLayout, TokenShare
from kvferry.plan import Route, Unit
from kvferry.plan.requests.chunks import Pages
from kvferry.plan.requests.demands import GroupRequest
from kvferry.plan.requests.moved_blocks import places_of_units, unpack_units

_MOST_PLACES = 64


class UnitPlaces:
    """Finds the page of each unit, and which unit of the page it is. For several threads at once."""

    def __init__(self, layout: RankLayout, groups: tuple[GroupRequest, ...], tokens: int | None) -> None:
        """Serves one room.

        Args:
            layout: this rank's layout.
            groups: what the room requested.
            tokens: how many tokens the request has.
        """
        self._layout = layout
        self._groups = groups
        self._tokens = tokens
        # The same units come for layer after layer, and from several writers. Threads that scatter share it: an entry
        # is put there as a whole, and two threads at a time would only work out the same.
        self._places: dict[tuple[str, int, Unit, bytes], tuple[Pages, Pages]] = {}

    def find(self, units: bytes, route: Route, *, unit: Unit) -> tuple[Pages, Pages]:
        """Returns where units that a writer names lie: which of its page each is, and the page.

        Args:
            units: the units as they are sent in `StagedSegment`.
            route: the route along which they came.

        Raises:
            MessageError: if the room did not request them.
        """
        key = route.destination_group, route.unit_tokens, unit, units
        found = self._places.get(key)
        if found is None:
            wanted = self._wanted(route)
            numbers = self._numbers(units, route, unit)
            share = self._share(route)
            found = places_of_units(numbers, route, wanted, share, unit=unit, tokens=self._tokens)
            if len(self._places) >= _MOST_PLACES:
                self._places.clear()
            self._places[key] = found
        return found

    def describe(self, units: bytes, first: int, stop: int, route: Route, *, unit: Unit) -> str:
        """Describes some of the units that a writer names, by pages and tokens. `find` has accepted them before.

        Args:
            first: the first of them, by their order.
            stop: the one after the last.
        """
        _, pages = self.find(units, route, unit=unit)
        used = list(dict.fromkeys(pages[first:stop].tolist()))
        if route.has_slots:
            return f"slot {used[0]}"
        unit_tokens = route.unit_tokens if unit is Unit.WHOLE else 1
        numbers = self._numbers(units, route, unit)[first:stop]
        # Where tokens are partitioned, what a rank holds is no range of the request; the first and the last say enough.
        ends = int(numbers[0]) * unit_tokens, (int(numbers[-1]) + 1) * unit_tokens - 1
        share = self._share(route)
        block = share.partition.block(self._tokens)
        low, high = (share.position(local, block=block) for local in ends)
        orders = [local // route.destination_page_tokens for local in ends]
        which = f"page {used[0]} (page {orders[0]} of the request on this rank"
        if len(used) > 1:
            which = f"pages {used[0]} to {used[-1]} (pages {orders[0]} to {orders[1]} of the request on this rank"
        return f"{which}, group {route.destination_group!r}), tokens {low} to {high}"

    def _share(self, route: Route) -> TokenShare:
        return self._layout.share_of(self._layout.group(route.destination_group))

    def _wanted(self, route: Route) -> GroupRequest:
        return next(group for group in self._groups if group.name == route.destination_group)

    def _numbers(self, units: bytes, route: Route, unit: Unit) -> Pages:
        unit_tokens = route.unit_tokens if unit is Unit.WHOLE else 1
        pages = len(self._wanted(route).pages)
        return unpack_units(units, most=pages * route.destination_page_tokens // unit_tokens)
