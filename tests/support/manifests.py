"""The manifests in deploy/kubernetes, as kubectl renders them, and what Kubernetes makes of them.

Pods, their containers' commands and environments, and who may connect to whom.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.clones import ROOT

MANIFESTS = ROOT / "deploy/kubernetes"
OVERLAYS = ("vllm", "sglang", "vllm-cpu", "sglang-cpu")
COMPONENTS = ("etcd", "prometheus", "tensor-parallel-2")

Manifest = dict[str, Any]

_REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_.-]*)\)")
_WORKLOADS = ("Deployment", "StatefulSet")


@functools.cache
def rendered(overlay: str, *components: str) -> tuple[Manifest, ...]:
    """Returns what `kubectl apply -k` would send; skips the test where there is no kubectl.

    Args:
        components: that the overlay has beside its own.
    """
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("there is no kubectl here, which renders the manifests: install it so that it is on the PATH")
    with tempfile.TemporaryDirectory() as scratch:
        kustomization = {
            "resources": [os.path.relpath(MANIFESTS / overlay, os.path.realpath(scratch))],
            "components": [
                os.path.relpath(MANIFESTS / "components" / each, os.path.realpath(scratch)) for each in components
            ],
        }
        (Path(scratch) / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
        run = subprocess.run([kubectl, "kustomize", scratch], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return tuple(yaml.safe_load_all(run.stdout))


def of_kind(manifests: Sequence[Manifest], *kinds: str) -> Iterator[Manifest]:
    """Yields the manifests of some kinds."""
    return (each for each in manifests if each["kind"] in kinds)


def named(manifests: Sequence[Manifest], kind: str, name: str) -> Manifest:
    """Returns the only manifest of a kind and name."""
    (found,) = (each for each in of_kind(manifests, kind) if each["metadata"]["name"] == name)
    return found


@dataclass(frozen=True)
class Pod:
    """A pod that a workload's controller would make.

    Attributes:
        name: its own, and its host's.
        workload: the manifest that it comes from.
        subdomain: of its name, where a service gives it one.
    """

    name: str
    workload: Manifest
    subdomain: str

    @property
    def spec(self) -> Manifest:
        """What runs in it."""
        found: Manifest = self.workload["spec"]["template"]["spec"]
        return found

    @property
    def labels(self) -> Mapping[str, str]:
        """What selectors look at."""
        found: Mapping[str, str] = self.workload["spec"]["template"]["metadata"]["labels"]
        return found

    @property
    def container(self) -> Manifest:
        """Its only container."""
        (found,) = self.spec["containers"]
        container: Manifest = found
        return container

    def port(self, port: str | int) -> int | None:
        """Returns the number of a port; None where no container has one of that name."""
        if isinstance(port, int):
            return port
        for each in self.container["ports"]:
            if each["name"] == port:
                return int(each["containerPort"])
        return None


def pods(manifests: Sequence[Manifest]) -> list[Pod]:
    """Returns the pods of all workloads."""
    found = []
    for workload in of_kind(manifests, *_WORKLOADS):
        name = workload["metadata"]["name"]
        for number in range(workload["spec"]["replicas"]):
            if workload["kind"] == "StatefulSet":
                found.append(Pod(f"{name}-{number}", workload, workload["spec"]["serviceName"]))
            else:
                found.append(Pod(f"{name}-5c7d9f6b8-{number:05}", workload, ""))
    return found


def matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a selector with labels and expressions, of which only In is known here, chooses what has such labels."""
    for expression in selector.get("matchExpressions", ()):
        assert expression["operator"] == "In", expression
        if labels.get(expression["key"]) not in expression["values"]:
            return False
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())


def host_names(manifests: Sequence[Manifest], addresses: Mapping[str, str]) -> dict[str, set[str]]:
    """Returns the names that cluster DNS would know from within the namespace, by address.

    A service with several pods is its first.

    Args:
        addresses: by pod.
    """
    names: dict[str, set[str]] = {address: set() for address in addresses.values()}
    known = pods(manifests)
    for pod in known:
        if pod.subdomain:
            names[addresses[pod.name]].add(f"{pod.name}.{pod.subdomain}")
    for service in of_kind(manifests, "Service"):
        chosen = [pod for pod in known if matches({"matchLabels": service["spec"]["selector"]}, pod.labels)]
        if chosen:
            names[addresses[chosen[0].name]].add(service["metadata"]["name"])
    return names


def environment(
    pod: Pod, manifests: Sequence[Manifest], address: str, secrets: Mapping[str, Mapping[str, str]]
) -> dict[str, str]:
    """Returns the variables of a pod's container, as the kubelet finds them.

    Args:
        address: the pod's.
        secrets: by name and key; those that no manifest has.
    """
    fields = {
        "status.podIP": address,
        "metadata.name": pod.name,
        "metadata.namespace": str(pod.workload["metadata"]["namespace"]),
        "metadata.uid": f"uid-of-{pod.name}",
    }
    found: dict[str, str] = {}
    for variable in pod.container["env"]:
        source = variable.get("valueFrom", {})
        if "fieldRef" in source:
            value = fields[source["fieldRef"]["fieldPath"]]
        elif "secretKeyRef" in source:
            value = secrets[source["secretKeyRef"]["name"]][source["secretKeyRef"]["key"]]
        elif "configMapKeyRef" in source:
            reference = source["configMapKeyRef"]
            value = named(manifests, "ConfigMap", reference["name"])["data"][reference["key"]]
        else:
            value = expanded(variable["value"], found)  # by those before it alone
        found[variable["name"]] = value
    return found


def command(container: Manifest, variables: Mapping[str, str]) -> list[str]:
    """Returns what a container runs."""
    return [expanded(each, variables) for each in (*container["command"], *container.get("args", ()))]


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """Replaces $(NAME) by a variable's value, as the kubelet does; what is not known stays, and $$ is a $."""

    def value(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else variables.get(match[1], match[0])

    return _REFERENCE.sub(value, text)


def is_allowed(manifests: Sequence[Manifest], source: Pod, target: Pod, port: int) -> bool:
    """Whether the network policies let one pod connect to another's port."""
    policies = [
        each["spec"]
        for each in of_kind(manifests, "NetworkPolicy")
        if matches(each["spec"]["podSelector"], target.labels)
    ]
    return not policies or any(
        _lets_in(rule, source, target, port) for policy in policies for rule in policy.get("ingress", ())
    )


def _lets_in(rule: Manifest, source: Pod, target: Pod, port: int) -> bool:
    peers = rule.get("from")
    if peers is not None and not any(
        "namespaceSelector" not in peer and matches(peer["podSelector"], source.labels) for peer in peers
    ):
        return False
    for each in rule["ports"]:
        first = target.port(each["port"])
        if first is not None and first <= port <= each.get("endPort", first):
            return True
    return False
