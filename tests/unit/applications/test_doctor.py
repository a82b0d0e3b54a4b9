"""`kvferry doctor`: what it makes of what it sees."""

from __future__ import annotations

import itertools
import json
import re
import resource
import socket
import subprocess
from pathlib import Path

import httpx
import msgspec
import pytest
from msgspec import structs
from rich.console import Console
from tests.support.kubernetes import KubernetesApi
from tests.support.statuses import WELL

from kvferry import __version__
from kvferry.applications.doctor import configuration, machine, others, probe
from kvferry.applications.doctor import run as doctor
from kvferry.applications.doctor.probe import Measured, Ready, wire
from kvferry.applications.top import asking
from kvferry.applications.top.asking import Sample
from kvferry.control.registry_server import RegistryServer
from kvferry.errors import IncompatiblePeerError
from kvferry.findings import Severity, warning
from kvferry.layout import Device, MemoryKind
from kvferry.observe.status import Side
from kvferry.settings import Settings
from kvferry.transport import Diagnosis, InProcessNetwork, InProcessTransport, WayTaken, devices


class Toys(Diagnosis):
    """Of a transport of which there is something to say."""

    variables = ("TOY_",)
    read_by = "toys"


def test_settings_say_where_they_come_from_and_secrets_stay_secret():
    environment = {"KVFERRY_HOST": "127.0.0.1", "KVFERRY_SECRET": "0123456789abcdef", "TOY_SPEED": "9", "HOME": "/"}
    environment["KVFERRY_REGISTRY_URL"] = "etcd://user:pass/w@rd@host:2379"
    found = list(configuration.variables(environment, Toys()))
    assert {finding.severity for finding in found} == {Severity.GOOD}
    said = " ".join(finding.what for finding in found)
    assert "KVFERRY_HOST = '127.0.0.1', from the environment" in said
    assert "TOY_SPEED = '9', which toys read" in said
    assert "0123456789abcdef" not in said
    assert "KVFERRY_REGISTRY_URL = 'etcd://(a secret)@host:2379'" in said
    assert "HOME" not in said


def test_copies_by_the_interpreter_are_said_to_be_slow():
    assert machine.copies("", needs_them=True).severity is Severity.GOOD
    assert machine.copies("blocks.so: cannot open", needs_them=False).severity is Severity.GOOD
    finding = machine.copies("blocks.so: cannot open", needs_them=True)
    assert finding.severity is Severity.WARNING
    assert "several times slower: blocks.so: cannot open" in finding.what
    assert "C compiler" in finding.remedy


def test_a_misspelled_setting_is_named_with_the_right_one():
    (finding,) = configuration.variables({"KVFERRY_REGISTRY_URI": "x"}, Diagnosis())
    assert finding.severity is Severity.WARNING
    assert finding.remedy == "did you mean KVFERRY_REGISTRY_URL?"


@pytest.mark.parametrize("address", ["10.0.0.5", None])
def test_loopback_is_said_and_what_other_machines_need(monkeypatch: pytest.MonkeyPatch, address: str | None):
    monkeypatch.setattr(configuration, "default_address", lambda: address)
    said = next(iter(configuration.addresses(Settings()))).what
    assert "only this machine can reach it" in said
    assert f"KVFERRY_HOST={address or 'an address of this machine'} is enough" in said
    assert "KVFERRY_SECRET_FILE" in said
    assert "KVFERRY_ALLOW_UNAUTHENTICATED=1" in said


def test_a_secret_is_said():
    found = [
        each for each in configuration.addresses(Settings(host="192.0.2.7", secret="s" * 20)) if each.about == "secret"
    ]
    assert [each.severity for each in found] == [Severity.GOOD]


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


def test_rdma_without_locked_memory_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(devices, "_RDMA", tmp_path)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 << 20, 8 << 20))
    finding = next(iter(machine.limits(Settings())))
    assert finding.severity is Severity.ERROR
    assert "ulimit -l unlimited" in finding.remedy


