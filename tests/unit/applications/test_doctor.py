"""`kvferry doctor`: what it makes of what it sees."""

from __future__ import annotations

import json
import resource
import socket
from pathlib import Path

import pytest
from msgspec import structs
from rich.console import Console
from tests.support.kubernetes import KubernetesApi
from tests.support.statuses import WELL

from kvferry.applications.doctor import configuration, machine, others, wire
from kvferry.applications.doctor import run as doctor
from kvferry.applications.doctor.findings import Severity
from kvferry.applications.top.asking import Sample
from kvferry.control.registry_server import RegistryServer
from kvferry.errors import TransportUnavailableError
from kvferry.observe.status import Side
from kvferry.settings import Settings

SAID = """
[1.2] [vm:1:0]   +--------+-------------+-----------------------------------+
[1.2] [vm:1:0]   | probe-a self cfg#0                                       |
[1.2] [vm:1:0]   | remote memory write by ucp_put* from host memory to host |
[1.2] [vm:1:0]   +--------+-------------+-----------------------------------+
[1.2] [vm:1:0]   | Range  | Description |              Config               |
[1.2] [vm:1:0]   +--------+-------------+-----------------------------------+
[1.2] [vm:1:0]   |  0..92 | short       | rc_mlx5/mlx5_0:1                  |
[1.2] [vm:1:0]   | 93..inf| zero-copy   | cma/memory                        |
[1.2] [vm:1:0]   +--------+-------------+-----------------------------------+
[1.2] [vm:1:0]   | probe-a self cfg#0                              |
[1.2] [vm:1:0]   | active message by ucp_am_send* from host memory |
[1.2] [vm:1:0]   |   1..16515 | zero-copy          | tcp/lo        |
"""


def test_the_ways_that_writes_take_are_read_from_what_ucx_says():
    assert wire.picked(SAID) == ["rc_mlx5/mlx5_0:1", "cma/memory"]
    assert wire.picked("nothing of the kind") == []


def test_settings_say_where_they_come_from_and_secrets_stay_secret():
    environment = {"KVFERRY_HOST": "127.0.0.1", "KVFERRY_SECRET": "0123456789abcdef", "UCX_TLS": "tcp", "HOME": "/"}
    found = list(configuration.variables(environment))
    assert {finding.severity for finding in found} == {Severity.GOOD}
    said = " ".join(finding.what for finding in found)
    assert "KVFERRY_HOST = '127.0.0.1', from the environment" in said
    assert "UCX_TLS = 'tcp'" in said
    assert "0123456789abcdef" not in said
    assert "HOME" not in said


def test_a_misspelled_setting_is_named_with_the_right_one():
    (finding,) = configuration.variables({"KVFERRY_REGISTRY_URI": "x"})
    assert finding.severity is Severity.WARNING
    assert finding.remedy == "did you mean KVFERRY_REGISTRY_URL?"


def test_loopback_is_said():
    found = list(configuration.addresses(Settings()))
    assert "only this machine can reach it" in found[0].what


@pytest.mark.parametrize(
    ("advertised", "severity", "expected"),
    [
        ("localhost.localdomain.invalid", Severity.ERROR, "cannot be looked up"),
        ("192.0.2.77", Severity.WARNING, "no interface of this machine has"),
    ],
)
def test_an_address_that_peers_cannot_use(advertised: str, severity: Severity, expected: str):
    settings = Settings(host="0.0.0.0", advertise_host=advertised, secret="s" * 20)
    finding = next(iter(configuration.addresses(settings)))
    assert (finding.severity, expected in finding.what) == (severity, True), finding
    assert "KVFERRY_ADVERTISE_HOST" in finding.remedy


def test_an_open_door_is_named():
    settings = Settings(host="0.0.0.0", advertise_host="127.0.0.1", allow_unauthenticated=True)
    found = [finding for finding in configuration.addresses(settings) if finding.about == "secret"]
    assert [finding.severity for finding in found] == [Severity.WARNING]


def test_a_taken_port_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = list(configuration.addresses(Settings(observe_port=port)))
    (finding,) = [finding for finding in found if "KVFERRY_OBSERVE_PORT" in finding.what]
    assert finding.severity is Severity.WARNING
    assert f":{port} cannot be listened on" in finding.what


def test_a_device_that_is_not_there_is_named():
    found = list(machine.devices(Settings(nixl_device="mlx5_77:1")))
    assert found[-1].severity is Severity.ERROR
    assert "'mlx5_77:1'" in found[-1].what
    assert "lo" in found[-1].remedy


