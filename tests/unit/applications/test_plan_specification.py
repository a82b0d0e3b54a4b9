"""How a side of `kvferry plan` is written."""

from __future__ import annotations

import pytest

from kvferry.applications.plan.specification import SideSpecification, parse_side
from kvferry.errors import SettingsError
from kvferry.layout import contiguous, interleaved, zigzag


def parse(text: str) -> SideSpecification:
    return parse_side(text, option="--prefill")


def test_sizes():
    assert parse("tp=4,pp=2,dp=3,ep=8") == SideSpecification(tp=4, pp=2, dp=3, ep=8)
    assert parse("") == parse("tp=1") == SideSpecification()


def test_uneven_stages_say_how_many_there_are():
    assert parse("tp=3,stages=7+8") == SideSpecification(tp=3, pp=2, stages=(7, 8))
    assert parse("pp=2,stages=7+8").stages == (7, 8)


@pytest.mark.parametrize(
    ("text", "partition"),
    [
        ("cp=4", contiguous(4)),
        ("cp=4:contiguous", contiguous(4)),
        ("cp=4:contiguous:16", contiguous(4, 16)),
        ("cp=4:zigzag", zigzag(4)),
        ("cp=4:interleaved", interleaved(4, 1)),
        ("cp=4:interleaved:16", interleaved(4, 16)),
    ],
)
def test_how_tokens_are_partitioned(text: str, partition: object):
    assert parse(text).partition == partition
    assert parse(text).cp == 4


def test_a_request_lives_in_one_data_parallel_group():
    ranks = parse("tp=2,pp=2,cp=2,dp=3").coordinates
    assert [rank.group_rank for rank in ranks] == list(range(8))
    assert {rank.dp_rank for rank in ranks} == {0}
    assert {rank.dp_size for rank in ranks} == {3}


def test_draft_layers_are_asked_for_by_name():
    assert parse("tp=2,draft").has_draft
    assert not parse("tp=2").has_draft


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("tp=4,xp=2", "'xp=2'"),
        ("tp=0", "'tp=0'"),
        ("tp", "'tp'"),
        ("tp=-1", "'-1'"),
        ("tp=1e3", "'1e3'"),
        ("tp=2,tp=2", "'tp' appears twice"),
        ("stages=7+x", "'x'"),
        ("stages=", "'stages='"),
        ("cp=2:sideways", "'cp=2:sideways'"),
        ("cp=2:interleaved:0", "'cp=2:interleaved:0'"),
        ("cp=2:zigzag:4", "'cp=2:zigzag:4'"),
        ("draft=1", "'draft=1'"),
    ],
)
def test_what_is_not_understood_is_named_together_with_the_form(text: str, named: str):
    with pytest.raises(SettingsError) as caught:
        parse(text)
    assert named in str(caught.value)
    assert "--prefill" in str(caught.value)
    assert "stages=7+8" in str(caught.value)


def test_stages_that_contradict_pp_are_refused():
    with pytest.raises(SettingsError, match="pp=3, but stages=7\\+8 has 2"):
        parse("pp=3,stages=7+8")


def test_the_short_form_names_what_is_divided():
    assert parse("tp=4,stages=7+8,cp=2:interleaved:16,dp=2,ep=8,draft").short == (
        "TP 4, PP 7+8, CP 2 interleaved by 16, DP 2, EP 8, draft"
    )
    assert parse("dp=8").short == "DP 8"
    assert parse("").short == "TP 1"
