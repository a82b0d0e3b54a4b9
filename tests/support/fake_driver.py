"""CUDA's driver as a library of Python functions: what it was asked, and what it has given away."""

from __future__ import annotations

import ctypes
from typing import Any

OUT_OF_MEMORY = 2
INVALID_VALUE = 1
INVALID_CONTEXT = 201
CAPTURE_UNSUPPORTED = 900
MAPPED_AT = 1 << 44


def pointed_at(reference: Any) -> Any:
    """What a `ctypes.byref` refers to."""
    return reference._obj


class FakeDriverLibrary:
    """As much of libcuda as kvferry calls.

    Attributes:
        allocated: bytes by address, of what was not given back.
        retained: how often the context of each GPU is held.
        current: the contexts that threads have pushed.
        virtual: addresses that no other process can map.
        is_capturing: whether another thread captures a graph in the mode global.
        mapped: how often other processes' memory is mapped, by address.
        calls: the names of what was called.
        capture_mode: whether another thread's capture is in the way of a call: 0 if one in the mode global is.
    """

    def __init__(self, *, memory_bytes: int = 1 << 30) -> None:
        self.left = memory_bytes
        self.allocated: dict[int, int] = {}
        self.retained: dict[int, int] = {}
        self.current: list[int] = []
        self.virtual: set[int] = set()
        self.is_capturing = False
        self.mapped: dict[int, int] = {}
        self.calls: list[str] = []
        self.capture_mode = 0
        self._next = 1 << 40

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("cu") and name not in ("cuGetErrorName", "current"):
            self.calls.append(name)
        return super().__getattribute__(name)

    def cuInit(self, flags: int) -> int:  # noqa: N802 - the driver's names, as those that follow
        return flags

    def cuDeviceGet(self, device: Any, index: int) -> int:  # noqa: N802
        pointed_at(device).value = index
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:  # noqa: N802
        self.retained[device.value] = self.retained.get(device.value, 0) + 1
        pointed_at(context).value = 1000 + device.value
        return 0

    def cuDevicePrimaryCtxRelease_v2(self, device: Any) -> int:  # noqa: N802
        self.retained[device.value] -= 1
        return 0

    def cuCtxPushCurrent_v2(self, context: Any) -> int:  # noqa: N802
        self.current.append(context.value)
        return 0

    def cuCtxPopCurrent_v2(self, context: Any) -> int:  # noqa: N802
        pointed_at(context).value = self.current.pop()
        return 0

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:  # noqa: N802
        self.capture_mode, pointed_at(mode).value = pointed_at(mode).value, self.capture_mode
        return 0

    def cuMemAlloc_v2(self, address: Any, size: Any) -> int:  # noqa: N802
        assert self.current, "no context"
        if self.is_capturing and not self.capture_mode:
            return CAPTURE_UNSUPPORTED
        if size.value > self.left:
            return OUT_OF_MEMORY
        self.left -= size.value
        self.allocated[self._next] = size.value
        pointed_at(address).value = self._next
        self._next += -(-size.value // 512) * 512
        return 0

    def cuMemFree_v2(self, address: Any) -> int:  # noqa: N802
        assert self.current, "no context"
        self.left += self.allocated.pop(address.value)
        return 0

    def cuMemGetAddressRange_v2(self, base: Any, size: Any, address: Any) -> int:  # noqa: N802
        assert self.current, "no context"
        for start, num_bytes in self.allocated.items():
            if start <= address.value < start + num_bytes:
                pointed_at(base).value, pointed_at(size).value = start, num_bytes
                return 0
        return INVALID_VALUE

    def cuIpcGetMemHandle(self, handle: Any, address: Any) -> int:  # noqa: N802
        assert self.current, "no context"
        ctypes.memmove(handle, address.value.to_bytes(64, "little"), 64)
        return 0

    def cuIpcOpenMemHandle_v2(self, address: Any, handle: Any, flags: Any) -> int:  # noqa: N802
        assert self.current, "no context"
        assert flags.value == 1
        exported = int.from_bytes(bytes(handle), "little")
        if exported in self.allocated:
            return INVALID_CONTEXT  # a process does not map its own
        pointed_at(address).value = exported + MAPPED_AT
        self.mapped[exported + MAPPED_AT] = self.mapped.get(exported + MAPPED_AT, 0) + 1
        return 0

    def cuIpcCloseMemHandle(self, address: Any) -> int:  # noqa: N802
        assert self.current, "no context"
        if not self.mapped.get(address.value):
            return INVALID_VALUE
        self.mapped[address.value] -= 1
        return 0

    def cuPointerGetAttribute(self, found: Any, attribute: int, address: Any) -> int:  # noqa: N802
        if attribute != 10 or address.value < 1 << 40:
            return INVALID_VALUE
        ctypes.memset(found, int(address.value not in self.virtual), 1)
        return 0

    def cuGetErrorName(self, code: int, name: Any) -> int:  # noqa: N802
        names = {
            OUT_OF_MEMORY: b"CUDA_ERROR_OUT_OF_MEMORY",
            INVALID_VALUE: b"CUDA_ERROR_INVALID_VALUE",
            INVALID_CONTEXT: b"CUDA_ERROR_INVALID_CONTEXT",
            CAPTURE_UNSUPPORTED: b"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
        }
        pointed_at(name).value = names.get(code)
        return 0
