"""Hooks in SGLang that are lost, and an SGLang that has changed: with what stands here in SGLang's place.

SGLang logs a plug-in that fails and goes on without it. `tests/real_engines/sglang/test_contract.py` tries the same
with SGLang itself.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterator
from enum import Enum
from functools import wraps
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvferry.engines.sglang import hooks
from kvferry.engines.sglang.hooks import (
    ADAPTER_LOADED,
    ADAPTER_OF_TENSORS,
    BACKENDS,
    BEFORE_STEP,
    CACHE_FLUSHED,
    CREATE_RECEIVER,
    CREATE_SENDER,
    DECODE_MANAGER,
    KV_CLASS,
    MEMORY_RELEASED,
    PREFILL_MANAGER,
    SERVERS_KNOWN,
    STAGE_ADMITS,
    STAGE_TAKES,
    STAGES_ENDED,
    STATE_ARGS,
    STORE_ATTACHED,
    TRANSFER_QUEUE,
    UPDATE_BEGINS,
    UPDATE_ENDS,
    UPDATES,
    WEIGHTS_CHECKED,
    WEIGHTS_NAMED,
)
from kvferry.engines.sglang.plugin import register
from kvferry.errors import EngineContractError

log = logging.getLogger("sglang")

MANAGERS = [PREFILL_MANAGER, DECODE_MANAGER]
WEIGHTS = [*UPDATES, UPDATE_BEGINS, UPDATE_ENDS, MEMORY_RELEASED, WEIGHTS_CHECKED, WEIGHTS_NAMED]
WEIGHTS += [CACHE_FLUSHED, STORE_ATTACHED]
STAGES = [STAGES_ENDED, STAGE_TAKES, STAGE_ADMITS]
REQUESTS = [TRANSFER_QUEUE, CREATE_SENDER, CREATE_RECEIVER, SERVERS_KNOWN, BEFORE_STEP]
ADAPTERS = [ADAPTER_LOADED, ADAPTER_OF_TENSORS]
ALL = [BACKENDS, KV_CLASS, *MANAGERS, STATE_ARGS, *REQUESTS, *STAGES, *WEIGHTS, *ADAPTERS]


class HookType(Enum):
    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"
    REPLACE = "replace"


class KVClassType(Enum):
    KVARGS = "kvargs"
    MANAGER = "manager"
    SENDER = "sender"
    RECEIVER = "receiver"
    BOOTSTRAP_SERVER = "bootstrap_server"


class Backends(Enum):
    NIXL = "nixl"
    FAKE = "fake"


class FakeSGLang:
    """As much of SGLang's plug-in framework as the plug-in meets, with SGLang's names and its way with errors."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self._made: set[str] = set()
        self.limits = SimpleNamespace(is_set=lambda: False)
        self.backend = "kvferry"
        self.choices = ["nixl"]
        self.utils = self._module("sglang.srt.disaggregation.utils")
        self.utils.TransferBackend = Backends
        self.utils.KVClassType = KVClassType

        def get_kv_class(transfer_backend: Any, class_type: Any) -> str:
            return f"SGLang's own {class_type.value} of {transfer_backend.value}"

        def setup_state_kv_args(kv_args: Any, token_to_kv_pool: Any, draft_token_to_kv_pool: Any = None) -> None: ...

        self.utils.get_kv_class, self.utils.setup_state_kv_args = get_kv_class, setup_state_kv_args
        self.queue = self._queue_class()
        decode = self._module("sglang.srt.disaggregation.decode")
        decode.DecodeTransferQueue, decode.DecodePreallocQueue = self.queue, self._making_queue_class()
        prefill = self._module("sglang.srt.disaggregation.prefill")
        prefill.PrefillBootstrapQueue = self._making_queue_class()
        prefill.SchedulerDisaggregationPrefillMixin = self._mixin_class()
        for target in (*STAGES, *WEIGHTS, *ADAPTERS):
            self._add_method(target)
        self.registry = self._registry_class()
        module = self._module("sglang.srt.plugins.hook_registry")
        module.HookRegistry, module.HookType = self.registry, HookType
        self.plugins = self._module("sglang.srt.plugins")
        self.plugins.load_plugins = self._loader(self.registry)
        self._module("sglang.srt.arg_groups.choices").add_disagg_transfer_backend_choices = self.choices.extend
        limit = SimpleNamespace(SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT=self.limits)
        self._module("sglang.srt.environ").envs = limit
        context = SimpleNamespace(disaggregation_transfer_backend="kvferry")
        self.context = context
        self._module("sglang.srt.runtime_context").get_disagg = lambda: context
        self._module("sglang.version").__version__ = "0.5.23"

    def _module(self, name: str) -> Any:
        module = ModuleType(name)
        whole, _, last = name.rpartition(".")
        parent = sys.modules[whole] if whole in self._made else self._module(whole) if whole else None
        if parent is not None:
            setattr(parent, last, module)
        self._made.add(name)
        self._patch.setitem(sys.modules, name, module)
        return module

    def _add_method(self, target: str) -> None:
        module, owner, name = target.rsplit(".", 2)
        holder = sys.modules[module] if module in self._made else self._module(module)
        if not hasattr(holder, owner):
            setattr(holder, owner, type(owner, (), {}))
        setattr(getattr(holder, owner), name, lambda self, recv_req: None)

    @staticmethod
    def _queue_class() -> type:
        class DecodeTransferQueue:
            def __init__(self, allocator: Any = None) -> None:
                self.deferred_kv_release_timeout = 30.0

        return DecodeTransferQueue

    @staticmethod
    def _making_queue_class() -> type:
        class Queue:
            def _init_kv_manager(self) -> None: ...

            def create_sender(self, req: Any, num_kv_heads: int) -> bool:
                return True

            def _create_receiver_and_enqueue(self, req: Any, is_rebootstrap: bool = False) -> None: ...

            def _ensure_prefill_info(self, addr_to_reqs: Any) -> None: ...

        return Queue

    @staticmethod
    def _mixin_class() -> type:
        class SchedulerDisaggregationPrefillMixin:
            def maybe_send_cached_prefix_chunk(self, req: Any, allow_send: bool = True) -> None: ...

        return SchedulerDisaggregationPrefillMixin

    @staticmethod
    def _registry_class() -> Any:
        class HookRegistry:
            hooks: list[tuple[str, Any, HookType]] = []  # noqa: RUF012
            refused: set[str] = set()  # noqa: RUF012

            @classmethod
            def register(
                cls, target: str, hook: Any, hook_type: HookType = HookType.AFTER, *, source: Any = None
            ) -> None:
                cls.hooks.append((target, hook, hook_type))

            @classmethod
            def apply_hooks(cls) -> None:
                for target, hook, kind in cls.hooks:
                    try:
                        cls._apply(target, hook, kind)
                    except Exception:
                        log.exception("Failed to apply hooks to %s", target)

            @classmethod
            def _apply(cls, target: str, hook: Any, kind: HookType) -> None:
                if target in cls.refused:
                    raise AttributeError(target)
                module, _, name = target.rpartition(".")
                if module.endswith(("Queue", "Mixin", "Manager", ".Scheduler")):
                    module, _, owner = module.rpartition(".")
                    holder = getattr(sys.modules[module], owner)
                else:
                    holder = sys.modules[module]
                original = getattr(holder, name)
                setattr(holder, name, hook if kind is HookType.REPLACE else cls._wrap(original, hook, kind))

            @staticmethod
            def _wrap(original: Any, hook: Any, kind: HookType) -> Callable[..., Any]:
                @wraps(original)
                def wrapper(*arguments: Any, **named: Any) -> Any:
                    if kind is HookType.AROUND:
                        return hook(original, *arguments, **named)
                    return hook(original(*arguments, **named), *arguments, **named)

                return wrapper

        return HookRegistry

    def _loader(self, registry: Any) -> Callable[[], None]:
        HookRegistry = registry  # noqa: N806

        def load_plugins() -> None:
            try:
                register()
            except Exception:
                log.exception("Failed to execute general plugin: kvferry")
            HookRegistry.apply_hooks()

        return load_plugins

    def start(self) -> None:
        """Loads the plug-ins, as each of SGLang's processes begins."""
        self.plugins.load_plugins()


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSGLang]:
    hooks.remember(())
    yield FakeSGLang(monkeypatch)
    hooks.remember(())


