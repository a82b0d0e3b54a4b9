"""`kvferry registry`, as an operator runs it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys

from tests.support.waiting import PATIENCE_S

from kvferry.control.registry_client import RegistryClient


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
    command = [sys.executable, "-m", "kvferry", "registry", "--port"]
    with subprocess.Popen([*command, "0"], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        said = re.search(r":(\d+)", first.stdout.readline().removeprefix("The registry answers at http:"))
        assert said is not None
        second = subprocess.run([*command, said[1]], capture_output=True, text=True, check=False)
        first.terminate()
    assert second.returncode == 2
    assert said[1] in second.stderr
    assert "KVFERRY_REGISTRY_PORT" in second.stderr
    assert "Traceback" not in second.stderr
