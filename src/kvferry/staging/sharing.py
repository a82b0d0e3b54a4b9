"""Memory that a process lets others of its machine map: how it is offered, and how what others offer is mapped.

On a GPU both are CUDA's interprocess communication (IPC). Handles are of whole allocations, whatever part of one a pool
is: torch's allocator, for one, puts many tensors into each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from kvferry.errors import RegistrationError, TransportError, TransportUnavailableError
from kvferry.layout import Region
from kvferry.staging.accelerator import ThreadStreams
from kvferry.staging.cuda_driver import HANDLE_BYTES, NOT_SHARED, CudaDriver, CudaDriverError

_BOOT = Path("/proc/sys/kernel/random/boot_id")


class SharedAllocation(msgspec.Struct, frozen=True):
    """An allocation that other processes may map, as it is offered to them.

    Attributes:
        memory: where it is in the process that offers it.
        handle: what it is mapped by.
    """

    memory: Region
    handle: Annotated[bytes, msgspec.Meta(max_length=HANDLE_BYTES)]


class Sharing(ABC):
    """Offers memory of one device, and maps what others offer. May be used from several threads.

    Attributes:
        host: names the machine, until its next start; empty if that is not known. Handles mean nothing on another.
    """

    host: str

    @abstractmethod
    def offer(self, regions: Sequence[Region]) -> tuple[SharedAllocation, ...]:
        """Returns the allocations that regions lie in.

        Raises:
            RegistrationError: if one cannot be mapped by other processes, saying what to do.
        """

    @abstractmethod
    def map(self, shared: SharedAllocation) -> int:
        """Maps an allocation of another process, and returns where it begins here.

        Raises:
            TransportError: if it cannot be mapped.
        """

    @abstractmethod
    def unmap(self, address: int) -> None:
        """Ends a mapping. Nothing that was queued may use it any more.

        Raises:
            TransportError: if the device refuses.
        """


class MappedCopies(NamedTuple):
    """What copies into other processes' memory.

    Attributes:
        streams: of the accelerator that copies.
        sharing: maps what it copies into.
    """

    streams: ThreadStreams
    sharing: Sharing


class CudaSharing(Sharing):
    """CUDA's."""

    def __init__(self, index: int, driver: CudaDriver | None = None) -> None:
        """Takes a GPU that this process sees.

        Args:
            index: its number.
            driver: of the GPU; None loads it.

        Raises:
            TransportUnavailableError: if there is none that works.
        """
        self.host = this_host()
        self._index = index
        try:
            self._driver = driver or CudaDriver()
        except (CudaDriverError, OSError) as error:
            raise TransportUnavailableError(f"CUDA's driver cannot be used here: {error}") from error

    def offer(self, regions: Sequence[Region]) -> tuple[SharedAllocation, ...]:
        found: list[SharedAllocation] = []
        for region in regions:
            if not region.length or any(each.memory.contains(region) for each in found):
                continue
            try:
                can_be_mapped = self._driver.can_be_mapped(region.address)
                whole = self._driver.allocation_of(region.address, self._index) if can_be_mapped else Region(0, 0)
                if not whole.contains(region):
                    raise RegistrationError(
                        f"the memory at {region.address:#x} is not of the kind that CUDA shares between processes "
                        f"(cudaMalloc's), which KVFERRY_PATH=mapped needs: leave out {NOT_SHARED}, or take "
                        "KVFERRY_PATH=staged"
                    )
                handle = self._driver.export(whole.address, self._index)
            except CudaDriverError as error:
                raise RegistrationError(
                    f"the memory at {region.address:#x} cannot be shared with other processes, which "
                    f"KVFERRY_PATH=mapped needs: {error}"
                ) from error
            found.append(SharedAllocation(whole, handle))
        return tuple(found)

    def map(self, shared: SharedAllocation) -> int:
        if len(shared.handle) != HANDLE_BYTES:
            raise TransportError(f"a handle of CUDA's has {HANDLE_BYTES} bytes, not {len(shared.handle)}")
        try:
            return self._driver.map(shared.handle, self._index)
        except CudaDriverError as error:
            raise TransportError(
                f"{shared.memory.length} bytes of another process's GPU memory cannot be mapped: {error}. It must be "
                "another process, which shares this one's IPC and process namespaces, and this one must see its GPU "
                "(CUDA_VISIBLE_DEVICES)"
            ) from error

    def unmap(self, address: int) -> None:
        try:
            self._driver.unmap(address, self._index)
        except CudaDriverError as error:
            raise TransportError(f"the mapping at {address:#x} cannot be closed: {error}") from error


def this_host() -> str:
    """Returns what names this machine until its next start, in all its containers; empty if that is not known."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""