def replace_nixl(patch: pytest.MonkeyPatch) -> None:
    patch.setenv("KVFERRY_SGLANG_REPLACES_NIXL", "1")


def test_all_hooks_are_in_effect(sglang: FakeSGLang):
    sglang.start()
    hooks.check_hooks()
    assert sglang.choices == ["nixl", "kvferry"]
    assert sglang.utils.TransferBackend("kvferry").name == "KVFERRY"
    nixl = sglang.utils.TransferBackend("nixl")
    assert sglang.utils.get_kv_class(nixl, KVClassType.MANAGER) == "SGLang's own manager of nixl"
    queue = sglang.queue()
    assert queue.deferred_kv_release_timeout == math.inf
    hooks.check_pages_are_kept(limit_is_users=False)


def test_without_its_plug_in_nothing_is_served(sglang: FakeSGLang, caplog: pytest.LogCaptureFixture):
    sglang.registry.register = None
    sglang.start()
    assert "kvferry's plug-in does not fit SGLang 0.5.23" in caplog.text
    assert sglang.choices == ["nixl"], "SGLang refuses a backend that it does not know"
    with pytest.raises(EngineContractError, match="its plug-in was not registered in this process"):
        hooks.check_hooks()


def test_stages_of_another_backend_agree_as_sglang_has_it(sglang: FakeSGLang):
    mixin = sys.modules["sglang.srt.managers.scheduler_pp_mixin"].SchedulerPPMixin
    mixin.process_decode_transfer_queue = lambda self, release_rids: release_rids
    sglang.start()
    sglang.context.disaggregation_transfer_backend = "mooncake"
    assert mixin().process_decode_transfer_queue(["a request"]) == ["a request"]


