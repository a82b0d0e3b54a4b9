"""Prefill and decode engines of vLLM's, and requests that cross from one to another."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, WeakSet

from tests.real_engines.prompts import prompts
from tests.real_engines.vllm.engine import EngineProcess, Output, Shape
from tests.support.registries import RegistryProcess

from kvferry.engines.vllm.parameters import ROOM, TRANSFER

COUNT = 12
"""Tokens that are generated for every prompt."""

SETTINGS: Mapping[str, Any] = {
    "heartbeat_interval_s": 0.5,
    "peer_timeout_s": 10.0,
    "bootstrap_timeout_s": 20.0,
    "quarantine_s": 0.3,
}


class Engines:
    """Engines of one model that find each other, started when they are first asked for."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._registry = RegistryProcess(lease_s=2.0)
        self._begun: dict[str, EngineProcess] = {}

    def begin(self, name: str, **changes: Any) -> EngineProcess:
        """Begins to start one, so that several start at the same time.

        Args:
            changes: to its shape. Settings come on top of ours; None stands for no settings at all.
        """
        more = changes.pop("settings", {})
        settings = {} if more is None else {**SETTINGS, "registry_url": self._registry.url, **more}
        shape = replace(Shape(self._model, name=name, settings=settings), **changes)
        self._begun[name] = EngineProcess(shape)
        return self._begun[name]

    def prefill(self, name: str, **changes: Any) -> EngineProcess:
        """A prefill engine. One of one rank schedules asynchronously, as GPUs do, unless that is changed."""
        changes = {"role": "kv_producer", "is_asynchronous": changes.get("tp", 1) == 1, **changes}
        return self._begun.get(name) or self.begin(name, **changes)

    def decode(self, name: str, **changes: Any) -> EngineProcess:
        """A decode engine."""
        return self._begun.get(name) or self.begin(name, role="kv_consumer", **changes)

    def alone(self) -> EngineProcess:
        """One that does everything itself."""
        return self._begun.get("alone") or self.begin("alone", connector="")

    def close(self) -> None:
        """Ends all of them."""
        for engine in self._begun.values():
            engine.begin_to_close()
        for engine in self._begun.values():
            engine.close()
        self._registry.kill()


class Pair:
    """A prefill and a decode engine."""

    _rooms = itertools.count(1)
    _seen: ClassVar[WeakKeyDictionary[EngineProcess, WeakSet[EngineProcess]]] = WeakKeyDictionary()

    def __init__(self, prefill: EngineProcess, decode: EngineProcess) -> None:
        """Waits until both serve and, once for any two engines, makes sure that caches are told apart."""
        self.prefill, self.decode = prefill.started(), decode.started()
        seen = self._seen.setdefault(prefill, WeakSet())
        if decode not in seen and prefill.shape.connector == "kvferry":
            seen.add(decode)
            self._check_another_prompt()

    def _check_another_prompt(self) -> None:
        """Another prompt on the prefill side never becomes an answer: the negative control of all that is compared."""
        (there,), (here,) = prompts(9001, 1, shortest=100), prompts(9002, 1, shortest=100)
        name = f"control-{next(self._rooms)}"
        self.begin(name, there, here=here)
        self.prefill.output(name)
        answer = self.decode.output(name)
        if self.decode.shape.policy == "recompute":
            assert (answer.tokens,) == tuple(self.decode.generate([here], COUNT)), "an answer to another prompt"
        else:
            assert (answer.tokens, answer.reason) == ((), "error"), "another prompt became an answer"
        self.prefill.wait_idle()
        self.decode.wait_idle()

    def begin(
        self,
        name: str,
        prompt: Sequence[int],
        count: int = COUNT,
        choices: int = 1,
        *,
        by_transfer: bool = False,
        here: Sequence[int] | None = None,
    ) -> None:
        """Asks both engines at once, the decode engine first, and it alone for several choices.

        Args:
            by_transfer: whether both are told the transfer's name, and not a room.
            here: another prompt on the decode side.
        """
        of_both = {TRANSFER: f"xfer-{name}"} if by_transfer else {ROOM: next(self._rooms)}
        there = self.prefill.shape.name
        parameters = {"do_remote_prefill": True, "remote_engine_id": there, **of_both}
        self.decode.submit(name, here or prompt, count, parameters, choices)
        self.prefill.submit(name, prompt, 1, {"do_remote_decode": True, **of_both})

    def run(
        self, each: Sequence[Sequence[int]], tag: str, choices: int = 1, *, by_transfer: bool = False
    ) -> list[Output]:
        """All prompts at once; see `begin`."""
        for number, prompt in enumerate(each):
            self.begin(f"{tag}-{number}", prompt, choices=choices, by_transfer=by_transfer)
        for number in range(len(each)):
            self.prefill.output(f"{tag}-{number}")
        return [self.decode.output(f"{tag}-{number}") for number in range(len(each))]

    def run_in_turn(self, prompt: Sequence[int], name: str, choices: int = 1) -> Output:
        """First the prefill engine, then the decode engine with what that has answered, as most gateways do.

        They ask the prefill engine for as many choices as they were asked for.
        """
        self.prefill.submit(name, prompt, 1, {"do_remote_decode": True}, choices)
        answer = self.prefill.output(name)
        self.decode.submit(name, prompt, COUNT, answer.parameters, choices)
        return self.decode.output(name)

    @property
    def received(self) -> int:
        """How many requests' caches have come, by the decode engine's own account."""
        counted: float = self.decode.ask("metric", "vllm:kvferry_receive_seconds_count")
        return round(counted / self.decode.shape.tp)

    @property
    def said(self) -> str:
        """What kvferry has logged on both sides."""
        lines = [f"{each.shape.name}: {line}" for each in (self.prefill, self.decode) for line in each.ask("logged")]
        return "\n".join(lines)

    def free_blocks(self) -> tuple[int, int]:
        """On either side, once nothing goes on."""
        for engine in (self.prefill, self.decode):
            engine.wait_idle()
        return self.prefill.ask("free_blocks"), self.decode.ask("free_blocks")
