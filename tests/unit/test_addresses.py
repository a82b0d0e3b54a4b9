"""Which address peers are told where none is set; `tests/processes/test_hosts.py` finds it between hosts."""

from __future__ import annotations

import socket

import pytest

from kvferry import addresses
from kvferry.addresses import address_towards_registry, default_address, source_address, with_found_address
from kvferry.errors import SettingsError
from kvferry.settings import Settings

SECRET = "s" * 20
ROUTES = {"10.0.0.9": "10.0.0.7", "fd00::9": "fd00::7", "192.0.2.1": "10.0.0.8"}
"""By where packets go, the address that they leave from. The last is where nobody is."""


@pytest.fixture(autouse=True)
def _routes(monkeypatch: pytest.MonkeyPatch) -> None:
    def known(host: str, *_: object, **__: object) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        names = {"both": ["fd00::9", "10.0.0.9"], "unroutable": ["10.9.9.9"]}
        if host == "not-yet-known":
            raise socket.gaierror(-2, "Name or service not known")
        found = names.get(host, [host])
        return [(socket.AF_INET6 if ":" in each else socket.AF_INET, 0, 0, "", (each, 9)) for each in found]

    monkeypatch.setattr(socket, "getaddrinfo", known)
    monkeypatch.setattr(addresses, "source_address", lambda _, address: ROUTES.get(address))


def settings(registry: str, host: str = "0.0.0.0") -> Settings:
    return Settings(host=host, registry_url=registry, secret=SECRET)


@pytest.mark.parametrize(
    ("registry", "host", "found"),
    [
        ("http://10.0.0.9:8998", "0.0.0.0", "10.0.0.7"),
        ("http://[fd00::9]:8998", "::", "fd00::7"),
        ("http://both:8998", "::", "fd00::7"),
        ("http://both:8998", "0.0.0.0", "10.0.0.7"),  # who listens on IPv4 alone is not reached by IPv6
        ("http://not-yet-known:8998", "0.0.0.0", "10.0.0.8"),  # a name that comes up later: the default route
        ("etcd://10.9.9.9:1,10.0.0.9:2", "0.0.0.0", "10.0.0.7"),  # one of several is enough
    ],
)
def test_peers_are_told_the_address_that_packets_to_the_registry_leave_from(registry: str, host: str, found: str):
    told = with_found_address(settings(registry, host))
    assert told.advertise_host == found
    assert told.shared_secret == SECRET, "nothing else is changed"


def test_what_is_set_is_told():
    given = Settings(host="0.0.0.0", advertise_host="me", registry_url="http://10.0.0.9:1", secret=SECRET)
    assert with_found_address(given) is given
    given = Settings(host="10.0.0.3", registry_url="http://10.0.0.9:1", secret=SECRET)
    assert with_found_address(given).advertise_host is None, "where it listens is where it is reached"


@pytest.mark.parametrize("registry", ["http://unroutable:1", "http://[fd00::9]:1"])
def test_without_a_way_to_the_registry_a_sentence_says_what_to_set(registry: str):
    with pytest.raises(SettingsError, match=r"KVFERRY_HOST.*no route.*set advertise_host \(KVFERRY_ADVERTISE_HOST\)"):
        with_found_address(settings(registry))


def test_a_registry_on_this_machine_tells_nothing():
    assert address_towards_registry(Settings()) is None


def test_the_system_says_where_packets_leave_from():
    assert source_address(socket.AF_INET, "127.0.0.9") == "127.0.0.1"
    assert source_address(socket.AF_INET, "255.255.255.255") is None, "there is no such way"


@pytest.mark.parametrize("left_from", ["fe80::7%eth0", "169.254.1.7", "0.0.0.0"])
def test_an_address_that_peers_cannot_use_is_none(monkeypatch: pytest.MonkeyPatch, left_from: str):
    monkeypatch.setattr(socket.socket, "connect", lambda *_: None)
    monkeypatch.setattr(socket.socket, "getsockname", lambda _: (left_from, 9))
    assert source_address(socket.AF_INET, "10.0.0.9") is None


def test_the_default_route_has_an_address(monkeypatch: pytest.MonkeyPatch):
    assert default_address() == "10.0.0.8"
    monkeypatch.setattr(addresses, "source_address", lambda *_: None)
    assert default_address() is None
