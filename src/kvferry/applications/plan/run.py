"""Plans a request, and gives the plan out as it was asked for: shown, as data, as a picture, as a vector."""

from __future__ import annotations

from pathlib import Path

import typer

from kvferry.applications.command_line import check_folder, check_picture, wide_console
from kvferry.applications.plan import report
from kvferry.applications.plan.study import RequestOptions, SideOptions, study
from kvferry.applications.plan.vector import as_text, vector_of


def run(
    prefill: SideOptions,
    decode: SideOptions,
    request: RequestOptions,
    *,
    picture: Path | None,
    export: Path | None,
    wants_json: bool,
) -> bool:
    """Plans a request, and gives the plan out. One that is wrong is not exported.

    Returns:
        Whether the plan is proved.

    Raises:
        SettingsError: if an option makes no sense, or more is moved than a vector should list.
        ConfigurationError: if matplotlib is missing, or the two sides cannot be planned.
        IncompatiblePeerError: if they cannot exchange caches.
    """
    if picture is not None:
        check_picture(picture, option="--draw")
    if export is not None:
        check_folder(export, option="--export")
    planned = study(prefill, decode, request)
    exported = export if planned.is_proved else None
    if exported is not None:
        sides = (report.side_in_words(side) for side in (planned.prefill, planned.decode))
        title = f"{planned.prefill.cache.name}: {', to '.join(sides)}"
        exported.write_text(as_text(vector_of(planned, title=title)))
    if wants_json:
        typer.echo(report.as_json(planned))
    else:
        report.show(planned, wide_console())
    if picture is not None:
        from kvferry.applications.plan import drawing

        drawing.draw(planned, picture)
    for what, file in (("drawn", picture), ("exported", exported)):
        if file is not None and not wants_json:
            typer.echo(f"{what} to {file}")
    return planned.is_proved
