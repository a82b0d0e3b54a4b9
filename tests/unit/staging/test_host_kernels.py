"""The CPU's kernels, compiled and not: odd shapes, long ones, and what they must not do while they copy."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tests.support.clones import ROOT
from tests.support.sparse import FAR_BLOCKS, check_far_blocks
from tests.support.staging import ODD_CASES, Case, KernelMaker, check_gather, check_round_trip, check_scatter
from tests.support.waiting import eventually

from kvferry.errors import LayoutError, RegistrationError
from kvferry.layout import Device, Region
from kvferry.plan.packing import BlockShape
from kvferry.staging import Kernels, allocate, kernels_for
from kvferry.staging.host import COMPILED, HostKernels, compiled, fastest, interpreted
from kvferry.staging.kernels import array_at

MIB = 1 << 20
HEADS = BlockShape(((16, 2048),), 1024)
"""Half of the heads of 16 tokens: 16 KiB, spread over 32 KiB."""


@pytest.fixture(params=[fastest()[0], interpreted], ids=["fastest", "interpreted"])
def make(request: pytest.FixtureRequest) -> KernelMaker:
    """Makes the kernels, of either kind."""
    return partial(HostKernels, copy=request.param)


@pytest.mark.parametrize("case", ODD_CASES.values(), ids=ODD_CASES)
@pytest.mark.parametrize("check", [check_gather, check_scatter, check_round_trip])
def test_odd_shapes(make: KernelMaker, check: Callable[..., None], case: Case):
    check(make, case, "cpu")


@pytest.mark.parametrize(("shape", "blocks"), FAR_BLOCKS.values(), ids=FAR_BLOCKS)
def test_offsets_beyond_what_32_bits_count(make: KernelMaker, shape: BlockShape, blocks: tuple[int, ...]):
    check_far_blocks(make, shape, blocks)


BLOCKS_OF_MIB = {
    "one long run": BlockShape((), 3 * MIB),
    "long runs": BlockShape(((2, MIB + 4096),), MIB),
    "long runs of bytes": BlockShape(((2, 50_001),), 49_999),
    "three loops": BlockShape(((3, 1_500_000), (4, 300_000), (200, 1024)), 512),
    "runs as short as are written past the caches": BlockShape(((300, 4096),), 2048),
    "runs one byte shorter": BlockShape(((300, 4096),), 2047),
    "runs of some lines and a rest": BlockShape(((300, 4096),), 2048 + 65),
}


@pytest.mark.parametrize("shape", BLOCKS_OF_MIB.values(), ids=BLOCKS_OF_MIB)
@pytest.mark.parametrize("misplaced", [0, 1, 8])
def test_large_blocks(make: KernelMaker, shape: BlockShape, misplaced: int):
    pool = np.random.default_rng(0).integers(0, 256, 16 * MIB, np.uint8)
    regions = [Region(pool.ctypes.data, len(pool))]
    offsets = [pool.size // 2 + misplaced, 4096 - pool.ctypes.data % 4096 + misplaced]
    steps = np.zeros(1, np.int64)
    for count, stride in shape.loops:
        steps = np.add.outer(steps, np.arange(count) * stride).ravel()
    expected = np.concatenate([pool[offset + step :][: shape.length] for offset in offsets for step in steps])
    with allocate(2 * shape.num_bytes, Device()) as memory:
        packed = over(memory.address, memory.num_bytes)
        starts = np.array(offsets, np.int64) + pool.ctypes.data
        make(regions).gather(starts, shape, memory.address)
        assert np.array_equal(packed, expected)  # in a tenth of the time in which NumPy says where they differ
        before = pool.copy()
        for offset in offsets:
            for step in steps:
                pool[offset + step :][: shape.length] = 0
        make(regions).scatter(memory.address, starts, shape)
        assert np.array_equal(pool, before)
        del packed


def over(address: int, num_bytes: int) -> np.ndarray:
    """The bytes there, without a copy."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))


# --- addresses


class Pool:
    """4 MiB with their kernels, and staging memory for all of it."""

    def __init__(self, make: KernelMaker) -> None:
        self.tensor = np.random.default_rng(1).integers(0, 256, 4 * MIB, np.uint8)
        self.start = self.tensor.ctypes.data
        self.kernels = make([Region(self.start, self.tensor.size)])
        self.memory = allocate(4 * MIB, Device())

    def starts(self, *offsets: int) -> np.ndarray:
        return np.array(offsets, np.int64) + self.start


@pytest.fixture
def pool(make: KernelMaker) -> Iterator[Pool]:
    pool = Pool(make)
    yield pool
    pool.memory.close()


