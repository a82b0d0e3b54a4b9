"""A front before servers that are made up: two of either kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import httpx
from starlette.applications import Starlette
from tests.support.http import Served
from tests.support.waiting import PATIENCE_S, eventually

from kvferry.applications.up.app import Front
from kvferry.applications.up.dialects import Dialect
from kvferry.applications.up.servers import Server
from kvferry.control.registry import Registry

NAMES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
FIRST_BOOTSTRAP_PORT = 8998
"""Of the first server; each has the next."""


class Fake(Protocol):
    """What stands for a server."""

    asked: list[dict[str, Any]]

    def app(self) -> Starlette:
        """What it answers with."""
        ...


FakeT = TypeVar("FakeT", bound=Fake)


class FrontDeployment(Generic[FakeT]):
    """The servers, and the front before them, which knows that all are well."""

    def __init__(
        self,
        dialect: Dialect,
        fakes: Mapping[str, FakeT],
        registries: Sequence[Registry] = (),
        decode_ranks: Sequence[Sequence[str]] = (),
    ) -> None:
        self.fakes = fakes
        self.served = {name: Served(fake.app()) for name, fake in fakes.items()}
        made = [Server(self.served[name].url, name, FIRST_BOOTSTRAP_PORT + number) for number, name in enumerate(NAMES)]
        for server, registry in zip(made, registries, strict=False):
            server.registry = registry
        for server, ranks in zip(made[2:], decode_ranks, strict=False):
            server.ranks = ranks
        self.front = Front(dialect, made[:2], made[2:])
        self.front_served = Served(self.front.app())
        self.url = self.front_served.url
        eventually("all are known to be well", lambda: all(server.is_healthy for server in made))

    def ask(self, path: str = "/v1/completions", **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json={"prompt": "hello", **body}, timeout=PATIENCE_S)

    def asked(self, kind: str) -> list[dict[str, Any]]:
        return [body for name, fake in self.fakes.items() if name.startswith(kind) for body in fake.asked]

    def close(self) -> None:
        self.front_served.close()
        for served in self.served.values():
            served.close()
