"""The options of `kvferry up`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from kvferry.applications.checks import check_at_least_one, one_of
from kvferry.applications.up.engine_options import Engine, FrontKind, check_engine_options, split
from kvferry.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentRequest:
    """What is to be started.

    Raises:
        ConfigurationError: if it cannot be, naming the option and its value.
    """

    model: Annotated[Path, typer.Option(help="A directory with the model, as transformers saves it.")]
    engine: Annotated[str, typer.Option(help="Which engine: vllm or sglang.")] = "vllm"
    prefill: Annotated[int, typer.Option(help="Prefill servers.")] = 1
    prefill_tp: Annotated[int, typer.Option(help="Tensor-parallel ranks of each.")] = 1
    prefill_options: Annotated[
        str, typer.Option(help="Engine options for prefill servers alone, in quotes: '--max-num-seqs 8'.")
    ] = ""
    decode: Annotated[int, typer.Option(help="Decode servers.")] = 1
    decode_tp: Annotated[int, typer.Option(help="Tensor-parallel ranks of each.")] = 1
    decode_options: Annotated[
        str, typer.Option(help="Engine options for decode servers alone, in quotes; they win over those after --.")
    ] = ""
    front: Annotated[
        str,
        typer.Option(
            help="What answers: kvferry, sglang-router, or auto: the router for SGLang where it is installed."
        ),
    ] = "auto"
    host: Annotated[str, typer.Option(help="Address to answer on.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(help="Port to answer on.")] = 8000
    engine_options: Annotated[
        list[str] | None, typer.Argument(help="Options for every server, after --, such as -- --max-model-len 4096.")
    ] = None

    def __post_init__(self) -> None:
        engine = one_of(Engine, self.engine, option="--engine")
        if one_of(FrontKind, self.front, option="--front") is FrontKind.ROUTER and engine is not Engine.SGLANG:
            raise ConfigurationError(
                f"--front {self.front} with --engine {self.engine}: it speaks SGLang's protocol; leave --front away"
            )
        check_at_least_one(self, "prefill", "prefill_tp", "decode", "decode_tp")
        for side in ("prefill", "decode"):
            check_engine_options(engine, self.options_of(side))
        if not (self.model / "config.json").is_file():
            raise ConfigurationError(f"--model {self.model}: there is no config.json in that directory")

    @property
    def which_engine(self) -> Engine:
        """The engine whose servers are started."""
        return Engine(self.engine.lower())

    def options_of(self, side: str) -> tuple[str, ...]:
        """Returns the engine's options for one side, those for it alone last: the last of two wins.

        Args:
            side: prefill or decode.
        """
        name = f"--{side}-options"
        return (*(self.engine_options or ()), *split(name, getattr(self, f"{side}_options")))