class Chatty(Diagnosis):
    """Of a transport whose library prints which way bytes take, if it is asked to."""

    variables = ("CHATTY_",)
    says_more = {"CHATTY_LEVEL": "7"}  # noqa: RUF012
    remedy = "look at CHATTY_LEVEL"

    def way_taken(self, said: str, *, is_local: bool, kind: MemoryKind = MemoryKind.DRAM) -> WayTaken:
        way = re.search("way: (.*)", said)
        assert way is not None
        return WayTaken(f"it takes {way[1]} to {kind.value}", (warning("wire", f"local: {is_local}", "walk"),))


@pytest.mark.parametrize(
    ("address", "kind", "asked", "where"),
    [
        (None, MemoryKind.DRAM, [], "two processes here"),
        ("10.0.0.6:9490", MemoryKind.DRAM, ["10.0.0.6:9490"], "here and 10.0.0.6:9490"),
        (None, MemoryKind.VRAM, ["cuda"], "two processes here, in a GPU's memory"),
    ],
)
def test_the_wire_is_told_in_the_words_of_the_transport(
    address: str | None, kind: MemoryKind, asked: list[str], where: str, monkeypatch: pytest.MonkeyPatch
):
    def prints(command: list[str], *, env: dict[str, str], **_: object) -> subprocess.CompletedProcess[str]:
        assert env == {"HOME": "/", "CHATTY_LEVEL": "7"}
        assert command[3:] == asked
        measured = msgspec.json.encode(Measured(2e9, 1e-5, __version__)).decode()
        return subprocess.CompletedProcess(command, 0, f"\n{measured}\n", "way: a tunnel\n")

    monkeypatch.setattr(subprocess, "run", prints)
    found = list(wire({"HOME": "/"}, Chatty(), address, kind))
    assert [(each.about, each.severity) for each in found] == [("wire", Severity.GOOD), ("wire", Severity.WARNING)]
    assert found[0].what == f"between {where}: 2.0 GB/s in bulk, 10 us for 4 KiB; it takes a tunnel to {kind.value}"
    assert (found[1].what, found[1].remedy) == (f"local: {address is None}", "walk")


def test_a_wire_that_cannot_be_says_what_the_transport_would_look_at(monkeypatch: pytest.MonkeyPatch):
    fails = subprocess.CompletedProcess([], 1, "", "Traceback\nOSError: no road")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: fails)
    (finding,) = wire({}, Chatty(), "10.0.0.6:9490")
    assert (finding.severity, finding.remedy) == (Severity.ERROR, "look at CHATTY_LEVEL")
    assert finding.what == "nothing could be exchanged between here and 10.0.0.6:9490: OSError: no road"


def test_of_a_transport_that_says_nothing_the_speed_is_said(monkeypatch: pytest.MonkeyPatch):
    measured = msgspec.json.encode(Measured(2e9, 1e-5, __version__)).decode()
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, measured, ""))
    (finding,) = wire({}, Diagnosis())
    assert finding.what == "between two processes here: 2.0 GB/s in bulk, 10 us for 4 KiB"


def test_two_doctors_with_different_transports_learn_both(monkeypatch: pytest.MonkeyPatch):
    here = InProcessTransport(InProcessNetwork())
    monkeypatch.setattr(probe, "create_transport", lambda *_: here)
    with pytest.raises(IncompatiblePeerError, match="transport: inprocess here, pigeons there: set KVFERRY_TRANSPORT"):
        probe.measure(Ready(__version__, b"", 0, 1, "pigeons"), lambda _: True, Device())


