"""One registry for all tests of the endpoints, and engines that end with the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.support.caches import Model, Shape
from tests.support.engines import Engines, Requests

from kvferry.control.registry_server import RegistryServer


@pytest.fixture(scope="session")
def registry_url() -> Iterator[str]:
    with RegistryServer(port=0) as registry:
        yield registry.url


@pytest.fixture
def engines(registry_url: str) -> Iterator[Callable[..., Engines]]:
    """Makes `Engines` with the given settings, closed at the end of the test."""
    made: list[Engines] = []

    def make(**settings: Any) -> Engines:
        made.append(Engines(registry_url, **settings))
        return made[-1]

    yield make
    for each in made:
        each.__exit__(None, None, None)


@pytest.fixture
def pair(engines: Callable[..., Engines]) -> Callable[..., Requests]:
    """Makes one prefill and one decode engine, a rank each unless told otherwise, with the given settings."""

    def make(
        model: Model | None = None, prefill: Shape | None = None, decode: Shape | None = None, **settings: Any
    ) -> Requests:
        model = model or Model()
        both = engines(**settings)
        return Requests(both.prefill(model, prefill), both.decode(model, decode))

    return make
