"""What must always hold, as names and errors. Who checks what is said where it is checked."""

from __future__ import annotations

from enum import Enum


class Law(Enum):
    """The laws of `docs/reliability.md`."""

    EXACT = "after success every byte is the one that was sent"
    NO_WRITE_AFTER_RELEASE = "no byte of a page or of a span changes after it was given back"
    NO_REUSE_UNDER_A_READ = "nothing reads a page after it was given back"
    READY = "nothing reads layers of a page before they are ready"
    OWN_PAGES_ONLY = "a write touches pages of the transfer that it belongs to, and nothing else"
    BOUNDED = "no more bytes of direct writes are on their way than the settings allow"
    ENDS = "every transfer ends on both sides by its deadline"
    TELLS = "when one side of a transfer fails or refuses it, the other side ends soon"
    GIVES_BACK = "every page comes back once nothing can touch it"
    LEAVES_NOTHING = "once all is over nothing is left of it"
    GOES_ON = "nothing waits for what is there, and nothing for a heartbeat where nothing was lost"
    ISOLATED = "what fails no part of a transfer fails it not"
    STATES = "a transfer's state changes only as the tables say"
    NEVER_RAISES = "no turn of any thread raises"
    CONTRACT = "a transport is used as its contract says"


class ViolationError(AssertionError):
    """A law was broken.

    Attributes:
        law: which.
    """

    def __init__(self, law: Law, what: str) -> None:
        super().__init__(f"{law.value}: {what}")
        self.law = law


def demand(holds: bool, law: Law, what: str) -> None:
    """Checks a law.

    Raises:
        ViolationError: unless it holds.
    """
    if not holds:
        raise ViolationError(law, what)
