"""What the command does, from what was typed to what is shown."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import msgspec
import typer
from rich.console import Console

from kvferry._version import __version__
from kvferry.applications.bench import report
from kvferry.applications.bench.measure import Measurement, Place
from kvferry.applications.bench.options import BenchArguments, BenchOptions, prepare
from kvferry.applications.bench.pool import available_bytes, available_gpu_bytes, check_fits
from kvferry.applications.bench.remote import find_prefill_side, follow
from kvferry.applications.bench.summary import Case, all_exact, summarise
from kvferry.applications.bench.teams import LocalTeam, Teams
from kvferry.applications.command_line import check_picture, wide_console
from kvferry.errors import SettingsError
from kvferry.settings import Settings
from kvferry.transport.chosen import available_transport_class

_COMPARED_OTHERWISE = ("preset", "config")
_OF_THE_LEADER = ("repetitions", "seconds", "plant_wrong_byte")


def checked_place(role: str, registry_url: str | None, *, one_clock: bool = False) -> Place:
    """Where the sides run.

    Args:
        one_clock: whether one side that runs by itself runs on the machine of the other.

    Raises:
        SettingsError: if there is no such role, or one side alone could not find the other.
    """
    if role not in ("both", "prefill", "decode"):
        raise SettingsError(f"--role {role!r}: it is both, prefill or decode")
    if role == "both":
        return Place(role, registry_url, shares_clock=True)
    registry_url = registry_url or Settings().registry_url
    if registry_url is None:
        raise SettingsError(
            f"--role {role} needs --registry URL (KVFERRY_REGISTRY_URL), by which the two sides find each other: "
            "`kvferry registry` runs one"
        )
    return Place(role, registry_url, one_clock)


def run(arguments: BenchArguments, place: Place, *, picture: Path | None, wants_json: bool) -> bool:
    """Measures, shows, and draws if asked to; or, as the prefill side alone, lets itself be led.

    Returns:
        Whether every byte was exact.

    Raises:
        KVFerryError: if something is impossible or a process fails.
    """
    if place.role == "prefill" and (picture is not None or wants_json):
        raise SettingsError("--role prefill: the decode side shows the figures; give --json and --plot there")
    if arguments.layer_time_ms and not place.shares_clock:
        raise SettingsError(
            f"--layer-time-ms with --role {place.role}: what is left of a transfer when its prompt is computed is "
            "measured by one clock. If both sides run on one machine, say --one-clock"
        )
    if picture is not None:
        check_picture(picture, option="--plot")
    planned = prepare(arguments)
    for transport in transports(planned):
        available_transport_class(transport)
    main, gpu = available_bytes(), available_gpu_bytes(planned[0].device)
    for options in planned:
        check_fits(options, [options.side(name) for name in place.side_names], main, gpu)
    with Console(stderr=True).status("starting") as status:
        if place.role == "prefill":
            assert place.registry_url is not None
            return follow(planned, place.registry_url, agreed(arguments, planned), Settings(), status.update)
        cases = measure(arguments, planned, place, status.update)
    if wants_json:
        typer.echo(report.as_json(planned[0], cases, shares_clock=place.shares_clock))
    else:
        report.show(planned[0], cases, wide_console(), shares_clock=place.shares_clock)
    if picture is not None:
        report.draw(cases, picture)
        if not wants_json:
            typer.echo(f"drawn to {picture}")
    return all_exact(cases)


def measure(
    arguments: BenchArguments, planned: Sequence[BenchOptions], place: Place, on_progress: Callable[[str], None]
) -> list[Case]:
    """Measures all cases, between two sides here or with a prefill side elsewhere.

    Args:
        on_progress: told what is done next.

    Raises:
        KVFerryError: if the other side is not there or was told something else, or a process fails.
    """
    cases: list[Case] = []

    def measure_all(teams: Teams) -> bool:
        for case in range(len(planned)):
            cases.extend(summarise(Measurement(planned, case, teams, place, on_progress).measure()))
        return all_exact(cases)

    if place.role == "both":
        on_progress("starting")
        with LocalTeam("prefill", planned) as prefill, LocalTeam("decode", planned) as decode:
            measure_all(Teams(prefill, decode))
        return cases
    assert place.registry_url is not None
    on_progress("waiting for the prefill side")
    size, said = planned[0].prefill.tp_size, agreed(arguments, planned)
    # The decode side's processes come last and go first, so that they miss nobody.
    with (
        find_prefill_side(place.registry_url, said, Settings(), size=size) as prefill_there,
        LocalTeam("decode", planned) as decode,
    ):
        prefill_there.is_exact = measure_all(Teams(prefill_there, decode))
    return cases


def agreed(arguments: BenchArguments, planned: Sequence[BenchOptions]) -> dict[str, str]:
    """What two sides that run on their own must have in common, by option."""
    # As typed: defaults that follow from a machine, such as numbers of threads, may differ.
    said = {
        f"--{name.replace('_', '-')}": "not given" if value is None else str(value)
        for name, value in asdict(arguments).items()
    }
    for name in _COMPARED_OTHERWISE + _OF_THE_LEADER:
        del said[f"--{name.replace('_', '-')}"]
    model = planned[0].model
    digest = hashlib.sha256(msgspec.json.encode(model.components)).hexdigest()[:12]
    return {
        "kvferry's version": __version__,
        "the model (--preset, --config)": f"{model.name} ({digest})",
        **said,
        "--transport": ",".join(transports(planned)),
    }


def transports(planned: Sequence[BenchOptions]) -> tuple[str, ...]:
    """What moves the bytes in all cases, each once."""
    return tuple(dict.fromkeys(options.transport for options in planned))
