"""Imports what every engine imports: a dozen seconds that a fork server then spends once for all of them.

Imports only: no engine and no thread may exist in a process that forks, nor UCX (`tests/support/nixl_preload.py`).
"""

import os

from tests.real_engines.vllm.engine import ENVIRONMENT

os.environ.update(ENVIRONMENT)  # some of it is read when modules are imported

import vllm  # noqa: F401
from vllm.model_executor.models import gemma3, qwen3  # noqa: F401
from vllm.v1.engine import core, llm_engine  # noqa: F401
from vllm.v1.executor import multiproc_executor  # noqa: F401
from vllm.v1.worker import cpu_model_runner, cpu_worker  # noqa: F401

import kvferry.engines.vllm  # noqa: F401
