"""The GPU's kernels compile, without a GPU, and to the instructions that make them fast."""

from __future__ import annotations

import re

import pytest

TARGETS = {"sm_80": 80, "sm_90": 90}


def instructions(alignment: int, loops: int, gather: bool, capability: int) -> list[str]:
    """The global loads and stores of the kernel, in PTX."""
    triton = pytest.importorskip("triton", reason="Triton has no wheels for this platform")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kvferry.staging.cuda import constants
    from kvferry.staging.triton_kernels import copy_runs

    signature = {
        parameter.name: "constexpr" if parameter.is_constexpr else parameter.annotation_type or "*i64"
        for parameter in copy_runs.params
    }
    source = ASTSource(copy_runs, signature, constexprs=constants(alignment, loops, gather=gather))
    ptx = triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["ptx"]
    return re.findall(r"\b(?:ld|st)\.global\S*", ptx)


@pytest.mark.parametrize("capability", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("loops", [0, 1, 4])
def test_aligned_runs_move_16_bytes_an_instruction(loops: int, gather: bool, capability: int):
    found = instructions(16, loops, gather, capability)
    assert {"ld.global.v2.b64", "st.global.v2.b64"} <= set(found)
    assert not {"st.global.b64", "st.global.b32", "st.global.b8"} & set(found)


@pytest.mark.parametrize("capability", TARGETS.values(), ids=TARGETS)
def test_the_kernel_of_the_first_contact_moves_16_bytes_an_instruction(capability: int):
    triton = pytest.importorskip("triton", reason="Triton has no wheels for this platform")
    from benchmarks.gpu_contact.probes.device_kernels import COLUMNS, ROWS, copy_runs_to_runs, nothing
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    target = GPUTarget("cuda", capability, 32)
    signature = {"sources": "*i64", "targets": "*i64", "num_runs": "i32", "run_vectors": "i64", "tiles_per_run": "i32"}
    source = ASTSource(
        copy_runs_to_runs,
        {**signature, "ROWS": "constexpr", "COLUMNS": "constexpr"},
        constexprs={"ROWS": ROWS, "COLUMNS": COLUMNS},
    )
    found = set(re.findall(r"\b(?:ld|st)\.global\S*", triton.compile(source, target=target).asm["ptx"]))
    assert {"ld.global.v2.b64", "st.global.v2.b64"} <= found
    assert "st.global.b64" not in found
    assert triton.compile(ASTSource(nothing, {"value": "*i64"}), target=target).asm["ptx"]


@pytest.mark.parametrize("alignment", [1, 2, 4, 8])
def test_other_runs_move_a_word_an_instruction(alignment: int):
    found = instructions(alignment, 1, True, 90)
    assert f"st.global.b{8 * alignment}" in found
    assert f"ld.global.b{8 * alignment}" in found
