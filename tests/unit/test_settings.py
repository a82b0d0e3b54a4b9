"""Settings: from the environment, from arguments, and refused with the variable, the value and what is allowed."""

from __future__ import annotations

import ast
import pickle
import re
import traceback
from pathlib import Path

import pytest
from tests.support.caches import Model, Shape, pool

import kvferry
from kvferry import DecodeEndpoint, InProcessNetwork, InProcessTransport, RankCoordinates, Settings
from kvferry.cli import main
from kvferry.errors import SettingsError
from kvferry.hosts import bracketed, is_loopback, is_wildcard
from kvferry.settings import (
    OwnSettings,
    all_fields,
    default_nixl_threads,
    default_workers,
    known_variables,
    owners,
)
from kvferry.spelling import meaningless
from kvferry.staging.sizes import StagingSettings


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
    assert all(field.description for field in all_fields().values())


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
        ("nixl_threads", "-1", "greater than or equal to 0"),
        ("workers", "0", "greater than or equal to 1"),
        ("workers", "1000", "less than or equal to 256"),
        ("workers", "many", "valid integer"),
        ("queues", "0", "greater than or equal to 1"),
        ("checksums", "perhaps", "valid boolean"),
        ("bootstrap_timeout_s", "0", "greater than 0"),
        ("bootstrap_timeout_s", "inf", "finite"),
        ("waiting_timeout_s", "-5", "greater than 0"),
        ("waiting_timeout_s", "nan", "finite"),
        ("write_timeout_s", "soon", "valid number"),
        ("heartbeat_interval_s", "0", "greater than 0"),
        ("peer_timeout_s", "inf", "finite"),
        ("close_timeout_s", "-1", "greater than or equal to 0"),
        ("advertise_port", "0", "greater than or equal to 1"),
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

    for values in ({"workers": 0, "nixl_device": "a,b", "etcd_user": "u"}, {"nixl_device": "a,b", "wokers": 1}):
        said = refusal(**values)
        assert all(f"KVFERRY_{name.upper()}" in said for name in values), "whichever part's they are"


