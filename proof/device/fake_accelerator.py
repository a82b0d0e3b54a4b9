"""The device as the kernels for GPUs use it, and the memory and kernels that an endpoint takes from it."""

from __future__ import annotations

import ctypes
import secrets
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import TransportError
from kvferry.layout import Device, Region
from kvferry.staging import Kernels
from kvferry.staging.accelerator import (
    Accelerator,
    CopyLaunch,
    DeviceArray,
    DeviceRows,
    RunsLaunch,
    Stream,
    StreamEvent,
    ThreadStreams,
)
from kvferry.staging.gpu import GpuKernels
from kvferry.staging.kernels import StartArray, array_at, spread
from kvferry.staging.sharing import MappedCopies, SharedAllocation, Sharing
from proof.device.device import DeviceEvent, FakeDevice, FakeStream, IllegalAddressError
from proof.device.ordering import ranges_of
from proof.made_up_resources import MadeUpResources


class _Numbers(DeviceArray):
    def __init__(self, numbers: StartArray | NDArray[np.int32]) -> None:
        self.host: NDArray[Any] = numbers.copy()
        self.on_device: NDArray[Any] = np.full_like(numbers, -1)  # no address, until the upload is done

    def range(self, first: int, stop: int) -> StartArray:
        address, size = self.on_device.ctypes.data, self.on_device.itemsize
        return ranges_of(np.array([address + size * first], np.int64), size * (stop - first))


class _AcceleratorStream(Stream):
    def __init__(self, device: FakeDevice, stream: FakeStream) -> None:
        self._device = device
        self._stream = stream

    def upload(self, numbers: StartArray | NDArray[np.int32]) -> DeviceArray:
        found = _Numbers(numbers)
        everything = found.range(0, len(numbers))
        on_device, host = found.on_device, found.host

        def copy() -> None:
            on_device[:] = host

        self._device.counts.uploads += 1
        self._stream.launch(f"upload of {len(numbers)} numbers", copy, writes=everything)
        # The array itself is kept, so that its address is nobody else's.
        weakref.finalize(found, _give_back, self._stream, everything, on_device).atexit = False
        return found

    def launch(self, copy: CopyLaunch) -> None:
        assert isinstance(copy.starts, _Numbers)
        counts, variant = self._device.counts, (copy.alignment, len(copy.loops), copy.is_gather)
        which = slice(copy.first, copy.stop)
        if variant not in counts.compiled:
            counts.compiled.add(variant)
            if copy.stop > copy.first:
                counts.compiled_late.append(variant)
        runs = spread(copy.starts.host[which], copy.loops)
        if not len(runs):
            return
        counts.launches += 1
        pool = ranges_of(runs, copy.length)
        packed = ranges_of(np.array([copy.address], np.int64), len(runs) * copy.length)
        starts = copy.starts.range(copy.first, copy.stop)
        reads, writes = (pool, packed) if copy.is_gather else (packed, pool)
        reads = np.concatenate([reads, starts])
        on_device = copy.starts.on_device

        def move() -> None:
            staged = array_at(copy.address, (len(runs), copy.length), "|u1")
            for number, start in enumerate(spread(on_device[which], copy.loops).tolist()):
                run = array_at(start, (copy.length,), "|u1")
                if copy.is_gather:
                    staged[number] = run
                else:
                    run[...] = staged[number]

        name = "gather" if copy.is_gather else "scatter"
        self._stream.launch(
            f"{name} of {copy.stop - copy.first} blocks", move, reads=reads[np.argsort(reads[:, 0])], writes=writes
        )

    def launch_runs(self, copy: RunsLaunch) -> None:
        numbers, counts, mappings = copy.numbers, self._device.counts, self._device.mappings
        assert isinstance(numbers, _Numbers)
        if copy.alignment not in counts.compiled_runs:
            counts.compiled_runs.add(copy.alignment)
            if copy.count:
                counts.compiled_runs_late.append(copy.alignment)
        if not copy.count:
            return
        counts.launches += 1
        sides = [
            (rows, slice(first, first + copy.count))
            for rows, first in ((copy.source, copy.sources), (copy.destination, copy.destinations))
        ]
        sources, destinations = (_addresses(rows, numbers.host[which]) for rows, which in sides)
        bits = np.bitwise_or.reduce(np.concatenate([sources, destinations, [copy.length]]))
        assert bits % copy.alignment == 0, f"it is no multiple of {copy.alignment}"
        places, used = mappings.translated(destinations, copy.length)
        reads = [ranges_of(sources, copy.length)]
        for rows, which in sides:
            assert isinstance(rows.table, _Numbers)
            reads += [rows.table.range(0, 3 * rows.count), numbers.range(which.start, which.stop)]

        def move() -> None:
            here, there = (_addresses(rows, numbers.on_device[which], is_on_device=True) for rows, which in sides)
            there, _ = mappings.translated(there, copy.length)
            for source, destination in zip(here.tolist(), there.tolist(), strict=True):
                ctypes.memmove(destination, source, copy.length)

        together = np.concatenate(reads)
        work = self._stream.launch(
            f"copy of {copy.count} runs",
            move,
            reads=together[np.argsort(together[:, 0])],
            writes=ranges_of(places, copy.length),
        )
        for mapping in used:
            mapping.used_by.append(work)

    def record(self) -> StreamEvent:
        return _AcceleratorEvent(self._stream.record_event())

    def synchronize(self) -> None:
        self._stream.synchronize()


