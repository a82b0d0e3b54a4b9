"""Engines of SGLang's, each in processes of its own."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
from tests.real_engines.alone import check_alone
from tests.real_engines.sglang import overlapping
from tests.real_engines.sglang.forking import FORKING

START_S = 480.0
ANSWER_S = 120.0
ENDED = "the engine has ended"

ROOT = Path(__file__).resolve().parents[3]
STUBS = Path(__file__).resolve().parent / "stubs"

ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # compilers take long, and tokens are the same without
    "UCX_TLS": "tcp,self,sm",
    "KVFERRY_HEARTBEAT_INTERVAL_S": "0.5",
    "KVFERRY_PEER_TIMEOUT_S": "10",
    "KVFERRY_QUARANTINE_S": "0.3",
}

OPTIONS: Mapping[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "dtype": "float32",
    "disable_cuda_graph": True,
    "skip_tokenizer_init": True,
    "sleep_on_idle": True,  # else each scheduler takes a core of those that work
    "page_size": 16,
    "max_total_tokens": 4096,
    "max_running_requests": 32,
    "mem_fraction_static": 0.3,
    "log_level": "warning",
}


@dataclass(frozen=True)
class Shape:
    """What an engine is.

    Attributes:
        options: of SGLang's, beside `OPTIONS`.
        path: goes before everything else on Python's module path.
        spawns: each of the engine's processes begins with nothing, as a server's do, and loads the plug-ins itself.
            Else they are forked from one that has: that takes a third of the time.
    """

    model: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    path: tuple[Path, ...] = ()
    spawns: bool = False


@dataclass(frozen=True)
class Output:
    """What became of a request.

    Attributes:
        tokens: that were generated.
        error: why it failed; None if it did not.
        retractions: how often the engine has taken it back while it generated.
        longest_gap_s: between its tokens, where they were read as they came.
    """

    tokens: tuple[int, ...]
    error: str | None
    retractions: int = 0
    longest_gap_s: float = 0.0


def disaggregated(mode: str, port: int, backend: str = "kvferry", **more: Any) -> dict[str, Any]:
    """Options of a prefill or a decode engine."""
    return {
        "disaggregation_mode": mode,
        "disaggregation_transfer_backend": backend,
        "disaggregation_bootstrap_port": port,
        "disaggregation_decode_retraction_backup": "cpu_tensor",
        **more,
    }


def flags(options: Mapping[str, Any]) -> list[str]:
    """Options as SGLang's command line has them."""
    given: list[str] = []
    for name, value in options.items():
        if value is not False:
            given += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return given


def _run(pipe: Connection, shape: Shape) -> None:
    sys.path[:0] = map(str, shape.path)
    path = [*map(str, shape.path), str(STUBS), str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    os.environ.update({**ENVIRONMENT, **shape.environment}, PYTHONPATH=os.pathsep.join(path))
    try:
        from sglang.srt.entrypoints.engine import Engine

        overlapping.register()  # SGLang itself lets nothing overlap where there are pipeline stages
        with nullcontext() if shape.spawns else _forking():
            engine = Engine(**{**OPTIONS, "model_path": str(shape.model), **shape.options})
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))
        return
    pipe.send(("ready", None))

    def generate(arguments: dict[str, Any]) -> None:
        try:
            answer = [_output(each) for each in engine.generate(**arguments)]
        except Exception as error:
            answer = [Output((), str(error))] * len(arguments["input_ids"])
        pipe.send(("generated", answer))

    def generate_apart(arguments: dict[str, Any]) -> None:
        """As so many clients: one that fails takes no other with it."""
        first_streams, has_begun = arguments.pop("first_streams", False), asyncio.Event()

        async def streamed(own: dict[str, Any]) -> Output:
            found: list[dict[str, Any]] = []
            came_at: list[float] = []
            try:
                async for each in await engine.async_generate(**own, stream=True):
                    found.append(each)
                    came_at.append(time.monotonic())
                    has_begun.set()
            finally:
                has_begun.set()
            return replace(_output(found[-1]), longest_gap_s=max(b - a for a, b in pairwise(came_at)))

        async def one(index: int) -> Output:
            own = {name: given[index] if isinstance(given, list) else given for name, given in arguments.items()}
            try:
                if first_streams and not index:
                    return await streamed(own)
                if first_streams:
                    await has_begun.wait()
                return _output(await engine.async_generate(**own))
            except Exception as error:
                return Output((), str(error))

        async def all_of_them() -> list[Output]:
            return await asyncio.gather(*map(one, range(len(arguments["input_ids"]))))

        pipe.send(("generated", engine.loop.run_until_complete(all_of_them())))

    def ask(name: str, arguments: tuple[Any, ...]) -> Any:
        coroutine = getattr(engine.tokenizer_manager, name)(*arguments)
        if not engine.loop.is_running():
            return engine.loop.run_until_complete(coroutine)
        return asyncio.run_coroutine_threadsafe(coroutine, engine.loop).result(ANSWER_S)

    with ThreadPoolExecutor(1) as generating:
        while True:
            what, arguments = pipe.recv()
            if what == "abort":
                abort = partial(engine.tokenizer_manager.abort_request, abort_all=True)
                engine.loop.call_soon_threadsafe(abort)
            elif what == "ask":
                pipe.send(("answered", ask(*arguments)))
            else:
                generating.submit(generate_apart if what == "generate apart" else generate, arguments)