def test_rdma_without_locked_memory_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(machine, "_RDMA", tmp_path)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 << 20, 8 << 20))
    finding = next(iter(machine.limits(Settings())))
    assert finding.severity is Severity.ERROR
    assert "ulimit -l unlimited" in finding.remedy


def test_a_nixl_that_cannot_be_loaded_is_wrong(monkeypatch: pytest.MonkeyPatch):
    def fails() -> None:
        raise TransportUnavailableError("libcudart.so.12 is missing")

    monkeypatch.setattr(machine, "load_bindings", fails)
    monkeypatch.setattr(machine, "_version", lambda name: "1.5.1" if name == "nixl-cu12" else None)
    (finding,) = [finding for finding in machine.installed() if finding.about == "nixl"]
    assert finding.severity is Severity.ERROR
    assert "libcudart.so.12" in finding.what
    assert "nixl-cu12" in finding.remedy


def test_a_registry_that_was_named_must_answer():
    (finding,) = others.registry(Settings(registry_url="http://127.0.0.1:9"))
    assert finding.severity is Severity.ERROR
    assert "KVFERRY_REGISTRY_URL" in finding.remedy
    (finding,) = others.registry(Settings(registry_port=9))
    assert finding.severity is Severity.GOOD, "the first prefill rank brings its own"
    with RegistryServer(port=0) as running:
        (finding,) = others.registry(Settings(registry_url=running.url))
    assert finding.severity is Severity.GOOD
    assert "answers" in finding.what


def test_the_worst_decides_and_json_has_it_all(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KVFERRY_HEARTBEATS", "3")
    worst = doctor.run((), peer=None, moves_bytes=False, wants_json=True, console=Console())
    said = json.loads(capsys.readouterr().out)
    assert worst is Severity.WARNING
    assert said["worst"] == "warning"
    assert {"severity", "about", "what", "remedy"} == set(said["findings"][0])
    assert worst == max(Severity[each["severity"].upper()] for each in said["findings"])


def test_an_impossible_setting_is_a_finding(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KVFERRY_WORKERS", "many")
    worst = doctor.run((), peer=None, moves_bytes=False, wants_json=True, console=Console())
    assert worst is Severity.ERROR
    assert "KVFERRY_WORKERS" in json.loads(capsys.readouterr().out)["findings"][-1]["what"]


def test_what_cannot_be_looked_at_hides_nothing_else(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def fails(_: Settings) -> None:
        raise OSError("no /sys")

    monkeypatch.setattr(machine, "devices", fails)
    assert doctor.run((), peer=None, moves_bytes=False, wants_json=True, console=Console()) is Severity.ERROR
    said = json.loads(capsys.readouterr().out)["findings"]
    assert [each["what"] for each in said if each["severity"] == "error"] == [
        "could not be looked at: OSError: no /sys"
    ]
    assert said[-1]["about"] == "registry"


def test_the_kubernetes_api_is_asked_where_it_is_declared(tmp_path: Path):
    assert list(others.orchestrator(Settings())) == []
    with KubernetesApi() as api:
        (tmp_path / "token").write_text(api.token)
        given = {"kubernetes_url": api.url, "kubernetes_token_file": tmp_path / "token"}
        settings = Settings(end_proofs="process,kubernetes", **given)
        (finding,) = others.orchestrator(settings)
        assert finding.severity is Severity.GOOD
        api.token = "another"
        (finding,) = others.orchestrator(settings)
    assert finding.severity is Severity.ERROR
    assert "401" in finding.what
    assert "docs/kubernetes.md" in finding.remedy


def test_engines_whose_caches_mean_something_else_are_named_once_with_both_values(monkeypatch: pytest.MonkeyPatch):
    def sample(side: Side, rank: int, **fingerprint: str) -> Sample:
        status = structs.replace(WELL, side=side, engine=f"engine {side.value}", rank=rank, fingerprint=fingerprint)
        return Sample(f"host:{rank}", 0.0, status)

    found = [sample(Side.PREFILL, rank, rope="1", engine="a") for rank in range(2)]
    found += [sample(Side.DECODE, rank, rope="2", engine="b") for rank in range(2)]
    monkeypatch.setattr(others, "ask_once", lambda _: found)
    said = [each.what for each in others.endpoints([], are_expected=True) if "mean the same" in each.what]
    assert len(said) == 1
    assert "rope is '1' on prefill engine 'engine prefill', '2' on decode engine 'engine decode'" in said[0]
