"""A CUDA GPU, as torch and Triton drive it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray

from kvferry.errors import SettingsError, TransportError
from kvferry.staging.accelerator import (
    MOST_LOOPS,
    Accelerator,
    CopyLaunch,
    DeviceArray,
    DeviceRows,
    RunsLaunch,
    Stream,
    StreamEvent,
)
from kvferry.staging.cuda_driver import CudaDriver
from kvferry.staging.kernels import StartArray, Watch, unwatched
from kvferry.staging.triton_kernels import COLUMN_BYTES, ROWS, ROWS_OF_SMALL_WORDS, copy_runs, copy_selected

_WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
_MOST_PROGRAMS = (1 << 31) - 1

STREAM_PRIORITY = -1
"""Before the engine's streams, which have 0: what is gathered need not wait until a prompt is computed."""


def constants(alignment: int, num_loops: int, *, gather: bool) -> dict[str, Any]:
    """Returns the constants that one variant of the kernel is compiled for.

    Args:
        alignment: bytes that divide all addresses and lengths, a power of two up to 16.
        num_loops: loops of a block, at most 4.
        gather: whether it copies from the pool to staging memory; otherwise back.
    """
    return {"LOOPS": num_loops, "GATHER": gather, **constants_of_runs(alignment)}


def constants_of_runs(alignment: int) -> dict[str, Any]:
    """Returns the constants that depend on the alignment: all that one variant of `copy_selected` has.

    Args:
        alignment: bytes that divide all addresses and lengths, a power of two up to 16.
    """
    word = min(alignment, max(_WORDS))
    return {
        "WORD": _WORDS[word],
        "WORDS_PER_VECTOR": alignment // word,
        "ALIGNMENT": alignment,
        "ROWS": rows_of(alignment),
        "COLUMNS": COLUMN_BYTES // word,
    }


def rows_of(alignment: int) -> int:
    """Returns how many runs a tile has."""
    return ROWS if alignment >= max(_WORDS) else ROWS_OF_SMALL_WORDS


class TensorArray(DeviceArray):
    """A tensor with the numbers."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def launch_kernel(copy: CopyLaunch) -> None:
    """Launches the kernel on torch's current stream.

    Raises:
        SettingsError: if there are more runs than one launch copies, naming the setting to lower.
    """
    assert isinstance(copy.starts, TensorArray)
    num_runs = copy.stop - copy.first
    for count, _ in copy.loops:
        num_runs *= count
    rows, tiles_per_run = rows_of(copy.alignment), -(-copy.length // COLUMN_BYTES)
    programs = max(1, -(-num_runs // rows) * tiles_per_run)
    if max(num_runs + rows, programs) > _MOST_PROGRAMS:
        raise SettingsError(
            f"{num_runs} runs of {copy.length} bytes are more than one launch copies: lower staging_chunk_mib "
            "(KVFERRY_STAGING_CHUNK_MIB)"
        )
    loops = [*reversed(copy.loops), *[(1, 0)] * (MOST_LOOPS - len(copy.loops))]
    copy_runs[(programs,)](
        copy.starts.tensor[copy.first :],
        copy.address,
        num_runs,
        copy.length,
        copy.length // copy.alignment,
        tiles_per_run,
        *(count for count, _ in loops),
        *(stride for _, stride in loops),
        **constants(copy.alignment, len(copy.loops), gather=copy.is_gather),
    )


def launch_runs(copy: RunsLaunch) -> None:
    """Launches the kernel that copies runs from rows to rows, on torch's current stream.

    Raises:
        TransportError: if there are more runs than one launch copies.
    """
    rows, tiles_per_run = rows_of(copy.alignment), -(-copy.length // COLUMN_BYTES)
    programs = max(1, -(-copy.count // rows) * tiles_per_run)
    if max(copy.count + rows, programs) > _MOST_PROGRAMS:
        raise TransportError(
            f"{copy.count} runs of {copy.length} bytes are more than one launch copies: hand the request in by smaller "
            "chunks"
        )
    copy_selected[(programs,)](
        *_side(copy.source, copy.numbers, copy.sources),
        *_side(copy.destination, copy.numbers, copy.destinations),
        copy.count,
        copy.length // copy.alignment,
        tiles_per_run,
        **constants_of_runs(copy.alignment),
    )


def _side(rows: DeviceRows, numbers: DeviceArray, first: int) -> tuple[torch.Tensor, int, int, torch.Tensor]:
    """Returns what the kernel needs of one side: rows, how many, how often that can be halved, and runs' numbers."""
    assert isinstance(rows.table, TensorArray)
    assert isinstance(numbers, TensorArray)
    return rows.table.tensor, rows.count, rows.count.bit_length(), numbers.tensor[first:]


