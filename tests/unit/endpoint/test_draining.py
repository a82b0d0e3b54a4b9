"""Draining: no new rooms, those that are open end, and everyone sees it first."""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Callable
from math import inf
from typing import Any

import httpx
import msgspec
import pytest
from tests.support.caches import Model, Shape, pool
from tests.support.engines import WAIT_S, Engines, Request, Requests
from tests.support.statuses import samples
from tests.support.waiting import eventually

from kvferry import DecodeEndpoint, PrefillEndpoint, RankCoordinates, RegistryClient, Settings, TransferState
from kvferry.control.construction import credentials_of
from kvferry.control.registry_server import RegistryServer
from kvferry.errors import (
    EndpointDrainingError,
    TransferAbortedError,
    TransferFailedError,
    UsageError,
)
from kvferry.protocol.wire.registrations import RankRegistration
from kvferry.testing.probe import probe

SECRET = "a secret that only these tests have"


@pytest.fixture
def requests(pair: Callable[..., Requests]) -> Requests:
    both = pair(observe_port=0)
    both.connect()
    return both


def ends(requests: Requests) -> tuple[PrefillEndpoint, DecodeEndpoint]:
    return requests.prefill.endpoints[0], requests.decode.endpoints[0]


def probed(endpoint: PrefillEndpoint | DecodeEndpoint, probe: str = "readyz") -> tuple[int, str]:
    answer = httpx.get(f"{endpoint.observe_url}/{probe}")
    return answer.status_code, answer.text.strip()


def handed_in(requests: Requests, request: Request) -> None:
    requests.open_prefill(request)
    requests.submit(request)


# ---- which rooms are taken ------------------------------------------------------------------------------------------


def test_a_prefill_endpoint_takes_no_new_rooms_and_finishes_those_that_are_open(requests: Requests):
    prefill, _ = ends(requests)
    open_ = requests.new(1)
    requests.open_prefill(open_)
    prefill.drain()
    assert prefill.is_draining
    assert not prefill.is_drained
    named = f"room 2: prefill engine '{prefill.engine}' is draining and takes no new requests: ask another one"
    with pytest.raises(EndpointDrainingError, match=re.escape(named)):
        prefill.open(2)
    requests.open_decode(open_)
    requests.submit(open_)
    open_.wait()
    eventually("it has drained", lambda: prefill.is_drained)
    prefill.close()


def test_a_room_that_a_decode_rank_has_opened_is_not_new(requests: Requests):
    """It was routed before: the engine may get it after the drain has begun."""
    prefill, _ = ends(requests)
    routed = requests.new(1)
    requests.open_decode(routed)
    eventually("its request is here", lambda: prefill.status().load.pending_rooms == 1)
    prefill.drain()
    assert not prefill.is_drained, "somebody waits for it"
    handed_in(requests, routed)
    routed.wait()
    eventually("it has drained", lambda: prefill.is_drained)


def test_a_decode_rank_that_comes_with_a_new_room_hears_at_once_who_drains(requests: Requests):
    prefill, decode = ends(requests)
    prefill.drain()
    late = requests.new(1)
    requests.open_decode(late)
    with pytest.raises(TransferFailedError, match=f"'{prefill.engine}' is draining.*ask another one"):
        late.receivers[0].wait(5.0)
    eventually("its pages are its caller's", lambda: late.receivers[0].pages_reusable)
    assert decode.open_rooms == 0


def test_all_ranks_of_a_decode_engine_count_as_one_for_a_room(engines: Callable[..., Engines]):
    """The first has opened it before the drain, the second after."""
    both = engines()
    model = Model(layers=2, heads=4)
    requests = Requests(both.prefill(model), both.decode(model, Shape(tp=2)))
    requests.connect()
    prefill = requests.prefill.endpoints[0]
    request = requests.new(1)
    first, second = requests.decode.endpoints
    for_first, for_second = request.destination
    receivers = [first.open(1, _pages(for_first), engine=prefill.engine, tokens=request.tokens)]
    eventually("one has opened it", lambda: prefill.status().load.pending_rooms == 1)
    prefill.drain()
    receivers.append(second.open(1, _pages(for_second), engine=prefill.engine, tokens=request.tokens))
    request.receivers[:] = receivers
    handed_in(requests, request)
    request.wait()


