"""What a plug-in builds on in its engine, line by line, and whether the engine that is installed still has it.

Engines move classes, rename hooks and add parameters between versions, and a plug-in that does not notice moves the
wrong bytes, or none. So each plug-in writes down what it builds on, as plain data, and checks all of it when the engine
starts. Nothing here knows an engine: what is checked is found by its name, when it is checked.

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

import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import CodeType
from typing import Any, Protocol

from kvferry.errors import EngineContractError
from kvferry.loggers import logger_of

log = logger_of(__name__)


class MissingError(Exception):
    """Something that a name stands for is not there; says which."""


def find(where: str) -> Any:
    """Returns what a name stands for.

    Args:
        where: a module, or a module and what is in it, as `package.module:Class.method`.

    Raises:
        MissingError: if the module cannot be imported, or has no such thing.
    """
    module_name, _, inside = where.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:  # whatever an engine's module raises while it is imported
        raise MissingError(f"{module_name} cannot be imported ({type(error).__name__}: {error})") from error
    for name in inside.split(".") if inside else ():
        try:
            found = inspect.getattr_static(found, name) if isinstance(found, type) else getattr(found, name)
        except AttributeError:
            raise MissingError(f"{where} is gone: there is no {name!r}") from None
        if isinstance(found, (staticmethod, classmethod)):
            found = found.__func__
    return found


class Line(Protocol):
    """One thing that a plug-in builds on.

    Attributes:
        where: its name, as for `find`.
        needed_for: what the plug-in needs it for.
    """

    @property
    def where(self) -> str: ...

    @property
    def needed_for(self) -> str: ...

    def difference(self) -> str | None:
        """Returns how the engine differs from this line; None if it does not.

        Raises:
            MissingError: if the engine has no such thing.
        """
        ...


@dataclass(frozen=True, slots=True)
class Present:
    """Something that must be there, whatever it is."""

    where: str
    needed_for: str

    def difference(self) -> str | None:
        """See `Line.difference`."""
        find(self.where)
        return None


@dataclass(frozen=True, slots=True)
class Signature:
    """A function with exactly these parameters: one that ours replaces, wraps, or is called in the place of.

    Attributes:
        parameters: their names as in Python, without annotations, with an empty default: `self, room, *, tokens=`.
    """

    where: str
    parameters: str
    needed_for: str

    def difference(self) -> str | None:
        """See `Line.difference`."""
        found = parameters_of(find(self.where))
        if found == self.parameters:
            return None
        return f"{self.where} takes ({found}), and took ({self.parameters})"


@dataclass(frozen=True, slots=True)
class Call:
    """A function that the plug-in calls: it may have other parameters too, if they have defaults.

    Attributes:
        positional: how many arguments are given by their place, `self` included.
        keywords: the names of those that are given by name.
    """

    where: str
    positional: int
    keywords: tuple[str, ...]
    needed_for: str

    def difference(self) -> str | None:
        """See `Line.difference`."""
        function = find(self.where)
        try:
            inspect.signature(function).bind(*[None] * self.positional, **dict.fromkeys(self.keywords))
        except TypeError as error:
            given = ", ".join([f"{self.positional} by place", *(f"{name}=" for name in self.keywords)])
            return f"{self.where} takes ({parameters_of(function)}), and is called with {given}: {error}"
        return None


@dataclass(frozen=True, slots=True)
class Members:
    """An enumeration, or a class of constants, with these values.

    Attributes:
        members: values by name.
        and_no_others: whether a new member is a difference: one that the plug-in would not know how to treat.
    """

    where: str
    members: Mapping[str, object]
    needed_for: str
    and_no_others: bool = False

    def difference(self) -> str | None:
        """See `Line.difference`."""
        holder = find(self.where)
        found = _members(holder)
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
class Fields:
    """A class whose instances have these fields: a dataclass, a structure, or one with annotations.

    Attributes:
        names: the fields.
    """

    where: str
    names: tuple[str, ...]
    needed_for: str

    def difference(self) -> str | None:
        """See `Line.difference`."""
        found = _fields(find(self.where))
        gone = [name for name in self.names if name not in found]
        return f"{self.where} has no field {', '.join(gone)}" if gone else None


@dataclass(frozen=True, slots=True)
class Attributes:
    """A class or module with these attributes, such as methods.

    Attributes:
        names: the attributes.
        and_no_others: whether a new one is a difference, unless its name begins with an underscore: a method that the
            engine calls, and that the plug-in does not know.
    """

    where: str
    names: tuple[str, ...]
    needed_for: str
    and_no_others: bool = False

    def difference(self) -> str | None:
        """See `Line.difference`."""
        found = dir(find(self.where))
        problems = [f"{name} is gone" for name in self.names if name not in found]
        if self.and_no_others:
            problems += [f"{name} is new" for name in found if name not in self.names and not name.startswith("_")]
        return f"{self.where}: {', '.join(problems)}" if problems else None


@dataclass(frozen=True, slots=True)
class Inherits:
    """A class that is still a subclass of another.

    Attributes:
        base: the other, as for `find`.
    """

    where: str
    base: str
    needed_for: str

    def difference(self) -> str | None:
        """See `Line.difference`."""
        found, base = find(self.where), find(self.base)
        if isinstance(found, type) and isinstance(base, type) and issubclass(found, base):
            return None
        return f"{self.where} is no {self.base} any more"


@dataclass(frozen=True, slots=True)
class Mentions:
    """A function of the engine's whose code speaks of these names: what it reads, sets or calls.

    For what no signature shows: that the engine still looks at the attribute that the plug-in sets.

    Attributes:
        names: the names.
    """

    where: str
    names: tuple[str, ...]
    needed_for: str

    def difference(self) -> str | None:
        """See `Line.difference`."""
        function = inspect.unwrap(find(self.where))
        code = getattr(function, "__code__", None)
        if code is None:
            return f"{self.where} is no function any more"
        found = set(_names(code))
        gone = [name for name in self.names if name not in found]
        return f"{self.where} does not use {', '.join(gone)} any more" if gone else None


@dataclass(frozen=True, slots=True)
class Contract:
    """What a plug-in builds on in the versions of an engine that have one adapter.

    Attributes:
        engine: its name, for people.
        tried: the versions with which every line was tried, the newest last.
        lines: what must be so.
    """

    engine: str
    tried: tuple[str, ...]
    lines: tuple[Line, ...]

    def broken(self) -> tuple[str, ...]:
        """Returns how the engine that is installed differs: a text for each line that it breaks."""
        return tuple(f"{text} ({line.needed_for})" for line in self.lines if (text := _difference(line)) is not None)


def contract_for(contracts: Sequence[Contract], version: str) -> Contract:
    """Returns the contract of a version: the one that was tried with it, or with the last version before it.

    Where there is none it is the newest: what is built from source may call itself 0.1.

    Args:
        contracts: the oldest first.
        version: the engine's.
    """
    earlier = [each for each in contracts if _numbers(each.tried[0]) <= _numbers(version)]
    return earlier[-1] if earlier else contracts[-1]


def enforce(contracts: Sequence[Contract], version: str, *, warns: bool = True) -> Contract:
    """Checks the engine that is installed, and warns of a version that was not tried. Returns the contract that it has.

    Args:
        contracts: the oldest first.
        version: the engine's.
        warns: whether to warn; what is checked more than once need not.

    Raises:
        EngineContractError: if something that the plug-in builds on has changed; names all that has.
    """
    contract = contract_for(contracts, version)
    engine, tried = contract.engine, _listed([each for other in contracts for each in other.tried])
    broken = contract.broken()
    if broken:
        raise EngineContractError(
            f"kvferry's plug-in does not fit {engine} {version}, and refuses to serve with it: "
            f"{'; '.join(broken)}. Every line of the contract was tried with {engine} {tried}: install one of these, "
            f"or a kvferry that knows {engine} {version}"
        )
    if warns and _public(version) not in contract.tried:
        log.warning(
            "%s %s is not among the versions that kvferry's plug-in was tried with: %s. All %d names and signatures "
            "that it builds on are there; whether they still mean the same, nobody has tried.",
            engine,
            version,
            tried,
            len(contract.lines),
        )
    return contract


def holds(contract: Contract, version: str, otherwise: str) -> bool:
    """Checks what the plug-in serves well without, and logs an error where that has changed.

    Args:
        version: the engine's.
        otherwise: what a user misses then, as a sentence without its full stop.

    Returns:
        Whether nothing has.
    """
    broken = contract.broken()
    if broken:
        log.error(
            "kvferry's plug-in does not fit %s %s in everything: %s. %s. All of it was tried with %s %s",
            contract.engine,
            version,
            "; ".join(broken),
            otherwise,
            contract.engine,
            _listed(contract.tried),
        )
    return not broken


def parameters_of(function: Callable[..., Any]) -> str:
    """Returns a function's parameters as `Signature` has them."""
    shown: list[str] = []
    last: Any = None
    for each in inspect.signature(function).parameters.values():
        if last is each.POSITIONAL_ONLY and each.kind is not each.POSITIONAL_ONLY:
            shown.append("/")
        if each.kind is each.KEYWORD_ONLY and last not in (each.KEYWORD_ONLY, each.VAR_POSITIONAL):
            shown.append("*")
        star = "*" if each.kind is each.VAR_POSITIONAL else "**" if each.kind is each.VAR_KEYWORD else ""
        shown.append(f"{star}{each.name}{'' if each.default is each.empty else '='}")
        last = each.kind
    if last is inspect.Parameter.POSITIONAL_ONLY:
        shown.append("/")
    return ", ".join(shown)


