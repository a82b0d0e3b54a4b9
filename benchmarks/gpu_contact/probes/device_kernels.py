"""Kernels of the probes' own, in Triton's language, for which its interpreter does on a CPU.

Triton cannot follow postponed annotations of types here in every version, so this file does without.
"""

import triton
import triton.language as tl

ROWS = 32
"""Runs of a tile."""

COLUMNS = 32
"""Words of 8 bytes of every run in a tile."""

VECTOR_BYTES = 16


@triton.jit
def nothing(value):
    """Reads a number that is not used: what a launch costs."""
    tl.load(value)


@triton.jit(do_not_specialize=["num_runs", "run_vectors", "tiles_per_run"])
def copy_runs_to_runs(
    sources,
    targets,
    num_runs: tl.int32,
    run_vectors: tl.int64,
    tiles_per_run: tl.int32,
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
):
    """Copies runs from addresses to addresses: from pages straight into pages, wherever these are mapped.

    Args:
        sources: address of each run, a multiple of 16: int64 array.
        targets: address of where it goes, likewise.
        num_runs: how many there are.
        run_vectors: the length of each in vectors of 16 bytes, so that the compiler knows that none is cut.
        tiles_per_run: programs that share a run.
        ROWS: runs of a tile.
        COLUMNS: words of a tile.
    """
    tile = tl.program_id(0)
    runs = tile // tiles_per_run * ROWS + tl.arange(0, ROWS)
    words = (tile % tiles_per_run).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    exists = runs < num_runs
    source = tl.load(sources + runs, mask=exists, other=0).to(tl.pointer_type(tl.int64))
    target = tl.load(targets + runs, mask=exists, other=0).to(tl.pointer_type(tl.int64))
    source_at = tl.multiple_of(source, 16)[:, None] + words[None, :]
    target_at = tl.multiple_of(target, 16)[:, None] + words[None, :]
    mask = exists[:, None] & (words < run_vectors * 2)[None, :]
    tl.store(target_at, tl.load(source_at, mask=mask), mask=mask)


def copy_runs(sources, targets, run_bytes: int) -> None:
    """Launches the copy of as many runs as there are addresses, on the current stream.

    Args:
        sources: a torch tensor of addresses.
        targets: another.
        run_bytes: of every run, a multiple of 16.
    """
    vectors = run_bytes // VECTOR_BYTES
    tiles = -(-vectors // (COLUMNS // 2))
    programs = -(-len(sources) // ROWS) * tiles
    copy_runs_to_runs[(programs,)](sources, targets, len(sources), vectors, tiles, ROWS=ROWS, COLUMNS=COLUMNS)
