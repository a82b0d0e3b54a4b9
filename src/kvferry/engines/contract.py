"""What a plug-in builds on in its engine, line by line, and whether an engine still has it.

Engines move classes, rename hooks and add parameters between versions, and a plug-in that does not notice moves the
wrong bytes, or none. So each plug-in writes down what it builds on, as plain data, and checks all of it when the engine
starts. A contract has two levels: what the plug-in calls, is called by, or shares with the engine (a change stops the
server), and what was merely read in it once (`Mentions`: a change warns, and the server serves). Nothing here knows an
engine: what is checked is found by its name, when it is checked, in the engine that is installed or in its sources.

    CONTRACT = Contract(
        engine="SGLang",
        tried=("0.5.23",),
        lines=(
            Signature("sglang.srt.conn:BaseKVSender.init", "self, num_kv_indices, aux_index=", "ours is called so"),
            Members("sglang.srt.conn:KVPoll", {"Failed": 0, "Success": 4}, "we report states so"),
        ),
    )
    enforce((CONTRACT,), version("sglang"))
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvferry.engines.engine_code import EngineCode, Imported, MissingError
from kvferry.errors import EngineContractError
from kvferry.loggers import logger_of

log = logger_of(__name__)


class Line:
    """One thing that a plug-in builds on.

    Attributes:
        where: its name, as `EngineCode` has it.
        needed_for: what the plug-in needs it for.
    """

    __slots__ = ()
    where: str
    needed_for: str

    def difference(self, code: EngineCode) -> str | None:
        """Returns how an engine differs from this line; None if it does not.

        Raises:
            MissingError: if the engine has no such thing.
            TypeError: if it is of another kind.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Present(Line):
    """Something that must be there, whatever it is."""

    where: str
    needed_for: str

    def difference(self, code: EngineCode) -> str | None:
        code.check(self.where)
        return None


@dataclass(frozen=True, slots=True)
class Signature(Line):
    """A function with exactly these parameters: one that ours replaces, wraps, or is called in the place of.

    Attributes:
        parameters: their names as in Python, without annotations, with an empty default: `self, room, *, tokens=`.
    """

    where: str
    parameters: str
    needed_for: str

    def difference(self, code: EngineCode) -> str | None:
        found = parameters_of(code.signature(self.where))
        if found == self.parameters:
            return None
        return f"{self.where} takes ({found}), and took ({self.parameters})"


@dataclass(frozen=True, slots=True)
class Call(Line):
    """A function that the plug-in calls: it may have other parameters too, if they have defaults.

    Attributes:
        positional: how many arguments are given by their place, `self` included.
        keywords: the names of those that are given by name.
    """

    where: str
    positional: int
    keywords: tuple[str, ...]
    needed_for: str

    def difference(self, code: EngineCode) -> str | None:
        signature = code.signature(self.where)
        try:
            signature.bind(*[None] * self.positional, **dict.fromkeys(self.keywords))
        except TypeError as error:
            given = ", ".join([f"{self.positional} by place", *(f"{name}=" for name in self.keywords)])
            return f"{self.where} takes ({parameters_of(signature)}), and is called with {given}: {error}"
        return None


@dataclass(frozen=True, slots=True)
class Members(Line):
    """An enumeration, or a class of constants, with these values.

    Attributes:
        members: values by name.
        and_no_others: whether a new member is a difference: one that the plug-in would not know how to treat.
    """

    where: str
    members: Mapping[str, object]
    needed_for: str
    and_no_others: bool = False

    def difference(self, code: EngineCode) -> str | None:
        found = code.members(self.where)
        problems = [f"{name} is gone" for name in self.members if name not in found]
        problems += [
            f"{name} is {found[name]!r}, and was {value!r}"
            for name, value in self.members.items()
            if name in found and found[name] != value
        ]
        if self.and_no_others:
            problems += [f"{name} is new" for name in found if name not in self.members]
        return f"{self.where}: {', '.join(problems)}" if problems else None


@dataclass(frozen=True, slots=True)
class Named(Line):
    """Something that has several names."""

    where: str
    names: tuple[str, ...]
    needed_for: str


@dataclass(frozen=True, slots=True)
class Fields(Named):
    """A class whose instances have these fields: a dataclass, a structure, or one with annotations."""

    def difference(self, code: EngineCode) -> str | None:
        found = code.fields(self.where)
        gone = [name for name in self.names if name not in found]
        return f"{self.where} has no field {', '.join(gone)}" if gone else None


