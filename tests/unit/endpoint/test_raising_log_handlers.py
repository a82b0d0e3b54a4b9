"""An exchange in which every line of the log raises: it goes as it would have gone."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from tests.support.engines import WAIT_S, Requests
from tests.support.waiting import eventually

from kvferry import TransferState
from kvferry.errors import TransportError

S = TransferState


class Troubles:
    """Raises whenever it is asked, and keeps which threads did. On the main thread what gets by is an Exception."""

    def __init__(self) -> None:
        self.threads: set[str] = set()

    def __call__(self, *_: Any, **__: Any) -> Any:
        self.threads.add(threading.current_thread().name)
        raise OSError(28, "No space left on device") if _is_main() else SystemExit(3)


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextmanager
def raising(where: str, troubles: Troubles) -> Iterator[None]:
    """Has every line of the library's raise in a handler, in a filter, or in the factory of records."""
    ours = [logging.getLogger(name) for name in list(logging.root.manager.loggerDict) if name.startswith("kvferry")]
    top, factory, handler = logging.getLogger("kvferry"), logging.getLogRecordFactory(), logging.Handler()
    handler.handle = troubles  # type: ignore[method-assign]
    level = top.level
    top.setLevel(logging.DEBUG)
    if where == "handler":
        top.addHandler(handler)
    elif where == "filter":
        for each in ours:
            each.addFilter(troubles)
    elif where == "factory":
        logging.setLogRecordFactory(troubles)
    try:
        yield
    finally:
        logging.setLogRecordFactory(factory)
        top.removeHandler(handler)
        for each in ours:
            each.removeFilter(troubles)
        top.setLevel(level)


def failing(error: BaseException, *_: object) -> Any:
    raise error


def exchange(requests: Requests) -> list[tuple[int, str, S, str, str]]:
    """Rooms that end well and in all kinds of ways badly; returns how each ended, on either side."""
    sending, receiving = requests.prefill.transports[0], requests.decode.transports[0]
    prefill, decode = requests.prefill.endpoints[0], requests.decode.endpoints[0]
    ended = [requests.run(room, cuts=(2,)) for room in (1, 2)]

    def begun(room: int) -> Any:
        request = requests.new(room)
        requests.open_decode(request)
        requests.open_prefill(request)
        eventually("it is open", lambda: request.senders[0].state is S.WAITING_FOR_INPUT)
        ended.append(request)
        return request

    begun(3).senders[0].abort("the prefill side's caller gives up")
    begun(4).receivers[0].abort("the decode side's caller gives up")
    begun(5).senders[0].submit(ended[-1].source_pages[0], last=True, ready=partial(failing, RuntimeError("lost")))
    called_back = begun(6)
    for transfer in (called_back.senders[0], called_back.receivers[0]):
        transfer.add_change_callback(partial(failing, RuntimeError("a callback's mistake")))
    requests.submit(called_back)
    called_back.wait(WAIT_S)
    not_posted = begun(7)
    sending.on_post = partial(failing, TransportError("no such queue pair"))
    requests.submit(not_posted)
    not_posted.wait_ended(WAIT_S)
    sending.on_post = None
    sending.notify(receiving.endpoint_name, b"no notification of ours")
    refused = requests.new(8)
    requests.open_decode(refused)
    prefill.refuse(8, "there is no such prompt")
    eventually("it was refused", lambda: refused.receivers[0].state.is_final)
    unread = begun(9)
    receiving.on_take = partial(failing, RuntimeError("what arrives cannot be read"))
    unread.wait_ended(WAIT_S)
    receiving.on_take = None
    ended.append(requests.run(10))
    for each in ended:
        each.wait_ended(WAIT_S)
        for transfer in (*each.senders, *each.receivers):
            assert transfer.wait_pages_reusable(WAIT_S)
    for endpoint in (prefill, decode):
        assert endpoint.is_healthy
        assert not sum(thread.failures for thread in endpoint.health)
    decode.close()
    prefill.close()
    assert not any(thread.is_alive for endpoint in (prefill, decode) for thread in endpoint.health)
    return [
        (each.room, side, transfer.state, type(transfer.error).__name__, type(_cause(transfer.error)).__name__)
        for each in [*ended, refused]
        for side, transfer in [("sends", sender) for sender in each.senders]
        + [("receives", receiver) for receiver in each.receivers]
    ]


def _cause(error: BaseException | None) -> BaseException | None:
    return None if error is None else error.__cause__


@pytest.mark.parametrize("path", ["direct", "staged"])
@pytest.mark.parametrize("where", ["handler", "filter", "factory"])
def test_an_exchange_in_which_every_line_of_the_log_raises_goes_as_without(
    pair: Callable[..., Requests], where: str, path: str
):
    troubles = Troubles()
    as_usual = exchange(pair(path=path, quarantine_s=0.1))
    with raising(where, troubles):
        assert exchange(pair(path=path, quarantine_s=0.1)) == as_usual
    assert len(set(as_usual)) == 19
    threads = {name.rsplit("-", 1)[0] for name in troubles.threads}
    assert {"kvferry-prefill-0-worker", "kvferry-decode"} <= threads
