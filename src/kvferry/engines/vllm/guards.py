"""What vLLM refuses, or does otherwise, for connectors that it knows by name. It does not know ours.

Where vLLM 0.32 and 0.33 ask for a connector's name, and what ours does there:

| where | what vLLM does for those that it knows | ours |
|---|---|---|
| `VllmConfig._verify_aux_output_compatibility` | refuses `--enable-return-routed-experts` | refuses it |
| `VllmConfig.__post_init__`, HiSparse | warns of all but NIXL's and Mooncake's store | refuses it |
| the same | of NIXL's: refuses part of tensor parallelism's ranks sharing tokens, and all but latents | takes either |
| `adjust_dcp_kv_cache_interleave_size` | lets NIXL's ranks take whole blocks in turns | takes any turns |
| `validate_block_size` | compares these turns with the block size, but for NIXL's | does so for every group |
| `CpuPlatform.check_and_update_config` | has convolutions' channels come first | takes either order |
| `MultiConnector`, `KVConnectorFactory.supports_hma_config` | looks classes up by name | ours is registered |
| `report_usage_stats` | reports the name | nothing to do |

Where ours is called NixlConnector, as Dynamo's handler wants it, the rows that name NIXL's hold for it as well. They
refuse more than ours does and let nothing pass that ours does not look at itself: `check_turns` compares turns with the
block size, and ours takes either order of convolutions.

What the NIXL connector refuses in its own constructor is prefill context parallelism on decode servers, and together
with decode context parallelism unless there is no tensor parallelism: ours takes all of it (`shares`). What it holds
back of a prompt, for models that draft with several modules, is held back here as well: see `held_back_tokens`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvferry.errors import SettingsError


def refuse_what_would_be_wrong(vllm_config: Any, *, sends_layers: bool = False, follows_sleep: bool = False) -> None:
    """Refuses a configuration of vLLM's under which what is transferred would be wrong, or be missing something.

    Args:
        sends_layers: whether layers leave before their step is over.
        follows_sleep: whether this vLLM tells connectors when it gives the caches' memory back.

    Raises:
        SettingsError: naming every option, and what to do.
    """
    problems = list(_problems(vllm_config, sends_layers=sends_layers, follows_sleep=follows_sleep))
    if problems:
        raise SettingsError("kvferry's connector for vLLM cannot serve like this: " + "; ".join(problems))


def _problems(vllm_config: Any, *, sends_layers: bool, follows_sleep: bool) -> Iterator[str]:
    if vllm_config.model_config.enable_sleep_mode and not follows_sleep:
        yield (
            "--enable-sleep-mode: waking replaces the KV cache's memory, which is registered, and this vLLM does not "
            "tell connectors of it: leave it out, or use vLLM 0.33"
        )
    if vllm_config.parallel_config.enable_elastic_ep:
        yield (
            "--enable-elastic-ep: /scale_elastic_ep replaces ranks and divides experts anew while the engine runs, and "
            "tells connectors of neither: leave it out"
        )
    if vllm_config.aux_output_config.enable_return_routed_experts:
        yield (
            "--enable-return-routed-experts: the experts of a prompt's tokens stay on the prefill server, so that the "
            "decode server would answer without them: leave it out on both"
        )
    if vllm_config.attention_config.hisparse_config is not None:
        yield (
            "HiSparse keeps part of the cache in host memory with block numbers of its own, which would be taken for "
            "the device's: leave out hisparse_config and the HiSparseConnector"
        )
    if (
        vllm_config.parallel_config.pipeline_parallel_size > 1
        and vllm_config.speculative_config is not None
        and not getattr(vllm_config, "use_v2_model_runner", False)
    ):
        yield (
            "--pipeline-parallel-size and --speculative-config: where vLLM drafts, the workers of its first model "
            "runner tell a connector on the last stage alone that a step is over, and the others would never send: "
            "leave out one of them, or set VLLM_USE_V2_MODEL_RUNNER=1"
        )
    if sends_layers and vllm_config.parallel_config.use_ubatching:
        yield (
            "--enable-dbo and --ubatch-size compute a step in parts side by side, so that a layer is through when the "
            "other part is not: leave them out, or KVFERRY_LAYER_RANGES"
        )


def held_back_tokens(vllm_config: Any) -> int:
    """Returns how many of a prompt's last tokens are not sent, and are computed on the decode server.

    The last one is in any case. A model that drafts with several modules (multi-module MTP) caches for each token what
    its modules make of the tokens behind it, as many as there are modules. Behind the last tokens of a prompt come
    drafts that nobody has verified, and the decode server would never replace what is made of them: vLLM's NIXL
    connector holds back all but one of these tokens, and cuts them off the prompt on the prefill server. Here the
    prefill server computes the whole prompt, and what it sends depends on the prompt alone.
    """
    return max(1, int(vllm_config.num_prefill_lookahead_tokens))


def buffer_notice(buffer_device: str, device: str) -> str | None:
    """Returns what to tell an operator whose setting has no effect; None where nothing was asked for.

    With "cpu" vLLM's NIXL connector takes host memory as large as the whole cache, copies the blocks of each request
    there and back, and transfers from there: for devices whose memory NIXL cannot register, and for nothing else.

    Args:
        buffer_device: `kv_buffer_device` of vLLM's `KVTransferConfig`.
        device: the platform's type of device, which is vLLM's default for it.
    """
    if buffer_device == device:
        return None
    return (
        f"kv_buffer_device is {buffer_device!r}, and has no effect: kvferry moves caches from where they are, on "
        f"{device}, with no copy of them in host memory. Where the network cannot reach the device's memory, UCX goes "
        "through the host by itself; KVFERRY_PATH=staged then sends a few large writes in place of many small ones, "
        "through KVFERRY_STAGING_RING_MIB of the device's memory for each peer. Leave kv_buffer_device out"
    )
