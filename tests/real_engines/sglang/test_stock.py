"""What SGLang's own NIXL backend answers while things change, beside ours: the same engines, prompts and changes.

Of SGLang's own nothing is asserted but that it serves before the change, and that the change was made; what it answered
is printed at the end (see `Answers`).
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.real_engines.beside import BACKENDS, Answers, Note
from tests.real_engines.prompts import prompts
from tests.real_engines.sglang import main_memory
from tests.real_engines.sglang.engine import ENDED, EngineProcess, Output
from tests.real_engines.sglang.pairs import ROOMS, TOKENS, Pair
from tests.real_engines.sglang.test_changing_servers import model, newer, undivided, update

pytestmark = [pytest.mark.servers, pytest.mark.long, pytest.mark.timeout(1800)]

__all__ = ["model", "newer", "undivided"]  # fixtures

TIMEOUT_S = 40
"""Of SGLang's, on what waits for the other side; 300 by default."""

LIMIT_S = 60.0
"""For how long answers are waited for, which come together."""

LONG = 400
"""Tokens of a generation beside which others are asked for."""

SILENT_S = 30.0
"""For how long addresses do not answer: SGLang's own asks each 15 times, for up to 5 s."""

GAP_S = 2.5
"""Between tokens beside such addresses, of ours at most: half of what one of them can cost with SGLang's own."""

SOON_S = 10.0
"""Within which ours gives up what is for a server that has ended."""


class Served:
    """A prefill and a decode engine with one backend."""

    def __init__(self, backend: str, model: Path, directory: Path, of_prefill: Mapping[str, Any]) -> None:
        limits = ("SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT", "SGLANG_DISAGGREGATION_WAITING_TIMEOUT")
        cores = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"} if "dp_size" in of_prefill else {}
        environment = dict.fromkeys(limits, str(TIMEOUT_S)) | cores
        self.backend, self.is_ours = backend, backend == "kvferry"
        own = main_memory.install(directory)
        self.pair = Pair(
            model, own, backend=backend, environment=environment, spawns=not self.is_ours, of_prefill=of_prefill
        )

    def started(self) -> Served:
        """Waits until both serve; the negative control is asserted of ours alone."""
        if self.is_ours:
            self.pair.started()
        else:
            self.pair.prefill.started()
            self.pair.decode.started()
        return self

    def run(self, given: Sequence[Sequence[int]], rooms: Sequence[int] = ()) -> list[Output | None]:
        """What the decode engine answers, asked the same as the prefill engine."""
        rooms = rooms or [next(ROOMS) for _ in given]
        for engine in (self.pair.prefill, self.pair.decode):
            self.submit(engine, given, rooms)
        ended(self.pair.prefill, len(given))
        return ended(self.pair.decode, len(given))

    def submit(self, engine: EngineProcess, given: Sequence[Sequence[int]], rooms: Sequence[int]) -> None:
        engine.submit(given, TOKENS, rooms=rooms, port=self.pair.port, apart=True)

    def check(self, alone: EngineProcess, seed: int, rooms: Sequence[int] = ()) -> None:
        """It serves as long as nothing changes."""
        given = prompts(seed, 4, shortest=100, longest=300)
        assert tokens(self.run(given, rooms)) == alone.generate(given, TOKENS)

    def judge(self, found: Answers) -> None:
        """Asserts what is asserted of ours."""
        assert not self.is_ours or (found.wrong, found.unfinished) == (0, 0), found


DEAD = Output((), ENDED)
"""What becomes of a request whose server does not live to answer it."""


@pytest.fixture(scope="module")
def alone(undivided: EngineProcess) -> EngineProcess:
    return undivided.started()


@pytest.fixture
def served(request: pytest.FixtureRequest, model: Path, alone: EngineProcess, tmp_path: Path) -> Iterator[Served]:
    """Of one test each: what has become of SGLang's own after it is not known."""
    backend, of_prefill = request.param
    made = Served(backend, model, tmp_path / "plug-ins", of_prefill)
    try:
        yield made.started()
    finally:
        made.pair.close()


def beside(**of_prefill: Any) -> pytest.MarkDecorator:
    """Runs a test on engines with SGLang's own backend, and on those with ours.

    Args:
        of_prefill: options of the prefill engine.
    """
    return pytest.mark.parametrize("served", [(each, of_prefill) for each in BACKENDS], ids=BACKENDS, indirect=True)


PLAIN, REPLICAS = beside(), beside(dp_size=2)


@contextmanager
def silent_ports(count: int) -> Iterator[list[int]]:
    """Ports that take connections and never say a word; after a while they are closed."""
    with ExitStack() as open_sockets:
        listening = [open_sockets.enter_context(socket.socket()) for _ in range(count)]
        for each in listening:
            each.bind(("127.0.0.1", 0))
            each.listen(64)
        closing = threading.Timer(SILENT_S, open_sockets.close)
        closing.start()
        try:
            yield [each.getsockname()[1] for each in listening]
        finally:
            closing.cancel()
            closing.join()


def ended(engine: EngineProcess, count: int, limit_s: float = LIMIT_S) -> list[Output | None]:
    """What an engine answers to so many requests, all of them or none."""
    try:
        return [*engine.outputs(limit_s)]
    except AssertionError as error:
        if ENDED in str(error):
            return [DEAD] * count
        if "no answer within" in str(error):
            return [None] * count
        raise


