"""Two sides whose layouts agree, and whose caches do not mean the same; requests that are not the same on both."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import pytest
from tests.support.caches import Model, Shape
from tests.support.engines import WAIT_S, Engines, Requests
from tests.support.waiting import eventually

from kvferry.errors import (
    EndpointClosedError,
    IncompatiblePeerError,
    LayoutError,
    SettingsError,
    TransferError,
    TransferFailedError,
    UsageError,
)
from kvferry.settings import Settings
from kvferry.testing.probe import probe

E4M3 = {"weights": "3f9a", "cache_dtype": "float8_e4m3fn"}
E5M2 = {"weights": "3f9a", "cache_dtype": "float8_e5m2"}
PROMPT = {"prompt": b"1"}


def sides(
    engines: Callable[..., Engines],
    prefill: Mapping[str, str] | None,
    decode: Mapping[str, str] | None,
    *,
    prefill_lets: str | None = None,
    decode_lets: str | None = None,
) -> Requests:
    both = engines()
    return Requests(
        both.prefill(Model(), Shape(tp=2), fingerprint=prefill, may_differ=prefill_lets),
        both.decode(Model(), Shape(), fingerprint=decode, may_differ=decode_lets),
    )


# ---- fingerprints --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prefill", "decode"), [(E4M3, E5M2), (E4M3, None), (None, E5M2)])
def test_caches_that_mean_something_else_are_refused_when_the_sides_connect(
    engines: Callable[..., Engines], prefill: Mapping[str, str] | None, decode: Mapping[str, str] | None
):
    requests = sides(engines, prefill, decode)
    with pytest.raises(IncompatiblePeerError) as caught:
        requests.connect()
    for side, name in ((prefill, requests.prefill.name), (decode, "this decode rank")):
        value = repr(side["cache_dtype"]) if side else "not said"
        assert value in str(caught.value)
        assert name in str(caught.value)
    request = requests.new(1)
    requests.open_decode(request)
    with pytest.raises(TransferFailedError, match="caches do not mean the same") as failed:
        request.receivers[0].wait(WAIT_S)
    assert isinstance(failed.value.__cause__, IncompatiblePeerError)
    assert request.receivers[0].pages_reusable


NEWER = E4M3 | {"weights": "77b0"}


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_fingerprint_that_is_renewed_counts_for_those_that_are_connected(engines: Callable[..., Engines], side: str):
    """An engine may replace its weights in place, before the other one or alone."""
    requests = sides(engines, E4M3, E4M3)
    requests.run(1)
    renewed = requests.prefill.endpoints if side == "prefill" else requests.decode.endpoints
    for endpoint in renewed:
        endpoint.renew(NEWER, "weights were replaced")
    assert renewed[0].status().fingerprint == NEWER
    # All have heard of it: a room that is opened as some do fails with what they hear.
    eventually("no link is left", lambda: not any(probe(each).links.current for each in requests.decode.endpoints))
    request = requests.new(2)
    requests.open_prefill(request)
    requests.open_decode(request)
    for transfer in (*request.receivers, *request.senders):
        with pytest.raises(
            TransferFailedError, match=r"weights is '.*' on prefill engine .*, '.*' on this decode rank"
        ):
            transfer.wait(WAIT_S)
    for endpoint in requests.decode.endpoints if side == "prefill" else requests.prefill.endpoints:
        endpoint.renew(NEWER, "weights were replaced")
    requests.run(3)


@pytest.mark.parametrize(("side", "is_submitted"), [("prefill", True), ("prefill", False), ("decode", True)])
def test_rooms_on_their_way_fail_on_both_sides_where_a_fingerprint_is_renewed(
    engines: Callable[..., Engines], side: str, is_submitted: bool
):
    requests = sides(engines, E4M3, E4M3)
    requests.connect()
    request = requests.new(1)
    requests.open_decode(request)
    if is_submitted:
        requests.open_prefill(request)
    for endpoint in requests.prefill.endpoints if side == "prefill" else requests.decode.endpoints:
        endpoint.renew(NEWER, "weights were replaced")
    for transfer in (*request.receivers, *request.senders):
        with pytest.raises(TransferError, match="weights were replaced"):
            transfer.wait(WAIT_S)
        eventually("its pages are free", lambda each: each.pages_reusable, transfer)


def test_a_closed_endpoint_renews_nothing(engines: Callable[..., Engines]):
    endpoint = sides(engines, E4M3, E4M3).prefill.endpoints[0]
    endpoint.close()
    with pytest.raises(EndpointClosedError):
        endpoint.renew(NEWER, "weights were replaced")


def test_a_prefill_rank_compares_for_itself(engines: Callable[..., Engines], monkeypatch: pytest.MonkeyPatch):
    requests = sides(engines, E4M3, E5M2)
    monkeypatch.setattr("kvferry.protocol.links.rank_link.check_same_fingerprint", lambda *_, **__: ())
    with pytest.raises(
        IncompatiblePeerError,
        match=r"refused: .* cache_dtype is 'float8_e4m3fn' on prefill, 'float8_e5m2' on decode.",
    ):
        requests.connect()


def test_the_same_fingerprint_is_no_obstacle_and_the_status_shows_it(engines: Callable[..., Engines]):
    requests = sides(engines, E4M3, dict(E4M3))
    requests.run(1)
    assert requests.prefill.endpoints[0].status().fingerprint == E4M3
    assert requests.decode.endpoints[0].status().fingerprint == E4M3


def test_a_field_that_a_setting_names_may_differ_and_both_sides_say_so(
    engines: Callable[..., Engines], caplog: pytest.LogCaptureFixture
):
    requests = sides(engines, E4M3, E5M2, prefill_lets="cache_dtype, rope", decode_lets="cache_dtype")
    with caplog.at_level(logging.WARNING, "kvferry"):
        requests.run(1)
    said = [record.getMessage() for record in caplog.records if "KVFERRY_MAY_DIFFER lets it" in record.getMessage()]
    assert len(said) == 3, said  # the decode rank's, and each prefill rank's
    assert all("'float8_e4m3fn'" in each and "'float8_e5m2'" in each for each in said)


def test_one_side_alone_does_not_let_a_field_differ(engines: Callable[..., Engines]):
    requests = sides(engines, E4M3, E5M2, decode_lets="cache_dtype")
    with pytest.raises(IncompatiblePeerError, match=r"prefill rank \d .* refused: .*KVFERRY_MAY_DIFFER=cache_dtype$"):
        requests.connect()


def test_impossible_fields_and_names_are_refused_at_the_start(engines: Callable[..., Engines]):
    with pytest.raises(LayoutError, match="field 'rope' of the fingerprint is ''"):
        engines().prefill(Model(), fingerprint={"rope": ""})
    with pytest.raises(LayoutError, match="field 'rope' of the fingerprint is ''"):
        engines().decode(Model(), fingerprint={"rope": ""})
    with pytest.raises(SettingsError, match=r"may_differ \(KVFERRY_MAY_DIFFER\) is 'cache dtype': 'cache dtype' is no"):
        Settings(may_differ="cache dtype")


# ---- requests ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_decode_first", [True, False])
def test_a_request_with_another_adapter_is_refused_on_every_rank_of_both_sides(
    pair: Callable[..., Requests], *, is_decode_first: bool
):
    requests = pair(Model(), Shape(tp=2), Shape(tp=2))
    requests.connect()
    request = requests.new(1)
    mine, theirs = {**PROMPT, "LoRA adapter": b"a"}, {**PROMPT, "LoRA adapter": b"b"}
    if is_decode_first:
        requests.open_decode(request, depends_on=[theirs, theirs])
        eventually("both wait", lambda: all(len(probe(each).pending) for each in requests.prefill.endpoints))
    requests.open_prefill(request, depends_on=mine)
    requests.submit(request)
    if not is_decode_first:
        requests.open_decode(request, depends_on=[theirs, theirs])
    said = "the decode side's request has another LoRA adapter than the prefill side's"
    for sender in request.senders:
        with pytest.raises(IncompatiblePeerError, match=f"room 1: {said}"):
            sender.wait(WAIT_S)
        assert not sender.stats.writes
    for receiver in request.receivers:
        with pytest.raises(TransferFailedError, match=f"IncompatiblePeerError: room 1: {said}"):
            receiver.wait(WAIT_S)
        assert receiver.wait_pages_reusable(WAIT_S)
    requests.run(2)


def test_one_of_two_decode_ranks_with_another_request_fails_the_room_on_all(pair: Callable[..., Requests]):
    requests = pair(Model(), Shape(), Shape(tp=2))
    request = requests.new(1)
    requests.open_prefill(request, depends_on=PROMPT)
    requests.submit(request)
    requests.open_decode(request, depends_on=[PROMPT, {"prompt": b"2"}])
    request.wait_ended()
    for transfer in (*request.senders, *request.receivers):
        assert "the decode side's request has another prompt than the prefill side's" in str(transfer.error)
    assert not request.senders[0].stats.writes


def test_a_request_that_depends_on_the_same_arrives_and_the_number_may_be_used_again(pair: Callable[..., Requests]):
    requests = pair(Model(), Shape(tp=2), Shape())
    for theirs, arrives in ((PROMPT, True), ({"prompt": b"2"}, False), (PROMPT, True)):
        request = requests.new(1)
        requests.open_decode(request, depends_on=[theirs])
        requests.open_prefill(request, depends_on=PROMPT)
        requests.submit(request)
        request.wait_ended()
        assert (request.receivers[0].error is None) == arrives
        eventually("the room is over", lambda: not requests.decode.endpoints[0].open_rooms)
        eventually("it is over there", lambda: not any(each.open_rooms for each in requests.prefill.endpoints))


def test_impossible_digests_are_refused_where_they_are_given(pair: Callable[..., Requests]):
    requests = pair()
    request = requests.new(1)
    with pytest.raises(UsageError, match="room 1: depends_on says b'' of 'prompt'"):
        requests.open_decode(request, depends_on=[{"prompt": b""}])
    with pytest.raises(UsageError, match="room 1: depends_on says b'' of 'prompt'"):
        requests.open_prefill(request, depends_on={"prompt": b""})
    requests.run(1)
