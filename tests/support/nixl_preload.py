"""Loads NIXL and UCX when it is imported: for fork servers, whose processes then have both from the start.

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.nixl_preload"])

To load UCX takes 0.4 s of a processor, measured: it puts itself before some thirty of the system's memory calls, and
yields for 11 ms at each. That is as long as everything else that an endpoint begins with takes. It starts no thread,
and opens no device. Without NIXL it does nothing: whoever makes an endpoint hears of it.

Not for processes that fork others beside threads of their own, as engines do: before each of those calls UCX takes a
lock, and a process has it for good that was forked while a thread of its parent's was in one. It then waits for ever
where NIXL's backend is made: 48 of 200 that were forked beside two threads that map memory.
"""

from contextlib import suppress

from kvferry.errors import TransportUnavailableError
from kvferry.transport.nixl import load_bindings


def _load() -> None:
    nixl = load_bindings()
    config = nixl.nixlAgentConfig()
    config.useProgThread = config.useListenThread = False
    agent = nixl.nixlAgent("preload", config)
    if "UCX" in agent.getAvailPlugins():
        agent.getPluginParams("UCX")  # it has to load a plug-in to know


with suppress(TransportUnavailableError):
    _load()
