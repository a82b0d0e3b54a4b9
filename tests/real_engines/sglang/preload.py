"""What a fork server imports once for all of its processes.

Imports only: no engine, no plug-in and no thread may exist in a process that forks; nor UCX, since SGLang's controllers
fork beside threads of theirs (`tests/support/nixl_preload.py`).
"""

import os

from tests.real_engines.sglang.engine import ENVIRONMENT

os.environ.update(ENVIRONMENT)  # some of it is read when modules are imported

import sglang.srt.disaggregation.decode
import sglang.srt.disaggregation.prefill
import sglang.srt.entrypoints.engine
import sglang.srt.managers.disagg_service
import sglang.srt.managers.scheduler
import sglang.srt.models.llama  # noqa: F401
import tests.real_engines.sglang.changed
import tests.real_engines.sglang.processes  # noqa: F401
