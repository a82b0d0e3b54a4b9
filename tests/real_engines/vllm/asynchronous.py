"""Asynchronous scheduling, which GPUs have by default, on an engine that runs on a CPU.

vLLM switches it off there. Its scheduler needs nothing of a GPU: it queues two batches, and so has scheduled the next
one when it learns what the one before has generated. What needs a GPU is the model runner, which would keep tokens on
the device: it is made as without, and computes a batch as soon as that is queued.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.real_engines import plugins


def install(directory: Path) -> Path:
    """Makes it a plug-in of servers, findable in a directory, which goes on their module path; returns it."""
    return plugins.install(directory, "asynchronous", __name__, "vllm.general_plugins")


def schedule_asynchronously() -> None:
    """Leaves it on in this process, where the engine's only worker must be. Called before an engine is made."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    update, make = CpuPlatform.check_and_update_config, CPUModelRunner.__init__

    def check_and_update_config(vllm_config: Any) -> None:
        update(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    def made_without(runner: Any, vllm_config: Any, device: Any) -> None:
        vllm_config.scheduler_config.async_scheduling = False
        try:
            make(runner, vllm_config, device)
        finally:
            vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = staticmethod(check_and_update_config)
    CPUModelRunner.__init__ = made_without


def register() -> None:
    """Called by vLLM, in every process of a server."""
    schedule_asynchronously()