@dataclass(frozen=True, slots=True)
class Attributes(Named):
    """A class or module with these attributes, such as methods.

    Attributes:
        and_no_others: whether a new one is a difference, unless its name begins with an underscore: a method that the
            engine calls, and that the plug-in does not know.
    """

    and_no_others: bool = False

    def difference(self, code: EngineCode) -> str | None:
        found = code.attributes(self.where)
        problems = [f"{name} is gone" for name in self.names if name not in found]
        if self.and_no_others:
            others = sorted(name for name in found if name not in self.names and not name.startswith("_"))
            problems += [f"{name} is new" for name in others]
        return f"{self.where}: {', '.join(problems)}" if problems else None


@dataclass(frozen=True, slots=True)
class Inherits(Line):
    """A class that is still a subclass of another.

    Attributes:
        base: the other's name.
    """

    where: str
    base: str
    needed_for: str

    def difference(self, code: EngineCode) -> str | None:
        if code.is_subclass(self.where, self.base):
            return None
        return f"{self.where} is no {self.base} any more"


@dataclass(frozen=True, slots=True)
class Uses(Named):
    """A function of the engine's whose code uses names by which it and the plug-in meet.

    For what no signature shows: that it still calls the hook, sets the attribute that the plug-in reads, looks at what
    the plug-in sets, or divides and lists as the plug-in does.
    """

    def difference(self, code: EngineCode) -> str | None:
        found = code.names_in(self.where)
        gone = [name for name in self.names if name not in found]
        return f"{self.where} does not use {', '.join(gone)} any more" if gone else None


@dataclass(frozen=True, slots=True)
class Mentions(Uses):
    """A function of the engine's whose code was read once, and spoke of these names: what made its authors sure.

    Nothing of the plug-in's goes by it when it runs.
    """


_KINDS: Mapping[str, Callable[[str, str, str], Line]] = {
    "takes": Signature,
    "call": lambda where, given, needed_for: Call(where, int(given), (), needed_for),
    "members": lambda where, names, needed_for: Members(
        where, {each.upper(): each for each in names.split()}, needed_for
    ),
    "fields": lambda where, names, needed_for: Fields(where, tuple(names.split()), needed_for),
    "attributes": lambda where, names, needed_for: Attributes(where, tuple(names.split()), needed_for),
    "all": lambda where, names, needed_for: Attributes(where, tuple(names.split()), needed_for, and_no_others=True),
    "uses": lambda where, names, needed_for: Uses(where, tuple(names.split()), needed_for),
    "mentions": lambda where, names, needed_for: Mentions(where, tuple(names.split()), needed_for),
}


def lines(table: str) -> tuple[Line, ...]:
    """Reads lines as a plug-in writes them down, where each says enough by its kind, its place and names.

    What is not indented says what the rows below it are needed for. A row is `kind where: names`, and goes on where the
    next one is indented twice. Kinds are `takes`, for a `Signature`; `call`, with how many arguments are given by their
    place; `members`, whose values are called as they are; `attributes`, and `all` for those that have no others;
    `fields`, `uses` and `mentions`.

    Raises:
        ValueError: if a row is none of these.
    """
    found, needed_for = [], ""
    for row in re.sub(r"\n {8}", " ", table).splitlines():
        match = re.fullmatch(r" {4}(\w+) (\S+): (.+)", row)
        if match is not None and match[1] in _KINDS:
            found.append(_KINDS[match[1]](match[2], match[3], needed_for))
        elif row.startswith(" "):
            raise ValueError(f"no line of a contract: {row!r}")
        else:
            needed_for = row
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Contract:
    """What a plug-in builds on in the versions of an engine that have one adapter.

    Attributes:
        engine: its name, for people.
        tried: the versions with which every line was tried, the newest last.
        lines: what must be so.
        read: versions whose sources have every line, and that nobody has tried.
    """

    engine: str
    tried: tuple[str, ...]
    lines: tuple[Line, ...]
    read: tuple[str, ...] = ()

    def broken(self, code: EngineCode | None = None) -> tuple[str, ...]:
        """Returns how an engine differs in what the plug-in meets: a text for each line that it breaks.

        Args:
            code: the engine's; that of the one that is installed, if it is not given.
        """
        return tuple(text for _, text in self.differences(code, only_read=False))

    def moved(self, code: EngineCode | None = None) -> tuple[str, ...]:
        """Returns how an engine differs in what was merely read: a text for each such line."""
        return tuple(text for _, text in self.differences(code, only_read=True))

    def differences(self, code: EngineCode | None = None, *, only_read: bool) -> Iterator[tuple[Line, str]]:
        """Yields the lines of one level that do not hold, and how the engine differs.

        Args:
            only_read: whether of those that were merely read.
        """
        code = code or Imported()
        for line in self.lines:
            if isinstance(line, Mentions) == only_read and (text := _difference(line, code)) is not None:
                yield line, f"{text} ({line.needed_for})"


