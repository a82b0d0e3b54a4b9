"""A real vLLM engine in a process of its own, told what to do through a pipe; it steps by itself, as a server's."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import logging
import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.real_engines.alone import check_alone
from tests.real_engines.vllm.asynchronous import schedule_asynchronously

START_S = 400.0
ANSWER_S = 120.0

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "UCX_TLS": "tcp,self,sm",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # compilers take half a minute of every engine, and tokens are the same without
}
"""Of every process of vLLM's on a machine without a GPU."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How an engine is set up.

    Attributes:
        connector: "kvferry", "nixl" for vLLM's own, or "" for an engine that works alone.
        called: by which name vLLM's configuration has ours.
        role: kv_producer or kv_consumer.
        name: the engine's, by which others find it.
        has_hybrid_blocks: whether layers of several kinds have block tables of their own, and blocks of several sizes.
        pool_mib: of the KV cache on every rank.
        step_tokens: the most that one step computes: a longer prompt comes in chunks.
        policy: what happens to a request whose cache does not come: fail or recompute.
        dtype: of the weights.
        cache_dtype: of the KV cache.
        speculative: how it drafts, as vLLM's configuration has it; None where it does not.
        adapters: LoRA adapters that requests may name, by name.
        settings: of kvferry's.
        beside: connectors that stand beside it in a MultiConnector, as vLLM's configuration has them; None for none.
        before: those that stand before it there.
        kernel_tokens: into pages of how many tokens a kernel divides blocks, as GPU kernels do; 0 for pages of a block.
        is_asynchronous: whether it schedules a step before it knows what the one before has generated.
        lacks: what its vLLM's interface of connectors has not got, as if it had been renamed.
        log: where all that its process prints goes, vLLM's own log among it; None for where ours goes.
    """

    model: Path
    connector: str = "kvferry"
    called: str = "KVFerryConnector"
    role: str = ""
    name: str = ""
    tp: int = 1
    block_tokens: int = 32
    has_hybrid_blocks: bool = True
    pool_mib: int = 64
    step_tokens: int = 2048
    prefix_cache: bool = False
    policy: str = "fail"
    dtype: str = "float32"
    cache_dtype: str = "auto"
    speculative: Mapping[str, Any] | None = None
    adapters: Mapping[str, Path] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    beside: tuple[Mapping[str, Any], ...] | None = None
    before: tuple[Mapping[str, Any], ...] = ()
    kernel_tokens: int = 0
    is_asynchronous: bool = False
    lacks: str = ""
    log: Path | None = None

    def connectors(self) -> dict[str, Any]:
        """The connector, as vLLM's configuration has it."""
        if self.connector != "kvferry":
            return {"kv_connector": "NixlConnector", "kv_connector_extra_config": dict(self.settings)}
        ours: dict[str, Any] = {
            "kv_connector": self.called,
            "kv_connector_module_path": "kvferry.engines.vllm",
            "kv_connector_extra_config": dict(self.settings),
        }
        if self.beside is None:
            return ours
        each = [{"kv_role": self.role, **connector} for connector in (*self.before, ours, *self.beside)]
        return {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": each}}


@dataclass(frozen=True, slots=True)
class Output:
    """What became of a request.

    Attributes:
        tokens: that were generated; where there are several choices, by the first.
        reason: why it ended.
        parameters: for the decode server.
        choices: the tokens of all choices.
    """

    tokens: tuple[int, ...]
    reason: str | None
    parameters: dict[str, Any] | None
    choices: tuple[tuple[int, ...], ...] = ()


class _Engine:
    """What runs in the process."""

    def __init__(self, shape: Shape) -> None:
        from vllm import EngineArgs, LLMEngine
        from vllm.config import KVTransferConfig

        transfer = None
        if shape.connector:
            transfer = KVTransferConfig(
                **shape.connectors(),
                kv_role=shape.role,
                engine_id=shape.name,
                kv_load_failure_policy=shape.policy,
                kv_buffer_device="cpu",
            )
        self.engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=str(shape.model),
                dtype=shape.dtype,
                tensor_parallel_size=shape.tp,
                block_size=shape.block_tokens,
                disable_hybrid_kv_cache_manager=None if shape.has_hybrid_blocks else True,
                kv_cache_memory_bytes=shape.pool_mib << 20,
                max_model_len=1024,
                max_num_batched_tokens=shape.step_tokens,
                max_num_seqs=64,
                enforce_eager=True,
                enable_prefix_caching=shape.prefix_cache,
                kv_transfer_config=transfer,
                kv_cache_dtype=shape.cache_dtype,
                speculative_config=None if shape.speculative is None else dict(shape.speculative),
                **_lora(shape),
                disable_log_stats=False,
            )
        )
        self.adapters = {name: (number, path) for number, (name, path) in enumerate(shape.adapters.items(), start=1)}
        client = self.engine.engine_core
        add_request = client.add_request
        # As where the core is a process of its own: what one choice of a request does to its parameters stays there.
        client.add_request = lambda request: add_request(copy.deepcopy(request))
        self.outputs: dict[str, Output] = {}
        self.messages = Messages()
        logging.getLogger("kvferry").addHandler(self.messages)
        self.faults = Faults(self)
        self.chunks = CountedSubmissions()

    @property
    def scheduler(self) -> Any:
        return self.engine.engine_core.engine_core.scheduler

    def step(self) -> bool:
        """Steps if there is anything to do; whether there was."""
        core = self.engine.engine_core.engine_core
        if self.faults.holds_steps() or not (self.scheduler.has_requests() or core.batch_queue):
            return False
        outputs = self.engine.step()
        if not outputs:
            time.sleep(0.001)  # as vLLM's own loop does where no model ran, to let threads of connectors run
        for output in outputs:
            if output.finished:
                completion = output.outputs[0]
                self.outputs[output.request_id] = Output(
                    tuple(completion.token_ids),
                    completion.finish_reason,
                    output.kv_transfer_params,
                    tuple(tuple(each.token_ids) for each in output.outputs),
                )
        return True

    def submit(
        self,
        name: str,
        prompt: Sequence[int],
        count: int,
        parameters: dict[str, Any] | None,
        choices: int = 1,
        adapter: str = "",
    ) -> None:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            n=choices,
            temperature=0.0 if choices == 1 else 1.0,
            seed=7,
            max_tokens=count,
            ignore_eos=True,
            extra_args=None if parameters is None else {"kv_transfer_params": parameters},
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        lora = None
        if adapter:
            number, path = self.adapters[adapter]
            lora = LoRARequest(adapter, number, str(path))
        self.engine.add_request(name, {"prompt_token_ids": list(prompt)}, sampling, lora_request=lora)

    def take(self, name: str) -> Output | None:
        return self.outputs.pop(name, None)

    def timed(
        self, name: str, prompt: Sequence[int], count: int, parameters: dict[str, Any] | None
    ) -> tuple[float, Output]:
        """Runs a request, alone, and says how many seconds it took."""
        begun_at = time.perf_counter()
        self.submit(name, prompt, count, parameters)
        while name not in self.outputs:
            self.step()
        return time.perf_counter() - begun_at, self.outputs.pop(name)

    def abort(self, name: str) -> None:
        self.engine.abort_request([name])
        self.faults.let_go()

    def is_in_the_middle(self) -> bool:
        return self.faults.is_in_the_middle()

    def submit_and_abort(self, name: str, prompt: Sequence[int], parameters: dict[str, Any]) -> None:
        """Hands a request in that ends before a step computes any of it."""
        self.submit(name, prompt, 1, parameters)
        self.abort(name)

    def submit_and_preempt(self, name: str, prompt: Sequence[int], parameters: dict[str, Any]) -> None:
        """Hands a request in that loses its blocks when its last step is queued, and its token is not yet there."""
        self._submit_and_queue(name, prompt, parameters)
        assert self.scheduler.reset_prefix_cache(reset_running_requests=True)

    def submit_and_load(self, name: str, prompt: Sequence[int], parameters: dict[str, Any], checkpoint: str) -> None:
        """Hands a request in during whose last step the weights are replaced."""
        self._submit_and_queue(name, prompt, parameters)
        self.rpc("reload_weights", {"weights_path": checkpoint})

    def _submit_and_queue(self, name: str, prompt: Sequence[int], parameters: dict[str, Any]) -> None:
        self.submit(name, prompt, 1, parameters)
        (request,) = self.scheduler.requests.values()
        while request.num_computed_tokens < request.num_prompt_tokens:
            self.step()
        assert self.scheduler.running == [request], "the engine schedules no step ahead: the test shows nothing"

    def free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def rpc(self, method: str, arguments: Mapping[str, Any]) -> list[Any]:
        """Calls a method of every worker, as servers are asked to from outside."""
        return list(self.engine.collective_rpc(method, kwargs=dict(arguments)))

    def rpc_when_one_has_arrived(self, method: str, arguments: Mapping[str, Any]) -> None:
        """The same between the step that says that a request's cache has come and the one that goes on with it."""
        while not self.scheduler.finished_recving_kv_req_ids:
            self.step()
        self.rpc(method, arguments)

    def load_unasked(self, checkpoint: str) -> None:
        """Replaces the weights as a trainer in the worker's own process does: vLLM is asked for nothing."""
        self._worker.reload_weights(weights_path=checkpoint)

    def name_weights(self, name: str) -> None:
        self.engine.set_weight_version(name)

    def reset(self) -> None:
        """Resets caches, those of connectors too, as servers are asked to after an update of the weights."""
        self.scheduler.reset_prefix_cache(reset_connector=True)

    def sleep(self) -> None:
        self.engine.sleep()

    def pause(self) -> None:
        """Has nothing scheduled until `resume`, as servers are asked to before an update of the weights."""
        self.engine.engine_core.engine_core.pause_scheduler(mode="keep", clear_cache=False)

    def slow_down(self, seconds: float) -> None:
        """Has every step take as long at least."""
        executor = self.engine.engine_core.engine_core.model_executor
        execute = executor.execute_model

        def slowly(*arguments: Any, **named: Any) -> Any:
            result = execute(*arguments, **named)
            time.sleep(seconds)
            return result

        executor.execute_model = slowly

    def resume(self) -> None:
        self.engine.engine_core.engine_core.resume_scheduler()

    def restore_caches(self) -> None:
        """What vLLM 0.33 asks of connectors where it sleeps and wakes up."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        get_kv_transfer_group().unregister_kv_caches()
        get_kv_transfer_group().restore_kv_caches()

    def load_adapter(self, name: str) -> None:
        """Loads an adapter anew, in the place of what it was."""
        from vllm.lora.request import LoRARequest

        number, path = self.adapters[name]
        self.engine.add_lora(LoRARequest(name, number, str(path), load_inplace=True))

    def preemptions(self) -> float:
        return self.metric("vllm:num_preemptions_total")

    def is_idle(self) -> bool:
        return not self.scheduler.has_requests()

    def block_bytes(self) -> int:
        return sum(cache[0].nbytes for cache in self.caches)

    @property
    def _worker(self) -> Any:
        """The only one."""
        return self.engine.engine_core.engine_core.model_executor.driver_worker.worker

    @property
    def caches(self) -> list[Any]:
        """Of the only rank."""
        return list(self._worker.model_runner.kv_caches)

    def poison(self) -> None:
        """Fills all caches, recurrent state among them, with NaN, as if many requests had left it there."""
        for layer in self.engine.vllm_config.compilation_config.static_forward_context.values():
            for cache in layer.kv_cache if isinstance(layer.kv_cache, tuple) else (layer.kv_cache,):
                cache.fill_(float("nan"))

    @property
    def draft_layers(self) -> set[str]:
        """The names of a draft model's layers, by vLLM's own account; of the only rank."""
        drafter = self._worker.model_runner.drafter
        return set(getattr(drafter, "_draft_attn_layer_names", None) or drafter.attn_layer_names)

    def draft_blocks(self) -> list[list[bytes]]:
        """Of each of the draft model's layers, digests of the blocks that anything was written to."""
        layers = self.engine.vllm_config.compilation_config.static_forward_context
        return [
            [hashlib.sha256(block.numpy().tobytes()).digest() for block in layers[name].kv_cache if block.any()]
            for name in sorted(self.draft_layers)
        ]

    def metric(self, name: str) -> float:
        from prometheus_client import REGISTRY

        samples = (sample for metric in REGISTRY.collect() for sample in metric.samples)
        return float(sum(sample.value for sample in samples if sample.name == name))

    def failures(self, name: str) -> dict[str, float]:
        """By kind, how many transfers have failed, by a counter of ours."""
        from prometheus_client import REGISTRY

        samples = (sample for metric in REGISTRY.collect() for sample in metric.samples)
        return {each.labels["kind"]: each.value for each in samples if each.name == f"{name}_total" and each.value}

    def logged(self) -> list[str]:
        return self.messages.said

    def submitted_chunks(self) -> int:
        return self.chunks.count

    def chunks_of_some_layers(self) -> int:
        return self.chunks.of_some_layers

    def plant(self, fault: str) -> None:
        self.faults.plant(fault)

    def heal(self) -> None:
        self.faults.heal()