@pytest.mark.parametrize("offset", [-1, -(1 << 40), 4 * MIB - 1024 - 15 * 2048 + 1, 4 * MIB, 1 << 40])
def test_blocks_outside_the_pool_are_refused_before_anything_is_copied(pool: Pool, offset: int):
    before = pool.tensor.copy()
    packed = over(pool.memory.address, pool.memory.num_bytes)
    starts = pool.starts(0, offset, 65536)
    with pytest.raises(RegistrationError, match=rf"at {pool.start + offset:#x} lies outside the pool") as caught:
        pool.kernels.gather(starts, HEADS, pool.memory.address)
    assert f"{pool.start:#x} to {pool.start + 4 * MIB:#x}" in str(caught.value)
    packed[:] = 7
    with pytest.raises(RegistrationError, match="outside the pool"):
        pool.kernels.scatter(pool.memory.address, starts, HEADS)
    np.testing.assert_array_equal(pool.tensor, before)
    assert (packed == 7).all()


def test_the_last_block_that_fits_is_none_outside(pool: Pool):
    last = 4 * MIB - 1024 - 15 * 2048
    pool.kernels.gather(pool.starts(last), HEADS, pool.memory.address)
    np.testing.assert_array_equal(over(pool.memory.address, 16384)[-1024:], pool.tensor[-1024:])
    over(pool.memory.address, 16384)[:] = 3
    pool.kernels.scatter(pool.memory.address, pool.starts(last), HEADS)
    assert (pool.tensor[-1024:] == 3).all()


def test_a_pool_without_memory_has_no_blocks(make: KernelMaker):
    kernels = make([Region(4096, 0)])
    kernels.gather(np.empty(0, np.int64), HEADS, 4096)
    kernels.scatter(4096, np.empty(0, np.int64), HEADS)
    with pytest.raises(RegistrationError, match="outside the pool"):
        kernels.gather(np.array([4096], np.int64), HEADS, 8192)


@pytest.mark.parametrize(
    "shape",
    [BlockShape((), 0), BlockShape(((0, 16),), 16), BlockShape(((2, -16),), 16), BlockShape(((-1, 16),), 16)],
)
def test_what_is_no_block_is_refused(pool: Pool, shape: BlockShape):
    with pytest.raises(LayoutError, match="is no block"):
        pool.kernels.gather(pool.starts(1024), shape, pool.memory.address)
    with pytest.raises(LayoutError, match="is no block"):
        pool.kernels.scatter(pool.memory.address, pool.starts(1024), shape)


def test_starts_may_be_a_view_that_cannot_be_written_to(pool: Pool, recwarn: pytest.WarningsRecorder):
    starts = pool.starts(0, 1, 65536, 1)[::2]
    starts.setflags(write=False)
    pool.kernels.gather(starts, HEADS, pool.memory.address)
    packed = over(pool.memory.address, 2 * 16384).reshape(2, 16, 1024)
    np.testing.assert_array_equal(packed[1], pool.tensor[65536:][: 16 * 2048].reshape(16, 2048)[:, :1024])
    pool.kernels.scatter(pool.memory.address, starts, HEADS)
    assert [str(each.message) for each in recwarn] == []


# --- how they copy


def test_staging_memory_between_two_tensors_is_copied_from_as_it_is(make: KernelMaker):
    memory = np.random.default_rng(2).integers(0, 256, 12 * MIB, np.uint8)
    low, staging, high = memory[: 4 * MIB], memory[4 * MIB : 8 * MIB], memory[8 * MIB :]
    kernels = make([Region(low.ctypes.data, low.size), Region(high.ctypes.data, high.size)])
    starts = np.concatenate([half.ctypes.data + np.arange(128) * 32768 for half in (high, low)]).astype(np.int64)
    packed = staging.copy()
    kernels.scatter(staging.ctypes.data, starts, HEADS)
    there = np.concatenate([half.reshape(-1, 2048)[:, :1024].ravel() for half in (high, low)])
    np.testing.assert_array_equal(there, packed)
    staging[:] = 0
    kernels.gather(starts, HEADS, staging.ctypes.data)
    np.testing.assert_array_equal(staging, packed)


