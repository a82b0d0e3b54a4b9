"""The supervisor of `kvferry up`, with small programs in place of engines."""

from __future__ import annotations

import json
import os
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from tests.support.commands import assert_gone, command_line
from tests.support.waiting import PATIENCE_S, eventually

from kvferry.applications.command_line import interruptible
from kvferry.applications.up import supervision
from kvferry.applications.up.plan import Program
from kvferry.applications.up.supervision import Supervisor, free_ports
from kvferry.errors import KVFerryError

SERVER = textwrap.dedent(
    """
    import http.server, signal, subprocess, sys
    if "stubborn" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), http.server.SimpleHTTPRequestHandler).serve_forever()
    """
)


@pytest.fixture
def program(tmp_path: Path) -> Callable[..., Program]:
    """A server that has started another process."""
    script = tmp_path / "server.py"
    script.write_text(SERVER)

    def make(name: str, *options: str) -> Program:
        (port,) = free_ports(1)
        return Program(name, (sys.executable, str(script), str(port), *options), f"http://127.0.0.1:{port}/")

    return make


@pytest.fixture
def supervised(tmp_path: Path) -> Iterator[Callable[..., Supervisor]]:
    started: list[Supervisor] = []

    def start(*programs: Program) -> Supervisor:
        supervisor = Supervisor(programs, tmp_path)
        started.append(supervisor)
        supervisor.wait_serving(PATIENCE_S, lambda _: None)
        return supervisor

    yield start
    for supervisor in started:
        supervisor.stop()


def everybody(supervisor: Supervisor) -> list[psutil.Process]:
    return psutil.Process(supervisor.process.pid).children(recursive=True)


def test_stopping_leaves_nothing(supervised: Callable[..., Supervisor], program: Callable[..., Program]):
    supervisor = supervised(program("one"), program("two"))
    processes = everybody(supervisor)
    assert len(processes) >= 6
    supervisor.stop()
    assert not supervisor.is_running
    assert_gone(processes)


@pytest.mark.full
def test_programs_that_do_not_stop_are_ended(
    supervised: Callable[..., Supervisor], program: Callable[..., Program], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(supervision, "_STOP_S", 1)
    supervisor = supervised(program("one", "stubborn"), program("two", "stubborn"))
    processes = everybody(supervisor)
    supervisor.stop()
    assert_gone(processes)


def test_whoever_interrupts_the_stop_ends_everything_at_once(
    supervised: Callable[..., Supervisor],
    program: Callable[..., Program],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
):
    monkeypatch.setattr(supervision, "_STOP_S", 3600)  # nobody waits for this
    supervisor = supervised(program("one", "stubborn"), program("two", "stubborn"))
    processes = everybody(supervisor)

    def interrupt_once_it_stops() -> None:
        eventually("it stops", lambda: "received SIGTERM" in (tmp_path / "supervisord.log").read_text())
        os.kill(os.getpid(), signal.SIGTERM)

    interrupting = threading.Thread(target=interrupt_once_it_stops)
    interrupting.start()
    with interruptible():
        supervisor.stop()
    interrupting.join()
    assert_gone(processes)


def test_when_the_supervisor_is_killed_nothing_goes_on_and_that_is_an_error(
    supervised: Callable[..., Supervisor], program: Callable[..., Program]
):
    supervisor = supervised(program("one"))
    processes = everybody(supervisor)
    supervisor.process.kill()
    with pytest.raises(KVFerryError, match=r"has ended by itself \(status -9\).*supervisord\.log"):
        supervisor.wait()
    assert_gone(processes)


@pytest.mark.full
def test_a_program_that_is_killed_comes_back(supervised: Callable[..., Supervisor], program: Callable[..., Program]):
    one = program("one")
    supervisor = supervised(one)
    before = {each: command_line(each) for each in everybody(supervisor)}
    next(each for each, line in before.items() if "together" in line).kill()
    assert_gone([each for each, line in before.items() if "server.py" in line])
    supervisor.wait_serving(PATIENCE_S, lambda _: None)


def test_processes_that_end_while_they_are_being_ended_do_not_matter(
    supervised: Callable[..., Supervisor], program: Callable[..., Program], monkeypatch: pytest.MonkeyPatch
):
    supervisor = supervised(program("one"))
    kill = supervisor.process.kill

    def end_all_and_kill() -> None:
        processes = everybody(supervisor)
        kill()
        for each in processes:
            each.kill()
        assert_gone(processes)

    monkeypatch.setattr(supervisor.process, "kill", end_all_and_kill)
    supervisor.kill()
    assert not supervisor.is_running


def test_one_that_does_not_serve_is_named_with_the_end_of_its_log(tmp_path: Path):
    broken = Program("broken", (sys.executable, "-c", "raise SystemExit('no such model')"), "http://127.0.0.1:9/")
    supervisor = Supervisor([broken], tmp_path)
    try:
        eventually("it has said why", lambda: "no such model" in log_of(supervisor, broken))
        with pytest.raises(KVFerryError, match=r"broken does not serve after 0\.5 s[\s\S]*no such model"):
            supervisor.wait_serving(0.5, lambda _: None)
    finally:
        supervisor.stop()


def test_a_command_arrives_whole(tmp_path: Path):
    says = "import json, sys, time; print(json.dumps(sys.argv[1:]), flush=True); time.sleep(600)"
    options = (
        "{% for m in messages %}{# user #}{{ m }} ; {% endfor %}",
        "one\n\n  # two\n; three\n",
        'it\'s "ä" \\n',
        "",
    )
    odd = Program("odd", (sys.executable, "-c", says, *options), "http://127.0.0.1:9/")
    supervisor = Supervisor([odd], tmp_path)
    try:
        eventually("it has said what it was told", lambda: "\n" in log_of(supervisor, odd))
        assert json.loads(log_of(supervisor, odd)) == list(options)
    finally:
        supervisor.stop()


def test_no_proxy_is_asked_whether_programs_serve(
    supervised: Callable[..., Supervisor], program: Callable[..., Program], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    supervised(program("one"))


def log_of(supervisor: Supervisor, of: Program) -> str:
    log = supervisor.log_of(of)
    return log.read_text() if log.exists() else ""
