"""What SGLang's own NIXL backend answers while things change, beside ours: the same engines, prompts and changes.

Of SGLang's own nothing is asserted but that it serves before the change, and that the change was made; what it answered
is printed at the end (see `Answers`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.real_engines.beside import BACKENDS, Answers, Note
from tests.real_engines.prompts import prompts
from tests.real_engines.sglang import main_memory
from tests.real_engines.sglang.engine import EngineProcess, Output
from tests.real_engines.sglang.pairs import ROOMS, TOKENS, Pair
from tests.real_engines.sglang.test_changing_servers import model, newer, undivided, update

pytestmark = [pytest.mark.servers, pytest.mark.long, pytest.mark.timeout(1800)]

__all__ = ["model", "newer", "undivided"]  # fixtures

TIMEOUT_S = 40
"""Of SGLang's, on what waits for the other side; 300 by default."""

LIMIT_S = 60.0
"""For how long answers are waited for, which come together."""


class Served:
    """A prefill and a decode engine with one backend."""

    def __init__(self, backend: str, model: Path, directory: Path) -> None:
        limits = ("SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT", "SGLANG_DISAGGREGATION_WAITING_TIMEOUT")
        environment = dict.fromkeys(limits, str(TIMEOUT_S))
        self.backend, self.is_ours = backend, backend == "kvferry"
        own = main_memory.install(directory)
        self.pair = Pair(model, own, backend=backend, environment=environment, spawns=not self.is_ours)

    def started(self) -> Served:
        """Waits until both serve; the negative control is asserted of ours alone."""
        if self.is_ours:
            self.pair.started()
        else:
            self.pair.prefill.started()
            self.pair.decode.started()
        return self

    def run(self, given: Sequence[Sequence[int]]) -> list[Output | None]:
        """What the decode engine answers, asked the same as the prefill engine."""
        rooms = [next(ROOMS) for _ in given]
        for engine in (self.pair.prefill, self.pair.decode):
            engine.submit(given, TOKENS, rooms=rooms, port=self.pair.port, apart=True)
        ended(self.pair.prefill, len(given))
        return ended(self.pair.decode, len(given))

    def check(self, alone: EngineProcess, seed: int) -> None:
        """It serves as long as nothing changes."""
        given = prompts(seed, 4, shortest=100, longest=300)
        found = tokens(self.run(given))
        assert found == alone.generate(given, TOKENS)

    def judge(self, found: Answers) -> None:
        """Asserts what is asserted of ours."""
        assert not self.is_ours or (found.wrong, found.unfinished) == (0, 0), found


@pytest.fixture(scope="module")
def alone(undivided: EngineProcess) -> EngineProcess:
    return undivided.started()


@pytest.fixture(params=BACKENDS)
def served(request: pytest.FixtureRequest, model: Path, alone: EngineProcess, tmp_path: Path) -> Iterator[Served]:
    """Of one test each: what has become of SGLang's own after it is not known."""
    made = Served(request.param, model, tmp_path / "plug-ins")
    try:
        yield made.started()
    finally:
        made.pair.close()


def ended(engine: EngineProcess, count: int) -> list[Output | None]:
    """What an engine answers to so many requests, all of them or none."""
    try:
        return [*engine.outputs(LIMIT_S)]
    except AssertionError as error:
        if "no answer within" in str(error):
            return [None] * count
        raise


def tokens(found: Sequence[Output | None]) -> list[tuple[int, ...] | None]:
    return [None if each is None else () if each.error is not None else each.tokens for each in found]


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
