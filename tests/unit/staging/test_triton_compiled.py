"""The GPU's kernels compile, without a GPU, and to the instructions that make them fast."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

TARGETS = {"sm_80": 80, "sm_90": 90}


MOST_REGISTERS = {1: 72, 2: 72, 4: 48, 8: 72, 16: 48}
"""Of a thread, by alignment: 48 leave room for 10 of 16 blocks of threads on an SM, 72 for 7; a thread can have 255."""


def ptx_of(name: str, constants: dict[str, Any], capability: int) -> str:
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
    ptx: str = triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["ptx"]
    return ptx


def loads_and_stores(name: str, constants: dict[str, Any], capability: int) -> list[str]:
    """The global loads and stores of a kernel, in PTX."""
    return re.findall(r"\b(?:ld|st)\.global\S*", ptx_of(name, constants, capability))


def registers_and_spills(name: str, constants: dict[str, Any], capability: int, folder: Path) -> tuple[int, int]:
    """The registers of a thread, and the bytes that it keeps in memory for want of more: the assembler says."""
    triton = pytest.importorskip("triton", reason="Triton has no wheels for this platform")
    ptx = ptx_of(name, constants, capability)
    target = re.findall(r"^\.target (\w+)", ptx, re.MULTILINE)[0]
    (folder / "kernel.ptx").write_text(ptx)
    # Newer versions bring a second one, for newer GPUs, which takes all that the first one takes.
    assembler = max((Path(triton.__file__).parent / "backends" / "nvidia" / "bin").glob("ptxas*"))
    said = subprocess.run(
        [assembler, "-v", f"--gpu-name={target}", "kernel.ptx", "-o", "kernel.cubin"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    ).stderr
    (registers,) = re.findall(r"Used (\d+) registers", said)
    return int(registers), sum(map(int, re.findall(r"(\d+) bytes spill", said)))


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
@pytest.mark.parametrize("alignment", MOST_REGISTERS)
def test_no_kernel_runs_out_of_registers(alignment: int, capability: int, tmp_path: Path):
    pytest.importorskip("triton", reason="Triton has no wheels for this platform")
    from kvferry.staging.cuda import constants, constants_of_runs

    kernels = [("copy_selected", constants_of_runs(alignment))]
    kernels += [("copy_runs", constants(alignment, loops, gather=way)) for loops in (0, 1, 4) for way in (True, False)]
    found = {
        (name, given.get("LOOPS"), given.get("GATHER")): registers_and_spills(name, given, capability, tmp_path)
        for name, given in kernels
    }
    assert {which: spilled for which, (_, spilled) in found.items() if spilled} == {}
    assert {which: used for which, (used, _) in found.items() if used > MOST_REGISTERS[alignment]} == {}


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
