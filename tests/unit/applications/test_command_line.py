"""Commands whose options are the fields of a dataclass."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from kvferry.applications.bench.options import BenchArguments
from kvferry.applications.command_line import Json, with_fields_as_options
from kvferry.applications.demo.options import DemoArguments
from kvferry.cli.app import app


@dataclass(frozen=True)
class Parcel:
    """What is sent."""

    content: Annotated[str, typer.Option(help="What is in it.")]
    copies: Annotated[int | None, typer.Option(help="How many.")] = None
    is_fragile: Annotated[bool, typer.Option("--fragile", help="Whether it breaks.")] = False
    stops: Annotated[list[str] | None, typer.Argument(help="On the way.")] = None


@pytest.fixture
def calls() -> list[tuple[Parcel, bool]]:
    return []


@pytest.fixture
def command(calls: list[tuple[Parcel, bool]]) -> typer.Typer:
    made = typer.Typer(rich_markup_mode=None)

    def send(parcel: Parcel, json: Json = False) -> None:
        """Send a parcel."""
        calls.append((parcel, json))

    # What a test defines has no module whose names its annotations could be looked up in.
    send.__annotations__ = {"parcel": Parcel, "json": Json, "return": None}
    made.command()(with_fields_as_options(send))
    return made


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--content tea", (Parcel("tea"), False)),
        ("--content tea --copies 3 --fragile --json", (Parcel("tea", 3, is_fragile=True), True)),
        ("--content tea Porto Lisbon", (Parcel("tea", stops=["Porto", "Lisbon"]), False)),
    ],
)
def test_the_command_is_called_with_the_whole(
    command: typer.Typer, calls: list[tuple[Parcel, bool]], typed: str, meant: tuple[Parcel, bool]
):
    result = CliRunner().invoke(command, typed.split())
    assert result.exit_code == 0, result.output
    assert calls == [meant]


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("", "Missing option '--content'"),
        ("--content tea --copies many", "valid integer"),
        ("--parcel x", "No such"),
    ],
)
def test_what_is_typed_wrong_is_said_as_for_any_option(
    command: typer.Typer, calls: list[tuple[Parcel, bool]], typed: str, said: str
):
    result = CliRunner().invoke(command, typed.split())
    assert result.exit_code == 2
    assert said in result.output
    assert calls == []


def test_the_help_says_what_the_fields_say(command: typer.Typer):
    shown = CliRunner().invoke(command, ["--help"]).output
    for said in ("Send a parcel.", "--content", "What is in it.", "--fragile", "Print one JSON object"):
        assert said in shown


@pytest.mark.parametrize(("name", "arguments"), [("bench", BenchArguments()), ("demo", DemoArguments())])
def test_a_command_without_options_means_what_its_arguments_do(name: str, arguments: object):
    group = typer.main.get_command(app)
    with group.make_context("kvferry", [name]) as context:
        command = group.commands[name]  # type: ignore[attr-defined]
        with command.make_context(name, [], context) as parsed:
            values = parsed.params
    for field in fields(arguments):  # type: ignore[arg-type]
        assert values[field.name] == getattr(arguments, field.name)
