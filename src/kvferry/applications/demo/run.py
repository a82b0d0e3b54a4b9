"""Starts the demo's processes and collects what they report."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from typing import Any

from kvferry.applications.demo import ranks
from kvferry.applications.demo.options import DemoOptions
from kvferry.control.construction import create_registry
from kvferry.errors import KVFerryError
from kvferry.layout import RankCoordinates
from kvferry.pools.pool import Pool
from kvferry.settings import Settings

_DEADLINE_S = 180.0
_PRELOADED = ["kvferry.applications.demo.reference.preload", "kvferry.applications.demo.ranks"]


class DemoError(KVFerryError):
    """A process of the demo failed; the message names it and quotes its error."""


@dataclass(frozen=True, slots=True)
class RankName:
    """Which process: a rank of an engine on one side, or the undivided model."""

    side: str
    engine: int = 0
    coordinates: RankCoordinates = RankCoordinates()  # noqa: RUF009 - frozen

    def __str__(self) -> str:
        return f"{self.side} engine {self.engine} rank {self.coordinates.engine_rank}"


@dataclass(slots=True, eq=False)
class Outcome:
    """Everything that the processes reported, in the words of `ranks`."""

    reports: dict[RankName, list[Any]] = field(default_factory=dict)

    def of(self, kind: type, side: str) -> list[tuple[RankName, Any]]:
        """Reports of one kind from one side."""
        return [
            (name, report)
            for name, reports in self.reports.items()
            if name.side == side
            for report in reports
            if isinstance(report, kind)
        ]

    def pool(self, name: RankName) -> Pool:
        """A rank's memory, as it was at the end."""
        (ended,) = (report for report in self.reports[name] if isinstance(report, ranks.Ended))
        assert ended.pool is not None
        return ended.pool


@dataclass(slots=True, eq=False)
class _Child:
    name: RankName
    process: BaseProcess
    reports: multiprocessing.connection.Connection
    arguments: tuple[Any, ...]  # kept: a queue that nobody here holds is gone before the process has it
    has_ended: bool = False


def run(options: DemoOptions, on_report: Callable[[RankName, Any], None]) -> Outcome:
    """Runs the demo.

    Args:
        on_report: called with every report as it comes.

    Raises:
        DemoError: if a process fails, dies or takes too long. All others are ended then.
    """
    # A fork server imports torch and transformers once and forks every rank from there, before any thread exists.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with create_registry(Settings(registry_port=0)) as registry:
        children = _start(context, options, registry.url)
        try:
            return _collect(children, on_report)
        finally:
            for child in children:
                with suppress(OSError):
                    child.reports.send(None)  # lets those go that wait for the end
            deadline = time.monotonic() + 5
            for child in children:
                child.process.join(max(0.1, deadline - time.monotonic()))
                if child.process.is_alive():
                    child.process.kill()
                    child.process.join()
                child.reports.close()


def _start(context: multiprocessing.context.ForkServerContext, options: DemoOptions, registry_url: str) -> list[_Child]:
    children = []

    def spawn(name: RankName, main: Callable[..., None], *arguments: Any) -> None:
        ours, theirs = context.Pipe()
        process = context.Process(
            target=ranks.guarded, args=(main, theirs, options, *arguments), name=str(name), daemon=True
        )
        process.start()
        theirs.close()
        children.append(_Child(name, process, ours, arguments))

    for engine in range(options.prefill.count):
        for coordinates in options.prefill.coordinates:
            spawn(RankName("prefill", engine, coordinates), ranks.prefill_main, registry_url, engine, coordinates)
    for engine in range(options.decode.count):
        shards = context.Queue()
        for coordinates in options.decode.coordinates:
            spawn(RankName("decode", engine, coordinates), ranks.decode_main, registry_url, engine, coordinates, shards)
    spawn(RankName("undivided"), ranks.undivided_main)
    return children


def _can_start(children: list[_Child], outcome: Outcome) -> bool:
    """Whether every rank is connected and the undivided model is through: nothing disturbs the transfers then."""
    return all(
        child.has_ended or any(isinstance(report, ranks.Ready) for report in outcome.reports[child.name])
        for child in children
    )


def _collect(children: list[_Child], on_report: Callable[[RankName, Any], None]) -> Outcome:
    outcome = Outcome({child.name: [] for child in children})
    deadline = time.monotonic() + _DEADLINE_S
    has_started = False
    while running := [child for child in children if not child.has_ended]:
        readable = multiprocessing.connection.wait([child.reports for child in running], timeout=1.0)
        if time.monotonic() > deadline:
            waiting = ", ".join(str(child.name) for child in running)
            raise DemoError(f"the demo did not end within {_DEADLINE_S:g} s; still at work: {waiting}")
        for child in running:
            if child.reports not in readable:
                continue
            try:
                report = child.reports.recv()
            except (EOFError, OSError):
                child.process.join(1.0)
                raise DemoError(f"{child.name} died with exit code {child.process.exitcode}") from None
            if isinstance(report, ranks.Crashed):
                raise DemoError(f"{child.name} failed: {report.error}\n{report.details}")
            child.has_ended = isinstance(report, ranks.Ended)
            outcome.reports[child.name].append(report)
            on_report(child.name, report)
        if not has_started and _can_start(children, outcome):
            has_started = True
            for child in children:
                if not child.has_ended:
                    child.reports.send(None)
    return outcome
