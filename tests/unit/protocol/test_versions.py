"""Two sides agree on a version, whichever is the newer one; what one requires of the other is named."""

from __future__ import annotations

import itertools

import pytest
from tests.support.registries import rank

from kvferry.errors import IncompatiblePeerError, SettingsError, VersionError
from kvferry.protocol.wire import codec
from kvferry.protocol.wire.messages import Hello
from kvferry.protocol.wire.versions import (
    PROTOCOL_VERSION,
    SPOKEN,
    SpokenVersions,
    Versions,
    agreed,
    check_required,
    check_spoken,
)

RANGES = [Versions(oldest, newest) for newest in range(6) for oldest in range(newest + 1)]
PAIRS = list(itertools.product(RANGES, RANGES))
"""Every case, in small."""


def test_both_sides_come_to_the_same_version_the_newest_that_both_speak():
    for mine, theirs in PAIRS:
        both = [each for each in range(10) if each in mine and each in theirs]
        assert mine.shared_with(theirs) == theirs.shared_with(mine) == max(both, default=None), (mine, theirs)


def test_releases_that_are_one_version_apart_always_understand_each_other():
    """Each speaks its own version and the one before, as every release must."""
    for first, second in itertools.product(range(6), range(6)):
        one, other = Versions(first, first + 1), Versions(second, second + 1)
        assert (one.shared_with(other) is not None) == (abs(first - second) <= 1)


def test_a_message_in_the_version_that_was_agreed_on_is_read_by_both():
    for mine, theirs in PAIRS:
        version = mine.shared_with(theirs)
        if version is not None:
            data = codec.encode(Hello(), version)
            assert codec.decode_to_prefill(data, mine) == codec.decode_to_prefill(data, theirs) == Hello()
            assert codec.version_of(data) == version == agreed(mine, theirs, peer="it")


def test_ranges_that_do_not_meet_are_refused_with_both_and_the_side_to_upgrade():
    apart = [pair for pair in PAIRS if pair[0].shared_with(pair[1]) is None]
    assert len(apart) > 50
    for mine, theirs in apart:
        is_mine_older = mine.newest < theirs.newest
        side, version = ("this", theirs.oldest) if is_mine_older else ("the peer's", mine.oldest)
        with pytest.raises(VersionError) as caught:
            agreed(mine, theirs, peer="prefill rank 3 of 'p'")
        assert str(caught.value) == (
            f"prefill rank 3 of 'p' speaks {theirs}, this side {mine}: upgrade kvferry on {side} side first, to a "
            f"release that speaks version {version}"
        )
        with pytest.raises(VersionError, match=f"upgrade kvferry on {side} side first"):
            check_spoken(theirs.newest if is_mine_older else theirs.oldest, mine)


def test_this_release_is_the_first():
    assert Versions(1, PROTOCOL_VERSION) == SPOKEN == Versions(1, 1)
    assert (str(SPOKEN), str(Versions(1, 2))) == ("protocol version 1", "protocol versions 1 to 2")


@pytest.mark.parametrize(("oldest", "newest"), [(3, 2), (-1, 2)])
def test_a_range_holds_at_least_one_version(oldest: int, newest: int):
    with pytest.raises(ValueError, match="there is none"):
        Versions(oldest, newest)


# ---- what ranks register -------------------------------------------------------------------------------------------


def test_a_rank_that_names_no_newest_version_speaks_one():
    assert rank(protocol_version=12).spoken == Versions(12, 12)
    assert rank(protocol_version=12, newest_protocol_version=13).spoken == Versions(12, 13)


@pytest.mark.parametrize("newest", [-1, 11, 2**31, 10**400])
def test_the_newest_version_is_bounded(newest: int):
    with pytest.raises(SettingsError, match="newest_protocol_version"):
        rank(protocol_version=12, newest_protocol_version=newest)


# ---- whom a prefill rank answers in which version ------------------------------------------------------------------


def test_a_decode_rank_is_answered_in_the_version_in_which_it_last_spoke():
    spoken = SpokenVersions(SPOKEN)
    assert spoken.of("d0") == SPOKEN.oldest, "everybody reads the oldest"
    spoken.record("d0", 2)
    spoken.record("d1", 1)
    assert (spoken.of("d0"), spoken.of("d1")) == (2, 1)
    spoken.record("d0", 1)
    assert spoken.of("d0") == 1


# ---- what one side requires of the other ---------------------------------------------------------------------------


def test_what_is_required_and_not_known_is_named():
    names = ("", "a", "b", "ab", "abc")
    for required, known in itertools.product(names, names):
        unknown = sorted(set(required) - set(known))
        if not unknown:
            check_required(required, known, peer="the peer")
            continue
        with pytest.raises(IncompatiblePeerError) as caught:
            check_required(required, known, peer="decode rank 0 of 'd'")
        listed = ", ".join(repr(each) for each in unknown)
        assert str(caught.value).startswith(f"decode rank 0 of 'd' requires {listed}, which kvferry ")
        assert str(caught.value).endswith(" of this side does not know: upgrade kvferry on this side first")
