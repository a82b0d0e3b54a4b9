"""`kvferry up`, as Typer calls it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvferry.applications.command_line import with_fields_as_options
from kvferry.applications.up.engine_options import DeploymentRequest


@with_fields_as_options
def up(
    request: DeploymentRequest,
    logs: Annotated[Path | None, typer.Option(help="Directory for logs; a new one if not given.")] = None,
    timeout_s: Annotated[float, typer.Option(help="Longest wait until all processes serve.")] = 600.0,
) -> None:
    """Start a disaggregated deployment of a real engine on this machine.

    Prefill and decode servers of vLLM or SGLang, and one address that speaks OpenAI's interface, streaming included: it
    asks a prefill and a decode server at once, and tries another pair when one fails. Processes that die are started
    again. For one machine; for a cluster, the same plug-ins work under a gateway (docs/vllm.md, docs/sglang.md).
    """
    from kvferry.applications.up.run import run

    run(request, logs=logs, timeout_s=timeout_s)
