"""What each architecture caches: one small function per family, and the table of those that are known.

This is the only place where kvferry knows models by name. All else sees components.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvferry.models.cache import Components, ModelCache, as_draft
from kvferry.models.fields import Fields, Mixer
from kvferry.models.parts import (
    attention,
    gated_delta_net,
    index_keys,
    latents,
    lightning_attention,
    mamba1,
    mamba2,
)


@dataclass(frozen=True, slots=True)
class Family:
    """How to read the configurations of one model type.

    Attributes:
        read: returns what the model caches.
        defaults: what transformers takes where a field is missing, for those that published files leave out.
        default_dtype: element type of the published weights, where their files do not name it.
    """

    read: Callable[[Fields], ModelCache]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    default_dtype: str | None = None


def _cache(fields: Fields, components: Components, draft: Components = ()) -> ModelCache:
    return ModelCache(
        name=fields.model_type, num_layers=fields.num_layers, components=components, draft=as_draft(draft)
    )


def _draft_layers(fields: Fields, count: int) -> range:
    return range(fields.num_layers, fields.num_layers + count)


def _layers(mixers: Sequence[Mixer], mixer: Mixer, *, first: int = 0) -> tuple[int, ...]:
    return tuple(first + index for index, each in enumerate(mixers) if each is mixer)


def _alternating(fields: Fields, others: Mixer, *, period: int | str) -> tuple[Mixer, ...]:
    """Returns what each layer is: what layer_types says, else full attention in the last of every so many.

    Args:
        others: what the layers are that do not attend to every token.
        period: how many, or the field that says so.
    """
    if fields.has("layer_types"):
        return fields.mixers("layer_types", fields.num_layers, (Mixer.FULL, others))
    count = period if isinstance(period, int) else fields.size(period)
    return tuple(others if (index + 1) % count else Mixer.FULL for index in range(fields.num_layers))


def _attention_by_mixer(fields: Fields, mixers: Sequence[Mixer]) -> Components:
    full, windowed = _layers(mixers, Mixer.FULL), _layers(mixers, Mixer.WINDOW)
    window = attention(fields, windowed, window_tokens=fields.size("sliding_window")) if windowed else ()
    return (*attention(fields, full), *window)


def full_attention(fields: Fields) -> ModelCache:
    """Llama, GLM-4.5: every layer attends to every token."""
    draft = _draft_layers(fields, fields.count("num_nextn_predict_layers"))
    return _cache(fields, attention(fields, range(fields.num_layers)), attention(fields, draft))


def one_window(fields: Fields) -> ModelCache:
    """Mistral, Mixtral: every layer has the sliding window, if there is one."""
    mixer = Mixer.WINDOW if fields.has("sliding_window") else Mixer.FULL
    return _cache(fields, _attention_by_mixer(fields, [mixer] * fields.num_layers))


def qwen(fields: Fields) -> ModelCache:
    """Qwen2, Qwen3: where windows are used, the layers from max_window_layers on have one."""
    if fields.has("layer_types"):
        mixers = fields.mixers("layer_types", fields.num_layers, (Mixer.FULL, Mixer.WINDOW))
        return _cache(fields, _attention_by_mixer(fields, mixers))
    first = fields.num_layers
    if fields.flag("use_sliding_window") and fields.has("sliding_window"):
        first = min(first, fields.size("max_window_layers", least=0))
    mixers = (Mixer.FULL,) * first + (Mixer.WINDOW,) * (fields.num_layers - first)
    return _cache(fields, _attention_by_mixer(fields, mixers))


def qwen3_moe(fields: Fields) -> ModelCache:
    """Qwen3-MoE: where windows are used, every layer has one. Experts cache nothing."""
    return one_window(fields) if fields.flag("use_sliding_window") else full_attention(fields)


def gpt_oss(fields: Fields) -> ModelCache:
    """gpt-oss: windows and full attention take turns, as layer_types says."""
    return _cache(fields, _attention_by_mixer(fields, _alternating(fields, Mixer.WINDOW, period=2)))


def gemma3(fields: Fields) -> ModelCache:
    """Gemma 3: one layer in sliding_window_pattern attends to every token, unless layer_types says otherwise."""
    mixers = _alternating(fields, Mixer.WINDOW, period="sliding_window_pattern")
    return _cache(fields, _attention_by_mixer(fields, mixers))


def latent_attention(fields: Fields) -> ModelCache:
    """DeepSeek-V2 and V3, Kimi K2: latents alone. The layers for multi-token prediction are like the others."""
    draft = _draft_layers(fields, fields.count("num_nextn_predict_layers", "num_mtp_layers"))
    return _cache(fields, latents(fields, range(fields.num_layers)), latents(fields, draft))


def sparse_latent_attention(fields: Fields) -> ModelCache:
    """DeepSeek-V3.2: latents, and the index keys that choose which of them to attend to."""
    layers = range(fields.num_layers)
    draft = _draft_layers(fields, fields.count("num_nextn_predict_layers", "num_mtp_layers"))
    return _cache(
        fields,
        (*latents(fields, layers), *index_keys(fields, layers)),
        (*latents(fields, draft), *index_keys(fields, draft)),
    )


def gated_delta_hybrid(fields: Fields) -> ModelCache:
    """Qwen3-Next, Qwen3.5: gated delta nets, and one layer in full_attention_interval that attends to every token."""
    mixers = _alternating(fields, Mixer.RECURRENT, period="full_attention_interval")
    draft = _draft_layers(fields, fields.count("mtp_num_hidden_layers", "num_nextn_predict_layers"))
    return _cache(
        fields,
        (
            *attention(fields, _layers(mixers, Mixer.FULL)),
            *gated_delta_net(fields, _layers(mixers, Mixer.RECURRENT)),
        ),
        attention(fields, draft),
    )


def mamba2_alone(fields: Fields) -> ModelCache:
    """Mamba2: no attention at all."""
    states = mamba2(
        fields,
        range(fields.num_layers),
        heads=fields.size("num_heads"),
        head_dim=fields.size("head_dim"),
        state_size=fields.size("state_size"),
        groups=fields.size("n_groups"),
        width=fields.conv_width("conv_kernel"),
    )
    return _cache(fields, states)


_NEMOTRON_PATTERN = {"M": Mixer.RECURRENT, "*": Mixer.FULL, "-": Mixer.NONE, "E": Mixer.NONE}


def nemotron_h(fields: Fields) -> ModelCache:
    """Nemotron-H and Nemotron 3: a layer is Mamba2, attention, or feed-forward, which caches nothing."""
    mixers = _nemotron_mixers(fields, "layers_block_type", "hybrid_override_pattern")
    if mixers is None:
        raise fields.error("neither hybrid_override_pattern nor layers_block_type says what each layer is")
    module = _nemotron_mixers(fields, "mtp_layers_block_type", "mtp_hybrid_override_pattern")
    draft = (module or (Mixer.FULL, Mixer.NONE)) * fields.count("num_nextn_predict_layers")
    sizes = {
        "heads": fields.size("mamba_num_heads"),
        "head_dim": fields.size("mamba_head_dim"),
        "state_size": fields.size("ssm_state_size"),
        "groups": fields.size("mamba_n_groups", "n_groups"),
        "width": fields.conv_width("mamba_d_conv", "conv_kernel"),
    }
    components, draft_components = (
        (
            *attention(fields, _layers(each, Mixer.FULL, first=first)),
            *mamba2(fields, _layers(each, Mixer.RECURRENT, first=first), **sizes),
        )
        for each, first in ((mixers, 0), (draft, len(mixers)))
    )
    return ModelCache(
        name=fields.model_type, num_layers=len(mixers), components=components, draft=as_draft(draft_components)
    )


def _nemotron_mixers(fields: Fields, types: str, pattern: str) -> tuple[Mixer, ...] | None:
    if fields.has(types):
        count = len(fields.get(types)) if isinstance(fields.get(types), list) else 0
        return fields.mixers(types, count, (Mixer.FULL, Mixer.RECURRENT, Mixer.NONE))
    if not fields.has(pattern):
        return None
    letters = fields.get(pattern)
    if not isinstance(letters, str) or not letters or set(letters) - set(_NEMOTRON_PATTERN):
        raise fields.error(
            f"{fields.prefix}{pattern} is {letters!r}: it must have a letter of {''.join(_NEMOTRON_PATTERN)} a layer"
        )
    if pattern == "hybrid_override_pattern" and fields.has("num_hidden_layers") and len(letters) != fields.num_layers:
        raise fields.error(
            f"{fields.prefix}{pattern} has {len(letters)} letters, but {fields.prefix}num_hidden_layers is "
            f"{fields.num_layers}"
        )
    return tuple(_NEMOTRON_PATTERN[letter] for letter in letters)


def jamba(fields: Fields) -> ModelCache:
    """Jamba: Mamba in its first version, and one attention layer in attn_layer_period."""
    period, offset = fields.size("attn_layer_period"), fields.size("attn_layer_offset", least=0)
    if offset >= period:
        raise fields.error(
            f"{fields.prefix}attn_layer_offset is {offset}: it must be below {fields.prefix}attn_layer_period, {period}"
        )
    mixers = [Mixer.FULL if index % period == offset else Mixer.RECURRENT for index in range(fields.num_layers)]
    states = mamba1(
        fields,
        _layers(mixers, Mixer.RECURRENT),
        channels=fields.size("mamba_expand") * fields.size("hidden_size"),
        state_size=fields.size("mamba_d_state"),
        width=fields.conv_width("mamba_d_conv"),
    )
    return _cache(fields, (*attention(fields, _layers(mixers, Mixer.FULL)), *states))


def minimax(fields: Fields) -> ModelCache:
    """MiniMax-Text-01 and M1: lightning attention, and full attention where attn_type_list has a 1."""
    mixers = _minimax_mixers(fields)
    return _cache(
        fields,
        (
            *attention(fields, _layers(mixers, Mixer.FULL)),
            *lightning_attention(fields, _layers(mixers, Mixer.RECURRENT)),
        ),
    )


def _minimax_mixers(fields: Fields) -> tuple[Mixer, ...]:
    if fields.has("layer_types"):
        return fields.mixers("layer_types", fields.num_layers, (Mixer.FULL, Mixer.RECURRENT))
    if not fields.has("attn_type_list"):
        raise fields.error(
            f"neither {fields.prefix}attn_type_list nor {fields.prefix}layer_types says what each layer is"
        )
    types = fields.get("attn_type_list")
    if not isinstance(types, list) or len(types) != fields.num_layers or any(each not in (0, 1) for each in types):
        raise fields.error(
            f"{fields.prefix}attn_type_list must be a list of {fields.num_layers} numbers, 0 for lightning attention "
            f"and 1 for full attention; it is {types!r}"
        )
    return tuple(Mixer.FULL if each else Mixer.RECURRENT for each in types)


def minimax_m2(fields: Fields) -> ModelCache:
    """MiniMax-M2: full attention alone."""
    draft = 0
    if fields.flag("use_mtp"):
        draft = fields.count("num_mtp_modules") * fields.size("mtp_transformer_layers")
    return _cache(fields, attention(fields, range(fields.num_layers)), attention(fields, _draft_layers(fields, draft)))


_GEMMA3 = {
    "num_hidden_layers": 26,
    "hidden_size": 2304,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
}
_GATED_DELTA = {
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}

FAMILIES: Mapping[str, Family] = {
    "deepseek_v2": Family(latent_attention),
    "deepseek_v3": Family(latent_attention),
    "deepseek_v32": Family(sparse_latent_attention, {"index_head_dim": 128}),
    "gemma3": Family(gemma3, _GEMMA3),
    "gemma3_text": Family(gemma3, _GEMMA3),
    "glm4_moe": Family(full_attention, {"head_dim": 128}),
    "gpt_oss": Family(gpt_oss, {"head_dim": 64, "num_key_value_heads": 8, "sliding_window": 128}, "bfloat16"),
    "jamba": Family(
        jamba,
        {
            "num_key_value_heads": 8,
            "attn_layer_period": 8,
            "attn_layer_offset": 4,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
        },
    ),
    "kimi_k2": Family(latent_attention),
    "llama": Family(full_attention),
    "mamba2": Family(mamba2_alone, {"n_groups": 8, "conv_kernel": 4}),
    "minimax": Family(minimax, {}, "bfloat16"),
    "minimax_m1": Family(minimax, {}, "bfloat16"),
    "minimax_m2": Family(minimax_m2, {"mtp_transformer_layers": 1}, "bfloat16"),
    "minimax_text_01": Family(minimax, {}, "bfloat16"),
    "mistral": Family(one_window, {"num_key_value_heads": 8, "sliding_window": 4096}),
    "mixtral": Family(one_window, {"num_key_value_heads": 8}),
    "nemotron_h": Family(
        nemotron_h,
        {"num_key_value_heads": 8, "head_dim": 128, "n_groups": 8, "conv_kernel": 4, "ssm_state_size": 128},
    ),
    "qwen2": Family(qwen, {"sliding_window": 4096, "max_window_layers": 28}),
    "qwen3": Family(qwen, {"head_dim": 128, "sliding_window": 4096, "max_window_layers": 28}),
    "qwen3_5": Family(gated_delta_hybrid, {"num_key_value_heads": 4, **_GATED_DELTA}),
    "qwen3_5_moe": Family(gated_delta_hybrid, {"num_key_value_heads": 2, **_GATED_DELTA}),
    "qwen3_5_moe_text": Family(gated_delta_hybrid, {"num_key_value_heads": 2, **_GATED_DELTA}),
    "qwen3_5_text": Family(gated_delta_hybrid, {"num_key_value_heads": 4, **_GATED_DELTA}),
    "qwen3_moe": Family(qwen3_moe, {"num_key_value_heads": 4, "sliding_window": 4096}),
    "qwen3_next": Family(gated_delta_hybrid, {"num_key_value_heads": 2, **_GATED_DELTA}),
}
"""The known families, by the model_type of config.json."""
