"""An accelerator that is Triton's interpreter: what is launched has run when the call returns."""

from __future__ import annotations

import torch

from kvferry.staging.accelerator import Accelerator, CopyLaunch, DeviceStarts, Stream
from kvferry.staging.cuda import TensorStarts, launch_kernel
from kvferry.staging.kernels import StartArray


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

    def synchronize(self) -> None:
        pass
