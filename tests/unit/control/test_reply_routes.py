"""Through which of its connections a decode rank is answered."""

from __future__ import annotations

import pytest

from kvferry.control.channel import ReplyRoutes, identity_of


def spoke(*identities: str) -> ReplyRoutes:
    routes = ReplyRoutes()
    for identity in identities:
        assert routes.sender_of(identity) == "decode"
    return routes


def test_a_name_and_a_number_make_an_identity_that_tells_whose_it_is():
    routes = ReplyRoutes()
    assert routes.sender_of(identity_of("decode", 3)) == "decode"
    assert routes.to("decode") == ["decode~3"]
    assert routes.to("another") == []


@pytest.mark.parametrize("identity", ["no-number", "no~number", "~", "decode~"])
def test_who_has_no_number_is_its_own_name(identity: str):
    routes = ReplyRoutes()
    name = routes.sender_of(identity)
    assert (name, routes.to(name)) == (identity, [identity])


def test_the_youngest_connection_takes_the_place_of_the_others():
    assert spoke("decode~1", "decode~2").to("decode") == ["decode~2"]


def test_what_an_older_connection_had_left_takes_nothing_from_the_youngest():
    assert spoke("decode~2", "decode~1").to("decode") == ["decode~2", "decode~1"]
    assert spoke("decode~2", "decode~1", "decode~2").to("decode") == ["decode~2"]


def test_whoever_asked_last_is_answered_whatever_number_a_stranger_has():
    assert spoke("decode~1", "decode~999", "decode~2").to("decode") == ["decode~999", "decode~2"]


@pytest.mark.parametrize(("lost", "left"), [("decode~999", ["decode~2"]), ("decode~2", ["decode~999"])])
def test_a_connection_that_is_lost_leaves_the_other(lost: str, left: list[str]):
    routes = spoke("decode~999", "decode~2")
    routes.lost("decode", lost)
    assert routes.to("decode") == left
    routes.lost("decode", left[0])
    assert routes.to("decode") == []


def test_a_stranger_that_has_gone_leaves_no_number_behind():
    routes = spoke("decode~999", "decode~2")
    routes.lost("decode", "decode~999")
    assert routes.sender_of("decode~3") == "decode"
    assert routes.to("decode") == ["decode~3"]
