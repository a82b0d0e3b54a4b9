"""What kvferry logs stands in vLLM's log, once."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvferry.engines.vllm import share_handlers


class Lines(logging.Handler):
    """What it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def loggers() -> Iterator[tuple[logging.Logger, logging.Logger, Lines]]:
    """An engine's logger and ours, with the engine's handler. Handlers of pytest's own are out of reach, made so within
    a test: pytest gives them to loggers that are out of reach when it begins."""
    theirs, ours, handler = logging.getLogger("engine of a test"), logging.getLogger("ferry of a test"), Lines()
    theirs.addHandler(handler)
    theirs.setLevel(logging.INFO)
    theirs.propagate = ours.propagate = False
    try:
        yield theirs, ours, handler
    finally:
        for each in (theirs, ours):
            each.handlers.clear()
            each.setLevel(logging.NOTSET)
            each.propagate = True


def test_the_engines_handlers_get_what_ours_logs_down_to_its_level():
    with loggers() as (theirs, ours, handler):
        for _ in range(2):  # every class that is looked up does it again
            share_handlers(theirs.name, ours.name)
        log = ours.getChild("endpoint")
        log.warning("nobody asks")
        log.info("a room was given up")
        log.debug("too much")
        assert handler.lines == ["nobody asks", "a room was given up"]


def test_a_level_of_the_users_stays():
    with loggers() as (theirs, ours, handler):
        ours.setLevel(logging.ERROR)
        share_handlers(theirs.name, ours.name)
        ours.warning("no")
        assert handler.lines == []


def test_handlers_of_the_users_get_it_instead(caplog: pytest.LogCaptureFixture):
    with loggers() as (theirs, ours, handler):
        ours.propagate = True  # to pytest's
        share_handlers(theirs.name, ours.name)
        ours.warning("to those of the root logger")
        ours.propagate = False
        ours.addHandler(own := Lines())
        share_handlers(theirs.name, ours.name)
        ours.warning("to its own")
        assert (caplog.messages, own.lines) == (["to those of the root logger"], ["to its own"])
        assert handler.lines == []


def test_an_engine_that_shows_nothing_changes_nothing():
    with loggers() as (theirs, ours, _):
        theirs.handlers.clear()
        share_handlers(theirs.name, ours.name)
        assert (ours.handlers, ours.level) == ([], logging.NOTSET)
