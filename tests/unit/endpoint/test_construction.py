"""What transports are made with."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.endpoint import construction
from kvferry.settings import Settings


@pytest.mark.parametrize(
    ("path", "writes", "threads"),
    [("auto", True, "3"), ("direct", True, "3"), ("staged", True, None), ("auto", False, None)],
)
def test_nixl_has_threads_where_they_have_work(
    monkeypatch: pytest.MonkeyPatch, path: Any, writes: bool, threads: str | None
):
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(construction, "NixlTransport", lambda name, **options: made.append(options))
    construction.create_transport(Settings(path=path, nixl_threads=3), "endpoint", writes=writes)
    assert made[0]["backend_parameters"].get("num_threads") == threads
