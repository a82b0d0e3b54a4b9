"""Names of what the plug-in puts hooks on, as SGLang's hook registry has them."""

from __future__ import annotations

_DISAGGREGATION = "sglang.srt.disaggregation"

BACKENDS = f"{_DISAGGREGATION}.utils.TransferBackend"
KV_CLASS = f"{_DISAGGREGATION}.utils.get_kv_class"
STATE_ARGS = f"{_DISAGGREGATION}.utils.setup_state_kv_args"
TRANSFER_QUEUE = f"{_DISAGGREGATION}.decode.DecodeTransferQueue.__init__"
PREFILL_MANAGER = f"{_DISAGGREGATION}.prefill.PrefillBootstrapQueue._init_kv_manager"
DECODE_MANAGER = f"{_DISAGGREGATION}.decode.DecodePreallocQueue._init_kv_manager"
CREATE_RECEIVER = f"{_DISAGGREGATION}.decode.DecodePreallocQueue._create_receiver_and_enqueue"
SERVERS_KNOWN = f"{_DISAGGREGATION}.decode.DecodePreallocQueue._ensure_prefill_info"
CREATE_SENDER = f"{_DISAGGREGATION}.prefill.PrefillBootstrapQueue.create_sender"
BEFORE_STEP = f"{_DISAGGREGATION}.prefill.SchedulerDisaggregationPrefillMixin.maybe_send_cached_prefix_chunk"

TERMINATED = "sglang.srt.managers.tokenizer_manager.SignalHandler.sigterm_handler"
SCHEDULER_STARTS = "sglang.srt.managers.scheduler.Scheduler.init_disaggregation"
SCHEDULER_ENDS = "sglang.srt.managers.scheduler.Scheduler.release_host_resources"

_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
UPDATES = tuple(f"{_UPDATER}.update_weights_from_{source}" for source in ("disk", "distributed", "tensor", "ipc"))
UPDATE_BEGINS = f"{_UPDATER}.begin_weight_update"
UPDATE_ENDS = f"{_UPDATER}.end_weight_update"
MEMORY_RELEASED = f"{_UPDATER}.release_memory_occupation"
WEIGHTS_CHECKED = f"{_UPDATER}.check_weights"
WEIGHTS_NAMED = "sglang.srt.managers.scheduler.Scheduler.handle_update_weight_version"
ADAPTER_LOADED = "sglang.srt.lora.lora_manager.LoRAManager._load_lora_adapter"
ADAPTER_OF_TENSORS = f"{ADAPTER_LOADED}_from_tensors"
STORE_ATTACHED = "sglang.srt.managers.scheduler.Scheduler.attach_hicache_storage_wrapped"
CACHE_FLUSHED = "sglang.srt.managers.scheduler.Scheduler.flush_cache"

_STAGES = "sglang.srt.managers.scheduler_pp_mixin.SchedulerPPMixin"
STAGES_ENDED = f"{_STAGES}._pp_pd_get_decode_transferred_ids"
STAGE_TAKES = f"{_STAGES}.process_decode_transfer_queue"
STAGE_ADMITS = f"{_STAGES}.process_prealloc_queue"

MOVE_GATE = f"{_DISAGGREGATION}.utils.unified_memory_disagg_move_gate"
UNIFIED_BACKENDS = "sglang.srt.server_args.ServerArgs._unified_memory_pd_transfer_backends"


def where(target: str) -> str:
    """Returns the name of a hook's target as the contract has it: with a colon behind its module."""
    module, inside = target.split(".", 4)[:4], target.split(".", 4)[4]
    return f"{'.'.join(module)}:{inside}"
