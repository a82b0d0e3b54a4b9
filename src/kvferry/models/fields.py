"""The fields of a model's configuration, each checked as it is read. An error names the file and the field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from kvferry.errors import ModelError
from kvferry.layout.component import BYTES_PER_ELEMENT

PACKED_DTYPE = "float4_e2m1fn_x2"
"""Two numbers in an element, so that a head's dims are not its elements."""

DTYPE_FIELDS = ("dtype", "torch_dtype")
"""The fields in which transformers names the weights' element type, since version 5 and before."""

STATE_DTYPE_FIELDS = ("mamba_ssm_cache_dtype", "mamba_ssm_dtype")
"""The fields in which Nemotron-H and Qwen3.5 name the element type of their recurrent states."""


class Mixer(Enum):
    """How a layer mixes tokens, and so what it caches."""

    FULL = "full attention"
    WINDOW = "sliding-window attention"
    RECURRENT = "a recurrent state"
    NONE = "none: it is a feed-forward layer"


_MIXERS = {
    "full_attention": Mixer.FULL,
    "attention": Mixer.FULL,
    "sliding_attention": Mixer.WINDOW,
    "linear_attention": Mixer.RECURRENT,
    "mamba": Mixer.RECURRENT,
    "mlp": Mixer.NONE,
    "moe": Mixer.NONE,
}
"""Layer types as transformers spells them, now and before version 5."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoices:
    """What the engine decides, not the model.

    Attributes:
        cache_dtype: element type of keys, values and latents; None keeps the model's.
        state_dtype: element type of recurrent states; None takes the configuration's.
        extra_conv_columns: what convolution states keep besides the kernel's size less one.

    Raises:
        ModelError: if a dtype is unknown, or the number negative.
    """

    cache_dtype: str | None = None
    state_dtype: str | None = None
    extra_conv_columns: int = 0

    def __post_init__(self) -> None:
        for name, dtype in (("cache_dtype", self.cache_dtype), ("state_dtype", self.state_dtype)):
            if dtype is not None:
                _check_dtype(name, dtype)
        if self.extra_conv_columns < 0:
            raise ModelError(f"extra_conv_columns is {self.extra_conv_columns}: it must not be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """A configuration that is read field by field. A field that is null counts as missing.

    Attributes:
        values: the configuration, of the language model alone.
        defaults: what transformers takes where a field is missing from the file, null not included.
        default_dtype: element type of the published weights, where their files do not name it.
        model_type: the configuration's model_type.
        source: the file, for errors.
        prefix: stands before the names of fields in errors, such as "text_config.".
        choices: what the engine decides.
    """

    values: Mapping[str, Any]
    model_type: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    default_dtype: str | None = None
    source: str = "the configuration"
    prefix: str = ""
    choices: EngineChoices = EngineChoices()

    def error(self, text: str) -> ModelError:
        """Makes an error that names the file."""
        return ModelError(f"{self.source}: {text}")

    def get(self, name: str) -> Any:
        """Returns a field as it stands in the file, else its default, else None."""
        return self.values[name] if name in self.values else self.defaults.get(name)

    def has(self, name: str) -> bool:
        """Returns whether a field has a value."""
        return self.get(name) is not None

    def size(self, *names: str, least: int = 1) -> int:
        """Returns a whole number, from the first of the fields that has one.

        Raises:
            ModelError: if none has, or it is too small.
        """
        for name in names:
            value = self.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise self.error(f"{self.prefix}{name} is {value!r}: it must be a whole number from {least} on")
            return value
        where = " or ".join(self.prefix + name for name in names)
        raise self.error(f"{where} is missing, and what {self.model_type!r} caches depends on it")

    def count(self, *names: str) -> int:
        """Returns a whole number as `size` does, from 0 on, and 0 where no field has one."""
        return self.size(*names, least=0) if any(self.has(name) for name in names) else 0

    def flag(self, name: str) -> bool:
        """Returns a field that is true or false; false where missing."""
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.error(f"{self.prefix}{name} is {value!r}: it must be true or false")
        return bool(value)

    @property
    def num_layers(self) -> int:
        """How many layers the model has."""
        return self.size("num_hidden_layers")

    @property
    def num_kv_heads(self) -> int:
        """How many heads keys and values have: all attention heads where no number of their own is given."""
        return self.size("num_key_value_heads", "num_attention_heads")

    @property
    def head_dim(self) -> int:
        """The dims of a head: the hidden size divided among the heads where it is not given."""
        if self.has("head_dim"):
            return self.size("head_dim")
        hidden, heads = self.size("hidden_size"), self.size("num_attention_heads")
        if hidden % heads:
            raise self.error(
                f"{self.prefix}head_dim is missing, and {self.prefix}hidden_size {hidden} is not a multiple of "
                f"{self.prefix}num_attention_heads {heads}: add head_dim to the file"
            )
        return hidden // heads

    @property
    def model_dtype(self) -> str:
        """The element type of the weights, which convolution states have too."""
        return self._dtype(DTYPE_FIELDS) or self._default_dtype()

    @property
    def cache_dtype(self) -> str:
        """The element type of keys, values and latents."""
        return self.choices.cache_dtype or self.model_dtype

    def state_dtype(self, *, default: str) -> str:
        """Returns the element type of recurrent states: the engine's, else the configuration's, else the default."""
        return self.choices.state_dtype or self._dtype(STATE_DTYPE_FIELDS) or default

    def conv_width(self, *names: str) -> int:
        """Returns how many columns a convolution's state keeps of a channel.

        Args:
            names: the fields that may have the kernel's size.
        """
        return self.size(*names, least=2) - 1 + self.choices.extra_conv_columns

    def mixers(self, name: str, num_layers: int, allowed: Sequence[Mixer]) -> tuple[Mixer, ...]:
        """Reads what every layer is from a list of layer types.

        Raises:
            ModelError: if it is no list, of another length, or has a type that the architecture does not.
        """
        types = self.get(name)
        known = [word for word, mixer in _MIXERS.items() if mixer in allowed]
        if not isinstance(types, list) or len(types) != num_layers:
            found = f"has {len(types)} entries" if isinstance(types, list) else f"is {types!r}"
            raise self.error(f"{self.prefix}{name} {found}: it must be a list of {num_layers} layer types")
        for index, word in enumerate(types):
            if word not in known:
                raise self.error(
                    f"{self.prefix}{name}[{index}] is {word!r}: layers of {self.model_type!r} are "
                    f"{' or '.join(known)}; describe other caches by hand"
                )
        return tuple(_MIXERS[word] for word in types)

    def _dtype(self, names: Sequence[str]) -> str | None:
        for name in names:
            value = self.values.get(name)
            if value is not None:
                dtype = value.removeprefix("torch.") if isinstance(value, str) else value
                _check_dtype(f"{self.source}: {self.prefix}{name}", dtype)
                return str(dtype)
        return None

    def _default_dtype(self) -> str:
        if self.default_dtype is None:
            raise self.error(
                f'neither {" nor ".join(DTYPE_FIELDS)} is given: add one to the file, such as "dtype": "bfloat16"'
            )
        return self.default_dtype


def _check_dtype(name: str, dtype: Any) -> None:
    if dtype == PACKED_DTYPE:
        raise ModelError(f"{name} is {dtype}, which packs two numbers into each element: describe the cache by hand")
    if not isinstance(dtype, str) or dtype not in BYTES_PER_ELEMENT:
        raise ModelError(f"{name} is {dtype!r}: known are {', '.join(BYTES_PER_ELEMENT)}")
