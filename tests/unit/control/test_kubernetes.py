"""The client of the Kubernetes API: what it takes for an answer, and what not."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.kubernetes import KubernetesApi

from kvferry.errors import OrchestratorError
from kvferry.protocol.wire.field_types import PodIdentity

POD = PodIdentity(uid="u-1", name="prefill-0", namespace="serving")


@pytest.fixture
def api() -> Iterator[KubernetesApi]:
    with KubernetesApi() as api:
        yield api


def test_pods_and_nodes_are_read(api: KubernetesApi, tmp_path: Path):
    api.run("prefill-0", uid="u-1")
    client = api.client(tmp_path / "token")
    found = client.pod(POD)
    assert found is not None
    assert (found.metadata.uid, found.spec.node_name, found.status.phase) == ("u-1", "node-a", "Running")
    node = client.node("node-a")
    assert node is not None
    assert node.is_ready
    assert api.asked == ["/api/v1/namespaces/serving/pods/prefill-0", "/api/v1/nodes/node-a"]
    client.close()


def test_what_is_not_there_is_not_there_by_the_apis_own_word_alone(api: KubernetesApi, tmp_path: Path):
    """A proxy that has no such path answers 404, too."""
    client = api.client(tmp_path / "token")
    assert client.pod(POD) is None
    assert client.node("node-a") is None
    for body in (b"404 page not found", b'{"kind":"Status","reason":"NotFound","details":{"name":"x","kind":"pods"}}'):
        api.refusal = 404, body
        with pytest.raises(OrchestratorError, match=r"KVFERRY_KUBERNETES_URL|status 404"):
            client.pod(POD)
    client.close()


def test_a_token_that_has_changed_is_read_again(api: KubernetesApi, tmp_path: Path):
    client = api.client(tmp_path / "token")
    assert client.pod(POD) is None
    api.token = "the next"
    with pytest.raises(OrchestratorError, match=r"401.*docs/kubernetes.md"):
        client.pod(POD)
    (tmp_path / "token").write_text("the next\n")
    assert client.pod(POD) is None
    client.close()


@pytest.mark.parametrize(
    "content", [b"SECRET one\nSECRET two\n", b"SECRET\x00", "SECRETé".encode(), b"SECRET\xff", b""]
)
def test_what_is_no_token_is_not_quoted(api: KubernetesApi, tmp_path: Path, content: bytes):
    client = api.client(tmp_path / "token")
    (tmp_path / "token").write_bytes(content)
    with pytest.raises(OrchestratorError, match="KVFERRY_KUBERNETES_TOKEN_FILE") as refusal:
        client.pod(POD)
    assert "SECRET" not in str(refusal.value)
    assert not api.asked
    client.close()


def test_names_from_peers_stay_within_the_path(api: KubernetesApi, tmp_path: Path):
    client = api.client(tmp_path / "token")
    with pytest.raises(OrchestratorError):
        client.pod(PodIdentity(uid="u", name="../../secrets/x", namespace="a b"))
    assert api.asked == ["/api/v1/namespaces/a%20b/pods/..%2F..%2Fsecrets%2Fx"]
    client.close()


def test_one_that_cannot_be_asked_is_named(tmp_path: Path):
    with KubernetesApi() as api:
        client = api.client(tmp_path / "token")
    with pytest.raises(OrchestratorError, match="KVFERRY_KUBERNETES_URL"):
        client.pod(POD)
    (tmp_path / "token").unlink()
    with pytest.raises(OrchestratorError, match="KVFERRY_KUBERNETES_TOKEN_FILE"):
        client.pod(POD)
    client.close()
    with pytest.raises(OrchestratorError):
        client.pod(POD)


def test_one_that_never_answers_is_given_up(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as silent, KubernetesApi() as api:
        client = api.client(tmp_path / "token", timeout_s=0.05)
        client.url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(OrchestratorError, match="Timeout"):
            client.pod(POD)
        client.close()
