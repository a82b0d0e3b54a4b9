"""What the command does, from what was typed to what is shown."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import typer
from rich.console import Console

from kvferry.cli.bench import options as checked
from kvferry.cli.bench import report
from kvferry.cli.bench.measure import measure
from kvferry.cli.bench.memory import available_bytes, check_fits
from kvferry.cli.bench.options import BenchOptions, Side
from kvferry.cli.bench.summary import Case, summarise
from kvferry.cli.checks import TOKEN_ORDERS, check_picture, one_of
from kvferry.errors import SettingsError
from kvferry.settings import Settings
from kvferry.transport.nixl import load_bindings

_WIDTH = 200


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
    tokens: int
    chunks: int
    requests: int
    in_flight: int
    repetitions: int
    seconds: float
    nixl_threads: int | None
    plant_wrong_byte: bool


def run(typed: Typed, *, picture: Path | None, wants_json: bool) -> bool:
    """Measures, shows, and draws if asked to.

    Returns:
        Whether every byte was exact.

    Raises:
        KVFerryError: if something is impossible or a process fails.
    """
    if picture is not None:
        check_picture(picture, option="--plot")
    planned = prepare(typed)
    load_bindings()
    available = available_bytes()
    for options in planned:
        check_fits(options, available)
    messages = Console(stderr=True)
    cases: list[Case] = []
    with messages.status("starting") as status:
        for options in planned:
            cases += summarise(measure(options, status.update))
    if wants_json:
        typer.echo(report.as_json(planned[0], cases))
    else:
        console = Console()
        report.show(planned[0], cases, console if console.is_terminal else Console(width=_WIDTH))
    if picture is not None:
        from kvferry.cli.bench.drawing import draw

        draw(cases, picture)
        if not wants_json:
            typer.echo(f"drawn to {picture}")
    return all(case.is_exact for case in cases)


def prepare(typed: Typed) -> list[BenchOptions]:
    """Checks every value; gives one set of options for every page size and way that pages lie.

    Raises:
        ConfigurationError: naming the option and its value.
    """
    checked.check_device(typed.device)
    checked.check_at_least_one(
        prefill_tp=typed.prefill_tp,
        decode_tp=typed.decode_tp,
        decode_page_size=1 if typed.decode_page_size is None else typed.decode_page_size,
        tokens=typed.tokens,
        chunks=typed.chunks,
        requests=typed.requests,
        in_flight=typed.in_flight,
        repetitions=typed.repetitions,
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
            is_scattered=is_scattered,
            tokens=typed.tokens,
            chunks=typed.chunks,
            requests=typed.requests,
            in_flight=typed.in_flight,
            repetitions=typed.repetitions,
            seconds=typed.seconds,
            nixl_threads=Settings(**threads).nixl_threads,
            plants_wrong_byte=typed.plant_wrong_byte,
        )
        for page_tokens in sizes
        for is_scattered in lies
    ]
