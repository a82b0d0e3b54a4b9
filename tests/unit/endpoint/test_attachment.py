"""What a prefill rank keeps for a decode rank, and what it selects from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from kvferry.endpoint.prefill import attachment, decode_ranks
from kvferry.endpoint.prefill.attachment import Attachment, attach
from kvferry.endpoint.prefill.decode_ranks import DecodePeer, EarlierUndone, HangingWrite
from kvferry.endpoint.prefill.paths import SendingStaging
from kvferry.endpoint.runtime.platform import SystemPlatform
from kvferry.errors import KVFerryError, LayoutError, PeerDisconnectedError, TransportError
from kvferry.layout import RankCoordinates, RankLayout, attention_components, shard_from_tensors
from kvferry.plan import Piece, Unit, selectors
from kvferry.plan.requests.moves import Move
from kvferry.protocol.wire.field_types import Identity
from kvferry.protocol.wire.messages import Attach
from kvferry.settings import Settings
from kvferry.transport import InProcessNetwork, InProcessTransport, TransferHandle

K, _ = attention_components(num_layers=3, num_kv_heads=2, head_dim=4, dtype="uint8")
TOKEN_BYTES = 8


def rank(
    network: InProcessNetwork, page_tokens: int, pages: int
) -> tuple[InProcessTransport, RankLayout, list[object]]:
    tensors = [np.zeros((pages, page_tokens, 2, 4), np.uint8) for _ in range(3)]
    layout = RankLayout(shards=(shard_from_tensors(K, tensors, dims=("page", "token", "head", "dim")),))
    transport = InProcessTransport(network)
    transport.register(layout.regions(), layout.device)
    return transport, layout, [*tensors]


@pytest.fixture
def attaching() -> Iterator[Callable[..., Attachment]]:
    """Attaches pages of 4 tokens to pages of 2, three layers."""
    network = InProcessNetwork()
    here, layout, ours = rank(network, 4, 10)
    there, other, theirs = rank(network, 2, 30)
    message = Attach(
        endpoint=there.endpoint_name,
        engine="decode",
        coordinates=RankCoordinates(),
        layout=other,
        attempt=1,
        pieces=(Piece(K.name, K.whole, 0, (0,)),),
        transport=there.name,
        transport_metadata=there.metadata(),
    )
    yield partial(
        attach,
        message,
        mine=Identity(
            endpoint=here.endpoint_name,
            engine="prefill",
            coordinates=RankCoordinates(),
            layout=layout,
            transport=here.name,
            host="",
        ),
        transport=here,
        staging=SendingStaging(Settings(path="direct"), layout, here, SystemPlatform()),
    )
    del ours, theirs


@pytest.fixture
def attached(attaching: Callable[..., Attachment]) -> Attachment:
    return attaching()


def prepared_rows(attached: Attachment) -> int:
    """Rows, of both sides, that the transport keeps for this peer: its memory grows with them."""
    return sum(each.local.rows + each.remote.rows for each in attached.prepared.values())


def prepared_descriptors(attached: Attachment) -> int:
    return sum(each.local.count + each.remote.count for each in attached.prepared.values())


def test_what_is_prepared_is_counted(attached: Attachment):
    """Pages lie one behind the other: a row for each layer stands for all units of all pages."""
    assert prepared_rows(attached) == 3 + 3
    assert prepared_descriptors(attached) == 3 * 20 + 3 * 30
    attached.prepare(Unit.TOKEN)
    assert prepared_rows(attached) == 2 * (3 + 3)
    assert prepared_descriptors(attached) == 3 * 20 + 3 * 30 + 3 * 40 + 3 * 60
    attached.prepare(Unit.TOKEN)
    assert prepared_rows(attached) == 2 * (3 + 3)
    attached.release()
    assert prepared_rows(attached) == prepared_descriptors(attached) == 0


def test_selectors_are_made_once_for_all_chunks(attached: Attachment, monkeypatch: pytest.MonkeyPatch):
    made: list[Any] = []

    def counted(*args: Any, **named: Any) -> Any:
        made.append(args)
        return selectors(*args, **named)

    monkeypatch.setattr(attachment, "selectors", counted)
    elected = attached.elected(1, 0)
    unit = np.zeros(1, np.int64)
    for page in range(5):
        pages = np.array([page])
        selected = attached.select(Unit.WHOLE, elected, [Move(0, pages, unit, pages, unit, pages)])
        assert selected.local_indices.tolist() == [2 * page, 20 + 2 * page, 40 + 2 * page]
        assert selected.remote_indices.tolist() == [page, 30 + page, 60 + page]
    assert len(made) == 1


def test_moves_along_several_routes_follow_each_other(attached: Attachment):
    (route,) = attached.elected(1, 0)
    first, second, fifth = np.array([0]), np.array([1]), np.array([5])
    moves = [Move(number, np.array([number]), second, fifth, first, fifth) for number in range(2)]
    selected = attached.select(Unit.WHOLE, [route, route], moves)
    assert selected.local_indices.tolist() == [1, 21, 41, 3, 23, 43]
    assert selected.remote_indices.tolist() == [5, 35, 65] * 2


@pytest.mark.parametrize("kind", [TransportError, PeerDisconnectedError, LayoutError])
def test_a_write_that_measures_and_fails_is_remembered(
    attaching: Callable[..., Attachment], monkeypatch: pytest.MonkeyPatch, kind: type[KVFerryError]
):
    """What was sent of it may arrive in a ring that others get."""

    def fail(*_: object) -> None:
        raise kind("the wire does not work")

    monkeypatch.setattr(SendingStaging, "paths_to", fail)
    remembered: list[str] = []
    with pytest.raises(kind):
        attaching(broken_off=lambda: remembered.append("d0"))
    assert remembered == (["d0"] if issubclass(kind, TransportError) else [])


def test_a_write_that_measures_and_hangs_is_remembered_once_it_fails():
    """Before it is over, after which the decode rank may attach."""
    log: list[str] = []
    peer: Any = SimpleNamespace(
        name="d0", broken_off=lambda: log.append("broken off"), post=lambda _: log.append("over")
    )
    write = HangingWrite(peer, TransferHandle(), Mock())
    write.failed(TransportError("it broke"), is_read=False)
    assert log == ["broken off"]
    write.settled(TransportError("it broke"))
    assert log == ["broken off", "over"]
    assert write.receiver == "d0"


def test_a_decode_rank_that_asked_often_while_it_had_to_wait_is_answered_once(monkeypatch: pytest.MonkeyPatch):
    """It asks with every heartbeat, and an earlier connection may be undone late, or never."""
    monkeypatch.setattr(decode_ranks, "attach", lambda *_, **__: Mock())
    _, layout, _ = rank(InProcessNetwork(), 2, 1)
    context, worker = Mock(), Mock()
    peer = DecodePeer("d0", Mock(), context, attempt=1, must_wait=True, on_undone=Mock(), now=0.0)
    for _ in range(1000):
        peer.handle(Attach("d0", 1, "decode", RankCoordinates(), layout, (), "in-process", b""), worker)
    context.send.assert_not_called()
    peer.handle(EarlierUndone(), worker)
    context.send.assert_called_once()


def test_no_write_begins_once_lists_are_being_given_back(attached: Attachment):
    unused: list[str] = []
    assert attached.begin_write()
    attached.retire(lambda: unused.append("now"))
    assert not attached.begin_write()
    assert not unused, "a write uses them still"
    attached.end_write()
    assert unused == ["now"]
    assert not attached.begin_write()
