"""A process with few open files to spare: what becomes of an endpoint that is made there, or connects there.

Run as a program it forks two processes for each number, of an endpoint and its peer, and prints what the first says of
itself: `python -m tests.support.few_files prefill construct 3 4 5`.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import torch
import uvicorn

import kvferry as kf
from kvferry.control import quiet_server, registry_app
from kvferry.errors import KVFerryError
from kvferry.transport.nixl import bindings

_LONGEST_S = 120
_CONNECT_S = 5.0


def layout() -> kf.RankLayout:
    """A small cache; its memory lives as long as the process."""
    component = kf.attention_components(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float16")[0]
    memory = [np.zeros((4, 16, 1, 8), np.float16)]
    _KEPT.append(memory)
    return kf.RankLayout(shards=(kf.shard_from_tensors(component, memory, dims=("page", "token", "head", "dim")),))


_KEPT: list[Any] = []


def leave(spare: int) -> None:
    """Lets this process open so many files more."""
    filling = os.open(os.devnull, os.O_RDONLY)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    while filling < highest:  # the lowest number that is free is taken: no gap stays
        filling = os.open(os.devnull, os.O_RDONLY)
    _limit(filling + 1 + spare)


def _limit(files: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def as_many_as_may() -> None:
    """Lets this process open files again."""
    _limit(resource.getrlimit(resource.RLIMIT_NOFILE)[1])


def _outcome(attempt: Callable[[], None]) -> str:
    """What became of an attempt: nothing if it went well, an error of ours, or one that nobody may see."""
    try:
        attempt()
    except KVFerryError as error:
        return f"{type(error).__name__}: {error}"
    except BaseException:
        return f"not ours: {traceback.format_exc()}"
    return ""


def _files() -> int:
    return len(os.listdir("/proc/self/fd"))


def construct(side: str, spare: int) -> dict[str, Any]:
    """An endpoint is made where so many are left."""
    made: list[kf.PrefillEndpoint | kf.DecodeEndpoint] = []
    described, before = layout(), _files()

    def make() -> None:
        settings = kf.Settings(registry_port=0)
        made.append(
            kf.PrefillEndpoint(described, settings=settings)
            if side == "prefill"
            else kf.DecodeEndpoint(described, settings=kf.Settings(registry_url="http://127.0.0.1:1"))
        )

    leave(spare)
    fillings = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - spare - before + 1
    outcome = _outcome(make)
    as_many_as_may()
    for each in made:
        each.close()
    made.clear()
    return {"outcome": outcome, "left_over": max(0, _files() - before - fillings) if outcome else 0}


def connect(side: str, spare: int, tell: int, ask: int) -> dict[str, Any]:
    """An endpoint meets its first peer where so many are left, and again where there are enough."""
    if side == "prefill":
        prefill = kf.PrefillEndpoint(layout(), settings=kf.Settings(registry_port=0))
        assert prefill.wait_registered(_LONGEST_S)
        leave(spare)
        os.write(tell, f"{prefill.registry_url}\n".encode())
        outcome = os.read(ask, 4096).decode()  # what the peer met
        as_many_as_may()
        os.write(tell, b"again\n")
        again = os.read(ask, 4096).decode()
        return {"outcome": outcome.strip(), "again": again.strip(), "is_healthy": prefill.is_healthy}
    decode = kf.DecodeEndpoint(layout(), settings=kf.Settings(registry_url=os.read(ask, 4096).decode().strip()))
    leave(spare)
    outcome = _outcome(lambda: decode.connect(timeout_s=_CONNECT_S))
    as_many_as_may()
    again = _outcome(lambda: decode.connect(timeout_s=_LONGEST_S / 2))
    return {"outcome": outcome, "again": again, "is_healthy": decode.is_healthy}


def peer_of(side: str, tell: int, ask: int) -> None:
    """The other side, which has enough."""
    if side == "decode":
        prefill = kf.PrefillEndpoint(layout(), settings=kf.Settings(registry_port=0))
        assert prefill.wait_registered(_LONGEST_S)
        os.write(tell, f"{prefill.registry_url}\n".encode())
        threading.Event().wait()
    decode = kf.DecodeEndpoint(layout(), settings=kf.Settings(registry_url=os.read(ask, 4096).decode().strip()))
    for timeout_s in (_CONNECT_S, _LONGEST_S / 2):
        outcome = _outcome(lambda timeout_s=timeout_s: decode.connect(timeout_s=timeout_s))  # type: ignore[misc]
        os.write(tell, f"{' '.join(outcome.split())}\n".encode())
        os.read(ask, 4096)
    threading.Event().wait()


def _forked(work: Callable[[], object]) -> int:
    process = os.fork()
    if process:
        return process
    try:
        signal.alarm(_LONGEST_S)
        work()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def main(side: str, phase: str, numbers: list[int]) -> None:
    """Prints a line of JSON for each number."""
    # Imported before: that takes seconds in each process, and files.
    assert all((httpx, torch, uvicorn, quiet_server, registry_app, bindings.load_bindings(), kf.Settings()))
    for spare in numbers:
        (here, tell), (there, answer) = os.pipe(), os.pipe()
        reading, writing = os.pipe()

        def struck(spare: int = spare, writing: int = writing, tell: int = tell, there: int = there) -> None:
            said = construct(side, spare) if phase == "construct" else connect(side, spare, tell, there)
            os.write(writing, json.dumps(said).encode())

        process = _forked(struck)
        os.close(writing)
        peer = _forked(lambda: peer_of(side, answer, here)) if phase == "connect" else None  # noqa: B023
        for each in (here, tell, there, answer):
            os.close(each)
        said = b""
        while piece := os.read(reading, 65536):
            said += piece
        os.close(reading)
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        if peer is not None:
            os.kill(peer, signal.SIGKILL)
            os.waitpid(peer, 0)
        sys.stdout.write(json.dumps({"spare": spare, "exit": code, **json.loads(said or b"{}")}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], [int(each) for each in sys.argv[3:]])
