"""Lines for logs."""

from __future__ import annotations

import json
import logging

import pytest

from kvferry.observe.logs import JsonLines, Limited

log = logging.getLogger("kvferry.tests")


def test_too_many_lines_are_left_out_and_counted(caplog: pytest.LogCaptureFixture):
    limited = Limited(log, most=3, period_s=10.0)
    for number in range(8):
        limited.error(float(number), "room %d failed", number)
    assert [record.getMessage() for record in caplog.records] == [f"room {number} failed" for number in range(3)]
    caplog.clear()
    limited.error(10.0, "room %d failed", 8)
    assert [record.getMessage() for record in caplog.records] == [
        "5 more such lines were left out before this one",
        "room 8 failed",
    ]


def test_a_line_says_what_it_is_about(caplog: pytest.LogCaptureFixture):
    Limited(log).error(0.0, "room %d failed", 7, room=7, side="prefill")
    line = json.loads(JsonLines().format(caplog.records[0]))
    assert (line["message"], line["room"], line["side"], line["level"]) == ("room 7 failed", 7, "prefill", "error")
    assert line["logger"] == "kvferry.tests"
    assert "peer" not in line


def test_a_message_of_several_lines_stays_one_line(caplog: pytest.LogCaptureFixture):
    log.error("one\ntwo")
    assert "\n" not in JsonLines().format(caplog.records[0])
