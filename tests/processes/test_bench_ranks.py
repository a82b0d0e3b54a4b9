"""Ranks of `kvferry bench`, here in threads of one process: what becomes of a variant that cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from tests.support.real_transport import skip_unless_installed
from tests.unit.applications.test_bench_options import options

from kvferry.applications.bench import commands, ranks
from kvferry.applications.bench.options import VARIANTS, Variant
from kvferry.applications.bench.ranks import DecodeRank, PrefillRank
from kvferry.endpoint import DecodeEndpoint
from kvferry.errors import IncompatiblePeerError, PeerDisconnectedError

skip_unless_installed()

SHAPE = options(prefill_tp=1, requests=2, variants="direct,auto")
ONLY = SHAPE.decode.coordinates[0]


@pytest.fixture
def pair() -> Iterator[tuple[PrefillRank, DecodeRank]]:
    prefill, decode = PrefillRank([SHAPE], ONLY), DecodeRank([SHAPE], ONLY)
    for rank in (prefill, decode):
        assert rank.answer(commands.Prepare(0)) == commands.Done()
    yield prefill, decode
    decode.close()
    prefill.close()


def start(pair: tuple[PrefillRank, DecodeRank]) -> tuple[commands.Started, commands.Started]:
    prefill, decode = pair
    started = prefill.answer(commands.Start(None, "run", ("direct", "auto")))
    assert isinstance(started, commands.Started)
    able = tuple(name for name in ("direct", "auto") if name not in started.refused)
    connected = decode.answer(commands.Start(started.registry_url, "run", able))
    assert isinstance(connected, commands.Started)
    return started, connected


def together(
    pair: tuple[PrefillRank, DecodeRank], command: commands.Command
) -> tuple[commands.Answer, commands.Answer]:
    prefill, decode = pair
    with ThreadPoolExecutor(2) as executor:
        sending: Future[commands.Answer] = executor.submit(prefill.answer, command)
        receiving = executor.submit(decode.answer, command)
        return sending.result(60), receiving.result(60)


def test_a_variant_whose_settings_are_impossible_is_refused_and_the_next_one_hosts_the_registry(
    pair: tuple[PrefillRank, DecodeRank], monkeypatch: pytest.MonkeyPatch
):
    impossible = Variant("direct", {"path": "staged", "staging_ring_mib": 0.5, "staging_chunk_mib": 1.0})
    monkeypatch.setattr(ranks, "variant_of", {**VARIANTS, "direct": impossible}.__getitem__)
    started, connected = start(pair)
    assert started.refused["direct"].startswith("SettingsError: ")
    assert "KVFERRY_STAGING_RING_MIB" in started.refused["direct"]
    assert set(started.refused) == {"direct"}
    assert connected.refused == {}
    together(pair, commands.Open("auto", 0, 1, 30))
    sent, received = together(pair, commands.Transfer(30))
    assert isinstance(sent, commands.Sent)
    assert isinstance(received, commands.Received)
    found = pair[1].answer(commands.Check())
    assert isinstance(found, commands.Found)
    assert found.checked.checked_bytes > 0 == found.checked.wrong_bytes


def test_a_variant_that_is_refused_when_it_connects_says_why(
    pair: tuple[PrefillRank, DecodeRank], monkeypatch: pytest.MonkeyPatch
):
    def refuse(self: DecodeEndpoint, engine: str) -> None:
        if engine.endswith("-direct"):
            raise IncompatiblePeerError("pages of 16 tokens against none")

    monkeypatch.setattr(DecodeEndpoint, "connect", refuse)
    _, connected = start(pair)
    assert connected.refused == {"direct": "IncompatiblePeerError: pages of 16 tokens against none"}


def test_a_peer_that_is_gone_is_no_refusal(pair: tuple[PrefillRank, DecodeRank], monkeypatch: pytest.MonkeyPatch):
    def fail(self: DecodeEndpoint, engine: str) -> None:
        raise PeerDisconnectedError("silent for 15 s")

    monkeypatch.setattr(DecodeEndpoint, "connect", fail)
    with pytest.raises(PeerDisconnectedError):
        start(pair)


def test_transfers_that_fail_are_answered_on_both_sides_and_the_next_variant_goes(
    pair: tuple[PrefillRank, DecodeRank],
):
    start(pair)
    together(pair, commands.Open("direct", 0, 1, 30))
    pair[0].transfers[1].abort("planted")
    sent, received = together(pair, commands.Transfer(30))
    for answer in (sent, received):
        assert isinstance(answer, commands.Failed)
        assert "planted" in answer.reason
    together(pair, commands.Open("auto", 0, 1, 30))
    sent, received = together(pair, commands.Transfer(30))
    assert isinstance(sent, commands.Sent)
    assert isinstance(received, commands.Received)
    found = pair[1].answer(commands.Check())
    assert isinstance(found, commands.Found)
    assert found.checked.wrong_bytes == 0


def test_ways_are_summed_by_path_and_reason(pair: tuple[PrefillRank, DecodeRank]):
    start(pair)
    together(pair, commands.Open("auto", 0, 1, 30))
    sent, _ = together(pair, commands.Transfer(30))
    assert isinstance(sent, commands.Sent)
    total = sum(sum(transfer.values()) for transfer in sent.sent_bytes)
    assert sum(way.num_bytes for way in sent.ways) == total == 2 * 64 * 4 * 2 * 4 * 64 * 2
    assert all(way.path and way.why for way in sent.ways)
