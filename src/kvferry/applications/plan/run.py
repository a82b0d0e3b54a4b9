"""What the command does, from what was typed to what is shown."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.console import Console

from kvferry.applications.command_line import check_picture, one_of
from kvferry.applications.plan import report
from kvferry.applications.plan.counting import PagePlacement
from kvferry.applications.plan.study import RequestOptions, SideOptions, study
from kvferry.layout import PageOrder

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
        prefill: name, configuration, specification, page size, layout and dtype.
        decode: the same of the decode side.
        request: its tokens, its room, and how its pages lie.
        picture: the file to draw to.

    Returns:
        Whether the plan is proved.

    Raises:
        KVFerryError: if something is impossible, in words for the operator.
    """
    if picture is not None:
        check_picture(picture, option="--draw")
    tokens, room, pages = request
    result = study(
        _side(*prefill),
        _side(*decode),
        RequestOptions(tokens=tokens, room=room, pages=one_of(PagePlacement, pages, option="--pages")),
    )
    if wants_json:
        typer.echo(report.as_json(result))
    else:
        console = Console()
        if not console.is_terminal:
            console = Console(width=_WIDTH)
        report.show(result, console)
    if picture is not None:
        from kvferry.applications.plan.drawing import draw

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
        order=one_of(PageOrder, layout, option=f"--{name}-layout"),
    )
