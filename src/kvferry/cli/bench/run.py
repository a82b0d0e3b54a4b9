"""What the command does, from what was typed to what is shown."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import typer
import zmq
from rich.console import Console

from kvferry._version import __version__
from kvferry.cli.bench import options as checked
from kvferry.cli.bench import report
from kvferry.cli.bench.measure import Measurement, Surroundings
from kvferry.cli.bench.memory import available_bytes, available_gpu_bytes, check_fits
from kvferry.cli.bench.options import BenchOptions, Side
from kvferry.cli.bench.remote import find_prefill_side, follow
from kvferry.cli.bench.summary import Case, all_exact, summarise
from kvferry.cli.bench.teams import LocalTeam, Teams
from kvferry.cli.checks import TOKEN_ORDERS, check_picture, one_of
from kvferry.errors import SettingsError
from kvferry.settings import Settings
from kvferry.transport.nixl import load_bindings

_WIDTH = 200
_COMPARED_OTHERWISE = ("preset", "config")
_OF_THE_LEADER = ("repetitions", "seconds", "plant_wrong_byte")


@dataclass(frozen=True, slots=True, kw_only=True)
class Typed:
    """What the command line says, unchecked. Names are those of the options."""

    preset: str
    config: Path | None
    device: str
    prefill_tp: int
    decode_tp: int
    page_size: str
    decode_page_size: int | None
    prefill_layout: str
    decode_layout: str
    pages: str
    variants: str
    tokens: int
    chunks: int
    requests: int
    passes: int
    in_flight: int
    repetitions: int
    seconds: float
    nixl_threads: int | None
    plant_wrong_byte: bool


@dataclass(frozen=True, slots=True)
class Place:
    """What runs on this machine.

    Attributes:
        role: "both" sides, or "prefill" or "decode" alone.
        registry_url: where the registry answers; None has the benchmark run one.
    """

    role: str
    registry_url: str | None

    @property
    def side_names(self) -> tuple[str, ...]:
        """The sides that run here."""
        return ("prefill", "decode") if self.role == "both" else (self.role,)


def checked_place(role: str, registry_url: str | None) -> Place:
    """Where the sides run.

    Raises:
        SettingsError: if there is no such role, or one side alone could not find the other.
    """
    if role not in ("both", "prefill", "decode"):
        raise SettingsError(f"--role {role!r}: it is both, prefill or decode")
    if role == "both":
        return Place(role, registry_url)
    registry_url = registry_url or Settings().registry_url
    if registry_url is None:
        raise SettingsError(
            f"--role {role} needs --registry URL (KVFERRY_REGISTRY_URL), by which the two sides find each other: "
            "`kvferry registry` runs one"
        )
    return Place(role, registry_url)


def run(typed: Typed, place: Place, *, picture: Path | None, wants_json: bool) -> bool:
    """Measures, shows, and draws if asked to; or, as the prefill side alone, lets itself be led.

    Returns:
        Whether every byte was exact.

    Raises:
        KVFerryError: if something is impossible or a process fails.
    """
    if place.role == "prefill" and (picture is not None or wants_json):
        raise SettingsError("--role prefill: the decode side shows the figures; give --json and --plot there")
    if picture is not None:
        check_picture(picture, option="--plot")
    planned = prepare(typed)
    load_bindings()
    main, gpu = available_bytes(), available_gpu_bytes(planned[0].device)
    for options in planned:
        check_fits(options, [options.side(name) for name in place.side_names], main, gpu)
    with Console(stderr=True).status("starting") as status:
        if place.role == "prefill":
            assert place.registry_url is not None
            return follow(planned, place.registry_url, agreed(typed, planned), Settings(), status.update)
        cases = measure(typed, planned, place, status.update)
    shares_clock = place.role == "both"
    if wants_json:
        typer.echo(report.as_json(planned[0], cases, shares_clock=shares_clock))
    else:
        console = Console()
        console = console if console.is_terminal else Console(width=_WIDTH)
        report.show(planned[0], cases, console, shares_clock=shares_clock)
    if picture is not None:
        from kvferry.cli.bench.drawing import draw

        draw(cases, picture)
        if not wants_json:
            typer.echo(f"drawn to {picture}")
    return all_exact(cases)


def measure(
    typed: Typed, planned: Sequence[BenchOptions], place: Place, on_progress: Callable[[str], None]
) -> list[Case]:
    """Measures all cases, between two sides here or with a prefill side elsewhere.

    Args:
        on_progress: told what is done next.

    Raises:
        KVFerryError: if the other side is not there or was told something else, or a process fails.
    """
    surroundings = Surroundings(secrets.token_hex(4), place.registry_url, shares_clock=place.role == "both")
    cases: list[Case] = []

    def measure_all(teams: Teams) -> bool:
        for case in range(len(planned)):
            cases.extend(summarise(Measurement(planned, case, teams, surroundings, on_progress).measure()))
        return all_exact(cases)

    if place.role == "both":
        on_progress("starting")
        with LocalTeam.started("prefill", planned) as prefill, LocalTeam.started("decode", planned) as decode:
            measure_all(Teams(prefill, decode))
        return cases
    assert place.registry_url is not None
    with _context() as context:
        on_progress("waiting for the prefill side")
        size, said = planned[0].prefill.tp_size, agreed(typed, planned)
        # The decode side's processes come last and go first, so that they miss nobody.
        with (
            find_prefill_side(context, place.registry_url, said, Settings(), size=size) as prefill_there,
            LocalTeam.started("decode", planned) as decode,
        ):
            prefill_there.is_exact = measure_all(Teams(prefill_there, decode))
    return cases


def agreed(typed: Typed, planned: Sequence[BenchOptions]) -> dict[str, str]:
    """What two sides that run on their own must have in common, by option."""
    # As typed: defaults that follow from a machine, such as numbers of threads, may differ.
    said = {
        f"--{name.replace('_', '-')}": "not given" if value is None else str(value)
        for name, value in asdict(typed).items()
    }
    for name in _COMPARED_OTHERWISE + _OF_THE_LEADER:
        del said[f"--{name.replace('_', '-')}"]
    model = planned[0].model
    digest = hashlib.sha256(msgspec.json.encode(model.components)).hexdigest()[:12]
    return {
        "kvferry's version": __version__,
        "the model (--preset, --config)": f"{model.name} ({digest})",
        **said,
    }


@contextmanager
def _context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        yield context
    finally:
        context.term()


def prepare(typed: Typed) -> list[BenchOptions]:
    """Checks every value; gives one set of options for every page size and way that pages lie.

    Raises:
        ConfigurationError: naming the option and its value.
    """
    device, variants = checked.checked_device(typed.device), checked.parse_variants(typed.variants)
    checked.check_at_least_one(
        prefill_tp=typed.prefill_tp,
        decode_tp=typed.decode_tp,
        decode_page_size=1 if typed.decode_page_size is None else typed.decode_page_size,
        tokens=typed.tokens,
        chunks=typed.chunks,
        requests=typed.requests,
        passes=typed.passes,
        in_flight=typed.in_flight,
        repetitions=typed.repetitions,
    )
    if typed.passes > 1 and typed.requests <= typed.in_flight:
        raise SettingsError(
            f"--passes {typed.passes} with --requests {typed.requests}: pages are used again while --in-flight "
            f"{typed.in_flight} are on their way, which takes more requests than that"
        )
    if not 0 <= typed.seconds < float("inf"):
        raise SettingsError(f"--seconds {typed.seconds:g}: it must not be negative, and finite")
    model = checked.preset_model(typed.preset) if typed.config is None else checked.configured_model(typed.config)
    prefill_order = one_of(TOKEN_ORDERS, typed.prefill_layout, option="--prefill-layout")
    decode_order = one_of(TOKEN_ORDERS, typed.decode_layout, option="--decode-layout")
    threads = {} if typed.nixl_threads is None else {"nixl_threads": typed.nixl_threads}
    sizes, lies = checked.parse_numbers(typed.page_size, option="--page-size"), checked.parse_pages(typed.pages)
    for page_tokens in sizes:
        num_pages = -(-typed.tokens // page_tokens)
        if typed.chunks > num_pages:
            raise SettingsError(
                f"--chunks {typed.chunks}: {typed.tokens} tokens have only {num_pages} pages of {page_tokens} to divide"
            )
    return [
        BenchOptions(
            model=model,
            prefill=Side("prefill", typed.prefill_tp, page_tokens, prefill_order),
            decode=Side("decode", typed.decode_tp, typed.decode_page_size or page_tokens, decode_order),
            variants=variants,
            device=device,
            is_scattered=is_scattered,
            tokens=typed.tokens,
            chunks=typed.chunks,
            requests=typed.requests,
            passes=typed.passes,
            in_flight=typed.in_flight,
            repetitions=typed.repetitions,
            seconds=typed.seconds,
            nixl_threads=Settings(**threads).nixl_threads,
            plants_wrong_byte=typed.plant_wrong_byte,
        )
        for page_tokens in sizes
        for is_scattered in lies
    ]
