"""`kvferry up` as tests run it, with a real engine's servers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import psutil
from tests.real_engines.alone import check_alone
from tests.real_engines.another_prompt import refuse_another_prompt

from kvferry.applications.up.dialects import Dialect
from kvferry.applications.up.servers import Server
from kvferry.applications.up.supervision import free_ports
from kvferry.control.registry_client import RegistryClient

READY_S = 400.0
STOPS_S = 120.0


class Deployment:
    """The command.

    Attributes:
        port: the front's.
        process: the command's.
        said: what it printed until it was ready.
    """

    def __init__(
        self, model: Path, logs: Path, options: Sequence[str], engine_options: Sequence[str], **environment: str
    ) -> None:
        """Waits until it is ready.

        Args:
            options: of kvferry up.
            engine_options: of all servers.
            environment: variables that all have.
        """
        check_alone()
        (self.port,) = free_ports(1)
        command = [sys.executable, "-m", "kvferry", "up", "--model", str(model), "--port", str(self.port)]
        command += ["--logs", str(logs), "--timeout-s", str(READY_S), *options, "--", *engine_options]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **environment}
        )
        self.model, self.logs = str(model), logs
        assert self.process.stdout is not None
        self.said: list[str] = []
        for line in self.process.stdout:
            self.said.append(line)
            if line.startswith("Ready"):
                return
        raise AssertionError("".join(self.said))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def post(self, url: str = "", path: str = "/v1/completions", **body: Any) -> httpx.Response:
        """Asks the front, or a server by its address."""
        return httpx.post(f"{url or self.url}{path}", json={"model": self.model, **body}, timeout=60)

    def ask(self, prompt: str) -> httpx.Response:
        return self.post(prompt=prompt, max_tokens=4, temperature=0)

    def events(self, **body: Any) -> list[dict[str, Any]]:
        """What curl is sent of a stream, which must come to its end."""
        command = ["curl", "--silent", "--no-buffer", f"{self.url}/v1/completions", "-H"]
        command += ["Content-Type: application/json", "-d"]
        command.append(
            httpx.Request("POST", self.url, json={"model": self.model, "stream": True, **body}).read().decode()
        )
        said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
        found = [line.removeprefix("data: ") for line in said.splitlines() if line.startswith("data: ")]
        assert found[-1:] == ["[DONE]"], said
        return [httpx.Response(200, text=each).json() for each in found[:-1]]

    def health(self) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{self.url}/health", timeout=10).json()
        return found

    def server(self, name: str) -> dict[str, Any]:
        """What `/health` says of a server."""
        health = self.health()
        return next(each for side in ("prefill", "decode") for each in health[side] if each["engine"] == name)

    def pid_of(self, name: str) -> int:
        """Of a server's own process, not of those beside it that end all of it."""
        port = self.server(name)["url"].rpartition(":")[2]
        for each in psutil.Process(self.process.pid).children(recursive=True):
            line = each.cmdline()
            if "kvferry.applications.up.together" not in line and ("--port", port) in pairwise(line):
                return each.pid
        raise AssertionError(f"{name} does not run")

    def refuse_another_prompt(
        self, dialect: Dialect, bootstrap_port: int = 0, urls: tuple[str, str] | None = None
    ) -> None:
        """The negative control, of the first prefill and the first decode server, which nobody else asks meanwhile.

        Args:
            urls: theirs, if the front is not ours, which would say.
        """
        prefill, decode = urls or (self.server(name)["url"] for name in ("prefill-0", "decode-0"))

        def ask(url: str, body: dict[str, Any]) -> tuple[bool, str]:
            answer = self.post(url, **body)
            return answer.is_success, answer.text

        logged = (self.logs / "decode-0.log").read_text
        server = Server(prefill, "prefill-0", bootstrap_port)
        refuse_another_prompt(dialect, server, partial(ask, prefill), partial(ask, decode), logged)

    def kill_and_compare(self, name: str, prompt: str, expected: str) -> None:
        """Kills a server and asks on: at most one request is tried again, and the server comes back."""
        before = self.health()["retries"]
        killed = self.pid_of(name)
        os.kill(killed, signal.SIGKILL)
        for _ in range(6):
            answer = self.ask(prompt)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"] == expected
        assert self.health()["retries"] - before <= 1
        deadline = time.monotonic() + READY_S
        while not self.server(name)["is_healthy"]:
            assert time.monotonic() < deadline, "it did not come back"
            time.sleep(0.5)
        assert self.pid_of(name) != killed
        for _ in range(4):
            assert self.ask(prompt).json()["choices"][0]["text"] == expected

    @contextmanager
    def terminated(self, name: str) -> Iterator[psutil.Process]:
        """Tells a server to end, as a pod's end does, which has ended and come back by the end of the block."""
        process = psutil.Process(self.pid_of(name))
        process.send_signal(signal.SIGTERM)
        yield process
        process.wait(STOPS_S)
        deadline = time.monotonic() + READY_S
        while not self.server(name)["is_healthy"]:
            assert time.monotonic() < deadline, "it did not come back"
            time.sleep(0.5)

    def registry_of(self, name: str) -> RegistryClient:
        """A client of the registry at which a server's ranks are."""
        process = psutil.Process(self.pid_of(name))
        line = process.cmdline()
        if "--kv-transfer-config" in line:
            transfer = json.loads(line[line.index("--kv-transfer-config") + 1])
            return RegistryClient(transfer["kv_connector_extra_config"]["registry_url"])
        return RegistryClient(f"http://127.0.0.1:{process.environ()['KVFERRY_REGISTRY_PORT']}")

    def interrupt(self) -> None:
        """Ends it as Ctrl-C does: nothing of it is left."""
        everybody = psutil.Process(self.process.pid).children(recursive=True)
        assert len(everybody) >= 6
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(STOPS_S) == 0
        _, alive = psutil.wait_procs(everybody, timeout=10)
        assert not alive

    def close(self) -> None:
        """Ends it, if it has not ended."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(STOPS_S)


@contextmanager
def deployed(
    model: Path,
    logs: Path,
    options: Sequence[str],
    engine_options: Sequence[str],
    environment: Mapping[str, str],
) -> Iterator[Deployment]:
    """A deployment for as long as it is needed."""
    deployment = Deployment(model, logs, options, engine_options, **environment)
    try:
        yield deployment
    finally:
        deployment.close()
