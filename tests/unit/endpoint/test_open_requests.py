"""What an open request carries to which prefill rank: page numbers only where they are written to."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.support.caches import Model, Shape
from tests.support.engines import Requests

from kvferry.protocol.links.link import Link
from kvferry.protocol.links.rank_link import Send
from kvferry.protocol.wire import messages

PLAIN = Model(layers=4, heads=4, head_dim=2, dtype="uint8")
LATENT = Model(layers=2, latent_dim=8, dtype="uint8")
HYBRID = Model(layers=3, heads=2, head_dim=2, window_tokens=9, has_state=True, dtype="float16")


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, messages.OpenRoom]]:
    """Every open request that is sent, with the prefill rank that it goes to."""
    sent: list[tuple[int, messages.OpenRoom]] = []
    send = Link.send

    def recorded(link: Link, engine_rank: int, message: messages.NumberedToPrefill) -> list[Send]:
        if isinstance(message, messages.OpenRoom):
            sent.append((engine_rank, message))
        return send(link, engine_rank, message)

    monkeypatch.setattr(Link, "send", recorded)
    return sent


@pytest.mark.parametrize("model", [PLAIN, LATENT], ids=["heads", "latent"])
def test_of_as_many_prefill_ranks_one_is_told_the_page_numbers_of_a_decode_rank(
    pair: Callable[..., Requests], opened: list[tuple[int, messages.OpenRoom]], model: Model
):
    """Also of those that all hold the same: one is elected for each room and decode rank."""
    requests = pair(model, Shape(tp=4), Shape(tp=4))
    for room in range(5):
        requests.run(room, cuts=(2,))
        mine = [(rank, message) for rank, message in opened if message.room == room]
        assert sorted(rank for rank, _ in mine) == sorted([*range(4)] * 4), "every rank learns of every receiver"
        assert sum(bool(message.groups) for _, message in mine) == 4


def test_a_pipeline_stage_is_told_the_page_numbers_of_the_groups_that_it_fills(
    pair: Callable[..., Requests], opened: list[tuple[int, messages.OpenRoom]]
):
    requests = pair(HYBRID, Shape(pp=3), Shape())
    requests.wipe()
    request = requests.request(1, 29)
    requests.open_decode(request, says_tokens=True)
    requests.open_prefill(request)
    requests.advance(request, 29)
    request.wait()
    requests.check_every_byte(request)
    assert {rank: sorted(group.name for group in message.groups) for rank, message in opened} == {
        0: ["kv", "state"],
        1: ["state", "window-9"],
        2: ["kv", "state"],
    }
