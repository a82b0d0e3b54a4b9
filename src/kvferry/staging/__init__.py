"""STUB for development."""
from __future__ import annotations
import time, ctypes
import numpy as np
from kvferry.layout import Region, Device
class StagingMemory:
    def __init__(self, n, device):
        self._raw = np.empty(n + 4096, np.uint8)
        self.address = -(-self._raw.ctypes.data // 4096) * 4096
        self.num_bytes = n
        self.device = device
        self.region = Region(self.address, n)
def allocate(n, device): return StagingMemory(n, device)
class Kernels:
    def __init__(self, regions):
        import torch
        self.torch = torch
        self.low = min(r.address for r in regions); self.high = max(r.stop for r in regions)
        self.buf = (ctypes.c_char * (self.high - self.low)).from_address(self.low)
        self.cache = {}
    def gather(self, starts, shape, address):
        torch = self.torch
        n = len(starts); W = shape.length // 8
        key = ("g", shape)
        if key not in self.cache:
            total = (self.high - self.low) // 8
            ext = sum((c - 1) * s for c, s in shape.loops) // 8 + W
            flat = torch.frombuffer(self.buf, dtype=torch.int64, count=total)
            self.cache[key] = torch.as_strided(flat, (total - ext + 1, *(c for c, _ in shape.loops), W), (1, *(s // 8 for _, s in shape.loops), 1))
        win = self.cache[key]
        out = torch.frombuffer((ctypes.c_char * (n * shape.num_bytes)).from_address(address), dtype=torch.int64).view(n, *win.shape[1:])
        idx = torch.from_numpy((starts - self.low) // 8)
        per = max(1, 32768 * 8 // shape.num_bytes)
        for i in range(0, n, per):
            torch.index_select(win, 0, idx[i:i + per], out=out[i:i + per])
    def scatter(self, address, starts, shape):
        n = len(starts)
        key = ("s", shape)
        if key not in self.cache:
            dt = np.dtype((np.void, shape.length))
            ext = sum((c - 1) * s for c, s in shape.loops) + shape.length
            self.cache[key] = np.ndarray(((self.high - self.low - ext) // 8 + 1, *(c for c, _ in shape.loops)), dt, buffer=self.buf, strides=(8, *(s for _, s in shape.loops)))
        win = self.cache[key]
        src = np.frombuffer((ctypes.c_char * (n * shape.num_bytes)).from_address(address), np.dtype((np.void, shape.length))).reshape(n, *win.shape[1:])
        win[(starts - self.low) // 8] = src
def kernels_for(regions, device): return Kernels(regions)
def gather_speed(kernels, starts, shape, memory):
    best = 9.0
    for _ in range(3):
        t = time.perf_counter(); kernels.gather(starts, shape, memory.address); best = min(best, time.perf_counter() - t)
    return best
