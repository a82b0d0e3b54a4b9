"""`kvferry doctor --for`: what a deployment lacks, and the lines to paste."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvferry.applications.doctor import deployment, machine
from kvferry.applications.doctor import run as doctor
from kvferry.applications.up.engine_options import Engine
from kvferry.cli.app import app
from kvferry.engines.deployment import Deployment, Remark, option
from kvferry.engines.sglang.deployment import SglangDeployment
from kvferry.engines.vllm.deployment import VllmDeployment
from kvferry.errors import EngineContractError
from kvferry.findings import Finding, Severity
from kvferry.loggers import logger_of
from kvferry.settings import Settings

VLLM, SGLANG = VllmDeployment(), SglangDeployment()
OURS = {"kv_connector": "KVFerryConnector", "kv_connector_module_path": "kvferry.engines.vllm"}


def remarks(given: list[str] | str, variables: dict[str, str] | None = None, *, of: Deployment = VLLM) -> list[Remark]:
    arguments = shlex.split(given) if isinstance(given, str) else given
    return list(of.options(arguments, variables or {}))


def serving(transfer: object) -> list[str]:
    option = ["--kv-transfer-config", json.dumps(transfer)]
    return ["/opt/vllm/bin/python", "/opt/vllm/bin/vllm", "serve", "m", *option, "--shutdown-timeout", "60"]


def test_an_options_value_is_found_however_it_is_written():
    line = shlex.split("server --host a --tp-size=2 --host=b --kv_role x --last")
    found = [option(line, name) for name in ("--host", "--tp-size", "--kv-role", "--last", "--port")]
    assert found == ["b", "2", "x", "", None]


@pytest.mark.parametrize(
    ("line", "is_vllm", "is_sglang"),
    [
        ("/usr/bin/python3 /usr/local/bin/vllm serve m", True, False),
        ("python -m vllm.entrypoints.openai.api_server --model m", True, False),
        ("python -m sglang.launch_server --model-path m", False, True),
        ("/usr/local/bin/sglang serve m", False, True),
        ("bash -c 'vllm serve m'", False, False),
        ("python -m kvferry doctor --for vllm", False, False),
        ("", False, False),
    ],
)
def test_servers_are_told_from_other_processes(line: str, is_vllm: bool, is_sglang: bool):
    arguments = shlex.split(line)
    assert (VLLM.is_server(arguments), SGLANG.is_server(arguments)) == (is_vllm, is_sglang)


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer", "kv_both"])
def test_a_server_of_vllm_that_has_everything_lacks_nothing(role: str):
    for transfer in (
        {**OURS, "kv_role": role},
        {**OURS, "kv_role": role, "kv_connector": "NixlConnector"},
        {
            "kv_connector": "MultiConnector",
            "kv_connector_extra_config": {"connectors": [{"kv_connector": "Other"}, {**OURS, "kv_role": role}]},
        },
    ):
        (good,) = remarks(serving(transfer))
        assert (good.line, good.remedy) == ("", "")
        assert role in good.what
    name = "--kv-transfer-config"
    parts = [f"{name}.{key}={value}" for key, value in {**OURS, "kv_role": role}.items()]
    (good,) = remarks(["vllm", "serve", "m", *parts, "--shutdown-timeout=9"])
    assert role in good.what


@pytest.mark.parametrize(
    ("transfer", "said"),
    [
        ({"kv_connector": "NixlConnector", "kv_role": "kv_both"}, "kv_connector is 'NixlConnector'"),
        ({"kv_connector": "KVFerryConnector", "kv_role": "kv_both"}, "kv_connector_module_path None"),
        ({"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": []}}, "that is not kvferry"),
        (OURS, "kv_role is None"),
        ({**OURS, "kv_role": "producer"}, "kv_role is 'producer'"),
        ({**OURS, "kv_role": "kv_both", "kv_connector_extra_config": {"wokers": 3}}, "did you mean workers?"),
        ([], "no JSON object"),
    ],
)
def test_what_is_wrong_with_an_option_of_vllm_is_named(transfer: object, said: str):
    wrong = [each for each in remarks(serving(transfer)) if each.is_wrong]
    assert said in " ".join(each.what for each in wrong)
    assert all(each.remedy for each in wrong)


def test_a_server_of_vllm_without_options_gets_the_lines_that_it_lacks():
    wrong, look = remarks("vllm serve m")
    assert (wrong.is_wrong, look.is_wrong, look.line) == (True, False, "--shutdown-timeout 60")
    assert "transfers no cache" in wrong.what
    (good,) = remarks(["vllm", "serve", "m", *shlex.split(wrong.line), *shlex.split(look.line)])
    assert good.line == "", "pasted, the lines lack nothing"
    in_file = remarks("vllm serve m --config serve.yaml --shutdown-timeout 9")
    assert [each.is_wrong for each in in_file] == [False], "what is in the file is not known"
    assert "'{' is" not in remarks(["vllm", "serve", "--kv-transfer-config", "{"])[0].what
    assert "no JSON object" in remarks(["vllm", "serve", "--kv-transfer-config", "{"])[0].what


def test_what_a_server_of_sglang_lacks():
    ready = "python -m sglang.launch_server --disaggregation-mode prefill --disaggregation-transfer-backend "
    assert [each.line for each in remarks(f"{ready} kvferry", of=SGLANG)] == [""]
    assert [each.line for each in remarks(f"{ready} nixl", {"KVFERRY_SGLANG_REPLACES_NIXL": "1"}, of=SGLANG)] == [""]
    (stock,) = remarks(f"{ready} nixl", of=SGLANG)
    assert "KVFERRY_SGLANG_REPLACES_NIXL=1" in stock.remedy
    mode, backend = remarks("python -m sglang.launch_server", of=SGLANG)
    assert (mode.is_wrong, backend.is_wrong) == (True, True)
    assert remarks(f"x {mode.line} {backend.line}", of=SGLANG)[0].line == ""
    cluster = {"KVFERRY_HOST": "10.0.0.5"}
    assert [each.line for each in remarks(f"{ready} kvferry", cluster, of=SGLANG)] == ["", "--host 0.0.0.0"]
    assert [each.line for each in remarks(f"{ready} kvferry --host 0.0.0.0", cluster, of=SGLANG)] == [""]


def test_sglang_finds_the_plug_in_unless_it_is_told_to_load_others():
    (found,) = SGLANG.installed({})
    assert "kvferry.engines.sglang.plugin:register" in found.what
    assert list(SGLANG.installed({"SGLANG_PLUGINS": "other, kvferry"})) == [found]
    _, hidden = SGLANG.installed({"SGLANG_PLUGINS": "other"})
    assert hidden.line == "export SGLANG_PLUGINS=other,kvferry"


def test_a_plug_in_that_no_environment_announces_is_wrong(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvferry.engines.sglang.deployment.entry_points", lambda group: [])
    (found,) = SGLANG.installed({})
    assert found.is_wrong
    assert "SGLang will not find it" in found.what


def process(proc: Path, number: int, *arguments: str, environ: Mapping[str, str] | None = None) -> None:
    (proc / str(number)).mkdir(parents=True)
    shown = {"cmdline": arguments}
    if environ is not None:
        shown["environ"] = tuple(f"{name}={value}" for name, value in environ.items())
    for name, texts in shown.items():
        (proc / str(number) / name).write_bytes(b"".join(each.encode() + b"\0" for each in texts))


def test_the_servers_of_this_machine_are_looked_at(tmp_path: Path):
    process(tmp_path, 1, "init")
    process(tmp_path, 71, "vllm", "serve", "m", environ={})
    process(tmp_path, 72, *serving({**OURS, "kv_role": "kv_producer"}), environ={"HOME": "/", "KVFERRY_WORKERS": "=3"})
    (tmp_path / "73").mkdir()  # has ended meanwhile
    found = [
        each
        for each in deployment.whole(VLLM, {"KVFERRY_WORKERS": "=3"}, tmp_path)
        if each.about.startswith("vllm serve")
    ]
    assert [(each.about, each.severity.name) for each in found] == [
        ("vllm serve, 71", "ERROR"),
        ("vllm serve, 71", "WARNING"),
        ("vllm serve, 71", "WARNING"),
        ("vllm serve, 72", "GOOD"),
    ]
    assert "other values than this doctor: KVFERRY_WORKERS" in found[2].what
    (nobody,) = [each for each in deployment.whole(SGLANG, {}, tmp_path) if each.about == "sglang.launch_server"]
    assert nobody.lines == ("--disaggregation-mode prefill --disaggregation-transfer-backend kvferry",)


def test_a_server_is_judged_by_its_own_variables_where_they_are_shown(tmp_path: Path):
    line = shlex.split(
        f"python -m {SGLANG.command} --disaggregation-mode decode --disaggregation-transfer-backend nixl"
    )
    process(tmp_path, 1, *line, environ={"KVFERRY_SGLANG_REPLACES_NIXL": "1"})
    process(tmp_path, 2, *line)
    found = [each for each in deployment.whole(SGLANG, {}, tmp_path) if each.about.startswith(SGLANG.command)]
    assert [(each.about[-1], each.severity.name) for each in found] == [
        ("1", "GOOD"),
        ("1", "WARNING"),
        ("2", "ERROR"),
        ("2", "WARNING"),
    ]
    assert "KVFERRY_SGLANG_REPLACES_NIXL" in found[1].what
    assert "not shown to this user" in found[3].what


def exported(found: list[Finding]) -> dict[str, str]:
    lines = [line for each in found for line in each.lines]
    return dict(re.findall(r"^export (\w+)=(\S+)$", "\n".join(lines), flags=re.MULTILINE))


@pytest.mark.parametrize("of", [VLLM, SGLANG], ids=["vllm", "sglang"])
def test_the_environment_of_ranks_lacks_nothing_once_its_lines_are_pasted(
    of: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    alone = list(deployment.environment_of_ranks(of, Settings(), ()))
    assert [each.severity for each in alone] == [Severity.WARNING]
    lines = exported(alone)
    assert lines.keys() == {"KVFERRY_HOST", "KVFERRY_SECRET_FILE"} | (
        {"KVFERRY_REGISTRY_URL"} if of.needs_registry else set()
    )
    secret = tmp_path / "secret"
    secret.write_text("k" * 32)
    secret.chmod(0o600)
    for name, value in {**lines, "KVFERRY_SECRET_FILE": str(secret)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("kvferry.applications.doctor.deployment.default_address", lambda: "10.0.0.5")
    monkeypatch.setenv("KVFERRY_HOST", "10.0.0.5")
    if of.needs_registry:
        monkeypatch.setenv("KVFERRY_REGISTRY_URL", "http://10.0.0.5:8998")
    (after,) = deployment.environment_of_ranks(of, Settings(), ())
    assert after.severity is Severity.GOOD, after


def test_settings_that_are_refused_are_told_the_lines_of_all_that_they_lack(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("KVFERRY_HOST", "0.0.0.0")
    monkeypatch.setattr(machine, "installed", lambda: iter(()))  # imports torch
    worst = doctor.run(
        (), peer=None, moves_bytes=False, engine=Engine.VLLM, wants_json=False, console=Console(width=40)
    )
    said = capsys.readouterr().out
    assert worst is Severity.ERROR
    _, lines = said.split("\n# missing: environment\n")
    found = exported([Finding(about="", severity=Severity.ERROR, what="", lines=tuple(lines.splitlines()))])
    assert found.keys() == {"KVFERRY_SECRET_FILE", "KVFERRY_REGISTRY_URL", "KVFERRY_ADVERTISE_HOST"}
    registry, begun = said.index("kvferry registry --host"), said.index("openssl rand")
    assert begun < said.index("export ") < said.rindex("export ") < registry, "as a shell needs them"
    assert f"\n{VLLM.example}\n" in said, "however narrow the terminal: lines are whole"


def test_the_command_takes_the_engines_name(monkeypatch: pytest.MonkeyPatch):
    asked: list[object] = []
    monkeypatch.setattr(doctor, "run", lambda *_, engine, **__: asked.append(engine))
    for name in ("vllm", "SGLang"):
        assert CliRunner().invoke(app, ["doctor", "--for", name]).exit_code == 0
    assert asked == [Engine.VLLM, Engine.SGLANG]
    wrong = CliRunner().invoke(app, ["doctor", "--for", "vlm"]).exception
    assert str(wrong) == "--for 'vlm': it is one of vllm, sglang"


def differs() -> None:
    raise EngineContractError("Scheduler.step is gone")


def warns() -> None:
    logger_of("kvferry.engines").warning("9.9 is not among %s", "1.0")


def is_as_it_was() -> None:
    print("what engines print as they are imported")  # noqa: T201


@pytest.mark.parametrize(
    ("check", "found"),
    [
        (is_as_it_was, []),
        (warns, [("warning", "9.9 is not among 1.0")]),
        (differs, [("error", "Scheduler.step is gone")]),
    ],
)
def test_the_engines_version_is_held_against_the_contract(
    check: Callable[[], None],
    found: list[tuple[str, str]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("sys.argv", ["fits", f"{__name__}:{check.__name__}"])
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or ModuleType(__name__))
    monkeypatch.setattr(sys.modules[__name__], check.__name__, check, raising=False)
    deployment.main()
    last = capsys.readouterr().out.splitlines()[-1]
    assert [(each["severity"], each["what"]) for each in json.loads(last)] == [
        ({"warning": 1, "error": 2}[severity], what) for severity, what in found
    ]


@pytest.mark.full
def test_the_engine_is_looked_at_by_a_process_of_its_own():
    (good,) = deployment.contract("sys:getrecursionlimit", "Engine 1", os.environ)
    assert (good.severity, good.what) == (Severity.GOOD, "Engine 1 has all that the plug-in builds on")


def test_an_engine_that_cannot_be_imported_is_wrong():
    (wrong,) = deployment.contract("engine_that_is_not_there:check", "Engine 1", os.environ)
    assert wrong.severity is Severity.ERROR
    assert "No module named 'engine_that_is_not_there'" in wrong.what
