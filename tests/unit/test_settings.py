"""Settings: from the environment, from arguments, and refused with the variable, the value and what is allowed."""

from __future__ import annotations

import pytest

from kvferry import Settings
from kvferry.errors import SettingsError
from kvferry.settings import bracketed, default_nixl_threads, default_workers, is_wildcard


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in os.environ:
        if name.startswith("KVFERRY_"):
            monkeypatch.delenv(name)


def test_the_defaults_are_possible():
    settings = Settings()
    assert settings.registry_address == "http://127.0.0.1:8998"
    assert settings.peer_timeout_s > settings.heartbeat_interval_s
    assert all(field.description for field in Settings.model_fields.values())


def test_an_argument_wins_over_the_environment_which_wins_over_the_default(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KVFERRY_WORKERS", "7")
    monkeypatch.setenv("kvferry_queues", "3")
    assert (Settings().workers, Settings().queues) == (7, 3)
    assert Settings(workers=2).workers == 2


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("control_port", "65536", "less than or equal to 65535"),
        ("control_port", "-1", "greater than or equal to 0"),
        ("control_port", "http", "valid integer"),
        ("registry_port", "70000", "less than or equal to 65535"),
        ("registry_lease_s", "0", "greater than 0"),
        ("registry_lease_s", "1e9", "less than or equal to 3600"),
        ("transport", "pigeon", "'nixl'"),
        ("nixl_threads", "-1", "greater than or equal to 0"),
        ("nixl_progress_delay_us", "0", "greater than or equal to 1000"),
        ("workers", "0", "greater than or equal to 1"),
        ("workers", "1000", "less than or equal to 256"),
        ("workers", "many", "valid integer"),
        ("queues", "0", "greater than or equal to 1"),
        ("synchronous", "perhaps", "valid boolean"),
        ("bootstrap_timeout_s", "0", "greater than 0"),
        ("bootstrap_timeout_s", "inf", "finite"),
        ("waiting_timeout_s", "-5", "greater than 0"),
        ("waiting_timeout_s", "nan", "finite"),
        ("write_timeout_s", "soon", "valid number"),
        ("heartbeat_interval_s", "0", "greater than 0"),
        ("peer_timeout_s", "inf", "finite"),
        ("close_timeout_s", "-1", "greater than or equal to 0"),
        ("advertise_port", "0", "greater than or equal to 1"),
        ("max_early_rooms", "0", "greater than or equal to 1"),
    ],
)
def test_an_impossible_value_is_refused_wherever_it_comes_from(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, allowed: str
):
    for source in ("environment", "argument"):
        with monkeypatch.context() as context:
            if source == "environment":
                context.setenv(f"KVFERRY_{name.upper()}", value)
            with pytest.raises(SettingsError) as caught:
                Settings(**({} if source == "environment" else {name: value}))
        said = str(caught.value)
        assert f"{name} (KVFERRY_{name.upper()}) = {value!r}: " in said
        assert allowed in said


def test_everything_that_is_wrong_is_said_at_once():
    with pytest.raises(SettingsError, match=r"KVFERRY_WORKERS.*; .*KVFERRY_QUEUES"):
        Settings(workers=0, queues=0)


def test_an_unknown_setting_is_refused():
    with pytest.raises(SettingsError, match="wokers"):
        Settings(wokers=3)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "*", "", "0:0:0:0:0:0:0:0"])
@pytest.mark.parametrize("advertise_host", [None, "0.0.0.0", "::"])
def test_a_wildcard_host_needs_an_address_that_peers_can_reach(host: str, advertise_host: str | None):
    with pytest.raises(SettingsError) as caught:
        Settings(host=host, advertise_host=advertise_host)
    assert "KVFERRY_HOST" in str(caught.value)
    assert "set advertise_host (KVFERRY_ADVERTISE_HOST)" in str(caught.value)
    assert Settings(host=host, advertise_host="10.0.0.7").advertise_host == "10.0.0.7"


@pytest.mark.parametrize(("peer_timeout_s", "heartbeat_interval_s"), [(1, 1), (1, 2)])
def test_a_peer_has_time_for_more_than_one_heartbeat(peer_timeout_s: float, heartbeat_interval_s: float):
    with pytest.raises(SettingsError, match=r"peer_timeout_s .*must be longer than heartbeat_interval_s"):
        Settings(peer_timeout_s=peer_timeout_s, heartbeat_interval_s=heartbeat_interval_s)


def test_settings_do_not_change():
    with pytest.raises(Exception, match="frozen"):
        Settings().workers = 3


def test_the_registry_is_where_it_is_said_to_be():
    assert Settings(registry_url="http://elsewhere:1").registry_address == "http://elsewhere:1"
    assert Settings(registry_host="::1", registry_port=5).registry_address == "http://[::1]:5"
    assert bracketed("10.0.0.1") == "10.0.0.1"


@pytest.mark.parametrize(("cpus", "workers"), [(1, 4), (2, 4), (64, 4), (96, 6), (192, 12), (1024, 12)])
def test_workers_suit_the_machine(cpus: int, workers: int):
    assert default_workers(cpus) == workers


@pytest.mark.parametrize(("cpus", "threads"), [(1, 1), (2, 2), (4, 4), (192, 4)])
def test_nixl_threads_suit_the_machine(cpus: int, threads: int):
    assert default_nixl_threads(cpus) == threads
    assert Settings(nixl_threads=0).nixl_threads == 0


def test_there_are_no_more_queues_than_workers():
    assert Settings(workers=2, queues=9).used_queues == 2
    assert Settings(workers=9, queues=2).used_queues == 2


@pytest.mark.parametrize(("host", "expected"), [("0.0.0.0", True), ("::", True), ("localhost", False), ("::1", False)])
def test_wildcards_are_known(host: str, expected: bool):
    assert is_wildcard(host) is expected
