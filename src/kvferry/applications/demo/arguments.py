"""The options of `kvferry demo`, as they are typed. `prepare` checks them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoArguments:
    """What runs, and what is asked of it."""

    prefill_tp: Annotated[int, typer.Option(help="Tensor-parallel ranks of a prefill engine.")] = 4
    decode_tp: Annotated[int, typer.Option(help="Tensor-parallel ranks of a decode engine.")] = 2
    prefill_pp: Annotated[int, typer.Option(help="Pipeline stages of a prefill engine.")] = 1
    decode_pp: Annotated[int, typer.Option(help="Pipeline stages of a decode engine.")] = 1
    prefill_stages: Annotated[
        str | None, typer.Option(help="Layers of every prefill stage, such as 3,1; instead of --prefill-pp.")
    ] = None
    decode_stages: Annotated[
        str | None, typer.Option(help="Layers of every decode stage, such as 1,3; instead of --decode-pp.")
    ] = None
    prefill_engines: Annotated[int, typer.Option(help="Prefill engines side by side.")] = 1
    decode_engines: Annotated[int, typer.Option(help="Decode engines side by side.")] = 1
    arch: Annotated[
        str,
        typer.Option(
            help="Architecture of a small model with seeded weights: qwen3, llama, deepseek_v3, or one of the hybrids "
            "qwen3_next (recurrent and convolution states), gemma3 (sliding windows) and mamba2."
        ),
    ] = "qwen3"
    kv_heads: Annotated[
        int, typer.Option(help="KV heads of the seeded model; also key heads of qwen3_next's states, groups of mamba2.")
    ] = 4
    layers: Annotated[int, typer.Option(help="Layers of the seeded model.")] = 4
    model: Annotated[
        Path | None, typer.Option(help="Directory of a local checkpoint to use instead, with its tokenizer.")
    ] = None
    prompt_file: Annotated[
        Path | None, typer.Option(help="Text file with one prompt a line; prompts come with kvferry.")
    ] = None
    requests: Annotated[int, typer.Option(help="How many requests.")] = 8
    in_flight: Annotated[int, typer.Option(help="Requests that a decode rank waits for at a time.")] = 4
    page_size: Annotated[int, typer.Option(help="Tokens in a page.")] = 16
    prefill_page_size: Annotated[
        int | None, typer.Option(help="Tokens in a page of the prefill side; else --page-size.")
    ] = None
    decode_page_size: Annotated[
        int | None, typer.Option(help="Tokens in a page of the decode side; else --page-size.")
    ] = None
    prefill_layout: Annotated[str, typer.Option(help="Order in a page of the prefill side: nhd or hnd.")] = "nhd"
    decode_layout: Annotated[str, typer.Option(help="Order in a page of the decode side: nhd or hnd.")] = "nhd"
    chunk_tokens: Annotated[int, typer.Option(help="Tokens prefilled and sent at a time; whole pages.")] = 64
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to decode for every request.")] = 24
    seed: Annotated[int, typer.Option(help="Seed of weights and page orders.")] = 0
    transport: Annotated[
        str | None, typer.Option(help="What moves the bytes: a name, or module:Class [KVFERRY_TRANSPORT].")
    ] = None
