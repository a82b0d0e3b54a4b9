"""How much a run proves: in minutes, in an hour, or for as long as it may take.

A tier is a Hypothesis profile of the same name together with the tests that belong to it. `pytest --tier` chooses.
"""

from __future__ import annotations

from enum import Enum
from typing import TypeVar

from hypothesis import settings

Amount = TypeVar("Amount")

_USUAL_EXAMPLES = 100


class Tier(str, Enum):
    """What a run is for.

    Attributes:
        QUICK: every layer touched, small budgets: `make test`, before every commit.
        FULL: the whole proof: `make test-all`, which CI runs.
        LONG: fresh seeds and searches, for whoever has the time.
    """

    QUICK = "quick"
    FULL = "full"
    LONG = "long"

    def amount(self, *, quick: Amount, full: Amount, long: Amount) -> Amount:
        """How much this tier asks for: seconds, schedules, cases."""
        return {Tier.QUICK: quick, Tier.FULL: full, Tier.LONG: long}[self]


def register_profiles() -> None:
    """Registers a Hypothesis profile for every tier.

    Examples share their cores with whatever else runs: how long one took says nothing about the code. A failure prints
    what reproduces it on another machine.
    """
    for tier, examples in ((Tier.QUICK, 3), (Tier.FULL, _USUAL_EXAMPLES), (Tier.LONG, 2000)):
        settings.register_profile(tier.value, deadline=None, print_blob=True, max_examples=examples)


def examples(full: int) -> int:
    """How many examples a property takes in this tier that takes so many in the whole proof; for `max_examples`."""
    return max(1, full * settings().max_examples // _USUAL_EXAMPLES)
