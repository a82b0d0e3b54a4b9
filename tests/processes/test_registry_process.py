"""The registry as a process of its own: signals, sudden death, restart, and what it costs when idle."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import psutil
import pytest
from tests.support.waiting import PATIENCE_S, eventually

from kvferry.control.registry_client import RegistryClient
from kvferry.control.renewals import LeaseKeeper, Renewals
from kvferry.layout.parallel import RankCoordinates
from kvferry.protocol.wire.registrations import RankRegistration

SERVE = """
import sys
from kvferry.control.registry_server import RegistryServer
RegistryServer(port=int(sys.argv[1]), lease_s=0.6).serve_forever(lambda url: print(url, flush=True))
print("ended", flush=True)
"""


@contextmanager
def registry_process(port: int = 0) -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = subprocess.Popen([sys.executable, "-c", SERVE, str(port)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        url = process.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:")
        yield process, url
    finally:
        process.kill()
        process.wait(PATIENCE_S)
        process.stdout.close()


def registration(incarnation: str = "first") -> RankRegistration:
    return RankRegistration(
        engine="prefill",
        incarnation=incarnation,
        coordinates=RankCoordinates(),
        control_address="tcp://127.0.0.1:40000",
        layout_digest="digest",
        started_at=0.0,
        protocol_version=1,
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.full)])
def test_a_signal_ends_the_process_in_order(number: signal.Signals):
    with registry_process() as (process, url), RegistryClient(url) as client:
        client.register(registration())
        process.send_signal(number)
        assert process.wait(PATIENCE_S) == 0
        assert process.stdout is not None
        assert process.stdout.read() == "ended\n"


@pytest.mark.full  # test_faults_registry.py kills one in every tier
def test_a_rank_outlives_a_registry_that_is_killed_and_comes_back():
    problems: list[Exception] = []
    with (
        registry_process() as (process, url),
        RegistryClient(url) as client,
        LeaseKeeper(client, registration(), problems.append, renewals=Renewals(longest_retry_s=0.2)) as keeper,
    ):
        assert keeper.registered.wait(PATIENCE_S)
        process.kill()
        process.wait(PATIENCE_S)
        eventually("it gave its lease up", lambda: not keeper.registered.is_set())
        with registry_process(int(url.rsplit(":", 1)[1])) as (_, same_url):
            assert same_url == url
            assert keeper.registered.wait(PATIENCE_S)
            assert client.engine("prefill").complete
            assert keeper.close()
            assert client.engines() == ()
    assert problems


def test_a_rank_whose_process_is_killed_is_forgotten_and_its_successor_is_taken_at_once():
    hold = """
import sys, threading
import msgspec
from kvferry.protocol.wire.registrations import RankRegistration
from kvferry.control.registry_client import RegistryClient
from kvferry.control.renewals import LeaseKeeper
keeper = LeaseKeeper(
    RegistryClient(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=RankRegistration), lambda problem: None
)
keeper.start()
keeper.registered.wait()
print("registered", flush=True)
threading.Event().wait()
"""
    with registry_process() as (_, url), RegistryClient(url) as client:
        arguments = [sys.executable, "-c", hold, url, msgspec.json.encode(registration()).decode()]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as holder:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "registered\n"
            os.kill(holder.pid, signal.SIGKILL)
        client.register(registration("second"))
        assert client.engine("prefill").registrations in ((registration("second"),), ()), "unless its lease ran out"
        eventually("the successor is forgotten", lambda: not client.engine("prefill").registrations)


def test_an_idle_registry_costs_next_to_nothing():
    with registry_process() as (process, url), RegistryClient(url) as client:
        client.health()
        watched = psutil.Process(process.pid)
        before = watched.cpu_times()
        time.sleep(2.0)
        after = watched.cpu_times()
        used_s = after.user + after.system - before.user - before.system
    # Of one core; `benchmarks/registry.py` measures 0.2 to 0.4 %. What this guards against is a loop that spins.
    assert used_s / 2.0 < 0.05


def test_using_a_registry_loads_no_web_server_and_no_http_library_until_the_first_request():
    program = """
import sys
from kvferry.control.registry_client import RegistryClient
from kvferry.control.registry_server import RegistryServer
RegistryClient("http://127.0.0.1:8998")
RegistryServer()
print(sorted({"httpx", "uvicorn", "starlette"} & set(sys.modules)))
"""
    arguments = [sys.executable, "-c", program]
    output = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout
    assert output == "[]\n"
