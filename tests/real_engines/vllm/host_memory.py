"""What vLLM's OffloadingConnector lacks on a CPU: something that copies blocks to host memory and back.

vLLM's own (`CPUOffloadingSpec.get_worker`) copies on streams of a GPU and refuses anything else. This one is loaded as
vLLM loads anybody's (`spec_module_path`), and copies at once. All else is vLLM's: which blocks are stored and which are
loaded, when, and what they wait for.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class HostSpec(CPUOffloadingSpec):  # type: ignore[misc]
    """As vLLM's, but for the copying. `journal` names a file that says how many blocks were stored and loaded."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        assert self.blocks_per_chunk == 1, "a block of host memory is one of the pool here"
        return HostWorker(kv_caches, self.num_chunks, Path(self.extra_config["journal"]))


class HostWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies between the pool and host memory: a transfer is over when it is submitted."""

    def __init__(self, caches: CanonicalKVCaches, blocks: int, journal: Path) -> None:
        self._caches, self._journal, self._lock = caches, journal, threading.Lock()
        self._host = [torch.zeros(blocks, each.tensor.shape[1], dtype=torch.int8) for each in caches.tensors]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        for tensor, page, block, kept in self._pairs(src_spec, dst_spec):
            self._host[tensor][kept, :page] = self._caches.tensors[tensor].tensor[block, :page]
        return self._end("stored", job_id, src_spec)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        for tensor, page, block, kept in self._pairs(dst_spec, src_spec):
            self._caches.tensors[tensor].tensor[block, :page] = self._host[tensor][kept, :page]
        return self._end("loaded", job_id, dst_spec)

    def _pairs(self, pool: GPULoadStoreSpec, host: LoadStoreSpec) -> Iterator[tuple[int, int, int, int]]:
        """Yields a tensor's number and the bytes of its page, and a block of either side that are the same one."""
        assert isinstance(host, BlockIDsLoadStoreSpec)
        assert len(pool.block_ids) == len(host.block_ids)
        first = 0
        for count, layers in zip(pool.group_sizes, self._caches.group_data_refs, strict=True):
            blocks = zip(pool.block_ids[first : first + count], host.block_ids[first : first + count], strict=True)
            for block, kept in blocks:
                for layer in layers:
                    yield layer.tensor_idx, layer.page_size_bytes, int(block), int(kept)
            first += count

    def _end(self, what: str, job_id: int, pool: Any) -> bool:
        with self._lock, self._journal.open("a") as journal:
            journal.write(f"{what} {len(pool.block_ids)}\n")
        self._done.append(TransferResult(job_id, success=True))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """All have been copied."""