def contract_for(contracts: Sequence[Contract], version: str) -> Contract:
    """Returns the contract of a version: the one that is for it, or for the last version before it.

    Where there is none it is the newest: what is built from source may call itself 0.1.

    Args:
        contracts: the oldest first.
    """
    earlier = [each for each in contracts if _numbers((*each.tried, *each.read)[0]) <= _numbers(version)]
    return earlier[-1] if earlier else contracts[-1]


def enforce(contracts: Sequence[Contract], version: str, *, warns: bool = True) -> Contract:
    """Checks the engine that is installed. Returns the contract that it has.

    Warns of what was merely read in it and is otherwise now, and of a version that was not tried.

    Args:
        contracts: the oldest first.
        warns: whether to warn; what is checked more than once need not.

    Raises:
        EngineContractError: if something that the plug-in meets has changed; names all that has.
    """
    contract = contract_for(contracts, version)
    engine, tried = contract.engine, _listed([each for other in contracts for each in other.tried])
    if broken := contract.broken():
        raise EngineContractError(
            f"kvferry's plug-in does not fit {engine} {version}, and refuses to serve with it: "
            f"{'; '.join(broken)}. Every line of the contract was tried with {engine} {tried}: install one of these, "
            f"or a kvferry that knows {engine} {version}"
        )
    if not warns:
        return contract
    if moved := contract.moved():
        log.warning(
            "%s %s is not all that was read of it when kvferry's plug-in was written: %s. The plug-in meets none of "
            "that when it runs, and serves; whether what was concluded from it still holds, nobody has tried.",
            engine,
            version,
            "; ".join(moved),
        )
    if _public(version) not in contract.tried:
        log.warning(
            "%s %s is not among the versions that kvferry's plug-in was tried with: %s. All %d names and signatures "
            "that it builds on are there; whether they still mean the same, nobody has tried.",
            engine,
            version,
            tried,
            sum(not isinstance(line, Mentions) for line in contract.lines),
        )
    return contract


def holds(contract: Contract, version: str, otherwise: str) -> bool:
    """Checks what the plug-in serves well without, and logs an error where that has changed.

    Args:
        otherwise: what a user misses then, as a sentence without its full stop.

    Returns:
        Whether nothing has.
    """
    changed = (*contract.broken(), *contract.moved())
    if changed:
        log.error(
            "kvferry's plug-in does not fit %s %s in everything: %s. %s. All of it was tried with %s %s",
            contract.engine,
            version,
            "; ".join(changed),
            otherwise,
            contract.engine,
            _listed(contract.tried),
        )
    return not changed


class _Shown:
    """What stands for a default: nothing, behind the sign."""

    def __repr__(self) -> str:
        return ""


def parameters_of(signature: inspect.Signature) -> str:
    """Returns parameters as `Signature` has them."""
    shown = [
        each.replace(annotation=each.empty, default=each.empty if each.default is each.empty else _Shown())
        for each in signature.parameters.values()
    ]
    return str(inspect.Signature(shown))[1:-1]


def _difference(line: Line, code: EngineCode) -> str | None:
    try:
        return line.difference(code)
    except MissingError as error:
        return str(error)
    except Exception as error:  # a thing of another kind than it was: as different as one that is gone
        return f"{line.where} cannot be read ({type(error).__name__}: {error})"


def _public(version: str) -> str:
    """Returns a version without what a distributor adds: 0.32.0+cpu is 0.32.0."""
    return version.partition("+")[0]


def _numbers(version: str) -> tuple[int, ...]:
    """Returns the numbers that a version begins with: 0.32.1rc1 is later than 0.32.0, and earlier than 0.33."""
    return tuple(int(each) for each in re.findall(r"\d+", _public(version))[:3])


def _listed(versions: Sequence[str]) -> str:
    *others, last = dict.fromkeys(versions)
    return f"{', '.join(others)} and {last}" if others else last
