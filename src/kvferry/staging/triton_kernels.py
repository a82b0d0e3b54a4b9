"""The kernels that copy on a GPU, in Triton's language.

One launch copies every run of every block between a pool and staging memory, or selected runs from pages straight into
pages. A program copies a tile: some runs by some words of each. Triton cannot follow postponed annotations of types
here in every version, so this file does without.
"""

import triton
import triton.language as tl

from kvferry.staging.accelerator import MOST_LOOPS

ROWS = 32
"""Runs of a tile, whose words are 8 bytes."""

ROWS_OF_SMALL_WORDS = 8
"""The same below an alignment of 8: as many bytes are more words, whose addresses would fill a thread's registers."""

COLUMN_BYTES = 256
"""Bytes of every run in a tile. Two runs a warp and instruction, in 16-byte words."""

_NOT_SPECIALIZED = ["starts", "packed", "num_runs", "run_bytes", "run_vectors", "tiles_per_run"] + [
    f"{what}_{number}" for what in ("count", "stride") for number in range(MOST_LOOPS)
]


# Specialized numbers would compile another kernel for every one that is 1 or a multiple of 16, while chunks wait.
@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def copy_runs(
    starts,
    packed: tl.int64,
    num_runs: tl.int32,
    run_bytes: tl.int64,
    run_vectors: tl.int64,
    tiles_per_run: tl.int32,
    count_0: tl.int32,
    count_1: tl.int32,
    count_2: tl.int32,
    count_3: tl.int32,
    stride_0: tl.int64,
    stride_1: tl.int64,
    stride_2: tl.int64,
    stride_3: tl.int64,
    LOOPS: tl.constexpr,  # noqa: N803 (as Triton's constants are written)
    WORD: tl.constexpr,  # noqa: N803
    WORDS_PER_VECTOR: tl.constexpr,  # noqa: N803
    ALIGNMENT: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
    GATHER: tl.constexpr,  # noqa: N803
):
    """Copies runs between a pool and staging memory.

    Args:
        starts: byte address of every block's first run: int64 array of shape [blocks].
        packed: byte address of staging memory.
        num_runs: of all blocks together.
        run_bytes: bytes of a run.
        run_vectors: the same in vectors.
        tiles_per_run: programs that share a run.
        count_0: times of the first loop of a block, the fastest.
        stride_0: its bytes a time.
        count_1: times of the next loop, and so on.
        stride_1: its bytes a time.
        count_2: likewise.
        stride_2: likewise.
        count_3: likewise.
        stride_3: likewise.
        LOOPS: how many of them there are.
        WORD: the integer type to copy as.
        WORDS_PER_VECTOR: words that lie together in every run, so that one instruction may copy them.
        ALIGNMENT: bytes that divide all addresses and the length.
        ROWS: runs of a tile.
        COLUMNS: words of a tile.
        GATHER: whether to copy from the pool to staging memory; otherwise back.
    """
    tile = tl.program_id(0)
    runs = tile // tiles_per_run * ROWS + tl.arange(0, ROWS)
    words = (tile % tiles_per_run).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    exists = runs < num_runs
    staged = packed.to(tl.int64) + runs * run_bytes.to(tl.int64)
    blocks = runs
    offsets = runs.to(tl.int64) * 0
    if LOOPS > 0:
        offsets += (blocks % count_0) * stride_0.to(tl.int64)
        blocks = blocks // count_0
    if LOOPS > 1:
        offsets += (blocks % count_1) * stride_1.to(tl.int64)
        blocks = blocks // count_1
    if LOOPS > 2:
        offsets += (blocks % count_2) * stride_2.to(tl.int64)
        blocks = blocks // count_2
    if LOOPS > 3:
        offsets += (blocks % count_3) * stride_3.to(tl.int64)
        blocks = blocks // count_3
    pooled = tl.load(starts + blocks, mask=exists, other=0) + offsets
    # The hints let the compiler copy whole vectors; it cannot know what addresses from memory are multiples of.
    pooled_at = tl.multiple_of(pooled.to(tl.pointer_type(WORD)), ALIGNMENT)[:, None] + words[None, :]
    staged_at = tl.multiple_of(staged.to(tl.pointer_type(WORD)), ALIGNMENT)[:, None] + words[None, :]
    mask = exists[:, None] & (words < run_vectors * WORDS_PER_VECTOR)[None, :]
    if GATHER:
        tl.store(staged_at, tl.load(pooled_at, mask=mask), mask=mask)
    else:
        tl.store(pooled_at, tl.load(staged_at, mask=mask), mask=mask)


