"""A command and what it has started end together."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest
from tests.support.waiting import PATIENCE_S, eventually

COMMAND = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


SLOW_GUARD = """
import os, sys, time
from kvferry.applications.up import together

moves = os.setpgid

def move(process, group):
    if process == 0:
        time.sleep(600)  # it does not come to it
    moves(process, group)

os.setpgid = move
together.main()
"""


def started(*ours_as: str) -> tuple[subprocess.Popen[str], psutil.Process, psutil.Process]:
    """Ours, the command's, and the process that the command has started."""
    command = json.dumps([sys.executable, "-c", COMMAND])
    line = [sys.executable, *(ours_as or ("-m", "kvferry.applications.up.together")), command]
    ours = subprocess.Popen(line, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert ours.stdout is not None
    grandchild = psutil.Process(int(ours.stdout.readline()))
    child = grandchild.parent()
    assert child is not None
    assert child.ppid() == ours.pid
    return ours, child, grandchild


def has_ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.full)])
def test_what_a_killed_command_leaves_behind_is_ended(number: signal.Signals):
    ours, child, grandchild = started()
    child.send_signal(number)
    assert ours.wait(PATIENCE_S) != 0
    eventually("nothing is left", lambda: has_ended(grandchild))


def test_when_we_are_killed_ourselves_nothing_is_left_either():
    ours, child, grandchild = started()
    ours.kill()
    ours.wait(PATIENCE_S)
    eventually("nothing is left", lambda: has_ended(child) and has_ended(grandchild))


def test_stopping_the_group_stops_all():
    ours, child, grandchild = started()
    os.killpg(ours.pid, signal.SIGTERM)
    ours.wait(PATIENCE_S)
    eventually("nothing is left", lambda: has_ended(child) and has_ended(grandchild))


@pytest.mark.full
def test_who_stops_the_group_as_it_starts_does_not_end_the_guard():
    """Before, a guard that a busy machine had not yet let run was ended with the group, and what was left lived on."""
    ours, child, grandchild = started("-c", SLOW_GUARD)
    (guard,) = (each for each in psutil.Process(ours.pid).children() if each != child)
    try:
        assert os.getpgid(guard.pid) != ours.pid
        os.killpg(ours.pid, signal.SIGTERM)
        ours.wait(PATIENCE_S)
        assert guard.is_running()
    finally:
        for each in (guard, child, grandchild):
            if each.is_running():
                each.kill()


def test_without_a_group_of_its_own_nothing_is_run():
    line = [
        sys.executable,
        "-m",
        "kvferry.applications.up.together",
        json.dumps([sys.executable, "-c", "print('ran')"]),
    ]
    run = subprocess.run(line, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert run.returncode == 1
    assert "must lead a process group" in run.stderr
    assert not run.stdout
