"""How often a message is repeated that a prefill rank has not answered, and until when."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.settings import Settings


@dataclass(slots=True)
class Repetition:
    """When to send again what was not answered.

    Ever less often, since few messages are lost where no connection breaks; but often enough that a rank which was cut
    off, and is back, need not be waited for much longer than its silence would be.

    Attributes:
        until: when to give up on an answer. What is kept for another reason goes on.
        at: when to send it again.
        pause_s: how long to wait after that, in seconds.
        longest_s: beyond which that does not grow.
    """

    until: float
    at: float
    pause_s: float
    longest_s: float

    @classmethod
    def begun(cls, now: float, settings: Settings, *, keep_s: float) -> Repetition:
        """Begins when it was sent for the first time.

        Args:
            keep_s: how long to wait for an answer, in seconds.
        """
        first_s = settings.heartbeat_interval_s
        return cls(now + keep_s, now + first_s, 2 * first_s, settings.peer_timeout_s)

    def is_due(self, now: float, *, at_once: bool = False) -> bool:
        """Whether to send it again; then the next time is reckoned from now on.

        Args:
            at_once: whether it is due in any case: a connection broke, and may have lost it or the answer.
        """
        if not at_once and now < self.at:
            return False
        self.at, self.pause_s = now + self.pause_s, min(2 * self.pause_s, self.longest_s)
        return True