@contextmanager
def _forking() -> Iterator[None]:
    """Lets SGLang fork its processes, which it would spawn."""
    assert "libucm" not in Path("/proc/self/maps").read_text(), "with UCX some forked processes wait for ever"
    multiprocessing.set_start_method("fork", force=True)
    with patch.object(multiprocessing, "set_start_method"):
        yield


def _output(each: dict[str, Any]) -> Output:
    reason = each["meta_info"]["finish_reason"]
    error = reason.get("message", "aborted") if reason["type"] == "abort" else None
    return Output(tuple(each.get("output_ids") or ()), error, each["meta_info"].get("num_retractions", 0))


class EngineProcess:
    """An engine, from outside."""

    def __init__(self, shape: Shape) -> None:
        """Begins to start it."""
        check_alone()
        self._pipe, theirs = FORKING.Pipe()
        self._process = FORKING.Process(target=_run, args=(theirs, shape))
        self._process.start()
        theirs.close()

    def started(self) -> EngineProcess:
        """Waits until it serves."""
        kind, answer = self._take(START_S)
        assert kind == "ready", answer
        return self

    def submit(
        self,
        prompts: Sequence[Sequence[int]],
        count: int,
        *,
        rooms: Sequence[int] = (),
        port: int = 0,
        apart: bool = False,
        **more: Any,
    ) -> None:
        """Hands requests in, all at once; `outputs` waits for them.

        Args:
            apart: each by itself: else SGLang gives all of them up with the first that fails.
            more: arguments of SGLang's `Engine.generate`; `first_streams` of those apart: the first one's tokens are
                read as they come, and the others are handed in once it has some.
        """
        arguments: dict[str, Any] = {
            "input_ids": [list(prompt) for prompt in prompts],
            "sampling_params": [{"temperature": 0, "max_new_tokens": count, "ignore_eos": True}] * len(prompts),
        }
        if rooms:
            arguments |= {
                "bootstrap_host": ["127.0.0.1"] * len(prompts),
                "bootstrap_port": [port] * len(prompts),
                "bootstrap_room": list(rooms),
            }
        arguments |= more
        self._pipe.send(("generate apart" if apart else "generate", arguments))

    def outputs(self, limit_s: float = ANSWER_S) -> list[Output]:
        """What became of the requests."""
        kind, answer = self._take(limit_s)
        assert kind == "generated"
        return list(answer)

    def generate(self, prompts: Sequence[Sequence[int]], count: int) -> list[tuple[int, ...]]:
        """Generates, as an engine that is not divided."""
        self.submit(prompts, count)
        found = self.outputs()
        assert all(each.error is None for each in found), found
        return [each.tokens for each in found]

    def abort(self) -> None:
        """Gives up whatever is going on."""
        self._pipe.send(("abort", None))

    def ask(self, name: str, *arguments: Any) -> Any:
        """Calls a method of the engine's TokenizerManager; not while outputs are due."""
        self._pipe.send(("ask", (name, arguments)))
        kind, answer = self._take(ANSWER_S)
        assert kind == "answered", (kind, answer)
        return answer

    def kill(self) -> None:
        """Ends the engine and all of its processes, without a word."""
        family = psutil.Process(self._process.pid).children(recursive=True)
        self._process.kill()
        for each in family:
            each.kill()
        self._process.join()
        psutil.wait_procs(family, timeout=10)

    def close(self) -> None:
        """Ends it."""
        if self._process.is_alive():
            self.kill()

    def _take(self, limit_s: float) -> tuple[str, Any]:
        deadline = time.monotonic() + limit_s
        while not self._pipe.poll(0.2):
            assert self._process.is_alive(), ENDED
            assert time.monotonic() < deadline, f"no answer within {limit_s} s"
        try:
            found: tuple[str, Any] = self._pipe.recv()
        except EOFError as error:
            raise AssertionError(ENDED) from error
        return found


assert sys.version_info >= (3, 11), "SGLang needs Python 3.11"
