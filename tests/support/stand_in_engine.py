"""An engine's server as gateways see it, without a model: one rank that moves a cache for every request.

    python -m tests.support.stand_in_engine prefill|decode NAME RANK

It listens as vLLM's does in a pod, at KVFERRY_HOST and port 8000 plus the rank, and reads `kv_transfer_params`. All
settings of its endpoint come from the environment, and how many ranks there are. A decode server checks all that has
arrived. SIGTERM ends it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import FrameType
from typing import Any

import numpy as np
from tests.support.caches import Model, Shape, pool
from tests.support.waiting import PATIENCE_S

from kvferry import DecodeEndpoint, PrefillEndpoint, RankCoordinates, Settings
from kvferry.testing import KnownContents

PORT = 8000
PAGES = np.arange(4)
CONTENTS = KnownContents(1)
ARRIVED = "every byte"


class _Ended(Exception):  # noqa: N818 - it is no error
    pass


def _raise(_: int, __: FrameType | None) -> None:
    raise _Ended


def main() -> None:
    """Serves until SIGTERM."""
    signal.signal(signal.SIGTERM, _raise)
    side, name, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
    ranks = int(os.environ["TENSOR_PARALLEL"])
    coordinates = RankCoordinates(tp_size=ranks, tp_rank=rank)
    its_pool = pool(Model(), Shape(tp=ranks), coordinates)
    if side == "prefill":
        its_pool.fill(CONTENTS, PAGES)
        endpoint: Any = PrefillEndpoint(its_pool.layout, engine=name, coordinates=coordinates)
    else:
        endpoint = DecodeEndpoint(its_pool.layout, engine=name, coordinates=coordinates)
    one_at_a_time = threading.Lock()

    def answer(parameters: dict[str, Any]) -> str:
        room = parameters["kvferry_room"]
        if side == "prefill":
            sender = endpoint.open(room)
            sender.submit(PAGES, last=True)
            sender.wait(PATIENCE_S)
            return ""
        with one_at_a_time:
            endpoint.open(room, PAGES, engine=parameters["remote_engine_id"]).wait(PATIENCE_S)
            its_pool.check(CONTENTS, PAGES)
            return ARRIVED

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._say(200 if self.path == "/health" else 404, {})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            self._say(200, {"choices": [{"index": 0, "text": answer(body["kv_transfer_params"])}]})

        def _say(self, status: int, said: dict[str, Any]) -> None:
            encoded = json.dumps(said).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(encoded)))
            self.end_headers()
            self.wfile.write(encoded)

        def log_message(self, *arguments: Any) -> None:
            pass

    with endpoint, ThreadingHTTPServer((Settings().host, PORT + rank), Handler) as server:
        try:
            server.serve_forever()
        except _Ended:
            return


if __name__ == "__main__":
    main()
