"""What a server's caches are beyond their layout, taken from what SGLang has been told and has found out."""

from __future__ import annotations

import hashlib
import json
import secrets
from pathlib import Path
from typing import Any

from kvferry.engines.checkpoints import identified, model_directory
from kvferry.engines.fingerprint import NONE, CacheIdentity
from kvferry.engines.sglang.versions import kv_layout

_OF_ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "rope_local_base_freq")
_OF_WINDOWS = ("layer_types", "sliding_window_pattern", "attention_chunk_size", "full_attention_interval")


def cache_identity(
    args: Any, model: Any, *, given: Any, speculative: Any, execution: Any, version: str
) -> CacheIdentity:
    """Describes a server's caches.

    Args:
        args: SGLang's KVArgs.
        model: its ModelConfig.
        given: its options about the model.
        speculative: those about speculative decoding.
        execution: those about how the model runs.
    """
    text = model.hf_text_config
    cache_dtype = args.kv_cache_dtype_str
    load_format = "ipc_cache" if given.weight_cache_mode == "client" else given.load_format  # so SGLang calls it inside
    return CacheIdentity(
        engine=f"SGLang {version}",
        weights=weights_of(given.model_path, given.revision, load_format, model.hf_config, given.download_dir),
        architecture=", ".join(model.hf_config.architectures or ()) or NONE,
        cache_dtype=f"{model.dtype}".removeprefix("torch.") if cache_dtype == "auto" else cache_dtype,
        scales=_scales(cache_dtype, given.quantization_param_path),
        attention_backend=_backends(execution),
        content_order=_content_order(args),
        rope=_some(text, _OF_ROPE),
        attention_window=_windows(model, text),
        quantization=str(getattr(model, "quantization", None) or given.quantization or NONE),
        speculative_model=_speculative(speculative, given.download_dir),
        metadata_rows=f"{', '.join(map(str, args.aux_item_lens))} bytes",
    )


def weights_of(path: str, revision: str | None, load_format: str, config: Any, cache: str | None = None) -> str:
    """Identifies the weights in a model's directory, or of a model's name."""
    if load_format == "dummy":
        return f"none: --load-format dummy, for {path}"
    if load_format == "remote_instance":
        return f"a running server's, which may have replaced its own: update them here, too ({secrets.token_hex(4)})"
    if load_format == "ipc_cache":
        why = "which may have read other files at their path before: start with --weight-cache-mode off"
        return f"a weight cache daemon's, {why} ({secrets.token_hex(4)})"
    commit = getattr(config, "_commit_hash", None)
    return _identified(path, revision, cache, commit or revision)


def _identified(path: str, revision: str | None, cache: str | None, shown: str | None) -> str:
    return identified(model_directory(path, revision, cache), f"{path} at {shown or 'its default revision'}")


def _scales(cache_dtype: str, path: str | None) -> str:
    if not cache_dtype.startswith(("fp8", "fp4", "mxfp8", "nvfp4", "int8", "int4")):
        return NONE
    if path is None:
        return "the checkpoint's, or 1"
    try:
        digest = hashlib.blake2b(Path(path).read_bytes(), digest_size=16).hexdigest()
    except OSError:
        return path
    return f"--quantization-param-path {digest}"


def _backends(execution: Any) -> str:
    kernels = execution.kernel
    names = (kernels.attention_backend, kernels.prefill_attention_backend, kernels.decode_attention_backend)
    return ", ".join(dict.fromkeys(name for name in names if name)) or NONE


def _content_order(args: Any) -> str:
    orders = (kv_layout(args), getattr(args, "swa_kv_cache_layout", None))
    return ", ".join(dict.fromkeys(order for order in orders if order)) or "tokens, heads, numbers"


def _some(config: Any, names: tuple[str, ...]) -> str:
    found = {name: getattr(config, name) for name in names if getattr(config, name, None) is not None}
    return json.dumps(found, sort_keys=True, default=str) if found else NONE


def _windows(model: Any, text: Any) -> str:
    window = model.sliding_window_size
    if window is None or window < 0:
        return NONE
    return f"{window} tokens, {_some(text, _OF_WINDOWS)}"


def _speculative(speculative: Any, cache: str | None) -> str:
    if speculative.speculative_algorithm is None:
        return ""
    path, revision = speculative.speculative_draft_model_path, speculative.speculative_draft_model_revision
    if path is None:
        return f"{speculative.speculative_algorithm} of the model itself"
    return _identified(path, revision, cache, revision)
