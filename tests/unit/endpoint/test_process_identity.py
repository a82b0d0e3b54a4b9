"""A process is known from others, and known to be gone only when all of it is."""

from __future__ import annotations

import os
import subprocess
import sys

from msgspec.structs import replace
from tests.support.waiting import eventually

from kvferry.endpoint.process_identity import is_gone, this_process

ASK = (
    "from kvferry.endpoint.process_identity import this_process; me = this_process(); "
    "print(me.machine, me.pid, me.started, sep='|', flush=True)"
)


def test_this_process_is_not_gone():
    here = this_process()
    assert here.pid == os.getpid()
    assert here == this_process()
    assert not is_gone(here)


def test_another_process_of_the_same_number_was_another_one():
    """The number was used again."""
    assert is_gone(replace(this_process(), started=this_process().started - 1))


def test_nobody_knows_what_became_of_processes_elsewhere():
    assert not is_gone(replace(this_process(), machine="another machine", pid=2**22 + 1))


def test_a_child_is_gone_when_it_has_ended_even_before_its_parent_looks():
    program = [sys.executable, "-c", ASK + "; input()"]
    child = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None
    assert child.stdout is not None
    machine, pid, started = child.stdout.readline().strip().split("|")
    there = replace(this_process(), pid=int(pid), started=int(started))
    assert machine == there.machine
    assert not is_gone(there)
    child.kill()
    eventually("it is a zombie, or gone", lambda: is_gone(there))
    child.wait()
    assert is_gone(there)
    child.stdin.close()
    child.stdout.close()


def test_a_process_whose_first_thread_has_ended_runs_on():
    """The system calls it a zombie then, but its other threads may write."""
    program = (
        f"import ctypes, sys, threading, time; {ASK}; "
        "threading.Thread(target=lambda: time.sleep(60)).start(); ctypes.CDLL(None).pthread_exit(None)"
    )
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    _, pid, started = child.stdout.readline().strip().split("|")
    there = replace(this_process(), pid=int(pid), started=int(started))

    def state() -> str:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0]

    eventually("its first thread has ended", lambda: state() == "Z")
    assert not is_gone(there)
    child.kill()
    eventually("all of it has ended", lambda: is_gone(there))
    child.wait()
    child.stdout.close()
