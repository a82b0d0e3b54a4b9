"""A device without hardware, whose work waits, and which refuses every access that nothing orders.

Streams, launches and writes of a transport are queued and done later, in an order that a seed gives among those that
streams and events allow. Whether two accesses to the same bytes are ordered does not depend on that order: it is
checked when the second is queued, so that a run that went well by luck fails all the same.
"""

from __future__ import annotations

from proof.device.device import Counts, DeviceEvent, FakeDevice, FakeStream, IllegalAddressError
from proof.device.fake_accelerator import FakeAccelerator, FakeResources, FakeSharing
from proof.device.ordering import Operation, Ordering, UnorderedAccessError, ranges_of
from proof.device.wire import DeviceTransport

__all__ = [
    "Counts",
    "DeviceEvent",
    "DeviceTransport",
    "FakeAccelerator",
    "FakeDevice",
    "FakeResources",
    "FakeSharing",
    "FakeStream",
    "IllegalAddressError",
    "Operation",
    "Ordering",
    "UnorderedAccessError",
    "ranges_of",
]
