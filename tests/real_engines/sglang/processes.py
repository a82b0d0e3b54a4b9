"""Ranks of SGLang's, each in a process of its own."""

from __future__ import annotations

import os
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from types import MappingProxyType
from typing import Any

import pytest
from tests.real_engines.alone import check_alone
from tests.real_engines.sglang.crossings import Members, Request
from tests.real_engines.sglang.forking import FORKING
from tests.real_engines.sglang.ranks import DECODE, PREFILL, Model, Rank

START_S = 240.0
MODEL = Model(layers=4, window_layers=2, state_layers=2)


def serve(
    pipe: Connection, mode: str, port: int, tp: int, tp_rank: int, options: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """One rank, which does what the test says with one request at a time.

    Args:
        options: what SGLang's code is told about the rank beside that.
    """
    os.environ["UCX_TLS"] = "tcp,self,sm"
    members = Members(pytest.MonkeyPatch(), port, MODEL)
    request: Request | None = None
    try:
        members.start(PREFILL if mode == "prefill" else DECODE, Rank(MODEL, tp=tp, tp_rank=tp_rank, options=options))
        pipe.send(None)
        while True:
            what, arguments = pipe.recv()
            if what == "begin":
                request = Request(members, *arguments)
                pipe.send(None)
            elif what == "close":
                members.close()
                return
            else:
                pipe.send(getattr(request, what)())
    except BaseException:
        pipe.send(traceback.format_exc())


class RankProcess:
    """A rank, from outside."""

    def __init__(self, *arguments: Any) -> None:
        check_alone()
        self._pipe, theirs = FORKING.Pipe()
        self._process = FORKING.Process(target=serve, args=(theirs, *arguments))
        self._process.start()
        theirs.close()

    def do(self, what: str, *arguments: Any) -> Any:
        self._pipe.send((what, arguments))
        return self.answer()

    def answer(self, limit_s: float = 30.0) -> Any:
        assert self._pipe.poll(limit_s), "no answer"
        answer = self._pipe.recv()
        assert not isinstance(answer, str), answer
        return answer

    def close(self) -> None:
        if self._process.is_alive():
            self._pipe.send(("close", ()))
            self._process.join(20)
        self._process.kill()
        self._process.join()
