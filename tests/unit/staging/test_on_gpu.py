"""The GPU's kernels on a GPU. Their twin, test_triton_interpreted.py, runs everywhere."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from tests.support.staging import ODD_CASES, Case, cases, check_gather, check_round_trip, check_scatter
from tests.support.tiers import examples

from kvferry.errors import RegistrationError, SettingsError, TransportUnavailableError
from kvferry.layout import Device, MemoryKind, Region
from kvferry.plan.packing import BlockShape
from kvferry.staging import Kernels, allocate, gather_speed, kernels_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),  # kernels are compiled here, for every alignment and number of loops
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device; test_triton_interpreted.py is the twin"),
]

GPU = Device(MemoryKind.VRAM, 0)
MIB = 1 << 20


def on_gpu(regions: Sequence[Region]) -> Kernels:
    return kernels_for(regions, GPU)


@pytest.mark.parametrize("case", ODD_CASES.values(), ids=ODD_CASES)
@pytest.mark.parametrize("check", [check_gather, check_scatter, check_round_trip])
def test_odd_shapes(check: Callable[..., None], case: Case):
    check(on_gpu, case, "cuda")


@given(cases())
@settings(max_examples=examples(200))
def test_gathering_packs_the_blocks_and_nothing_else(case: Case):
    check_gather(on_gpu, case, "cuda")


@given(cases())
@settings(max_examples=examples(200))
def test_scattering_writes_the_blocks_and_nothing_else(case: Case):
    check_scatter(on_gpu, case, "cuda")


class Layers:
    """Sixteen layers of K and V, each a tensor of 8 MiB, and the same on the CPU."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(1)
        self.twins = [torch.randint(0, 256, (8 * MIB,), dtype=torch.uint8, generator=random) for _ in range(32)]
        self.tensors = [twin.cuda() for twin in self.twins]
        torch.cuda.synchronize()
        self.kernels = kernels_for(self.regions(self.tensors), GPU)
        self.host = kernels_for(self.regions(self.twins), Device())

    @staticmethod
    def regions(tensors: Sequence[torch.Tensor]) -> list[Region]:
        return [Region(tensor.data_ptr(), tensor.numel()) for tensor in tensors]

    @staticmethod
    def starts(tensors: Sequence[torch.Tensor], offsets: np.ndarray) -> np.ndarray:
        starts: np.ndarray = np.add.outer(np.array([tensor.data_ptr() for tensor in tensors], np.int64), offsets)
        return starts.ravel()


@pytest.fixture(scope="module")
def layers() -> Iterator[Layers]:
    yield Layers()
    torch.cuda.empty_cache()


