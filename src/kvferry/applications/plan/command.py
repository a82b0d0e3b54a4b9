"""`kvferry plan`, as Typer calls it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvferry.applications.command_line import FAILED, Json


def plan(
    config: Annotated[
        Path, typer.Option(help="A model's config.json, a directory with one, or a description by hand.")
    ],
    prefill: Annotated[str, typer.Option(help="The prefill side, such as tp=4,pp=2; see below.")] = "tp=1",
    decode: Annotated[str, typer.Option(help="The decode side, such as tp=2,dp=2.")] = "tp=1",
    decode_config: Annotated[
        Path | None, typer.Option(help="The decode side's configuration, where it differs.")
    ] = None,
    prefill_page_size: Annotated[int, typer.Option(help="Tokens in a page of the prefill side.")] = 16,
    decode_page_size: Annotated[int, typer.Option(help="Tokens in a page of the decode side.")] = 16,
    prefill_layout: Annotated[str, typer.Option(help="Order in its pages: nhd, hnd or packed.")] = "nhd",
    decode_layout: Annotated[str, typer.Option(help="Order in its pages: nhd, hnd or packed.")] = "nhd",
    prefill_dtype: Annotated[
        str | None, typer.Option(help="Of its keys, values and latents, such as float8_e4m3fn; else the model's.")
    ] = None,
    decode_dtype: Annotated[str | None, typer.Option(help="The same for the decode side.")] = None,
    tokens: Annotated[int, typer.Option(help="Length of the request that is counted.")] = 1000,
    pages: Annotated[
        str, typer.Option(help="How a request's pages lie, to choose a path: scattered or, in a fresh pool, adjacent.")
    ] = "scattered",
    room: Annotated[int, typer.Option(help="The request's room number: decides which of several replicas sends.")] = 1,
    draw: Annotated[
        Path | None, typer.Option(help="Draw who sends which heads and layers where: a .svg, .png or .pdf.")
    ] = None,
    json: Json = False,
) -> None:
    """Show what two deployments would exchange: who sends what to whom, how much, which way, and whether it is right.

    Starts nothing and moves nothing. A side is written as tp=4,pp=2,dp=2,cp=2,ep=8, every part of which may be left
    out; stages=7+8 instead of pp gives every stage its layers; cp=2:contiguous, cp=2:zigzag or cp=2:interleaved:16 say
    how tokens are partitioned; draft adds the layers of the draft model. The exit code is 0 only if the plan is proved.
    """
    from kvferry.applications.plan import run

    is_proved = run.run(
        prefill=("prefill", config, prefill, prefill_page_size, prefill_layout, prefill_dtype),
        decode=("decode", decode_config or config, decode, decode_page_size, decode_layout, decode_dtype),
        request=(tokens, room, pages),
        picture=draw,
        wants_json=json,
    )
    if not is_proved:
        raise typer.Exit(FAILED)