def _pages(given: dict[str, Any]) -> Any:
    return {name: taken.pages for name, taken in given.items()}


def test_within_the_grace_new_rooms_are_taken_and_the_registry_shows_the_drain_already(requests: Requests):
    prefill, decode = ends(requests)
    prefill.drain(grace_s=inf)
    with RegistryClient(prefill.registry_url) as client:
        eventually("the registry says so", lambda: client.engine(prefill.engine).draining)
    assert probed(prefill)[0] == 503
    requests.run(1)
    eventually("nothing is open", lambda: prefill.is_drained)
    prefill.drain(grace_s=0.0)
    with pytest.raises(EndpointDrainingError):
        prefill.open(2)
    prefill.drain(grace_s=inf)
    with pytest.raises(EndpointDrainingError):
        prefill.open(2)
    decode.drain(grace_s=inf)
    assert decode.is_drained


def test_a_grace_that_has_passed_is_over(requests: Requests):
    prefill, decode = ends(requests)
    for endpoint in (prefill, decode):
        endpoint.drain(grace_s=0.05)
        assert not endpoint.is_drained, "requests may still come"
        assert endpoint.wait_drained(10.0)
    with pytest.raises(EndpointDrainingError):
        prefill.open(1)
    with pytest.raises(EndpointDrainingError):
        decode.open(1, [0], engine=prefill.engine)


def test_a_decode_endpoint_takes_no_new_rooms_and_finishes_those_that_are_open(requests: Requests):
    prefill, decode = ends(requests)
    open_ = requests.new(1)
    requests.open_decode(open_)
    decode.drain()
    with pytest.raises(EndpointDrainingError, match=f"decode engine '{decode.engine}' is draining"):
        decode.open(2, [0], engine=prefill.engine)
    assert not decode.is_drained
    handed_in(requests, open_)
    open_.wait()
    assert decode.wait_drained(10.0)
    decode.close()
    assert prefill.open_rooms == 0


def test_an_export_that_nobody_has_come_for_keeps_the_endpoint_until_somebody_has(requests: Requests):
    prefill, _ = ends(requests)
    export = requests.new(1)
    handed_in(requests, export)
    eventually("it is kept", lambda: prefill.status().load.outstanding_exports == 1)
    prefill.drain()
    assert not prefill.wait_drained(0.3)
    requests.open_decode(export)
    export.wait()
    assert prefill.wait_drained(10.0)
    assert prefill.status().load.outstanding_exports == 0


def test_an_endpoint_has_not_drained_while_what_it_sent_last_may_be_on_its_way(pair: Callable[..., Requests]):
    """Its close message would overtake it, and fail the room on the decode side."""
    requests = pair(quarantine_s=3600.0)
    prefill, decode = ends(requests)
    requests.run(1)
    for endpoint in (prefill, decode):
        endpoint.drain()
    assert decode.wait_drained(10.0)
    assert prefill.open_rooms == 0
    assert not prefill.wait_drained(0.2)


def test_what_is_open_for_too_long_is_aborted(requests: Requests):
    prefill, decode = ends(requests)
    export, routed = requests.new(1), requests.new(2)
    handed_in(requests, export)
    requests.open_decode(routed)
    eventually("its request is here", lambda: prefill.status().load.pending_rooms == 1)
    prefill.drain(0.2)
    with pytest.raises(TransferAbortedError, match=r"drains, and this was still open after 0.2 s.*DRAIN_TIMEOUT_S"):
        export.senders[0].wait(10.0)
    with pytest.raises(TransferFailedError, match=r"still open after 0\.2 s"):
        routed.receivers[0].wait(10.0)
    assert prefill.wait_drained(10.0)
    eventually("nothing is open there either", lambda: decode.open_rooms == 0)


def test_a_decode_room_that_is_open_for_too_long_is_aborted(requests: Requests):
    _, decode = ends(requests)
    open_ = requests.new(1)
    requests.open_decode(open_)
    decode.drain(0.2)
    with pytest.raises(TransferAbortedError, match=r"still open after 0\.2 s"):
        open_.receivers[0].wait(10.0)
    assert decode.wait_drained(10.0)


