"""Imports what loading a model imports: two to three seconds that a fork server then spends once for all processes.

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kvferry.applications.demo.reference.preload"])

Imports only: no model, no tensor and no thread may exist in a process that forks.
"""

import torch  # noqa: F401
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache  # noqa: F401
from transformers.models.deepseek_v3 import DeepseekV3ForCausalLM  # noqa: F401
from transformers.models.gemma3 import Gemma3ForCausalLM  # noqa: F401
from transformers.models.llama import LlamaForCausalLM  # noqa: F401
from transformers.models.mamba2 import Mamba2ForCausalLM  # noqa: F401
from transformers.models.qwen3 import Qwen3ForCausalLM  # noqa: F401
from transformers.models.qwen3_next import Qwen3NextForCausalLM  # noqa: F401

from kvferry.applications.demo.reference import engine  # noqa: F401
