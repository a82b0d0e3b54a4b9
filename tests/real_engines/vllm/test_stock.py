"""What vLLM's own connector answers while things change, beside ours: the same engines, prompts and changes.

Of vLLM's own nothing is asserted but that it serves before the change, and that the change was made; what it answered
is printed at the end (see `Answers`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from examples.tiny_model import write
from tests.real_engines.beside import BACKENDS, Answers, Note
from tests.real_engines.prompts import prompts
from tests.real_engines.vllm.adapters import write_adapter
from tests.real_engines.vllm.engine import EngineError
from tests.real_engines.vllm.pairs import COUNT, Engines, Pair
from tests.real_engines.vllm.test_changes import alone, load, offered, replace
from tests.real_engines.vllm.test_clearing import PAGE, prompts_that_end_before_a_page
from tests.real_engines.vllm.test_queues import LONG, SMALL_MIB, computed

from kvferry.applications.up.supervision import free_ports

pytestmark = [pytest.mark.servers, pytest.mark.long, pytest.mark.timeout(900)]

LIMIT_S = 60.0
"""For how long an answer is waited for."""

HOLD_S = 6.0
"""For how long a prefill engine holds what nobody asks for; with vLLM's own that is renewed every sixth of it."""

QUEUED = 8
"""Requests of which a decode engine computes one at a time, each for seconds."""

MOVED = {"nixl": "vllm:nixl_xfer_time_seconds_count", "kvferry": "vllm:kvferry_receive_seconds_count"}
"""By connector, what counts transfers."""


class Served:
    """A prefill and a decode engine with one connector, and one that works alone."""

    def __init__(self, backend: str, model: Path, adapter: Path | None, decode: Mapping[str, Any], **both: Any) -> None:
        self.backend, self.model, self.adapter = backend, model, adapter
        self.is_ours = backend == "kvferry"
        self.engines = Engines(model)
        adapters = {} if adapter is None else {"a": adapter}
        hold = {"bootstrap_timeout_s" if self.is_ours else "kv_lease_duration": int(HOLD_S)}
        of_either = {"adapters": adapters, "settings": hold, "connector": backend, **both}
        self.engines.begin("alone", connector="", adapters=adapters)
        for (name, own), port in zip({"prefill": {}, "decode": decode}.items(), free_ports(2), strict=True):
            environment = {} if self.is_ours else {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}
            begin = getattr(self.engines, name)
            begin(name, environment=environment, **{**of_either, **own})
        self.pair = Pair(self.engines.prefill("prefill"), self.engines.decode("decode"))
        self.everybody = (self.pair.prefill, self.pair.decode, self.engines.alone().started())

    @property
    def moved(self) -> float:
        """How many caches have come to the decode engine."""
        return float(self.pair.decode.ask("metric", MOVED[self.backend]))

    def check(self, seed: int) -> None:
        """It serves as long as nothing changes: the tokens of the engine alone, of caches that crossed."""
        each, before = prompts(seed, 2, shortest=100), self.moved
        found = [self.pair.run_in_turn(prompt, f"check-{seed}-{number}").tokens for number, prompt in enumerate(each)]
        assert found == [alone(self.engines, prompt) for prompt in each]
        assert self.moved == before + len(each), "prompts were computed on the decode side"

    def fetched(
        self, prompt: Sequence[int], name: str, offer: dict[str, object], adapter: str = ""
    ) -> tuple[int, ...] | None:
        """What the decode engine answers; None where it does not."""
        self.pair.decode.submit(name, prompt, COUNT, offer, adapter=adapter)
        return self.ended(name)

    def ended(self, name: str, limit_s: float = LIMIT_S) -> tuple[int, ...] | None:
        try:
            return self.pair.decode.output(name, limit_s).tokens
        except EngineError as error:
            if "no end of request" in str(error):
                return None
            raise

    def judge(self, found: Answers) -> None:
        """Asserts what is asserted of ours."""
        assert not self.is_ours or (found.wrong, found.unfinished) == (0, 0), (found, self.pair.said)

    def tell(
        self, note: Note, what: str, found: Sequence[tuple[int, ...] | None], right: Sequence[tuple[int, ...]]
    ) -> None:
        """Notes what was answered, and judges it."""
        answers = Answers.of(found, right)
        note(f"{what}: {self.backend}: {answers}")
        self.judge(answers)


def serve(setup: str, backend: str, directory: Path) -> Served:
    if setup == "hybrid":
        return Served(backend, write("granite4", directory / "model"), None, {}, kernel_tokens=PAGE)
    model = write("qwen3", directory / "model")
    if setup == "queue":
        return Served(backend, model, None, {"pool_mib": SMALL_MIB})
    adapter = write_adapter(directory / "a", model, seed=0)
    return Served(backend, model, adapter, {"step_tokens": 2048}, prefix_cache=True, step_tokens=64)


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Of one setup at a time: all of them would be nine engines for each connector."""
    setup, backend = request.param
    made = serve(setup, backend, tmp_path_factory.mktemp(setup))
    yield made
    made.engines.close()


def beside(setup: str) -> pytest.MarkDecorator:
    """Runs a test on engines with vLLM's own connector, and on those with ours."""
    return pytest.mark.parametrize("served", [(setup, each) for each in BACKENDS], ids=BACKENDS, indirect=True)


