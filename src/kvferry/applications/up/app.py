"""The front's process, as the supervisor starts it."""

from __future__ import annotations

from typing import Annotated

import typer
import uvicorn

from kvferry.applications.up.front import Front, Server


def serve(
    host: Annotated[str, typer.Option()],
    port: Annotated[int, typer.Option()],
    prefill: Annotated[list[str], typer.Option(help="A prefill server, as name=url.")],
    decode: Annotated[list[str], typer.Option(help="A decode server, as name=url.")],
) -> None:
    """Serve OpenAI's interface in front of prefill and decode servers."""
    front = Front(_servers(prefill), _servers(decode))
    uvicorn.run(front.app(), host=host, port=port, log_level="warning")


def _servers(given: list[str]) -> list[Server]:
    pairs = (each.partition("=") for each in given)
    return [Server(url, name) for name, _, url in pairs]


if __name__ == "__main__":
    typer.run(serve)
