"""Options of engines that a user hands through: read as a shell does, refused where a deployment sets them itself."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from enum import Enum

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
