"""What has to be installed in this environment before a deployment is begun."""

from __future__ import annotations

from importlib.metadata import entry_points
from importlib.util import find_spec

from kvferry.applications.up.arguments import DeploymentRequest
from kvferry.applications.up.engine_options import Engine, FrontKind
from kvferry.engines.sglang.settings import PluginChoice
from kvferry.errors import ConfigurationError

_NAMES = {Engine.VLLM: "vLLM", Engine.SGLANG: "SGLang"}
_PLUGINS = "sglang.srt.plugins"
_OURS = "kvferry"


def check_installed(request: DeploymentRequest) -> None:
    """Refuses an engine that is not there, or that would not find kvferry.

    Raises:
        ConfigurationError: naming what is missing, and the remedy.
    """
    engine = request.which_engine
    if find_spec(engine.value) is None:
        raise ConfigurationError(
            f"--engine {engine.value}: {_NAMES[engine]} is not installed in this environment, whose interpreter starts "
            f"the servers; install kvferry where the engine is, as docs/{engine.value}.md says"
        )
    if engine is Engine.VLLM:  # which is told our module's name
        return
    if _OURS not in {each.name for each in entry_points(group=_PLUGINS)}:
        raise ConfigurationError(
            f"--engine {engine.value}: SGLang finds kvferry by an entry point of the group {_PLUGINS}, and there is "
            "none: kvferry is on the module path, but not installed here; install it as docs/sglang.md says"
        )
    only = PluginChoice().plugins
    if only and _OURS not in (each.strip() for each in only.split(",")):
        raise ConfigurationError(
            f"--engine {engine.value}: SGLANG_PLUGINS is {only!r}, and SGLang loads no other plug-in: add {_OURS} to "
            "it, or unset it"
        )


def router_is_front(request: DeploymentRequest) -> bool:
    """Returns whether SGLang's router answers, and not a front of ours.

    Raises:
        ConfigurationError: if it should, and is not installed.
    """
    wanted = FrontKind(request.front.lower())
    if request.which_engine is not Engine.SGLANG or wanted is FrontKind.KVFERRY:
        return False
    is_installed = find_spec("sglang_router") is not None
    if wanted is FrontKind.ROUTER and not is_installed:
        raise ConfigurationError(
            "--front sglang-router: it is not installed in this environment: install it there, or leave "
            "--front away for kvferry's own"
        )
    return is_installed
