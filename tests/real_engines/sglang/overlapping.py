"""A plug-in of SGLang's for tests, which lets steps overlap on a CPU, as they do by default.

SGLang asks for CUDA's events wherever it is. Those of a CPU, for which nobody need wait, take their place.
"""

from __future__ import annotations

from pathlib import Path

from tests.real_engines import plugins


def install(directory: Path) -> Path:
    """Makes the plug-in findable in a directory, which goes on SGLang's module path; returns it."""
    return plugins.install(directory, "overlapping", __name__)


def register() -> None:
    """Called by SGLang, or in a process from which an engine's are forked."""
    import torch

    if not torch.cuda.is_available():
        torch.cuda.Event = torch.cpu.Event  # type: ignore[misc, assignment]