def test_an_unknown_setting_is_refused(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(SettingsError, match=r"wokers \(KVFERRY_WOKERS\): no such setting; did you mean workers\?"):
        Settings(wokers=3)
    assert "no such setting; docs/settings.md lists all" in refusal(zzz=1)
    monkeypatch.setenv("KVFERRY_WOKERS", "3")
    assert Settings() == Settings(), "another version's variable: `kvferry doctor` tells of it"


@pytest.mark.parametrize("folder", ["benchmarks", "docs", "examples", "proof", "prototypes"])
def test_who_makes_settings_in_this_tree_names_ones_that_there_are(folder: str):
    """Types do not say it, and much of this runs in no test."""
    for file in (Path(__file__).parents[2] / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "Settings":
                named = {keyword.arg for keyword in node.keywords if keyword.arg is not None}
                assert named <= all_fields().keys(), f"{file}:{node.lineno}"


def test_what_one_part_is_told_goes_wherever_the_settings_go(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KVFERRY_STAGING_RING_MIB", "8")
    settings = Settings(staging_chunk_mib=2)
    copies = (
        settings,
        settings.of_rank(1),
        pickle.loads(pickle.dumps(settings)),
        Settings(**settings.model_dump()),
        Settings().model_copy(update={"staging_chunk_mib": 2.0}),
    )
    for each in copies:
        own = each.of(StagingSettings)
        assert (own.staging_ring_mib, own.staging_chunk_mib, own.staging_memory_mib) == (8.0, 2.0, 2048.0)
    assert settings != Settings()


def test_every_class_of_settings_is_read_and_no_two_have_a_name_in_common():
    classes: tuple[type[OwnSettings], ...] = (Settings, *owners())
    for file in Path(kvferry.__file__).parent.rglob("*.py"):
        for name in re.findall(r"^class (\w+)\(OwnSettings\)", file.read_text(), re.MULTILINE):
            assert name in {each.__name__ for each in classes}, f"{name} of {file} is not in OWNERS"
    assert len(all_fields()) == sum(len(each.model_fields) for each in classes)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "*", "", "0:0:0:0:0:0:0:0"])
def test_a_wildcard_host_needs_an_address_that_peers_can_reach(host: str):
    with pytest.raises(SettingsError) as caught:
        Settings(host=host)
    assert "KVFERRY_HOST" in str(caught.value)
    assert "set advertise_host (KVFERRY_ADVERTISE_HOST)" in str(caught.value)
    for wildcard in ("0.0.0.0", "::"):
        assert "advertise_host (KVFERRY_ADVERTISE_HOST)" in refusal(host=host, advertise_host=wildcard)
    elsewhere = Settings(host=host, registry_url="http://node-7:8998", secret="k" * 16)
    assert elsewhere.advertise_host is None, "the route to the registry tells"
    assert Settings(host=host, advertise_host="10.0.0.7", secret="k" * 16).advertise_host == "10.0.0.7"


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


SECRET = "correct horse battery staple"


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    file = tmp_path / "secret"
    file.write_text(SECRET + "\n")
    file.chmod(0o600)
    return file


def refusal(**values: object) -> str:
    with pytest.raises(SettingsError) as caught:
        Settings(**values)
    assert caught.value.__cause__ is None
    return "".join(traceback.format_exception(caught.value))


def test_a_secret_comes_from_a_file_or_the_environment(monkeypatch: pytest.MonkeyPatch, secret_file: Path):
    assert Settings().shared_secret is None
    assert not Settings().has_secret
    assert Settings(secret_file=secret_file).shared_secret == SECRET
    monkeypatch.setenv("KVFERRY_SECRET", f" {SECRET} ")
    assert Settings().shared_secret == SECRET
    assert pickle.loads(pickle.dumps(Settings())).shared_secret == SECRET  # on its way to a spawned process


def test_a_secret_is_never_shown(secret_file: Path):
    for settings in (Settings(secret=SECRET), Settings(secret_file=secret_file)):
        assert SECRET not in f"{settings!r} {settings} {settings.model_dump()} {settings.model_dump_json()}"
    # Whatever else is wrong, and wherever the secret was put by mistake.
    for wrong in ({"workers": 0}, {"secrte": SECRET}, {"peer_timeout_s": 1}, {"host": "10.0.0.1", "secret": "x"}):
        assert SECRET not in refusal(**{"secret": SECRET, **wrong})
    assert SECRET not in refusal(secret=SECRET, secret_file=secret_file)
    assert "x7x7" not in refusal(secret="x7x7")
    assert "12345678901234567890" not in refusal(secret=12345678901234567890)


@pytest.mark.parametrize("secret", ["", "   ", "short", "x" * 15, "x" * 5000])
def test_a_secret_that_is_none_is_refused(tmp_path: Path, secret: str):
    assert "KVFERRY_SECRET" in refusal(secret=secret)
    file = tmp_path / "secret"
    file.write_text(secret)
    file.chmod(0o400)
    said = refusal(secret_file=file)
    assert str(file) in said
    assert "openssl rand -hex 32" in said


def test_a_file_that_others_may_read_is_refused(secret_file: Path):
    for mode in (0o640, 0o604, 0o660, 0o644):
        secret_file.chmod(mode)
        said = refusal(secret_file=secret_file)
        assert f"chmod 600 {secret_file}" in said
        assert SECRET not in said
    secret_file.chmod(0o400)
    assert Settings(secret_file=secret_file).has_secret


def test_a_file_that_is_not_there_or_no_file_is_refused(tmp_path: Path, secret_file: Path):
    assert "KVFERRY_SECRET_FILE" in refusal(secret_file=tmp_path / "missing")
    assert "No such file" in refusal(secret_file=tmp_path / "missing")
    assert "KVFERRY_SECRET_FILE" in refusal(secret_file=tmp_path)
    secret_file.write_bytes(b"\xff" * 32)
    assert "not text" in refusal(secret_file=secret_file)
    assert "leave one out" in refusal(secret_file=secret_file, secret=SECRET)


@pytest.mark.parametrize("host", ["10.0.0.1", "192.0.2.1", "node-7", "0.0.0.0", "::", "fd00::1"])
def test_nobody_listens_beyond_loopback_without_a_secret_unless_told_to(host: str):
    for where in ("host", "registry_host"):
        beyond = {where: host, "advertise_host": "10.0.0.1"}
        said = refusal(**beyond)
        assert f"{where} (KVFERRY_{where.upper()}) is {host!r}" in said
        for remedy in ("KVFERRY_SECRET_FILE", "KVFERRY_ALLOW_UNAUTHENTICATED"):
            assert remedy in said
        assert Settings(**beyond, secret=SECRET).has_secret
        assert not Settings(**beyond, allow_unauthenticated=True).has_secret


MISSING = ("secret_file (KVFERRY_SECRET_FILE)", "registry_url (KVFERRY_REGISTRY_URL)")
ADDRESS = "advertise_host (KVFERRY_ADVERTISE_HOST) is not set"


def test_a_cluster_that_lacks_several_settings_is_told_all_of_them_at_once(secret_file: Path):
    said = refusal(host="0.0.0.0")
    assert "host (KVFERRY_HOST) is '0.0.0.0', which asks for more" in said
    assert all(f"{name} is not set" in said for name in MISSING)
    assert ADDRESS in said

    with_secret = refusal(host="0.0.0.0", secret=SECRET)
    assert (MISSING[0] in with_secret, MISSING[1] in with_secret, ADDRESS in with_secret) == (False, True, True)
    with_address = refusal(host="10.0.0.5")
    assert (MISSING[0] in with_address, MISSING[1] in with_address, ADDRESS in with_address) == (True, True, False)
    with_registry = refusal(host="0.0.0.0", registry_url="http://node-7:8998")
    assert MISSING[0] in with_registry
    assert MISSING[1] not in with_registry
    assert ADDRESS not in with_registry

    secret_file.chmod(0o644)
    unreadable = refusal(host="0.0.0.0", secret_file=secret_file)
    assert f"chmod 600 {secret_file}" in unreadable
    assert ADDRESS in unreadable, "what is wrong with the secret hides nothing else"


def test_a_registry_for_others_needs_a_secret_and_nothing_of_a_rank():
    said = refusal(registry_host="0.0.0.0")
    assert MISSING[0] in said
    assert "registry_host (KVFERRY_REGISTRY_HOST) is '0.0.0.0'" in said
    assert "KVFERRY_REGISTRY_URL" not in said
    assert "KVFERRY_ADVERTISE_HOST" not in said


@pytest.mark.parametrize(
    ("variable", "hint"),
    [
        ("KVFERRY_WOKERS", "did you mean KVFERRY_WORKERS?"),
        ("kvferry_secret_fiel", "did you mean KVFERRY_SECRET_FILE?"),
        ("KVFERY_REGISTRY_URL", "did you mean KVFERRY_REGISTRY_URL?"),
        ("KVFERRY_SGLANG_REPLACE_NIXL", "did you mean KVFERRY_SGLANG_REPLACES_NIXL?"),
        ("KVFERRY_ZZZ", "docs/settings.md lists all"),
    ],
)
def test_a_variable_that_means_nothing_names_the_nearest(variable: str, hint: str):
    others = {"KVFERRY_WORKERS", "KVFERRY_SGLANG_REPLACES_NIXL", "PATH", "POD_NAME", "VLLM_HOST_IP", "HOSTNAME"}
    assert meaningless({variable, *others}, known_variables()) == {variable: hint}


def test_whoever_starts_with_a_misspelled_variable_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("KVFERRY_REGISTRY_PROT", "9000")
    layout = pool(Model(), Shape(), RankCoordinates()).layout
    with DecodeEndpoint(layout, transport=InProcessTransport(InProcessNetwork())):
        assert "KVFERRY_REGISTRY_PROT is set, and means nothing: did you mean KVFERRY_REGISTRY_PORT?" in caplog.text
    monkeypatch.setattr("sys.argv", ["kvferry", "--version"])
    with pytest.raises(SystemExit):
        main()
    assert "did you mean KVFERRY_REGISTRY_PORT?" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_needs_no_secret(host: str):
    assert is_loopback(host)
    assert Settings(host=host, registry_host=host).host == host


def test_nixl_stays_on_loopback_as_long_as_everything_else_does():
    assert Settings().is_on_loopback
    assert Settings(registry_url="http://localhost:1").is_on_loopback
    assert not Settings(registry_url="http://node-7:1").is_on_loopback
    assert not Settings(host="10.0.0.1", secret=SECRET).is_on_loopback
    assert "KVFERRY_NIXL_DEVICE" in refusal(nixl_device="eth0,TLS=all")


def test_a_registry_with_tls_is_found_by_https(tmp_path: Path):
    assert Settings(registry_tls_ca=tmp_path / "ca.pem").registry_address == "https://127.0.0.1:8998"
    both = {"registry_tls_certificate": tmp_path / "c.pem", "registry_tls_key": tmp_path / "k.pem"}
    assert Settings(**both).registry_address == "https://127.0.0.1:8998"
    for name in both:
        assert "belong together" in refusal(**{name: both[name]})