def _difference(line: Line) -> str | None:
    try:
        return line.difference()
    except MissingError as error:
        return str(error)
    except Exception as error:  # a thing of another kind than it was: as different as one that is gone
        return f"{line.where} cannot be read ({type(error).__name__}: {error})"


def _members(holder: Any) -> dict[str, object]:
    if isinstance(holder, type) and issubclass(holder, Enum):
        return {name: member.value for name, member in holder.__members__.items()}
    return {name: value for name, value in vars(holder).items() if not name.startswith("_") and not callable(value)}


def _fields(holder: Any) -> set[str]:
    found = {name for base in inspect.getmro(holder) for name in inspect.get_annotations(base)}
    found |= set(getattr(holder, "__struct_fields__", ()))
    if dataclasses.is_dataclass(holder):
        found |= {each.name for each in dataclasses.fields(holder)}
    return found


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    yield from code.co_varnames
    yield from code.co_freevars
    yield from code.co_cellvars
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
        elif isinstance(constant, str):
            yield constant
        elif isinstance(constant, tuple):
            yield from (each for each in constant if isinstance(each, str))


def _public(version: str) -> str:
    """Returns a version without what a distributor adds: 0.32.0+cpu is 0.32.0."""
    return version.partition("+")[0]


def _numbers(version: str) -> tuple[int, ...]:
    """Returns the numbers that a version begins with: 0.32.1rc1 is later than 0.32.0, and earlier than 0.33."""
    return tuple(int(each) for each in re.findall(r"\d+", _public(version))[:3])


def _listed(versions: Sequence[str]) -> str:
    *others, last = dict.fromkeys(versions)
    return f"{', '.join(others)} and {last}" if others else last
