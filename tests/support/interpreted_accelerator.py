"""An accelerator that is Triton's interpreter: what is launched has run when the call returns."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.staging.accelerator import Accelerator, CopyLaunch, DeviceArray, RunsLaunch, Stream, StreamEvent
from kvferry.staging.cuda import TensorArray, launch_kernel, launch_runs
from kvferry.staging.kernels import StartArray


class _Over(StreamEvent):
    def query(self) -> bool:
        return True


class InterpretedAccelerator(Accelerator, Stream):
    """The CPU, interpreting."""

    def bind_thread(self) -> None:
        pass

    def stream(self) -> Stream:
        return self

    def upload(self, numbers: StartArray | NDArray[np.int32]) -> DeviceArray:
        return TensorArray(torch.from_numpy(numbers.copy()))

    def launch(self, copy: CopyLaunch) -> None:
        launch_kernel(copy)

    def launch_runs(self, copy: RunsLaunch) -> None:
        launch_runs(copy)

    def record(self) -> StreamEvent:
        return _Over()

    def synchronize(self) -> None:
        pass
