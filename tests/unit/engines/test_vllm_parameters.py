"""What travels with a request, in every form in which gateways send it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.engines.vllm.parameters import (
    LARGEST_ROOM,
    LONGEST_TRANSFER,
    ROOM,
    TRANSFER,
    ReceiveParameters,
    SendParameters,
    answer,
    receive_parameters,
    room_of,
    send_parameters,
)
from kvferry.errors import UsageError

NOTHING_YET = {"remote_engine_id": None, "remote_block_ids": None, "remote_host": None, "remote_port": None}
"""What gateways send a prefill server that know vLLM's NIXL connector."""


def sent(**more: Any) -> SendParameters:
    params = send_parameters({"do_remote_decode": True, "do_remote_prefill": False, **more})
    assert params is not None
    return params


def received(**more: Any) -> ReceiveParameters:
    of_decode = {"do_remote_decode": False, "do_remote_prefill": True, "remote_engine_id": "prefill-0", **more}
    params = receive_parameters(of_decode)
    assert params is not None
    return params


class TestOneAfterTheOther:
    def test_a_room_that_nobody_names_is_the_prefill_servers_choice(self):
        first, second = sent(**NOTHING_YET), sent(**NOTHING_YET)
        assert first.room != second.room
        assert not first.is_known

    def test_the_decode_server_finds_it_by_the_answer_whatever_a_gateway_adds(self):
        params = sent(**NOTHING_YET)
        answered = answer(params, engine="prefill-0", request="cmpl-1", tokens=13)
        handed_on = {**answered, "remote_host": "10.0.0.5"}
        assert receive_parameters(handed_on) == ReceiveParameters(params.room, "prefill-0")

    @pytest.mark.parametrize("parameters", [None, {}, {"do_remote_decode": False}, {"do_remote_prefill": False}])
    def test_a_request_without_either_is_a_servers_own(self, parameters: dict[str, Any] | None):
        assert send_parameters(parameters) is None
        assert receive_parameters(parameters) is None


class TestAtOnce:
    def test_by_a_room(self):
        assert sent(**{ROOM: 9}) == SendParameters(9, is_known=True)
        assert received(**{ROOM: 9}) == ReceiveParameters(9, "prefill-0")

    def test_by_the_name_of_a_transfer_both_sides_have_the_same_room(self):
        name = "xfer-5f0d9a4e-9f3c-4c47-a8e7-5c8c6d1f2b3a"
        params = sent(transfer_id=name)
        assert params.is_known, "pages leave while the prompt is computed"
        assert received(transfer_id=name, remote_bootstrap_addr="http://10.0.0.5:8998").room == params.room

    def test_a_transfer_has_the_same_room_in_every_process_and_version(self):
        """Servers of two versions speak with each other: what a name stands for does not change."""
        assert room_of("xfer-0") == 1715637760395279

    def test_a_room_that_is_named_as_well_wins(self):
        assert sent(transfer_id="xfer-1", **{ROOM: 9}).room == 9
        assert received(transfer_id="xfer-1", **{ROOM: 9}).room == 9

    def test_null_is_no_name(self):
        assert not sent(transfer_id=None, **{ROOM: None}).is_known

    @given(st.lists(st.text(min_size=1, max_size=LONGEST_TRANSFER), min_size=2, max_size=50, unique=True))
    def test_different_transfers_have_different_rooms_that_every_json_reader_knows_exactly(self, names: list[str]):
        rooms = [room_of(name) for name in names]
        assert len(set(rooms)) == len(rooms)
        assert all(0 <= room <= LARGEST_ROOM and int(float(room)) == room for room in rooms)


@pytest.mark.parametrize("side", [sent, received])
class TestMistakes:
    @pytest.mark.parametrize("room", ["9", -1, LARGEST_ROOM + 1, True, 1.5])
    def test_an_impossible_room_is_named(self, side: Callable[..., Any], room: object):
        with pytest.raises(UsageError, match=r"^kv_transfer_params: kvferry_room is .*: it must be an integer from 0"):
            side(**{ROOM: room})

    @pytest.mark.parametrize("transfer", ["", 7, True, ["xfer-1"], {}, "x" * (LONGEST_TRANSFER + 1)])
    def test_an_impossible_transfer_is_named_and_no_more_of_it_than_can_be_read(
        self, side: Callable[..., Any], transfer: object
    ):
        with pytest.raises(UsageError) as raised:
            side(**{TRANSFER: transfer})
        assert str(raised.value).startswith("kv_transfer_params: transfer_id is ")
        assert "it must be a text of 1 to 256 characters" in str(raised.value)
        assert len(str(raised.value)) < 300


def test_a_decode_server_that_is_told_of_no_transfer_says_what_to_do():
    with pytest.raises(UsageError, match=r"neither kvferry_room nor transfer_id is there: hand on what the prefill"):
        received()


@pytest.mark.parametrize("engine", [None, 7, ""])
def test_a_prefill_engine_must_be_named(engine: object):
    with pytest.raises(UsageError, match="remote_engine_id"):
        received(remote_engine_id=engine, transfer_id="xfer-1")
