"""A process is known from others, and known to be gone only when all of it is."""

from __future__ import annotations

import errno
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.support.namespaces import unshare
from tests.support.waiting import eventually

from kvferry.control import process_identity
from kvferry.control.process_identity import this_machine, this_process
from kvferry.protocol.wire.field_types import ProcessIdentity

ASK = (
    "from kvferry.control.process_identity import this_process; me = this_process(); "
    "print(me.machine, me.pid, me.started, sep='|', flush=True)"
)


def is_gone(process: ProcessIdentity) -> bool:
    return process_identity.is_gone(process, this_machine())


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


def test_a_machine_that_does_not_know_itself_proves_nothing():
    """Else a process of any other such machine would be one of this."""
    assert not process_identity.is_gone(replace(this_process(), machine="", pid=2**22 + 1), "")


def test_a_process_elsewhere_is_not_looked_for(monkeypatch: pytest.MonkeyPatch):
    """A decode rank asks about every peer with each heartbeat, and every look at a file gives the interpreter away."""
    elsewhere, machine = replace(this_process(), machine="another machine"), this_machine()

    def read(path: Path) -> str:
        raise AssertionError(f"{path} was read")

    monkeypatch.setattr(Path, "read_text", read)
    assert not process_identity.is_gone(elsewhere, machine)


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


class FakeSystem:
    """A system of processes as `/proc` and `kill` would show it.

    Attributes:
        proc: where `/proc` is mounted.
        numbers: what `kill` with signal 0 does, by process number; nothing, where the number is in use.
    """

    def __init__(self, proc: Path) -> None:
        self.proc = proc
        self.numbers: dict[int, OSError | None] = {}
        (proc / "sys/kernel/random").mkdir(parents=True)
        (proc / "sys/kernel/random/boot_id").write_text("a boot\n")
        self.mount_for(os.getpid())

    def mount_for(self, pid: int) -> None:
        """Mounts it for a namespace in which this process has that number."""
        (self.proc / "self").unlink(missing_ok=True)
        (self.proc / "self").symlink_to(str(pid))
        (self.proc / str(pid) / "ns").mkdir(parents=True, exist_ok=True)
        (self.proc / str(pid) / "ns/pid").touch()

    def show(self, pid: int, text: str) -> None:
        """Shows the `stat` of a process."""
        (self.proc / str(pid)).mkdir(exist_ok=True)
        (self.proc / str(pid) / "stat").write_text(text)

    def kill(self, pid: int, signal: int) -> None:
        assert signal == 0
        answer = self.numbers.get(pid, ProcessLookupError(errno.ESRCH, "No such process"))
        if answer is not None:
            raise answer


def stat_of(pid: int, *, started: int, state: str = "S") -> str:
    return f"{pid} (a name) {state} " + " ".join(["0"] * 18) + f" {started} 0 0"


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSystem:
    fake = FakeSystem(tmp_path / "proc")
    monkeypatch.setattr(process_identity, "_PROC", fake.proc)
    monkeypatch.setattr(os, "kill", fake.kill)
    fake.show(os.getpid(), stat_of(os.getpid(), started=17))
    fake.numbers[os.getpid()] = None
    return fake


def other(pid: int = 4321, started: int = 99) -> ProcessIdentity:
    return replace(this_process(), pid=pid, started=started)


def test_a_process_that_is_not_shown_but_may_not_be_signalled_lives(system: FakeSystem):
    """What `/proc` with `hidepid=2` makes of a living process of another user."""
    system.numbers[4321] = PermissionError(errno.EPERM, "Operation not permitted")
    assert not is_gone(other())


def test_a_process_whose_file_may_not_be_read_lives(system: FakeSystem, monkeypatch: pytest.MonkeyPatch):
    """`hidepid=1`."""
    system.show(4321, stat_of(4321, started=99))
    system.numbers[4321] = PermissionError(errno.EPERM, "Operation not permitted")
    read = Path.read_text

    def refuse(path: Path) -> str:
        if path.parent.name == "4321":
            raise PermissionError(errno.EPERM, "Operation not permitted", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_text", refuse)
    assert not is_gone(other())
    system.numbers.clear()
    assert is_gone(other())


def test_a_process_that_nobody_has_is_gone(system: FakeSystem):
    assert is_gone(other())


def test_nobody_knows_whose_number_it_is_where_the_start_is_hidden(system: FakeSystem):
    """It may be in use again, or not."""
    system.numbers[4321] = None
    assert not is_gone(other())
    system.show(4321, "not what proc(5) says")
    assert not is_gone(other())
    system.show(4321, stat_of(4321, started=98))
    assert is_gone(other())


def test_a_process_that_does_not_know_its_own_start_is_gone_only_when_its_number_is(system: FakeSystem):
    system.show(4321, stat_of(4321, started=98))
    system.numbers[4321] = None
    assert not is_gone(other(started=0))
    del system.numbers[4321]
    assert is_gone(other(started=0))


def test_a_view_of_other_peoples_numbers_shows_nothing(system: FakeSystem):
    """`/proc` of another namespace, as after `unshare --pid` without a mount: its numbers are not those here."""
    there = other()
    system.numbers[4321] = None
    system.show(4321, stat_of(4321, started=1))
    assert is_gone(there)
    system.mount_for(os.getpid() + 1)
    assert not is_gone(replace(there, machine=this_process().machine))
    assert this_process().started == 0


@pytest.mark.parametrize("pid", [0, 2**31, 2**40])
def test_a_number_that_no_process_can_have_proves_nothing(pid: int):
    assert not is_gone(replace(this_process(), pid=pid))


ASK_AS_NOBODY = """
import os, sys
from msgspec.structs import replace
from kvferry.control.process_identity import is_gone, this_machine, this_process

machine = this_machine()
pid = int(sys.argv[1])
there = replace(this_process(), pid=pid, started=int(sys.argv[2]))
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
try:
    shown = open(f"/proc/{pid}/stat").read().split()[0]
except OSError as error:
    shown = type(error).__name__
print(shown, is_gone(there, machine), flush=True)
sys.stdin.readline()
print(is_gone(there, machine), flush=True)
"""


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(("hidepid", "shown"), [(2, "FileNotFoundError"), (1, "PermissionError"), (0, "")])
def test_a_process_of_another_user_lives_however_proc_is_mounted(hidepid: int, shown: str):
    """What systemd makes of `ProtectProc=invisible`, and administrators of shared machines."""
    begin = unshare("--mount")
    with subprocess.Popen(["sleep", "60"]) as there:
        started = Path(f"/proc/{there.pid}/stat").read_text().rpartition(")")[2].split()[19]
        asking = shlex.join([sys.executable, "-c", ASK_AS_NOBODY, str(there.pid), started])
        program = [*begin, "sh", "-c", f"mount -t proc -o hidepid={hidepid} proc /proc && exec {asking}"]
        with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as asker:
            assert asker.stdin is not None
            assert asker.stdout is not None
            try:
                assert asker.stdout.readline().split() == [shown or str(there.pid), "False"]
                there.kill()
                there.wait()
                asker.stdin.write("\n")
                asker.stdin.flush()
                assert asker.stdout.readline().strip() == "True"
            finally:
                there.kill()
