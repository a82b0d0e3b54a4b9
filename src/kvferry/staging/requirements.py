"""Checks that what the kernels need is installed; errors say what to do."""

from __future__ import annotations

import importlib

from kvferry.errors import TransportUnavailableError
from kvferry.layout import Device

_OR_ELSE = "or take KVFERRY_PATH=direct, which copies nothing"


def require_torch() -> None:
    """Checks that torch can be imported.

    Raises:
        TransportUnavailableError: saying how to install it.
    """
    _require("torch", "pip install 'torch>=2.4'")


def require_cuda(device: Device) -> None:
    """Checks that torch can use a GPU.

    Raises:
        TransportUnavailableError: if torch is missing, or this GPU is.
    """
    require_torch()
    import torch

    if not torch.cuda.is_available():
        raise TransportUnavailableError(
            f"{device}: a GPU asked for where there is none that torch {torch.__version__} can use (its CUDA version: "
            f"{torch.version.cuda}): put the pool into CPU memory, or install a driver and a CUDA build of torch"
        )
    if not 0 <= device.index < torch.cuda.device_count():
        raise TransportUnavailableError(
            f"{device}: torch sees {torch.cuda.device_count()} GPUs here, numbered from 0 (CUDA_VISIBLE_DEVICES hides "
            "others)"
        )


def require_triton() -> None:
    """Checks that Triton can be imported.

    Raises:
        TransportUnavailableError: saying how to install it.
    """
    _require("triton", "pip install 'triton>=3.4' (CUDA builds of torch bring it along)")


def _require(module: str, remedy: str) -> None:
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise TransportUnavailableError(
            f"gathering into staging memory needs {module}, which cannot be imported ({error}): {remedy}, {_OR_ELSE}"
        ) from error
