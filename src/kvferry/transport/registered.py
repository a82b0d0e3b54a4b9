"""The memory that an endpoint has registered: what lies in it, found by address.

An endpoint registers more memory as its peers come, so one more region costs about the same however many there are, and
so does a look whether a range lies in one of them.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import RegistrationError
from kvferry.layout import Device, Region

_HIGHEST = 2**64 - 1


def check_regions(regions: Sequence[Region]) -> None:
    """Refuses regions that a library would be told of in vain.

    Raises:
        RegistrationError: naming them.
    """
    if any(region.length < 1 or region.address < 1 for region in regions):
        raise RegistrationError(f"cannot register regions without address or length: {regions}")


class RegisteredMemory:
    """Regions of one device. Every method may be called from any thread.

    Attributes:
        device: where all of them are; means nothing while there are none.
    """

    def __init__(self, owner: str, device: Device | None = None, regions: Sequence[Region] = ()) -> None:
        """Begins with some regions, or none.

        Args:
            owner: whose memory it is, for messages.
        """
        self.device = device or Device()
        self._owner = owner
        # Guards the lists, since memory is registered while other threads look.
        self._lock = threading.Lock()
        self._regions: list[Region] = []  # in the order in which they were registered
        self._starts: list[int] = []  # of all regions, ascending
        self._reach: list[int] = []  # the highest end of a region that begins there or before
        self._table: NDArray[np.uint64] | None = None  # both, for whole tables of addresses
        self.add(regions, self.device)

    def __len__(self) -> int:
        return len(self._regions)

    @property
    def regions(self) -> tuple[Region, ...]:
        """All regions, in the order in which they were registered."""
        with self._lock:
            return tuple(self._regions)

    def check_device(self, device: Device) -> None:
        """Refuses memory on another device than what is registered already.

        Raises:
            RegistrationError: naming both.
        """
        if self._regions and device != self.device:
            raise RegistrationError(
                f"memory on {device} cannot join memory on {self.device}: an endpoint's is all on one device"
            )

    def add(self, regions: Sequence[Region], device: Device) -> None:
        """Adds regions on a device that `check_device` lets pass."""
        with self._lock:
            self.device = device
            self._table = None
            for region in regions:
                self._regions.append(region)
                place = bisect_right(self._starts, region.address)
                self._starts.insert(place, region.address)
                self._reach.insert(place, max(region.stop, self._reach[place - 1] if place else 0))
                for behind in range(place + 1, len(self._reach)):  # ends at once, unless regions overlap
                    if self._reach[behind] >= region.stop:
                        break
                    self._reach[behind] = region.stop

    def check_range(self, region: Region) -> None:
        """Refuses a range that leaves registered memory.

        Raises:
            RegistrationError: naming it.
        """
        with self._lock:
            place = bisect_right(self._starts, region.address)
            limit = self._reach[place - 1] if place else 0
        if region.length < 1 or region.stop > limit:
            raise RegistrationError(
                f"[{region.address:#x}, {region.stop:#x}) lies outside the memory that {self._owner} registered: "
                f"{len(self)} regions"
            )

    def check_rows(self, rows: NDArray[np.uint64]) -> None:
        """Refuses descriptor rows that leave registered memory.

        Transports accept such rows in silence and fail, or write elsewhere, much later.

        Raises:
            RegistrationError: naming the first row that does.
        """
        if rows.ndim != 2 or rows.shape[1] != 5 or rows.dtype != np.uint64 or len(rows) == 0:
            raise RegistrationError(
                f"descriptor rows must be uint64 of shape [rows, 5] and at least one, not {rows.dtype} {rows.shape}"
            )
        starts, reach = self._as_table()
        first, length, _, stride, count = rows.T
        limit = reach[np.searchsorted(starts, first, side="right") - 1]
        # Compared by division: a sum or product of absurd numbers would wrap around and look small.
        room = np.where(limit > first, limit - first, np.uint64(0))
        steps = np.maximum(count, 1) - np.uint64(1)
        outside = (length == 0) | (length > room) | ((stride > 0) & (steps > (room - length) // np.maximum(stride, 1)))
        outside |= rows[:, 2] != self.device.index
        if outside.any():
            bad = int(np.flatnonzero(outside)[0])
            stop = int(first[bad]) + int(length[bad]) + int(stride[bad]) * int(steps[bad])
            raise RegistrationError(
                f"descriptor row {bad} [{int(first[bad]):#x}, {stop:#x}) on device {int(rows[bad, 2])} lies "
                f"outside the memory that {self._owner} registered on {self.device}: {len(self)} regions"
            )
        overlapping = (count == 0) | ((count > 1) & (stride < length))
        if overlapping.any():
            bad = int(np.flatnonzero(overlapping)[0])
            raise RegistrationError(
                f"descriptor row {bad} of {self._owner} has {int(count[bad])} elements of {int(length[bad])} bytes "
                f"every {int(stride[bad])} bytes: it needs at least one, and they must not overlap"
            )

    def _as_table(self) -> NDArray[np.uint64]:
        """Returns starts and reach as arrays, after a region of no length at 0: every address has one before it."""
        with self._lock:
            if self._table is None:
                reach = [min(stop, _HIGHEST) for stop in self._reach]
                self._table = np.array([[0, *self._starts], [0, *reach]], np.uint64)
            return self._table
