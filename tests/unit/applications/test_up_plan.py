"""What `kvferry up` starts for each engine, and what it refuses before anything starts."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvferry.applications.up import supervision
from kvferry.applications.up.app import clients, ranks_of, servers
from kvferry.applications.up.engine_options import DeploymentRequest
from kvferry.applications.up.plan import Program, ports_needed, programs
from kvferry.applications.up.supervision import check_installed, configuration, router_is_front
from kvferry.cli.app import app
from kvferry.engines.sglang.plugin import NAME
from kvferry.errors import ConfigurationError

FIRST_PORT = 20_001


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def planned(request: DeploymentRequest, *, has_router: bool = False) -> dict[str, Program]:
    ports = range(FIRST_PORT, FIRST_PORT + ports_needed(request))
    return {each.name: each for each in programs(request, ports, has_router=has_router)}


def options(program: Program) -> dict[str, list[str]]:
    """The values of all options on a command line."""
    found: dict[str, list[str]] = {}
    for word in program.command:
        if word.startswith("--"):
            found.setdefault(word, [])
            name = word
        elif found:
            found[name].append(word)
    return found


def port_of(program: Program) -> str:
    return options(program)["--port"][0]


# ---- what is started ------------------------------------------------------------------------------------------------


def test_sglangs_servers_find_one_another_and_nobody_else_finds_them(model: Path):
    made = planned(DeploymentRequest(model=model, engine="sglang", prefill=2, prefill_tp=2, decode=1, front="kvferry"))
    assert [*made] == ["prefill-0", "prefill-1", "decode-0", "front"]
    for name in ("prefill-0", "prefill-1", "decode-0"):
        command = made[name].command
        assert command[:3] == (sys.executable, "-m", "sglang.launch_server")
        given = options(made[name])
        assert given["--model-path"] == [str(model)]
        assert given["--host"] == ["127.0.0.1"]
        assert given["--disaggregation-mode"] == [name.partition("-")[0]]
        assert given["--disaggregation-transfer-backend"] == [NAME]
        assert given["--tp-size"] == ["2" if name.startswith("prefill") else "1"]
        assert made[name].health_url == f"http://127.0.0.1:{port_of(made[name])}/health"
        assert made[name].environment["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "0"
    bootstrap = [options(made[f"prefill-{number}"])["--disaggregation-bootstrap-port"][0] for number in range(2)]
    assert "--disaggregation-bootstrap-port" not in options(made["decode-0"])
    # Fixed, so that a server that is started again is found where decode servers remember it.
    registries = [made[f"prefill-{number}"].environment["KVFERRY_REGISTRY_PORT"] for number in range(2)]
    assert "KVFERRY_REGISTRY_PORT" not in made["decode-0"].environment
    ports = [*bootstrap, *registries, *(port_of(each) for each in made.values())]
    assert len(set(ports)) == len(ports)

    front = options(made["front"])
    assert front["--engine"] == ["sglang"]
    assert front["--bootstrap-port"] == bootstrap
    told = servers(front["--prefill"], [int(port) for port in front["--bootstrap-port"]])
    assert [(each.engine, each.url, each.bootstrap_port) for each in told] == [
        (name, f"http://127.0.0.1:{port_of(made[name])}", int(port))
        for name, port in zip(("prefill-0", "prefill-1"), bootstrap, strict=True)
    ]
    assert front["--decode"] == [f"decode-0=http://127.0.0.1:{port_of(made['decode-0'])}"]
    assert front["--registry"] == [f"http://127.0.0.1:{port}" for port in registries]
    assert made["front"].health_url.endswith(":8000/ready")


def test_sglangs_router_is_told_of_bootstrap_ports_and_looks_often(model: Path):
    request = DeploymentRequest(model=model, engine="sglang", prefill=1, decode=2, port=9000)
    made = planned(request, has_router=True)
    assert [*made] == ["prefill-0", "decode-0", "decode-1", "router"]
    command = " ".join(made["router"].command)
    assert "sglang_router.launch_router --pd-disaggregation --host 127.0.0.1 --port 9000" in command
    (bootstrap,) = options(made["prefill-0"])["--disaggregation-bootstrap-port"]
    assert f"--prefill http://127.0.0.1:{port_of(made['prefill-0'])} {bootstrap} " in command
    for name in ("decode-0", "decode-1"):
        assert f"--decode http://127.0.0.1:{port_of(made[name])} " in command
    assert options(made["router"])["--health-check-interval-secs"] == ["1"]
    assert made["router"].health_url == "http://127.0.0.1:9000/readiness"
    ports = [bootstrap, *options(made["router"])["--prometheus-port"], *(port_of(each) for each in made.values())]
    assert len(set(ports)) == len(ports)


def test_vllms_servers_share_a_registry(model: Path):
    made = planned(DeploymentRequest(model=model, decode=2, decode_tp=4))
    assert [*made] == ["registry", "prefill-0", "decode-0", "decode-1", "front"]
    for name, role in (("prefill-0", "kv_producer"), ("decode-0", "kv_consumer"), ("decode-1", "kv_consumer")):
        given = options(made[name])
        transfer = json.loads(given["--kv-transfer-config"][0])
        assert (transfer["kv_role"], transfer["engine_id"]) == (role, name)
        registry_url = transfer["kv_connector_extra_config"]["registry_url"]
        assert f"{registry_url}/health" == made["registry"].health_url
        assert given["--tensor-parallel-size"] == ["4" if name.startswith("decode") else "1"]
    front = options(made["front"])
    assert front["--engine"] == ["vllm"]
    assert "--bootstrap-port" not in front
    assert front["--registry"] == [registry_url], "it says which of them drain"


def test_a_registry_of_the_users_is_what_sglangs_front_asks(model: Path):
    request = DeploymentRequest(model=model, engine="sglang", prefill=2, front="kvferry")
    ports = range(FIRST_PORT, FIRST_PORT + ports_needed(request))
    *_, front = programs(request, ports, registry_url="http://registry:8998")
    assert options(front)["--registry"] == ["http://registry:8998"]


def test_vllms_servers_drain_when_they_are_told_to_end_for_as_long_as_the_user_says(model: Path):
    """Without the option vLLM kills its engine at once. Of two the last counts."""
    ours = options(planned(DeploymentRequest(model=model))["prefill-0"])["--shutdown-timeout"]
    (waited,) = {
        each["stopwaitsecs"]
        for each in configuration([Program("one", ("x",), "")], model).values()
        if "command" in each
    }
    assert 0 < int(*ours) < int(waited)
    given = planned(DeploymentRequest(model=model, engine_options=["--shutdown-timeout", "60"]))
    for name in ("prefill-0", "decode-0"):
        assert options(given[name])["--shutdown-timeout"] == [*ours, "60"]


def test_prefill_servers_have_a_registry_each_or_one_for_all(monkeypatch: pytest.MonkeyPatch):
    def asked(given: list[str] | None, count: int) -> list[str]:
        with ExitStack() as opened:
            made = clients(given, count, opened)
            return [server.registry.url for server in servers(["a=http://a"] * count, None, made) if server.registry]

    one, two = "http://127.0.0.1:1", "http://127.0.0.1:2"
    assert asked([one, two], 2) == [one, two]
    assert asked([one], 2) == [one, one]
    assert asked(None, 2) == []
    monkeypatch.setenv("KVFERRY_REGISTRY_URL", two)
    assert asked(None, 1) == [two]
    assert asked([one], 1) == [one]
    with pytest.raises(ConfigurationError, match=r"^--registry: 2 for 3 prefill servers; name one, or one for each$"):
        asked([one, two], 3)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_options_for_one_side_come_after_those_for_both(model: Path, engine: str):
    made = planned(
        DeploymentRequest(
            model=model,
            engine=engine,
            prefill_options="--size 1 --json '{\"a b\": 1}'",
            decode_options="--size=2",
            engine_options=["--size", "0", "--common"],
        )
    )
    assert made["prefill-0"].command[-7:] == ("--size", "0", "--common", "--size", "1", "--json", '{"a b": 1}')
    assert made["decode-0"].command[-4:] == ("--size", "0", "--common", "--size=2")
    assert "--size" not in options([*made.values()][-1]), "the front is no server"


def test_the_supervisor_is_told_of_a_programs_variables(tmp_path: Path):
    from supervisor.datatypes import dict_of_key_value_pairs

    bare, equipped = (
        Program("one", ("x",), "http://a"),
        Program("two", ("x",), "http://a", {"ONE": "a b,c", "TWO": "0"}),
    )
    config = configuration([bare, equipped], tmp_path)
    assert dict_of_key_value_pairs(config["program:one"]["environment"]) == {}
    assert dict_of_key_value_pairs(config["program:two"]["environment"]) == {"ONE": "a b,c", "TWO": "0"}


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"engine": "tgi"}, "--engine 'tgi': it is one of vllm, sglang"),
        ({"front": "nginx"}, "--front 'nginx': it is one of auto, kvferry, sglang-router"),
        (
            {"front": "sglang-router"},
            "--front sglang-router with --engine vllm: it speaks SGLang's protocol; leave --front away",
        ),
        ({"decode": 0}, "--decode 0: it must be at least 1"),
        (
            {"prefill_options": "--max-num-seqs '8"},
            '--prefill-options "--max-num-seqs \'8": No closing quotation; quote it as for a shell',
        ),
        (
            {"decode_options": "8"},
            "--decode-options '8': '8' is no option of the engine's: write '--name value', in quotes",
        ),
        (
            {"decode_options": "--port 1"},
            "--port: not among the engine's options: --port of kvferry up is where the front answers; servers get free "
            "ones",
        ),
        (
            {"engine_options": ["--tensor_parallel_size=2"]},
            "--tensor_parallel_size=2: not among the engine's options: --prefill-tp and --decode-tp say how many",
        ),
        (
            {"engine_options": ["-tp", "2"]},
            "-tp: not among the engine's options: --prefill-tp and --decode-tp say how many",
        ),
        (
            {"engine_options": ["--kv-transfer-config.kv_role", "kv_both"]},
            "--kv-transfer-config.kv_role: not among the engine's options: kvferry up sets it for both sides",
        ),
        (
            {"engine": "sglang", "prefill_options": "--disaggregation-transfer-backend nixl"},
            "--disaggregation-transfer-backend: not among the engine's options: kvferry up sets it for both sides",
        ),
        (
            {"engine": "sglang", "prefill_options": "--tp 2"},
            "--tp: not among the engine's options: --prefill-tp and --decode-tp say how many",
        ),
    ],
)
def test_what_cannot_be_started_is_refused_with_the_remedy(model: Path, given: dict[str, Any], said: str):
    with pytest.raises(ConfigurationError) as refused:
        DeploymentRequest(model=model, **given)
    assert str(refused.value) == said


def test_names_are_taken_in_upper_case_too(model: Path):
    assert [*planned(DeploymentRequest(model=model, engine="SGLang"))][-1] == "front"


def test_an_engine_that_is_not_installed_is_said(model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(supervision, "find_spec", lambda _: None)
    for engine, name in (("vllm", "vLLM"), ("sglang", "SGLang")):
        with pytest.raises(ConfigurationError, match=rf"^--engine {engine}: {name} is not installed .* docs/{engine}"):
            check_installed(DeploymentRequest(model=model, engine=engine))


def test_a_plug_in_that_sglang_would_not_load_is_said(model: Path, monkeypatch: pytest.MonkeyPatch):
    """SGLang would start without it, and refuse the backend's name as one that it does not know."""
    request = DeploymentRequest(model=model, engine="sglang")
    monkeypatch.setattr(supervision, "find_spec", lambda _: object())
    check_installed(request)
    monkeypatch.setenv("SGLANG_PLUGINS", "another, kvferry")
    check_installed(request)
    monkeypatch.setenv("SGLANG_PLUGINS", "another")
    with pytest.raises(ConfigurationError, match=r"SGLANG_PLUGINS is 'another'.* add kvferry to it, or unset it"):
        check_installed(request)
    monkeypatch.setattr(supervision, "entry_points", lambda group: ())
    with pytest.raises(ConfigurationError, match=r"not installed here; install it as docs/sglang\.md says"):
        check_installed(request)
    check_installed(DeploymentRequest(model=model))  # vLLM is told our module's name


