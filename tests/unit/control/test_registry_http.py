"""Registry server, client and lease keeper over real loopback connections."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import re
import signal
import socket
import threading
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import msgspec
import pytest
from starlette.responses import JSONResponse
from tests.support.http import Served, answering, http_answer, nested_gzip
from tests.support.ports import held_port
from tests.support.proxy import ControlProxy
from tests.support.registries import counted_registrations, rank
from tests.support.waiting import PATIENCE_S, eventually

from kvferry import __version__
from kvferry.control.http_clients import Listener
from kvferry.control.registry import Grant
from kvferry.control.registry_app import registry_app
from kvferry.control.registry_client import RegistryClient
from kvferry.control.registry_messages import API_VERSION, LARGEST_BODY_BYTES
from kvferry.control.registry_server import RegistryServer
from kvferry.control.renewals import LeaseKeeper, Renewals
from kvferry.errors import (
    RegistrationRefusedError,
    RegistryError,
    RegistryUnreachableError,
    SettingsError,
    UsageError,
)
from kvferry.protocol.wire.registrations import RankRegistration


def live_ranks(client: RegistryClient, engine: str = "prefill") -> list[int]:
    return [registration.engine_rank for registration in client.engine(engine).registrations]


@pytest.fixture(autouse=True)
def no_thread_is_left_over() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left_over = [thread for thread in threading.enumerate() if thread not in before and thread.is_alive()]
    assert not left_over, f"threads left over: {left_over}"


@pytest.fixture
def server() -> Iterator[RegistryServer]:
    with RegistryServer(port=0) as running:
        yield running


@pytest.fixture(scope="module")
def shared_server() -> Iterator[RegistryServer]:
    """For tests that leave no registration behind and read none."""
    with RegistryServer(port=0) as running:
        yield running


@pytest.fixture
def client(server: RegistryServer) -> Iterator[RegistryClient]:
    with RegistryClient(server.url) as connected:
        yield connected


@pytest.fixture
def unused_port() -> Iterator[int]:
    """Nobody listens there, and nobody else is given it meanwhile."""
    with held_port() as port:
        yield port


class TestServerAndClient:
    def test_registers_lists_and_removes(self, client: RegistryClient):
        assert client.engine("prefill").registrations == ()
        assert client.register(rank(0)) == 10.0
        assert not client.engine("prefill").complete
        client.register(rank(1))
        view = client.engine("prefill")
        assert view.registrations == (rank(0), rank(1))
        assert (view.world_size, view.complete) == (2, True)
        assert client.engines() == (view,)
        assert client.remove("prefill", 0, "first")
        assert not client.remove("prefill", 0, "first")
        assert live_ranks(client) == [1]

    def test_a_late_removal_by_the_old_incarnation_leaves_the_new_one_alone(self, client: RegistryClient):
        client.register(rank(0, incarnation="old"))
        client.register(rank(0, incarnation="new"))
        assert not client.remove("prefill", 0, "old")
        assert client.engine("prefill").registrations == (rank(0, incarnation="new"),)

    def test_a_refusal_arrives_with_the_registrys_reason(self, client: RegistryClient):
        client.register(rank(0))
        with pytest.raises(RegistrationRefusedError, match="is 'other' here and 'digest' there"):
            client.register(rank(1, layout_digest="other"))

    def test_health_says_versions_and_uptime(self, client: RegistryClient):
        first, second = client.health(), client.health()
        assert (first.version, first.api_version) == (__version__, API_VERSION)
        assert 0 <= first.uptime_s <= second.uptime_s

    def test_a_lease_runs_out_unless_renewed(self):
        with RegistryServer(port=0, lease_s=0.3) as server, RegistryClient(server.url) as client:
            assert client.register(rank(0)) == 0.3
            eventually(
                "that of rank 0 ran out, and not that of rank 1",
                lambda: client.register(rank(1)) and live_ranks(client) == [1],
            )
            eventually("the lease of rank 1 ran out", lambda: live_ranks(client) == [])

    def test_a_restarted_registry_serves_a_client_that_was_connected_before(self):
        with RegistryServer(port=0) as first:
            port = first.address[1]
            client = RegistryClient(first.url)
            client.register(rank(0))
        with pytest.raises(RegistryUnreachableError):
            client.engines()
        with client, RegistryServer(port=port):
            assert client.engines() == ()
            client.register(rank(0))
            assert live_ranks(client) == [0]

    def test_ranks_that_register_at_the_same_time_are_all_there(self, server: RegistryServer):
        ranks = [rank(number, tp_size=64) for number in range(64)]
        with RegistryClient(server.url, timeout_s=PATIENCE_S) as shared, ThreadPoolExecutor(16) as threads:
            leases = list(threads.map(shared.register, ranks * 3))
            view = shared.engine("prefill")
        assert len(leases) == 192
        assert all(10.0 <= lease_s < 12.0 for lease_s in leases)
        assert view.registrations == tuple(ranks)
        assert view.complete

    def test_of_two_layouts_that_race_for_a_name_exactly_one_wins(self, server: RegistryServer):
        # Ranks 0 and 1 have one digest, 2 and 3 the other: whichever comes first, nobody else's gets in.
        ranks = [rank(number, tp_size=4, layout_digest="ab"[number // 2]) for number in range(4)]

        def outcome(registration: RankRegistration) -> bool:
            with RegistryClient(server.url, timeout_s=PATIENCE_S) as own:
                try:
                    own.register(registration)
                except RegistrationRefusedError:
                    return False
                return True

        with ThreadPoolExecutor(4) as threads:
            accepted = [one for one, fine in zip(ranks, threads.map(outcome, ranks), strict=True) if fine]
        assert len({one.layout_digest for one in accepted}) == 1
        with RegistryClient(server.url) as client:
            assert client.engine("prefill").registrations == tuple(accepted)

    def test_an_answer_does_not_wait_for_a_delayed_acknowledgement(self, monkeypatch: pytest.MonkeyPatch):
        """It takes 1 to 2 ms (`benchmarks/registry.py`); with Nagle's algorithm at work it took 44."""
        accept, without_delay = Listener.accept, []

        def noted(listener: Listener) -> tuple[socket.socket, object]:
            accepted, address = accept(listener)
            without_delay.append(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            return accepted, address

        monkeypatch.setattr(Listener, "accept", noted)
        with RegistryServer(port=0) as server, RegistryClient(server.url) as client:
            client.health()
        assert without_delay
        assert all(without_delay)

    def test_every_accepted_engine_name_survives_the_url(self, client: RegistryClient):
        for name in ("a", "10.0.0.1:30000", "a..b", "a@b-c_d.e", "x" * 128):
            client.register(rank(engine=name))
            assert live_ranks(client, name) == [0]
            assert client.remove(name, 0, "first")

    @pytest.mark.skipif(not socket.has_ipv6, reason="this Python has no IPv6")
    def test_ipv6(self):
        try:
            socket.create_server(("::1", 0), family=socket.AF_INET6).close()
        except OSError:
            pytest.skip("this machine has no IPv6 loopback")
        with RegistryServer("::1", 0) as server:
            assert server.url == f"http://[::1]:{server.address[1]}"
            with RegistryClient(server.url) as client:
                client.register(rank(0))
                assert live_ranks(client) == [0]

    def test_a_wildcard_address_is_reached_by_loopback(self):
        with RegistryServer("0.0.0.0", 0) as server, RegistryClient(server.url) as client:
            assert server.address[0] == "0.0.0.0"
            assert server.url == f"http://127.0.0.1:{server.address[1]}"
            assert client.health().version == __version__


class TestServer:
    def problem(self, response: httpx.Response, status: int, error: str) -> str:
        assert response.status_code == status, response.text
        assert response.headers["content-type"] == "application/json"
        answer = response.json()
        assert set(answer) == {"error", "message"}
        assert answer["error"] == error
        return str(answer["message"])

    def put(self, server: RegistryServer, content: Any, path: str = "prefill/ranks/0") -> httpx.Response:
        return httpx.put(f"{server.url}/v1/engines/{path}", content=content, trust_env=False)

    @pytest.mark.parametrize(
        "body",
        [b"", b"garbage", b"null", b"[]", b"{}", b'{"engine": 1}', b"\xff\xfe", b"[" * 60000, b'"\xff"'],
        ids=["empty", "garbage", "null", "list", "no fields", "number", "bytes", "deep", "not utf-8"],
    )
    def test_a_body_that_is_no_registration_is_a_bad_request(self, shared_server: RegistryServer, body: bytes):
        assert "is no registration" in self.problem(self.put(shared_server, body), 400, "MessageError")

    @pytest.mark.parametrize(
        ("fields", "error", "sentence"),
        [
            ({"coordinates": {"tp_rank": 2, "tp_size": 2}}, "LayoutError", "tp_rank is 2"),
            ({"coordinates": {"tp_size": 0}}, "LayoutError", "tp_size is 0"),
            ({"engine": "a/b"}, "SettingsError", "'a/b' cannot be an engine's name"),
            ({"engine": "x" * 50000}, "SettingsError", "50000 characters"),
            ({"incarnation": "x" * 257}, "SettingsError", "incarnation"),
            ({"protocol_version": 10**15}, "SettingsError", "protocol_version"),
            ({"protocol_version": 10**4000}, "SettingsError", "protocol_version"),
            ({"coordinates": dict.fromkeys(("tp_size", "pp_size"), 10**4000)}, "MessageError", "tp_size"),
        ],
        ids=lambda value: str(value)[:60],
    )
    def test_a_registration_with_impossible_values_is_a_bad_request(
        self, shared_server: RegistryServer, fields: dict[str, Any], error: str, sentence: str
    ):
        body = {**json.loads(msgspec.json.encode(rank(0))), **fields}
        message = self.problem(self.put(shared_server, json.dumps(body)), 400, error)
        assert sentence in message
        assert len(message) < 5000

    @pytest.mark.parametrize("path", ["prefill/ranks/1", "decode/ranks/0", "prefill/ranks/00000000000"])
    def test_a_body_that_contradicts_the_path_is_a_bad_request(self, shared_server: RegistryServer, path: str):
        self.problem(self.put(shared_server, msgspec.json.encode(rank(0)), path), 400, "MessageError")

    @pytest.mark.parametrize("number", ["x", "-1", "1.0", "9" * 5000, "%C2%B2"])
    def test_a_rank_that_is_no_number_is_a_bad_request(self, shared_server: RegistryServer, number: str):
        url = f"{shared_server.url}/v1/engines/prefill/ranks/{number}"
        message = self.problem(httpx.delete(url, params={"incarnation": "first"}, trust_env=False), 400, "MessageError")
        assert "is no engine rank" in message

    def test_a_removal_must_say_its_incarnation(self, shared_server: RegistryServer):
        answer = httpx.delete(f"{shared_server.url}/v1/engines/prefill/ranks/0", trust_env=False)
        assert "?incarnation=" in self.problem(answer, 400, "MessageError")

    def test_a_body_that_is_too_large_is_refused_with_and_without_a_declared_size(self, server: RegistryServer):
        largest = msgspec.json.encode(rank(0)).ljust(LARGEST_BODY_BYTES)
        assert self.put(server, largest).status_code == 200
        for too_large in (largest + b" ", iter([largest, b" "])):
            message = self.problem(self.put(server, too_large), 413, "BodyTooLargeError")
            assert str(LARGEST_BODY_BYTES) in message

    def test_a_declared_size_is_refused_before_the_body_is_sent(self, shared_server: RegistryServer):
        with socket.create_connection(shared_server.address, timeout=PATIENCE_S) as connection:
            connection.sendall(
                b"PUT /v1/engines/prefill/ranks/0 HTTP/1.1\r\nHost: x\r\nContent-Length: 999999999999\r\n\r\n"
            )
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 413 ")

    def test_unknown_places_methods_and_engines_are_answered_in_json(self, shared_server: RegistryServer):
        assert "'nobody'" in self.problem(
            httpx.get(f"{shared_server.url}/v1/engines/nobody", trust_env=False), 404, "UnknownEngine"
        )
        assert "GET /nowhere" in self.problem(
            httpx.get(f"{shared_server.url}/nowhere", trust_env=False), 404, "HTTPException"
        )
        post = httpx.post(f"{shared_server.url}/v1/engines", trust_env=False)
        self.problem(post, 405, "HTTPException")
        assert "GET" in post.headers["allow"]

    def test_bytes_that_are_no_http_leave_the_server_serving(self, server: RegistryServer, client: RegistryClient):
        with socket.create_connection(server.address, timeout=PATIENCE_S) as connection:
            connection.sendall(b"\x00\x01garbage\r\n\r\n")
            assert connection.recv(65536).startswith(b"HTTP/1.1 400")
        assert client.health().version == __version__

    def test_a_taken_port_is_said_in_the_callers_thread_with_a_remedy(self, server: RegistryServer):
        port = server.address[1]
        second = RegistryServer(port=port)
        with pytest.raises(SettingsError) as taken:
            second.start()
        for words in ("'127.0.0.1'", f"port {port}", "KVFERRY_REGISTRY_PORT", "host_registry=False"):
            assert words in str(taken.value)
        second.close()

    def test_of_servers_that_race_for_a_port_exactly_one_wins(self, unused_port: int):
        servers = [RegistryServer(port=unused_port) for _ in range(4)]
        barrier = threading.Barrier(4)

        def start(server: RegistryServer) -> bool:
            barrier.wait(PATIENCE_S)
            try:
                server.start()
            except SettingsError:
                return False
            return True

        try:
            with ThreadPoolExecutor(4) as threads:
                assert sorted(threads.map(start, servers)) == [False, False, False, True]
        finally:
            for server in servers:
                server.close()

    @pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid", "a" * 70, "a..b"])
    def test_a_host_that_is_not_this_machines_is_a_settings_error(self, host: str):
        with pytest.raises(SettingsError, match=re.escape(repr(host))):
            RegistryServer(host, 0).start()

    @pytest.mark.parametrize(
        "arguments", [{"port": -1}, {"port": 65536}, {"host": ""}, {"lease_s": 0.0}, {"lease_s": 1e9}]
    )
    def test_impossible_settings_are_refused_at_once(self, arguments: dict[str, Any]):
        with pytest.raises(SettingsError):
            RegistryServer(**arguments)

    def test_it_serves_once_and_closes_twice(self):
        server = RegistryServer(port=0)
        with pytest.raises(UsageError):
            _ = server.url
        server.start()
        with pytest.raises(UsageError):
            server.start()
        server.close()
        server.close()
        with pytest.raises(UsageError):
            server.start()
        with socket.socket() as connection:
            assert connection.connect_ex(server.address) != 0

    def test_close_does_not_wait_for_clients_that_dawdle(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr("kvferry.control.quiet_server._LONGEST_HEAD_S", 3600)
        monkeypatch.setattr(registry_app, "__kwdefaults__", {"body_timeout_s": 3600})
        with RegistryServer(port=0) as server, RegistryClient(server.url) as client:
            client.health()
            silent = socket.create_connection(server.address)
            half = socket.create_connection(server.address)
            half.sendall(b"PUT /v1/engines/prefill/ranks/0 HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nhalf")
            client.health()
            server.close(PATIENCE_S)
            silent.close()
            half.close()

    def test_a_body_that_does_not_arrive_is_given_up(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(registry_app, "__kwdefaults__", {"body_timeout_s": 0.2})
        with RegistryServer(port=0) as server, socket.create_connection(server.address, 20) as connection:
            connection.sendall(
                b"PUT /v1/engines/prefill/ranks/0 HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nhalf"
            )
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 408 ")

    def test_it_leaves_the_host_process_as_it_was(self, caplog: pytest.LogCaptureFixture):
        names = ("", "uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi")
        access_handler = logging.NullHandler()
        logging.getLogger("uvicorn.access").addHandler(access_handler)

        def state() -> list[object]:
            loggers = [logging.getLogger(name) for name in names]
            return [
                *((one.level, one.propagate, one.disabled, list(one.handlers)) for one in loggers),
                *(signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)),
            ]

        try:
            with caplog.at_level(logging.INFO):
                before = state()
                with RegistryServer(port=0) as server, RegistryClient(server.url) as client:
                    client.health()
                    assert state() == before
                assert state() == before
            assert not [one for one in caplog.records if one.name == "uvicorn.access"]
        finally:
            logging.getLogger("uvicorn.access").removeHandler(access_handler)

    def test_a_server_that_cannot_start_says_so(self, monkeypatch: pytest.MonkeyPatch):
        import uvicorn

        async def fail(self: uvicorn.Server, sockets: object = None) -> None:
            raise SystemExit(3)

        monkeypatch.setattr(uvicorn.Server, "startup", fail)
        with pytest.raises(RegistryError, match=r"did not start: SystemExit\(3\)"):
            RegistryServer(port=0).start()


class TestClient:
    def test_an_unreachable_registry_is_named_with_cause_and_remedy(self, unused_port: int):
        url = f"http://127.0.0.1:{unused_port}"
        with RegistryClient(url) as client:
            for request in (client.health, client.engines, lambda: client.register(rank(0))):
                with pytest.raises(RegistryUnreachableError, match=rf"{url}.*refused.*check that") as error:
                    request()
                assert isinstance(error.value.__cause__, httpx.ConnectError)

    def test_a_registry_that_does_not_answer_is_given_up_in_time(self):
        with socket.create_server(("127.0.0.1", 0)) as silent:
            url = f"http://127.0.0.1:{silent.getsockname()[1]}"
            with (
                RegistryClient(url, timeout_s=0.2) as client,
                pytest.raises(RegistryUnreachableError, match="Timeout"),
            ):
                client.health()

    def test_a_connection_that_is_lost_without_a_word_costs_one_answer(self, server: RegistryServer):
        with ControlProxy() as proxy, RegistryClient(f"http://127.0.0.1:{proxy.port}", timeout_s=1.0) as client:
            proxy.target = server.address[1]
            assert client.health()
            proxy.forget()
            with pytest.raises(RegistryUnreachableError, match="Timeout"):
                client.health()
            assert client.health(), "through a new connection"

    def test_an_answer_that_trickles_is_given_up_in_time(self):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ending = threading.Event()

            def trickle() -> None:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
                    try:
                        while not ending.wait(0.02):
                            connection.sendall(b" ")
                    except OSError:
                        pass

            thread = threading.Thread(target=trickle, daemon=True)
            thread.start()
            try:
                url = f"http://127.0.0.1:{listener.getsockname()[1]}"
                with (
                    RegistryClient(url, timeout_s=0.3) as client,
                    pytest.raises(RegistryUnreachableError, match=r"0\.3 s"),
                ):
                    client.health()
            finally:
                ending.set()
                thread.join()

    def test_a_connection_that_ends_without_an_answer_is_unreachable(self):
        with (
            answering(b"") as url,
            RegistryClient(url) as client,
            pytest.raises(RegistryUnreachableError, match="disconnected"),
        ):
            client.health()

    @pytest.mark.parametrize(
        ("answer", "words"),
        [
            (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", "is no registry"),
            (http_answer(b"<html>hello</html>"), "is not a registry"),
            (http_answer(b"{}"), "is not a registry"),
            (http_answer(b'{"version": 1}'), "is not a registry"),
            (http_answer(b"<html>gone</html>", "404 Not Found"), "status 404"),
            (http_answer(b"", "302 Found", "Location: http://127.0.0.1:1/\r\n"), "status 302"),
            (http_answer(b"no gzip", headers="Content-Encoding: gzip\r\n"), "it encodes its answers ('gzip')"),
            (http_answer(b'{"error": "Bug", "message": "oh"}', "500 Oh"), "status 500, Bug: oh"),
        ],
        ids=["ssh", "html", "empty object", "other object", "other 404", "redirect", "broken gzip", "bug"],
    )
    def test_what_is_not_a_registrys_answer_is_a_registry_error(self, answer: bytes, words: str):
        with answering(answer) as url, RegistryClient(url) as client:
            calls = (
                client.health,
                client.engines,
                lambda: client.engine("prefill"),
                lambda: client.register(rank(0)),
            )
            for call in calls:
                with pytest.raises(RegistryError, match=re.escape(words)) as error:
                    call()
                assert type(error.value) is RegistryError
                assert url in str(error.value)

    @pytest.mark.parametrize("lease", [b"0", b"-1", b"1e300", b'"10"', b"null"])
    def test_an_impossible_lease_is_no_registrys_answer(self, lease: bytes):
        answer = http_answer(b'{"lease_s": ' + lease + b"}")
        with (
            answering(answer) as url,
            RegistryClient(url) as client,
            pytest.raises(RegistryError, match="is not a registry"),
        ):
            client.register(rank(0))

    def test_an_answer_without_end_is_cut(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr("kvferry.control.registry_client._LARGEST_ANSWER_BYTES", 1000)
        with (
            answering(http_answer(b" " * 5000)) as url,
            RegistryClient(url) as client,
            pytest.raises(RegistryError, match="does not end"),
        ):
            client.health()

    @pytest.mark.parametrize(
        "encodings", ["gzip, gzip", "gzip,gzip", "GZIP , deflate", "br", "zstd", "none-that-exists"]
    )
    def test_an_encoded_answer_is_refused_before_it_is_decoded(self, encodings: str):
        with (
            answering(http_answer(nested_gzip(), headers=f"Content-Encoding: {encodings}\r\n")) as url,
            RegistryClient(url) as client,
        ):
            client.load()
            tracemalloc.start()
            try:
                with pytest.raises(RegistryError, match=r"is no registry \(it encodes its answers"):
                    client.health()
                assert tracemalloc.get_traced_memory()[1] < 16 << 20
            finally:
                tracemalloc.stop()

    def test_the_client_asks_for_answers_that_are_not_encoded(self):
        asked: list[str | None] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            asked.append(dict(scope["headers"]).get(b"accept-encoding", b"").decode())
            await JSONResponse({"status": "ok"}, headers={"content-encoding": "identity"})(scope, receive, send)

        with Served(app) as served, RegistryClient(served.url) as client, contextlib.suppress(RegistryError):
            client.health()
        assert asked == ["identity"]

    @pytest.mark.parametrize(
        "url",
        [
            "",
            "127.0.0.1:8998",
            "localhost:8998",
            "ftp://127.0.0.1",
            "tcp://127.0.0.1:8998",
            "http://",
            "http://:8998",
            "http://127.0.0.1:port",
            "http://127.0.0.1:99999",
            "http://127.0.0.1:0",
            "http://[::1",
            "http://a b",
            "http://a\n",
            "http://é",
            "http://a?b",
            "http://a#b",
        ],
    )
    def test_a_bad_url_is_refused_at_construction(self, url: str):
        with pytest.raises(SettingsError, match=re.escape(repr(url))):
            RegistryClient(url)

    def test_a_url_with_a_password_is_refused_without_repeating_it(self):
        with pytest.raises(SettingsError) as refused:
            RegistryClient("http://user:secret@127.0.0.1:8998")
        assert "secret" not in str(refused.value)

    @pytest.mark.parametrize("host", ["a..b", "a" * 70])
    def test_a_host_that_nobody_can_have_is_an_error_of_ours(self, host: str):
        with (
            RegistryClient(f"http://{host}:8998") as client,
            pytest.raises((SettingsError, RegistryUnreachableError), match=re.escape(host)),
        ):
            client.health()

    @pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan"), float("inf")])
    def test_an_impossible_timeout_is_refused(self, timeout_s: float):
        with pytest.raises(SettingsError, match="timeout_s"):
            RegistryClient("http://127.0.0.1:8998", timeout_s)

    def test_a_name_that_no_engine_can_have_is_refused_before_it_is_sent(self, client: RegistryClient):
        with pytest.raises(SettingsError):
            client.engine("../health")
        with pytest.raises(SettingsError):
            client.remove("", 0, "first")

    def test_proxies_of_the_environment_do_not_get_in_the_way(
        self, server: RegistryServer, monkeypatch: pytest.MonkeyPatch, unused_port: int
    ):
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{unused_port}")
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        with RegistryClient(server.url) as client:
            assert client.health().version == __version__

    def test_a_slash_at_the_end_of_the_url_makes_no_difference(self, shared_server: RegistryServer):
        with RegistryClient(shared_server.url + "/") as client:
            assert client.url == shared_server.url
            assert client.engines() == ()

    def test_a_client_is_closed_while_another_thread_makes_its_connections(self, monkeypatch: pytest.MonkeyPatch):
        begun, goes_on, right = threading.Event(), threading.Event(), httpx.Client

        def slow(**given: Any) -> httpx.Client:
            begun.set()
            assert goes_on.wait(PATIENCE_S)
            return right(**given)

        monkeypatch.setattr(httpx, "Client", slow)
        client = RegistryClient("http://127.0.0.1:1")
        with ThreadPoolExecutor(2) as threads:
            loads = threads.submit(client.load)
            assert begun.wait(PATIENCE_S)
            try:
                threads.submit(client.close).result(PATIENCE_S)
            finally:
                goes_on.set()
            with pytest.raises(UsageError, match="was closed"):
                loads.result(PATIENCE_S)

    def test_a_closed_client_says_so(self, client: RegistryClient):
        client.health()
        client.close()
        client.close()
        with pytest.raises(UsageError, match="closed"):
            client.health()


class TestLeaseKeeper:
    def test_it_registers_renews_and_removes(self):
        problems: list[Exception] = []
        with RegistryServer(port=0, lease_s=1.0) as server, RegistryClient(server.url) as client:
            asked = counted_registrations(client)
            with LeaseKeeper(client, rank(0), problems.append) as keeper:
                eventually("it has renewed four times", lambda: asked() >= 5)
                assert live_ranks(client) == [0]
                assert keeper.registered.is_set()
            assert live_ranks(client) == []
            assert not keeper.registered.is_set()
        assert problems == []
        assert keeper.last_error is None

    def test_one_whose_endpoint_cannot_drain_still_renews(self, caplog: pytest.LogCaptureFixture):
        def broken() -> None:
            raise ValueError("it cannot drain")

        with RegistryServer(port=0, lease_s=0.6) as server, RegistryClient(server.url) as client:
            asked = counted_registrations(client)
            with LeaseKeeper(client, rank(0), lambda problem: None, on_drain=broken) as keeper:
                assert keeper.registered.wait(PATIENCE_S)
                client.drain("prefill")
                eventually("it has been told", lambda: "it cannot drain" in caplog.text)
                before = asked()
                eventually("it renews", lambda: asked() >= before + 2)

    def test_it_registers_again_with_a_registry_that_restarted(self):
        problems: list[Exception] = []
        first = RegistryServer(port=0, lease_s=0.6)
        first.start()
        with (
            RegistryClient(first.url) as client,
            LeaseKeeper(client, rank(0), problems.append, renewals=Renewals(longest_retry_s=0.2)) as keeper,
        ):
            assert keeper.registered.wait(PATIENCE_S)
            first.close()
            eventually("the keeper gave the lease up", lambda: not keeper.registered.is_set())
            eventually("the keeper said why", lambda: isinstance(keeper.last_error, RegistryUnreachableError))
            with RegistryServer(port=first.address[1], lease_s=0.6):
                assert keeper.registered.wait(PATIENCE_S)
                assert live_ranks(client) == [0]
                assert keeper.last_error is None
                assert keeper.close()
                assert live_ranks(client) == []
        assert {type(problem) for problem in problems} == {RegistryUnreachableError}

    def test_it_waits_for_a_registry_that_starts_later_and_reports_the_same_problem_once(self, unused_port: int):
        problems: list[Exception] = []
        with RegistryClient(f"http://127.0.0.1:{unused_port}") as client:
            attempts: list[float] = []
            grant = client.grant

            def counted(registration: RankRegistration) -> Grant:
                attempts.append(time.monotonic())
                return grant(registration)

            client.grant = counted  # type: ignore[method-assign]
            with LeaseKeeper(
                client, rank(0), problems.append, renewals=Renewals(shortest_retry_s=0.02, longest_retry_s=0.1)
            ) as keeper:
                eventually("eight attempts were made", lambda: len(attempts) >= 8)
                assert not keeper.registered.is_set()
                with RegistryServer(port=unused_port):
                    assert keeper.registered.wait(PATIENCE_S)
                    keeper.close()
        assert len(problems) == 1
        waits = [later - earlier for earlier, later in itertools.pairwise(attempts)]
        # It backs off: 0.02, 0.04, 0.08, 0.1 ..., each shortened by up to a half.
        assert waits[0] >= 0.01
        assert min(waits[4:7]) >= 0.05

    def test_it_keeps_trying_after_a_refusal_until_the_earlier_start_is_gone(self):
        problems: list[Exception] = []
        with RegistryServer(port=0, lease_s=0.6) as server, RegistryClient(server.url) as client:
            client.register(rank(1))
            restarted = rank(0, incarnation="second", layout_digest="other")
            with LeaseKeeper(client, restarted, problems.append, renewals=Renewals(longest_retry_s=0.1)) as keeper:
                assert keeper.registered.wait(PATIENCE_S)
                assert client.engine("prefill").registrations == (restarted,)
        assert len(problems) == 1
        assert isinstance(problems[0], RegistrationRefusedError)

    def test_a_rank_that_was_replaced_is_told_and_does_not_remove_its_successor(self):
        problems: list[Exception] = []
        with RegistryServer(port=0, lease_s=0.6) as server, RegistryClient(server.url) as client:
            old = LeaseKeeper(client, rank(0, incarnation="old"), problems.append)
            new = LeaseKeeper(client, rank(0, incarnation="new"), problems.append)
            old.start()
            assert old.registered.wait(PATIENCE_S)
            new.start()
            assert new.registered.wait(PATIENCE_S)
            # Whatever else a busy machine brings between two leases of 0.6 s is not what this waits for.
            eventually("the old start was told", lambda: isinstance(old.last_error, RegistrationRefusedError))
            assert problems
            assert not old.registered.is_set()
            assert old.close()
            assert client.engine("prefill").registrations == (rank(0, incarnation="new"),)
            assert new.last_error is None
            assert new.close()

    def test_a_problem_handler_that_raises_does_not_end_it(self, unused_port: int, caplog: pytest.LogCaptureFixture):
        def broken(problem: Exception) -> None:
            raise ValueError("the handler is broken")

        with (
            RegistryClient(f"http://127.0.0.1:{unused_port}") as client,
            LeaseKeeper(client, rank(0), broken, renewals=Renewals(longest_retry_s=0.1)) as keeper,
        ):
            eventually("the handler's error was logged", lambda: "the handler is broken" in caplog.text)
            with RegistryServer(port=unused_port):
                assert keeper.registered.wait(PATIENCE_S)
                keeper.close()

    def test_a_bug_in_a_request_does_not_end_it(self, client: RegistryClient):
        grant, bugs = client.grant, [RuntimeError("a bug"), TypeError("another")]
        problems: list[Exception] = []

        def buggy(registration: RankRegistration) -> Grant:
            if bugs:
                raise bugs.pop(0)
            return grant(registration)

        client.grant = buggy  # type: ignore[method-assign]
        with LeaseKeeper(client, rank(0), problems.append) as keeper:
            assert keeper.registered.wait(PATIENCE_S)
        assert [str(problem) for problem in problems] == ["a bug", "another"]

    def test_close_is_quick_when_the_registry_is_gone_and_reports_the_failed_removal(self):
        problems: list[Exception] = []
        server = RegistryServer(port=0)
        server.start()
        with RegistryClient(server.url) as client:
            keeper = LeaseKeeper(client, rank(0), problems.append)
            keeper.start()
            assert keeper.registered.wait(PATIENCE_S)
            server.close()
            assert keeper.close(PATIENCE_S)
        assert [type(problem) for problem in problems] == [RegistryUnreachableError]

    def test_close_gives_up_on_a_registry_that_hangs_and_the_thread_still_ends(self):
        with (
            socket.create_server(("127.0.0.1", 0)) as silent,
            RegistryClient(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_s=3600) as client,
        ):
            keeper = LeaseKeeper(client, rank(0), lambda problem: None)
            keeper.start()
            assert not keeper.close(timeout_s=0.05)
            silent.close()
            assert keeper.close(PATIENCE_S)

    def test_it_starts_once_and_closes_twice(self, client: RegistryClient):
        keeper = LeaseKeeper(client, rank(0), lambda problem: None)
        keeper.start()
        with pytest.raises(UsageError):
            keeper.start()
        assert keeper.close()
        assert keeper.close()
        with pytest.raises(UsageError):
            keeper.start()

    def test_closed_before_it_was_started_it_asks_nothing(self, client: RegistryClient):
        client.register(rank(0))
        keeper = LeaseKeeper(client, rank(0), lambda problem: None)
        assert keeper.close()
        assert live_ranks(client) == [0]

    @pytest.mark.parametrize("retries", [(0.0, 1.0), (2.0, 1.0), (0.1, float("inf"))])
    def test_impossible_retries_are_refused(self, client: RegistryClient, retries: tuple[float, float]):
        with pytest.raises(SettingsError, match="retry_s"):
            Renewals(shortest_retry_s=retries[0], longest_retry_s=retries[1])

    def test_many_keepers_share_one_client(self, client: RegistryClient):
        keepers = [LeaseKeeper(client, rank(number, 16), lambda problem: None) for number in range(16)]
        for keeper in keepers:
            keeper.start()
        assert all(keeper.registered.wait(PATIENCE_S) for keeper in keepers)
        assert client.engine("prefill").complete
        assert all(keeper.close() for keeper in keepers)
        assert client.engines() == ()
