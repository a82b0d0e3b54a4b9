"""What the plug-in builds on in SGLang's requests, and in what replaces weights and adapters."""

from __future__ import annotations

from collections.abc import Iterator

from kvferry.engines.contract import Attributes, Fields, Line, Mentions, Signature, Uses, lines
from kvferry.engines.sglang import hooks
from kvferry.engines.sglang.hooks import where

_MANAGERS = "sglang.srt.managers"
_SCHEDULER = f"{_MANAGERS}.scheduler:Scheduler"
_BATCH = f"{_MANAGERS}.schedule_batch"
_UPDATER = f"{_MANAGERS}.scheduler_components.weight_updater:SchedulerWeightUpdaterManager"
_ADAPTERS = "sglang.srt.lora.lora_manager:LoRAManager"
_LIKEWISE = "likewise"


def requests() -> Iterator[Line]:
    conditions = "origin_input_ids output_ids lora_id extra_key cache_salt input_embeds multimodal_inputs"
    yield from lines(Uses, "a request's conditions are read from them", {f"{_BATCH}:Req.__init__": conditions})
    yield Fields(f"{_BATCH}:MultimodalInputs", ("mm_items",), "images and the like are read from it")
    items = {f"{_BATCH}:MultimodalDataItem": "modality hash offsets"}
    yield from lines(Fields, "images and the like are told apart by them", items)
    yield from _weights()
    yield from _caches()
    yield from _adapters()


def _weights() -> Iterator[Line]:
    for hooked in (*hooks.UPDATES, hooks.UPDATE_BEGINS, hooks.UPDATE_ENDS):
        yield Signature(where(hooked), "self, recv_req", "our hook on it tells peers that weights are replaced")
    files = {"sglang.srt.model_loader.loader:DefaultModelLoader.Source.init_new": "model_path revision"}
    yield from lines(Mentions, "files are read again at the revision that the server was started with", files)
    daemon = {"sglang.srt.arg_groups.fields.model:Model": "weight_cache_mode"}
    yield from lines(Fields, "whether weights are a daemon's", daemon)
    asked = (
        *("BeginWeightUpdateReqInput", "UpdateWeightsFromTensorReqInput", "UpdateWeightsFromDistributedReqInput"),
        "CheckWeightsReqInput",
    )
    drafts = {f"{_MANAGERS}.io_struct:{request}": "selector" for request in asked}
    yield from lines(Fields, "a draft model's weights are told from the model's by it", drafts)
    manager = {_UPDATER: "scheduler _session is_fully_idle memory_saver_adapter draft_worker"}
    yield from lines(Fields, "our hooks find the manager, and whether an update is whole, by them", manager)
    released, checked = where(hooks.MEMORY_RELEASED), where(hooks.WEIGHTS_CHECKED)
    yield Signature(released, "self, recv_req", "our hook on it hears that weights are lost")
    yield Uses(released, ("tags", "memory_saver_adapter", "pause"), "whether they are is known by them")
    kept = {
        "sglang.srt.constants": "GPU_MEMORY_TYPE_WEIGHTS",
        "sglang.srt.utils.torch_memory_saver_adapter:TorchMemorySaverAdapter": "enabled",
    }
    yield from lines(Attributes, _LIKEWISE, kept)
    yield Fields("sglang.srt.arg_groups.fields.exec_:ExecFeatures", ("enable_weights_cpu_backup",), _LIKEWISE)
    yield Signature(checked, "self, recv_req", "our hook on it hears that weights are drawn by chance")
    action = {"sglang.srt.utils.weight_checker:WeightChecker.handle": "action _reset_tensors"}
    yield from lines(Uses, "it is known by the action", action)
    named = {f"{_SCHEDULER}.handle_update_weight_version": "self, recv_req"}
    yield from lines(Signature, "our hook on it hears what weights are called", named)


def _caches() -> Iterator[Line]:
    """Yields what is asked about what those before have computed."""
    images = {f"{_MANAGERS}.mm_schedule:init_mm_embedding_cache": "embedding_cache MultiModalStaticCache"}
    yield from lines(Uses, "images are embedded anew after an update", images)
    yield Signature("sglang.srt.mem_cache.multimodal_cache:MultiModalStaticCache.clear", "self", _LIKEWISE)
    attached, flushed = where(hooks.STORE_ATTACHED), where(hooks.CACHE_FLUSHED)
    yield Signature(attached, "self, recv_req", "our hook on it hears of what may be stored of those before")
    yield Uses(attached, ("AttachHiCacheStorageReqOutput", "success"), "our hook hears that it was done")
    yield Signature(flushed, "self, empty_cache=", "our hook on it hears that nothing older is cached")
    yield Uses(flushed, ("is_fully_idle", "tree_cache"), "whether something older is cached is asked of them")
    store = {"sglang.srt.mem_cache.unified_radix_cache:UnifiedRadixCache.init_cache_linker": "linker"}
    yield from lines(Uses, "whether there is a store that a flush leaves is asked of it", store)
    yield Uses(f"{_SCHEDULER}.__init__", ("decode_offload_manager",), _LIKEWISE)
    sessions = {"sglang.srt.mem_cache.base_prefix_cache:BasePrefixCache.session_records": "self"}
    yield from lines(Signature, "whether sessions hold something older is asked by it", sessions)
    yield Attributes(f"{_BATCH}:ReqKvInfo", ("holds_kv",), _LIKEWISE)
    yield Signature(f"{_SCHEDULER}.is_fully_idle", "self, for_health_check=, ignore_waiting=", _LIKEWISE)


def _adapters() -> Iterator[Line]:
    told_apart = {"sglang.srt.lora.lora_registry:LoRARef": "lora_id lora_name lora_path"}
    yield from lines(Fields, "adapters are told apart by them", told_apart)
    loaded = {
        where(hooks.ADAPTER_LOADED): "self, lora_ref",
        where(hooks.ADAPTER_OF_TENSORS): "self, lora_ref, tensors, config_dict, added_tokens_config=",
    }
    yield from lines(Signature, "our hook on it says what was loaded", loaded)
    called = {
        f"{_ADAPTERS}.init_lora_adapters": "_load_lora_adapter",
        f"{_ADAPTERS}.load_lora_adapter": "_load_lora_adapter",
        f"{_ADAPTERS}.load_lora_adapter_from_tensors": "_load_lora_adapter_from_tensors",
    }
    yield from lines(Uses, "the hook is called there", called)
