"""What is asked of CUDA's driver itself: memory that other processes can map, whether some is of that kind, mappings.

torch takes memory as its allocator is set up, an engine's allocator as it likes. Under `expandable_segments`, in vLLM's
sleep mode and with SGLang's memory saver, that is virtual memory which `cudaIpcGetMemHandle` refuses: between processes
transports then go through the network. `cuMemAlloc` is what `cudaMalloc` calls.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvferry.layout import Region

LIBRARY = "libcuda.so.1"

NOT_SHARED = "expandable_segments (PYTORCH_CUDA_ALLOC_CONF), vLLM's sleep mode and SGLang's memory saver"
"""By what memory comes to be of another kind, in a sentence."""

_OUT_OF_MEMORY = 2
_IS_LEGACY_CUDA_IPC_CAPABLE = 10  # CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
_LAZY_ENABLE_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE
_CAPTURE_MODE_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


class _IpcMemHandle(ctypes.Structure):
    """CUipcMemHandle, which the driver takes by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class CudaDriverError(RuntimeError):
    """The driver refuses.

    Attributes:
        is_out_of_memory: whether it has no such memory left.
    """

    def __init__(self, call: str, code: int, name: str) -> None:
        super().__init__(f"{call}: {name} ({code})")
        self.is_out_of_memory = code == _OUT_OF_MEMORY


class DeviceMemory:
    """Memory of a GPU, until the object goes. What is left when the process ends goes with its context."""

    def __init__(self, driver: CudaDriver, index: int, address: int) -> None:
        self.address = address
        # Not at exit: the driver may be gone by then.
        weakref.finalize(self, driver.free, index, address).atexit = False


class CudaDriver:
    """The driver's library. May be used from several threads: each call brings the GPU's context, torch's, along."""

    def __init__(self, library: Any = None) -> None:
        """Loads the library.

        Args:
            library: one that is loaded; None loads the driver's.

        Raises:
            CudaDriverError: if it does not work here.
            OSError: if there is none.
        """
        self._library = ctypes.CDLL(LIBRARY) if library is None else library
        self._call("cuInit", 0)

    def allocate(self, num_bytes: int, index: int) -> DeviceMemory:
        """Takes memory of a GPU, which begins at a multiple of 256 bytes.

        Args:
            index: the GPU's number, among those that this process sees.

        Raises:
            CudaDriverError: if there is not that much.
        """
        address = ctypes.c_uint64()
        with self._context(index):
            self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
            self._retain(index)  # as long as there is memory in it, whoever else gives it up
        return DeviceMemory(self, index, address.value)

    def free(self, index: int, address: int) -> None:
        """Gives memory back that `allocate` took."""
        with self._context(index):
            self._call("cuMemFree_v2", ctypes.c_uint64(address))
            self._release(index)

    def ignore_captures(self) -> None:
        """Lets the calling thread go on while other threads capture graphs, and their captures as well.

        An engine captures in the mode `global` (torch's default). Meanwhile an allocation, an upload or a look at an
        event by any other thread would fail, and end the capture with it, unless that thread has said this.

        Raises:
            CudaDriverError: if the driver refuses.
        """
        self._exchange_capture_mode(_CAPTURE_MODE_THREAD_LOCAL)

    @contextmanager
    def _beside_captures(self) -> Iterator[None]:
        """As `ignore_captures`, for a while."""
        before = self._exchange_capture_mode(_CAPTURE_MODE_THREAD_LOCAL)
        try:
            yield
        finally:
            self._exchange_capture_mode(before)

    def _exchange_capture_mode(self, mode: int) -> int:
        """Returns the mode that the thread had."""
        exchanged = ctypes.c_int(mode)
        self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(exchanged))
        return exchanged.value

    def can_be_mapped(self, address: int) -> bool:
        """Returns whether another process can map the allocation of an address by `cudaIpcOpenMemHandle`.

        Raises:
            CudaDriverError: if it is no address of a GPU's memory.
        """
        found = ctypes.c_uint64(0)  # the driver writes a bool, of whatever width
        self._call("cuPointerGetAttribute", ctypes.byref(found), _IS_LEGACY_CUDA_IPC_CAPABLE, ctypes.c_uint64(address))
        return bool(found.value & 0xFF)

    def first_unmapped(self, regions: Sequence[Region]) -> Region | None:
        """Returns the first region that no other process can map; None if all can be.

        Raises:
            CudaDriverError: if one is no GPU's memory.
        """
        used = (region for region in regions if region.length)
        return next((region for region in used if not self.can_be_mapped(region.address)), None)

    def allocation_of(self, address: int, index: int) -> Region:
        """Returns the whole allocation that an address lies in, whoever took it.

        Raises:
            CudaDriverError: if it is no address of a GPU's memory.
        """
        base, num_bytes = ctypes.c_uint64(), ctypes.c_size_t()
        with self._context(index):
            self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(num_bytes), ctypes.c_uint64(address))
        return Region(base.value, num_bytes.value)

    def export(self, address: int, index: int) -> bytes:
        """Returns the handle by which another process of this machine maps the allocation of an address.

        Raises:
            CudaDriverError: if it cannot be shared.
        """
        handle = _IpcMemHandle()
        with self._context(index):
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle.reserved)

    def map(self, handle: bytes, index: int) -> int:
        """Maps another process's allocation, and returns where it begins. Of one that is mapped already it counts that.

        Raises:
            CudaDriverError: if it cannot be mapped: it is this process's own, or another machine's, or of a GPU that
                this one cannot reach.
        """
        address = ctypes.c_uint64()
        with self._context(index):
            self._call(
                "cuIpcOpenMemHandle_v2",
                ctypes.byref(address),
                _IpcMemHandle.from_buffer_copy(handle),
                ctypes.c_uint(_LAZY_ENABLE_PEER_ACCESS),
            )
            self._retain(index)  # for a mapping too
        return address.value

    def unmap(self, address: int, index: int) -> None:
        """Ends what `map` began, once for each time."""
        with self._context(index):
            self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))
            self._release(index)

    @contextmanager
    def _context(self, index: int) -> Iterator[None]:
        """Makes the GPU's primary context, which torch uses, the thread's for a while, whoever captures meanwhile."""
        context, before = self._retain(index), ctypes.c_void_p()
        try:
            self._call("cuCtxPushCurrent_v2", context)
            try:
                with self._beside_captures():
                    yield
            finally:
                self._call("cuCtxPopCurrent_v2", ctypes.byref(before))
        finally:
            self._release(index)

    def _retain(self, index: int) -> ctypes.c_void_p:
        context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device(index))
        return context

    def _release(self, index: int) -> None:
        self._call("cuDevicePrimaryCtxRelease_v2", self._device(index))

    def _device(self, index: int) -> ctypes.c_int:
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), index)
        return device

    def _call(self, name: str, *arguments: Any) -> None:
        code = int(getattr(self._library, name)(*arguments))
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(text))
            raise CudaDriverError(name, code, (text.value or b"an unknown error").decode())
