"""A small HTTP server that speaks the part of the Kubernetes API that kvferry uses."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from kvferry.control.kubernetes import KubernetesClient


class KubernetesApi:
    """Serves pods and nodes on a port of its own.

    Attributes:
        pods: by namespace and name, as JSON objects.
        nodes: by name.
        asked: the paths of all requests.
        token: the one that requests must carry; tests may change it.
        refusal: status and body of every answer, if given.
    """

    def __init__(self) -> None:
        self.pods: dict[tuple[str, str], dict[str, Any]] = {}
        self.nodes: dict[str, dict[str, Any]] = {}
        self.asked: list[str] = []
        self.token = "a token"
        self.refusal: tuple[int, bytes] | None = None
        api = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                api.asked.append(self.path)
                status, body = api.answer(self.path, self.headers.get("authorization", ""))
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def answer(self, path: str, authorization: str) -> tuple[int, bytes]:
        """Returns status and body for a path."""
        if self.refusal is not None:
            return self.refusal
        if authorization != f"Bearer {self.token}":
            return 401, _status(401, "Unauthorized", "", "")
        match path.split("/")[1:]:
            case ["api", "v1", "namespaces", namespace, "pods", name]:
                found, kind = self.pods.get((namespace, name)), "pods"
            case ["api", "v1", "nodes", name]:
                found, kind = self.nodes.get(name), "nodes"
            case _:
                return 403, _status(403, "Forbidden", "", "")
        return (404, _status(404, "NotFound", kind, name)) if found is None else (200, json.dumps(found).encode())

    def run(self, name: str, *, uid: str, node: str = "node-a", namespace: str = "serving") -> None:
        """Runs a pod with one container on a node that is well."""
        self.pods[namespace, name] = {
            "kind": "Pod",
            "metadata": {"name": name, "uid": uid, "namespace": namespace},
            "spec": {"nodeName": node, "containers": [{"name": "engine"}]},
            "status": {
                "phase": "Running",
                "containerStatuses": [{"name": "engine", "state": {"running": {}}, "lastState": {}}],
            },
        }
        self.nodes[node] = {
            "kind": "Node",
            "metadata": {"name": node, "uid": f"uid of {node}"},
            "spec": {},
            "status": {"conditions": [{"type": "Ready", "status": "True"}]},
        }

    def end(self, name: str, *, namespace: str = "serving") -> None:
        """Lets the kubelet report that the pod's container has terminated for good."""
        ended = {"name": "engine", "state": {"terminated": {"exitCode": 137, "reason": "Error"}}, "lastState": {}}
        self.pods[namespace, name]["status"] = {"phase": "Failed", "containerStatuses": [ended]}

    def restart(self, name: str, message: str, *, namespace: str = "serving") -> None:
        """Lets the kubelet report that the pod's container has terminated with a message, and runs again."""
        last = {"terminated": {"exitCode": 137, "reason": "Error", "message": message}}
        running = {"name": "engine", "state": {"running": {}}, "lastState": last}
        self.pods[namespace, name]["status"] = {"phase": "Running", "containerStatuses": [running]}

    def client(self, token_file: Path, timeout_s: float = 5.0) -> KubernetesClient:
        """Makes a client with the right token."""
        token_file.write_text(self.token)
        return KubernetesClient(self.url, token_file=token_file, ca_file=token_file, timeout_s=timeout_s)

    def __enter__(self) -> KubernetesApi:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _status(code: int, reason: str, kind: str, name: str) -> bytes:
    said = {"kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": f"{reason}: {name}"}
    return json.dumps({**said, "details": {"kind": kind, "name": name}}).encode()
