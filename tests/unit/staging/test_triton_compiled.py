"""The GPU's kernels compile, without a GPU, and to the instructions that make them fast."""

from __future__ import annotations

import re
from typing import Any

import pytest

TARGETS = {"sm_80": 80, "sm_90": 90}


def loads_and_stores(name: str, constants: dict[str, Any], capability: int) -> list[str]:
    """The global loads and stores of a kernel, in PTX."""
    triton = pytest.importorskip("triton", reason="Triton has no wheels for this platform")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kvferry.staging import triton_kernels

    kernel = getattr(triton_kernels, name)
    signature = {
        parameter.name: "constexpr"
        if parameter.is_constexpr
        else parameter.annotation_type or ("*i32" if parameter.name.endswith("numbers") else "*i64")
        for parameter in kernel.params
    }
    source = ASTSource(kernel, signature, constexprs=constants)
    ptx = triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["ptx"]
    return re.findall(r"\b(?:ld|st)\.global\S*", ptx)


def instructions(alignment: int, loops: int, gather: bool, capability: int) -> list[str]:
    pytest.importorskip("triton", reason="Triton has no wheels for this platform")
    from kvferry.staging.cuda import constants

    return loads_and_stores("copy_runs", constants(alignment, loops, gather=gather), capability)


def instructions_between(alignment: int, capability: int) -> list[str]:
    pytest.importorskip("triton", reason="Triton has no wheels for this platform")
    from kvferry.staging.cuda import constants_of_runs

    return loads_and_stores("copy_selected", constants_of_runs(alignment), capability)


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize("capability", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("loops", [0, 1, 4])
def test_aligned_runs_move_16_bytes_an_instruction(loops: int, gather: bool, capability: int):
    found = instructions(16, loops, gather, capability)
    assert {"ld.global.v2.b64", "st.global.v2.b64"} <= set(found)
    assert not {"st.global.b64", "st.global.b32", "st.global.b8"} & set(found)


@pytest.mark.parametrize("capability", TARGETS.values(), ids=TARGETS)
def test_aligned_runs_go_from_pages_to_pages_by_16_bytes_an_instruction(capability: int):
    found = set(instructions_between(16, capability))
    assert {"ld.global.v2.b64", "st.global.v2.b64"} <= found
    assert "st.global.b64" not in found


@pytest.mark.parametrize("alignment", [1, 2, 4, 8])
def test_other_runs_go_from_pages_to_pages_by_a_word_an_instruction(alignment: int):
    found = instructions_between(alignment, 90)
    assert {f"st.global.b{8 * alignment}", f"ld.global.b{8 * alignment}"} <= set(found)


def test_the_kernel_of_the_first_contact_compiles():
    triton = pytest.importorskip("triton", reason="Triton has no wheels for this platform")
    from benchmarks.gpu_contact.probes.device_kernels import nothing
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    assert triton.compile(ASTSource(nothing, {"value": "*i64"}), target=GPUTarget("cuda", 90, 32)).asm["ptx"]


@pytest.mark.parametrize("alignment", [1, 2, 4, 8])
def test_other_runs_move_a_word_an_instruction(alignment: int):
    found = instructions(alignment, 1, True, 90)
    assert f"st.global.b{8 * alignment}" in found
    assert f"ld.global.b{8 * alignment}" in found
