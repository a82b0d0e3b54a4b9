"""Processes that are forked from one that has imported SGLang: importing it takes twelve seconds of a processor."""

from __future__ import annotations

import multiprocessing

FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(["tests.real_engines.sglang.preload"])
