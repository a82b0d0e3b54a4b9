"""A shared secret between real processes; and commands that keep it to themselves."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.processes.test_bench_roles import ended, side
from tests.support.caches import Model, Shape
from tests.support.commands import command_line, kvferry, wait_for_ranks
from tests.support.processes import Rank, RankProcess
from tests.support.real_transport import skip_unless_installed

from kvferry.control.credentials import Credentials
from kvferry.control.registry_client import RegistryClient
from kvferry.control.registry_server import RegistryServer
from kvferry.errors import RegistryAccessError
from kvferry.layout import RankCoordinates

SECRET = "the secret of these tests"
OTHER = "another secret than that"
TOKEN = Credentials.derived_from(SECRET).registry_token
MODEL = Model(layers=4, heads=4, head_dim=16, page_tokens=8, dtype="float32")
SHAPE = Shape(pages=32)
PAGES = list(range(12))
DEADLINE_S = 6.0


@pytest.fixture(scope="module")
def registry() -> Iterator[str]:
    with RegistryServer(port=0, token=TOKEN) as running:
        yield running.url


@pytest.fixture(scope="module")
def ranks() -> Iterator[tuple[RankProcess, RankProcess]]:
    skip_unless_installed()
    both = RankProcess(), RankProcess()
    yield both
    for each in both:
        each.kill() if each.unanswered else each.close()


def start(ranks: tuple[RankProcess, RankProcess], prefill: dict[str, Any], decode: dict[str, Any]) -> None:
    times = {"bootstrap_timeout_s": DEADLINE_S, "close_timeout_s": 1.0}
    for rank, begin, settings in zip(ranks, (Rank.start_prefill, Rank.start_decode), (prefill, decode), strict=True):
        rank.do(begin, MODEL, SHAPE, RankCoordinates(), "prefill", {**times, **settings})


def test_two_with_one_secret_exchange_every_byte(registry: str, ranks: tuple[RankProcess, RankProcess], tmp_path: Path):
    file = tmp_path / "secret"
    file.write_text(SECRET + "\n")
    file.chmod(0o600)
    prefill, decode = ranks
    start(ranks, {"registry_url": registry, "secret_file": str(file)}, {"registry_url": registry, "secret": SECRET})
    for room in (1, 2, 3):
        decode.do(Rank.receive, room, PAGES, "prefill")
        prefill.do(Rank.send, room, PAGES[::-1], [5, 12])
        assert [rank.do(Rank.wait, room) for rank in ranks] == [0, 0]


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("lets_everyone_in", [False, True], ids=["registry-with-secret", "registry-without"])
@pytest.mark.parametrize("theirs", [OTHER, None], ids=["another", "none"])
def test_with_another_secret_there_is_an_error_in_time_and_nothing_else(
    registry: str, ranks: tuple[RankProcess, RankProcess], lets_everyone_in: bool, theirs: str | None
):
    prefill, decode = ranks
    with RegistryServer(port=0, token=None if lets_everyone_in else TOKEN) as running:
        start(ranks, {"registry_url": running.url, "secret": SECRET}, {"registry_url": running.url, "secret": theirs})
        prefill.do(Rank.send, 1, PAGES, [12])
        decode.do(Rank.receive, 1, PAGES, "prefill")
        decode.ask(Rank.wait, 1)
        answer = decode.answer()
        assert "KVFERRY_SECRET_FILE" in str(answer.error)
        for secret in (SECRET, OTHER):
            assert secret not in str(answer.error)
        assert decode.do(Rank.state, 1) == ("FAILED", True, 0)
        with RegistryClient(running.url, token=TOKEN) as client:
            assert [view.engine for view in client.engines()] == ["prefill"]
        for rank in ranks:  # as long as there is a registry to sign off at
            rank.do(Rank.stop)


def test_nothing_listens_beyond_loopback_unless_told(registry: str, ranks: tuple[RankProcess, RankProcess]):
    """Not the transport either, whose library may listen on every interface: then the kernel lets nobody in."""
    settings: dict[str, Any] = {"registry_url": registry, "secret": SECRET}
    start(ranks, settings, settings)
    for rank in ranks:
        connections = psutil.Process(rank.pid).net_connections("inet")
        listening = [each.laddr for each in connections if each.status == psutil.CONN_LISTEN]
        assert listening
        for address in listening:
            if address.ip.removeprefix("::ffff:") != "127.0.0.1":
                assert address.ip in ("0.0.0.0", "::")
                with pytest.raises(TimeoutError), socket.create_connection(("127.0.0.2", address.port), 0.3):
                    pass


@pytest.mark.full
def test_the_benchmark_of_two_commands_keeps_the_secret(registry: str):
    skip_unless_installed()
    with (
        side("prefill", registry, secret=SECRET) as prefill,
        side("decode", registry, "--json", secret=SECRET) as decode,
    ):
        wait_for_ranks(prefill.pid, 1)
        for process in (prefill, decode):
            family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
            for each in family:
                assert SECRET not in command_line(each)
        results = [ended(process) for process in (decode, prefill)]
    assert [status for status, _, _ in results] == [0, 0], results
    assert json.loads(results[0][1])
    for _, output, errors in results:
        assert SECRET not in output + errors
        assert TOKEN not in output + errors


@pytest.mark.full
def test_a_side_of_the_benchmark_with_another_secret_gives_up_at_once(registry: str):
    skip_unless_installed()
    for role in ("prefill", "decode"):
        with side(role, registry, secret=OTHER) as stranger:
            status, _, errors = ended(stranger)
        assert status == 2
        assert "RegistryAccessError" in errors
        assert "KVFERRY_SECRET_FILE" in errors
        assert OTHER not in errors


def registry_command(*flags: str, **settings: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVFERRY_")}
    environment |= {f"KVFERRY_{name.upper()}": value for name, value in settings.items()}
    return subprocess.Popen(
        [sys.executable, "-m", "kvferry", "registry", "--port", "0", *flags],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def only(monkeypatch: pytest.MonkeyPatch, **settings: str) -> None:
    """Leaves no settings in this process's variables but those."""
    for name in [each for each in os.environ if each.startswith("KVFERRY_")]:
        monkeypatch.delenv(name)
    for name, value in settings.items():
        monkeypatch.setenv(f"KVFERRY_{name.upper()}", value)