SHAPES = {
    "half the heads": BlockShape(((16, 2048),), 1024),
    "an eighth of the heads": BlockShape(((16, 2048),), 256),
    "whole pages": BlockShape((), 32768),
    "single tokens": BlockShape((), 2048),
    "pages of heads": BlockShape(((4, 8192), (16, 512)), 256),
    "a prime number of bytes": BlockShape(((16, 2048),), 1021),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_layers_of_a_model_as_the_cpus_kernels_copy_them(layers: Layers, shape: BlockShape):
    offsets = np.random.default_rng(2).permutation(8 * MIB // 32768)[:40] * 32768
    here, twins = layers.starts(layers.tensors, offsets), layers.starts(layers.twins, offsets)
    with allocate(len(here) * shape.num_bytes, GPU) as memory:
        packed = torch.empty(memory.num_bytes, dtype=torch.uint8)
        layers.host.gather(twins, shape, packed.data_ptr())
        layers.kernels.gather(here, shape, memory.address)
        arrived = torch.zeros(memory.num_bytes, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        whole = BlockShape((), memory.num_bytes)
        everything = kernels_for([Region(arrived.data_ptr(), arrived.numel())], GPU)
        everything.scatter(memory.address, np.array([arrived.data_ptr()], np.int64), whole)
        assert torch.equal(arrived.cpu(), packed)
        shifted = np.roll(offsets, 1)  # every block goes where another was
        layers.host.scatter(packed.data_ptr(), layers.starts(layers.twins, shifted), shape)
        layers.kernels.scatter(memory.address, layers.starts(layers.tensors, shifted), shape)
        for tensor, twin in zip(layers.tensors, layers.twins, strict=True):
            assert torch.equal(tensor.cpu(), twin)


def test_threads_gather_at_the_same_time_each_into_memory_of_its_own(layers: Layers):
    shape, wrong = SHAPES["half the heads"], []

    def work(number: int) -> None:
        offsets = np.random.default_rng(number).permutation(256)[:32] * 32768
        with allocate(32 * 32 * shape.num_bytes, GPU) as memory:
            packed = torch.empty(memory.num_bytes, dtype=torch.uint8)
            layers.host.gather(layers.starts(layers.twins, offsets), shape, packed.data_ptr())
            target = torch.zeros(memory.num_bytes, dtype=torch.uint8, device="cuda")
            torch.cuda.synchronize()
            whole = kernels_for([Region(target.data_ptr(), target.numel())], GPU)
            for _ in range(20):
                layers.kernels.gather(layers.starts(layers.tensors, offsets), shape, memory.address)
            whole.scatter(memory.address, np.array([target.data_ptr()], np.int64), BlockShape((), memory.num_bytes))
            if not torch.equal(target.cpu(), packed):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_copy_does_not_wait_for_the_engine(layers: Layers):
    shape = SHAPES["whole pages"]
    starts = layers.starts(layers.tensors, np.array([0]))
    with allocate(len(starts) * shape.num_bytes, GPU) as memory:
        layers.kernels.gather(starts, shape, memory.address)  # compiles, and makes this thread's stream
        done = torch.cuda.Event()
        torch.cuda._sleep(4_000_000_000)  # cycles: seconds of work on the engine's stream
        done.record()
        layers.kernels.gather(starts, shape, memory.address)
        assert not done.query(), "the copy waited for the whole device"
        torch.cuda.synchronize()


def test_a_copy_leaves_the_thread_with_the_stream_that_it_had(layers: Layers):
    shape, engines = SHAPES["whole pages"], torch.cuda.Stream()
    starts = layers.starts(layers.tensors, np.array([0]))
    with allocate(len(starts) * shape.num_bytes, GPU) as memory, torch.cuda.stream(engines):
        layers.kernels.gather(starts, shape, memory.address)
        assert torch.cuda.current_stream() == engines


def test_offsets_beyond_what_32_bits_count():
    gib, block = 1 << 30, BlockShape(((16, 2048),), 1024)
    far = np.array([4 * gib - 512, 5 * gib, 5 * gib + 65536], np.int64)
    shapes = {"far blocks": (block, far), "far runs": (BlockShape(((2, 5 * gib),), 256), far[:1] - 4 * gib + 1024)}
    pool = torch.zeros(6 * gib, dtype=torch.uint8, device="cuda")
    kernels = kernels_for([Region(pool.data_ptr(), pool.numel())], GPU)
    for shape, blocks in shapes.values():
        pool.zero_()
        with allocate(len(blocks) * shape.num_bytes, GPU) as memory:
            content = torch.randint(1, 256, (len(blocks), shape.num_bytes // shape.length, shape.length)).to(
                torch.uint8
            )
            (count, stride), *_ = shape.loops
            for start, runs in zip(blocks.tolist(), content, strict=True):
                for number, run in enumerate(runs):
                    pool[start + number * stride :][: shape.length] = run.cuda()
            torch.cuda.synchronize()
            kernels.gather(pool.data_ptr() + blocks, shape, memory.address)
            pool.zero_()
            torch.cuda.synchronize()
            kernels.scatter(memory.address, pool.data_ptr() + blocks, shape)
            for start, runs in zip(blocks.tolist(), content, strict=True):
                for number, run in enumerate(runs):
                    assert torch.equal(pool[start + number * stride :][: shape.length].cpu(), run)
            assert count * len(blocks) * shape.length == torch.count_nonzero(pool).item()


def test_blocks_outside_the_pool_are_refused(layers: Layers):
    highest = max(tensor.data_ptr() for tensor in layers.tensors) + 8 * MIB
    with allocate(MIB, GPU) as memory:
        with pytest.raises(RegistrationError, match="outside the pool"):
            layers.kernels.gather(np.array([highest - 1], np.int64), BlockShape((), 2), memory.address)
        with pytest.raises(RegistrationError, match="outside the pool"):
            layers.kernels.scatter(memory.address, np.array([8], np.int64), BlockShape((), 2))


def test_gpu_memory_is_aligned_and_what_does_not_fit_is_refused_with_its_size():
    with allocate(MIB + 1, GPU) as memory:
        assert memory.address % 256 == 0
        assert memory.num_bytes == MIB + 1
        assert memory.device == GPU
    with pytest.raises(SettingsError, match=rf"{1 << 46} bytes.*VRAM:0.*KVFERRY_STAGING_RING_MIB"):
        allocate(1 << 46, GPU)


def test_a_gpu_that_is_not_there_is_refused():
    missing = Device(MemoryKind.VRAM, torch.cuda.device_count())
    with pytest.raises(TransportUnavailableError, match=r"torch sees \d+ GPUs here"):
        allocate(MIB, missing)


def test_gathering_is_measured(layers: Layers):
    starts = layers.starts(layers.tensors, np.arange(4) * 32768)
    with allocate(len(starts) * 16384, GPU) as memory:
        assert 1e6 < gather_speed(layers.kernels, [starts], SHAPES["half the heads"], memory) < 1e14
