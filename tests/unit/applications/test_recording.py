"""What `kvferry trace` says of those that give it nothing."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from starlette.responses import Response
from tests.support.http import Served
from tests.support.statuses import WELL

from kvferry.applications.top.asking import record
from kvferry.observe.metrics import Metrics
from kvferry.observe.server import ObserveServer
from kvferry.observe.tracing import Recorder, Span


class Busy(Recorder):
    """A recorder at which somebody else records."""

    def record(self, seconds: float) -> tuple[list[Span], int] | None:
        return None


@pytest.fixture
def said(tmp_path: Path) -> Callable[[str], str]:
    """What is printed for an address that gives nothing."""

    def say(address: str) -> str:
        output = io.StringIO()
        assert not record([address], seconds=0.1, output=tmp_path / "trace", console=Console(file=output, width=500))
        return output.getvalue()

    return say


def test_a_refusal_is_told_with_its_reason(said: Callable[[str], str]):
    with ObserveServer("127.0.0.1", 0, Metrics(lambda: WELL), Busy(), lambda: WELL, lambda: None, None) as server:
        assert "refuses: somebody else records: try again when that is over (409)" in said(server.url)


def test_what_a_stranger_says_is_cut_short_and_not_taken_for_markup(said: Callable[[str], str]):
    with Served(Response(b"[/red] " + b"x" * 10_000, 404)) as stranger:
        told = said(stranger.address)
    assert "refuses: [/red] x" in told
    assert "x (404)" in told
    assert len(told) < 1000


def test_nobody_there(said: Callable[[str], str]):
    assert "does not answer" in said("127.0.0.1:1")
