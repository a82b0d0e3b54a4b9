"""What a deployment on this machine consists of: which processes, on which ports, with which commands."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvferry.applications.up.engine_options import DeploymentRequest, Engine

LOOPBACK = "127.0.0.1"
BACKEND = "kvferry"
"""For SGLang's --disaggregation-transfer-backend, as `engines/sglang/plugin.py` adds it."""
_SHUTDOWN_S = 15
"""For vLLM's --shutdown-timeout: less than the supervisor waits for a program that it has told to end."""


@dataclass(frozen=True, slots=True)
class Program:
    """A process to run.

    Attributes:
        name: of it, and of its log.
        health_url: answers with success when the program serves.
        environment: variables that it has beside ours.
    """

    name: str
    command: tuple[str, ...]
    health_url: str
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a server is to be.

    Attributes:
        side: prefill or decode.
        name: of the server, and of its engine.
        tp: its tensor-parallel ranks.
        port: where it answers.
        bootstrap_port: where SGLang's decode servers ask a prefill server for caches; 0 for any other.
        registry_port: where the ranks of such a prefill server are registered; 0 for any other.
    """

    side: str
    name: str
    tp: int
    port: int
    bootstrap_port: int = 0
    registry_port: int = 0

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://{LOOPBACK}:{self.port}"


def ports_needed(request: DeploymentRequest) -> int:
    """Returns how many ports beside the front's.

    The servers', two more for each prefill server of SGLang's, and one for vLLM's registry, or the metrics of SGLang's
    router.
    """
    return 1 + request.prefill + request.decode + (2 * request.prefill if request.which_engine is Engine.SGLANG else 0)


def programs(
    request: DeploymentRequest, ports: Sequence[int], *, has_router: bool = False, registry_url: str | None = None
) -> list[Program]:
    """Returns everything that runs, in the order in which it starts: the front last.

    Args:
        ports: free ones, as many as `ports_needed`.
        has_router: whether SGLang's router is the front.
        registry_url: of the registry that the settings name, which SGLang's prefill servers use in place of their own.
    """
    free = iter(ports)
    if request.which_engine is Engine.VLLM:
        registry = _registry(next(free))
        places = [*_places(request, free)]
        its_url = registry.health_url.removesuffix("/health")
        servers = [_vllm(place, request, its_url) for place in places]
        return [registry, *servers, _front(request, places, [its_url])]
    metrics_port = next(free)
    places = [*_places(request, free)]
    if has_router:
        front = _router(request, places, metrics_port)
    else:
        own = [f"http://{LOOPBACK}:{place.registry_port}" for place in places if place.registry_port]
        front = _front(request, places, own if registry_url is None else [registry_url])
    return [*(_sglang(place, request) for place in places), front]


def _places(request: DeploymentRequest, free: Iterator[int]) -> Iterator[Place]:
    for number in range(request.prefill):
        place = Place("prefill", f"prefill-{number}", request.prefill_tp, next(free))
        if request.which_engine is Engine.SGLANG:
            place = replace(place, bootstrap_port=next(free), registry_port=next(free))
        yield place
    for number in range(request.decode):
        yield Place("decode", f"decode-{number}", request.decode_tp, next(free))


def _registry(port: int) -> Program:
    command = (sys.executable, "-m", "kvferry", "registry", "--host", LOOPBACK, "--port", str(port))
    return Program("registry", command, f"http://{LOOPBACK}:{port}/health")


def _vllm(place: Place, request: DeploymentRequest, registry_url: str) -> Program:
    transfer = {
        "kv_connector": "KVFerryConnector",
        "kv_connector_module_path": "kvferry.engines.vllm",
        "kv_role": {"prefill": "kv_producer", "decode": "kv_consumer"}[place.side],
        "engine_id": place.name,
        # The front asks another pair at once; a decode server that computes the prompt itself holds others up.
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"registry_url": registry_url},
    }
    command = (
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(request.model), "--host", LOOPBACK, "--port", str(place.port)),
        *("--tensor-parallel-size", str(place.tp), "--kv-transfer-config", json.dumps(transfer)),
        # Else it is killed as soon as it is told to end, with whatever it keeps for decode servers.
        *("--shutdown-timeout", str(_SHUTDOWN_S)),
        *request.options_of(place.side),  # of two the last counts
    )
    return Program(place.name, command, f"{place.url}/health")


def _sglang(place: Place, request: DeploymentRequest) -> Program:
    bootstrap = ("--disaggregation-bootstrap-port", str(place.bootstrap_port)) if place.bootstrap_port else ()
    command = (
        *(sys.executable, "-m", "sglang.launch_server"),
        *("--model-path", str(request.model), "--host", LOOPBACK, "--port", str(place.port)),
        *("--tp-size", str(place.tp), "--disaggregation-mode", place.side),
        *("--disaggregation-transfer-backend", BACKEND, *bootstrap),
        *request.options_of(place.side),
    )
    # Asked for its health a server would generate a token each time, for a second and more; the front asks every half
    # second, and hears of a server that has ended all the same.
    environment = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}
    if place.registry_port:
        # The same for whoever comes in its place: decode servers remember it, and ask for it again only when a request
        # has failed.
        environment["KVFERRY_REGISTRY_PORT"] = str(place.registry_port)
    return Program(place.name, command, f"{place.url}/health", environment)


def _front(request: DeploymentRequest, places: Sequence[Place], registries: Sequence[str]) -> Program:
    command = [sys.executable, "-m", "kvferry.applications.up.app", "--engine", request.which_engine.value]
    command += ["--host", request.host, "--port", str(request.port)]
    for place in places:
        command += [f"--{place.side}", f"{place.name}={place.url}"]
        if place.bootstrap_port:
            command += ["--bootstrap-port", str(place.bootstrap_port)]
    for url in registries:
        command += ["--registry", url]
    # Ready: "all of them serve" is said when requests go to all of them, which the front finds out by itself.
    return Program("front", tuple(command), f"http://{request.host}:{request.port}/ready")


def _router(request: DeploymentRequest, places: Sequence[Place], metrics_port: int) -> Program:
    command = [sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation"]
    command += ["--host", request.host, "--port", str(request.port)]
    for place in places:
        command += [f"--{place.side}", place.url]
        if place.bootstrap_port:
            command.append(str(place.bootstrap_port))
    # It looks for servers every 30 seconds, and whether they are well every 60, unless it is told otherwise.
    command += ["--worker-startup-check-interval", "1", "--health-check-interval-secs", "1"]
    command += ["--health-success-threshold", "1"]
    command += ["--prometheus-host", LOOPBACK, "--prometheus-port", str(metrics_port)]
    return Program("router", tuple(command), f"http://{request.host}:{request.port}/readiness")