def _lora(shape: Shape) -> dict[str, Any]:
    """What an engine with adapters is started with."""
    return {"enable_lora": True, "max_loras": len(shape.adapters), "max_lora_rank": 8} if shape.adapters else {}


class Messages(logging.Handler):
    """What kvferry has warned of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


class CountedSubmissions:
    """How many chunks this process has handed in, and how many of them have some layers alone."""

    def __init__(self) -> None:
        from kvferry.endpoint import Sender

        self.count = 0
        self.of_some_layers = 0
        original = Sender.submit

        def submit(sender: Sender, *arguments: Any, **named: Any) -> None:
            original(sender, *arguments, **named)
            self.count += 1
            self.of_some_layers += named.get("layers") is not None

        Sender.submit = submit  # type: ignore[method-assign, assignment]


class Faults:
    """Makes a prefill engine of one rank send what is wrong."""

    def __init__(self, engine: _Engine) -> None:
        self._engine = engine
        self._undo: list[Callable[[], None]] = []
        self._steps_left: int | None = None  # that send something, until the engine stands still
        self._withheld = 0
        self._submitted_before = 0

    def heal(self) -> None:
        self.let_go()
        self._withheld = 0
        while self._undo:
            self._undo.pop()()

    def holds_steps(self) -> bool:
        """Whether the engine is to compute nothing more for now, with a prompt half done."""
        return self._steps_left is not None and self._steps_left <= 0

    def let_go(self) -> None:
        """Lets it compute again."""
        self._steps_left = None

    def is_in_the_middle(self) -> bool:
        """Whether a request has been sent in part, and no more of it is sent."""
        is_sent_in_part = self._engine.chunks.count > self._submitted_before
        return is_sent_in_part and (self.holds_steps() or self._withheld > 0)

    def plant(self, fault: str) -> None:
        self._submitted_before = self._engine.chunks.count
        {
            "swapped pages": self._swap,
            "a head is missing": self._drop_head,
            "no state": self._clear_states,
            "no chunk": lambda: self._clear_layers(lambda _, spec: type(spec).__name__ == "ChunkedLocalAttentionSpec"),
            "no draft": lambda: self._clear_layers(lambda name, _: name in self._engine.draft_layers),
            "the last chunk is missing": self._skip_last,
            "layers leave before they are computed": self._send_early,
            "no end": self._withhold_last,
            "no more steps": self._hold,
            "choices copy nothing": self._skip_copies,
            "nothing is cleared": self._clear_nothing,
            "requests are not compared": self._compare_nothing,
        }[fault]()

    def _replace(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        setattr(owner, name, replacement)
        self._undo.append(lambda: setattr(owner, name, original))

    def _swap(self) -> None:
        from kvferry.engines.vllm.outgoing import PagesToSend
        from kvferry.engines.vllm.worker import WorkerSide

        original = WorkerSide.pages

        def swapped(side: WorkerSide, *arguments: Any) -> PagesToSend:
            given = original(side, *arguments)
            # Two full ones would change nothing: keys know their positions, and attention sums over all of them.
            pages = given.pages.copy()
            pages[[0, -1]] = pages[[-1, 0]]
            return PagesToSend(given.start, pages)

        self._replace(WorkerSide, "pages", swapped)

    def _drop_head(self) -> None:
        from kvferry.engines.vllm.worker import WorkerSide

        original = WorkerSide.pages

        def dropped(side: WorkerSide, *arguments: Any) -> Any:
            given = original(side, *arguments)
            for cache in self._engine.caches:
                cache[list(given.pages), 1] = 0
            return given

        self._replace(WorkerSide, "pages", dropped)

    def _clear_states(self) -> None:
        from kvferry.engines.vllm.worker import WorkerSide

        original = WorkerSide.send
        layers = self._engine.engine.vllm_config.compilation_config.static_forward_context.values()
        states = [state for layer in layers if isinstance(layer.kv_cache, tuple) for state in layer.kv_cache]

        def cleared(side: WorkerSide, sending: Any, *arguments: Any) -> None:
            if sending.is_last:
                for state in states:
                    state.zero_()
            original(side, sending, *arguments)

        self._replace(WorkerSide, "send", cleared)

    def _clear_layers(self, is_chosen: Callable[[str, Any], bool]) -> None:
        """Empties the blocks of layers before they are sent.

        Args:
            is_chosen: whether a layer is one of them, by its name and what its group keeps.
        """
        from kvferry.engines.vllm.worker import WorkerSide

        original = WorkerSide.send
        layers = self._engine.engine.vllm_config.compilation_config.static_forward_context
        groups = self._engine.scheduler.kv_cache_config.kv_cache_groups

        def cleared(side: WorkerSide, sending: Any, *arguments: Any) -> None:
            for number, group in enumerate(groups):
                sent = sending.groups.get(f"group {number}")
                for name in group.layer_names if sent is not None else ():
                    if is_chosen(name, group.kv_cache_spec):
                        layers[name].kv_cache[list(sent.blocks)] = 0
            original(side, sending, *arguments)

        self._replace(WorkerSide, "send", cleared)

    def _compare_nothing(self) -> None:
        from kvferry.protocol.transfer import sender

        self._replace(sender, "why_different", lambda prefill, decode: "")

    def _skip_last(self) -> None:
        from kvferry.engines.vllm.outgoing import OutgoingRequests

        original = OutgoingRequests.add

        def skipping(
            requests: OutgoingRequests, request: str, opens: Any, groups: Any, fence: Any, *, last: bool, ranges: Any
        ) -> None:
            if last and ranges is None:
                groups = {}
            original(requests, request, opens, groups, fence, last=last, ranges=ranges)

        self._replace(OutgoingRequests, "add", skipping)

    def _send_early(self) -> None:
        """All layers but the last range leave as soon as the model is through with the first one."""
        from kvferry.engines.layer_ranges import LayerRanges
        from kvferry.engines.vllm.worker import WorkerSide

        original = WorkerSide.send

        def slowly(side: WorkerSide, *arguments: Any) -> None:
            original(side, *arguments)
            time.sleep(0.1)  # in which they are read

        self._replace(LayerRanges, "before", lambda ranges, number: ranges.count - 1)
        self._replace(WorkerSide, "send", slowly)

    def _withhold_last(self) -> None:
        from kvferry.engines.vllm.outgoing import OutgoingRequests

        original = OutgoingRequests.add

        def withholding(requests: OutgoingRequests, *arguments: Any, last: bool, ranges: Any) -> None:
            if last and ranges is None:
                self._withheld += 1
            else:
                original(requests, *arguments, last=last, ranges=ranges)

        self._replace(OutgoingRequests, "add", withholding)

    def _hold(self) -> None:
        from kvferry.engines.vllm.outgoing import OutgoingRequests

        original, self._steps_left = OutgoingRequests.add, 3

        def holding(requests: OutgoingRequests, *arguments: Any, last: bool, ranges: Any) -> None:
            if self._steps_left is not None and ranges is None:
                self._steps_left -= 1
            original(requests, *arguments, last=last, ranges=ranges)

        self._replace(OutgoingRequests, "add", holding)

    def _skip_copies(self) -> None:
        from kvferry.engines.vllm import worker

        self._replace(worker, "copy_blocks", lambda described, group, blocks, copies: None)

    def _clear_nothing(self) -> None:
        from kvferry.engines.vllm.blocks import LoadedBlocks

        self._replace(LoadedBlocks, "clear", lambda blocks, loaded, absent: None)


def _divide_blocks(kernel_tokens: int) -> None:
    """Has the CPU's kernels divide blocks into pages, and what clears blocks there know of it."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    def clear(runner: Any, blocks: Sequence[int]) -> None:
        for layer in runner.compilation_config.static_forward_context.values():
            if not isinstance(layer.kv_cache, tuple):
                ratio = layer.kv_cache.shape[0] // runner.kv_cache_config.num_blocks
                for block in blocks:
                    layer.kv_cache[block * ratio : (block + 1) * ratio] = 0

    pages = staticmethod(lambda kv_cache_spec=None: [kernel_tokens])
    CPUAttentionBackend.get_supported_kernel_block_sizes = pages
    CPUModelRunner._zero_block_ids = clear


