"""What endpoints log of errors that they did not expect: none, but for those that code of a caller's raises."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

OF_A_CALLER = "this is of a caller's code"


def is_of_a_caller(error: BaseException | str | None) -> bool:
    """Whether a caller's code has raised it, or a text quotes what it has raised."""
    return error is not None and OF_A_CALLER in str(error)


class Raised(logging.Handler):
    """Notes what the endpoints log of errors that they did not expect."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and not is_of_a_caller(record.exc_info[1]):
            self.found.append(f"{record.getMessage()}: {self.format(record)}")


@contextmanager
def listening() -> Iterator[Raised]:
    """Hears what is logged by kvferry, and lets nobody else hear it."""
    logger, handler = logging.getLogger("kvferry"), Raised()
    propagated, level = logger.propagate, logger.level
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(logging.ERROR)
    try:
        yield handler
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagated
        logger.setLevel(level)
