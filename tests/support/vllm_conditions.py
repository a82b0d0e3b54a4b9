"""What caches of requests depend on, made up."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


def made_up(
    of: Callable[[Any, int], dict[str, bytes]] = lambda *_: {},
    are_known: Callable[[Any, int], bool] = lambda *_: True,
    computed_here: Callable[[Any], None] = lambda _: None,
) -> Any:
    """Takes the place of `kvferry.engines.vllm.identity.Conditions`; by default nothing depends on anything."""
    return SimpleNamespace(of=of, are_known=are_known, computed_here=computed_here)
