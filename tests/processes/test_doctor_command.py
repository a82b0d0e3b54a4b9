"""`kvferry doctor` measures NIXL between two processes, and says which way bytes went."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import zmq
from tests.support.waiting import PATIENCE_S

from kvferry.applications.doctor.machine import has_gpu
from kvferry.applications.doctor.probe import Hello, Seen, Written
from kvferry.control.ends import ZmqConnection

pytest.importorskip("nixl_cu13")


def doctor(*flags: str, **environment: str) -> tuple[int, list[dict[str, Any]]]:
    """What it finds with these variables, and its exit code."""
    command = [sys.executable, "-m", "kvferry", "doctor", "--json", *flags]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})
    return run.returncode, json.loads(run.stdout)["findings"]


@contextmanager
def listening(*, until: signal.Signals = signal.SIGINT, **environment: str) -> Iterator[tuple[str, list[str]]]:
    """A doctor that listens: its address, and where to find afterwards what it said."""
    command = [sys.executable, "-m", "kvferry", "doctor", "--listen", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}) as process:
        said: list[str] = []
        try:
            assert process.stdout is not None
            yield f"127.0.0.1:{process.stdout.readline().split()[-1]}", said
        finally:
            process.send_signal(until)
            said += process.communicate(timeout=PATIENCE_S)[0].splitlines()
        assert process.returncode == 0, "a signal is how it ends"


def of_the_wire(found: list[dict[str, Any]], *, on_gpu: bool = False) -> list[dict[str, Any]]:
    return [each for each in found if each["about"] == "wire" and ("in a GPU's memory" in each["what"]) is on_gpu]


@pytest.mark.gpu
@pytest.mark.skipif(not has_gpu(), reason="no GPU here; tests/unit/transport/test_nixl_diagnosis.py needs none")
def test_a_gpus_memory_is_written_by_the_drivers_copies():
    code, found = doctor()
    (wire,) = of_the_wire(found, on_gpu=True)
    assert (code, wire["severity"]) == (0, "good"), found
    assert "UCX takes cuda_ipc/cuda" in wire["what"]


@pytest.mark.full
def test_two_doctors_measure_what_is_between_them():
    with listening() as (address, said):
        for _ in range(2):
            code, found = doctor("--no-wire", "--wire-to", address)
            (wire,) = of_the_wire(found)
            assert (code, wire["severity"]) == (0, "good"), found
            assert f"between here and {address}: " in wire["what"]
            assert "GB/s in bulk" in wire["what"]
            assert "UCX takes" in wire["what"]
    assert said == ["a doctor writes", "every byte is right"] * 2


@pytest.mark.full
def test_a_doctor_with_another_secret_learns_nothing():
    with listening(until=signal.SIGTERM, KVFERRY_SECRET="one secret that is long enough") as (address, said):
        code, found = doctor("--no-wire", "--wire-to", address, KVFERRY_SECRET="another that is long enough")
    (wire,) = of_the_wire(found)
    assert (code, wire["severity"]) == (2, "error")
    assert "nobody answers" in wire["what"]
    assert "KVFERRY_SECRET" in wire["what"]
    assert said == []


@pytest.mark.full
def test_strays_do_not_disturb_a_doctor_that_listens():
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with listening() as (address, _):
        stray = ZmqConnection(context, identity="stray", address=f"tcp://{address}")
        for data in (b"", b"x" * 100, msgspec.msgpack.encode(Written()), msgspec.msgpack.encode({"type": "Hello"})):
            stray.send(data)
        stray.send(msgspec.msgpack.encode(Hello("0")))
        while not stray.receive():
            stray.socket.poll(100)
        _, found = doctor("--no-wire", "--wire-to", address)
        assert "listens to another" in of_the_wire(found)[0]["what"], "one at a time"
        stray.send(msgspec.msgpack.encode(Written()))  # and is through, without having written
        while not (answers := stray.receive()):
            stray.socket.poll(100)
        assert msgspec.msgpack.decode(answers[0], type=Seen) == Seen(False)
        _, found = doctor("--no-wire", "--wire-to", address)
        assert "GB/s" in of_the_wire(found)[0]["what"], found  # how fast it is says nothing of strays
        stray.close()
    context.term()


@pytest.mark.full
def test_memory_is_the_way_within_a_machine():
    code, found = doctor()
    (wire,) = of_the_wire(found)
    assert code == 0, found
    assert "GB/s in bulk" in wire["what"]
    assert "UCX takes" in wire["what"]
    assert "tcp" not in wire["what"]


@pytest.mark.full
def test_a_transport_that_fell_back_to_tcp_is_noticed():
    code, found = doctor(UCX_TLS="tcp,self")
    wire = [each for each in found if each["about"] == "wire"]
    assert code == 1
    assert "UCX takes tcp/" in wire[0]["what"]
    assert wire[1]["severity"] == "warning"
    assert "UCX_TLS" in wire[1]["remedy"]


@pytest.mark.full
def test_a_wire_that_cannot_be_is_an_error():
    code, found = doctor(UCX_TLS="rc_x")
    (wire,) = of_the_wire(found)
    assert (code, wire["severity"]) == (2, "error")