def test_a_transport_that_is_not_known_is_a_finding(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("KVFERRY_TRANSPORT", "pigeons")
    assert doctor.run((), peer=None, moves_bytes=True, wants_json=True, console=Console()) is Severity.ERROR
    said = json.loads(capsys.readouterr().out)["findings"][-1]
    assert said["about"] == "settings"
    assert "transport (KVFERRY_TRANSPORT) is 'pigeons': known are" in said["what"]


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
    assert {"severity", "about", "what", "remedy", "lines"} == set(said["findings"][0])
    assert worst == max(Severity[each["severity"].upper()] for each in said["findings"])


def test_an_impossible_setting_is_a_finding(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KVFERRY_WORKERS", "many")
    worst = doctor.run((), peer=None, moves_bytes=False, wants_json=True, console=Console())
    assert worst is Severity.ERROR
    assert "KVFERRY_WORKERS" in json.loads(capsys.readouterr().out)["findings"][-1]["what"]


def test_what_cannot_be_looked_at_hides_nothing_else(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def fails() -> None:
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


@pytest.mark.parametrize(
    ("times", "severity", "expected"),
    [
        ([0.001] * 10, Severity.GOOD, "h:1 answers within 1.0 ms"),
        ([0.06] * 10, Severity.WARNING, "answers within 60.0 ms: that is far"),
        ([0.001] * 9 + [0.205], Severity.WARNING, "but once took 205 ms: packets get lost"),
    ],
)
def test_a_network_that_is_far_or_loses_is_said(times: list[float], severity: Severity, expected: str):
    finding = others.judged("h:1", times)
    assert (finding.severity, expected in finding.what) == (severity, True), finding


def test_a_control_port_that_is_closed_is_said():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        assert others.control_finding(address).severity is Severity.GOOD
    finding = others.control_finding(address)
    assert finding.severity is Severity.ERROR
    assert f"{address}, which cannot be connected to from here" in finding.what
    assert "KVFERRY_CONTROL_PORT" in finding.remedy


@pytest.mark.parametrize(
    ("error", "what", "remedy"),
    [
        (httpx.ConnectTimeout("timed out"), "get lost on the way", "firewall"),
        (httpx.ReadTimeout("timed out"), "says nothing within", "stopped or overloaded"),
        (httpx.ConnectError("[Errno 111] Connection refused"), "nobody listens", "KVFERRY_OBSERVE_PORT"),
        (httpx.ConnectError("[Errno 113] No route to host"), "No route to host", "ip route get"),
    ],
)
def test_whoever_does_not_answer_does_so_in_one_of_several_ways(error: httpx.HTTPError, what: str, remedy: str):
    said = asking.why_unanswered(error)
    assert (what in said[0], remedy in said[1]) == (True, True), said


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("node-7", "node-7:9470"),
        ("10.0.0.7:9471", "10.0.0.7:9471"),
        ("fd00::7", "[fd00::7]:9470"),
        ("[fd00::7]", "[fd00::7]:9470"),
        ("[fd00::7]:9471", "[fd00::7]:9471"),
        ("9471", "9471"),
    ],
)
def test_a_peer_may_be_given_without_its_port(peer: str, address: str):
    assert doctor.with_port(peer) == address


@pytest.mark.parametrize(("bytes_per_s", "largest"), [(1e6, 1 << 20), (4e6, 8 << 20), (1e9, 64 << 20)])
def test_a_slow_wire_is_measured_with_less(bytes_per_s: float, largest: int):
    written: list[int] = []

    def write(num_bytes: int) -> float:
        written.append(num_bytes)
        return num_bytes / bytes_per_s

    num_bytes, took_s = probe.write_bulk(write)
    assert (num_bytes, max(written)) == (largest, largest)
    assert num_bytes / took_s == pytest.approx(bytes_per_s)
    assert sum(written) / bytes_per_s < 5


@pytest.mark.parametrize("held_up", [0, 1, 2, 3])
def test_a_moment_in_which_the_machine_was_busy_does_not_make_the_wire_slow(held_up: int):
    took = itertools.count()
    num_bytes, took_s = probe.write_bulk(lambda length: 0.6 if next(took) == held_up else length / 1e9)
    assert num_bytes / took_s == pytest.approx(1e9)


def test_the_address_that_was_found_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(configuration, "with_found_address", lambda given: given.model_copy(update=_FOUND))
    monkeypatch.setattr(configuration, "interface_of", lambda _: "eth0")
    settings = Settings(host="0.0.0.0", registry_url="http://10.0.0.9:1", secret="s" * 20)
    finding = next(iter(configuration.addresses(settings)))
    assert finding.severity is Severity.GOOD
    assert finding.what.startswith("peers are told 10.0.0.7 on eth0, which packets to the registry leave from")


_FOUND = {"advertise_host": "10.0.0.7"}
