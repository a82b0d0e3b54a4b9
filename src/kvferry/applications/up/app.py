"""The front's process, as the supervisor starts it."""

from __future__ import annotations

from typing import Annotated

import typer
import uvicorn

from kvferry.applications.up.dialects import DIALECTS
from kvferry.applications.up.front import Front
from kvferry.applications.up.servers import Server


def serve(
    engine: Annotated[str, typer.Option(help="Whose servers they are: vllm or sglang.")],
    host: Annotated[str, typer.Option()],
    port: Annotated[int, typer.Option()],
    prefill: Annotated[list[str], typer.Option(help="A prefill server, as name=url.")],
    decode: Annotated[list[str], typer.Option(help="A decode server, as name=url.")],
    bootstrap_port: Annotated[
        list[int] | None, typer.Option(help="SGLang's, one for each prefill server, in their order.")
    ] = None,
) -> None:
    """Serve OpenAI's interface in front of prefill and decode servers."""
    front = Front(DIALECTS[engine], servers(prefill, bootstrap_port), servers(decode))
    uvicorn.run(front.app(), host=host, port=port, log_level="warning")


def servers(given: list[str], bootstrap_ports: list[int] | None = None) -> list[Server]:
    """Reads name=url, and takes a port for each."""
    pairs = (each.partition("=") for each in given)
    ports = bootstrap_ports or [0] * len(given)
    return [Server(url, name, bootstrap_port) for (name, _, url), bootstrap_port in zip(pairs, ports, strict=True)]


if __name__ == "__main__":
    typer.run(serve)