def _run(pipe: Connection, shape: Shape) -> None:
    os.environ.update(ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} | dict(shape.environment))
    if shape.log is not None:
        file = os.open(shape.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for descriptor in (1, 2):
            os.dup2(file, descriptor)
    try:
        if shape.lacks:
            from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

            delattr(KVConnectorBase_V1, shape.lacks)
        if shape.kernel_tokens:
            _divide_blocks(shape.kernel_tokens)
        if shape.is_asynchronous:
            schedule_asynchronously()
        engine = _Engine(shape)
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        return
    pipe.send((True, None))
    is_busy = False
    while True:
        if pipe.poll(0 if is_busy else 0.005):
            try:
                method, arguments = pipe.recv()
            except EOFError:
                return
            if method == "close":
                engine.engine.engine_core.shutdown()
                return
            try:
                pipe.send((True, getattr(engine, method)(*arguments)))
            except Exception:
                pipe.send((False, traceback.format_exc()))
        is_busy = engine.step()


class EngineError(Exception):
    """What went wrong in the process, with its traceback."""


class EngineProcess:
    """One engine."""

    def __init__(self, shape: Shape) -> None:
        """Begins to start it; `started` waits."""
        check_alone()
        self.shape = shape
        context = get_context("forkserver")
        context.set_forkserver_preload(["tests.real_engines.vllm.preload"])
        self._pipe, theirs = context.Pipe()
        self._has_started = False
        self.process = context.Process(target=_run, args=(theirs, shape))
        self.process.start()
        theirs.close()

    def started(self) -> EngineProcess:
        """Waits until it serves.

        Its first step compiles, with several ranks for half a minute where processors are busy: no request that a peer
        waits for meets that.

        Raises:
            EngineError: if it does not come up.
        """
        if not self._has_started:
            self._answer(START_S)
            self._has_started = True
            self.generate([[1, 2, 3]], 1)
        return self

    def ask(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the engine."""
        self._pipe.send((method, arguments))
        return self._answer(ANSWER_S)

    def _answer(self, limit_s: float) -> Any:
        if not self._pipe.poll(limit_s):
            raise EngineError(f"{self.shape.name} said nothing for {limit_s} s")
        try:
            is_good, value = self._pipe.recv()
        except EOFError:
            raise EngineError(f"{self.shape.name} has ended") from None
        if not is_good:
            raise EngineError(value)
        return value

    def submit(
        self,
        name: str,
        prompt: Sequence[int],
        count: int,
        parameters: dict[str, Any] | None = None,
        choices: int = 1,
        adapter: str = "",
    ) -> None:
        """Hands a request in. Several choices are sampled, with a seed; one is the likeliest."""
        self.ask("submit", name, list(prompt), count, parameters, choices, adapter)

    def output(self, name: str, limit_s: float = ANSWER_S) -> Output:
        """Waits for the end of a request."""
        deadline = time.monotonic() + limit_s
        while True:
            found: Output | None = self.ask("take", name)
            if found is not None:
                return found
            if time.monotonic() > deadline:
                raise EngineError(f"{self.shape.name}: no end of request {name} within {limit_s} s")
            time.sleep(0.002)

    def generate(self, prompts: Sequence[Sequence[int]], count: int) -> list[tuple[int, ...]]:
        """Tokens that follow the prompts, all at once."""
        for number, prompt in enumerate(prompts):
            self.submit(f"alone-{number}", prompt, count)
        return [self.output(f"alone-{number}").tokens for number in range(len(prompts))]

    def wait_idle(self, limit_s: float = 30.0) -> None:
        """Waits until nothing goes on and nothing is kept."""
        deadline = time.monotonic() + limit_s
        while not self.ask("is_idle"):
            if time.monotonic() > deadline:
                raise EngineError(f"{self.shape.name} is not idle after {limit_s} s")
            time.sleep(0.01)

    def kill(self) -> None:
        """Ends it at once, its workers too."""
        import psutil

        for each in (*psutil.Process(self.process.pid).children(recursive=True), psutil.Process(self.process.pid)):
            each.kill()
        self.process.join()

    def begin_to_close(self) -> None:
        """Asks it to end in order."""
        with contextlib.suppress(OSError):
            self._pipe.send(("close", ()))

    def close(self) -> None:
        """Ends it in order, or in any case; see `begin_to_close`."""
        self.process.join(20)
        if self.process.is_alive():
            self.kill()
