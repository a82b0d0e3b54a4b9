"""Options of `kvferry up`: its own, and those of engines that a user hands through.

These are read as a shell does, and refused where a deployment sets them itself.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from kvferry.applications.command_line import check_at_least_one, one_of
from kvferry.errors import ConfigurationError


class Engine(Enum):
    """Engines of which a deployment can be made."""

    VLLM = "vllm"
    SGLANG = "sglang"


class FrontKind(Enum):
    """What can stand in front of the servers."""

    AUTO = "auto"
    KVFERRY = "kvferry"
    ROUTER = "sglang-router"


_EVERY_ENGINE = {
    "--model": "--model of kvferry up says which",
    "--host": "--host of kvferry up is where the front answers; servers answer on loopback",
    "--port": "--port of kvferry up is where the front answers; servers get free ones",
    "--tensor-parallel-size": "--prefill-tp and --decode-tp say how many",
}
_TP = _EVERY_ENGINE["--tensor-parallel-size"]
_TRANSFER = "kvferry up sets it for both sides"

_SET_BY_US: dict[Engine, dict[str, str]] = {
    Engine.VLLM: {**_EVERY_ENGINE, "-tp": _TP, "--kv-transfer-config": _TRANSFER},
    Engine.SGLANG: {
        **_EVERY_ENGINE,
        "--model-path": _EVERY_ENGINE["--model"],
        "--tp-size": _TP,
        "--tp": _TP,
        "--disaggregation-mode": _TRANSFER,
        "--disaggregation-transfer-backend": _TRANSFER,
        "--disaggregation-bootstrap-port": _TRANSFER,
    },
}
"""What the command lines of servers have already, by engine, and what to do instead."""


def split(option: str, given: str) -> tuple[str, ...]:
    """Reads the options that one option has as its value.

    Raises:
        ConfigurationError: naming the option, if a quotation does not end, or it does not begin with an option.
    """
    try:
        words = tuple(shlex.split(given))
    except ValueError as error:
        raise ConfigurationError(f"{option} {given!r}: {error}; quote it as for a shell") from error
    if words and not words[0].startswith("-"):
        raise ConfigurationError(
            f"{option} {given!r}: {words[0]!r} is no option of the engine's: write '--name value', in quotes"
        )
    return words


def check_engine_options(engine: Engine, options: Sequence[str]) -> None:
    """Refuses options that would undo what makes the servers one deployment.

    Raises:
        ConfigurationError: naming the option, and what sets it.
    """
    ours = _SET_BY_US[engine]
    for each in options:
        # Both engines take --name=value, vLLM also --name_of_it and, for a part of a JSON value, --name.part.
        name = each.partition("=")[0]
        if name.startswith("--"):
            name = name.partition(".")[0].replace("_", "-")
        if name in ours:
            raise ConfigurationError(f"{each}: not among the engine's options: {ours[name]}")


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
