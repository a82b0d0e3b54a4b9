"""An accelerator that is Triton's interpreter: what is launched has run when the call returns."""

from __future__ import annotations

import torch

from kvferry.staging.accelerator import Accelerator, CopyLaunch, DeviceStarts, RunsLaunch, Stream, StreamEvent
from kvferry.staging.cuda import TensorStarts, launch_kernel, launch_runs
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

    def upload(self, starts: StartArray) -> DeviceStarts:
        return TensorStarts(torch.from_numpy(starts.copy()))

    def launch(self, copy: CopyLaunch) -> None:
        launch_kernel(copy)

    def launch_runs(self, copy: RunsLaunch) -> None:
        launch_runs(copy)

    def record(self) -> StreamEvent:
        return _Over()

    def synchronize(self) -> None:
        pass