@triton.jit
def address_of(rows, num_rows, steps, number):
    """Finds where runs begin, by the number of each.

    Args:
        rows: the number of each row's first run, where each row begins, the bytes from a run to the next: int64 array
            of shape [3, rows].
        num_rows: how many there are.
        steps: how often that many can be halved.
        number: of each run.
    """
    low = number * 0
    high = low + num_rows
    for _ in range(steps):
        middle = (low + high) // 2
        is_behind = tl.load(rows + middle) <= number
        low = tl.where(is_behind, middle, low)
        high = tl.where(is_behind, high, middle)
    within = number - tl.load(rows + low)
    return tl.load(rows + num_rows + low) + within * tl.load(rows + num_rows * 2 + low)


_NOT_SPECIALIZED_NUMBERS = ["num_runs", "run_vectors", "tiles_per_run"] + [
    f"{side}_{what}" for side in ("source", "destination") for what in ("rows", "numbers", "count", "steps")
]


@triton.jit(do_not_specialize=_NOT_SPECIALIZED_NUMBERS)
def copy_selected(
    source_rows,
    source_count: tl.int32,
    source_steps: tl.int32,
    source_numbers,
    destination_rows,
    destination_count: tl.int32,
    destination_steps: tl.int32,
    destination_numbers,
    num_runs: tl.int32,
    run_vectors: tl.int64,
    tiles_per_run: tl.int32,
    WORD: tl.constexpr,  # noqa: N803
    WORDS_PER_VECTOR: tl.constexpr,  # noqa: N803
    ALIGNMENT: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
):
    """Copies runs that are selected by number: from pages straight into pages, wherever these are mapped.

    Args:
        source_rows: as in `address_of`.
        source_count: how many there are.
        source_steps: how often that many can be halved.
        source_numbers: of the runs that are read: int32 array of shape [runs].
        destination_rows: as in `address_of`.
        destination_count: how many there are.
        destination_steps: how often that many can be halved.
        destination_numbers: of the runs that are written, likewise.
        num_runs: how many there are.
        run_vectors: the length of each, in vectors.
        tiles_per_run: programs that share a run.
        WORD: the integer type to copy as.
        WORDS_PER_VECTOR: words that lie together in every run, so that one instruction may copy them.
        ALIGNMENT: bytes that divide all addresses and the length.
        ROWS: runs of a tile.
        COLUMNS: words of a tile.
    """
    tile = tl.program_id(0)
    runs = tile // tiles_per_run * ROWS + tl.arange(0, ROWS)
    words = (tile % tiles_per_run).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    exists = runs < num_runs
    read = tl.load(source_numbers + runs, mask=exists, other=0).to(tl.int64)
    written = tl.load(destination_numbers + runs, mask=exists, other=0).to(tl.int64)
    source = address_of(source_rows, source_count, source_steps, read).to(tl.pointer_type(WORD))
    destination = address_of(destination_rows, destination_count, destination_steps, written).to(tl.pointer_type(WORD))
    source_at = tl.multiple_of(source, ALIGNMENT)[:, None] + words[None, :]
    destination_at = tl.multiple_of(destination, ALIGNMENT)[:, None] + words[None, :]
    mask = exists[:, None] & (words < run_vectors * WORDS_PER_VECTOR)[None, :]
    tl.store(destination_at, tl.load(source_at, mask=mask), mask=mask)
