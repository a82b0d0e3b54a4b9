"""What `kvferry doctor` is told of NIXL, from what is installed, set, and printed by UCX."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from kvferry.errors import TransportUnavailableError
from kvferry.findings import Severity
from kvferry.layout import MemoryKind
from kvferry.settings import Settings
from kvferry.transport import NixlTransport, devices
from kvferry.transport.nixl import nixl_diagnosis

DIAGNOSIS = NixlTransport.diagnosis

SAID = """
[1.2] [vm:1:0]   +--------+-------------+-----------------------------------+
[1.2] [vm:1:0]   | probe-a intra-node cfg#0                                 |
[1.2] [vm:1:0]   | remote memory write by ucp_put* from host memory to host |
[1.2] [vm:1:0]   +--------+-------------+-----------------------------------+
[1.2] [vm:1:0]   | Range  | Description |              Config               |
[1.2] [vm:1:0]   +--------+-------------+-----------------------------------+
[1.2] [vm:1:0]   |  0..92 | short       | rc_mlx5/mlx5_0:1                  |
[1.2] [vm:1:0]   | 93..inf| zero-copy   | cma/memory                        |
[1.2] [vm:1:0]   +--------+-------------+-----------------------------------+
[1.2] [vm:1:0]   | probe-a intra-node cfg#0                        |
[1.2] [vm:1:0]   | active message by ucp_am_send* from host memory |
[1.2] [vm:1:0]   |   1..16515 | zero-copy          | tcp/lo        |
"""

ON_A_GPU = """
[1.2] [vm:1:0]   | probe-a self cfg#1                                              |
[1.2] [vm:1:0]   | remote memory write by ucp_put* from host memory to cuda/dev[1] |
[1.2] [vm:1:0]   | 0..inf | software emulation | tcp/lo                            |
[1.2] [vm:1:0]   | probe-a self cfg#0                                       |
[1.2] [vm:1:0]   | remote memory write by ucp_put* from host memory to host |
[1.2] [vm:1:0]   | 0..4294967295 | short       | cuda_copy/cuda             |
[1.2] [vm:1:0]   | probe-a intra-node cfg#2                                        |
[1.2] [vm:1:0]   | remote memory write by ucp_put* from host memory to host        |
[1.2] [vm:1:0]   | 0..inf | zero-copy          | cma/memory                        |
[1.2] [vm:1:0]   | probe-a intra-node cfg#2                                        |
[1.2] [vm:1:0]   | remote memory write by ucp_put* from host memory to cuda/dev[1] |
[1.2] [vm:1:0]   | 0..inf | software emulation | tcp/lo                            |
[1.2] [vm:1:0]   | probe-a intra-node cfg#2                                             |
[1.2] [vm:1:0]   | remote memory write by ucp_put*(multi) from cuda/GPU0 to cuda/dev[1] |
[1.2] [vm:1:0]   | 0..inf | zero-copy   | cuda_ipc/cuda                                 |
"""
"""What UCX 1.21 says where writes go from a GPU's memory to that of another process on it, shortened."""

TCP = SAID.replace("rc_mlx5/mlx5_0:1 ", "tcp/lo           ").replace("cma/memory", "tcp/eth0  ")


def test_the_ways_that_writes_take_are_read_from_what_ucx_says():
    way = DIAGNOSIS.way_taken(SAID, is_local=True)
    assert way.what == "UCX takes rc_mlx5/mlx5_0:1, cma/memory"
    assert way.problems == ()
    assert DIAGNOSIS.way_taken("nothing of the kind", is_local=True).what == "UCX does not say which way"


@pytest.mark.parametrize(("kind", "config"), [(MemoryKind.VRAM, "cuda_ipc/cuda"), (MemoryKind.DRAM, "cma/memory")])
def test_what_ucx_would_do_between_other_memory_or_within_the_process_is_no_way_that_writes_take(
    kind: MemoryKind, config: str
):
    way = DIAGNOSIS.way_taken(ON_A_GPU, is_local=True, kind=kind)
    assert (way.what, way.problems) == (f"UCX takes {config}", ())


def test_writes_that_the_receivers_processor_copies_deserve_a_look():
    said = SAID.replace("zero-copy   | cma/memory", "software emulation | tcp/eth0")
    way = DIAGNOSIS.way_taken(said, is_local=True)
    assert way.what == "UCX takes rc_mlx5/mlx5_0:1, tcp/eth0"
    (problem,) = way.problems
    assert problem.severity is Severity.WARNING
    assert "emulates writes over tcp/eth0" in problem.what
    assert "cuda" in problem.remedy


