"""The class that vLLM loads. It only dispatches, to `SchedulerSide` in the scheduler and `WorkerSide` in the workers.

Set `kv_connector` to "KVFerryConnector" and `kv_connector_module_path` to "kvferry.engines.vllm".
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.platforms import current_platform
from vllm.v1.request import RequestStatus

from kvferry import Settings
from kvferry.engines.device_events import DeviceEvent
from kvferry.engines.vllm.blocks import LoadedBlocks
from kvferry.engines.vllm.caches import ModelShape, fetches_behind_attention
from kvferry.engines.vllm.changes import Changes, watch
from kvferry.engines.vllm.components import of_all_stages, telling_problems
from kvferry.engines.vllm.configuration import (
    cache_forms,
    compares_content,
    groups_of,
    heads_of,
    kept_by_layers,
    kept_states,
    model_shape,
    platform,
)
from kvferry.engines.vllm.guards import buffer_notice, held_back_tokens, refuse_what_would_be_wrong
from kvferry.engines.vllm.identity import Conditions, cache_identity
from kvferry.engines.vllm.layouts import describe, numbers_in_turn
from kvferry.engines.vllm.metrics import KVFerryPromMetrics, KVFerryStats
from kvferry.engines.vllm.scheduling import SchedulerSide
from kvferry.engines.vllm.shares import check_turns, worker_place
from kvferry.engines.vllm.steps import Step
from kvferry.engines.vllm.termination import drain_timeout_s, letting_all_come, watch_for_termination
from kvferry.engines.vllm.worker import WorkerSide, on_all_processors
from kvferry.loggers import logger_of

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ModuleNotFoundError:  # vLLM 0.31 counts tokens from elsewhere without a source
    CacheHitSource = None

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = logger_of(__name__)


class KVFerryMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """A step, as vLLM carries it to the workers."""

    def __init__(self, step: Step) -> None:
        self.step = step


class KVFerryConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """kvferry in vLLM.

    The role decides what an engine may do: kv_producer sends, kv_consumer receives, kv_both does both. Settings of
    kvferry's are read from the environment, and from `kv_connector_extra_config`, which wins.
    """

    if CacheHitSource is not None:
        _cache_hit_source = CacheHitSource.P2P

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """Whether vLLM may count a prefix as here though its prefix cache has no recurrent state at its end."""
        return fetches_behind_attention(self._groups)

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        """Makes one side of the connector, as vLLM asks for it in each of its processes.

        Args:
            role: whether this is the scheduler's side or a worker's.
            kv_cache_config: which layers share block tables.

        Raises:
            SettingsError: if a setting is impossible or unknown, or vLLM is set up for what would be wrong.
            LayoutError: if the model caches something that cannot be described.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._engine: str = transfer.engine_id
        self._instance: str = vllm_config.instance_id  # the same for all processes of one start
        # Defaults follow from the processors that the endpoints' threads may use, not from the main thread's.
        self._settings = letting_all_come(on_all_processors(lambda: Settings(**transfer.kv_connector_extra_config)))
        is_scheduler = role is KVConnectorRole.SCHEDULER
        self._sends_layers = self._settings.layer_ranges > 1 and transfer.is_kv_producer
        follows_sleep = hasattr(KVConnectorBase_V1, "restore_kv_caches")  # since vLLM 0.33
        refuse_what_would_be_wrong(vllm_config, sends_layers=self._sends_layers, follows_sleep=follows_sleep)
        self._stages = 1 if is_scheduler else vllm_config.parallel_config.pipeline_parallel_size
        with telling_problems(self._stages):
            self._groups = groups_of(kv_cache_config, vllm_config.parallel_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self.changes: Changes | None = None
        if notice := buffer_notice(transfer.kv_buffer_device, current_platform.device_type):
            log.warning(notice)
        if is_scheduler:
            from vllm.v1.engine.core import EngineCore  # not in workers
            from vllm.v1.executor.abstract import Executor

            conditions = Conditions(compares_content=compares_content(vllm_config, self._settings))
            self._scheduler = SchedulerSide(
                self._groups,
                engine=self._engine,
                instance=self._instance,
                may_send=transfer.is_kv_producer,
                may_receive=transfer.is_kv_consumer,
                held_back_tokens=held_back_tokens(vllm_config),
                hold_s=self._settings.bootstrap_timeout_s,
                conditions=conditions,
            )
            self.changes = Changes(self._scheduler, conditions, follows_sleep=follows_sleep)
            watch(EngineCore, Executor)
            watch_for_termination(self._scheduler.drain)

    def shutdown(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:  # noqa: ARG003 - vLLM's
        """Says that caches are registered anew when their memory has been replaced; vLLM asks since 0.33."""
        return True

    def unregister_kv_caches(self) -> None:
        """Closes the worker's endpoints, before vLLM gives the caches' memory back: nobody writes to it any more."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.release()

    def restore_kv_caches(self) -> None:
        """Starts them anew, once the caches have memory again. Peers find this worker as one that was restarted."""
        if self._worker is None:
            self.register_kv_caches(self._kv_caches)
            self._worker_side.announce()

    # ---- in the workers -------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Describes and registers this worker's caches and starts its endpoints; at the start, where it may wait."""
        self._kv_caches = kv_caches
        with telling_problems(self._stages):
            place = worker_place(self._vllm_config.parallel_config)
            check_turns(self._groups, place.tokens)
            model = model_shape(self._vllm_config, self._kv_cache_config)
            described = describe(
                kv_caches,
                self._groups,
                model,
                place.in_model,
                heads=heads_of(self._vllm_config, self._kv_cache_config, place.in_model),
                states=kept_states(self._vllm_config, self._kv_cache_config, place.in_model, kv_caches),
                forms=cache_forms(self._vllm_config, self._kv_cache_config),
                num_blocks=self._kv_cache_config.num_blocks,
                tokens=place.tokens,
                everywhere=lambda forms: chain.from_iterable(of_all_stages(forms)),
            )
            fingerprint = self._fingerprint(model)
        self._worker = WorkerSide(
            described,
            place.in_engine,
            self._settings,
            engine=self._engine,
            instance=self._instance,
            sends=self._kv_transfer_config.is_kv_producer,
            receives=self._kv_transfer_config.is_kv_consumer,
            fingerprint=fingerprint,
            loaded_blocks=LoadedBlocks(described, self._groups)
            if self._kv_cache_config.needs_kv_cache_zeroing
            else None,
            layer_numbers=numbers_in_turn(kv_caches, model) if self._sends_layers else None,
            drain_timeout_s=drain_timeout_s(self._settings, getattr(self._vllm_config, "shutdown_timeout", 0)),
            is_told_late=bool(getattr(self._vllm_config, "use_v2_model_runner", False)),
        )

    def _fingerprint(self, model: ModelShape) -> dict[str, str]:
        """Returns what the engine's caches are beyond their layout: the same on every worker."""
        kept = kept_by_layers(self._vllm_config, self._kv_cache_config)
        drafts = [kept.pop(name) for name in model.drafts]
        stages = of_all_stages((list(kept.values()), drafts))
        identity = cache_identity(
            self._vllm_config,
            [each for layers, _ in stages for each in layers],
            draft_layers=[each for _, drafts in stages for each in drafts],
            version=vllm.__version__,
            fp8_dtype=str(current_platform.fp8_dtype()),
            packing=model.packing,
            platform=platform(),
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
        """Lets layers before this one leave, where KVFERRY_LAYER_RANGES divides them. Does not wait."""
        if self._sends_layers:
            self._worker_side.layer_computed(layer_name, self._bound_step, fence)

    def get_handshake_metadata(self) -> None:
        """Lets decode ranks find this worker: vLLM asks once caches are registered and graphs are captured.

        There is nothing that its scheduler must pass on.
        """
        self._worker_side.announce()

    def wait_for_save(self) -> None:
        """Lets the pages that this step fills leave as soon as the device has filled them. Does not wait."""
        step = self._bound_step
        self._worker_side.after(step, fence() if step.send else None)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Returns the requests whose transfers are over, failed or not."""
        results = self._worker_side.results(finished_req_ids)
        return KVConnectorTransferResults(
            finished_sending=results.sent, finished_recving=results.received, failed_recving=results.failed
        )

    def get_kv_connector_stats(self) -> KVFerryStats | None:
        """Returns the figures of transfers since the last call."""
        side = self._worker or self._scheduler
        figures = None if side is None else side.log.take()
        return None if figures is None else KVFerryStats(data=dict(figures))

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVFerryStats:
        """Wraps figures as vLLM has carried them."""
        return KVFerryStats() if data is None else KVFerryStats(data=data)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Asks for blocks in which a head's tokens lie together: ranks of another number take them in one piece.

        Latents have one head, and any order will do.
        """
        model = vllm_config.model_config
        return None if model is None or model.use_mla else "LBHNC"

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Asks for graphs in pieces where layers leave one by one: in a whole one nobody tells of a layer.

        Without them it would be right as well, since what has not left goes when the step is over.
        """
        return Settings(**extra_config).layer_ranges > 1

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVFerryPromMetrics:
        return KVFerryPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # ---- in the scheduler -----------------------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """Takes vLLM's cache manager, where a request's blocks are looked up."""
        super().bind_kv_cache_manager(kv_cache_manager)
        select = self._kv_cache_config.select_transfer_block_ids

        def tables(request: str) -> Any:
            return select(kv_cache_manager.get_blocks(request).blocks)

        self._scheduler_side.bind(tables, kv_cache_manager.block_pool)
        self._changes.bind(tables, kv_cache_manager.block_pool)

    def on_new_request(self, request: Request) -> None:
        self._scheduler_side.came_in(request)
        self._changes.came_in(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Returns how many tokens to fetch, None to be asked again later, and whether in the background."""
        tokens = self._scheduler_side.tokens_elsewhere(request, num_computed_tokens)
        return tokens, bool(tokens)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """Returns the groups whose blocks are fetched: all that are transferred."""
        ids: tuple[int, ...] = self._kv_cache_config.transfer_group_ids
        return ids

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Takes the blocks that were allocated for a request."""
        tables = self._kv_cache_config.select_transfer_block_ids(blocks.blocks)
        self._scheduler_side.allocated(request, tables, num_external_tokens)
        if num_external_tokens:
            self._changes.loads_into(tables)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVFerryMetadata:
        """Returns what the workers get with this step."""
        self._changes.scheduled()
        step = self._scheduler_side.take_step(
            scheduler_output.num_scheduled_tokens,
            scheduler_output.preempted_req_ids or (),
            is_paused=self._changes.is_paused,
        )
        return KVFerryMetadata(step)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Takes the requests that all workers are done with."""
        self._changes.between_steps()
        received = connector_output.finished_recving or set()
        received -= self._scheduler_side.reported(
            connector_output.finished_sending or (), received, connector_output.failed_recving
        )

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Returns whether a request's blocks must be kept, and its answer's parameters for the decode server."""
        self._changes.ended(request)
        is_aborted = request.status not in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
        result = self._scheduler_side.finished(request, is_aborted=is_aborted)
        self._changes.asked_about_no_more(request)
        return result

    def reset_cache(self) -> bool:
        """Ends what is on its way, as where vLLM's own caches are cleared after a change of its weights."""
        self._changes.reset()
        return True

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Does the same where vLLM's MultiConnector calls it, beside a connector without hybrid caches."""
        return self.request_finished_all_groups(request, (block_ids,))

    # ---- helpers ----------------------------------------------------------------------------------------------------

    @property
    def _scheduler_side(self) -> SchedulerSide:
        assert self._scheduler is not None, "only the scheduler calls this"
        return self._scheduler

    @property
    def _changes(self) -> Changes:
        assert self.changes is not None, "only the scheduler calls this"
        return self.changes

    @property
    def _worker_side(self) -> WorkerSide:
        assert self._worker is not None, "only workers call this, once they have their caches"
        return self._worker

    @property
    def _bound_step(self) -> Step:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, KVFerryMetadata)
        return metadata.step


def fence() -> DeviceEvent | None:
    """Makes a fence that is reached once the device has done what was queued until now. None on CPU, where it has."""
    if current_platform.is_cpu():
        return None
    # A thread waits for it: it is to sleep meanwhile, not to spin.
    event: Any = (
        torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        if current_platform.is_cuda_alike()
        else torch.Event(current_platform.device_type)
    )
    event.record()
    reached: DeviceEvent = event
    return reached


def register() -> None:
    """Makes the connector known to vLLM by its name, as MultiConnector looks up whose statistics it is given."""
    try:
        KVConnectorFactory.get_connector_class_by_name(KVFerryConnector.__name__)
    except ValueError:
        KVConnectorFactory.register_connector(KVFerryConnector.__name__, __name__, KVFerryConnector.__name__)


register()