@pytest.mark.parametrize("lost", ALL)
def test_a_hook_that_sglang_could_not_apply_is_named(sglang: FakeSGLang, caplog: pytest.LogCaptureFixture, lost: str):
    sglang.registry.refused.add(lost)
    sglang.start()
    assert f"--disaggregation-transfer-backend kvferry will not work: kvferry refuses to serve: its hook on {lost}" in (
        caplog.text
    )
    with pytest.raises(EngineContractError, match=f"its hook on {lost} is not in effect"):
        hooks.check_hooks()


@pytest.mark.parametrize("lost", ALL)
def test_nixl_does_not_run_in_our_place_where_a_hook_is_lost(
    sglang: FakeSGLang, monkeypatch: pytest.MonkeyPatch, lost: str
):
    replace_nixl(monkeypatch)
    sglang.registry.refused.add(lost)
    with pytest.raises(SystemExit) as stopped:
        sglang.start()
    assert str(stopped.value) == (
        "KVFERRY_SGLANG_REPLACES_NIXL is set, and kvferry cannot take the place of nixl: kvferry refuses to serve: its "
        f"hook on {lost} is not in effect. SGLang logs above why it could not apply it, and would go on without it; "
        "another plug-in may have replaced the same. SGLang would use its own NIXL backend, unnoticed: this server "
        "stops. Unset KVFERRY_SGLANG_REPLACES_NIXL if you want that one"
    )


