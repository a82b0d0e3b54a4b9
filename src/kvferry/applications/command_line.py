"""What the commands of `kvferry` have in common.

A command's options are the fields of a dataclass, written once: `Annotated[int, typer.Option(help="...")] = 4`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from typing import Annotated, Any, TypeAlias, get_type_hints

import typer

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
