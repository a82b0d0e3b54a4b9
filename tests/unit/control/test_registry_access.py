"""A registry that answers only to those who know its secret, and TLS: over real sockets."""

from __future__ import annotations

import logging
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest
import trustme
from tests.support.http import http_answer
from tests.support.registries import counted_registrations
from tests.support.resources import only_descriptors
from tests.support.waiting import PATIENCE_S, eventually

from kvferry.control.construction import create_registry, create_registry_client
from kvferry.control.credentials import Credentials, ServerCertificate
from kvferry.control.registry_app import registry_app
from kvferry.control.registry_client import RegistryClient
from kvferry.control.registry_server import RegistryServer
from kvferry.control.renewals import LeaseKeeper, Renewals
from kvferry.errors import RegistryAccessError, RegistryUnreachableError, SettingsError
from kvferry.layout import RankCoordinates
from kvferry.protocol.wire.registrations import RankRegistration
from kvferry.settings import Settings

SECRET = "the secret of these tests"
TOKEN = Credentials.derived_from(SECRET).registry_token
OTHER = Credentials.derived_from("another secret than that").registry_token
RANK = RankRegistration(
    engine="prefill",
    incarnation="first",
    coordinates=RankCoordinates(),
    control_address="tcp://127.0.0.1:1",
    layout_digest="digest",
    started_at=0.0,
    protocol_version=1,
)
BODY = msgspec.json.encode(RANK)
PATH = "/v1/engines/prefill/ranks/0"

ASKED: list[Callable[[RegistryClient], Any]] = [
    lambda client: client.register(RANK),
    lambda client: client.remove("prefill", 0, "first"),
    lambda client: client.engine("prefill"),
    lambda client: client.engines(),
    lambda client: client.health(),
]


@pytest.fixture(scope="module")
def server() -> Iterator[RegistryServer]:
    with RegistryServer(port=0, token=TOKEN) as running:
        yield running


@pytest.fixture
def friend(server: RegistryServer) -> Iterator[RegistryClient]:
    with RegistryClient(server.url, token=TOKEN) as client:
        yield client


def test_who_knows_the_secret_gets_everything(friend: RegistryClient):
    answers = [ask(friend) for ask in ASKED]
    assert answers[:2] == [10.0, True]


@pytest.mark.parametrize("ask", ASKED)
@pytest.mark.parametrize(("token", "mine"), [(None, "this side knows none"), (OTHER, "this side knows another")])
def test_who_does_not_is_told_which_setting_to_look_at(
    server: RegistryServer, friend: RegistryClient, ask: Callable[[RegistryClient], Any], token: str | None, mine: str
):
    before = friend.engines()
    with RegistryClient(server.url, token=token) as stranger, pytest.raises(RegistryAccessError) as caught:
        ask(stranger)
    for words in (server.url, mine, "KVFERRY_SECRET_FILE"):
        assert words in str(caught.value)
    assert friend.engines() == before


WRONG = {
    "none": {},
    "another": {"Authorization": f"Bearer {OTHER}"},
    "cut": {"Authorization": f"Bearer {TOKEN[:-1]}"},
    "longer": {"Authorization": f"Bearer {TOKEN}x"},
    "empty": {"Authorization": "Bearer"},
    "of another kind": {"Authorization": f"Basic {TOKEN}"},
    "elsewhere": {"X-Authorization": f"Bearer {TOKEN}"},
    "odd": {"Authorization": b"Bearer \xff\xfe"},
}


@pytest.mark.parametrize("headers", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("PUT", PATH),
        ("DELETE", f"{PATH}?incarnation=first"),
        ("GET", "/v1/engines"),
        ("GET", "/v1/engines/prefill"),
        ("GET", "/health"),
        ("GET", "/nothing"),
        ("POST", PATH),
        ("GET", f"/v1/engines?token={TOKEN}"),
    ],
)
def test_every_route_is_closed_and_says_the_same(
    server: RegistryServer, friend: RegistryClient, headers: dict[str, Any], method: str, path: str
):
    friend.register(RANK)
    answer = httpx.request(method, server.url + path, headers=headers, content=BODY, trust_env=False)
    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
    assert set(answer.json()) == {"error", "message"}
    assert answer.json()["error"] == "RegistryAccessError"
    assert "prefill" not in answer.text
    assert friend.engine("prefill").registrations == (RANK,)


