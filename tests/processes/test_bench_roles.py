"""`kvferry bench` as two commands that find each other through a registry, as they would on two machines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import msgspec
import pytest
import zmq
from tests.support.commands import assert_gone, wait_for_ranks
from tests.support.real_transport import skip_unless_installed
from tests.support.waiting import PATIENCE_S, eventually

from kvferry.applications.bench.remote import ENGINE, Lead, Refused, Tell
from kvferry.control.registry_client import RegistryClient
from kvferry.control.registry_server import RegistryServer

skip_unless_installed()

SMALL = ("--preset", "small", "--tokens", "70", "--requests", "3", "--in-flight", "2", "--repetitions", "1")


@pytest.fixture
def registry() -> Iterator[str]:
    server = RegistryServer("127.0.0.1", 0, lease_s=10)
    server.start()
    yield server.url
    server.close()


@contextmanager
def side(role: str, registry_url: str, *flags: str, **settings: str) -> Iterator[subprocess.Popen[str]]:
    """One of the two commands, which is killed at the end if it still runs, with what it started."""
    command = [sys.executable, "-m", "kvferry", "bench", *SMALL, "--role", role, "--registry", registry_url, *flags]
    environment = {**os.environ, **{f"KVFERRY_{name.upper()}": value for name, value in settings.items()}}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    output, errors = process.communicate()
    return process.returncode, output, " ".join(errors.split())


def entered(registry_url: str) -> tuple[str, str]:
    """The address and the key of the prefill side, once it waits."""
    with RegistryClient(registry_url) as client:
        eventually("the prefill side has come", lambda: client.engine(ENGINE).registrations)
        (registration,) = client.engine(ENGINE).registrations
    return registration.control_address, registration.incarnation


@pytest.mark.full
@pytest.mark.sampled(one_in=2, full=2)
@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_two_commands_measure_what_one_does(registry: str, first: str):
    flags = ("--prefill-tp", "2", "--decode-page-size", "48", "--pages", "both", "--passes", "2")
    second = "decode" if first == "prefill" else "prefill"
    with side(first, registry, *flags, *_json(first)) as one:
        time.sleep(1.0)
        with side(second, registry, *flags, *_json(second)) as other:
            results = {first: ended(one), second: ended(other)}
    assert results["prefill"][:2] == (0, ""), results["prefill"][2]
    code, output, errors = results["decode"]
    assert code == 0, errors
    shown = json.loads(output)
    assert shown["exact"] is True
    assert shown["latency_from"] == "asking"
    went = [case for case in shown["cases"] if case["refused"] is None]
    assert {case["pages"] for case in went} == {"scattered", "contiguous"}
    for case in went:
        assert case["bytes_checked"] > case["bytes_per_request"] > 0
        assert 0 <= case["latency_ms"]["p50"] <= case["latency_ms"]["p99"]
        for name in ("gb_per_s", "bulk_gb_per_s", "efficiency", "cpu_s_per_gb", "descriptors"):
            assert case[name] > 0, name


@pytest.mark.full
def test_two_commands_of_one_machine_measure_what_is_left_when_a_prompt_is_computed(registry: str):
    flags = ("--one-clock", "--variants", "direct", "--layer-time-ms", "2", "--layer-ranges", "2")
    with side("prefill", registry, *flags) as prefill, side("decode", registry, *flags, "--json") as decode:
        code, output, errors = ended(decode)
        assert code == 0, errors
        assert ended(prefill)[0] == 0
    shown = json.loads(output)
    assert shown["exact"] is True
    assert shown["latency_from"] == "submit"
    assert [case["variant"] for case in shown["cases"]] == ["direct", "direct, by layer"]
    for case in shown["cases"]:
        assert 0 < case["exposed"]["ms"]["p50"] < case["latency_ms"]["p50"]


def _json(role: str) -> tuple[str, ...]:
    return ("--json",) if role == "decode" else ()


@pytest.mark.full
def test_a_wrong_byte_fails_both_commands(registry: str):
    with (
        side("prefill", registry, "--variants", "auto") as prefill,
        side("decode", registry, "--variants", "auto", "--json", "--plant-wrong-byte") as decode,
    ):
        code, output, errors = ended(decode)
        assert code == 1, errors
        assert json.loads(output)["exact"] is False
        assert ended(prefill)[0] == 1


@pytest.mark.full
def test_sides_that_were_told_different_things_both_say_so(registry: str):
    said = "--page-size is 16 on the prefill side and 1 on the decode side"
    with side("prefill", registry) as prefill, side("decode", registry, "--page-size", "1") as decode:
        for process in (prefill, decode):
            code, output, errors = ended(process)
            assert (code, output) == (2, "")
            assert said in errors


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize(("role", "missing"), [("prefill", "decode"), ("decode", "prefill")])
def test_a_side_that_stays_alone_says_so_in_time(registry: str, role: str, missing: str):
    with side(role, registry, bootstrap_timeout_s="2") as process:
        code, _, errors = ended(process)
    assert code == 2
    assert f"no {missing} side within 2 s (KVFERRY_BOOTSTRAP_TIMEOUT_S)" in errors
    assert f"kvferry bench --role {missing}" in errors


@pytest.mark.full
@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_registry_that_is_not_there_is_named(role: str):
    with side(role, "http://127.0.0.1:9", bootstrap_timeout_s="2") as process:
        code, _, errors = ended(process)
    assert code == 2
    assert "http://127.0.0.1:9 cannot be reached" in errors


@pytest.mark.full
@pytest.mark.sampled(one_in=2, full=2)
@pytest.mark.parametrize("dying", ["prefill", "decode"])
def test_a_rank_that_dies_ends_both_commands_and_leaves_nobody_behind(registry: str, dying: str):
    flags = ("--seconds", "60", "--variants", "auto")
    with side("prefill", registry, *flags) as prefill, side("decode", registry, *flags) as decode:
        processes = {"prefill": prefill, "decode": decode}
        ranks = {name: wait_for_ranks(process.pid, 1) for name, process in processes.items()}
        time.sleep(2.0)  # most likely, they measure by now
        os.kill(ranks[dying][0].pid, signal.SIGKILL)
        for process in processes.values():
            code, _, errors = ended(process)
            assert code == 2
            assert f"{dying} rank 0 died with exit code -9" in errors
    assert_gone([*ranks["prefill"], *ranks["decode"]])


@pytest.mark.full
@pytest.mark.sampled(one_in=2, full=2)
@pytest.mark.parametrize("dying", ["prefill", "decode"])
def test_a_side_that_vanishes_ends_the_other(registry: str, dying: str):
    flags = ("--seconds", "60", "--variants", "auto")
    settings = {"peer_timeout_s": "10"}  # the other side may be slow, and must not be given up
    with (
        side("prefill", registry, *flags, **settings) as prefill,
        side("decode", registry, *flags, **settings) as decode,
    ):
        processes = {"prefill": prefill, "decode": decode}
        ranks = [rank for process in processes.values() for rank in wait_for_ranks(process.pid, 1)]
        time.sleep(2.0)  # most likely, they measure by now
        processes.pop(dying).kill()
        ((_, survivor),) = processes.items()
        code, _, errors = ended(survivor)
        assert code == 2
        # Whichever shows first: its silence, that nobody takes messages, or a transfer that ended.
        said = (f"nothing was heard from the {dying} side", f"the {dying} side is gone", "rank 0 failed")
        assert any(each in errors for each in said), errors
    assert_gone(ranks)


@pytest.mark.full
def test_only_who_knows_the_key_leads_and_strays_do_no_harm(registry: str):
    flags = ("--variants", "auto")
    with side("prefill", registry, *flags) as prefill:
        address, key = entered(registry)
        with zmq.Context() as context, context.socket(zmq.DEALER) as stray:
            stray.setsockopt(zmq.IDENTITY, b"stray")
            stray.connect(address)
            for message in (b"", b"\xff\xff", b"GET / HTTP/1.1\r\n\r\n"):
                stray.send(message)
            stray.send(msgspec.msgpack.encode(Lead("x" * len(key), {})))
            stray.send(msgspec.msgpack.encode(Tell(0, b"")))
            assert not stray.poll(1000)
            assert prefill.poll() is None
            with side("decode", registry, *flags, "--seconds", "3") as decode:
                wait_for_ranks(prefill.pid, 1)
                stray.send(msgspec.msgpack.encode(Lead(key, {})))
                assert stray.poll(int(PATIENCE_S * 1000))
                answer = msgspec.msgpack.decode(stray.recv(), type=Refused)
                assert "another decode side leads already" in answer.reason
                code, _, errors = ended(decode)
                assert code == 0, errors
        assert ended(prefill)[0] == 0


@pytest.mark.full
def test_a_second_prefill_side_at_the_same_registry_takes_over_and_the_first_says_so(registry: str):
    flags = ("--variants", "auto")
    with side("prefill", registry, *flags) as first:
        entered(registry)
        with side("prefill", registry, *flags) as second:
            code, _, errors = ended(first)
            assert code == 2
            assert "RankReplacedError" in errors
            with side("decode", registry, *flags) as decode:
                assert ended(decode)[0] == 0
            assert ended(second)[0] == 0


@pytest.mark.full
def test_the_prefill_side_is_not_entered_any_more_once_it_is_led(registry: str):
    with side("prefill", registry, "--variants", "auto") as prefill:
        entered(registry)
        with side("decode", registry, "--variants", "auto", "--seconds", "5"):
            wait_for_ranks(prefill.pid, 1)
            listed = httpx.get(f"{registry}/v1/engines").json()["engines"]
            assert ENGINE not in {engine["engine"] for engine in listed}
