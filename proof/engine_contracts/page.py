"""What a release of an engine has of the contracts of kvferry's plug-in, and the page that says so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from kvferry.engines.contract import Contract, Line, Mentions, Uses, contract_for
from kvferry.engines.engine_code import MissingError
from kvferry.engines.sglang import contract as of_sglang
from kvferry.engines.vllm import contract as of_vllm
from proof.engine_contracts.sources import Sources, spoken_of

_MOST_PLACES = 3


@dataclass(frozen=True, slots=True)
class Plugin:
    """What a plug-in builds on.

    Attributes:
        package: the engine's, which is its distribution's name too.
        serving: without which it does not serve; the oldest first.
        parts: without which it lacks something, by what that is.
    """

    package: str
    serving: tuple[Contract, ...]
    parts: tuple[tuple[str, Contract], ...]

    @property
    def tried(self) -> tuple[str, ...]:
        """The versions that were tried."""
        return tuple(version for contract in self.serving for version in contract.tried)

    @property
    def read(self) -> tuple[str, ...]:
        """The versions whose sources have the contract, and that nobody has tried."""
        return tuple(version for contract in self.serving for version in contract.read)


def plugins() -> dict[str, Plugin]:
    """Returns the plug-ins, by their engines' packages."""
    on_cpus = Contract("vLLM", of_vllm.CONTRACTS[-1].tried, of_vllm.CPU_LINES)
    ranges = "refuses KVFERRY_LAYER_RANGES"
    both = (
        Plugin(
            "vllm",
            of_vllm.CONTRACTS,
            (("refuses to serve on a CPU", on_cpus), ("may not drain on a SIGTERM", of_vllm.ENDING)),
        ),
        Plugin(
            "sglang",
            of_sglang.SERVING,
            ((ranges, of_sglang.LAYERS[-1]), ("tells its peers late that it ends", of_sglang.ENDING)),
        ),
    )
    return {each.package: each for each in both}


class Verdict(Enum):
    """What is to be expected of a version."""

    TRIED = "tried"
    HOLDS = "contract holds"
    BROKEN = "contract broken"


@dataclass(frozen=True, slots=True)
class Report:
    """What a release has of a plug-in's contracts.

    Attributes:
        engine: its name, for people.
        version: the release's.
        modules: how many of its modules were read.
        counts: how many lines there are that stop a server, and how many that warn.
        broken: how it differs where that stops a server.
        moved: how it differs where that warns.
        lacking: what a server does then, and how it differs, where it serves without.
        was_tried: whether the version is one with which every line was tried.
    """

    engine: str
    version: str
    modules: int
    counts: tuple[int, int]
    broken: tuple[str, ...]
    moved: tuple[str, ...]
    lacking: tuple[tuple[str, str], ...]
    was_tried: bool

    @property
    def verdict(self) -> Verdict:
        """What is to be expected of it."""
        if self.broken:
            return Verdict.BROKEN
        return Verdict.TRIED if self.was_tried else Verdict.HOLDS

    def lines(self) -> Iterator[str]:
        """Yields the page's lines, in Markdown."""
        stop, warn = self.counts
        yield f"## {self.engine} {self.version}: {self.verdict.value}"
        yield ""
        yield f"{self.modules} modules read, none imported."
        yield ""
        yield "| level | lines | of them changed | a server |"
        yield "|---|---|---|---|"
        yield f"| what kvferry calls, is called by or shares | {stop} | {len(self.broken)} | {self._then} |"
        says = "says nothing" if self.broken or not self.moved else "warns, naming each, and serves"
        yield f"| what was merely read once | {warn} | {len(self.moved)} | {says} |"
        texts = [*(f"stops: {each}" for each in self.broken), *(f"warns: {each}" for each in self.moved)]
        texts += [f"{does}: {text}" for does, text in self.lacking]
        if texts:
            yield ""
            yield from (f"* {each}" for each in texts)

    @property
    def _then(self) -> str:
        return {
            Verdict.TRIED: "serves",
            Verdict.HOLDS: "serves, and warns that nobody has tried it",
            Verdict.BROKEN: "refuses to serve",
        }[self.verdict]


def report(plugin: Plugin, version: str, code: Sources) -> Report:
    """Checks a release by its sources.

    Args:
        plugin: what it is checked for.
        version: the release's.
        code: its sources.
    """
    contract = contract_for(plugin.serving, version)

    def changed(*, only_read: bool) -> tuple[str, ...]:
        differences = tuple(contract.differences(code, only_read=only_read))
        return tuple(f"{text}{_elsewhere(line, code)}" for line, text in differences)

    return Report(
        engine=contract.engine,
        version=version,
        broken=changed(only_read=False),
        moved=changed(only_read=True),
        lacking=tuple((does, text) for does, part in plugin.parts for text in (*part.broken(code), *part.moved(code))),
        counts=(
            sum(not isinstance(line, Mentions) for line in contract.lines),
            sum(isinstance(line, Mentions) for line in contract.lines),
        ),
        modules=len(code.modules),
        was_tried=version.partition("+")[0] in plugin.tried,
    )


def _elsewhere(line: Line, code: Sources) -> str:
    """Returns which other functions speak of what a function does not any more: of its module, or else of any."""
    if not isinstance(line, Uses):
        return ""
    module = line.where.partition(":")[0]
    try:
        gone = set(line.names) - code.names_in(line.where)
    except (MissingError, TypeError):
        gone = set(line.names)
    for modules in ([module], [name for name in code.modules if name != module]):
        places = [
            f"{name}:{function}"
            for name in modules
            for function, node in code.functions(name)
            if gone <= set(spoken_of(node))
        ]
        if places:
            others = ", ..." if len(places) > _MOST_PLACES else ""
            return f": now in {', '.join(places[:_MOST_PLACES])}{others}"
    return ""