@pytest.mark.parametrize(
    ("engine", "front", "is_there", "takes_router"),
    [
        ("sglang", "auto", True, True),
        ("sglang", "auto", False, False),
        ("sglang", "kvferry", True, False),
        ("sglang", "sglang-router", True, True),
        ("vllm", "auto", True, False),
    ],
)
def test_the_router_is_the_front_where_it_is_installed(
    model: Path, monkeypatch: pytest.MonkeyPatch, engine: str, front: str, is_there: bool, takes_router: bool
):
    monkeypatch.setattr(supervision, "find_spec", lambda _: object() if is_there else None)
    assert router_is_front(DeploymentRequest(model=model, engine=engine, front=front)) is takes_router


def test_a_router_that_is_wanted_and_not_installed_is_said(model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(supervision, "find_spec", lambda _: None)
    with pytest.raises(
        ConfigurationError, match=r"^--front sglang-router: it is not installed .* or leave --front away"
    ):
        router_is_front(DeploymentRequest(model=model, engine="sglang", front="sglang-router"))


# ---- what is typed --------------------------------------------------------------------------------------------------


def test_what_is_typed_comes_to_the_command_lines(model: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[DeploymentRequest] = []
    monkeypatch.setattr(supervision, "run", lambda request, **_: asked.append(request))
    typed = ["up", "--model", str(model), "--prefill-options", "--max-num-seqs 8", "--", "--max-model-len", "4096"]
    result = CliRunner().invoke(app, typed)
    assert result.exit_code == 0, result.output
    assert asked == [
        DeploymentRequest(model=model, prefill_options="--max-num-seqs 8", engine_options=["--max-model-len", "4096"])
    ]


def test_the_help_has_all_of_it():
    shown = CliRunner().invoke(app, ["up", "--help"]).output
    for said in ("vllm or sglang", "--prefill-options", "--decode-options", "--front", "sglang-router"):
        assert said in shown


def test_the_ranks_of_each_decode_server_are_asked_where_they_say():
    read = ranks_of(["decode-0:9470", "decode-1:9470-9471"], 2)
    made = servers(["a=http://a", "b=http://b"], ranks=read)
    assert [server.ranks for server in made] == [["decode-0:9470"], ["decode-1:9470", "decode-1:9471"]]
    assert ranks_of([], 2) == []
    with pytest.raises(ConfigurationError, match=r"^--decode-observe: 1 for 2 decode servers; name one for each$"):
        ranks_of(["decode-0:9470"], 2)
    with pytest.raises(ConfigurationError, match="'nowhere' is no address of endpoints"):
        ranks_of(["nowhere"], 1)