PLAIN, HYBRID, QUEUE = map(beside, ("plain", "hybrid", "queue"))


@PLAIN
def test_a_request_is_preempted_after_its_last_step_was_scheduled(served: Served, note: Note):
    served.check(1)
    pair, each, begun_at = served.pair, prompts(2, 3, shortest=300), time.monotonic()
    found: list[tuple[int, ...] | None] = []
    for number, prompt in enumerate(each):
        pair.prefill.wait_idle()
        name = f"taken-{number}"
        pair.prefill.ask("submit_and_preempt", name, prompt, {"do_remote_decode": True})
        offer = pair.prefill.output(name).parameters
        assert offer is not None
        found.append(served.fetched(prompt, name, offer))
    answers = Answers.of(found, [alone(served.engines, prompt) for prompt in each])
    note(f"4, pre-empted after the last step was scheduled: {served.backend}: {answers}; {since(begun_at)}")
    served.judge(answers)
    assert not served.is_ours or answers.right == len(each)


@PLAIN
def test_weights_are_replaced_on_both_sides_between_offer_and_fetch(served: Served, note: Note, tmp_path: Path):
    served.check(3)
    each = prompts(4, 3, shortest=100)
    before = [alone(served.engines, prompt) for prompt in each]
    offers = [offered(served.pair, prompt, f"weights-{number}") for number, prompt in enumerate(each)]
    newer = str(write("qwen3", tmp_path / "newer", seed=12))
    for engine in served.everybody:
        load(engine, newer)
    after = [alone(served.engines, prompt) for prompt in each]
    assert all(one != other for one, other in zip(before, after, strict=True)), "the weights change nothing"
    at_once = [served.fetched(prompt, f"weights-{number}", offers[number]) for number, prompt in enumerate(each)]
    later = [served.pair.decode.generate([prompt], COUNT)[0] for prompt in each]
    for engine in served.everybody:
        load(engine, str(served.model))
    served.tell(note, "1, weights replaced between offer and fetch, at once", at_once, after)
    served.tell(note, "1, later, by the decode engine alone", later, after)
    assert not served.is_ours or later == after


@PLAIN
def test_an_adapter_is_replaced_on_both_sides(served: Served, note: Note):
    assert served.adapter is not None
    pair, (prompt, other, third) = served.pair, prompts(5, 3, shortest=200)
    assert served.fetched(other, "warm", offered(pair, other, "warm", "a"), "a") == alone(served.engines, other, "a")
    before = alone(served.engines, prompt, "a")
    offers = [offered(pair, each, f"adapter-{number}", "a") for number, each in enumerate((prompt, third))]
    replace(served.adapter, str(served.model), 7)
    for engine in served.everybody:
        engine.ask("load_adapter", "a")
    right = [alone(served.engines, each, "a") for each in (prompt, third)]
    assert right[0] != before, "the adapter changes nothing"
    at_once = [served.fetched(each, f"adapter-{n}", offers[n], "a") for n, each in enumerate((prompt, third))]
    later = [
        served.fetched(each, f"anew-{n}", offered(pair, each, f"anew-{n}", "a"), "a")
        for n, each in enumerate((prompt, third))
    ]
    served.tell(note, "2, adapter replaced between offer and fetch, at once", at_once, right)
    served.tell(note, "2, later, computed anew", later, right)
    assert not served.is_ours or later == right


@HYBRID
def test_pools_are_full_of_nan(served: Served, note: Note):
    each = prompts_that_end_before_a_page()
    expected = served.engines.alone().started().generate(each, COUNT)
    served.check(6)
    for engine in (served.pair.prefill, served.pair.decode):
        engine.ask("poison")
    before = served.moved
    found: list[tuple[int, ...] | None] = []
    for number, prompt in enumerate(each):
        found.append(served.fetched(prompt, f"nan-{number}", offered(served.pair, prompt, f"nan-{number}")))
    answers = Answers.of(found, expected)
    note(f"3, blocks whose rest is NaN: {served.backend}: {answers}; {served.moved - before:g} caches moved")
    served.judge(answers)
    assert not served.is_ours or answers.right == len(each)


@QUEUE
def test_a_decode_queue_is_longer_than_the_hold(served: Served, note: Note):
    served.check(7)
    pair, each, begun_at = served.pair, prompts(8, QUEUED, shortest=600, longest=600), time.monotonic()
    before = served.moved
    for number, prompt in enumerate(each):
        pair.decode.submit(f"queued-{number}", prompt, LONG, computed(pair.prefill, f"queued-{number}", prompt))
    deadline = begun_at + QUEUED * LIMIT_S
    found = [served.ended(f"queued-{number}", max(1.0, deadline - time.monotonic())) for number in range(len(each))]
    took_s = time.monotonic() - begun_at
    assert took_s > 1.5 * HOLD_S, "the queue was short: the test shows nothing"
    answers = Answers.of(found, served.engines.alone().started().generate(each, LONG))
    moved = served.moved - before
    note(f"7, a queue of {took_s:.0f} s, held for {HOLD_S:g} s: {served.backend}: {answers}; {moved:g} caches moved")
    served.judge(answers)
    assert not served.is_ours or (answers.right, moved) == (len(each), len(each))


def since(begun_at: float) -> str:
    return f"{time.monotonic() - begun_at:.1f} s"
