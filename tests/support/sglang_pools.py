"""Stand-ins for SGLang's pools and its model's configuration: what kvferry's plug-in reads of them, without SGLang."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any

from kvferry.engines.sglang.pools import around_managers, remember_pools

_LISTS = ("data_ptrs", "data_lens", "item_lens")


class StateType(str, Enum):
    """As SGLang's."""

    SWA = "swa"
    MAMBA = "mamba"


class Tensor:
    """A tensor of which only the address matters."""

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address


def named(name: str, **attributes: Any) -> Any:
    """An object of a class of that name."""
    return type(name, (SimpleNamespace,), {})(**attributes)


WINDOW_TOKENS = 8


def remembered(
    args: Any,
    *pools: Any,
    window_tokens: int | None = WINDOW_TOKENS,
    draft_runners: Sequence[Any] = (),
    scheduler: Any = None,
) -> None:
    """Remembers a rank's pools, as while SGLang makes its manager.

    Args:
        pools: as for `remember_pools`.
        window_tokens: the scheduler's window.
        draft_runners: what runs its draft model.
        scheduler: the rank's, where it had a manager before; a new one if None.
    """
    worker = SimpleNamespace(_draft_model_runners=lambda: tuple(draft_runners)) if draft_runners else None
    scheduler = scheduler or SimpleNamespace()
    scheduler.sliding_window_size, scheduler.draft_worker = window_tokens, worker
    around_managers(lambda _: remember_pools(None, args, *pools), SimpleNamespace(scheduler=scheduler))


def heads_pool(
    held: int, head_bytes: int = 8, value_bytes: int | None = None, *, layout: str = "nhd", item: int = 1, **more: Any
) -> Any:
    """A MHATokenToKVPool with so many heads on a rank."""
    given = {
        "model_layer_ids": (),
        "start_layer": 0,
        "size": 36,
        "page_size": 4,
        "head_num": held,
        "head_dim": head_bytes // item,
        "v_head_dim": (head_bytes if value_bytes is None else value_bytes) // item,
        "store_dtype": SimpleNamespace(itemsize=item),
        "kv_cache_layout": layout,
        "k_scale_buffer": None,
    }
    return named("MHATokenToKVPool", **given | more)


def mamba_pool(convolutions: Sequence[Sequence[int]], temporal: Sequence[int]) -> Any:
    """A MambaPool whose layers are at these addresses."""
    cache = SimpleNamespace(
        conv=[[Tensor(each) for each in layers] for layers in convolutions],
        temporal=[Tensor(each) for each in temporal],
    )
    return named("MambaPool", mamba_cache=cache)


def model_config(
    full: int | None = None, windows: int | None = None, *, window_tokens: int = WINDOW_TOKENS, layers: int = 4
) -> Any:
    """A ModelConfig that says so many heads.

    Args:
        windows: those of layers with a sliding window; None if the configuration has one number for all.
    """
    return SimpleNamespace(
        get_total_num_kv_heads=lambda: full,
        get_swa_num_kv_heads=lambda _: full if windows is None else windows,
        sliding_window_size=window_tokens,
        num_hidden_layers=layers,
    )


@dataclass
class Lists:
    """A rank's buffers as SGLang lists them, at addresses of their own."""

    page_tokens: int = 4
    pages: int = 10
    args: SimpleNamespace = field(default_factory=SimpleNamespace)
    _next: int = 0x100000

    def __post_init__(self) -> None:
        self.args = SimpleNamespace(
            page_size=self.page_tokens, prefill_start_layer=0, num_draft_entries=0, state_types=[], ib_device=None
        )
        for name in ("kv_data_ptrs", "kv_data_lens", "kv_item_lens"):
            setattr(self.args, name, [])
        for name in ("data_ptrs", "data_lens", "item_lens", "dim_per_tensor", "slice_outer_counts", "layer_ids"):
            setattr(self.args, f"state_{name}", [])
        self.args.state_conv_shard_groups = []

    def buffers(self, count: int, item_bytes: int) -> tuple[list[int], list[int], list[int]]:
        """Makes buffers: their addresses, lengths and item sizes."""
        length = self.pages * item_bytes
        addresses = [self._next + number * length for number in range(count)]
        self._next += count * length
        return addresses, [length] * count, [item_bytes] * count

    def attention(self, layers: int, key_row: int, value_row: int | None = None) -> None:
        """Adds layers of keys and values with so many bytes a token."""
        for row in (key_row, key_row if value_row is None else value_row):
            self.latents(layers, row)

    def latents(self, layers: int, row: int) -> None:
        """Adds layers of latents with so many bytes a token."""
        for name, added in zip(_LISTS, self.buffers(layers, row * self.page_tokens), strict=True):
            getattr(self.args, f"kv_{name}").extend(added)

    def state(
        self,
        kind: Any,
        given: Sequence[list[int]],
        *,
        channels: Sequence[int] = (),
        rows: Sequence[int] = (),
        layers: Sequence[int] = (),
        groups: Sequence[list[int] | None] = (),
    ) -> None:
        """Adds what SGLang transfers beside keys and values."""
        self.args.state_types.append(kind)
        for name, added in zip(_LISTS, given, strict=True):
            getattr(self.args, f"state_{name}").append(added)
        self.args.state_dim_per_tensor.append(list(channels))
        self.args.state_slice_outer_counts.append(list(rows))
        self.args.state_layer_ids.append(list(layers))
        self.args.state_conv_shard_groups.append(list(groups))

    def window(self, layers: int, key_row: int, value_row: int | None = None) -> None:
        """Adds layers of a window, in a pool of its own."""
        parts = [self.buffers(layers, row * self.page_tokens) for row in (key_row, value_row or key_row)]
        self.state(StateType.SWA, [[*keys, *values] for keys, values in zip(*parts, strict=True)])

    def in_pools(self, target: Any, draft: Any = None, requests: Any = None) -> SimpleNamespace:
        """The rank's KVArgs, with its pools."""
        remembered(self.args, target, draft, 0, requests)
        return self.args
