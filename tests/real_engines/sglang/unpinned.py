"""A plug-in of SGLang's for tests, which lets it serve LoRA adapters on a CPU.

SGLang's code for adapters asks for pinned memory, which PyTorch has only beside an accelerator, and ends without it.
Where nothing is copied to a device, memory that is not pinned will do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from tests.real_engines import plugins


def install(directory: Path) -> Path:
    """Makes the plug-in findable in a directory, which goes on SGLang's module path; returns it."""
    return plugins.install(directory, "unpinned", __name__)


def register() -> None:
    """Called by SGLang."""
    import torch

    def unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(make)
        def making(*arguments: Any, pin_memory: bool = False, **named: Any) -> Any:
            return make(*arguments, **named)

        return making

    for name in ("tensor", "empty", "zeros", "ones", "arange"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]
