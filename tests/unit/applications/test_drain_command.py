"""`kvferry drain`, as an operator and a preStop hook run it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import msgspec
import pytest
from rich.console import Console
from tests.support.caches import Model
from tests.support.engines import Engines, Requests
from tests.support.registries import rank
from tests.support.statuses import WELL
from tests.support.waiting import eventually
from typer.testing import CliRunner, Result

from kvferry import answers
from kvferry.applications import drain
from kvferry.applications.doctor import others
from kvferry.applications.top import asking
from kvferry.applications.top.asking import Sample
from kvferry.applications.top.view import Rates, page
from kvferry.cli.app import app
from kvferry.control.construction import credentials_of
from kvferry.control.registry_client import RegistryClient
from kvferry.control.registry_server import RegistryServer
from kvferry.findings import Severity
from kvferry.observe.status import LoadStatus
from kvferry.settings import Settings

SECRET = "a secret that only these tests have"


@pytest.fixture
def made() -> Iterator[Callable[..., Requests]]:
    """Makes a pair at a registry of its own, whose ranks renew often."""
    with ExitStack() as opened:

        def make(**settings: Any) -> Requests:
            registry = opened.enter_context(RegistryServer(port=0, lease_s=0.6))
            both = opened.enter_context(Engines(registry.url, observe_port=0, drain_grace_s=0.0, **settings))
            requests = Requests(both.prefill(Model()), both.decode(Model()))
            requests.connect()
            return requests

        yield make


def run(monkeypatch: pytest.MonkeyPatch, requests: Requests | None, *arguments: str) -> Result:
    if requests is not None:
        monkeypatch.setenv("KVFERRY_REGISTRY_URL", requests.prefill.endpoints[0].registry_url)
    return CliRunner().invoke(app, ["drain", *arguments])


def test_an_engine_is_drained_by_name(made: Callable[..., Requests], monkeypatch: pytest.MonkeyPatch):
    requests = made()
    said = run(monkeypatch, requests, requests.prefill.name)
    assert said.exit_code == 0, said.output
    assert f"engine {requests.prefill.name!r} drains: 1 ranks hear of it" in said.output
    assert "nothing is open any more" in said.output
    assert requests.prefill.endpoints[0].is_drained


def test_what_is_open_at_the_end_is_said_and_fails(made: Callable[..., Requests], monkeypatch: pytest.MonkeyPatch):
    requests = made()
    request = requests.new(1)
    requests.open_prefill(request)
    (prefill,) = requests.prefill.endpoints
    prefill.drain()
    with RegistryClient(prefill.registry_url) as client:
        eventually("the registry knows", lambda: client.engine(prefill.engine).registrations[0].open_rooms == 1)
    said = run(monkeypatch, requests, requests.prefill.name, "--timeout", "0")
    assert said.exit_code == 1
    assert f"rank 0 of {requests.prefill.name!r} has not said that it has drained: 1 rooms open" in said.output
    assert "this was open after 0 s" in said.output
    requests.open_decode(request)
    requests.submit(request)
    request.wait()
    said = run(monkeypatch, requests, requests.prefill.name)
    assert said.exit_code == 0, "asked again, it waits for the rest"


def test_endpoints_are_drained_by_address(made: Callable[..., Requests], monkeypatch: pytest.MonkeyPatch):
    requests = made()
    ends = requests.prefill.endpoints[0], requests.decode.endpoints[0]
    request = requests.new(1)
    requests.open_decode(request)
    prefill, decode = (str(endpoint.observe_url) for endpoint in ends)
    said = run(monkeypatch, requests, decode, "--timeout", "0")
    assert said.exit_code == 1
    assert f"decode rank 0 of {requests.decode.name!r} at {decode.removeprefix('http://')}: 1 rooms open" in said.output
    requests.open_prefill(request)
    requests.submit(request)
    request.wait()
    said = run(monkeypatch, requests, decode, prefill)
    assert said.exit_code == 0, said.output
    assert all(endpoint.is_drained for endpoint in ends)


def test_who_has_left_has_nothing_open(made: Callable[..., Requests], monkeypatch: pytest.MonkeyPatch):
    requests = made()
    (decode,) = requests.decode.endpoints
    requests.open_decode(requests.new(1))

    def leave() -> None:
        eventually("it was told to drain", lambda: decode.is_draining)
        decode.close()

    leaving = threading.Thread(target=leave)
    leaving.start()
    said = run(monkeypatch, requests, str(decode.observe_url), "--timeout", "20")
    leaving.join()
    assert said.exit_code == 0, said.output


@pytest.mark.parametrize("is_back", [True, False])
def test_a_rank_that_the_registry_has_forgotten_has_not_drained(monkeypatch: pytest.MonkeyPatch, is_back: bool):
    its = rank(0, 1, open_rooms=7)
    registry = RegistryServer(port=0)
    registry.start()
    port = int(registry.url.rpartition(":")[2])
    monkeypatch.setenv("KVFERRY_REGISTRY_URL", registry.url)
    monkeypatch.setattr(drain, "_LOOK_S", 0.01)
    restarted = RegistryServer(port=port)
    begin = drain._Engine.begin

    def told_and_forgotten(target: drain._Engine) -> str:
        said = begin(target)
        registry.close()
        restarted.start()
        if is_back:
            client.register(its)
        return said

    monkeypatch.setattr(drain._Engine, "begin", told_and_forgotten)
    with RegistryClient(registry.url) as client:
        client.register(its)
        said = CliRunner().invoke(app, ["drain", its.engine, "--timeout", "0.2"])
    restarted.close()
    assert said.exit_code == 1, said.output
    expected = "drain it again" if is_back else "left without saying that it has drained"
    assert expected in " ".join(said.output.split())


def test_an_endpoint_that_cannot_be_found_for_a_moment_has_not_left(
    made: Callable[..., Requests], monkeypatch: pytest.MonkeyPatch
):
    requests = made()
    requests.open_decode(requests.new(1))
    request = answers.request

    def lost_for_a_moment(*where: Any, method: str, **arguments: Any) -> answers.Answer:
        if method == "GET":
            raise httpx.ConnectError("[Errno -3] Temporary failure in name resolution")
        return request(*where, method=method, **arguments)

    monkeypatch.setattr(drain, "request", lost_for_a_moment)
    said = run(monkeypatch, requests, str(requests.decode.endpoints[0].observe_url), "--timeout", "0")
    assert said.exit_code == 1
    assert "does not answer: [Errno -3]" in said.output


def test_an_endpoint_that_is_too_busy_to_answer_is_among_those_of_this_machine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(asking, "_ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        assert asking.present(port)[0] == f"127.0.0.1:{port}"
        assert f"127.0.0.1:{port}" in asking.present(port - 1)


def test_a_hook_before_the_stop_drains_what_runs_here(made: Callable[..., Requests], monkeypatch: pytest.MonkeyPatch):
    requests = made()
    (decode,) = requests.decode.endpoints
    assert decode.observe_url is not None
    monkeypatch.setenv("KVFERRY_OBSERVE_PORT", decode.observe_url.rpartition(":")[2])
    monkeypatch.setattr(asking, "PORTS", 1)  # whoever listens behind it here is another test's, and may never answer
    said = run(monkeypatch, requests)
    assert said.exit_code == 0, said.output
    assert decode.is_drained


def test_the_secret_is_asked_for(made: Callable[..., Requests], monkeypatch: pytest.MonkeyPatch):
    credentials = credentials_of(Settings(secret=SECRET))
    assert credentials is not None
    with (
        RegistryServer(port=0, token=credentials.registry_token) as registry,
        Engines(registry.url, observe_port=0, secret=SECRET, drain_grace_s=0.0) as both,
    ):
        (decode,) = both.decode(Model()).endpoints
        said = run(monkeypatch, None, str(decode.observe_url))
        assert said.exit_code != 0
        assert "only those who know this endpoint's secret" in str(said.exception)
        assert not decode.is_draining
        monkeypatch.setenv("KVFERRY_SECRET", SECRET)
        assert run(monkeypatch, None, str(decode.observe_url)).exit_code == 0
        assert decode.is_drained


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "nothing to drain: name a prefill engine"),
        (("http://127.0.0.1:9",), "nobody answers at 127.0.0.1:9"),
        (("nobody",), "no rank of an engine named 'nobody' is registered"),
        (("no name",), "cannot be an engine's name"),
    ],
)
def test_what_cannot_be_drained_is_one_sentence(
    made: Callable[..., Requests], monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], problem: str
):
    monkeypatch.delenv("KVFERRY_OBSERVE_PORT", raising=False)
    said = run(monkeypatch, made(), *arguments)
    assert said.exit_code != 0
    assert problem in str(said.exception)


# ---- doctor and top -------------------------------------------------------------------------------------------------


def test_doctor_and_top_show_who_drains(made: Callable[..., Requests], monkeypatch: pytest.MonkeyPatch):
    requests = made()
    (prefill,) = requests.prefill.endpoints
    requests.open_prefill(requests.new(1))
    prefill.drain()

    def findings() -> list[str]:
        found = others.registry(Settings(registry_url=prefill.registry_url))
        return [each.what for each in found if each.severity is Severity.WARNING]

    eventually(
        "doctor says so",
        lambda: findings() == [f"engine {prefill.engine!r}: 1 of 1 ranks, draining: 1 rooms are open"],
    )
    for is_drained, word in ((False, "draining"), (True, "drained")):
        status = msgspec.structs.replace(
            WELL, is_draining=True, is_drained=is_drained, load=LoadStatus(open_rooms=0 if is_drained else 2)
        )
        sample = Sample("here:1", 0.0, status)
        console = Console(width=120)
        with console.capture() as shown:
            console.print(page([sample], Rates({}, {}), width=120, most_rooms=5))
        assert word in shown.get()
        assert any("is draining" in each.what for each in others.endpoint_findings(sample, is_expected=True))
