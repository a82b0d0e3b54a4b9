"""What a prefill server of another release says of itself is read as far as it is known."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvferry import RegistryServer, Settings, create_registry
from kvferry.answers import Answer
from kvferry.applications.up.supervision import free_ports
from kvferry.engines.sglang import bootstrap, prefill_server
from kvferry.engines.sglang.bootstrap import KVFerryBootstrapServer
from kvferry.engines.sglang.prefill_server import described
from kvferry.errors import RegistryError

SAID = {
    "attn_tp_size": 2,
    "attn_cp_size": 1,
    "dp_size": 1,
    "pp_size": 1,
    "page_size": 16,
    "kv_cache_dtype": "auto",
    "follow_bootstrap_room": True,
}


def answers(monkeypatch: pytest.MonkeyPatch, said: Any) -> None:
    body = json.dumps(said).encode()
    monkeypatch.setattr(prefill_server, "get", lambda address, path: Answer(200, body))


def test_what_is_new_to_this_sglang_is_ignored(monkeypatch: pytest.MonkeyPatch):
    answers(monkeypatch, SAID | {"page_colour": "green"})
    info = described("prefill:8998")
    assert (info.attn_tp_size, info.page_size) == (2, 16)


@pytest.mark.parametrize("said", [{"attn_tp_size": 2}, [1, 2], "ready"], ids=["fields are missing", "list", "text"])
def test_what_is_not_understood_is_a_problem_of_that_server(monkeypatch: pytest.MonkeyPatch, said: Any):
    answers(monkeypatch, said)
    with pytest.raises(
        RegistryError, match="the bootstrap server at prefill:8998 says of its server is not understood"
    ):
        described("prefill:8998")


@pytest.mark.parametrize("ranks", [0, -1, 10**9, "many"])
@pytest.mark.parametrize("field", ["attn_tp_size", "attn_cp_size", "dp_size", "pp_size"])
def test_numbers_of_ranks_that_no_server_has_are_a_problem_of_that_server(
    monkeypatch: pytest.MonkeyPatch, field: str, ranks: object
):
    """Before, no data-parallel ranks ended the decode rank: SGLang divides by them. So did a list of so many ranks."""
    answers(monkeypatch, SAID | {field: ranks})
    with pytest.raises(RegistryError, match="says of its server is not understood"):
        described("prefill:8998")


@pytest.mark.parametrize(
    ("variables", "listens_at"),
    [
        ({}, "127.0.0.1"),
        ({"HOST": "192.0.2.7"}, "0.0.0.0"),
        ({"HOST": "192.0.2.7", "REGISTRY_HOST": "127.0.0.3"}, "127.0.0.3"),
    ],
)
def test_the_registry_is_reached_as_the_bootstrap_server_is(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], listens_at: str
):
    """So that one address is all that a prefill server of a cluster is told."""
    for name, value in {"ALLOW_UNAUTHENTICATED": "1", **variables}.items():
        monkeypatch.setenv(f"KVFERRY_{name}", value)
    made: list[RegistryServer] = []

    def noted(settings: Settings) -> RegistryServer:
        made.append(create_registry(settings))
        return made[-1]

    monkeypatch.setattr(bootstrap, "create_registry", noted)
    server = KVFerryBootstrapServer("0.0.0.0", *free_ports(1))
    try:
        assert made[-1].address[0] == listens_at
    finally:
        server.close()
