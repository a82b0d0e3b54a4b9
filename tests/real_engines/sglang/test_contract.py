"""The contract with SGLang's version, and what a server says whose SGLang has changed, with SGLang itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from proof.engine_contracts.page import Verdict
from tests.real_engines.contracts import checked, doctored, installed
from tests.real_engines.sglang.changed import (
    RefuseToApply,
    ask_otherwise_in_the_background,
    ask_senders_for_more,
    call_it_another_version,
    change_a_signature,
    check_hooks,
    drop_a_field,
    drop_a_state,
    drop_get_kv_class,
    end_deferred_releases_otherwise,
    number_states_anew,
    outcome,
    rename_a_kind_of_class,
    rename_the_handler_of_sigterm,
    rename_the_hook_on_senders,
    served,
    started,
)
from tests.support.engine_wheels import moved, renamed

from kvferry.engines.contract import Mentions, contract_for
from kvferry.engines.sglang.contract import ENDING, LOADING, SERVING, TRIED, engine_version
from kvferry.engines.sglang.hooks import (
    BACKENDS,
    CREATE_RECEIVER,
    CREATE_SENDER,
    DECODE_MANAGER,
    KV_CLASS,
    PREFILL_MANAGER,
    SERVERS_KNOWN,
    STATE_ARGS,
    TRANSFER_QUEUE,
)

pytestmark = pytest.mark.timeout(240)

ON_FUNCTIONS = [PREFILL_MANAGER, DECODE_MANAGER, STATE_ARGS, TRANSFER_QUEUE]
ON_FUNCTIONS += [CREATE_SENDER, CREATE_RECEIVER, SERVERS_KNOWN]

REPLACES = {"KVFERRY_SGLANG_REPLACES_NIXL": "1"}


def test_this_version_was_tried():
    assert engine_version() in TRIED
    contracts = [contract_for(each, engine_version()) for each in (LOADING, SERVING)]
    assert [contract.broken() for contract in (*contracts, ENDING)] == [(), (), ()]
    assert len(contracts[1].lines) > 60


def test_an_untouched_sglang_serves():
    assert outcome(started, served) == ("served", "")
    assert outcome(started, served, environment=REPLACES) == ("served", "")


# ---- an SGLang that has changed -------------------------------------------------------------------------------------


SERVING_CHANGES = [
    (
        rename_the_hook_on_senders,
        "sglang.srt.disaggregation.prefill:PrefillBootstrapQueue.create_sender is gone: there is no 'create_sender' "
        "(our hook on it takes a request's conditions)",
    ),
    (
        change_a_signature,
        "sglang.srt.disaggregation.common.conn:CommonKVSender.send takes (self, kv_indices, layers, state_indices=), "
        "and took (self, kv_indices, state_indices=, num_kv_tokens=",
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
def test_a_server_with_another_sglang_says_what_has_changed(change: Callable[[], None], said: str):
    ended, _ = outcome(change, started, served)
    assert ended.startswith(
        f"EngineContractError: kvferry's plug-in does not fit SGLang {engine_version()}, and refuses to serve with it: "
    )
    assert said in ended
    assert ended.endswith(
        "Every line of the contract was tried with SGLang 0.5.22 and 0.5.23: install one of these, or a kvferry that "
        f"knows SGLang {engine_version()}"
    )


@pytest.mark.skipif(engine_version() != TRIED[-1], reason="a version that was not tried is held to the newest's lines")
def test_a_version_that_was_not_tried_is_said():
    ended, logged = outcome(call_it_another_version, started, served)
    assert ended == "served"
    lines = sum(not isinstance(line, Mentions) for line in SERVING[-1].lines)
    assert logged == (
        "WARNING:kvferry.engines.contract:SGLang 0.5.24 is not among the versions that kvferry's plug-in was tried "
        f"with: 0.5.22 and 0.5.23. All {lines} names and signatures that it builds on are there; whether they still "
        "mean the same, nobody has tried.\n"
    )


def test_an_sglang_that_is_not_all_that_was_read_of_it_serves_and_says_so():
    ended, logged = outcome(ask_otherwise_in_the_background, started, served)
    assert ended == "served"
    assert f"SGLang {engine_version()} is not all that was read of it when kvferry's plug-in was written: " in logged
    assert "DecodePreallocQueue.prefetch_prefill_dp_rank_queries does not use _prefill_dp_rank_queries, " in logged


def test_an_sglang_that_ends_otherwise_serves_and_says_so():
    ended, logged = outcome(rename_the_handler_of_sigterm, started, served)
    assert ended == "served"
    assert (
        "sglang.srt.managers.tokenizer_manager:SignalHandler.sigterm_handler is gone: there is no 'sigterm_handler' "
        "(our hook on it says at the registry that the engine drains). Peers notice late that a server has ended: run "
        "kvferry drain before the SIGTERM (docs/drain.md)" in logged
    )


# ---- its sources ----------------------------------------------------------------------------------------------------


def test_its_sources_say_what_it_says_when_it_is_imported():
    found = checked("sglang", engine_version(), installed("sglang"))
    assert (found.broken, found.moved, found.verdict) == ((), (), Verdict.TRIED)


def test_a_wheel_with_a_renamed_hook_stops_the_server(tmp_path: Path):
    module = "sglang.srt.disaggregation.prefill"
    found = doctored("sglang", engine_version(), {module: renamed("create_sender", "make_sender")}, tmp_path)
    assert found.verdict is Verdict.BROKEN
    gone = f"{module}:PrefillBootstrapQueue.create_sender is gone: there is no 'create_sender'"
    assert found.broken[0] == f"{gone} (our hook on it takes a request's conditions)"
    assert found.broken[1].startswith(
        f"{gone} (our sender is made there): now in {module}:PrefillBootstrapQueue.make_sender"
    )
    assert len(found.broken) == 2


def test_a_wheel_in_which_something_has_moved_that_was_merely_read_warns(tmp_path: Path):
    module, method = "sglang.srt.disaggregation.decode", "prefetch_prefill_dp_rank_queries"
    found = doctored("sglang", engine_version(), {module: moved(method, "_ask_early")}, tmp_path)
    assert found.broken == ()
    assert found.moved == (
        f"{module}:DecodePreallocQueue.{method} does not use _prefill_dp_rank_queries, pending_reqs, submit, "
        f"query_prefill_dp_ranks any more (it asks in the background): now in {module}:DecodePreallocQueue._ask_early",
    )
    assert found.verdict is Verdict.TRIED


# ---- a plug-in that SGLang goes on without --------------------------------------------------------------------------


@pytest.mark.parametrize("target", [BACKENDS, KV_CLASS, *ON_FUNCTIONS])
def test_sglangs_own_nixl_does_not_run_where_a_hook_was_lost(target: str):
    """Before, SGLang logged the hook and served with its own backend."""
    ended, logged = outcome(RefuseToApply(target), started, environment=REPLACES)
    assert f"Failed to apply hooks to {target}" in logged
    assert ended.startswith(
        "the process ends: KVFERRY_SGLANG_REPLACES_NIXL is set, and kvferry cannot take the place of nixl: kvferry "
        f"refuses to serve: its hook on {target} is not in effect."
    )


@pytest.mark.parametrize("change", [drop_get_kv_class, rename_a_kind_of_class])
def test_sglangs_own_nixl_does_not_run_where_our_plug_in_fails(change: Callable[[], None]):
    """Before, SGLang logged the plug-in and served with its own backend."""
    ended, _ = outcome(change, started, environment=REPLACES)
    assert ended.startswith("the process ends: KVFERRY_SGLANG_REPLACES_NIXL is set, and kvferry cannot take the place")


@pytest.mark.parametrize("target", ON_FUNCTIONS)
def test_a_manager_is_not_made_where_a_hook_was_lost(target: str):
    ended, _ = outcome(RefuseToApply(target), started, served, check_hooks)
    assert ended == (
        f"EngineContractError: kvferry refuses to serve: its hook on {target} is not in effect. SGLang logs above why "
        "it could not apply it, and would go on without it; another plug-in may have replaced the same"
    )


def test_without_the_plug_in_sglang_does_not_know_our_name():
    ended, _ = outcome(started, served, environment={"SGLANG_PLUGINS": "another"})
    assert ended == "ValueError: 'kvferry' is not a valid TransferBackend"