def _addresses(rows: DeviceRows, numbers: NDArray[Any], *, is_on_device: bool = False) -> StartArray:
    """Returns where runs begin, as the kernel finds it."""
    assert isinstance(rows.table, _Numbers)
    table = rows.table.on_device if is_on_device else rows.table.host
    firsts, starts, strides = table.reshape(3, rows.count)
    row = np.searchsorted(firsts, numbers, side="right") - 1
    found: StartArray = starts[row] + (numbers - firsts[row]) * strides[row]
    return found


class _AcceleratorEvent(StreamEvent):
    def __init__(self, event: DeviceEvent) -> None:
        self._event = event

    def query(self) -> bool:
        return self._event.query()


def _give_back(stream: FakeStream, everything: StartArray, kept: StartArray) -> None:  # noqa: ARG001
    stream.given_back("giving back what was uploaded", everything)


class FakeAccelerator(Accelerator):
    """A fake device, as `GpuKernels` drive it."""

    def __init__(self, device: FakeDevice) -> None:
        """Takes the device."""
        self._device = device

    def bind_thread(self) -> None:
        self._device.counts.threads.add(threading.current_thread().name)

    def stream(self) -> Stream:
        name = threading.current_thread().name
        assert name in self._device.counts.threads, f"{name} made a stream before it was bound to the device"
        return _AcceleratorStream(self._device, self._device.stream(f"the stream of {name}"))


class FakeSharing(Sharing):
    """Shares memory with what else is on the device. What it is told of is an allocation of its own."""

    def __init__(self, device: FakeDevice, host: str) -> None:
        """Takes the device, and the name of the machine that it is in."""
        self.host = host
        self._mappings = device.mappings

    def offer(self, regions: Sequence[Region]) -> tuple[SharedAllocation, ...]:
        return tuple(SharedAllocation(each, self._mappings.share(each)) for each in regions)

    def map(self, shared: SharedAllocation) -> int:
        try:
            return self._mappings.map(shared.handle)
        except IllegalAddressError as error:
            raise TransportError(str(error)) from error

    def unmap(self, address: int) -> None:
        self._mappings.unmap(address)


class FakeResources(MadeUpResources):
    """The kernels for GPUs on a fake device, and memory that only looks as if it were the device's."""

    alignment = 256

    def __init__(self, device: FakeDevice, host: str = "this host") -> None:
        """Takes the device, and the name of the machine that it is in."""
        self._device = device
        self._host = host

    def kernels(self, regions: Sequence[Region], device: Device) -> Kernels:
        return GpuKernels(regions, FakeAccelerator(self._device))

    def mapped_copies(self, device: Device) -> MappedCopies:
        return MappedCopies(ThreadStreams(FakeAccelerator(self._device)), FakeSharing(self._device, self._host))

    def bind_thread(self, device: Device) -> None:
        self._device.counts.threads.add(threading.current_thread().name)

    def epoch(self) -> int:
        return secrets.randbits(63)
