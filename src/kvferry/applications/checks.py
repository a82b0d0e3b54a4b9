"""What several commands check of their options in the same words."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

from kvferry.errors import ConfigurationError, SettingsError
from kvferry.layout import PageOrder

Choice = TypeVar("Choice", bound=Enum)

TOKEN_ORDERS = (PageOrder.NHD, PageOrder.HND)
"""The orders of pages that a command can fill and read: not those that only an engine knows."""

_PICTURES = (".svg", ".png", ".pdf")


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
    if not picture.parent.is_dir():
        raise SettingsError(f"{option} {picture}: there is no directory {picture.parent}")
    if find_spec("matplotlib") is None:
        raise ConfigurationError(f"{option} needs matplotlib, which is not installed: pip install matplotlib")
