"""What the enumeration of every state finds of the planted faults, and how near the first state."""

from __future__ import annotations

from dataclasses import dataclass

from proof.enumeration.world_states import Shape
from proof.simulation.laws import Law

SMALL = Shape(prefills=1, decodes=1, chunks=2, faults=1)
ONE_CHUNK = Shape(prefills=1, decodes=1, chunks=1, faults=1)
TWO_FAULTS = Shape(prefills=1, decodes=1, chunks=1, faults=2)
FOUR_CHUNKS = Shape(prefills=1, decodes=1, chunks=4, faults=0)


@dataclass(frozen=True, slots=True)
class Nearest:
    """The shortest way on which a law breaks.

    Attributes:
        moves: how many it takes.
        shape: what is enumerated.
    """

    law: Law
    moves: int
    shape: Shape = SMALL


SOON: dict[str, Nearest] = {
    "a stranger's abort raises": Nearest(Law.NEVER_RAISES, 3),
    "rings overwritten before they are read": Nearest(Law.OWN_PAGES_ONLY, 4, FOUR_CHUNKS),
    "acknowledgement before the last handle": Nearest(Law.NO_REUSE_UNDER_A_READ, 4),
    "finish said while writes fly": Nearest(Law.NO_REUSE_UNDER_A_READ, 4),
    "one write ends for all": Nearest(Law.NO_REUSE_UNDER_A_READ, 5),
    "pages released on abort without drain": Nearest(Law.NO_WRITE_AFTER_RELEASE, 5),
    "pages released on timeout without quarantine": Nearest(Law.NO_WRITE_AFTER_RELEASE, 5),
    "a source given back with the error of its write": Nearest(Law.NO_REUSE_UNDER_A_READ, 5, ONE_CHUNK),
    "a chunk written twice": Nearest(Law.NO_REUSE_UNDER_A_READ, 6),
    "drained while writes fly": Nearest(Law.NO_WRITE_AFTER_RELEASE, 7),
    "an abort is kept from its room": Nearest(Law.NO_WRITE_AFTER_RELEASE, 7, ONE_CHUNK),
    "no time to settle after a failed write": Nearest(Law.NO_WRITE_AFTER_RELEASE, 9),
    "a thawed decode rank trusts Drained at once": Nearest(Law.NO_WRITE_AFTER_RELEASE, 9),
    "a second Drained ends the wait for what had been sent": Nearest(Law.NO_WRITE_AFTER_RELEASE, 11),
}
"""Found after a few thousand states."""

CLOSED: dict[str, Nearest] = {
    "nothing sent again": Nearest(Law.ENDS, 2),
    "a failed receiver tells nobody": Nearest(Law.ENDS, 2),
    "aborts do not say which open request they take back": Nearest(Law.ENDS, 2, ONE_CHUNK),
    "messages of an earlier attempt to attach count": Nearest(Law.ENDS, 5, ONE_CHUNK),
    "arrival counted before the scatter": Nearest(Law.ENDS, 7),
    "messages behind a lost one count": Nearest(Law.ENDS, 12),
    "repeated messages count again": Nearest(Law.NO_WRITE_AFTER_RELEASE, 14, TWO_FAULTS),
}
"""Found after many states, most of them when all are known: from some of them no way leads to the end."""
