"""The manifests in deploy/kubernetes are what Kubernetes knows, fit each other, and fit kvferry's settings."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel
from tests.support.clones import ROOT
from tests.support.manifests import (
    COMPONENTS,
    MANIFESTS,
    OVERLAYS,
    Manifest,
    Pod,
    command,
    environment,
    expanded,
    is_allowed,
    matches,
    of_kind,
    pods,
    rendered,
)

from kvferry import Settings
from kvferry.settings import all_fields

ADDRESS = "10.42.0.7"
SECRETS = {"kvferry": {"secret": "x" * 32}, "kvferry-etcd": {"password": "of etcd"}}
"""Those that docs/kubernetes.md has users make."""

WHOLE = [(overlay, ()) for overlay in OVERLAYS]
EVERYTHING = [*WHOLE, *((overlay, COMPONENTS) for overlay in OVERLAYS[:2])]
NO_SCHEMAS = "Kubernetes' schemas are not installed here: pip install '.[kubernetes]'"
PROBES = ("startupProbe", "livenessProbe", "readinessProbe")


@pytest.fixture(params=EVERYTHING, ids=lambda each: "+".join((each[0], *each[1])))
def manifests(request: pytest.FixtureRequest) -> tuple[Manifest, ...]:
    overlay, components = request.param
    return rendered(overlay, *components)


@pytest.fixture(params=OVERLAYS[:2])
def engine(request: pytest.FixtureRequest) -> tuple[Manifest, ...]:
    return rendered(request.param)


def ranks(manifests: tuple[Manifest, ...]) -> list[Pod]:
    """Pods of engines."""
    return [pod for pod in pods(manifests) if pod.workload["kind"] == "StatefulSet"]


def variables(pod: Pod, manifests: tuple[Manifest, ...]) -> dict[str, str]:
    return environment(pod, manifests, ADDRESS, SECRETS)


# ---- the schemas -------------------------------------------------------------------------------------------------


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", alias_generator=to_camel)


class _Expression(_Strict):
    key: str
    operator: str
    values: list[str]


class _Selector(_Strict):
    match_labels: dict[str, str] = {}
    match_expressions: list[_Expression] = []


class _Endpoint(_Strict):
    port: str
    path: str
    interval: str


class _PodMonitorSpec(_Strict):
    selector: _Selector
    pod_target_labels: list[str]
    pod_metrics_endpoints: list[_Endpoint]


class _PodMonitor(_Strict):
    """Written by hand: the fields of a PodMonitor that are used here, with the types that its definition gives them."""

    api_version: str
    kind: str
    metadata: dict[str, Any]
    spec: _PodMonitorSpec


@pytest.mark.full  # a second for each
@pytest.mark.parametrize("version", ["1.29", "1.37"])
def test_kubernetes_knows_every_field(manifests: tuple[Manifest, ...], version: str):
    validator = pytest.importorskip("kubernetes_validate", reason=NO_SCHEMAS)
    for manifest in manifests:
        if manifest["kind"] == "PodMonitor":
            assert manifest["apiVersion"] == "monitoring.coreos.com/v1"
            _PodMonitor.model_validate(manifest)
        else:
            validator.validate(manifest, version, strict=True)


@pytest.mark.full
def test_a_field_that_kubernetes_does_not_know_is_found():
    validator = pytest.importorskip("kubernetes_validate", reason=NO_SCHEMAS)
    (policy,) = itertools.islice(of_kind(rendered("vllm"), "NetworkPolicy"), 1)
    wrong = json.loads(json.dumps(policy))
    wrong["spec"]["podSelectors"] = wrong["spec"]["podSelector"]
    with pytest.raises(validator.ValidationError, match="podSelectors"):
        validator.validate(wrong, "1.37", strict=True)


# ---- what names what ---------------------------------------------------------------------------------------------


def test_what_is_named_is_there(manifests: tuple[Manifest, ...]):
    def names(kind: str) -> set[str]:
        return {each["metadata"]["name"] for each in of_kind(manifests, kind)}

    for pod in pods(manifests):
        assert not pod.subdomain or pod.subdomain in names("Service")
        assert pod.spec.get("serviceAccountName", "default") in names("ServiceAccount") | {"default"}
        volumes = {each["name"]: each for each in pod.spec.get("volumes", ())}
        for mount in pod.container.get("volumeMounts", ()):
            volume = volumes.pop(mount["name"])
            assert "configMap" not in volume or volume["configMap"]["name"] in names("ConfigMap")
        assert not volumes, "each is mounted"
        variables(pod, manifests)  # raises for a Secret or ConfigMap, or a key, that is nowhere


def test_every_selector_chooses_somebody(manifests: tuple[Manifest, ...]):
    everybody = pods(manifests)
    for manifest in manifests:
        spec = manifest.get("spec", {})
        if manifest["kind"] == "Service":
            selector = {"matchLabels": spec["selector"]}
        elif manifest["kind"] in ("Deployment", "StatefulSet", "PodDisruptionBudget", "PodMonitor"):
            selector = spec["selector"]
        elif manifest["kind"] == "NetworkPolicy":
            selector = spec["podSelector"]
        else:
            continue
        chosen = [pod for pod in everybody if matches(selector, pod.labels)]
        assert chosen, manifest["metadata"]["name"]
        for port in _named_ports(manifest):
            assert any(pod.port(port) for pod in chosen), f"{manifest['kind']} {manifest['metadata']['name']}: {port}"


def _named_ports(manifest: Manifest) -> Iterator[str]:
    if manifest["kind"] == "Service":
        yield from (each["targetPort"] for each in manifest["spec"]["ports"])
    elif manifest["kind"] == "PodMonitor":
        yield from (each["port"] for each in manifest["spec"]["podMetricsEndpoints"])
    elif manifest["kind"] == "NetworkPolicy":
        for rule in manifest["spec"].get("ingress", ()):
            yield from (each["port"] for each in rule["ports"] if isinstance(each["port"], str))


def test_each_budget_and_role_is_for_its_own(manifests: tuple[Manifest, ...]):
    budgets = {each["metadata"]["name"] for each in of_kind(manifests, "PodDisruptionBudget")}
    assert budgets == {"prefill", "decode", "gateway"}
    for binding in of_kind(manifests, "RoleBinding", "ClusterRoleBinding"):
        (subject,) = binding["subjects"]
        assert (subject["name"], subject["namespace"]) == ("kvferry-decode", "kvferry")
    rules = [rule for role in of_kind(manifests, "Role", "ClusterRole") for rule in role["rules"]]
    assert {(resource, verb) for rule in rules for resource in rule["resources"] for verb in rule["verbs"]} == {
        ("pods", "get"),
        ("nodes", "get"),
    }
    for pod in pods(manifests):
        has_token = pod.spec.get("automountServiceAccountToken", True)
        assert has_token == (pod.spec.get("serviceAccountName") == "kvferry-decode")


# ---- what the containers are given -------------------------------------------------------------------------------


def test_every_variable_of_ours_is_a_setting_and_all_of_them_are_possible(
    manifests: tuple[Manifest, ...], monkeypatch: pytest.MonkeyPatch
):
    known = {f"KVFERRY_{name.upper()}" for name in all_fields()}
    for name in [each for each in os.environ if each.startswith("KVFERRY_")]:
        monkeypatch.delenv(name)
    for pod in pods(manifests):
        given = {name: value for name, value in variables(pod, manifests).items() if name.startswith("KVFERRY_")}
        assert set(given) <= known
        with monkeypatch.context() as patched:
            for name, value in given.items():
                patched.setenv(name, value)
            settings = Settings()
        assert settings.has_secret == bool(given), pod.name
        if pod in ranks(manifests):
            assert settings.host == ADDRESS
            assert not settings.is_on_loopback, "else its bytes would go through lo"


@pytest.mark.parametrize("components", [(), COMPONENTS])
def test_kvferrys_front_asks_the_registry_of_the_ranks(components: tuple[str, ...]):
    manifests = rendered("vllm", *components)
    (front,) = (pod for pod in pods(manifests) if pod.workload["metadata"]["name"] == "gateway")
    names = ("KVFERRY_REGISTRY_URL", "KVFERRY_SECRET", "KVFERRY_ETCD_USER", "KVFERRY_ETCD_PASSWORD")
    of_front = variables(front, manifests)
    for pod in ranks(manifests):
        of_rank = variables(pod, manifests)
        assert [of_front.get(name) for name in names] == [of_rank.get(name) for name in names]
    router = next(pod for pod in pods(rendered("sglang", *components)) if pod.workload["metadata"]["name"] == "gateway")
    assert set(names).isdisjoint(variables(router, rendered("sglang", *components))), "it asks none"


def test_every_reference_in_a_command_is_to_a_variable(manifests: tuple[Manifest, ...]):
    for pod in pods(manifests):
        given = variables(pod, manifests)
        assert "$(" not in "".join((*command(pod.container, given), *given.values()))
        assert pod.spec["enableServiceLinks"] is False, "a Service's variables would be taken for settings"


def test_references_are_expanded_as_the_kubelet_does():
    assert expanded("$(A)-$$(A)-$(B)-$A", {"A": "1"}) == "1-$(A)-$(B)-$A"


def test_an_engine_is_called_as_its_pod_wherever_it_is_named():
    manifests = rendered("vllm")
    for pod in ranks(manifests):
        (given,) = (each for each in command(pod.container, variables(pod, manifests)) if "kv-transfer" in each)
        transfer = json.loads(given.partition("=")[2])
        side = pod.labels["app.kubernetes.io/component"]
        assert (transfer["engine_id"], transfer["kv_role"]) == (
            pod.name,
            {"prefill": "kv_producer", "decode": "kv_consumer"}[side],
        )
        (gateway,) = (each for each in pods(manifests) if each.workload["metadata"]["name"] == "gateway")
        assert f"--{side}={pod.name}=http://{pod.name}.{pod.subdomain}:{pod.port('http')}" in gateway.container["args"]


def test_the_router_knows_every_server_and_where_caches_are_asked_for():
    manifests = rendered("sglang")
    prefill = next(pod for pod in ranks(manifests) if pod.name == "prefill-0")
    (gateway,) = (each for each in pods(manifests) if each.workload["metadata"]["name"] == "gateway")
    arguments = gateway.container["args"]
    at = arguments.index("--prefill")
    assert arguments[at + 1 : at + 3] == ["http://prefill-0.prefill:8000", str(prefill.port("bootstrap"))]
    assert f"--disaggregation-bootstrap-port={prefill.port('bootstrap')}" in prefill.container["args"]
    assert arguments[arguments.index("--decode") + 1] == "http://decode-0.decode:8000"


# ---- ports -------------------------------------------------------------------------------------------------------


def test_probes_ask_ports_that_the_container_has(manifests: tuple[Manifest, ...]):
    for pod in pods(manifests):
        for name in PROBES:
            probe = pod.container[name]
            if "exec" not in probe:
                assert pod.port(probe["httpGet"]["port"]) is not None, f"{pod.name}: {name}"


def test_every_rank_of_a_pod_is_probed_drained_and_scraped(manifests: tuple[Manifest, ...]):
    for pod in ranks(manifests):
        given = variables(pod, manifests)
        first = int(given["KVFERRY_OBSERVE_PORT"])
        expected = {first + rank for rank in range(int(given["TENSOR_PARALLEL"]))}
        assert {pod.port(each["name"]) for each in pod.container["ports"] if "observe" in each["name"]} == expected
        *drain, drain_s = pod.container["lifecycle"]["preStop"]["exec"]["command"]
        assert drain == ["kvferry", "drain", "--timeout"], (
            "it drains all ranks that answer from KVFERRY_OBSERVE_PORT on"
        )
        (engine_s,) = re.findall(r"--shutdown-timeout=(\d+)", " ".join(pod.container["args"])) or ["80"]
        assert int(drain_s) + int(engine_s) < pod.spec["terminationGracePeriodSeconds"]
        assert pod.container["resources"]["limits"].get("nvidia.com/gpu", given["TENSOR_PARALLEL"]) == str(
            len(expected)
        )
        for name, path in (("livenessProbe", "/livez"), ("readinessProbe", "/readyz")):
            probe = pod.container[name]
            if len(expected) == 1:
                assert probe["httpGet"] == {"port": "observe", "path": path}
                assert pod.port("observe") == first
            else:
                assert f"http://127.0.0.1:[{first}-{max(expected)}]{path}" in probe["exec"]["command"]
        for monitor in of_kind(manifests, "PodMonitor"):
            asked = {pod.port(each["port"]) for each in monitor["spec"]["podMetricsEndpoints"]}
            assert asked >= expected


def test_network_policies_let_through_what_is_needed_and_nothing_else(engine: tuple[Manifest, ...]):
    by_name = {pod.workload["metadata"]["name"]: pod for pod in pods(engine)}
    prefill = variables(by_name["prefill"], engine)
    first, last = map(int, prefill["UCX_TCP_PORT_RANGE"].split("-"))
    control = int(prefill["KVFERRY_CONTROL_PORT"])
    needed = {
        *(("gateway", side, 8000) for side in ("prefill", "decode")),
        *(("decode", "prefill", control + rank) for rank in range(16)),
        *(
            (one, other, port)
            for one, other in (("decode", "prefill"), ("prefill", "decode"))
            for port in (first, last)
        ),
        *((side, "registry", 8998) for side in ("prefill", "decode")),
        *((side, "gateway", 8080) for side in by_name),
    }
    if by_name["prefill"].port("bootstrap"):
        needed.add(("decode", "prefill", 8999))
    else:  # kvferry's front asks who drains
        needed |= {("gateway", "registry", 8998), ("gateway", "decode", 9470)}
    ports = {port for _, _, port in needed} | {first - 1, last + 1, control - 1, control + 16, 8999, 9470, 22}
    allowed = {
        (source, target, port)
        for source, target in itertools.product(by_name, by_name)
        for port in ports
        if is_allowed(engine, by_name[source], by_name[target], port)
    }
    assert allowed == needed


def test_the_page_has_the_ports_of_the_manifests():
    page = (ROOT / "docs/kubernetes.md").read_text()
    for pod in pods(rendered("sglang")):
        for port in pod.container["ports"]:
            assert re.search(rf"\| {port['containerPort']}\b", page), port
    for variable in ("UCX_TCP_PORT_RANGE", "KVFERRY_CONTROL_PORT", "KVFERRY_OBSERVE_PORT"):
        assert variable in page


def test_what_the_page_tells_users_to_apply_is_there():
    page = (ROOT / "docs/kubernetes.md").read_text()
    told = set(re.findall(r"deploy/(?:kubernetes|images)/[\w./-]*\w", page))
    assert {f"deploy/kubernetes/{name}" for name in OVERLAYS} <= told
    assert [each for each in sorted(told) if not (ROOT / each).exists()] == []
    for name in COMPONENTS:
        assert f"components/{name}" in page


def test_no_manifest_is_left_out():
    """Every file belongs to a kustomization, so that nothing is edited in vain."""
    for folder in {file.parent for file in MANIFESTS.rglob("*.yaml")}:
        kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
        used = json.dumps(kustomization)
        for file in folder.iterdir():
            assert file.name == "kustomization.yaml" or file.is_dir() or file.name in used, file
