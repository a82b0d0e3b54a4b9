"""`kvferry registry`, as an operator runs it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys

from tests.support.commands import kvferry
from tests.support.waiting import PATIENCE_S

from kvferry.control.registry_client import RegistryClient
from kvferry.control.registry_server import RegistryServer


def test_the_registry_says_where_it_answers_and_stops_on_request():
    command = [sys.executable, "-m", "kvferry", "registry", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = re.search(r"http://127\.0\.0\.1:\d+", process.stdout.readline())
        assert said is not None
        with RegistryClient(said[0]) as client:
            assert client.engines() == ()
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0


def test_a_port_that_is_taken_is_one_clear_sentence():
    with RegistryServer(port=0) as first:
        port = first.url.rpartition(":")[2]
        second = kvferry("registry", "--port", port)
    assert second.returncode == 2
    assert port in second.stderr
    assert "KVFERRY_REGISTRY_PORT" in second.stderr
    assert "Traceback" not in second.stderr
