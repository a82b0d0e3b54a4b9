"""Whoever answers cannot make a client read without end, or decode."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from rich.console import Console
from tests.support.http import answering, http_answer, nested_gzip

from kvferry.answers import Answer, request
from kvferry.applications.top.asking import ask_once, record
from kvferry.control.kubernetes import KubernetesClient
from kvferry.errors import OrchestratorError


def asked(answer: bytes, *, most_bytes: int = 100) -> Answer:
    with answering(answer) as url, httpx.Client(trust_env=False) as client:
        return request(client, url, most_bytes=most_bytes, timeout_s=5.0)


def test_an_answer_is_taken_as_it_is():
    assert asked(http_answer(b"here", "404 Not Found")) == Answer(404, b"here")


def test_an_answer_that_is_too_long_is_not_read_to_its_end():
    assert asked(http_answer(bytes(100))).body == bytes(100)
    with pytest.raises(httpx.RemoteProtocolError, match="does not end within 100 bytes"):
        asked(http_answer(bytes(101)))


def kubernetes(url: str, folder: Path) -> str:
    token = folder / "token"
    token.write_text("token")
    client = KubernetesClient(url, token_file=token, ca_file=folder / "none", timeout_s=5.0)
    try:
        client.node("n")
    except OrchestratorError as error:
        return str(error)
    finally:
        client.close()
    return ""


def top(url: str, _: Path) -> str:
    (sample,) = ask_once([url.removeprefix("http://")])
    return sample.problem


def trace(url: str, folder: Path) -> str:
    console = Console(record=True, width=200)
    record([url], seconds=0.1, output=folder / "trace.json", console=console)
    return console.export_text()


@pytest.mark.parametrize("ask", [kubernetes, top, trace])
def test_nobody_decodes_what_an_answer_is_encoded_in(ask: Callable[[str, Path], str], tmp_path: Path):
    with answering(http_answer(nested_gzip(), headers="Content-Encoding: gzip, gzip\r\n")) as url:
        ask(url, tmp_path)  # imports what it needs
        tracemalloc.start()
        try:
            said = ask(url, tmp_path)
            assert tracemalloc.get_traced_memory()[1] < 16 << 20
        finally:
            tracemalloc.stop()
    assert "encodes its answers" in said
