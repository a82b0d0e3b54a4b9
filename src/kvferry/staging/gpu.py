"""The kernels for GPU memory: one launch of a Triton kernel a call, on a stream of the calling thread's own."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import triton.language as tl

from kvferry.errors import SettingsError
from kvferry.layout import Region
from kvferry.plan.blocks import BlockShape
from kvferry.staging.addressing import common_alignment, spread
from kvferry.staging.kernels import AddressRange, Kernels, StartArray
from kvferry.staging.triton_kernels import COLUMN_BYTES, MOST_LOOPS, ROWS, copy_runs

_WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
_VECTOR_BYTES = 16
_MOST_PROGRAMS = (1 << 31) - 1


def constants(alignment: int, num_loops: int, *, gather: bool) -> dict[str, Any]:
    """Returns the constants that one variant of the kernel is compiled for.

    Args:
        alignment: bytes that divide all addresses and lengths, a power of two up to 16.
        num_loops: loops of a block, at most 4.
        gather: whether it copies from the pool to staging memory; otherwise back.
    """
    word = min(alignment, max(_WORDS))
    return {
        "LOOPS": num_loops,
        "WORD": _WORDS[word],
        "WORDS_PER_VECTOR": alignment // word,
        "ALIGNMENT": alignment,
        "ROWS": ROWS,
        "COLUMNS": COLUMN_BYTES // word,
        "GATHER": gather,
    }


class GpuKernels(Kernels):
    """Copies between a pool and staging memory on one GPU.

    A call waits for what it launched and for nothing else, and releases the interpreter lock meanwhile. Pages must hold
    their bytes when `gather` is called: it does not wait for the engine's streams.
    """

    def __init__(self, regions: Sequence[Region], device: torch.device) -> None:
        """Takes the pool that the kernels copy from and to.

        Args:
            regions: the pool's memory.
            device: where it is. Under Triton's interpreter, the CPU.
        """
        self._range = AddressRange.over(regions)
        self._device = device
        self._of_thread = threading.local()

    def gather(self, starts: StartArray, shape: BlockShape, address: int) -> None:
        self._range.check(starts, shape)
        self._copy(starts, shape, address, gather=True)

    def scatter(self, address: int, starts: StartArray, shape: BlockShape) -> None:
        self._range.check(starts, shape)
        self._copy(starts, shape, address, gather=False)

    def compile(self) -> None:
        """Compiles what most layouts need: runs that are multiples of 16 bytes, in blocks of one and of several."""
        scratch = torch.zeros(4 * _VECTOR_BYTES, dtype=torch.uint8, device=self._device)
        torch.cuda.synchronize(self._device)  # our stream does not wait for the one that writes the zeros
        starts = np.array([scratch.data_ptr()], np.int64)
        packed = scratch.data_ptr() + 2 * _VECTOR_BYTES
        for loops in ((), ((2, _VECTOR_BYTES),)):
            for gather in (True, False):
                self._copy(starts, BlockShape(loops, _VECTOR_BYTES), packed, gather=gather)

    def _copy(self, starts: StartArray, shape: BlockShape, address: int, *, gather: bool) -> None:
        if not len(starts):
            return
        outer, inner = shape.loops[:-MOST_LOOPS], shape.loops[-MOST_LOOPS:]
        starts = np.array(spread(starts, outer), np.int64)  # torch warns of arrays that cannot be written to
        alignment = common_alignment(starts, shape, address, _VECTOR_BYTES)
        num_runs = len(starts) * BlockShape(inner, shape.length).num_runs
        tiles_per_run = -(-shape.length // COLUMN_BYTES)
        programs = -(-num_runs // ROWS) * tiles_per_run
        if max(num_runs + ROWS, programs) > _MOST_PROGRAMS:
            raise SettingsError(
                f"{num_runs} runs of {shape.length} bytes are more than one launch copies: lower staging_chunk_mib "
                "(KVFERRY_STAGING_CHUNK_MIB)"
            )
        loops = [*reversed(inner), *[(1, 0)] * (MOST_LOOPS - len(inner))]
        with self._own_stream():
            copy_runs[(programs,)](
                # Small and pageable: copied before the call returns, so that no pinned memory need be kept.
                torch.from_numpy(starts).to(self._device, non_blocking=True),
                address,
                num_runs,
                shape.length,
                shape.length // alignment,
                tiles_per_run,
                *(count for count, _ in loops),
                *(stride for _, stride in loops),
                **constants(alignment, len(inner), gather=gather),
            )

    @contextlib.contextmanager
    def _own_stream(self) -> Iterator[None]:
        """Runs what is launched inside on the calling thread's stream, and waits for it."""
        if self._device.type == "cpu":  # Triton's interpreter has run when it returns
            yield
            return
        stream = getattr(self._of_thread, "stream", None)
        if stream is None:
            stream = self._of_thread.stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            yield
            stream.synchronize()
