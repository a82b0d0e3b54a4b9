"""Ports of a library that accepts everybody are shut while too many files are open, and strangers there are ended."""

from __future__ import annotations

import os
import resource
import select
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress

import pytest
from tests.support.waiting import PATIENCE_S, eventually

from kvferry.open_files import num_open
from kvferry.transport.confined_ports import ListeningSocket, listening_sockets
from kvferry.transport.crowded_ports import CrowdedPorts

UCX_SAYS = struct.pack("=Q", 0xCAFEBABE12345678) + bytes(40)


@pytest.fixture
def library() -> Iterator[socket.socket]:
    """A socket that listens, and whose connections somebody accepts."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


@pytest.fixture
def ports(library: socket.socket) -> Iterator[CrowdedPorts]:
    watched = [each for each in listening_sockets() if each.descriptor == library.fileno()]
    assert [each.port for each in watched] == [library.getsockname()[1]]
    guard = CrowdedPorts(watched)
    yield guard
    guard.close()


@pytest.fixture
def files() -> Iterator[tuple[int, int]]:
    """How many may be open; some are, so that a few more can be opened where these are too many."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    some = [os.open(os.devnull, os.O_RDONLY) for _ in range(50)]
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    for file in some:
        os.close(file)


def comes(library: socket.socket, said: bytes) -> tuple[socket.socket, socket.socket]:
    """Somebody who connects, says something and is accepted: both ends."""
    theirs = socket.create_connection(library.getsockname(), PATIENCE_S)
    theirs.sendall(said)
    return theirs, library.accept()[0]


def gets_in(coming: socket.socket, library: socket.socket) -> bool:
    """Whether somebody can connect. Who comes has a look taken."""
    coming.settimeout(0.3)
    try:
        coming.connect(library.getsockname())
    except TimeoutError:
        return False
    return True


def is_shut(library: socket.socket) -> bool:
    with socket.socket() as coming:
        return not gets_in(coming, library)


def watching(*libraries: socket.socket) -> CrowdedPorts:
    return CrowdedPorts([ListeningSocket(each.fileno(), each.getsockname()[1]) for each in libraries])


def crowd(files: tuple[int, int]) -> None:
    """Makes what is open too much."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_open() + 8, files[1]))


@pytest.mark.usefixtures("ports")
def test_while_too_many_files_are_open_nobody_gets_in_and_strangers_have_to_go(
    library: socket.socket, files: tuple[int, int]
):
    strangers = [comes(library, said) for said in (b"", b"abc", b"GET / HTTP/1.1\r\n\r\n")]
    peer, reading = comes(library, UCX_SAYS), comes(library, UCX_SAYS)
    reading[1].recv(8)
    resource.setrlimit(resource.RLIMIT_NOFILE, ((num_open() + 10) * 16 // 12 - 1, files[1]))
    crowd = [os.open(os.devnull, os.O_RDONLY) for _ in range(20)]
    eventually("the port is shut", is_shut, library)
    for _, accepted in strangers:
        eventually("a stranger is ended", lambda each: select.select([each], [], [], 0)[0], accepted)
        while accepted.recv(100):
            pass
    for _, accepted in (peer, reading):
        assert accepted.recv(100), "peers are not"
    resource.setrlimit(resource.RLIMIT_NOFILE, files)
    eventually("it is open again", lambda: not is_shut(library))
    for file in crowd:
        os.close(file)
    for both in (*strangers, peer, reading):
        for end in both:
            end.close()


@pytest.mark.usefixtures("ports")
def test_where_no_file_more_can_be_opened_the_port_is_shut_and_strangers_have_to_go(
    library: socket.socket, files: tuple[int, int]
):
    stranger = comes(library, b"GET / HTTP/1.1\r\n\r\n")
    coming = [socket.socket() for _ in range(20)]  # none is closed meanwhile: that would leave a descriptor
    crowd(files)
    filling = []
    with suppress(OSError):
        while True:
            filling.append(os.open(os.devnull, os.O_RDONLY))
    left = iter(coming)
    eventually("the port is shut", lambda: not gets_in(next(left), library))
    eventually("a stranger is ended", lambda: select.select([stranger[1]], [], [], 0)[0])
    while stranger[1].recv(100):
        pass
    resource.setrlimit(resource.RLIMIT_NOFILE, files)
    eventually("it is open again", lambda: not is_shut(library))
    for file in filling:
        os.close(file)
    for end in (*stranger, *coming):
        end.close()


def test_a_socket_that_the_library_closes_meanwhile_leaves_no_other_shut(
    library: socket.socket, files: tuple[int, int]
):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        guard = watching(closed, library)
        crowd(files)
        for each in (closed, library):
            eventually("the port is shut", is_shut, each)
    resource.setrlimit(resource.RLIMIT_NOFILE, files)
    eventually("it is open again", lambda: not is_shut(library))
    guard.close()


def test_another_socket_that_has_a_closed_ones_number_is_left_alone(library: socket.socket, files: tuple[int, int]):
    with socket.create_server(("127.0.0.1", 0)) as closed, socket.create_server(("127.0.0.1", 0)) as another:
        guard = watching(closed, library)
        os.dup2(another.fileno(), closed.fileno())
        crowd(files)
        eventually("the port is shut", is_shut, library)
        assert not is_shut(another)
        guard.close()


@pytest.mark.usefixtures("ports")
def test_a_kernel_that_does_not_say_what_was_received_has_ports_opened_again_all_the_same(
    library: socket.socket, files: tuple[int, int], monkeypatch: pytest.MonkeyPatch
):
    told = socket.socket.getsockopt
    monkeypatch.setattr(socket.socket, "getsockopt", lambda *asked: told(*asked[:3], *(100 for _ in asked[3:])))
    stranger = comes(library, b"")
    crowd(files)
    eventually("the port is shut", is_shut, library)
    resource.setrlimit(resource.RLIMIT_NOFILE, files)
    eventually("it is open again", lambda: not is_shut(library))
    for end in stranger:
        end.close()


@pytest.mark.usefixtures("ports")
def test_with_enough_files_everybody_may_come_and_stay(library: socket.socket):
    stranger = comes(library, b"")
    another = comes(library, b"GET / HTTP/1.1\r\n\r\n")
    assert another[1].recv(100)
    assert not select.select([stranger[1]], [], [], 0.3)[0]
    for end in (*stranger, *another):
        end.close()