def test_blocks_on_both_sides_of_staging_memory_come_in_any_order(make: KernelMaker):
    arena = np.random.default_rng(4).integers(0, 256, 16 * 32768, np.uint8)
    low, staging, high = np.split(arena, [4 * 32768, 12 * 32768])
    kernels = make([Region(half.ctypes.data, half.size) for half in (high, low)])
    addresses = np.array([half.ctypes.data + block * 32768 for half in (low, high) for block in range(4)])
    order = np.random.default_rng(5).permutation(8)
    expected = np.concatenate([low, high]).reshape(8, 16, 2048)
    expected[order, :, :1024] = staging[: 8 * 16384].reshape(8, 16, 1024)
    kernels.scatter(staging.ctypes.data, addresses[order], HEADS)
    np.testing.assert_array_equal(np.concatenate([low, high]), expected.ravel())


def peak_of(call: Callable[[], None]) -> int:
    """The most bytes that Python and NumPy took in a call, a first one apart.

    Of several calls the one that took least: threads of other tests in this process take memory, too, now and then.
    """
    call()
    tracemalloc.start()
    try:
        peaks = []
        for _ in range(5):
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            call()
            peaks.append(tracemalloc.get_traced_memory()[1] - before)
    finally:
        tracemalloc.stop()
    return min(peaks)


