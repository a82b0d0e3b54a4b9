"""kvferry as a connector of vLLM 0.31, 0.32 and 0.33.

`cache_kinds` says which caches are transferred, `layouts` describes them, `modules` finds out which KV heads they have.
`scheduling` decides in the scheduler what leaves, and `fetching` what comes, for all choices of a request together;
`worker`, `outgoing` and `blocks` do it in the workers; `parameters` and `steps` are what travels, and `engine_names`
answers gateways that ask. `changes` notices `weights` and `adapters` that are replaced. `guards` refuses what would go
wrong, `contract` a vLLM that has changed, and here is shown in vLLM's log what is said. `configuration` is what
`connector` reads of vLLM's objects; only these two, `metrics`, `shares` and `components` import vLLM.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvferry.engines.vllm.connector import KVFerryConnector

__all__ = ["KVFerryConnector"]

THEIRS, OURS = "vllm", "kvferry"

_NAMES = ("KVFerryConnector", "NixlConnector")
"""The second is for gateways that refuse connectors which they do not know by name, such as Dynamo's handler: the user
sets it, beside the path of this module, which vLLM prefers to its own connector of that name. See `guards`."""


def __getattr__(name: str) -> Any:
    # vLLM looks the class up here by name. The modules beside it can be imported without vLLM.
    if name in _NAMES:
        from kvferry.engines.vllm import contract

        share_handlers()  # before anything is said
        contract.check()  # first: an import that fails says less
        from kvferry.engines.vllm.connector import KVFerryConnector

        return KVFerryConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def share_handlers(theirs: str = THEIRS, ours: str = OURS) -> None:
    """Lets the handlers of one logger have what another logs, down to the same level. Doing so twice changes nothing.

    vLLM gives handlers to its own logger alone. Without any, Python prints warnings of others as bare lines, with
    neither time nor process, and drops the rest.

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
