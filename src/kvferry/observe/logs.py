"""Lines for logs: rare enough to be read, and with what a reader needs to find the rest."""

from __future__ import annotations

import json
import logging
import threading
import time
from datetime import datetime, timezone

from kvferry.loggers import logger_of
from kvferry.observe.records import Observer, Outcome, ReceiverStats, SenderStats, outcome_of

log = logger_of(__name__)

_FIELDS = ("room", "peer", "side", "state")


def clock_time(age_s: float) -> str:
    """Formats the time so many seconds ago: UTC, to the second."""
    moment = datetime.fromtimestamp(time.time() - age_s, timezone.utc)
    return moment.strftime("%Y-%m-%d %H:%M:%SZ")


def report_silence(who: str, endpoint: str, silence_s: float) -> None:
    """Logs that a peer has fallen silent.

    Args:
        who: the peer, as it stands in the line.
    """
    log.warning(
        "%s has been silent for %.1f s, since %s: is it stopped, overloaded or cut off? Its rooms fail after a "
        "silence of KVFERRY_PEER_TIMEOUT_S",
        who,
        silence_s,
        clock_time(silence_s),
        extra={"peer": endpoint},
    )


class Limited:
    """Writes no more than so many lines of a kind in a period, and later the number of those that were left out."""

    def __init__(self, log: logging.Logger, *, most: int = 20, period_s: float = 10.0) -> None:
        # Guards the counts: failures are logged from any thread.
        self._lock = threading.Lock()
        self._log = log
        self._most = most
        self._period_s = period_s
        self._began_at = float("-inf")
        self._written = 0
        self._left_out = 0

    def error(self, now: float, message: str, *arguments: object, **fields: object) -> None:
        """Writes a line at error level, unless there were too many.

        Args:
            now: the time, in seconds of a steady clock.
            fields: what the line is about, for `JsonLines`: room, peer, side, state.
        """
        with self._lock:
            left_out = 0
            if now - self._began_at >= self._period_s:
                left_out, self._left_out = self._left_out, 0
                self._began_at, self._written = now, 0
            self._written += 1
            is_written = self._written <= self._most
            self._left_out += not is_written
        if left_out:
            self._log.error("%d more such lines were left out before this one", left_out)
        if is_written:
            self._log.error(message, *arguments, extra=fields)


class FailureLog(Observer):
    """Writes a line for every transfer that fails, with the cause; one that a caller aborted is no failure."""

    def __init__(self, who: str) -> None:
        """Takes the name that every line has.

        Args:
            who: the endpoint, as it stands in the line.
        """
        self._who = who
        self._limited = Limited(log)

    def sent(self, room: int, stats: SenderStats, error: Exception | None) -> None:
        self._ended(room, stats.opened_at, stats.ended_at, error, "prefill")

    def received(self, room: int, stats: ReceiverStats, error: Exception | None) -> None:
        self._ended(room, stats.opened_at, stats.ended_at, error, "decode")

    def _ended(self, room: int, opened_at: float, ended_at: float | None, error: Exception | None, side: str) -> None:
        if error is None or ended_at is None:
            return
        about = {"room": room, "side": side}
        if outcome_of(error) is Outcome.ABORTED:
            log.info("room %d on %s was given up: %s", room, self._who, error, extra=about)
            return
        self._limited.error(
            ended_at,
            "room %d failed on %s %.1f s after it was opened: %s: %s",
            room,
            self._who,
            ended_at - opened_at,
            type(error).__name__,
            error,
            **about,
        )


class JsonLines(logging.Formatter):
    """Formats lines as JSON objects: time, level, logger, message, and the fields that the line is about, if any."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: getattr(record, name) for name in _FIELDS if hasattr(record, name)}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
