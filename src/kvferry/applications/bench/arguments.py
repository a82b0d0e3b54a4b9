"""The options of `kvferry bench`, as they are typed. `prepare` checks them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Whose cache is moved, and between which pools."""

    preset: Annotated[str, typer.Option(help="Whose cache: small, qwen3-8b, qwen3-32b or llama-3.1-70b.")] = "qwen3-32b"
    config: Annotated[
        Path | None, typer.Option(help="A model's config.json, or a description by hand, instead of --preset.")
    ] = None
    device: Annotated[str, typer.Option(help="Where the caches lie: cpu, or cuda for one GPU, which needs torch.")] = (
        "cpu"
    )
    variants: Annotated[
        str,
        typer.Option(
            help="What is measured: some of synchronous, direct, staged, mapped (between GPUs) and auto, separated by "
            "commas."
        ),
    ] = "synchronous,direct,staged,auto"
    prefill_tp: Annotated[int, typer.Option(help="Tensor-parallel ranks of the prefill engine.")] = 1
    decode_tp: Annotated[int, typer.Option(help="Tensor-parallel ranks of the decode engine.")] = 1
    page_size: Annotated[str, typer.Option(help="Tokens in a page; several, such as 1,16,64, are a case each.")] = "16"
    decode_page_size: Annotated[int | None, typer.Option(help="Of the decode side; else --page-size.")] = None
    prefill_layout: Annotated[str, typer.Option(help="Order in a page of the prefill side: nhd or hnd.")] = "nhd"
    decode_layout: Annotated[str, typer.Option(help="Order in a page of the decode side: nhd or hnd.")] = "nhd"
    pages: Annotated[
        str, typer.Option(help="How a request's pages lie: scattered, contiguous, or both, a case each.")
    ] = "scattered"


@dataclass(frozen=True, kw_only=True)
class Workload:
    """How much is moved, and how often. Every rank's process needs to know it as it is typed."""

    tokens: Annotated[int, typer.Option(help="Tokens of a request.")] = 2048
    chunks: Annotated[int, typer.Option(help="Chunks that a request is submitted in.")] = 1
    requests: Annotated[int, typer.Option(help="Requests with memory of their own.")] = 4
    passes: Annotated[
        int, typer.Option(help="How often a repetition goes over the memory of its requests: more, for a steady load.")
    ] = 1
    in_flight: Annotated[int, typer.Option(help="Requests submitted and not yet sent at a time.")] = 4
    repetitions: Annotated[int, typer.Option(help="Rounds, in each of which every variant has a turn.")] = 3
    seconds: Annotated[float, typer.Option(help="Begin further rounds for so long.")] = 0.0
    layer_time_ms: Annotated[
        float,
        typer.Option(
            help="Play a prefill that computes one request at a time, so long for each layer, and measure what of a "
            "transfer is left when it is through: sent whole, and layer by layer."
        ),
    ] = 0.0
    layer_ranges: Annotated[
        int, typer.Option(help="With --layer-time-ms, in how many ranges of layers a request is sent.")
    ] = 8
    plant_wrong_byte: Annotated[
        bool, typer.Option("--plant-wrong-byte", help="Change a byte that arrived, to see that the check finds it.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class BenchArguments(Workload, Shape):
    """What is measured. Two machines that measure together are given the same."""

    transport: Annotated[
        str | None,
        typer.Option(
            "--transport",
            "--transports",
            help="What moves the bytes: a name, or module:Class; several, such as nixl,mooncake, are a case each "
            "[KVFERRY_TRANSPORT].",
        ),
    ] = None
    nixl_threads: Annotated[
        int | None, typer.Option(help="Threads that share a large direct write [KVFERRY_NIXL_THREADS].")
    ] = None