def test_tcp_within_a_machine_deserves_a_look():
    way = DIAGNOSIS.way_taken(TCP, is_local=True)
    assert way.what == "UCX takes tcp/lo, tcp/eth0"
    (problem,) = way.problems
    assert (problem.about, problem.severity) == ("wire", Severity.WARNING)
    assert "UCX_TLS" in problem.remedy


def test_tcp_beside_a_better_way_is_nothing_to_look_at():
    said = SAID.replace("rc_mlx5/mlx5_0:1 ", "tcp/lo           ")
    way = DIAGNOSIS.way_taken(said, is_local=True)
    assert (way.what, way.problems) == ("UCX takes tcp/lo, cma/memory", ())


@pytest.mark.parametrize("has_rdma", [False, True])
def test_tcp_between_machines_deserves_a_look_where_there_is_better(
    has_rdma: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(devices, "_RDMA", tmp_path)
    if has_rdma:
        (tmp_path / "mlx5_0").mkdir()
    problems = DIAGNOSIS.way_taken(TCP, is_local=False).problems
    assert ["mlx5_0" in problem.what for problem in problems] == ([True] if has_rdma else [])


def test_a_device_that_is_not_there_is_named():
    *_, found = DIAGNOSIS.findings(Settings(nixl_device="mlx5_77:1"))
    assert found.severity is Severity.ERROR
    assert "'mlx5_77:1'" in found.what
    assert "lo" in found.remedy


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "NIXL uses lo, since nothing here"),
        ({"nixl_device": "all"}, "left to UCX"),
        ({"nixl_device": "lo"}, "uses lo ("),
    ],
)
def test_the_device_that_is_used_is_said(settings: dict[str, str], expected: str):
    *_, found = DIAGNOSIS.findings(Settings(**settings))
    assert (found.about, found.severity) == ("devices", Severity.GOOD)
    assert expected in found.what


def test_a_nixl_that_cannot_be_loaded_is_wrong(monkeypatch: pytest.MonkeyPatch):
    def fails() -> None:
        raise TransportUnavailableError("libcudart.so.12 is missing")

    monkeypatch.setattr(nixl_diagnosis, "load_bindings", fails)
    monkeypatch.setattr(nixl_diagnosis, "installed_version", lambda name: "1.5.1" if name == "nixl-cu12" else None)
    (finding,) = [finding for finding in DIAGNOSIS.findings(Settings()) if finding.about == "nixl"]
    assert finding.severity is Severity.ERROR
    assert "libcudart.so.12" in finding.what
    assert "nixl-cu12" in finding.remedy


@pytest.mark.parametrize(
    ("wheels", "severities", "said"),
    [
        ((), [Severity.ERROR], "pip install nixl-cu13"),
        (("nixl-cu13",), [Severity.GOOD], "nixl-cu13 1.5.1"),
        (("nixl-cu13", "nixl-cu12"), [Severity.GOOD, Severity.WARNING], "both installed"),
    ],
)
def test_the_wheels_that_are_installed_are_named(
    wheels: tuple[str, ...], severities: list[Severity], said: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(nixl_diagnosis, "load_bindings", lambda: ModuleType("nixl_cu13._bindings"))
    monkeypatch.setattr(nixl_diagnosis, "installed_version", lambda name: "1.5.1" if name in wheels else None)
    found = [finding for finding in DIAGNOSIS.findings(Settings()) if finding.about == "nixl"]
    assert [finding.severity for finding in found] == severities
    assert said in f"{found[-1].what} {found[-1].remedy}"


def test_a_wheel_for_another_cuda_than_torchs_is_to_be_looked_at(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(version=SimpleNamespace(cuda="12.8")))
    monkeypatch.setattr(nixl_diagnosis, "load_bindings", lambda: ModuleType("nixl_cu13._bindings"))
    monkeypatch.setattr(nixl_diagnosis, "installed_version", lambda name: "1.5.1" if name == "nixl-cu13" else None)
    (found,) = [finding for finding in DIAGNOSIS.findings(Settings()) if finding.about == "nixl"]
    assert found.severity is Severity.WARNING
    assert "torch is built for CUDA 12" in found.what
    assert "nixl-cu12" in found.remedy
