"""The options of `kvferry up`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from kvferry.applications.checks import check_at_least_one
from kvferry.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentRequest:
    """What is to be started.

    Raises:
        ConfigurationError: if it cannot be, naming the option and its value.
    """

    model: Annotated[Path, typer.Option(help="A directory with the model, as transformers saves it.")]
    engine: Annotated[str, typer.Option(help="Which engine: vllm.")] = "vllm"
    prefill: Annotated[int, typer.Option(help="Prefill servers.")] = 1
    prefill_tp: Annotated[int, typer.Option(help="Tensor-parallel ranks of each.")] = 1
    decode: Annotated[int, typer.Option(help="Decode servers.")] = 1
    decode_tp: Annotated[int, typer.Option(help="Tensor-parallel ranks of each.")] = 1
    host: Annotated[str, typer.Option(help="Address to answer on.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(help="Port to answer on.")] = 8000
    engine_options: Annotated[
        list[str] | None, typer.Argument(help="Options for every server, after --, such as -- --max-model-len 4096.")
    ] = None

    def __post_init__(self) -> None:
        if self.engine != "vllm":
            raise ConfigurationError(f"--engine {self.engine}: known is vllm")
        check_at_least_one(self, "prefill", "prefill_tp", "decode", "decode_tp")
        if not (self.model / "config.json").is_file():
            raise ConfigurationError(f"--model {self.model}: there is no config.json in that directory")