def test_times_cannot_be_negative(requests: Requests):
    for endpoint in ends(requests):
        for wrong in ({"timeout_s": -1.0}, {"grace_s": -1.0}, {"grace_s": float("nan")}):
            with pytest.raises(UsageError, match="neither may be negative"):
                endpoint.drain(**wrong)
        assert not endpoint.is_draining


def test_draining_does_not_wait_for_the_registry(engines: Callable[..., Engines]):
    """An engine's scheduler calls it."""
    prefill = engines().prefill(Model()).endpoints[0]
    registry = probe(prefill).registration.client
    goes_on = threading.Event()
    register = registry.register

    def hangs(registration: RankRegistration) -> float:
        goes_on.wait()
        return register(registration)

    registry.register = hangs  # type: ignore[method-assign]
    done = threading.Thread(target=prefill.drain)
    done.start()
    done.join(5.0)
    assert not done.is_alive()
    goes_on.set()


@pytest.mark.full
def test_of_two_engines_one_is_drained_under_load_and_no_request_fails(engines: Callable[..., Engines]):
    """A gateway looks at the registry now and then; an operator drains one engine, which leaves."""
    both = engines(drain_grace_s=2.0, quarantine_s=0.1)
    model = Model()
    prefills = [both.prefill(model), both.prefill(model)]
    decode = both.decode(model)
    routes = {engine.name: Requests(engine, decode) for engine in prefills}
    (leaving,) = prefills[0].endpoints
    open_: list[Request] = []
    served: Counter[str] = Counter()
    with RegistryClient(leaving.registry_url) as registry:

        def staying() -> list[str]:
            return [each.engine for each in registry.engines() if each.engine in routes and not each.draining]

        known = staying()
        assert sorted(known) == sorted(routes)
        for room in range(120):
            if room % 20 == 0:
                known = staying()
            if room == 50:
                registry.drain(leaving.engine)
            name = known[room % len(known)]
            requests, request = routes[name], routes[name].new(room)
            served[name] += 1
            if room % 3:
                requests.open_decode(request)
                handed_in(requests, request)
            else:
                handed_in(requests, request)
                requests.open_decode(request)
            open_.append(request)
            if len(open_) == 2:
                open_.pop(0).wait()
        for request in open_:
            request.wait()
        assert known == [prefills[1].name]
        assert leaving.wait_drained(WAIT_S)
        assert leaving.open_rooms == 0
        leaving.close()
        routes[prefills[1].name].run(1000)
    assert served[leaving.engine] == 30, "half of the requests, until the gateway looked again"


# ---- who sees it ----------------------------------------------------------------------------------------------------


def test_the_registry_shows_how_far_it_is(requests: Requests):
    prefill, _ = ends(requests)
    request = requests.new(1)
    requests.open_prefill(request)
    with RegistryClient(prefill.registry_url) as client:
        assert not client.engine(prefill.engine).draining
        prefill.drain()

        def shown() -> tuple[bool, bool, int]:
            (rank,) = client.engine(prefill.engine).registrations
            return rank.draining, rank.drained, rank.open_rooms

        eventually("one room is open", lambda: shown() == (True, False, 1))
        requests.open_decode(request)
        requests.submit(request)
        request.wait()
        eventually("nothing is open", lambda: shown() == (True, True, 0))
        prefill.close()
        assert client.engine(prefill.engine).registrations == ()


@pytest.mark.full
def test_an_operator_s_word_at_the_registry_drains_the_endpoint(engines: Callable[..., Engines]):
    both = engines(drain_grace_s=0.0)
    requests = Requests(both.prefill(Model()), both.decode(Model()))
    requests.connect()
    prefill, _ = ends(requests)
    with RegistryClient(prefill.registry_url) as client:
        assert client.drain(prefill.engine) == (prefill.transport.endpoint_name,)
        eventually("the rank has heard of it", lambda: prefill.is_draining)
        eventually("it has drained", lambda: client.engine(prefill.engine).registrations[0].drained)


