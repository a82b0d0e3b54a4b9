"""SGLang as it might be one day, or with a plug-in that it goes on without: each in a process of its own."""

from __future__ import annotations

import enum
import logging
import os
import traceback
from collections.abc import Callable
from io import StringIO
from multiprocessing.connection import Connection
from typing import Any

from tests.real_engines.sglang.forking import FORKING

ANSWER_S = 120.0


def outcome(*steps: Callable[[], None], environment: dict[str, str] | None = None) -> tuple[str, str]:
    """Does the steps in a process of their own; returns how that ended, and what was logged."""
    ours, theirs = FORKING.Pipe()
    process = FORKING.Process(target=_run, args=(theirs, environment or {}, steps))
    process.start()
    theirs.close()
    assert ours.poll(ANSWER_S), "no answer"
    ended, logged = ours.recv()
    process.join()
    return ended, logged


def started() -> None:
    """Loads the plug-ins, as each of SGLang's processes does."""
    from sglang.srt import plugins

    plugins.load_plugins()


def served() -> None:
    """Takes a class of kvferry's, as SGLang's scheduler does."""
    from sglang.srt.disaggregation import utils

    backend = utils.TransferBackend("kvferry")
    utils.get_kv_class(backend, utils.KVClassType.MANAGER)


def _run(pipe: Connection, environment: dict[str, str], before: tuple[Callable[[], None], ...]) -> None:
    os.environ.update(environment)
    logged = StringIO()
    logging.basicConfig(stream=logged, level=logging.WARNING, force=True)
    try:
        for step in before:
            step()
        ended = "served"
    except SystemExit as stopped:
        ended = f"the process ends: {stopped}"
    except BaseException as error:
        ended = f"{type(error).__name__}: {error}"
        traceback.print_exc()
    pipe.send((ended, logged.getvalue()))


# ---- SGLang as it might be ------------------------------------------------------------------------------------------


def rename_the_hook_on_senders() -> None:
    from sglang.srt.disaggregation.prefill import PrefillBootstrapQueue

    PrefillBootstrapQueue.make_sender = PrefillBootstrapQueue.create_sender
    del PrefillBootstrapQueue.create_sender


def rename_the_handler_of_sigterm() -> None:
    from sglang.srt.managers.tokenizer_manager import SignalHandler

    SignalHandler.on_sigterm = SignalHandler.sigterm_handler
    del SignalHandler.sigterm_handler


def change_a_signature() -> None:
    from sglang.srt.disaggregation.common.conn import CommonKVSender

    def send(self: Any, kv_indices: Any, layers: Any, state_indices: Any = None) -> None: ...

    CommonKVSender.send = send


def drop_a_state() -> None:
    from sglang.srt.disaggregation.base.conn import KVPoll

    del KVPoll.Transferring


def number_states_anew() -> None:
    from sglang.srt.disaggregation.base.conn import KVPoll

    KVPoll.Failed, KVPoll.Success = 4, 0


def drop_a_field() -> None:
    from sglang.srt.disaggregation.base.conn import KVArgs

    del KVArgs.__annotations__["state_item_lens"]


def ask_senders_for_more() -> None:
    from sglang.srt.disaggregation.common.conn import CommonKVSender

    CommonKVSender.confirm = lambda self: True


def end_deferred_releases_otherwise() -> None:
    from sglang.srt.disaggregation.decode import DecodeTransferQueue

    DecodeTransferQueue._defer_release = lambda self, decode_req: None


def ask_otherwise_in_the_background() -> None:
    from sglang.srt.disaggregation.decode import DecodePreallocQueue

    DecodePreallocQueue.prefetch_prefill_dp_rank_queries = lambda self: None


def call_it_another_version() -> None:
    import sglang.version

    sglang.version.__version__ = "0.5.24"


# ---- a plug-in that SGLang goes on without --------------------------------------------------------------------------


class RefuseToApply:
    """Makes SGLang fail to apply the hooks on one target, which it logs."""

    def __init__(self, target: str) -> None:
        self.target = target

    def __call__(self) -> None:
        from sglang.srt.plugins.hook_registry import HookRegistry

        apply = HookRegistry._apply_target

        def applying(target: str, hooks: list[Any]) -> None:
            if target == self.target:
                raise RuntimeError("it cannot be applied")
            apply(target, hooks)

        HookRegistry._apply_target = applying


def drop_get_kv_class() -> None:
    from sglang.srt.disaggregation import utils

    del utils.get_kv_class


def rename_a_kind_of_class() -> None:
    from sglang.srt.disaggregation import utils

    class Renamed(enum.Enum):
        KV_ARGS = "kvargs"

    utils.KVClassType = Renamed


def check_hooks() -> None:
    from kvferry.engines.sglang import hooks

    hooks.check_hooks()
