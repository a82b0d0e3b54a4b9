"""Recurrent state in SGLang's pools: which buffers have it, and how ranks divide what is in them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvferry.engines.sglang.cache_kinds import check_pool
from kvferry.engines.sglang.caches import Block, Buffers, StateBuffer
from kvferry.engines.sglang.placement import Placement
from kvferry.errors import LayoutError

_GROUPS = {
    "NemotronHConfig": "n_groups",
    "GraniteMoeHybridConfig": "mamba_n_groups",
    "FalconH1Config": "mamba_n_groups",
    "Mamba2Config": "n_groups",
}
"""Configurations of the models with SGLang's MambaMixer2, and what they call the number of its groups."""


def mamba_pool(*holders: Any) -> Any:
    """Returns the pool of recurrent state, which one of the holders has.

    Raises:
        LayoutError: if kvferry does not transfer such pools, or there is none.
    """
    for holder in holders:
        pool = getattr(holder, "mamba_pool", None)
        if pool is not None:
            check_pool(pool, "layers with recurrent state")
            return pool
    raise LayoutError("SGLang lists recurrent state, and no pool of it")


def state_buffers(
    args: Any, number: int, given: Buffers, pool: Any, recurrent: Any, place: Placement
) -> Iterator[StateBuffer]:
    """Yields the buffers of a rank's recurrent state, with the blocks that their channels are made of.

    Args:
        number: of the state there.
        given: what SGLang lists for it.
    """
    count = len(given)
    layers = args.state_layer_ids[number] or range(count)
    channels = args.state_dim_per_tensor[number] or [0] * count
    rows = args.state_slice_outer_counts[number] or [1] * count
    groups = args.state_conv_shard_groups[number] or [None] * count
    convolutions = {tensor[layer].data_ptr() for tensor in pool.mamba_cache.conv for layer in range(len(tensor))}
    temporal = pool.mamba_cache.temporal
    heads = {temporal[layer].data_ptr() for layer in range(len(temporal))}
    for index, address in enumerate(given.addresses):
        blocks: tuple[Block, ...] | None = None
        if address in convolutions:
            blocks = _convolution(channels[index], groups[index], recurrent, place.states.count)
        elif address in heads:
            total = channels[index] * place.states.count
            blocks = (Block(total, total),)
        yield StateBuffer(
            address=address,
            length=given.lengths[index],
            item_bytes=given.item_bytes[index],
            layer=layers[index],
            channels=channels[index],
            rows=rows[index],
            blocks=blocks,
        )


def _convolution(channels: int, groups: list[int] | None, recurrent: Any, tp_size: int) -> tuple[Block, ...] | None:
    """Returns the blocks that a convolution's channels are made of; None if they cannot be known.

    Args:
        channels: that this rank holds.
        groups: the sizes of blocks that SGLang names, over all ranks.
        recurrent: the configuration of layers with recurrent state.
    """
    total = channels * tp_size
    if groups:
        is_even = sum(groups) == total and all(size > 0 and size % tp_size == 0 for size in groups)
        return tuple(Block(size, size) for size in groups) if is_even else None
    shape = recurrent.mamba2_cache_params.shape if recurrent is not None else None
    if getattr(shape, "conv_dim", None) != total or shape is None:
        return None
    if shape.intermediate_size == total:
        return (Block(total, total),)
    name = _GROUPS.get(type(recurrent).__name__)
    if name is None:
        return None
    # MambaMixer2 lists x, B and C. It cuts x by heads, and B and C by groups, of which each rank has at least one.
    count = getattr(recurrent, name)
    if count % tp_size and count != 1:
        return None
    per_group = count * shape.state_size
    x = Block(shape.intermediate_size, shape.num_heads)
    b_and_c = Block(per_group, count)
    held = shape.intermediate_size // tp_size + 2 * max(per_group // tp_size, shape.state_size)
    return (x, b_and_c, b_and_c) if held == channels else None