CHANGES: list[tuple[str, Callable[[FakeSGLang], Any], str]] = [
    (
        "a renamed hook",
        lambda sglang: delattr(sglang.utils, "get_kv_class"),
        "sglang.srt.disaggregation.utils:get_kv_class is gone: there is no 'get_kv_class' (our hook on it gives SGLang "
        "our classes)",
    ),
    (
        "another signature",
        lambda sglang: setattr(sglang.utils, "get_kv_class", lambda transfer_backend, class_type, role: None),
        "sglang.srt.disaggregation.utils:get_kv_class takes (transfer_backend, class_type, role), and took "
        "(transfer_backend, class_type) (our hook on it gives SGLang our classes)",
    ),
    (
        "a missing member",
        lambda sglang: setattr(sglang.utils, "KVClassType", Enum("KVClassType", {"KVARGS": "kvargs"})),
        "sglang.srt.disaggregation.utils:KVClassType: MANAGER is gone, SENDER is gone, RECEIVER is gone, "
        "BOOTSTRAP_SERVER is gone (we have a class for each of them)",
    ),
    (
        "hooks that are applied elsewhere",
        lambda sglang: setattr(sglang.plugins, "load_plugins", lambda: None),
        "sglang.srt.plugins:load_plugins does not use HookRegistry, apply_hooks any more (our hooks are applied there)",
    ),
]


@pytest.mark.parametrize(("change", "said"), [each[1:] for each in CHANGES], ids=[each[0] for each in CHANGES])
def test_nixl_does_not_run_in_the_place_of_a_plug_in_that_does_not_fit(
    sglang: FakeSGLang, monkeypatch: pytest.MonkeyPatch, change: Callable[[FakeSGLang], Any], said: str
):
    replace_nixl(monkeypatch)
    change(sglang)
    with pytest.raises(SystemExit) as stopped:
        register()
    assert str(stopped.value).startswith(
        "KVFERRY_SGLANG_REPLACES_NIXL is set, and kvferry cannot take the place of nixl: kvferry's plug-in does not "
        "fit SGLang 0.5.23, and refuses to serve with it: "
    )
    assert said in str(stopped.value)


@pytest.mark.parametrize("value", ["", "perhaps"])
def test_a_wish_to_replace_nixl_that_cannot_be_read_is_one(
    sglang: FakeSGLang, monkeypatch: pytest.MonkeyPatch, value: str
):
    monkeypatch.setenv("KVFERRY_SGLANG_REPLACES_NIXL", value)
    with pytest.raises(SystemExit, match="KVFERRY_SGLANG_REPLACES_NIXL is set, and kvferry cannot take the place"):
        sglang.start()


def test_another_plug_in_that_takes_our_hook_away_is_noticed(sglang: FakeSGLang):
    sglang.start()
    sglang.utils.get_kv_class = lambda *_: None
    with pytest.raises(EngineContractError, match=f"its hook on {KV_CLASS} is not in effect"):
        hooks.check_hooks()


# ---- pages that are kept ------------------------------------------------------------------------------------------


def test_pages_are_not_received_where_no_queue_keeps_them(sglang: FakeSGLang, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hooks, "queues", type(hooks.queues)())
    sglang.start()
    with pytest.raises(EngineContractError, match=f"its hook on {TRANSFER_QUEUE} was not called before SGLang made"):
        hooks.check_pages_are_kept(limit_is_users=False)


def test_a_limit_that_came_back_is_noticed(sglang: FakeSGLang, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hooks, "queues", type(hooks.queues)())
    sglang.start()
    queue = sglang.queue()
    queue.deferred_kv_release_timeout = 30.0
    with pytest.raises(EngineContractError, match=r"gives pages of failed requests away after \[30.0\] s"):
        hooks.check_pages_are_kept(limit_is_users=False)
    hooks.check_pages_are_kept(limit_is_users=True)


def test_the_users_own_limit_stays(sglang: FakeSGLang, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hooks, "queues", type(hooks.queues)())
    sglang.limits.is_set = lambda: True
    sglang.start()
    queue = sglang.queue()
    assert queue.deferred_kv_release_timeout == 30.0
    hooks.check_pages_are_kept(limit_is_users=True)


def test_queues_of_other_backends_are_left_alone(sglang: FakeSGLang):
    sglang.context.disaggregation_transfer_backend = "mooncake"
    sglang.start()
    assert sglang.queue().deferred_kv_release_timeout == 30.0


def test_managers_are_given_the_pools_that_sglang_keeps_to_itself(sglang: FakeSGLang):
    sglang.start()
    args, pool = SimpleNamespace(), object()
    sglang.utils.setup_state_kv_args(args, pool)
    assert args.kvferry_pools.target is pool