def test_probes_say_whether_it_lives_and_takes_requests(requests: Requests):
    for endpoint in ends(requests):
        eventually("it is ready", lambda endpoint=endpoint: probed(endpoint) == (200, "ok"))
        assert probed(endpoint, "livez") == (200, "ok")
        endpoint.drain()
        status, why = probed(endpoint)
        assert status == 503
        assert f"engine '{endpoint.engine}' is draining" in why
        assert probed(endpoint, "livez") == (200, "ok")
        assert httpx.get(f"{endpoint.observe_url}/health").status_code == 200


def test_a_prefill_endpoint_that_is_not_registered_is_not_ready(engines: Callable[..., Engines]):
    with engines(registry_url="http://127.0.0.1:9", observe_port=0) as made:
        memory = pool(Model(), Shape(), RankCoordinates())
        with PrefillEndpoint(
            memory.layout,
            engine="lonely",
            settings=made.settings(registry_url="http://127.0.0.1:9", observe_port=0),
            transport=made.local.transport(),
            host_registry=False,
        ) as endpoint:
            status, why = probed(endpoint)
            assert status == 503
            assert why.startswith("not registered")


def test_a_thread_that_has_ended_makes_the_probe_fail(requests: Requests, monkeypatch: pytest.MonkeyPatch):
    prefill, _ = ends(requests)
    whole = prefill.status()
    dead = msgspec.structs.replace(whole.threads[0], is_alive=False)
    monkeypatch.setattr(type(prefill), "health", property(lambda self: (dead, *whole.threads[1:])))
    status, why = probed(prefill, "livez")
    assert (status, why) == (503, f"threads of this endpoint have ended: {dead.name}")


# ---- over HTTP ------------------------------------------------------------------------------------------------------


def test_a_process_of_this_machine_may_drain_an_endpoint_without_a_secret(pair: Callable[..., Requests]):
    both = pair(observe_port=0, drain_grace_s=0.0)
    for endpoint in ends(both):
        answer = httpx.post(f"{endpoint.observe_url}/drain")
        assert answer.status_code == 202
        assert json.loads(answer.text)["is_draining"]
        assert endpoint.wait_drained(10.0)
        assert httpx.get(f"{endpoint.observe_url}/drain").status_code == 405


def test_with_a_secret_only_those_who_know_it_may(pair: Callable[..., Requests]):
    settings = Settings(secret=SECRET)
    credentials = credentials_of(settings)
    assert credentials is not None
    with RegistryServer(port=0, token=credentials.registry_token) as registry:
        both = pair(registry_url=registry.url, observe_port=0, secret=SECRET)
        for endpoint in ends(both):
            for headers in (
                {},
                {"authorization": "Bearer x"},
                {"authorization": f"Bearer {credentials.registry_token}"},
            ):
                answer = httpx.post(f"{endpoint.observe_url}/drain", headers=headers)
                assert answer.status_code == 401
                assert "KVFERRY_SECRET" in answer.text
                assert SECRET not in answer.text
            assert not endpoint.is_draining
            answer = httpx.post(
                f"{endpoint.observe_url}/drain", headers={"authorization": f"Bearer {credentials.observe_token}"}
            )
            assert answer.status_code == 202
            assert endpoint.is_draining


def test_gauges_say_what_there_is_to_do(requests: Requests):
    prefill, decode = ends(requests)

    def gauges(endpoint: PrefillEndpoint | DecodeEndpoint) -> list[float]:
        found = samples(httpx.get(f"{endpoint.observe_url}/metrics").text)
        names = ("ready", "draining", "open_rooms", "waiting_rooms", "pending_rooms", "outstanding_exports")
        return [found[name,] for name in names]

    export, routed = requests.new(1), requests.new(2)
    handed_in(requests, export)
    requests.open_decode(routed)
    eventually("both are counted", lambda: gauges(prefill) == [1, 0, 1, 1, 1, 1])
    assert gauges(decode) == [1, 0, 1, 1, 0, 0]
    prefill.drain()
    requests.open_decode(export)
    handed_in(requests, routed)
    export.wait()
    routed.wait()
    assert routed.senders[0].state is TransferState.SUCCESS
    eventually("nothing is open", lambda: gauges(prefill) == [0, 1, 0, 0, 0, 0])
    assert samples(httpx.get(f"{prefill.observe_url}/metrics").text)["bytes_in_flight",] == 0
