"""Options of SGLang's that its own backends honour and kvferry does not: refused at the start, or said there."""

from __future__ import annotations

from collections.abc import Iterator

from sglang.srt.disaggregation.base.conn import KVArgs
from sglang.srt.disaggregation.common.conn import CommonKVManager
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_disagg, get_memory, get_parallel

from kvferry.engines.sglang.versions import refused
from kvferry.errors import UsageError
from kvferry.loggers import logger_of

log = logger_of(__name__)

INSTEAD = {
    "SGLANG_DISAGGREGATION_NIXL_BACKEND": "KVFERRY_NIXL_BACKEND chooses NIXL's backend",
    "SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS": "NIXL's backend takes its settings from the environment, as UCX_*",
    "SGLANG_DISAGGREGATION_THREAD_POOL_SIZE": "KVFERRY_NIXL_THREADS and KVFERRY_WORKERS say how many threads write",
    "SGLANG_DISAGGREGATION_QUEUE_SIZE": "kvferry has no queues to divide requests among",
    "SGLANG_DISAGGREGATION_ENGINE_INIT_TIMEOUT": "kvferry starts NIXL without a limit of its own",
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "KVFERRY_HEARTBEAT_INTERVAL_S is the interval",
    "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": "KVFERRY_PEER_TIMEOUT_S says when a silent peer is given up",
    "SGLANG_DISAGGREGATION_ZMQ_SEND_TIMEOUT": "kvferry's messages wait for nobody",
    "SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER": "context-parallel ranks that hold the same take turns, by request",
    "SGLANG_DISAGG_STAGING_POOL_SIZE_MB": "KVFERRY_STAGING_RING_MIB limits staging memory",
}
"""Variables of SGLang's that mean nothing to kvferry, and what does."""

UNSET = {
    "SGLANG_DISAGG_STAGING_BUFFER": "kvferry has staging memory of its own, where that is faster (KVFERRY_PATH)",
    "SGLANG_MOONCAKE_CUSTOM_MEM_POOL": "caches stay where they are, and what goes with them in the CPU's memory",
}
"""Likewise, but SGLang's scheduler follows them whatever the backend: it cuts chunks, or keeps metadata on a device."""


def unset_variables() -> None:
    """Unsets in this process what SGLang's scheduler would do for its own backends, and says so."""
    for name, instead in UNSET.items():
        variable = getattr(envs, name, None)
        if variable is not None and variable.get():
            variable.clear()
            log.warning("kvferry does not read %s, and unsets it for this rank: %s", name, instead)


def check_options(args: KVArgs, mode: DisaggregationMode) -> None:
    """Refuses options that kvferry does not do, and says which variables it does not read.

    Raises:
        UsageError: naming every such option.
    """
    if get_disagg().disaggregation_decode_allocation_policy != "early":
        raise UsageError(
            "SGLang itself does not do this with kvferry: --disaggregation-decode-allocation-policy prefill_complete "
            "is for --disaggregation-transfer-backend mooncake alone, and SGLang refuses every other name before it "
            "looks for a plug-in's. Use early"
        )
    if found := [*_refused(mode)]:
        raise UsageError(f"kvferry does not do this with SGLang yet: {'; '.join(found)}")
    for name, instead in INSTEAD.items():
        variable = getattr(envs, name, None)  # another version may have it no more
        if variable is not None and variable.is_set():
            log.warning("kvferry does not read %s: %s", name, instead)
    if args.ib_device:
        log.warning(
            "kvferry does not read --disaggregation-ib-device %s: KVFERRY_NIXL_DEVICE chooses a network device, as UCX "
            "calls it, such as mlx5_0:1; else NIXL takes those that fit",
            args.ib_device,
        )


def _refused(mode: DisaggregationMode) -> Iterator[str]:
    parallel, disagg = get_parallel(), get_disagg()
    is_decode = mode is DisaggregationMode.DECODE
    options = {
        **{
            f"{name}, which kvferry could not unset before SGLang read it ({instead})": bool(getattr(envs, name).get())
            for name, instead in UNSET.items()
            if hasattr(envs, name)
        },
        "attention context parallelism on the decode side (SGLang's own managers refuse it there, by "
        "_resolve_rank_mapping)": is_decode and parallel.attn_cp_size > 1,
        "--enable-dsa-cache-layer-split (SGLang itself allows it with mooncake alone)": (
            parallel.enable_dsa_cache_layer_split
        ),
        "SGLANG_RUST_SERVER with data-parallel attention on the prefill side (SGLang registers the ranks with its "
        "server in Rust there, and not with the bootstrap server)": (
            not is_decode and envs.SGLANG_RUST_SERVER.get() and parallel.attn_dp_size > 1
        ),
        "--enable-hisparse on the prefill side (it is about decoding)": not is_decode and get_memory().enable_hisparse,
        **refused(
            CommonKVManager,
            is_decode=is_decode,
            has_checksums=disagg.disaggregation_enable_kv_checksum,
            has_rust_server=envs.SGLANG_RUST_SERVER.get(),
            divides_tokens=(
                parallel.attn_cp_size > 1 or parallel.attn_dcp_size > 1 or parallel.enable_kv_cache_sharding
            ),
        ),
    }
    return (name for name, is_on in options.items() if is_on)
