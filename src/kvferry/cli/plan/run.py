"""What the command does, from what was typed to what is shown."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

import typer
from rich.console import Console

from kvferry.cli.plan import report
from kvferry.cli.plan.counting import PageNumbers
from kvferry.cli.plan.study import RequestOptions, SideOptions, study
from kvferry.errors import ConfigurationError, SettingsError
from kvferry.layout import PageOrder

Choice = TypeVar("Choice", bound=Enum)

_PICTURES = (".svg", ".png", ".pdf")
_WIDTH = 200
"""Columns of text where there is no terminal to say: tables keep their lines whole."""


def run(
    *,
    prefill: tuple[str, Path, str, int, str, str | None],
    decode: tuple[str, Path, str, int, str, str | None],
    request: tuple[int, int, str],
    picture: Path | None,
    wants_json: bool,
) -> bool:
    """Plans, shows, and draws if asked to.

    Args:
        prefill, decode: name, configuration, specification, page size, layout and dtype.
        request: its tokens, its room, and how its pages lie.
        picture: the file to draw to.

    Returns:
        Whether the plan is proved.

    Raises:
        KVFerryError: if something is impossible, in words for the operator.
    """
    if picture is not None:
        _check_picture(picture)
    tokens, room, pages = request
    result = study(
        _side(*prefill),
        _side(*decode),
        RequestOptions(tokens=tokens, room=room, pages=_one_of(PageNumbers, pages, "--pages")),
    )
    if wants_json:
        typer.echo(report.as_json(result))
    else:
        console = Console()
        if not console.is_terminal:
            console = Console(width=_WIDTH)
        report.show(result, console)
    if picture is not None:
        from kvferry.cli.plan.drawing import draw

        draw(result, picture)
        if not wants_json:
            typer.echo(f"drawn to {picture}")
    return result.is_proved


def _side(name: str, config: Path, specification: str, page_tokens: int, layout: str, dtype: str | None) -> SideOptions:
    return SideOptions(
        name=name,
        config=config,
        dtype=dtype,
        specification=specification,
        page_tokens=page_tokens,
        order=_one_of(PageOrder, layout, f"--{name}-layout"),
    )


def _one_of(choices: type[Choice], value: str, option: str) -> Choice:
    known: Iterable[Choice] = choices
    for choice in known:
        if choice.value == value.lower():
            return choice
    raise SettingsError(f"{option} {value!r}: it is one of {', '.join(choice.value for choice in known)}")


def _check_picture(picture: Path) -> None:
    if picture.suffix.lower() not in _PICTURES:
        raise SettingsError(f"--draw {picture}: the file's name ends in one of {', '.join(_PICTURES)}")
    if not picture.parent.is_dir():
        raise SettingsError(f"--draw {picture}: there is no directory {picture.parent}")
    if find_spec("matplotlib") is None:
        raise ConfigurationError("--draw needs matplotlib, which is not installed: pip install 'kvferry[draw]'")
