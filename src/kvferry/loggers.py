"""The loggers of this library: those of `logging`, but that what handlers and filters raise stays with them.

Lines are logged between two steps of a state change, and by threads on which every deadline rests. An application's
handler that raises there must lose its line, and nothing else. So each module has `log = logger_of(__name__)`.
"""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from contextlib import suppress
from typing import Any


class GuardedLogger(logging.Logger):
    """A logger that lets out nothing that filters, handlers or the application's record factory raise.

    As `logging` itself does with what a handler meets while it writes, it shows the error at sys.stderr, once, unless
    `logging.raiseExceptions` is False. On the main thread it lets out what is no Exception: that is most likely meant
    for the application, as Ctrl-C is.
    """

    _has_shown_an_error = False  # no __init__ runs where a logger becomes one

    def handle(self, record: logging.LogRecord) -> None:
        try:
            super().handle(record)
        except BaseException as error:
            self._take(error)

    def makeRecord(self, *args: Any, **named: Any) -> logging.LogRecord:  # noqa: N802 - the name that logging calls
        try:
            return super().makeRecord(*args, **named)
        except BaseException as error:
            self._take(error)
            name, level, path, line, message, arguments, exc_info = args[:7]
            return logging.LogRecord(name, level, path, line, message, arguments, exc_info)

    def _take(self, error: BaseException) -> None:
        is_ours = isinstance(error, Exception) or threading.current_thread() is not threading.main_thread()
        if not is_ours:
            raise error
        if not logging.raiseExceptions or self._has_shown_an_error:
            return
        self._has_shown_an_error = True
        with suppress(BaseException):  # there may be no stderr, and the error may not be one that can be shown
            shown = "".join(traceback.format_exception(type(error), error, error.__traceback__))
            sys.stderr.write(f"--- a log handler or filter of {self.name} raised; its next errors are not shown ---\n")
            sys.stderr.write(shown)


def logger_of(name: str) -> logging.Logger:
    """Returns the logger of that name, as `logging.getLogger` does, guarded against what its handlers raise.

    One that the application has made or configured before is the same object, and stays what it is otherwise.
    """
    logger = logging.getLogger(name)
    kind = type(logger)
    if not issubclass(kind, GuardedLogger):
        is_plain = kind is logging.Logger
        logger.__class__ = GuardedLogger if is_plain else type(kind.__name__, (GuardedLogger, kind), {})
    return logger
