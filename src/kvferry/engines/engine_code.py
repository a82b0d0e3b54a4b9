"""What an engine's code is like, asked for one thing at a time, by its name.

`EngineCode` is what the lines of a contract ask. `Imported` answers from the engine that is installed, and imports what
it is asked for; an engine's sources answer as well, without being run: `proof.engine_contracts`.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Iterator, Mapping, Set
from enum import Enum
from types import CodeType
from typing import Any, Protocol


class MissingError(Exception):
    """Something that a name stands for is not there; says which."""


class EngineCode(Protocol):
    """An engine's code. A name is a module, or one and what is in it: `package.module:Class.method`.

    Each raises MissingError where there is no such thing, and TypeError where it is of another kind.
    """

    def check(self, where: str) -> None:
        """Makes sure that it is there, whatever it is."""

    def signature(self, where: str) -> inspect.Signature:
        """Returns a function's; a method's has its first parameter."""

    def members(self, where: str) -> Mapping[str, object]:
        """Returns the values of an enumeration, or of a class of constants, by name."""

    def fields(self, where: str) -> Set[str]:
        """Returns the names that a class has annotated, or one that it inherits from."""

    def attributes(self, where: str) -> Set[str]:
        """Returns the names that a class, an object or a module has."""

    def is_subclass(self, where: str, base: str) -> bool:
        """Returns whether one class inherits from another."""

    def names_in(self, where: str) -> Set[str]:
        """Returns the names and texts that a function's code speaks of."""


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


class Imported:
    """The engine that is installed; see `EngineCode`."""

    def check(self, where: str) -> None:
        find(where)

    def signature(self, where: str) -> inspect.Signature:
        return inspect.signature(find(where))

    def members(self, where: str) -> Mapping[str, object]:
        holder = find(where)
        if isinstance(holder, type) and issubclass(holder, Enum):
            return {name: member.value for name, member in holder.__members__.items()}
        return {name: value for name, value in vars(holder).items() if not name.startswith("_") and not callable(value)}

    def fields(self, where: str) -> Set[str]:
        holder = find(where)
        found = {name for base in inspect.getmro(holder) for name in inspect.get_annotations(base)}
        found |= set(getattr(holder, "__struct_fields__", ()))
        if dataclasses.is_dataclass(holder):
            found |= {each.name for each in dataclasses.fields(holder)}
        return found

    def attributes(self, where: str) -> Set[str]:
        return set(dir(find(where)))

    def is_subclass(self, where: str, base: str) -> bool:
        found, other = find(where), find(base)
        return isinstance(found, type) and isinstance(other, type) and issubclass(found, other)

    def names_in(self, where: str) -> Set[str]:
        code = getattr(inspect.unwrap(find(where)), "__code__", None)
        if code is None:
            raise TypeError(f"{where} is no function any more")
        return set(_names(code))


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
