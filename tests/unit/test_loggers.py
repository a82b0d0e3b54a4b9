"""Log lines cost no more than themselves: what an application's handlers, filters and factories raise stays there."""

from __future__ import annotations

import ast
import logging
import logging.config
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvferry
from kvferry.loggers import logger_of

PACKAGE = Path(kvferry.__file__).parent

CONFIGURES = {"loggers.py", "engines/vllm/__init__.py"}
"""Files that get a logger to set it up, and log nothing with it."""


class Raises(logging.Handler):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error
        self.lines = 0

    def handle(self, record: logging.LogRecord) -> bool:
        self.lines += 1
        raise self.error


@pytest.fixture
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    """Of a logger that nobody has, and that nobody keeps."""
    name = f"kvferry.made_for.{request.node.name}"
    yield name
    logging.getLogger(name).handlers.clear()
    logging.getLogger(name).filters.clear()


@pytest.fixture(autouse=True)
def _errors_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by default: NIXL's wheel has `logging` hide them, in every process that imports it."""
    monkeypatch.setattr(logging, "raiseExceptions", True)


@pytest.mark.parametrize("error", [ValueError("no space left"), RecursionError()])
def test_what_a_handler_raises_ends_nothing_and_is_shown_once(
    name: str, error: Exception, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    log, raises = logger_of(name), Raises(error)
    log.addHandler(raises)
    for number in range(3):
        log.warning("line %d", number)
    assert raises.lines == 3
    shown = capsys.readouterr().err
    assert shown.count(type(error).__name__) == 1
    assert name in shown


def test_what_a_filter_raises_ends_nothing(name: str, capsys: pytest.CaptureFixture[str]):
    log = logger_of(name)

    def broken(record: logging.LogRecord) -> bool:
        raise ValueError("a filter's mistake")

    log.addFilter(broken)
    log.error("a line")
    assert "a filter's mistake" in capsys.readouterr().err


def test_nothing_is_shown_where_logging_raises_no_exceptions(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(logging, "raiseExceptions", False)
    logger_of(name).addHandler(Raises(ValueError("no space left")))
    logger_of(name).error("a line")
    assert not capsys.readouterr().err


def test_a_line_is_logged_where_the_factory_of_records_raises(name: str, caplog: pytest.LogCaptureFixture):
    def factory(*args: object, **named: object) -> logging.LogRecord:
        raise ValueError("a factory's mistake")

    before = logging.getLogRecordFactory()
    logging.setLogRecordFactory(factory)
    try:
        logger_of(name).error("line %d", 7)
    finally:
        logging.setLogRecordFactory(before)
    assert caplog.messages == ["line 7"]


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_an_interrupt_of_the_main_thread_gets_through_and_on_others_nothing_does(name: str, error: BaseException):
    log, went_on = logger_of(name), list[bool]()
    log.addHandler(Raises(error))
    with pytest.raises(type(error)):
        log.error("a line")

    def elsewhere() -> None:
        log.error("a line")
        went_on.append(True)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert went_on


def test_a_logger_that_was_there_before_is_the_same_and_keeps_what_it_has(name: str):
    class Theirs(logging.Logger):
        def shout(self) -> str:
            return self.name.upper()

    before = logging.getLoggerClass()
    plain = logging.getLogger(name)
    plain.setLevel(logging.ERROR)
    logging.setLoggerClass(Theirs)
    try:
        theirs = logging.getLogger(f"{name}.theirs")
    finally:
        logging.setLoggerClass(before)
    for logger in (plain, theirs):
        assert logger_of(logger.name) is logger
        assert logger_of(logger.name) is logging.getLogger(logger.name)
        logger.addHandler(Raises(ValueError("no space left")))
        logger.error("a line")
    assert plain.level == logging.ERROR
    assert isinstance(theirs, Theirs)
    assert theirs.shout() == theirs.name.upper()


def test_a_line_names_the_caller_and_is_seen_by_handlers_of_the_root(name: str, caplog: pytest.LogCaptureFixture):
    logger_of(name).warning("a line")
    (record,) = caplog.records
    assert (record.filename, record.funcName) == (os.path.basename(__file__), record.funcName)
    assert record.funcName.startswith("test_a_line_names_the_caller")


def test_a_configuration_counts_as_for_any_logger(name: str, caplog: pytest.LogCaptureFixture):
    log = logger_of(name)
    root = logging.getLogger().handlers[:]
    logging.config.dictConfig({"version": 1, "disable_existing_loggers": False, "loggers": {name: {"level": "ERROR"}}})
    log.warning("not this one")
    logging.config.dictConfig({"version": 1, "incremental": True, "loggers": {name: {"level": "INFO"}}})
    log.info("but this one")
    assert caplog.messages == ["but this one"]
    assert logging.getLogger().handlers == root


def test_every_module_logs_with_a_guarded_logger():
    for file in sorted(PACKAGE.rglob("*.py")):
        if str(file.relative_to(PACKAGE)) in CONFIGURES:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "logging":
                is_call_of_log = node.attr in {"getLogger", "debug", "info", "warning", "error", "exception", "log"}
                assert not is_call_of_log, f"{file}:{node.lineno}: use log = logger_of(__name__)"
            if isinstance(node, ast.ImportFrom):
                assert node.module != "logging", f"{file}:{node.lineno}: import logging"
