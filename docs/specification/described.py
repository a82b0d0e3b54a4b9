"""What docstrings and annotations say of the types that travel: of each its meaning, its fields, what is refused."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import griffe
import msgspec
from msgspec import inspect as types


@dataclass(frozen=True, slots=True)
class Described:
    """A docstring.

    Attributes:
        text: what comes before its sections.
        fields: what it says of each attribute.
        refused: what is refused, sentence by sentence.
    """

    text: str
    fields: dict[str, str] = field(default_factory=dict)
    refused: tuple[str, ...] = ()


def described(of: type) -> Described:
    """Reads the docstring of a class, and of its bases what it does not say of fields itself."""
    found = _read(of)
    for base in of.__mro__[1:]:
        if issubclass(base, msgspec.Struct) and base is not msgspec.Struct:
            found.fields.update({name: text for name, text in _read(base).fields.items() if name not in found.fields})
    return found


def _read(of: type) -> Described:
    found = Described("")
    text, refused = "", list[str]()
    for section in griffe.Docstring(inspect.cleandoc(of.__doc__ or "")).parse("google", warnings=False):
        match section:
            case griffe.DocstringSectionText():
                text = _one_line(section.value)
            case griffe.DocstringSectionAttributes():
                found.fields.update({each.name: _one_line(each.description) for each in section.value})
            case griffe.DocstringSectionRaises():
                refused += [_one_line(each.description) for each in section.value]
    return Described(text, found.fields, tuple(refused))


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


def classes_in(*of: Any) -> dict[str, type]:
    """Returns the structs and enumerations that values of some types consist of, by name, in the order of their use."""
    found: dict[str, type] = {}

    def look(kind: types.Type) -> None:
        if isinstance(kind, types.StructType | types.EnumType):
            if kind.cls.__name__ in found:
                return
            found[kind.cls.__name__] = kind.cls
        for part in _parts(kind):
            look(part)

    for kind in types.multi_type_info(of):
        look(kind)
    return found


def _parts(kind: types.Type) -> Iterator[types.Type]:
    match kind:
        case types.StructType():
            yield from (each.type for each in kind.fields)
        case types.UnionType():
            yield from kind.types
        case types.VarTupleType():
            yield kind.item_type
        case types.DictType():
            yield from (kind.key_type, kind.value_type)
        case types.Metadata():
            yield kind.type


def meaning_of(each: types.Field, says: Described) -> str:
    """Says what a field means: by its struct's docstring, its annotation, or the docstring of what it holds."""
    if each.name in says.fields:
        return says.fields[each.name]
    kind, text = each.type, ""
    if isinstance(kind, types.Metadata):
        text = (kind.extra_json_schema or {}).get("description", "")
    elif isinstance(kind, types.StructType | types.EnumType):
        text, _, _ = described(kind.cls).text.partition(". ")
    return text.rstrip(".") + "." if text else ""


def in_words(kind: types.Type, elsewhere: Mapping[str, str]) -> str:
    """Says what a field holds, as MessagePack has it; structs and enumerations by name.

    Args:
        elsewhere: the pages of those that are not described on the same one, by name.
    """
    match kind:
        case types.IntType():
            return f"integer{_range(kind.ge, kind.le)}"
        case types.FloatType():
            return f"float{_range(kind.ge, kind.le)}"
        case types.StrType():
            return f"text{_length(kind, 'characters')}" + (f", `{kind.pattern}`" if kind.pattern else "")
        case types.BytesType():
            return f"bytes{_length(kind, '')}"
        case types.BoolType():
            return "boolean"
        case types.NoneType():
            return "nil"
        case types.RawType():
            return "a map, encoded in place"
        case types.StructType() | types.EnumType():
            name = kind.cls.__name__
            return f"[`{name}`]({elsewhere.get(name, f'#{name.lower()}')})"
        case types.VarTupleType():
            return f"array{_length(kind, '')} of: {in_words(kind.item_type, elsewhere)}"
        case types.DictType():
            key, value = in_words(kind.key_type, elsewhere), in_words(kind.value_type, elsewhere)
            return f"map{_length(kind, '')}: {key} to {value}"
        case types.UnionType():
            return " or ".join(in_words(each, elsewhere) for each in kind.types)
        case types.Metadata():
            return in_words(kind.type, elsewhere)
    raise NotImplementedError(f"{kind} has no words yet")


def _number(value: float) -> str:
    power = int(value).bit_length()
    if value == 2**power - 1 and power > 8:
        return f"2^{power} - 1"
    return f"2^{power - 1}" if value == 2 ** (power - 1) and power > 9 else f"{value:g}"


def _range(low: float | None, high: float | None) -> str:
    match low, high:
        case None, None:
            return ""
        case _, None:
            return f", {_number(low or 0)} or more"
        case None, _:
            return f", {_number(high or 0)} at most"
    return f", {_number(low or 0)} to {_number(high or 0)}"


def _length(kind: Any, unit: str) -> str:
    if kind.max_length is None:
        return ""
    bounds = f"{kind.min_length} to {kind.max_length}" if kind.min_length else f"at most {kind.max_length}"
    return f", {bounds} {unit}".rstrip()


def default_of(each: types.Field) -> str:
    """Says what stands for a field that is left out; empty where it must not be."""
    if each.required:
        return ""
    value = each.default_factory() if each.default is msgspec.NODEFAULT else each.default
    plain = value.value if isinstance(value, Enum) else msgspec.to_builtins(value)
    return f"`{msgspec.json.encode(plain).decode()}`"


_REFERENCE = re.compile(r"`((?:[a-z_]+\.)+[a-zA-Z_]+)`")


def referred_to(texts: Iterable[str]) -> dict[str, str]:
    """Returns the docstrings of modules and classes of kvferry that some texts name, by their names."""
    found: dict[str, str] = {}
    for text in texts:
        for name in _REFERENCE.findall(text):
            if name not in found and (docstring := _docstring(name)):
                found[name] = docstring
    return found


def _docstring(name: str) -> str:
    """Returns a docstring; empty where there is no such module or class."""
    module, _, of = name.rpartition(".") if name[name.rindex(".") + 1].isupper() else (name, "", "")
    try:
        loaded = importlib.import_module(f"kvferry.{module}")
    except ModuleNotFoundError:
        return ""
    if not of:
        return inspect.cleandoc(loaded.__doc__ or "")
    says = described(getattr(loaded, of))
    return "\n".join([says.text, "", *(f"* `{name}`: {text}" for name, text in says.fields.items())])
