"""What transports are made with."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.endpoint import construction
from kvferry.settings import Settings
from kvferry.transport import NixlTransport


@pytest.mark.parametrize(
    ("path", "writes", "threads"),
    [("auto", True, 3), ("direct", True, 3), ("staged", True, 0), ("auto", False, 0)],
)
def test_writes_are_shared_where_there_is_something_to_share(
    monkeypatch: pytest.MonkeyPatch, path: Any, writes: bool, threads: int
):
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(NixlTransport, "__init__", lambda self, name, **options: made.append(options))
    construction.create_transport(Settings(path=path, nixl_threads=3), "endpoint", writes=writes)
    assert made[0]["threads"] == threads
    assert "num_threads" not in made[0]["backend_parameters"]  # with NIXL's own an end is no end
