"""Whose word counts in Kubernetes: which pod a process is, and whether it has ended.

Which pod: and which start of a container, since a container may end and start again in the same pod, which goes on.
What tells its starts apart is a line in its termination message: the kubelet reads that file when the container has
terminated, and no start sees another's.

Whether it has ended: by the part of the Kubernetes API that can prove that, one pod, one node, read-only. Whoever asks
waits: not for an endpoint's thread.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import ssl
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

import msgspec
from pydantic import Field, model_validator

from kvferry.control.credentials import bearing
from kvferry.control.http_connections import HttpConnections
from kvferry.errors import OrchestratorError, SettingsError, quoted
from kvferry.protocol.links.proofs import NodeObject, PodObject
from kvferry.protocol.wire.field_types import PodIdentity
from kvferry.settings import OwnSettings, Settings

_BEGIN = "kvferry container "
_LARGEST_MESSAGE = 4096
"""What the kubelet reads of a termination message, from its end."""


class PodSettings(OwnSettings):
    """Which pod this is, as Kubernetes tells its containers."""

    pod_uid: str | None = Field(
        None, min_length=1, max_length=256, description="UID of the pod that this process runs in (downward API)."
    )
    pod_name: str | None = Field(None, min_length=1, max_length=256, description="Its name (downward API).")
    pod_namespace: str | None = Field(None, min_length=1, max_length=256, description="Its namespace (downward API).")
    pod_termination_log: Path | None = Field(
        None,
        description="The container's termination message file, usually /dev/termination-log: a line is added there, by "
        "which the Kubernetes API tells one start of the container from the next.",
    )

    @model_validator(mode="after")
    def _check(self) -> PodSettings:
        given = {name for name in ("pod_uid", "pod_name", "pod_namespace") if getattr(self, name) is not None}
        if len(given) in (1, 2):
            raise ValueError(
                "pod_uid (KVFERRY_POD_UID), pod_name (KVFERRY_POD_NAME) and pod_namespace (KVFERRY_POD_NAMESPACE) "
                f"belong together: of them only {', '.join(sorted(given))} is set"
            )
        return self


def pod_of(settings: Settings) -> PodIdentity | None:
    """Returns the pod that the settings name; None if they name none.

    Raises:
        SettingsError: if the termination message file cannot be used.
    """
    own = settings.of(PodSettings)
    if own.pod_uid is None or own.pod_name is None or own.pod_namespace is None:
        return None
    container = _container(own.pod_termination_log) if own.pod_termination_log is not None else ""
    return PodIdentity(own.pod_uid, own.pod_name, own.pod_namespace, container)


def _container(file: Path) -> str:
    """Returns the word for this start of the container: the one in the file, or a new one, which is put there."""
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        with os.fdopen(descriptor, "r+", errors="replace") as opened:
            fcntl.flock(opened, fcntl.LOCK_EX)  # ranks of one container start at once
            message = opened.read()
            for line in message[-_LARGEST_MESSAGE:].splitlines():
                if line.startswith(_BEGIN) and len(line) > len(_BEGIN):
                    return line.removeprefix(_BEGIN)
            word = secrets.token_hex(16)
            begins_a_line = not message or message.endswith("\n")
            opened.write(("" if begins_a_line else "\n") + f"{_BEGIN}{word}\n")
            return word
    except OSError as error:
        raise SettingsError(
            f"pod_termination_log (KVFERRY_POD_TERMINATION_LOG) = {str(file)!r} cannot be used: {error.strerror}"
        ) from error


ObjectT = TypeVar("ObjectT")

_LARGEST_ANSWER_BYTES = 16 * 1024 * 1024
_TOKEN = re.compile("[!-~]+( [!-~]+)*")


class KubernetesSettings(OwnSettings):
    """Where the Kubernetes API is, and how it lets us in: the defaults are those of every pod."""

    kubernetes_url: str = Field(
        "https://kubernetes.default.svc",
        pattern=r"^https?://[!-~]+$",
        description="The Kubernetes API, where end_proofs has kubernetes.",
    )
    kubernetes_token_file: Path = Field(
        Path("/var/run/secrets/kubernetes.io/serviceaccount/token"),
        description="The service account's token; read again for every request, since it changes.",
    )
    kubernetes_ca_file: Path = Field(
        Path("/var/run/secrets/kubernetes.io/serviceaccount/ca.crt"),
        description="Certificates (PEM) that vouch for the Kubernetes API.",
    )


class _Details(msgspec.Struct, frozen=True):
    name: str = ""
    kind: str = ""


class _Status(msgspec.Struct, frozen=True):
    """What the API answers where it does not give an object."""

    kind: str
    reason: str = ""
    message: str = ""
    details: _Details | None = None


# Made here, in one thread: msgspec 0.22 crashes the process where two threads are the first to decode a type.
_POD = msgspec.json.Decoder(PodObject)
_NODE = msgspec.json.Decoder(NodeObject)
_STATUS = msgspec.json.Decoder(_Status)


class Orchestrator(ABC):
    """What knows which pods and nodes there are. May be asked from several threads at once."""

    @abstractmethod
    def pod(self, pod: PodIdentity) -> PodObject | None:
        """Returns the object of a pod's name, whichever pod that is now; None if there is none.

        Raises:
            OrchestratorError: if it cannot be asked, or does not say.
        """

    @abstractmethod
    def node(self, name: str) -> NodeObject | None:
        """Returns a node; None if there is none of that name.

        Raises:
            OrchestratorError: if it cannot be asked, or does not say.
        """

    @abstractmethod
    def close(self) -> None:
        """Closes connections: what is being asked fails. May be called again."""


class KubernetesClient(Orchestrator):
    """A client of the Kubernetes API, with a service account's token.

    Args:
        url: the API's address.
        token_file: the token; read for every request, since it changes.
        ca_file: certificates that vouch for the API; not read where the url is http.
        timeout_s: how long each step of a request may take.
    """

    def __init__(self, url: str, *, token_file: Path, ca_file: Path, timeout_s: float = 5.0) -> None:
        self.url = url.rstrip("/")
        self._token_file = token_file
        self._ca_file = ca_file
        self._connections = HttpConnections(
            "the client of the Kubernetes API", timeout_s, self._verify, closed=OrchestratorError
        )

    def pod(self, pod: PodIdentity) -> PodObject | None:
        path = f"/api/v1/namespaces/{quote(pod.namespace, safe='')}/pods/{quote(pod.name, safe='')}"
        return self._object(path, "pods", pod.name, _POD)

    def node(self, name: str) -> NodeObject | None:
        return self._object(f"/api/v1/nodes/{quote(name, safe='')}", "nodes", name, _NODE)

    def close(self) -> None:
        self._connections.close()

    def _object(self, path: str, kind: str, name: str, decoder: msgspec.json.Decoder[ObjectT]) -> ObjectT | None:
        status, body = self._get(path)
        try:
            if status == 200:
                return decoder.decode(body)
            said = _STATUS.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise OrchestratorError(
                f"what answers at {self.url}{path} is not the Kubernetes API (status {status}, {quoted(error)}): "
                "check KVFERRY_KUBERNETES_URL"
            ) from error
        details = said.details or _Details()
        # A proxy's 404 must not count: only the API's own word that it has no such object.
        is_its_word = said.kind == "Status" and (details.kind, details.name) == (kind, name)
        if status == 404 and said.reason == "NotFound" and is_its_word:
            return None
        remedy = ""
        if status in (401, 403):
            remedy = ": the service account needs `get` on pods and nodes (docs/kubernetes.md)"
        raise OrchestratorError(
            f"the Kubernetes API at {self.url}{path} answers with status {status}, "
            f"{said.reason[:100]} {said.message[:300]}{remedy}"
        )

    def _get(self, path: str) -> tuple[int, bytes]:
        import httpx

        try:
            token = self._token_file.read_text("latin-1").strip()
            if _TOKEN.fullmatch(token) is None:  # an error about a header would quote it
                raise OrchestratorError(
                    f"the service account's token {self._token_file} (KVFERRY_KUBERNETES_TOKEN_FILE) holds no token: "
                    "one line of visible ASCII"
                )
            answer = self._connections.ask(self.url + path, most_bytes=_LARGEST_ANSWER_BYTES, headers=bearing(token))
            return answer.status, answer.body
        except OSError as error:
            raise OrchestratorError(
                f"the service account's token {self._token_file} (KVFERRY_KUBERNETES_TOKEN_FILE) cannot be read: "
                f"{error.strerror or error}"
            ) from error
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            raise OrchestratorError(
                f"the Kubernetes API at {self.url} (KVFERRY_KUBERNETES_URL) cannot be asked: {type(error).__name__}: "
                f"{quoted(error)}"
            ) from error

    def _verify(self) -> ssl.SSLContext | bool:
        if not self.url.lower().startswith("https:"):
            return False
        try:
            return ssl.create_default_context(cafile=str(self._ca_file))
        except (OSError, ValueError) as error:
            raise OrchestratorError(
                f"the certificates in {self._ca_file} (KVFERRY_KUBERNETES_CA_FILE) cannot be used: {error}"
            ) from error


def create_kubernetes_client(settings: Settings) -> KubernetesClient:
    """Makes the client that the settings ask for. It connects when it is first used."""
    own = settings.of(KubernetesSettings)
    return KubernetesClient(own.kubernetes_url, token_file=own.kubernetes_token_file, ca_file=own.kubernetes_ca_file)
