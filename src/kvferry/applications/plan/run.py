"""Gives a plan out in every form that was asked for: shown, as data, as a picture, as a vector."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import typer

from kvferry.applications.command_line import check_folder, check_picture, wide_console
from kvferry.applications.plan import report
from kvferry.applications.plan.study import Study
from kvferry.applications.plan.vector import as_text, vector_of


@dataclass(frozen=True, slots=True)
class Outputs:
    """What is asked for.

    Attributes:
        json: whether the plan is printed as data, not for a person.
        draw: the picture to draw; None for none.
        export: the vector to write; None for none.

    Raises:
        SettingsError: if a file's name or directory is wrong.
        ConfigurationError: if matplotlib is missing.
    """

    json: bool
    draw: Path | None
    export: Path | None

    def __post_init__(self) -> None:
        if self.draw is not None:
            check_picture(self.draw, option="--draw")
        if self.export is not None:
            check_folder(self.export, option="--export")

    def give_out(self, planned: Study) -> None:
        """Gives a plan out. One that is wrong is not exported.

        Raises:
            SettingsError: if more is moved than a vector should list.
        """
        if self.export is not None and planned.is_proved:
            prefill, decode = planned.prefill, planned.decode
            title = f"{prefill.cache.name}: {report.side_in_words(prefill)}, to {report.side_in_words(decode)}"
            self.export.write_text(as_text(vector_of(planned, title=title)))
        if self.json:
            typer.echo(report.as_json(planned))
        else:
            report.show(planned, wide_console())
        if self.draw is not None:
            from kvferry.applications.plan import drawing

            drawing.draw(planned, self.draw)
            if not self.json:
                typer.echo(f"drawn to {self.draw}")
        if self.export is not None and planned.is_proved and not self.json:
            typer.echo(f"exported to {self.export}")