class CudaEvent(StreamEvent):
    """An event of CUDA's."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = stream.record_event()

    def query(self) -> bool:
        return bool(self._event.query())


class CudaStream(Stream):
    """A stream of CUDA's, not ordered with the engine's."""

    def __init__(self, device: torch.device, priority: int, watch: Watch = unwatched) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]
        self._wait: Callable[[], None] = watch(self._stream.synchronize)  # which spins

    def upload(self, numbers: StartArray | NDArray[np.int32]) -> DeviceArray:
        with self._current():
            # Pageable: copied before the call returns, so that no pinned memory need be kept.
            return TensorArray(torch.from_numpy(numbers).to(self._device, non_blocking=True))

    def launch(self, copy: CopyLaunch) -> None:
        with self._current():
            launch_kernel(copy)

    def launch_runs(self, copy: RunsLaunch) -> None:
        with self._current():
            launch_runs(copy)

    def record(self) -> StreamEvent:
        with torch.cuda.device(self._device):
            return CudaEvent(self._stream)

    def _current(self) -> AbstractContextManager[None]:
        """Makes this the thread's current stream for a while, and its GPU the current one."""
        if torch.cuda.current_device() == self._device.index:
            return _on(self._stream)
        return _on_another_gpu(self._device, self._stream)

    def synchronize(self) -> None:
        self._wait()


@contextmanager
def _on(stream: torch.cuda.Stream) -> Iterator[None]:
    """As `torch.cuda.stream`, which takes 6 us to look whether the thread has changed GPUs: as long as a launch."""
    before = torch.cuda.current_stream()
    torch.cuda.set_stream(stream)
    try:
        yield
    finally:
        torch.cuda.set_stream(before)


@contextmanager
def _on_another_gpu(device: torch.device, stream: torch.cuda.Stream) -> Iterator[None]:
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield


class CudaAccelerator(Accelerator):
    """A GPU."""

    def __init__(self, index: int, *, priority: int = STREAM_PRIORITY, watch: Watch = unwatched) -> None:
        """Takes a GPU that torch sees.

        Args:
            index: torch's number for it.
            priority: of the streams, lower before higher; CUDA brings it into the range that the GPU has.
            watch: is put around waits for a stream.
        """
        self._device = torch.device("cuda", index)
        self._priority = priority
        self._watch: Watch = watch

    def bind_thread(self) -> None:
        bind_thread(self._device.index)

    def stream(self) -> Stream:
        return CudaStream(self._device, self._priority, self._watch)


def bind_thread(index: int) -> None:
    """Makes a GPU the calling thread's own, context included.

    Without it a thread that queries another GPU's events makes a context on GPU 0, half a GiB for each rank. Choosing
    a device binds no context where it is chosen already, as GPU 0 is on every fresh thread, and Triton launches into
    whatever context there is: so a call of CUDA's runtime follows, one that is allowed while graphs are captured.
    From then on the thread's own calls are allowed meanwhile, too.
    """
    torch.cuda.set_device(index)
    torch.cuda.is_current_stream_capturing()
    CudaDriver().ignore_captures()
