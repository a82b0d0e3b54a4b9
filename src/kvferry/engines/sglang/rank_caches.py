"""What a rank of SGLang's caches, read once when its manager is made, and described."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.disaggregation.base.conn import KVArgs
from sglang.srt.runtime_context import get_exec, get_model, get_spec
from sglang.srt.server_args import ServerArgs

from kvferry import Device, Entry, MemoryKind, RankLayout
from kvferry.engines.fingerprint import CacheIdentity
from kvferry.engines.sglang.compressed import Rings, rings_of
from kvferry.engines.sglang.contract import engine_version
from kvferry.engines.sglang.hisparse import apart, beside, is_hisparse
from kvferry.engines.sglang.identity import cache_identity
from kvferry.engines.sglang.layers import loaded_modules, totals_by_layer
from kvferry.engines.sglang.layouts import describe
from kvferry.engines.sglang.placement import Placement
from kvferry.engines.sglang.pools import caches_of, draft_modules
from kvferry.errors import LayoutError, UsageError


@dataclass(frozen=True, slots=True)
class RankCaches:
    """What a rank caches, and how it lies in memory.

    Attributes:
        layout: in the memory where the model computes.
        host_layout: in the host's memory; None if nothing is received there.
        has_host_pool: whether that is a pool of SGLang's, into which it has a request received instead.
        is_hisparse: whether sparse attention reads from host memory: a request is received into both together.
        rings: how long DeepSeek V4's rings are; None with another model.
        fingerprint: what the bytes depend on, as both sides compare it.
    """

    layout: RankLayout
    host_layout: RankLayout | None
    has_host_pool: bool
    is_hisparse: bool
    rings: Rings | None
    fingerprint: Mapping[str, str]

    @property
    def groups(self) -> frozenset[str]:
        """The groups in whose pages, or slots, it is."""
        return frozenset(group.name for group in self.layout.groups)

    @property
    def uncut(self) -> list[str]:
        """Names of components whose pages cannot be cut between tokens."""
        layouts = [self.layout] if self.host_layout is None else [self.layout, self.host_layout]
        return sorted({each.name for layout in layouts for each in layout.components if each.entry is Entry.PAGE})


def rank_caches(args: KVArgs, server_args: ServerArgs, place: Placement) -> RankCaches:
    """Reads and describes what a rank caches.

    Raises:
        LayoutError: if the caches cannot be described.
        UsageError: if an option is on that kvferry does not do.
    """
    model = ModelConfig.from_server_args(server_args)
    is_divided = place.tp_size > 1  # else a rank has all heads
    totals = totals_by_layer(loaded_modules(apart_from=draft_modules(args))) if is_divided else {}
    caches = caches_of(args, model, mambaish_config(model), totals, place=place)
    device, in_main_memory = _device(server_args.device, args.gpu_id), Device(MemoryKind.DRAM)
    is_sparse = is_hisparse(args.kvferry_pools)
    if is_sparse and place.token_parts > 1:
        raise UsageError(
            f"--enable-hisparse where {place.token_parts} ranks divide the tokens of a request: kvferry has "
            "not tried it. Leave --dcp-size or --enable-kv-cache-sharding away"
        )
    host_layout: RankLayout | None = None
    if is_sparse:
        on_host, caches = apart(caches)
        there, here = describe(on_host, place, in_main_memory), describe(caches, place, device)
        host_layout, layout = beside(there, here), beside(here, there)
    else:
        layout = describe(caches, place, device)
    host = _host_arguments(args)
    if host is not None:
        host_layout = describe(caches_of(host, model, None, totals, place=place), place, in_main_memory)
    rings = rings_of(args.kvferry_pools.target)
    return RankCaches(layout, host_layout, host is not None, is_sparse, rings, identity_of(args, model).fingerprint())


def identity_of(args: KVArgs, model: ModelConfig) -> CacheIdentity:
    """Returns what a rank's caches are beyond their layout, by SGLang's arguments and its model."""
    return cache_identity(
        args, model, given=get_model(), speculative=get_spec(), execution=get_exec(), version=engine_version()
    )


def _device(name: str, index: int) -> Device:
    kinds = {"cpu": MemoryKind.DRAM, "cuda": MemoryKind.VRAM}
    if name not in kinds:
        raise UsageError(f"--device is {name}: kvferry transfers between pools of cpu and cuda")
    return Device(kinds[name], index if name == "cuda" else 0)


def _host_arguments(args: KVArgs) -> KVArgs | None:
    """Returns a rank's KVArgs with its host pools where the device's were; None if SGLang names no host pools.

    A decode rank receives into these while its device has no memory to spare, and SGLang restores what came there to
    the device later, by itself. They have the layers of the device's pools, in the same order and with pages of the
    same bytes, and page numbers of their own.
    """
    if getattr(args, "host_kv_data_ptrs", None) is None:
        return None
    there = copy.copy(args)
    there.kv_data_ptrs, there.kv_data_lens = args.host_kv_data_ptrs, args.host_kv_data_lens
    there.kv_item_lens = args.host_kv_item_lens
    _check_pages("keys and values", args.kv_item_lens, there.kv_item_lens)
    if args.state_types:
        there.state_data_ptrs, there.state_data_lens = args.host_state_data_ptrs, args.host_state_data_lens
        there.state_item_lens = args.host_state_item_lens
        for device, host in zip(args.state_item_lens, there.state_item_lens, strict=True):
            _check_pages("sliding windows", device, host)
    return there


def _check_pages(what: str, device: list[int], host: list[int]) -> None:
    if device != host:
        raise LayoutError(
            f"--disaggregation-decode-host-receive-threshold: pages of {what} have {host[:4]}... bytes in host memory "
            f"and {device[:4]}... on the device: leave it at 1"
        )
