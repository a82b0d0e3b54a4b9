"""Requests that are handed in layer by layer, as a model computes them, over whole engines."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import pytest
from tests.support.caches import Model, Shape
from tests.support.engines import WAIT_S, Request, Requests
from tests.support.waiting import eventually

from kvferry import GroupPages, Interval, RankLayout, TransferState
from kvferry.errors import ChunkError, TransferAbortedError, TransferFailedError

MODELS = {
    "keys and values": Model(),
    "latents": Model(latent_dim=12),
    "windows and state": Model(window_tokens=8, has_state=True),
    "packed": Model(is_packed=True),
}
SHAPES = {
    "1 to 1": (Shape(), Shape()),
    "2 to 1": (Shape(tp=2), Shape()),
    "1 to 2": (Shape(), Shape(tp=2)),
    "stages": (Shape(pp=2), Shape(tp=2)),
}


def ranges(layout: RankLayout, order: random.Random) -> Iterator[Mapping[str, Interval]]:
    """Ranges of layers that together are all, in any order."""
    made: list[Mapping[str, Interval]] = []
    for component in layout.components:
        total = component.axes[0].size
        cuts = [0, *sorted(order.sample(range(1, total), min(2, total - 1))), total]
        made += [{component.name: Interval(low, high)} for low, high in pairwise(cuts)]
    order.shuffle(made)
    yield from made


def submit_by_layers(requests: Requests, request: Request, seed: int) -> None:
    """Hands in all pages, range by range, on every prefill rank."""
    for rank, sender in enumerate(request.senders):
        memory = requests.prefill.pools[rank]
        pages = {name: GroupPages(each.pages) for name, each in request.source[rank].items()}
        *most, last = ranges(memory.layout, random.Random(f"{seed} {rank}"))
        for layers in most:
            sender.submit(pages, layers=layers)
        aux = b"token" if memory.coordinates.is_aux_writer else None
        sender.submit(pages, layers=last, last=True, aux=aux)


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("path", ["direct", "staged"])
@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("model", MODELS)
def test_every_byte_arrives_whatever_the_order_of_layers(
    pair: Callable[..., Requests], model: str, shapes: str, path: str
):
    requests = pair(MODELS[model], *SHAPES[shapes], path=path, checksums=True)
    for room, tokens, prefix in ((1, 24, 0), (2, 21, 8), (3, 4, 0)):
        requests.wipe()
        request = requests.request(room, tokens, prefix_tokens=prefix)
        requests.open_decode(request, says_tokens=True)
        requests.open_prefill(request)
        submit_by_layers(requests, request, room)
        request.wait(WAIT_S)
        requests.check_every_byte(request)
        assert {receiver.aux for receiver in request.receivers} == {b"token"}


def test_only_the_layers_that_were_handed_in_are_written(pair: Callable[..., Requests]):
    requests = pair()
    requests.wipe()
    request = requests.new(1, 4)
    requests.open_decode(request)
    requests.open_prefill(request)
    sender, receiver = request.senders[0], request.receivers[0]
    sender.submit(request.source_pages[0], layers=Interval(1, 2))
    eventually("they are there", lambda: receiver.stats.chunks == 1)
    assert receiver.state is TransferState.TRANSFERRING
    with pytest.raises(AssertionError):
        requests.check(request)
    sender.submit(request.source_pages[0], layers=Interval(0, 1))
    sender.submit(request.source_pages[0], layers=Interval(2, 4), last=True, aux=b"token")
    request.wait(WAIT_S)
    requests.check(request)


def test_layers_leave_as_their_signals_come(pair: Callable[..., Requests]):
    requests, computed = pair(), [threading.Event() for _ in range(4)]
    request = requests.new(1, 4)
    requests.open_decode(request)
    requests.open_prefill(request)
    sender = request.senders[0]
    for layer, event in enumerate(computed):
        is_last = layer == len(computed) - 1
        sender.submit(
            request.source_pages[0],
            layers=Interval(layer, layer + 1),
            last=is_last,
            aux=b"token" if is_last else None,
            ready=event,
        )
    for number, event in enumerate(computed):
        eventually("so many arrived", lambda n=number: request.receivers[0].stats.chunks == n)
        event.set()
    request.wait(WAIT_S)
    requests.check(request)


def test_a_chunk_that_does_not_fit_costs_nothing(pair: Callable[..., Requests]):
    requests = pair()
    request = requests.new(1, 4)
    requests.open_decode(request)
    requests.open_prefill(request)
    sender, pages = request.senders[0], request.source_pages[0]
    sender.submit(pages, layers=Interval(0, 3))
    with pytest.raises(ChunkError, match="the last chunk comes before layers"):
        sender.submit([], last=True, aux=b"token")
    sender.submit(pages, layers=Interval(3, 4), last=True, aux=b"token")
    request.wait(WAIT_S)
    requests.check(request)


def test_an_abort_in_the_middle_ends_both_sides(pair: Callable[..., Requests]):
    requests = pair()
    request = requests.new(1, 4)
    requests.open_decode(request)
    requests.open_prefill(request)
    request.senders[0].submit(request.source_pages[0], layers=Interval(0, 2))
    eventually("a part is there", lambda: request.receivers[0].stats.chunks == 1)
    request.senders[0].abort("no more of it")
    with pytest.raises(TransferAbortedError):
        request.senders[0].wait(WAIT_S)
    request.wait_ended()
    assert request.senders[0].wait_pages_reusable(WAIT_S)
    assert request.receivers[0].wait_pages_reusable(WAIT_S)
    requests.run(2)


def opened(requests: Requests) -> Request:
    """A request of four pages that both sides have opened."""
    request = requests.new(1, 4)
    requests.open_decode(request)
    requests.open_prefill(request)
    eventually("it is open", lambda: request.senders[0].state is TransferState.WAITING_FOR_INPUT)
    return request


def layer_by_layer(requests: Requests, request: Request, **given: Any) -> None:
    """Hands in four layers, one after the other."""
    for layer in range(4):
        is_last = layer == 3
        aux = b"token" if is_last else None
        layers = Interval(layer, layer + 1)
        request.senders[0].submit(request.source_pages[0], layers=layers, last=is_last, aux=aux, **given)


def num_writes(requests: Requests, request: Request) -> int:
    """How many writes took the request, of which every byte is right."""
    request.wait(WAIT_S)
    requests.check(request)
    return len(request.senders[0].stats.writes)


@pytest.mark.parametrize("path", ["direct", "staged"])
def test_layers_that_wait_while_two_writes_are_on_their_way_leave_together(pair: Callable[..., Requests], path: str):
    requests = pair(path=path)
    transport = requests.prefill.transports[0]
    request = opened(requests)
    transport.held = True
    layer_by_layer(requests, request)
    eventually("all are taken", lambda: requests.prefill.endpoints[0].status().rooms[0].chunks == 4)
    transport.held = False
    assert num_writes(requests, request) == 3, "not one for each of the four layers"


def test_all_layers_leave_together_if_the_decode_side_comes_late(pair: Callable[..., Requests]):
    requests = pair()
    request = requests.new(1, 4)
    requests.open_prefill(request)
    layer_by_layer(requests, request)
    assert request.senders[0].state is TransferState.BOOTSTRAPPING
    requests.open_decode(request)
    assert num_writes(requests, request) == 1


def test_layers_whose_signals_come_together_leave_together(pair: Callable[..., Requests]):
    requests, computed = pair(), threading.Event()
    request = opened(requests)
    layer_by_layer(requests, request, ready=computed)
    eventually(
        "the first is awaited", lambda: "chunk 0 is ready" in requests.prefill.endpoints[0].status().rooms[0].waits_for
    )
    computed.set()
    assert num_writes(requests, request) == 1


def test_a_signal_behind_others_that_raises_fails_the_room(pair: Callable[..., Requests]):
    requests, computed = pair(), threading.Event()
    request = opened(requests)

    def broken() -> bool:
        raise ZeroDivisionError("the device is lost")

    sender, pages = request.senders[0], request.source_pages[0]
    sender.submit(pages, layers=Interval(0, 2), ready=computed)
    sender.submit(pages, layers=Interval(2, 4), last=True, ready=broken)
    computed.set()
    with pytest.raises(TransferFailedError) as failed:
        sender.wait(WAIT_S)
    assert isinstance(failed.value.__cause__, ZeroDivisionError)
    request.wait_ended()
    assert sender.wait_pages_reusable(WAIT_S)


def test_pages_whose_layers_come_one_by_one_are_counted_once(pair: Callable[..., Requests]):
    requests = pair()
    transport = requests.prefill.transports[0]
    request = opened(requests)
    sender = request.senders[0]
    sender.submit(request.source_pages[0], layers=Interval(0, 2))
    eventually("it is written", lambda: request.receivers[0].stats.chunks == 1)
    transport.held = True
    sender.submit(request.source_pages[0], layers=Interval(2, 4), last=True)
    eventually("a write is on its way", lambda: transport.in_flight == 1)
    sender.abort("not needed any more")
    rooms = requests.prefill.endpoints[0].status
    eventually("its pages are counted", lambda: [room.quarantined_pages for room in rooms().rooms] == [4])
    transport.held = False
    assert sender.wait_pages_reusable(WAIT_S)
