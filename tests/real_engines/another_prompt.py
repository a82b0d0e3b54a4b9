"""The negative control of servers: another prompt on the prefill side never becomes an answer."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

from kvferry.applications.up.dialects import Dialect
from kvferry.applications.up.servers import Server

PROMPT = "w4 w5 w6 w7 " * 25
ANOTHER = "w4 w5 w6 w9 " * 25
OF_BOTH: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}

Ask: TypeAlias = Callable[[dict[str, Any]], tuple[bool, str]]
"""Asks a server, whose answer is whether it has succeeded, and what it said."""


def refuse_another_prompt(
    dialect: Dialect, prefill: Server, ask_prefill: Ask, ask_decode: Ask, logged: Callable[[], str]
) -> None:
    """Asks both servers as a front does, for one prompt first, and then for another on the prefill side.

    Args:
        dialect: how the front asks.
        prefill: the prefill server, as decode servers know it.
        logged: returns what the decode server has logged: vLLM does not tell clients why.
    """
    for there in (PROMPT, ANOTHER):
        asked, told = dialect.asked(OF_BOTH, prefill)
        with ThreadPoolExecutor(1) as aside:
            computed = aside.submit(ask_prefill, {**asked, "prompt": there})
            succeeded, said = ask_decode(told)
            computed.result()
        assert succeeded == (there == PROMPT), f"{said!r} of the decode server, asked {PROMPT!r}, there {there!r}"
    assert "another prompt than the prefill side's" in said + logged(), said