@pytest.mark.parametrize("headers", WRONG.values(), ids=WRONG)
def test_a_probe_knows_no_token_and_learns_nothing_but_that_the_registry_answers(
    server: RegistryServer, friend: RegistryClient, headers: dict[str, Any]
):
    friend.register(RANK)
    answer = httpx.get(f"{server.url}/livez", headers=headers, trust_env=False)
    assert (answer.status_code, answer.content) == (200, b"")
    for path in ("/livez/", "/livez/../v1/engines", "/livez%2fv1"):
        assert httpx.get(server.url + path, headers=headers, trust_env=False).status_code == 401
    assert httpx.post(f"{server.url}/livez", headers=headers, content=BODY, trust_env=False).status_code == 405


def test_two_tokens_are_none(server: RegistryServer):
    headers = [("Authorization", f"Bearer {TOKEN}"), ("Authorization", f"Bearer {OTHER}")]
    assert httpx.get(server.url + "/health", headers=headers, trust_env=False).status_code == 401


def test_a_stranger_is_refused_before_the_body_came(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(registry_app, "__kwdefaults__", {"body_timeout_s": 3600})
    with (
        RegistryServer(port=0, token=TOKEN) as server,
        socket.create_connection(server.address, PATIENCE_S) as connection,
    ):
        connection.sendall(f"PUT {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: 60000\r\n\r\n".encode())
        answer = b""
        while piece := connection.recv(65536):  # to the end: the connection is closed
            answer += piece
    assert answer.startswith(b"HTTP/1.1 401 ")


def test_a_rank_with_another_secret_is_never_registered(server: RegistryServer):
    problems: list[Exception] = []
    with RegistryClient(server.url, token=OTHER) as stranger:
        refused = counted_registrations(stranger)
        keeper = LeaseKeeper(
            stranger, RANK, problems.append, renewals=Renewals(shortest_retry_s=0.01, longest_retry_s=0.02)
        )
        with keeper:
            eventually("it was refused again and again", lambda: refused() >= 3)
            assert not keeper.registered.is_set()
            assert isinstance(keeper.last_error, RegistryAccessError)
        assert [type(problem) for problem in problems] == [RegistryAccessError], "said once, not at every try"


def test_no_token_in_any_log(caplog: pytest.LogCaptureFixture, server: RegistryServer):
    with caplog.at_level(logging.DEBUG), RegistryClient(server.url, token=TOKEN) as friend:
        friend.register(RANK)
        with RegistryClient(server.url, token=OTHER) as stranger, pytest.raises(RegistryAccessError) as caught:
            stranger.engines()
    assert caplog.text
    for token in (TOKEN, OTHER, SECRET):
        assert token not in caplog.text + repr(caught.value) + repr(friend.__dict__["_url"])


class TestSilentClients:
    def test_a_client_that_asks_nothing_is_sent_away(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr("kvferry.control.quiet_server._LONGEST_HEAD_S", 0.3)
        with RegistryServer(port=0) as server, RegistryClient(server.url) as client:
            for said in (b"", b"GET /hea", b"GET /health HTTP/1.1\r\nHost: x\r\n"):
                with socket.create_connection(server.address, PATIENCE_S) as connection:
                    connection.sendall(said)
                    assert ended(connection)
            assert client.engines() == ()

    def test_dripping_does_not_win_time(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr("kvferry.control.quiet_server._LONGEST_HEAD_S", 0.3)
        with RegistryServer(port=0) as server, socket.create_connection(server.address, PATIENCE_S) as connection:

            def is_sent_away() -> bool:
                try:
                    connection.sendall(b"G")
                except OSError:
                    return True
                return False

            eventually("it is sent away", is_sent_away)

    def test_a_second_request_has_no_more_time(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr("kvferry.control.quiet_server._LONGEST_HEAD_S", 0.3)
        with RegistryServer(port=0) as server, socket.create_connection(server.address, PATIENCE_S) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")
            time.sleep(0.6)  # a connection that is kept may be silent between requests
            connection.sendall(b"GET /hea")
            assert ended(connection)

    def test_of_too_many_the_oldest_goes_so_that_friends_get_in(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr("kvferry.control.quiet_server._MOST_SILENT", 4)
        with RegistryServer(port=0) as server, RegistryClient(server.url) as client:
            silent = [socket.create_connection(server.address, PATIENCE_S) for _ in range(12)]
            assert client.engines() == ()
            assert all(ended(connection) for connection in silent[:8])
            for connection in silent:
                connection.close()


class TestConnectionsThatStay:
    """Those that were answered, and go on being there."""

    def test_of_too_many_the_one_that_was_silent_longest_goes(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(RegistryServer, "most_connections", 8)
        with RegistryServer(port=0) as server:
            staying = [asked(server) for _ in range(7)]
            ask_by(staying[0])
            with RegistryClient(server.url) as first, RegistryClient(server.url) as second:
                assert first.register(RANK) == 10.0
                assert len(second.engines()) == 1
            assert ended(staying[1])
            for connection in (staying[0], *staying[2:]):
                assert is_open(connection)
                connection.close()

    def test_a_newcomer_is_served_while_strangers_keep_coming(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(RegistryServer, "most_connections", 24)
        process, held = psutil.Process(), []
        with RegistryServer(port=0) as server:
            before = process.num_fds()
            for number in range(100):
                held.append(asked(server) if number % 2 else socket.create_connection(server.address, PATIENCE_S))
                if number % 10 == 0:
                    with RegistryClient(server.url) as client:
                        assert client.register(RANK) == 10.0
            # each takes a descriptor at this end, too
            eventually("no more than may are kept", lambda: process.num_fds() <= before + len(held) + 24)
            for connection in held:
                connection.close()
            eventually("all are closed", lambda: process.num_fds() <= before)

    @pytest.mark.parametrize("path", ["/health", "/livez"])
    def test_who_does_not_know_the_secret_connects_anew_for_every_request(self, server: RegistryServer, path: str):
        with socket.create_connection(server.address, PATIENCE_S) as connection:
            ask_by(connection, path)
            assert ended(connection)
        with socket.create_connection(server.address, PATIENCE_S) as connection:
            ask_by(connection, path, token=TOKEN)
            assert is_open(connection)

    def test_the_connection_of_a_rank_lives_longer_than_others(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr("kvferry.control.quiet_server._KEEP_ALIVE_S", 0.2)
        with RegistryServer(port=0) as server, RegistryClient(server.url) as rank, asked(server) as stranger:
            assert rank.register(RANK) == 10.0
            assert ended(stranger)
            assert not rank.has_hung_up

    def test_without_a_file_left_connections_are_refused_and_wait_for_nothing(self, caplog: pytest.LogCaptureFixture):
        with RegistryServer(port=0) as server, RegistryClient(server.url) as client:
            assert client.engines() == ()
            strangers = [socket.socket() for _ in range(5)]
            with only_descriptors(0):
                for connection in strangers:
                    connection.connect(server.address)
                assert all(ended(connection) for connection in strangers)
            for connection in strangers:
                connection.close()
            with RegistryClient(server.url) as another:
                assert another.register(RANK) == 10.0
        assert "out of system resource" not in caplog.text

    def test_a_request_that_meets_a_connection_as_it_ends_is_asked_again(self):
        answers = http_answer(b'{"engines": []}'), b""
        with socket.create_server(("127.0.0.1", 0)) as listener:

            def serve() -> None:
                for answer in reversed(answers):
                    connection, _ = listener.accept()
                    with connection:
                        connection.recv(65536)
                        connection.sendall(answer)

            thread = threading.Thread(target=serve)
            thread.start()
            with RegistryClient(f"http://127.0.0.1:{listener.getsockname()[1]}") as client:
                assert client.engines() == ()
            thread.join(PATIENCE_S)


def asked(server: RegistryServer) -> socket.socket:
    """A connection by which something was asked and answered."""
    connection = socket.create_connection(server.address, PATIENCE_S)
    ask_by(connection)
    return connection


def ask_by(connection: socket.socket, path: str = "/health", *, token: str | None = None) -> None:
    """Asks something, and takes the whole answer."""
    access = "" if token is None else f"Authorization: Bearer {token}\r\n"
    connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n{access}\r\n".encode())
    answer = HTTPResponse(connection)
    answer.begin()
    answer.read()


def is_open(connection: socket.socket) -> bool:
    return not select.select([connection], [], [], 0.05)[0]


def ended(connection: socket.socket) -> bool:
    connection.settimeout(PATIENCE_S)
    try:
        while connection.recv(65536):
            pass
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False
    return True


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def files(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("certificates")
    issued = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    trustme.CA().cert_pem.write_to_path(str(folder / "other-ca.pem"))
    issued.cert_chain_pems[0].write_to_path(str(folder / "certificate.pem"))
    issued.private_key_pem.write_to_path(str(folder / "key.pem"))
    return {file.stem: file for file in folder.iterdir()}


class TestTls:
    @pytest.fixture
    def settings(self, files: dict[str, Path]) -> Settings:
        return Settings(
            registry_port=0,
            secret=SECRET,
            registry_tls_certificate=files["certificate"],
            registry_tls_key=files["key"],
            registry_tls_ca=files["ca"],
        )

    def test_settings_make_both_ends(self, settings: Settings):
        with create_registry(settings) as server:
            assert server.url.startswith("https://127.0.0.1:")
            with create_registry_client(settings, server.url) as client:
                assert client.register(RANK) == 10.0
                assert client.engine("prefill").registrations == (RANK,)

    @pytest.fixture
    def _patient_asyncio(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Else its own deadline would end handshakes, after a minute."""
        monkeypatch.setattr("asyncio.constants.SSL_HANDSHAKE_TIMEOUT", 3600)

    @pytest.mark.usefixtures("_patient_asyncio")
    def test_handshakes_count_among_the_connections_that_ask_nothing(
        self, settings: Settings, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr("kvferry.control.quiet_server._MOST_SILENT", 4)
        with create_registry(settings) as server, create_registry_client(settings, server.url) as client:
            assert client.engines() == ()
            silent = [socket.create_connection(server.address, PATIENCE_S) for _ in range(12)]
            assert all(ended(connection) for connection in silent[:8])
            assert client.register(RANK) == 10.0
            with create_registry_client(settings, server.url) as another:
                assert another.engines()
            for connection in silent:
                connection.close()

    def test_handshakes_that_failed_do_not_count(self, settings: Settings, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr("kvferry.control.quiet_server._MOST_SILENT", 4)
        with create_registry(settings) as server, create_registry_client(settings, server.url) as client:
            patient = socket.create_connection(server.address, PATIENCE_S)
            for _ in range(12):
                with socket.create_connection(server.address, PATIENCE_S) as connection:
                    connection.sendall(b"this is no handshake")
                    assert ended(connection)
            patient.settimeout(0.05)
            with pytest.raises(TimeoutError):
                patient.recv(1)
            patient.close()
            assert client.engines() == ()

    @pytest.mark.usefixtures("_patient_asyncio")
    @pytest.mark.parametrize("said", [b"", b"\x16\x03\x01\x02\x00\x01"], ids=["nothing", "half of a hello"])
    def test_a_handshake_has_a_deadline(self, settings: Settings, said: bytes, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr("kvferry.control.quiet_server._LONGEST_HEAD_S", 0.5)
        with create_registry(settings) as server, socket.create_connection(server.address, PATIENCE_S) as connection:
            connection.sendall(said)
            assert ended(connection)

    def test_a_certificate_that_nobody_vouches_for_is_refused(self, settings: Settings, files: dict[str, Path]):
        with create_registry(settings) as server:
            for authority in (files["other-ca"], None):
                with (
                    RegistryClient(server.url, token=TOKEN, trusted_certificates=authority) as client,
                    pytest.raises(RegistryUnreachableError, match="KVFERRY_REGISTRY_TLS_CA"),
                ):
                    client.engines()

    def test_a_certificate_of_another_host_is_refused(self, settings: Settings, files: dict[str, Path]):
        with (
            create_registry(settings) as server,
            RegistryClient(
                server.url.replace("127.0.0.1", "localhost"), token=TOKEN, trusted_certificates=files["ca"]
            ) as client,
            pytest.raises(RegistryUnreachableError, match="its certificate names that host"),
        ):
            client.engines()

    def test_http_and_https_say_so_to_each_other(self, settings: Settings):
        with (
            create_registry(settings) as server,
            RegistryClient(server.url.replace("https", "http")) as client,
            pytest.raises(RegistryUnreachableError, match="https url"),
        ):
            client.engines()
        with (
            RegistryServer(port=0) as server,
            create_registry_client(settings, server.url.replace("http", "https")) as client,
            pytest.raises(RegistryUnreachableError, match="check that it speaks TLS"),
        ):
            client.engines()

    def test_nothing_older_than_tls_1_2(self, settings: Settings, files: dict[str, Path]):
        old = ssl.create_default_context(cafile=str(files["ca"]))
        old.minimum_version, old.maximum_version = ssl.TLSVersion.MINIMUM_SUPPORTED, ssl.TLSVersion.TLSv1_1
        with (
            create_registry(settings) as server,
            socket.create_connection(server.address, PATIENCE_S) as connection,
            pytest.raises(ssl.SSLError),
        ):
            old.wrap_socket(connection, server_hostname="127.0.0.1")

    def test_an_unusable_key_is_said_at_the_start(self, files: dict[str, Path], tmp_path: Path):
        other = trustme.CA().issue_cert("127.0.0.1")
        other.private_key_pem.write_to_path(str(tmp_path / "other.pem"))
        for key in (tmp_path / "other.pem", tmp_path / "missing.pem", files["certificate"]):
            with pytest.raises(SettingsError, match=f"{key.name} .*KVFERRY_REGISTRY_TLS_KEY"):
                RegistryServer(port=0, certificate=ServerCertificate(files["certificate"], key))


def test_a_token_on_a_network_without_tls_is_warned_of_once(caplog: pytest.LogCaptureFixture):
    with RegistryServer("0.0.0.0", 0, token=TOKEN) as server, RegistryClient(server.url, token=TOKEN) as client:
        client.engines()
    RegistryClient("http://node-7:1", token=TOKEN).close()
    said = [record.message for record in caplog.records if "without TLS" in record.message]
    assert len(said) == 2  # of the server and of the client that is elsewhere
    assert all(TOKEN not in message and "docs/security.md" in message for message in said)


def test_an_encrypted_key_is_refused_instead_of_asked_for(files: dict[str, Path], tmp_path: Path):
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_private_key(files["key"].read_bytes(), None)
    encrypted = tmp_path / "encrypted.pem"
    encrypted.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"password"),
        )
    )
    with pytest.raises(SettingsError, match="unencrypted"):
        ServerCertificate(files["certificate"], encrypted).context()


HEAD = b"PUT /v1/engines/prefill/ranks/0 HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("token", [None, TOKEN])
def test_a_good_head_with_a_body_that_is_no_http_costs_no_traceback(
    caplog: pytest.LogCaptureFixture, token: str | None
):
    with RegistryServer(port=0, token=token) as server:
        for said in (HEAD + b"no chunk\r\n", HEAD + b"5\r\n"):
            with socket.create_connection(server.address, PATIENCE_S) as connection:
                connection.sendall(said)
                time.sleep(0.1)
                with suppress(OSError):
                    connection.sendall(b"no chunk\r\n\xff\r\n")
                assert ended(connection)
        with RegistryClient(server.url, token=token) as client:
            assert client.engines() == ()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
