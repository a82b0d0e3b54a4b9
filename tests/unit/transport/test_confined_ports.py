"""Ports that a library opens everywhere, kept to one address by the kernel. All of 127.0.0.0/8 is this machine's."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from kvferry.errors import TransportError
from kvferry.transport.confined_ports import ListeningSocket, confine, sockets_on_every_interface

MEANT, OTHER = "127.0.0.1", "127.0.0.2"


@pytest.fixture(params=["0.0.0.0", "::"])
def server(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    """Listens on every interface; the second kind on IPv4, too."""
    is_ipv6 = request.param == "::"
    if is_ipv6 and not socket.has_dualstack_ipv6():
        pytest.skip("this kernel has no IPv6")
    family = socket.AF_INET6 if is_ipv6 else socket.AF_INET
    with socket.create_server((request.param, 0), family=family, dualstack_ipv6=is_ipv6) as made:
        yield made


def is_reached(server: socket.socket, address: str) -> bool:
    try:
        with socket.create_connection((address, server.getsockname()[1]), timeout=0.3):
            server.accept()[0].close()
            return True
    except TimeoutError:
        return False


def listening(server: socket.socket) -> ListeningSocket:
    return ListeningSocket(server.fileno(), server.getsockname()[1])


def test_only_what_listens_everywhere_is_found(server: socket.socket):
    with socket.create_server((MEANT, 0)) as elsewhere, socket.socket() as not_listening:
        not_listening.bind(("0.0.0.0", 0))
        found = sockets_on_every_interface()
        assert listening(server) in found
        assert not {each.descriptor for each in found} & {elsewhere.fileno(), not_listening.fileno()}


def test_a_confined_port_is_reached_by_its_address_alone(server: socket.socket):
    assert is_reached(server, MEANT)
    assert is_reached(server, OTHER)
    confine(listening(server), MEANT)
    assert is_reached(server, MEANT)
    assert not is_reached(server, OTHER)
    confine(listening(server), OTHER)  # the last word counts
    assert not is_reached(server, MEANT)
    assert is_reached(server, OTHER)


def test_a_connection_that_was_let_in_carries_bytes_both_ways(server: socket.socket):
    confine(listening(server), MEANT)
    data = bytes(range(256)) * 40_000
    with socket.create_connection((MEANT, server.getsockname()[1])) as there, server.accept()[0] as here:
        for one, other in ((there, here), (here, there)):
            got = bytearray()
            one.settimeout(10)
            other.settimeout(10)
            at = 0
            while len(got) < len(data):
                at += one.send(data[at : at + (1 << 16)]) if at < len(data) else 0
                got += other.recv(1 << 16)
            assert got == data


def test_ipv6_has_addresses_of_its_own():
    if not socket.has_dualstack_ipv6():
        pytest.skip("this kernel has no IPv6")
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        confine(listening(server), "::1")
        assert is_reached(server, "::1")
        assert not is_reached(server, MEANT)
        confine(listening(server), MEANT)
        assert not is_reached(server, "::1")
        assert is_reached(server, MEANT)


def test_a_name_means_its_addresses(server: socket.socket):
    confine(listening(server), "localhost")
    assert is_reached(server, MEANT)
    assert not is_reached(server, OTHER)


def test_a_host_without_an_address_is_refused(server: socket.socket):
    with pytest.raises(TransportError, match=r"cannot be kept to 'no-such-host.invalid' \(KVFERRY_HOST\)"):
        confine(listening(server), "no-such-host.invalid")
    assert is_reached(server, OTHER)


def test_a_wait_for_a_connection_ends_in_time(server: socket.socket):
    server.setblocking(True)
    listening(server).set_accept_timeout(0.05)
    with pytest.raises(BlockingIOError):
        server.accept()