def test_a_registry_for_everyone_is_refused_and_says_what_to_do(monkeypatch: pytest.MonkeyPatch):
    only(monkeypatch)
    run = kvferry("registry", "--port", "0", "--host", "0.0.0.0")
    assert (run.returncode, run.stdout) == (2, "")
    for words in ("KVFERRY_REGISTRY_HOST", "KVFERRY_SECRET_FILE", "KVFERRY_ALLOW_UNAUTHENTICATED"):
        assert words in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize("settings", [{"secret": "too short"}, {"secret": ""}, {"secret_file": "/nonexistent"}])
def test_a_secret_that_is_none_is_one_clear_sentence(settings: dict[str, str], monkeypatch: pytest.MonkeyPatch):
    only(monkeypatch, **settings)
    run = kvferry("registry", "--port", "0")
    assert run.returncode == 2
    assert "KVFERRY_SECRET" in run.stderr
    assert "Traceback" not in run.stderr
    assert "too short" not in run.stderr


def test_a_registry_with_a_secret_answers_only_to_those_who_know_it():
    with registry_command(secret=SECRET) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+", said)
        assert found is not None
        with RegistryClient(found[0], token=TOKEN) as friend:
            assert friend.engines() == ()
        with RegistryClient(found[0]) as stranger, pytest.raises(RegistryAccessError):
            stranger.engines()
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate()
    assert process.returncode == 0
    assert SECRET not in said + output + errors
