"""What `kvferry doctor --for sglang` looks at: SGLang's plug-ins and its servers' options. Imports no SGLang."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import entry_points

from kvferry.engines.deployment import Deployment, Remark, option

_GROUP = "sglang.srt.plugins"
_NAME = "kvferry"
_REPLACED = "nixl"
_REPLACES = "KVFERRY_SGLANG_REPLACES_NIXL"
_BACKEND = "--disaggregation-transfer-backend"
_MODE = "--disaggregation-mode"
_LOOPBACK = (None, "127.0.0.1", "localhost", "::1")


class SglangDeployment(Deployment):
    """What is said of SGLang."""

    command = "sglang.launch_server"
    program = ("sglang", "serve")
    module = "sglang.launch_server"
    packages = ("sglang",)
    needs_registry = False
    contract = "kvferry.engines.sglang.plugin:check_contract"
    example = f"{_MODE} prefill {_BACKEND} {_NAME}"

    def installed(self, variables: Mapping[str, str]) -> Iterator[Remark]:
        """Says it, as SGLang finds plug-ins by their entry points, and SGLANG_PLUGINS chooses some."""
        found = [each for each in entry_points(group=_GROUP) if each.name == _NAME]
        if not found:
            what = f"kvferry is no entry point of {_GROUP} in this environment: SGLang will not find it"
            yield Remark(what, "install kvferry anew: it was copied here, or installed before it had a plug-in")
        else:
            yield Remark(f"SGLang finds {found[0].value} by its entry point", is_wrong=False)
        chosen = variables.get("SGLANG_PLUGINS", "")
        if chosen and _NAME not in [each.strip() for each in chosen.split(",")]:
            what = f"SGLANG_PLUGINS is {chosen!r}: SGLang loads these plug-ins alone"
            yield Remark(what, "add kvferry", f"export SGLANG_PLUGINS={chosen},{_NAME}")

    def options(self, arguments: Sequence[str], variables: Mapping[str, str]) -> Iterator[Remark]:
        mode = option(arguments, _MODE)
        if mode not in ("prefill", "decode"):
            yield Remark(f"{_MODE} is {mode!r}: this server transfers no cache", "docs/sglang.md", f"{_MODE} prefill")
        backend = option(arguments, _BACKEND)
        replaces = variables.get(_REPLACES, "").lower() in ("1", "true", "t", "yes", "y", "on")
        if backend == _NAME or (backend == _REPLACED and replaces):
            yield Remark(f"{_BACKEND} {backend} is kvferry", is_wrong=False)
        else:
            remedy = f"{_REPLACES}=1 puts kvferry in its place" if backend == _REPLACED else "docs/sglang.md"
            yield Remark(f"{_BACKEND} is {backend!r}: that is not kvferry", remedy, f"{_BACKEND} {_NAME}")
        beyond = variables.get("KVFERRY_HOST") not in _LOOPBACK
        if mode == "prefill" and beyond and option(arguments, "--host") in _LOOPBACK:
            what = "--host is on loopback, and KVFERRY_HOST is not: others do not reach the bootstrap server"
            yield Remark(what, "docs/sglang.md", "--host 0.0.0.0")
