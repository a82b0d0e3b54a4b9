"""Commands that run until they are told to stop."""

from __future__ import annotations

import os
import signal

import pytest

from kvferry.applications.command_line import interruptible


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_either_signal_ends_it_even_if_it_was_ignored_before(number: signal.Signals):
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with pytest.raises(KeyboardInterrupt), interruptible():
            os.kill(os.getpid(), number)
        assert signal.getsignal(number) is signal.SIG_IGN, "as it was"
    finally:
        signal.signal(number, before)
