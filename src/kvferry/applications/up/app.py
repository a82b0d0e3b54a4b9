"""The front's process, as the supervisor starts it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import repeat
from typing import Annotated

import typer
import uvicorn

from kvferry.applications.top.asking import addresses
from kvferry.applications.up.dialects import DIALECTS
from kvferry.applications.up.front import Front
from kvferry.applications.up.servers import Server
from kvferry.control.construction import create_registry_client
from kvferry.control.registry import Registry
from kvferry.errors import ConfigurationError
from kvferry.settings import Settings


def serve(
    engine: Annotated[str, typer.Option(help="Whose servers they are: vllm or sglang.")],
    host: Annotated[str, typer.Option()],
    port: Annotated[int, typer.Option()],
    prefill: Annotated[list[str], typer.Option(help="A prefill server, as name=url.")],
    decode: Annotated[list[str], typer.Option(help="A decode server, as name=url.")],
    bootstrap_port: Annotated[
        list[int] | None, typer.Option(help="SGLang's, one for each prefill server, in their order.")
    ] = None,
    registry: Annotated[
        list[str] | None,
        typer.Option(
            help="Which says whether prefill servers drain: one for all, or one for each in their order. "
            "KVFERRY_REGISTRY_URL if not given; without either nobody is asked."
        ),
    ] = None,
    decode_observe: Annotated[
        list[str] | None,
        typer.Option(
            help="Where a decode server's ranks say whether they drain, as host:9470 or host:9470-9477 "
            "(KVFERRY_OBSERVE_PORT): one for each decode server in their order; without, nobody is asked."
        ),
    ] = None,
) -> None:
    """Serve OpenAI's interface in front of prefill and decode servers."""
    with ExitStack() as opened:
        prefills = servers(prefill, bootstrap_port, clients(registry, len(prefill), opened))
        front = Front(DIALECTS[engine], prefills, servers(decode, ranks=ranks_of(decode_observe or [], len(decode))))
        uvicorn.run(front.app(), host=host, port=port, log_level="warning")


def servers(
    given: Sequence[str],
    bootstrap_ports: Sequence[int] | None = None,
    registries: Sequence[Registry] = (),
    ranks: Sequence[Sequence[str]] = (),
) -> list[Server]:
    """Reads name=url, and takes for each what there is: a port, a registry, addresses of its ranks."""
    count = len(given)
    pairs = (each.partition("=") for each in given)
    rest = zip(
        bootstrap_ports or repeat(0, count), registries or repeat(None, count), ranks or repeat((), count), strict=True
    )
    return [Server(url, name, *each) for (name, _, url), each in zip(pairs, rest, strict=True)]


def ranks_of(given: Sequence[str], count: int) -> list[list[str]]:
    """Reads the addresses of each decode server's ranks; nothing if none is given.

    Raises:
        ConfigurationError: if an address makes no sense, or there is not one for each server.
    """
    if len(given) not in (0, count):
        raise ConfigurationError(f"--decode-observe: {len(given)} for {count} decode servers; name one for each")
    return [addresses([each]) for each in given]


def clients(given: Sequence[str] | None, count: int, opened: ExitStack) -> list[Registry]:
    """Makes the clients of registries, one for each prefill server, or none if no registry is known.

    Args:
        given: addresses; the settings' one if there are none.
        count: of prefill servers.
        opened: closes the clients.

    Raises:
        ConfigurationError: if there are several registries, and not one for each.
    """
    settings = Settings()
    urls = [*(given or ([settings.registry_url] if settings.registry_url is not None else []))]
    if len(urls) not in (0, 1, count):
        raise ConfigurationError(f"--registry: {len(urls)} for {count} prefill servers; name one, or one for each")
    made = [opened.enter_context(create_registry_client(settings, url)) for url in urls]
    return made * count if len(made) == 1 else made


if __name__ == "__main__":
    typer.run(serve)
