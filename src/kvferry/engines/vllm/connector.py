"""The class that vLLM loads. It only dispatches, to `SchedulerSide` in the scheduler and `WorkerSide` in the workers.

Set `kv_connector` to "KVFerryConnector" and `kv_connector_module_path` to "kvferry.engines.vllm".
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.request import RequestStatus

from kvferry import RankCoordinates, Settings
from kvferry.engines.vllm.identity import (
    BY_PLACE,
    MULTIMODAL_FIELD,
    Conditions,
    cache_identity,
    multimodal_inputs,
)
from kvferry.engines.vllm.layouts import CacheGroup, ModelShape, describe
from kvferry.engines.vllm.metrics import KVFerryPromMetrics, KVFerryStats
from kvferry.engines.vllm.outgoing import Fence
from kvferry.engines.vllm.scheduling import SchedulerSide
from kvferry.engines.vllm.steps import Step
from kvferry.engines.vllm.worker import WorkerSide, on_all_processors
from kvferry.errors import LayoutError, SettingsError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = logging.getLogger(__name__)


class KVFerryMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """A step, as vLLM carries it to the workers."""

    def __init__(self, step: Step) -> None:
        self.step = step


class KVFerryConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """kvferry in vLLM.

    The role decides what an engine may do: kv_producer sends, kv_consumer receives, kv_both does both. Settings of
    kvferry's are read from the environment, and from `kv_connector_extra_config`, which wins.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        """Makes one side of the connector, as vLLM asks for it in each of its processes.

        Args:
            vllm_config: of the engine.
            role: whether this is the scheduler's side or a worker's.
            kv_cache_config: which layers share block tables.

        Raises:
            SettingsError: if a setting is impossible or unknown.
            LayoutError: if the model caches something that cannot be described.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._engine: str = transfer.engine_id
        # Defaults follow from the processors that the endpoints' threads may use, not from the main thread's.
        self._settings = on_all_processors(lambda: Settings(**transfer.kv_connector_extra_config))
        self._groups = groups_of(kv_cache_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(
                self._groups,
                engine=self._engine,
                may_send=transfer.is_kv_producer,
                may_receive=transfer.is_kv_consumer,
                conditions=Conditions(compares_content=compares_content(vllm_config, self._settings)).of,
            )

    def shutdown(self) -> None:
        """Closes the worker's endpoints."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    # ---- in the workers -------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Describes and registers this worker's caches and starts its endpoints; at the start, where it may wait."""
        parallel = self._vllm_config.parallel_config
        coordinates = coordinates_of(parallel)
        described = describe(
            kv_caches,
            self._groups,
            model_shape(self._vllm_config, self._kv_cache_config),
            coordinates,
            num_blocks=self._kv_cache_config.num_blocks,
        )
        self._worker = WorkerSide(
            described,
            coordinates,
            self._settings,
            engine=self._engine,
            sends=self._kv_transfer_config.is_kv_producer,
            receives=self._kv_transfer_config.is_kv_consumer,
            fingerprint=self._fingerprint(),
        )

    def _fingerprint(self) -> dict[str, str]:
        """Returns what this worker's caches are beyond their layout."""
        identity = cache_identity(
            self._vllm_config,
            kept_by_layers(self._vllm_config, self._kv_cache_config),
            version=vllm.__version__,
            fp8_dtype=str(current_platform.fp8_dtype()),
            packing=model_shape(self._vllm_config, self._kv_cache_config).packing,
        )
        return identity.fingerprint()

    def handle_preemptions(self, kv_connector_metadata: KVFerryMetadata) -> None:
        """Drops the pages of preempted requests, before their blocks are written to."""
        self._worker_side.before(kv_connector_metadata.step)

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        """Requests the caches of this step's requests."""
        self._worker_side.receive(self._bound_step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: vLLM parks requests until all of their cache is there."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **_: Any) -> None:
        """Does nothing: pages leave with the step that fills them, not layer by layer."""

    def wait_for_save(self) -> None:
        """Lets the pages that this step fills leave as soon as the device has filled them. Does not wait."""
        step = self._bound_step
        self._worker_side.after(step, fence() if step.send else nothing_to_wait_for)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Returns the requests whose transfers are over, failed or not."""
        results = self._worker_side.results(finished_req_ids)
        return KVConnectorTransferResults(
            finished_sending=results.sent, finished_recving=results.received, failed_recving=results.failed
        )

    def get_kv_connector_stats(self) -> KVFerryStats | None:
        """Returns the figures of transfers since the last call."""
        figures = None if self._worker is None else self._worker.log.take()
        return None if figures is None else KVFerryStats(data=dict(figures))

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVFerryStats:
        """Wraps figures as vLLM has carried them."""
        return KVFerryStats() if data is None else KVFerryStats(data=data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVFerryPromMetrics:
        """Makes the metrics for Prometheus."""
        return KVFerryPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # ---- in the scheduler -----------------------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """Takes vLLM's cache manager, where a request's blocks are looked up."""
        super().bind_kv_cache_manager(kv_cache_manager)
        select = self._kv_cache_config.select_transfer_block_ids

        def tables(request: str) -> Any:
            return select(kv_cache_manager.get_blocks(request).blocks)

        self._scheduler_side.bind(tables, kv_cache_manager.block_pool)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """Returns how many tokens to fetch, and whether in the background."""
        tokens = self._scheduler_side.tokens_elsewhere(request, num_computed_tokens)
        return tokens, tokens > 0

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """Returns the groups whose blocks are fetched: all that are transferred."""
        ids: tuple[int, ...] = self._kv_cache_config.transfer_group_ids
        return ids

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Takes the blocks that were allocated for a request."""
        tables = self._kv_cache_config.select_transfer_block_ids(blocks.blocks)
        self._scheduler_side.allocated(request, tables, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVFerryMetadata:
        """Returns what the workers get with this step."""
        step = self._scheduler_side.take_step(
            scheduler_output.num_scheduled_tokens, scheduler_output.preempted_req_ids or ()
        )
        return KVFerryMetadata(step)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Takes the requests that all workers are done with."""
        self._scheduler_side.reported(connector_output.finished_sending or (), connector_output.finished_recving or ())

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Returns whether a request's blocks must be kept, and its answer's parameters for the decode server."""
        is_aborted = request.status not in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
        return self._scheduler_side.finished(request, is_aborted=is_aborted)

    # ---- helpers ----------------------------------------------------------------------------------------------------

    @property
    def _scheduler_side(self) -> SchedulerSide:
        assert self._scheduler is not None, "only the scheduler calls this"
        return self._scheduler

    @property
    def _worker_side(self) -> WorkerSide:
        assert self._worker is not None, "only workers call this, once they have their caches"
        return self._worker

    @property
    def _bound_step(self) -> Step:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, KVFerryMetadata)
        return metadata.step


def nothing_to_wait_for() -> bool:
    """Serves as a fence that has been reached."""
    return True


def fence() -> Fence:
    """Makes a fence that is reached once the device has done what was queued until now. On CPU it has been."""
    if current_platform.is_cpu():
        return nothing_to_wait_for
    event = torch.Event(current_platform.device_type)
    event.record()
    query: Callable[[], bool] = event.query
    return query


def coordinates_of(parallel: Any) -> RankCoordinates:
    """Returns a worker's place. Each engine of a data-parallel deployment is an engine of its own, with its own name.

    Raises:
        SettingsError: if context parallelism divides the cache.
    """
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise SettingsError("kvferry's connector does not describe caches under context parallelism in vLLM yet")
    tensor, pipeline = get_tp_group(), get_pp_group()
    return RankCoordinates(
        tp_rank=tensor.rank_in_group,
        tp_size=tensor.world_size,
        pp_rank=pipeline.rank_in_group,
        pp_size=pipeline.world_size,
    )


def model_shape(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> ModelShape:
    """Returns what the whole model has."""
    model = vllm_config.model_config
    packing = None
    if current_platform.is_cpu():
        packing = cpu_packing(vllm_config, kv_cache_config)
    return ModelShape(model.get_total_num_hidden_layers(), model.get_total_num_kv_heads(), packing)


def cpu_packing(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """Names the order in which the CPU kernels keep a block. They choose it, by type, size and processor."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    specs = [first_spec(group.kv_cache_spec) for group in kv_cache_config.transfer_groups]
    orders = {
        _get_attn_isa(spec.dtype, spec.block_size, spec.head_size, vllm_config.cache_config.cache_dtype)
        for spec in specs
    }
    return f"vLLM's CPU kernels ({', '.join(sorted(orders))})"


def kept_by_layers(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> list[tuple[KVCacheSpec, str]]:
    """Returns what every layer that is transferred keeps, and the name of the backend that reads and writes it."""
    layers = vllm_config.compilation_config.static_forward_context
    kept = []
    for group in kv_cache_config.transfer_groups:
        spec = group.kv_cache_spec
        for name in group.layer_names:
            own = spec.kv_cache_specs[name] if isinstance(spec, UniformTypeKVCacheSpecs) else spec
            kept.append((own, layers[name].get_attn_backend().get_name()))
    return kept


def compares_content(vllm_config: VllmConfig, settings: Settings) -> bool:
    """Returns whether vLLM's digests of multimodal inputs are the same on both sides, for all that is known here."""
    is_waived = MULTIMODAL_FIELD in settings.fields_that_may_differ
    return not is_waived and multimodal_inputs(vllm_config) != BY_PLACE


def groups_of(kv_cache_config: KVCacheConfig) -> tuple[CacheGroup, ...]:
    """Returns the groups that are transferred.

    Raises:
        LayoutError: if one has something that cannot be described.
    """
    return tuple(
        _group(f"group {number}", group.layer_names, first_spec(group.kv_cache_spec))
        for number, group in enumerate(kv_cache_config.transfer_groups)
    )


def first_spec(spec: KVCacheSpec) -> KVCacheSpec:
    """Returns what the layers of a group keep; with layers of several sizes, what the first keeps."""
    return spec.first_spec if isinstance(spec, UniformTypeKVCacheSpecs) else spec


_DESCRIBED = (FullAttentionSpec, SlidingWindowSpec)


def _group(name: str, layer_names: list[str], spec: KVCacheSpec) -> CacheGroup:
    if not isinstance(spec, _DESCRIBED):
        known = "attention, with or without a sliding window, and latents"
        raise LayoutError(
            f"layers such as {layer_names[0]!r} keep {type(spec).__name__}: kvferry's connector describes {known}"
        )
    window = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None
    return CacheGroup(
        name=name,
        layer_names=tuple(layer_names),
        block_tokens=spec.block_size,
        window_tokens=None if window is None else max(1, window - 1),
        is_latent=isinstance(spec, (MLAAttentionSpec, SlidingWindowMLASpec)),
    )