SHAPES = {
    "slices": HEADS,
    "slices of one token": BlockShape((), 1024),
    "blocks without gaps": BlockShape((), 16384),
    "two loops": BlockShape(((2, 16384), (8, 2048)), 512),
    "three bytes": BlockShape(((16, 2048),), 3),
    "long runs": BlockShape((), MIB // 2),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("way", ["gather", "scatter"])
def test_nothing_of_the_size_of_the_data_is_allocated(pool: Pool, shape: BlockShape, way: str):
    extent = shape.length + sum((count - 1) * stride for count, stride in shape.loops)
    starts = pool.starts(*range(0, 4 * MIB - extent + 1, extent + 8 - extent % 8))
    copied = len(starts) * shape.num_bytes
    most = max(copied / 64, 64 * len(starts))
    assert peak_of(lambda: run(pool.kernels, way, starts, shape, pool.memory.address)) < most


def run(kernels: Kernels, way: str, starts: np.ndarray, shape: BlockShape, address: int) -> None:
    if way == "gather":
        kernels.gather(starts, shape, address)
    else:
        kernels.scatter(address, starts, shape)


@pytest.mark.parametrize("way", ["gather", "scatter"])
def test_other_threads_run_while_bytes_are_copied(way: str):
    tensor, memory = np.ones(64 * MIB, np.uint8), allocate(32 * MIB, Device())
    packed = array_at(memory.address, (32 * MIB,), "|u1")
    packed[:] = 1
    kernels = kernels_for([Region(tensor.ctypes.data, tensor.size)], Device())
    shape = BlockShape(((8, 256 << 10),), 128 << 10)  # every second 128 KiB
    starts = np.arange(32, dtype=np.int64) * (2 * MIB) + tensor.ctypes.data
    written = packed if way == "gather" else tensor[: -(128 << 10)]
    try:
        # Where the other thread gets a processor too late it sees nothing, and the next may.
        assert any(
            is_seen_half_done(written, lambda: run(kernels, way, starts, shape, memory.address)) for _ in range(2000)
        )
    finally:
        memory.close()


def test_a_copy_that_keeps_the_interpreter_is_never_seen_half_done():
    """Else the test above would see nothing."""
    source, written = np.ones(32 * MIB, np.uint8), np.ones(32 * MIB, np.uint8)
    copy = ctypes.PyDLL(None).memmove
    copy.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t
    pointers = written.ctypes.data, source.ctypes.data, source.size
    assert not any(is_seen_half_done(written, lambda: copy(*pointers)) for _ in range(20))


def is_seen_half_done(written: np.ndarray, copy: Callable[[], object]) -> bool:
    """Whether another thread runs after a copy has written its first byte, and before it writes its last.

    No thread is asked to make room, however long it holds the interpreter: another one runs if the copy lets it.
    """
    start, seen = threading.Lock(), []
    written[0] = written[-1] = 0
    start.acquire()

    def look() -> None:
        with start:
            seen.append((written[0], written[-1]))

    thread = threading.Thread(target=look)
    thread.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        start.release()
        copy()
    finally:
        sys.setswitchinterval(interval)
    thread.join()
    return seen == [(1, 0)]


WITHOUT_TORCH = """
import sys
import numpy as np
from kvferry.layout import Device, Region
from kvferry.plan.packing import BlockShape
from kvferry.staging import allocate, kernels_for

tensor = np.ones(1 << 16, np.uint8)
kernels = kernels_for([Region(tensor.ctypes.data, tensor.size)], Device())
with allocate(1 << 16, Device()) as memory:
    kernels.gather(np.array([tensor.ctypes.data]), BlockShape(((4, 8192),), 4096), memory.address)
print("torch" in sys.modules)
"""


def test_torch_is_not_imported_for_a_pool_in_cpu_memory():
    """It takes a second and 200 MB, and its threads are the engine's."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_threads_gather_at_the_same_time_each_into_memory_of_its_own(pool: Pool):
    random = np.random.default_rng(3)
    wrong: list[int] = []

    def work(number: int) -> None:
        offsets = random.permutation(128)[:16] * 32768
        with allocate(16 * 16384, Device()) as memory:
            for shape in (HEADS, BlockShape(((16, 2048),), 512 + number)):
                for _ in range(20):
                    pool.kernels.gather(pool.starts(*offsets), shape, memory.address)
                rows = pool.tensor.reshape(128, 16, 2048)[offsets // 32768, :, : shape.length]
                if not np.array_equal(over(memory.address, rows.size), rows.ravel()):
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# --- where nothing is compiled


NEEDS_A_COMPILER = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


@NEEDS_A_COMPILER
def test_what_is_installed_here_is_compiled():
    assert fastest()[1] == ""


def test_without_compiled_code_the_interpreter_copies_and_says_why(tmp_path: Path):
    copy, problem = fastest(tmp_path / "blocks.so")
    assert copy is interpreted
    assert str(tmp_path / "blocks.so") in problem


def test_kernels_without_compiled_code_say_so_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr("kvferry.staging.choice.fastest", lambda watch: (interpreted, "no blocks.so"))
    kernels_for([Region(4096, 4096)], Device())
    assert "blocks are copied by the interpreter, which is slow" in caplog.text
    assert "no blocks.so" in caplog.text


@NEEDS_A_COMPILER
def test_code_that_was_compiled_from_another_source_is_refused(tmp_path: Path):
    (tmp_path / "src/kvferry/staging").mkdir(parents=True)
    source = tmp_path / "src/kvferry/staging/blocks.c"
    shutil.copy(COMPILED.with_suffix(".c"), source)
    shutil.copy(ROOT / "hatch_build.py", tmp_path)
    subprocess.run([sys.executable, tmp_path / "hatch_build.py", "-Werror"], check=True)
    compiled(source.with_suffix(".so"))
    source.write_text(source.read_text() + "\n")
    with pytest.raises(OSError, match=r"blocks\.so was compiled from another source: install kvferry anew"):
        compiled(source.with_suffix(".so"))


@NEEDS_A_COMPILER
def test_another_library_is_refused(tmp_path: Path):
    (tmp_path / "blocks.c").write_text("int other;\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "blocks.so", "blocks.c"], cwd=tmp_path, check=True)
    copy, problem = fastest(tmp_path / "blocks.so")
    assert copy is interpreted
    assert "kvferry_source_crc32" in problem


# --- beside other threads


@pytest.mark.parametrize("direction", ["gather", "scatter"])
@pytest.mark.parametrize("runs", [1, 16])
def test_other_threads_run_all_through_a_copy_of_a_few_large_blocks(runs: int, direction: str):
    """An engine's scheduler lives in the same process.

    While another thread copies, this one looks how far that has come. Whatever is copied with the lock held, it sees
    before or after, never in between.
    """
    tensor = np.zeros((64, 2 * MIB), np.uint8)
    kernels = HostKernels([Region(tensor.ctypes.data, tensor.size)], fastest()[0])
    starts = tensor.ctypes.data + np.arange(64, dtype=np.int64) * 2 * MIB
    length, stride = MIB // 2 // runs, 2 * MIB // runs
    shape = BlockShape(((runs, stride),) if runs > 1 else (), length)
    seen: set[int] = set()
    is_over = threading.Event()
    with allocate(64 * shape.num_bytes, Device()) as memory:
        first_bytes = [tensor[:, ::stride], over(memory.address, memory.num_bytes)[::length].reshape(64, runs)]
        source, target = first_bytes if direction == "gather" else reversed(first_bytes)

        def copy() -> None:
            while not is_over.is_set():
                source[...] = target[:1, :1] + np.uint8(1)
                if direction == "gather":
                    kernels.gather(starts, shape, memory.address)
                else:
                    kernels.scatter(memory.address, starts, shape)

        def every_eighth_was_seen() -> bool:
            seen.add(8 * np.count_nonzero(target == source[0, 0]) // target.size)
            return seen >= set(range(1, 8))

        thread = threading.Thread(target=copy)
        thread.start()
        try:
            eventually("every eighth of a copy was seen to be done", every_eighth_was_seen)
        finally:
            is_over.set()
            thread.join()
