"""What the commands of `kvferry` have in common: how options are written and checked, and how a command ends.

A command's options are the fields of a dataclass, written once: `Annotated[int, typer.Option(help="...")] = 4`.
"""

from __future__ import annotations

import inspect
import signal
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, TypeAlias, TypeVar, get_type_hints

import typer
from rich.console import Console

from kvferry.errors import ConfigurationError, SettingsError
from kvferry.layout import PageOrder

Choice = TypeVar("Choice", bound=Enum)

TOKEN_ORDERS = (PageOrder.NHD, PageOrder.HND)
"""The orders of pages that a command can fill and read: not those that only an engine knows."""

_PICTURES = (".svg", ".png", ".pdf")
_WIDTH = 200


def one_of(choices: Iterable[Choice], value: str, *, option: str) -> Choice:
    """The choice of that name, in upper or lower case.

    Raises:
        SettingsError: if there is none, naming those that there are.
    """
    known = tuple(choices)
    for choice in known:
        if choice.value == value.lower():
            return choice
    raise SettingsError(f"{option} {value!r}: it is one of {', '.join(choice.value for choice in known)}")


def check_at_least_one(arguments: object, *names: str) -> None:
    """Refuses numbers below 1; None, which stands for another option, is none.

    Args:
        arguments: what was typed, its attributes called like the options.
        names: those that are looked at.

    Raises:
        SettingsError: naming the first option and its value.
    """
    for name in names:
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise SettingsError(f"--{name.replace('_', '-')} {value}: it must be at least 1")


def check_picture(picture: Path, *, option: str) -> None:
    """Refuses a file that could not be drawn to, before there is anything to draw.

    Raises:
        SettingsError: if the file's name or directory is wrong.
        ConfigurationError: if matplotlib is missing.
    """
    if picture.suffix.lower() not in _PICTURES:
        raise SettingsError(f"{option} {picture}: the file's name ends in one of {', '.join(_PICTURES)}")
    check_folder(picture, option=option)
    if find_spec("matplotlib") is None:
        raise ConfigurationError(f"{option} needs matplotlib, which is not installed: pip install matplotlib")


def check_folder(file: Path, *, option: str) -> None:
    """Refuses a file that could not be written, before there is anything to write.

    Raises:
        SettingsError: if there is no such directory, or the file is one itself.
    """
    if not file.parent.is_dir():
        raise SettingsError(f"{option} {file}: there is no directory {file.parent}")
    if file.is_dir():
        raise SettingsError(f"{option} {file}: it is a directory, name a file in it")


def wide_console() -> Console:
    """A console for tables, which keep their lines whole where there is no terminal to say how wide they may be."""
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH)


def why_not_listening(host: str, port: int) -> OSError | None:
    """Why nobody can listen on a port of an address, 0 for any; None if one can."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as problem:
            return problem
    return None


_STOPPING = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def interruptible() -> Iterator[None]:
    """Raises KeyboardInterrupt in the block upon Ctrl-C and upon SIGTERM, so that either ends it in order.

    SIGINT counts even where it was ignored at the start: a shell lets what it starts in the background ignore it. For
    the main thread only.
    """

    def stop(_: int, __: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = {number: signal.signal(number, stop) for number in _STOPPING}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


FAILED = 1
"""Exit code of a command that did what it was asked, and found something wrong."""

Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def with_fields_as_options(command: Callable[..., None]) -> Callable[..., None]:
    """Makes a command for Typer of a function that takes dataclasses.

    Each parameter whose type is a dataclass is replaced by its fields; the function is called with the whole.
    """
    hints = get_type_hints(command, include_extras=True)
    folded = {name: kind for name, kind in hints.items() if isinstance(kind, type) and is_dataclass(kind)}
    parameters = []
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name in folded:
            parameters += _parameters_of(folded[parameter.name])
        else:
            annotation = hints[parameter.name]
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=annotation))

    @wraps(command)
    def unfolded(**values: Any) -> None:
        for name, kind in folded.items():
            values[name] = kind(**{field.name: values.pop(field.name) for field in fields(kind)})
        command(**values)

    unfolded.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    unfolded.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return unfolded


def _parameters_of(kind: type) -> list[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(kind)
    ]
