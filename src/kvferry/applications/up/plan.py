"""What a deployment on this machine consists of: which processes, on which ports, with which commands."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.applications.up.arguments import DeploymentRequest


@dataclass(frozen=True, slots=True)
class Program:
    """A process to run.

    Attributes:
        name: of it, and of its log.
        health_url: answers with success when the program serves.
    """

    name: str
    command: tuple[str, ...]
    health_url: str


def vllm_programs(request: DeploymentRequest, ports: Sequence[int]) -> list[Program]:
    """A registry, the servers, and a front, in the order in which they start.

    Args:
        ports: free ones, as many as `ports_needed`.
    """
    free = iter(ports)
    registry_port = next(free)
    url = f"http://127.0.0.1:{registry_port}"
    programs = [
        Program(
            "registry",
            (sys.executable, "-m", "kvferry", "registry", "--host", "127.0.0.1", "--port", str(registry_port)),
            f"{url}/health",
        )
    ]
    servers: dict[str, list[str]] = {"prefill": [], "decode": []}
    for kind, count, tp, role in (
        ("prefill", request.prefill, request.prefill_tp, "kv_producer"),
        ("decode", request.decode, request.decode_tp, "kv_consumer"),
    ):
        for number in range(count):
            name, port = f"{kind}-{number}", next(free)
            server_url = f"http://127.0.0.1:{port}"
            servers[kind].append(f"{name}={server_url}")
            programs.append(_vllm(name, role, tp, port, request, url))
    front = [sys.executable, "-m", "kvferry.applications.up.app", "--host", request.host, "--port"]
    front.append(str(request.port))
    for kind, given in servers.items():
        for each in given:
            front += [f"--{kind}", each]
    # Ready: "all of them serve" is said when requests go to all of them, which the front finds out by itself.
    programs.append(Program("front", tuple(front), f"http://{request.host}:{request.port}/ready"))
    return programs


def ports_needed(request: DeploymentRequest) -> int:
    """How many ports beside the front's."""
    return 1 + request.prefill + request.decode


def _vllm(name: str, role: str, tp: int, port: int, request: DeploymentRequest, registry_url: str) -> Program:
    transfer = {
        "kv_connector": "KVFerryConnector",
        "kv_connector_module_path": "kvferry.engines.vllm",
        "kv_role": role,
        "engine_id": name,
        # The front asks another pair at once; a decode server that computes the prompt itself holds others up.
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"registry_url": registry_url},
    }
    command = (
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(request.model), "--host", "127.0.0.1", "--port", str(port)),
        *("--tensor-parallel-size", str(tp), "--kv-transfer-config", json.dumps(transfer)),
        *(request.engine_options or ()),
    )
    return Program(name, command, f"http://127.0.0.1:{port}/health")
