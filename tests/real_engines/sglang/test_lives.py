"""Two engines of SGLang's over kvferry, and what they live through: retraction, memory that goes, another role."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from examples.tiny_model import write
from sglang.srt.managers.io_struct import (
    ContinueGenerationReqInput,
    PauseGenerationReqInput,
    PdRoleSwitchReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
)
from tests.real_engines.prompts import prompts
from tests.real_engines.sglang.engine import EngineProcess, Output, Shape, disaggregated
from tests.real_engines.sglang.pairs import ROOMS, TOKENS, assert_equal, refuse_another_prompt

from kvferry.applications.up.supervision import free_ports

pytestmark = [pytest.mark.servers, pytest.mark.full, pytest.mark.timeout(900)]

MOST_TOKENS = 1024
"""What a decode engine's pool has: too little for all that the tests' prompts generate."""

IDLE_S = 1.0
"""How long after its last output an engine is idle, which SGLang wants of both: else it ends, or refuses."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def undivided(model: Path) -> Iterator[EngineProcess]:
    engine = EngineProcess(Shape(model)).started()
    yield engine
    engine.close()


class Two:
    """Two engines, each with a bootstrap server, as --enable-pd-role-switch wants it.

    Attributes:
        http_ports: where the engines would take requests, were they servers.
    """

    def __init__(self, model: Path) -> None:
        *self.ports, first, second = free_ports(4)
        self.http_ports = (first, second)
        modes = ("prefill", "decode")
        self.engines = [EngineProcess(self._shape(model, number, mode)) for number, mode in enumerate(modes)]
        self.prefilling = 0

    def _shape(self, model: Path, number: int, mode: str) -> Shape:
        options = disaggregated(mode, self.ports[number], enable_pd_role_switch=True)
        options |= {"port": self.http_ports[number], "chunked_prefill_size": 128}
        options |= {"max_total_tokens": MOST_TOKENS, "num_reserved_decode_tokens": 16}
        # Not seen to pass with overlap: SGLang ends an engine that is paused, not idle, and whose memory is to go.
        options |= {"disable_overlap_schedule": True}
        return Shape(model, options)

    @property
    def prefill(self) -> EngineProcess:
        return self.engines[self.prefilling]

    @property
    def decode(self) -> EngineProcess:
        return self.engines[1 - self.prefilling]

    def submit(self, given: Sequence[Sequence[int]], tokens: int = TOKENS) -> list[int]:
        rooms = [next(ROOMS) for _ in given]
        for engine in (self.prefill, self.decode):
            engine.submit(given, tokens, rooms=rooms, port=self.ports[self.prefilling])
        return rooms

    def run(self, given: Sequence[Sequence[int]], tokens: int = TOKENS) -> list[Output]:
        self.submit(given, tokens)
        self.prefill.outputs()
        return self.decode.outputs()

    @staticmethod
    def release_and_resume(engines: Sequence[EngineProcess]) -> None:
        """Has the memory of their caches go, and come back."""
        time.sleep(IDLE_S)
        for engine in engines:
            engine.ask("release_memory_occupation", ReleaseMemoryOccupationReqInput(tags=["kv_cache"]))
        for engine in engines:
            engine.ask("resume_memory_occupation", ResumeMemoryOccupationReqInput(tags=["kv_cache"]))

    def switch(self) -> None:
        """Each takes the other's role."""
        time.sleep(IDLE_S)
        for engine, role in ((self.prefill, "decode"), (self.decode, "prefill")):
            answer = engine.ask("pd_role_switch", PdRoleSwitchReqInput(new_role=role, decode_cuda_graph_memory_gb=0.0))
            assert answer.success, answer.message
        self.prefilling = 1 - self.prefilling

    @contextmanager
    def prefill_server(self, status: int = 200) -> Iterator[list[dict[str, Any]]]:
        """Stands for the prefill engine's HTTP server, of which the decode side wants caches computed again.

        Args:
            status: of the answers; another than 200 comes without a cache.
        """
        asked: list[dict[str, Any]] = []
        engine, lock = self.prefill, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    asked.append({"path": self.path, **body})
                    if status == 200:
                        rooms, port = [body["bootstrap_room"]], body["bootstrap_port"]
                        engine.submit([body["input_ids"]], 1, rooms=rooms, port=port)
                        assert engine.outputs()[0].error is None
                self.send_response(status)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", self.http_ports[self.prefilling]), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield asked
        finally:
            server.shutdown()
            server.server_close()

    def close(self) -> None:
        for engine in self.engines:
            engine.close()


@pytest.fixture(scope="module")
def two(model: Path, undivided: EngineProcess) -> Iterator[Two]:
    made = Two(model)
    for engine in made.engines:
        engine.started()
    refuse_another_prompt(made.prefill, made.decode, made.ports[made.prefilling])
    yield made
    made.close()


def test_a_request_that_is_retracted_for_want_of_memory_goes_on(two: Two, undivided: EngineProcess):
    """Its cache is in the decode server's own memory meanwhile: no room is opened again."""
    given = prompts(1, 8, shortest=90, longest=110)
    found = two.run(given, 80)
    assert sum(each.retractions for each in found)
    assert_equal(found, undivided.generate(given, 80))


def test_a_paused_server_has_retracted_requests_computed_again_under_their_numbers(two: Two, undivided: EngineProcess):
    """As in training by reinforcement: weights are exchanged meanwhile, and memory goes the second time."""
    given = prompts(2, 3, shortest=40, longest=150)
    with two.prefill_server() as asked:
        rooms = two.submit(given, 150)
        two.prefill.outputs()
        for engines in ([], two.engines):
            time.sleep(0.4)
            two.decode.ask("pause_generation", PauseGenerationReqInput(mode="retract"))
            two.release_and_resume(engines)
            two.decode.ask("continue_generation", ContinueGenerationReqInput())
        found = two.decode.outputs()
    assert_equal(found, undivided.generate(given, 150))
    assert {each["bootstrap_room"] for each in asked} == set(rooms)
    assert len(asked) == sum(each.retractions for each in found) >= len(given)
    assert all(len(each["input_ids"]) > 40 for each in asked)


def test_a_prefill_server_that_does_not_compute_again_fails_the_request_and_no_other(
    two: Two, undivided: EngineProcess
):
    given = prompts(3, 1, shortest=100)
    with two.prefill_server(500):
        two.submit(given, 150)
        two.prefill.outputs()
        time.sleep(0.4)
        two.decode.ask("pause_generation", PauseGenerationReqInput(mode="retract"))
        two.decode.ask("continue_generation", ContinueGenerationReqInput())
        (found,) = two.decode.outputs(60)
    assert "/generate failed" in (found.error or ""), found
    assert_equal(two.run(given), undivided.generate(given, TOKENS))


def test_memory_goes_and_comes_back(two: Two, undivided: EngineProcess):
    given = prompts(4, 6, longest=150)
    expected = undivided.generate(given, TOKENS)
    for engines in (two.engines, two.engines[:1], two.engines[1:]):
        two.release_and_resume(engines)
        assert_equal(two.run(given), expected)


def test_two_servers_take_each_others_role_and_go_back(two: Two, undivided: EngineProcess):
    for seed in range(5, 9):
        two.switch()
        refuse_another_prompt(two.prefill, two.decode, two.ports[two.prefilling])
        given = prompts(seed, 6, longest=150)
        assert_equal(two.run(given), undivided.generate(given, TOKENS))
