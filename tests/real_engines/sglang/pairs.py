"""A prefill and a decode engine of SGLang's, each in processes of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from tests.real_engines.prompts import prompts
from tests.real_engines.sglang.engine import EngineProcess, Output, Shape, disaggregated
from tests.real_engines.sglang.tampering import Tampering

from kvferry.applications.up.supervision import free_ports

TOKENS = 12
ROOMS = count(1000)


class Pair:
    """A prefill and a decode engine."""

    def __init__(
        self,
        model: Path,
        directory: Path,
        *,
        backend: str = "kvferry",
        environment: Mapping[str, str] | None = None,
        spawns: bool = False,
        page_sizes: tuple[int, int] = (16, 16),
        of_prefill: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Begins to start both.

        Args:
            spawns: see `Shape`.
            page_sizes: tokens in a page of the prefill and of the decode engine.
            of_prefill: options of SGLang's, of the prefill engine alone.
            options: likewise, of both engines.
        """
        self.tampering = Tampering(directory)
        (self.port,) = free_ports(1)
        self._model, self._backend = model, backend
        self._options = options
        self._of_prefill = of_prefill or {}
        self._environment = {**self.tampering.environment, **(environment or {})}
        self._spawns = spawns
        self._prefill_page, decode_page = page_sizes
        self.prefill = self.begin_prefill()
        self.decode = self.begin_decode(page_size=decode_page)

    def _begin(self, mode: str, *, model: Path | None = None, **options: Any) -> EngineProcess:
        given = disaggregated(mode, self.port, self._backend, **{**self._options, **options})
        path = (self.tampering.directory,)
        return EngineProcess(Shape(model or self._model, given, self._environment, path, self._spawns))

    def begin_prefill(self, **options: Any) -> EngineProcess:
        """Begins to start a prefill engine, with other options than those of both."""
        more = {"chunked_prefill_size": 128, "page_size": self._prefill_page, **self._of_prefill, **options}
        return self._begin("prefill", **more)

    def begin_decode(self, model: Path | None = None, **options: Any) -> EngineProcess:
        """Begins to start a decode engine, with another model or other options than those of both."""
        return self._begin("decode", model=model, disaggregation_decode_enable_radix_cache=True, **options)

    def started(self) -> Pair:
        """Waits until both serve, and makes sure that steps overlap unless told not to, and caches are told apart."""
        self.prefill.started()
        self.decode.started()
        overlaps = not self._options.get("disable_overlap_schedule", False)
        said = {(each["side"], each["overlaps"]) for each in self.tampering.said("all")}
        assert said == {("prefill", overlaps), ("decode", overlaps)}, said
        refuse_another_prompt(self.prefill, self.decode, self.port)
        self.tampering.forget()
        return self

    def submit(self, given: Sequence[Sequence[int]], tokens: int = TOKENS) -> list[int]:
        """Hands requests to both, as gateways do; returns their rooms."""
        rooms = [next(ROOMS) for _ in given]
        for engine in (self.prefill, self.decode):
            engine.submit(given, tokens, rooms=rooms, port=self.port)
        return rooms

    def run(self, given: Sequence[Sequence[int]], tokens: int = TOKENS) -> list[Output]:
        """What the decode engine answers."""
        self.submit(given, tokens)
        self.prefill.outputs()
        return self.decode.outputs()

    def all_tokens(self, side: str) -> int:
        """How many tokens the scheduler of one side has.

        Not the most that it was ever seen to have free: what is free and what is cached are read one after the other,
        and what goes from here to there meanwhile counts twice.
        """
        tokens: int = next(each["tokens"] for each in self.tampering.said("all") if each["side"] == side)
        return tokens

    def free_tokens(self, side: str) -> dict[str, Any]:
        """How many tokens the scheduler of one side can give to requests, and since when."""
        return [each for each in self.tampering.said("free") if each["side"] == side][-1]

    def restart_prefill(self) -> None:
        """In the place of one that was killed."""
        self.prefill = self.begin_prefill().started()

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()


def refuse_another_prompt(prefill: EngineProcess, decode: EngineProcess, port: int) -> None:
    """Another prompt on the prefill side never becomes an answer: the negative control of every pair."""
    rooms = [next(ROOMS)]
    for engine, seed in ((prefill, 9001), (decode, 9002)):
        engine.submit(prompts(seed, 1, shortest=100), TOKENS, rooms=rooms, port=port)
    (told,), (refused,) = prefill.outputs(), decode.outputs()
    assert refused.tokens == (), "another prompt became an answer"
    assert ["another prompt" in (each.error or "") for each in (told, refused)] == [True, True], (told, refused)


def assert_equal(found: Sequence[Output], expected: Sequence[tuple[int, ...]]) -> None:
    assert [each.error for each in found] == [None] * len(found)
    assert [each.tokens for each in found] == list(expected)


def check_stages(model: Path, undivided: EngineProcess, side: str) -> None:
    """Two pipeline stages on one side, and one on the other, generate what the undivided engine does.

    The control comes first: stages that do not agree on what became of it have unequal memory for the others. Steps
    overlap on the other side alone: SGLang switches that off where there are stages.

    Args:
        side: the one with two: prefill or decode.
    """
    (port,) = free_ports(1)
    options: dict[str, dict[str, Any]] = {"prefill": {"chunked_prefill_size": 128}, "decode": {}}
    options[side]["pp_size"] = 2
    begun = {
        mode: EngineProcess(
            Shape(
                model,
                disaggregated(mode, port, **more),
                {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"} if mode == side else {},
            )
        )
        for mode, more in options.items()
    }
    prefill, decode = begun["prefill"], begun["decode"]
    try:
        refuse_another_prompt(prefill.started(), decode.started(), port)
        given = prompts(11, 6, shortest=20, longest=400)
        rooms = [next(ROOMS) for _ in given]
        for engine in (prefill, decode):
            engine.submit(given, TOKENS, rooms=rooms, port=port)
        prefill.outputs()
        assert_equal(decode.outputs(), undivided.generate(given, TOKENS))
    finally:
        prefill.close()
        decode.close()
