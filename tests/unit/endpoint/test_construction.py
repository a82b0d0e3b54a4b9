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


@pytest.mark.parametrize(
    ("settings", "parameters"),
    [
        ({}, {"engine_config": "TCP_CONN_NB=y,TCP_USER_TIMEOUT=15s,NET_DEVICES=lo"}),
        ({"nixl_device": "mlx5_0:1"}, {"engine_config": "TCP_CONN_NB=y,TCP_USER_TIMEOUT=15s,NET_DEVICES=mlx5_0:1"}),
        (
            {"nixl_device": "all", "peer_timeout_s": 4.5},
            {"engine_config": "TCP_CONN_NB=y,TCP_USER_TIMEOUT=4.5s"},
        ),
        ({"nixl_backend": "POSIX"}, {}),
    ],
)
def test_ucx_is_told_the_network_device_and_when_a_connection_is_lost(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], parameters: dict[str, str]
):
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(NixlTransport, "__init__", lambda self, name, **options: made.append(options))
    construction.create_transport(Settings(**settings), "endpoint")
    assert made[0]["backend_parameters"] == parameters
    assert made[0]["backend"] == settings.get("nixl_backend", "UCX")
