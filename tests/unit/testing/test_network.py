"""Endpoints of one process: a network of them, a pair, and the fixtures."""

from __future__ import annotations

import ctypes
import socket
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.unit.testing.models import EVERYTHING, pool

from kvferry import DecodeEndpoint, PrefillEndpoint
from kvferry.errors import EndpointClosedError, KVFerryError, RegistryError, TransportError
from kvferry.testing import KnownContents, LocalNetwork
from kvferry.testing.pytest_plugin import MakePair


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("kvferry-")}


def answers(url: str) -> bool:
    parts = urlsplit(url)
    with socket.socket() as client:
        return client.connect_ex((str(parts.hostname), int(parts.port or 0))) == 0


@pytest.mark.parametrize("path", ["direct", "staged"])
@pytest.mark.parametrize("prefix_tokens", [0, 5])
def test_a_pair_moves_every_byte(kvferry_pair: MakePair, path: str, prefix_tokens: int):
    pair = kvferry_pair(pool(EVERYTHING), pool(EVERYTHING, page_tokens=6, seed=1), path=path)
    for room, tokens in enumerate((7, 16, 19)):
        receiver = pair.transfer(room, tokens=tokens, prefix_tokens=prefix_tokens, aux=b"%d" % room)
        assert receiver.aux == b"%d" % room


def test_a_pair_finds_what_nobody_was_to_write(kvferry_pair: MakePair):
    pair = kvferry_pair(pool(), pool(seed=1))
    (page,) = pair.decode_pool.take("kv", 1)
    elements = pair.decode_pool.elements(pair.decode_pool.layout.shards[0], 1)

    def scribble() -> None:
        elements[page, 2, 3, 0] += 1

    pair.decode_transport.on_take = scribble
    said = rf"\n  k of layer 1, page {page}: \d bytes? changed, .* token 2 head 3 dim 0"
    with pytest.raises(AssertionError, match=said):
        pair.transfer(1, tokens=8)


def test_a_pair_finds_what_did_not_arrive(kvferry_pair: MakePair, monkeypatch: pytest.MonkeyPatch):
    pair = kvferry_pair(pool(), pool(seed=1))
    moved: list[int] = []
    move = ctypes.memmove

    def forgetful(destination: int, source: int, num_bytes: int) -> None:
        moved.append(num_bytes)
        move(destination, source, num_bytes - 1 if len(moved) == 2 else num_bytes)

    monkeypatch.setattr(ctypes, "memmove", forgetful)
    said = r"^wrong bytes on rank 0: 1\n  [kv] of layer \d, page \d+: 1 byte not what was to arrive, .* head 3 dim 1$"
    with pytest.raises(AssertionError, match=said):
        pair.transfer(1, tokens=8)


def test_a_pair_raises_what_the_transfer_failed_with(kvferry_pair: MakePair):
    pair = kvferry_pair(pool(), pool())

    def cut(peer: str) -> None:
        raise TransportError("the cable was cut")

    pair.prefill_transport.on_post = cut
    with pytest.raises(KVFerryError, match="the cable was cut"):
        pair.transfer(1, tokens=8)


def test_a_network_closes_all_that_it_started():
    before = threads()
    with LocalNetwork() as network:
        pair = network.pair(pool(), pool())
        url = network.registry_url
        assert pair.prefill.settings.registry_url == url
        assert answers(url)
        assert threads() > before
    for endpoint in (pair.prefill, pair.decode):
        with pytest.raises(EndpointClosedError):
            endpoint.open(1, [0]) if isinstance(endpoint, DecodeEndpoint) else endpoint.open(1)
    assert not answers(url)
    network.close()  # may be called again


def test_engines_may_make_their_endpoints_themselves(kvferry_network: LocalNetwork):
    source, target = pool(), pool(seed=3)
    source.fill(KnownContents(), [2])
    with (
        PrefillEndpoint(
            source.layout, settings=kvferry_network.settings(workers=1), transport=kvferry_network.transport()
        ) as prefill,
        DecodeEndpoint(
            target.layout, settings=kvferry_network.settings(), transport=kvferry_network.transport()
        ) as decode,
    ):
        assert prefill.settings.workers == 1
        prefill.open(1).submit([2], last=True)
        decode.open(1, [9]).wait(10)
    target.check(KnownContents(), [9])


def test_a_rank_that_cannot_be_registered_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvferry.testing.network.WAIT_S", 0.2)
    with (
        LocalNetwork("http://127.0.0.1:1") as network,
        pytest.raises(RegistryError, match=r"is not registered after 0.2 s: .*cannot be reached"),
    ):
        network.prefill(pool())


# ---- the plug-in -------------------------------------------------------------------------------------------------

USING = """
pytest_plugins = ["kvferry.testing.pytest_plugin"]
from kvferry.testing import LocalNetwork, Pair
kept = []

def test_a_network(kvferry_network, kvferry_registry_url):
    assert isinstance(kvferry_network, LocalNetwork)
    assert kvferry_network.registry_url == kvferry_registry_url
    kept.append(kvferry_network)

def test_another(kvferry_network, kvferry_pair, kvferry_registry_url):
    assert kvferry_network is not kept[0]
    assert kvferry_network.registry_url == kvferry_registry_url
    assert callable(kvferry_pair)
"""


def python(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=100, check=False)


def test_the_fixtures_are_there_for_those_who_ask(tmp_path: Path):
    (tmp_path / "test_using.py").write_text(USING)
    run = python("-m", "pytest", "-p", "no:cacheprovider", cwd=tmp_path)
    assert "2 passed" in run.stdout, run.stdout + run.stderr


def test_nobody_elses_pytest_imports_kvferry(tmp_path: Path):
    (tmp_path / "test_other.py").write_text("import sys\ndef test(): assert 'kvferry' not in sys.modules\n")
    run = python("-m", "pytest", "-p", "no:cacheprovider", cwd=tmp_path)
    assert "1 passed" in run.stdout, run.stdout + run.stderr


@pytest.mark.full
def test_pytest_is_needed_for_the_plug_in_alone(tmp_path: Path):
    without = "import sys; sys.modules['pytest'] = None; import kvferry, kvferry.testing"
    assert python("-c", without, cwd=tmp_path).returncode == 0
    run = python("-c", f"{without}, kvferry.testing.pytest_plugin", cwd=tmp_path)
    assert "ModuleNotFoundError: import of pytest halted" in run.stderr
