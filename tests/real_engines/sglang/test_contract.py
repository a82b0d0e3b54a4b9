"""The contract with SGLang's version, and what a server says whose SGLang has changed, with SGLang itself.

Each case has a process of its own, forked from one that has imported SGLang's side of it.
"""

from __future__ import annotations

import enum
import logging
import multiprocessing
import os
import traceback
from collections.abc import Callable
from io import StringIO
from multiprocessing.connection import Connection
from typing import Any

import pytest

from kvferry.engines.sglang.contract import LOADING, SERVING, TRIED
from kvferry.engines.sglang.names import BACKENDS, CREATE_RECEIVER, CREATE_SENDER, KV_CLASS, TRANSFER_QUEUE
from kvferry.engines.sglang.plugin import engine_version

pytestmark = pytest.mark.timeout(240)

REPLACES = {"KVFERRY_SGLANG_REPLACES_NIXL": "1"}


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


@pytest.fixture(scope="module")
def forking() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "sglang.srt.plugins",
            "sglang.srt.disaggregation.prefill",
            "sglang.srt.disaggregation.decode",
            "sglang.srt.managers.disagg_service",
            "kvferry.engines.sglang.plugin",
            "tests.real_engines.sglang.test_contract",
        ]
    )
    return context


def outcome(forking: Any, *steps: Callable[[], None], environment: dict[str, str] | None = None) -> tuple[str, str]:
    """Does the steps in a process of their own; returns how that ended, and what was logged."""
    ours, theirs = forking.Pipe()
    process = forking.Process(target=_run, args=(theirs, environment or {}, steps))
    process.start()
    assert ours.poll(120), "no answer"
    ended, logged = ours.recv()
    process.join()
    return ended, logged


def test_this_version_was_tried():
    assert engine_version() in TRIED
    assert [contract.broken() for contract in (*LOADING, *SERVING)] == [(), ()]
    assert len(SERVING[0].lines) > 60


def test_an_untouched_sglang_serves(forking: Any):
    assert outcome(forking, started, served) == ("served", "")
    assert outcome(forking, started, served, environment=REPLACES) == ("served", "")


# ---- an SGLang that has changed -------------------------------------------------------------------------------------


def rename_the_hook_on_senders() -> None:
    from sglang.srt.disaggregation.prefill import PrefillBootstrapQueue

    PrefillBootstrapQueue.make_sender = PrefillBootstrapQueue.create_sender
    del PrefillBootstrapQueue.create_sender


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


SERVING_CHANGES = [
    (
        rename_the_hook_on_senders,
        "sglang.srt.disaggregation.prefill:PrefillBootstrapQueue.create_sender is gone: there is no 'create_sender' "
        "(our hook on it takes a request's conditions)",
    ),
    (
        change_a_signature,
        "sglang.srt.disaggregation.common.conn:CommonKVSender.send takes (self, kv_indices, layers, state_indices=), "
        "and took (self, kv_indices, state_indices=, num_kv_tokens=, indices_event=) (the scheduler calls our sender "
        "so)",
    ),
    (drop_a_state, "sglang.srt.disaggregation.base.conn:KVPoll: Transferring is gone (we report states so)"),
    (
        number_states_anew,
        "sglang.srt.disaggregation.base.conn:KVPoll: Failed is 4, and was 0, Success is 0, and was 4 (we report states "
        "so)",
    ),
    (
        drop_a_field,
        "sglang.srt.disaggregation.base.conn:KVArgs has no field state_item_lens (the caches are described from them)",
    ),
    (
        ask_senders_for_more,
        "sglang.srt.disaggregation.common.conn:CommonKVSender: confirm is new (all that the scheduler calls of a "
        "sender)",
    ),
    (
        end_deferred_releases_otherwise,
        "sglang.srt.disaggregation.decode:DecodeTransferQueue._defer_release does not use deferred_kv_release_timeout "
        "any more (pages of a failed request are kept for so long)",
    ),
]


@pytest.mark.parametrize(("change", "said"), SERVING_CHANGES, ids=[change.__name__ for change, _ in SERVING_CHANGES])
def test_a_server_with_another_sglang_says_what_has_changed(forking: Any, change: Callable[[], None], said: str):
    ended, _ = outcome(forking, change, started, served)
    assert ended.startswith(
        f"EngineContractError: kvferry's plug-in does not fit SGLang {engine_version()}, and refuses to serve with it: "
    )
    assert said in ended
    assert ended.endswith(
        "Every line of the contract was tried with SGLang 0.5.23: install one of these, or a kvferry that knows "
        f"SGLang {engine_version()}"
    )


def call_it_another_version() -> None:
    import sglang.version

    sglang.version.__version__ = "0.5.24"


def test_a_version_that_was_not_tried_is_said(forking: Any):
    ended, logged = outcome(forking, call_it_another_version, started, served)
    assert ended == "served"
    lines = len(SERVING[0].lines)
    assert logged == (
        "WARNING:kvferry.engines.contract:SGLang 0.5.24 is not among the versions that kvferry's plug-in was tried "
        f"with: 0.5.23. All {lines} names and signatures that it builds on are there; whether they still mean the "
        "same, nobody has tried.\n"
    )


# ---- a plug-in that SGLang goes on without --------------------------------------------------------------------------


def refuse_to_apply(target: str) -> Callable[[], None]:
    return _Refuse(target)


class _Refuse:
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


@pytest.mark.parametrize("target", [BACKENDS, KV_CLASS, TRANSFER_QUEUE, CREATE_SENDER, CREATE_RECEIVER])
def test_sglangs_own_nixl_does_not_run_where_a_hook_was_lost(forking: Any, target: str):
    """Before, SGLang logged the hook and served with its own backend."""
    ended, logged = outcome(forking, refuse_to_apply(target), started, environment=REPLACES)
    assert f"Failed to apply hooks to {target}" in logged
    assert ended.startswith(
        "the process ends: KVFERRY_SGLANG_REPLACES_NIXL is set, and kvferry cannot take the place of nixl: kvferry "
        f"refuses to serve: its hook on {target} is not in effect."
    )


@pytest.mark.parametrize("change", [drop_get_kv_class, rename_a_kind_of_class])
def test_sglangs_own_nixl_does_not_run_where_our_plug_in_fails(forking: Any, change: Callable[[], None]):
    """Before, SGLang logged the plug-in and served with its own backend."""
    ended, _ = outcome(forking, change, started, environment=REPLACES)
    assert ended.startswith("the process ends: KVFERRY_SGLANG_REPLACES_NIXL is set, and kvferry cannot take the place")


def check() -> None:
    from kvferry.engines.sglang.hooks import check_hooks

    check_hooks()


@pytest.mark.parametrize("target", [TRANSFER_QUEUE, CREATE_SENDER, CREATE_RECEIVER])
def test_a_manager_is_not_made_where_a_hook_was_lost(forking: Any, target: str):
    ended, _ = outcome(forking, refuse_to_apply(target), started, served, check)
    assert ended == (
        f"EngineContractError: kvferry refuses to serve: its hook on {target} is not in effect. SGLang logs above why "
        "it could not apply it, and would go on without it; another plug-in may have replaced the same"
    )


def test_without_the_plug_in_sglang_does_not_know_our_name(forking: Any):
    ended, _ = outcome(forking, started, served, environment={"SGLANG_PLUGINS": "another"})
    assert ended == "ValueError: 'kvferry' is not a valid TransferBackend"
