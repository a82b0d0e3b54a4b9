"""Shows what kvferry logs in vLLM's own log.

vLLM gives handlers to its own logger alone. Without any, Python prints warnings of others as bare lines, with neither
time nor process, and drops the rest.
"""

from __future__ import annotations

import logging

THEIRS, OURS = "vllm", "kvferry"


def share_handlers(theirs: str = THEIRS, ours: str = OURS) -> None:
    """Lets the handlers of one logger have what another logs, down to the same level. Doing so twice changes nothing.

    Nothing is done where somebody handles what ours logs already, such as handlers of the root logger: each line would
    be shown twice. A level that somebody has set stays.

    Args:
        theirs: the logger whose handlers they are.
        ours: the logger that gets them.
    """
    shown, hidden = logging.getLogger(theirs), logging.getLogger(ours)
    if hidden.hasHandlers():
        return
    for handler in shown.handlers:
        hidden.addHandler(handler)
    if shown.handlers and hidden.level == logging.NOTSET:
        hidden.setLevel(shown.level)
