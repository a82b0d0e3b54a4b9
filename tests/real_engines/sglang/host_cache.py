"""A plug-in of SGLang's for tests, which lets it keep caches in host memory (HiCache) where the device is the host.

SGLang registers such memory with CUDA and copies by kernels of a GPU. On a CPU the copies are made by PyTorch, from and
to the same places, layer by layer, and nothing is registered.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.real_engines import plugins
from tests.real_engines.sglang import unpinned

COPIES = "KVFERRY_HOST_COPIES"
"""The environment variable with the file in which copies to the device are counted."""

OPTIONS = {
    "enable_hierarchical_cache": True,
    "hicache_ratio": 4.0,
    "hicache_io_backend": "direct",
    "hicache_mem_layout": "layer_first",
    "hicache_write_policy": "write_through",
}
"""SGLang's, with the copies that are made here."""


def install(directory: Path) -> Path:
    """Makes the plug-in findable in a directory, which goes on SGLang's module path; returns it."""
    return plugins.install(directory, "host_cache", __name__)


def register() -> None:
    """Called by SGLang."""
    from sglang.srt.mem_cache.pool_host import common, mha

    def copy(
        *, src_layers: Sequence[Any], dst_layers: Sequence[Any], src_indices: Any, dst_indices: Any, page_size: int
    ) -> None:
        del page_size  # indices are of tokens
        for source, destination in zip(src_layers, dst_layers, strict=True):
            destination[dst_indices] = source[src_indices]
        if len(src_layers) == 2:  # keys and values of one layer: they come back
            with Path(os.environ[COPIES]).open("a") as file:
                file.write(f"{len(src_indices)}\n")

    unpinned.register()
    common._cuda_host_register = lambda *_: None
    mha.transfer_kv_direct = copy
    mha.require_kvcacheio_ops = lambda *_, **__: None