def tokens(found: Sequence[Output | None]) -> list[tuple[int, ...] | None]:
    return [None if each is None else () if each.error is not None else each.tokens for each in found]


@PLAIN
def test_weights_are_replaced_on_the_prefill_side_alone(
    served: Served, alone: EngineProcess, model: Path, newer: Path, note: Note
):
    served.check(alone, 33)
    given = prompts(34, 4, shortest=100, longest=300)
    old = alone.generate(given, TOKENS)
    update(served.pair.prefill, newer)
    found = served.run(given)
    update(alone, newer)
    new = alone.generate(given, TOKENS)
    update(alone, model)
    assert all(one != other for one, other in zip(old, new, strict=True)), "the weights change nothing"
    answers = Answers.of(tokens(found), old, new)
    note(f"16, weights replaced on the prefill side alone: {served.backend}: {answers}")
    served.judge(answers)


@PLAIN
def test_a_prefill_server_has_died_while_idle(served: Served, alone: EngineProcess, note: Note):
    served.check(alone, 35)
    given = prompts(36, 4, shortest=100, longest=300)
    expected = alone.generate(given, TOKENS)
    served.pair.prefill.kill()
    for when in ("just now", "before that"):
        begun_at = time.monotonic()
        served.submit(served.pair.decode, given, [next(ROOMS) for _ in given])
        found = ended(served.pair.decode, len(given))
        held_s = time.monotonic() - begun_at
        answers = Answers.of(tokens(found), expected)
        note(f"13, a prefill server has died while idle, {when}: {served.backend}: {answers} after {held_s:.1f} s")
        served.judge(answers)
        assert not served.is_ours or (answers.failed == len(given) and held_s < SOON_S), found


@PLAIN
def test_addresses_do_not_answer_beside_a_generation(served: Served, alone: EngineProcess, note: Note):
    served.check(alone, 37)
    first, second = prompts(38, 2, shortest=100, longest=100)
    others = prompts(39, 4, shortest=20, longest=20)

    def generate(given: Sequence[int], ports: Sequence[int]) -> tuple[Output, list[Output | None]]:
        """What becomes of one request, and of others that name these ports once it has tokens."""
        rooms = [next(ROOMS) for _ in (given, *ports)]
        served.pair.prefill.submit([given], LONG, rooms=rooms[:1], port=served.pair.port)
        every = [given, *others[: len(ports)]]
        named = [served.pair.port, *ports]
        served.pair.decode.submit(every, LONG, rooms=rooms, bootstrap_port=named, apart=True, first_streams=True)
        served.pair.prefill.outputs()
        found, *refused = ended(served.pair.decode, len(every), 3 * LIMIT_S)
        assert found is not None, "SGLang takes longer than is waited for"
        return found, refused

    before, _ = generate(first, [])
    with silent_ports(len(others)) as ports:
        found, refused = generate(second, ports)
    answers = Answers.of(tokens([before, found]), alone.generate([first, second], LONG))
    told = f"longest gap between tokens {found.longest_gap_s:.2f} s, without them {before.longest_gap_s:.2f} s"
    note(f"14, {len(others)} addresses that do not answer: {served.backend}: {told}; {answers}")
    served.judge(answers)
    assert not served.is_ours or (answers.right == 2 and found.longest_gap_s < GAP_S)
    assert not served.is_ours or all(each and each.error for each in refused), refused


@PLAIN
@pytest.mark.parametrize("sides", ["both sides", "the decode side"])
def test_a_number_comes_a_second_time(served: Served, alone: EngineProcess, note: Note, sides: str):
    served.check(alone, 40)
    first, second, third = (prompts(seed, 4, shortest=100, longest=300) for seed in (41, 42, 43))
    rooms, both = [next(ROOMS) for _ in first], [*first, *second]
    computed = both if sides == "both sides" else first
    served.submit(served.pair.prefill, computed, [*rooms, *rooms][: len(computed)])
    served.submit(served.pair.decode, both, [*rooms, *rooms])
    ended(served.pair.prefill, len(computed))
    found = ended(served.pair.decode, len(both))
    is_dead = DEAD in found
    later = [DEAD] * len(third) if is_dead else served.run(third, rooms)
    what = {"the first": (found[:4], first), "the second": (found[4:], second), "the next, later": (later, third)}
    for which, (given, asked) in what.items():
        answers = Answers.of(tokens(given), alone.generate(asked, TOKENS))
        end = "; the decode server has ended" if is_dead else ""
        note(f"17, numbers that come twice on {sides}, {which}: {served.backend}: {answers}{end}")
        served.judge(answers)
        assert not served.is_ours or (answers.failed if which == "the second" else answers.right) == len(asked)


@REPLICAS
def test_two_replicas_are_prefill_servers(served: Served, alone: EngineProcess, note: Note):
    """Of SGLang's own only numbers that are even are asked before."""
    even, every = [room for room in (next(ROOMS) for _ in range(8)) if not room % 2], [next(ROOMS) for _ in range(8)]
    served.check(alone, 44, even)
    given = prompts(45, len(every), shortest=100, longest=300)
    begun_at = time.monotonic()
    answers = Answers.of(tokens(served.run(given, every)), alone.generate(given, TOKENS))
    note(f"19, --dp-size 2: {served.backend}: {answers} after {time.monotonic() - begun_at:.1f} s")
    served.judge(answers)
    assert not served.is_ours or answers.right == len(given)
