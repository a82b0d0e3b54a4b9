"""What the plug-in builds on in SGLang's requests, and in what replaces weights and adapters."""

from __future__ import annotations

from kvferry.engines.contract import Attributes, Fields, Line, Mentions, Signature, Uses
from kvferry.engines.sglang import hooks
from kvferry.engines.sglang.hooks import where

_MANAGERS = "sglang.srt.managers"
_LORA = "sglang.srt.lora.lora_manager:LoRAManager"
_UPDATER = f"{_MANAGERS}.scheduler_components.weight_updater:SchedulerWeightUpdaterManager"

REQUESTS: tuple[Line, ...] = (
    Uses(
        "sglang.srt.managers.schedule_batch:Req.__init__",
        ("origin_input_ids", "output_ids", "lora_id", "extra_key", "cache_salt", "input_embeds", "multimodal_inputs"),
        "a request's conditions are read from them",
    ),
    Fields(
        "sglang.srt.managers.schedule_batch:MultimodalInputs", ("mm_items",), "images and the like are read from it"
    ),
    Fields(
        "sglang.srt.managers.schedule_batch:MultimodalDataItem",
        ("modality", "hash", "offsets"),
        "images and the like are told apart by them",
    ),
    *(
        Signature(f"{_UPDATER}.{name}", "self, recv_req", "our hook on it tells peers that weights are replaced")
        for name in (
            *("update_weights_from_disk", "update_weights_from_distributed", "update_weights_from_tensor"),
            *("update_weights_from_ipc", "begin_weight_update", "end_weight_update"),
        )
    ),
    Mentions(
        "sglang.srt.model_loader.loader:DefaultModelLoader.Source.init_new",
        ("model_path", "revision"),
        "files are read again at the revision that the server was started with",
    ),
    Fields("sglang.srt.arg_groups.fields.model:Model", ("weight_cache_mode",), "whether weights are a daemon's"),
    *(
        Fields(
            f"{_MANAGERS}.io_struct:{request}", ("selector",), "a draft model's weights are told from the model's by it"
        )
        for request in (
            *("BeginWeightUpdateReqInput", "UpdateWeightsFromTensorReqInput", "UpdateWeightsFromDistributedReqInput"),
            "CheckWeightsReqInput",
        )
    ),
    Fields(
        _UPDATER,
        ("scheduler", "_session", "is_fully_idle", "memory_saver_adapter", "draft_worker"),
        "our hooks find the manager, and whether an update is whole, by them",
    ),
    Signature(where(hooks.MEMORY_RELEASED), "self, recv_req", "our hook on it hears that weights are lost"),
    Uses(where(hooks.MEMORY_RELEASED), ("tags", "memory_saver_adapter", "pause"), "whether they are is known by them"),
    Attributes("sglang.srt.constants", ("GPU_MEMORY_TYPE_WEIGHTS",), "likewise"),
    Attributes("sglang.srt.utils.torch_memory_saver_adapter:TorchMemorySaverAdapter", ("enabled",), "likewise"),
    Fields("sglang.srt.arg_groups.fields.exec_:ExecFeatures", ("enable_weights_cpu_backup",), "likewise"),
    Uses(
        f"{_MANAGERS}.mm_schedule:init_mm_embedding_cache",
        ("embedding_cache", "MultiModalStaticCache"),
        "images are embedded anew after an update",
    ),
    Signature("sglang.srt.mem_cache.multimodal_cache:MultiModalStaticCache.clear", "self", "likewise"),
    Signature(where(hooks.WEIGHTS_CHECKED), "self, recv_req", "our hook on it hears that weights are drawn by chance"),
    Uses(
        "sglang.srt.utils.weight_checker:WeightChecker.handle",
        ("action", "_reset_tensors"),
        "it is known by the action",
    ),
    Signature(
        where(hooks.STORE_ATTACHED), "self, recv_req", "our hook on it hears of what may be stored of those before"
    ),
    Uses(where(hooks.STORE_ATTACHED), ("AttachHiCacheStorageReqOutput", "success"), "our hook hears that it was done"),
    Signature(where(hooks.CACHE_FLUSHED), "self, empty_cache=", "our hook on it hears that nothing older is cached"),
    Uses(
        f"{_MANAGERS}.scheduler:Scheduler.flush_cache",
        ("is_fully_idle", "tree_cache"),
        "whether something older is cached is asked of them",
    ),
    Uses(
        "sglang.srt.mem_cache.unified_radix_cache:UnifiedRadixCache.init_cache_linker",
        ("linker",),
        "whether there is a store that a flush leaves is asked of it",
    ),
    Uses(f"{_MANAGERS}.scheduler:Scheduler.__init__", ("decode_offload_manager",), "likewise"),
    Signature(
        "sglang.srt.mem_cache.base_prefix_cache:BasePrefixCache.session_records",
        "self",
        "whether sessions hold something older is asked by it",
    ),
    Attributes(f"{_MANAGERS}.schedule_batch:ReqKvInfo", ("holds_kv",), "likewise"),
    Signature(f"{_MANAGERS}.scheduler:Scheduler.is_fully_idle", "self, for_health_check=, ignore_waiting=", "likewise"),
    Signature(
        f"{_MANAGERS}.scheduler:Scheduler.handle_update_weight_version",
        "self, recv_req",
        "our hook on it hears what weights are called",
    ),
    Fields(
        "sglang.srt.lora.lora_registry:LoRARef",
        ("lora_id", "lora_name", "lora_path"),
        "adapters are told apart by them",
    ),
    Signature(where(hooks.ADAPTER_LOADED), "self, lora_ref", "our hook on it says what was loaded"),
    Signature(
        where(hooks.ADAPTER_OF_TENSORS),
        "self, lora_ref, tensors, config_dict, added_tokens_config=",
        "our hook on it says what was loaded",
    ),
    *(
        Uses(f"{_LORA}.{name}", (called,), "the hook is called there")
        for name, called in (
            ("init_lora_adapters", "_load_lora_adapter"),
            ("load_lora_adapter", "_load_lora_adapter"),
            ("load_lora_adapter_from_tensors", "_load_lora_adapter_from_tensors"),
        )
    ),
)
