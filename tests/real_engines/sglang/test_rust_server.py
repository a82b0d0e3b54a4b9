"""A prefill engine whose server is SGLang's in Rust (SGLANG_RUST_SERVER): it has no process that starts ours."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from examples.tiny_model import write
from tests.real_engines.prompts import prompts
from tests.real_engines.sglang import overlapping
from tests.real_engines.sglang.engine import ENVIRONMENT, OPTIONS, ROOT, START_S, STUBS, EngineProcess, Shape, flags
from tests.real_engines.sglang.pairs import ROOMS, TOKENS, Pair, assert_equal

from kvferry.applications.up.supervision import free_ports

pytestmark = [pytest.mark.servers, pytest.mark.timeout(900), pytest.mark.long]


class RustServer:
    """A prefill server, behind SGLang's server in Rust."""

    def __init__(
        self, model: Path, log: Path, bootstrap_port: int, path: Sequence[Path] = (), **environment: str
    ) -> None:
        """Begins to start it."""
        (self._port,) = free_ports(1)
        self._log = log
        options = {
            **OPTIONS,
            "model_path": model,
            "host": "127.0.0.1",
            "port": self._port,
            "disaggregation_mode": "prefill",
            "disaggregation_transfer_backend": "kvferry",
            "disaggregation_bootstrap_port": bootstrap_port,
            "skip_server_warmup": True,
        }
        modules = [*map(str, path), str(STUBS), str(ROOT), str(ROOT / "src")]
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "sglang.launch_server", *flags(options)],
                env={
                    **os.environ,
                    **ENVIRONMENT,
                    **environment,
                    "SGLANG_RUST_SERVER": "1",
                    "PYTHONPATH": os.pathsep.join(modules),
                },
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def started(self) -> RustServer:
        """Waits until it serves."""
        deadline = time.monotonic() + START_S
        while True:
            assert self._process.poll() is None, self.log()[-4000:]
            assert time.monotonic() < deadline, self.log()[-4000:]
            try:
                if httpx.get(f"http://127.0.0.1:{self._port}/health", timeout=2).status_code == 200:
                    return self
            except httpx.HTTPError:
                pass
            time.sleep(0.2)

    def generate(self, prompt: Sequence[int], room: int, bootstrap_port: int) -> httpx.Response:
        return httpx.post(
            f"http://127.0.0.1:{self._port}/generate",
            json={
                "input_ids": list(prompt),
                "sampling_params": {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True},
                "bootstrap_host": "127.0.0.1",
                "bootstrap_port": bootstrap_port,
                "bootstrap_room": room,
            },
            timeout=120,
        )

    def close(self) -> None:
        family = [*psutil.Process(self._process.pid).children(recursive=True)] if self._process.poll() is None else []
        self._process.kill()
        for each in family:
            each.kill()
        self._process.wait()
        psutil.wait_procs(family, timeout=10)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def undivided(model: Path) -> Iterator[EngineProcess]:
    engine = EngineProcess(Shape(model)).started()
    yield engine
    engine.close()


def test_tokens_are_equal_behind_sglangs_server_in_rust(model: Path, undivided: EngineProcess, tmp_path: Path):
    """Before, the start failed: "the bootstrap server at ... knows nothing of kvferry (status 404)"."""
    (port,) = free_ports(1)
    server = RustServer(model, tmp_path / "server.log", port, (overlapping.install(tmp_path / "overlapping"),))
    pair = Pair(model, tmp_path / "tampering")
    try:
        server.started()
        pair.decode.started()
        given = prompts(50, 4, shortest=100)
        rooms = [next(ROOMS) for _ in given]
        pair.decode.submit(given, TOKENS, rooms=rooms, port=port)
        with ThreadPoolExecutor(len(given)) as threads:
            answers = list(threads.map(server.generate, given, rooms, [port] * len(given)))
        assert [each.status_code for each in answers] == [200] * len(given)
        assert_equal(pair.decode.outputs(), undivided.generate(given, TOKENS))
        room = next(ROOMS)
        pair.decode.submit(prompts(51, 1, shortest=100), TOKENS, rooms=[room], port=port)
        told = server.generate(prompts(52, 1, shortest=100)[0], room, port)
        (refused,) = pair.decode.outputs()
        assert refused.tokens == (), "another prompt became an answer"
        assert "another prompt" in (refused.error or "")
        assert "another prompt" in told.text
    finally:
        pair.close()
        server.close()
