"""Engines that end with the test, and know one another by the registry of `kvferry.testing`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from tests.support.caches import Model, Shape
from tests.support.engines import Engines, Requests


@pytest.fixture(scope="session")
def registry_url(kvferry_registry_url: str) -> str:
    return kvferry_registry_url


@pytest.fixture
def engines(registry_url: str) -> Iterator[Callable[..., Engines]]:
    """Makes `Engines` with the given settings, closed at the end of the test."""
    with ExitStack() as made:
        yield lambda **settings: made.enter_context(Engines(registry_url, **settings))


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
