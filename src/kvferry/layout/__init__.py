"""What is cached, who holds which part of it, and where it lies. No I/O, no model families.

`component` describes a kind of cached state by its logical axes; `interval`, `parallel`, `sharding` and `tokens` say
which part a rank holds, `shard` where the part lies in memory; `tensors` makes shards from an engine's tensors and
`virtual` from nothing, to plan with.
"""

from kvferry.layout.component import (
    Axis,
    Component,
    Entry,
    attention_components,
    latent_component,
    packed_component,
    state_component,
)
from kvferry.layout.interval import Box, Interval
from kvferry.layout.parallel import RankCoordinates, all_coordinates, split, stage_layers
from kvferry.layout.shard import Device, MemoryKind, PageGroup, Paging, RankLayout, Region, Shard
from kvferry.layout.sharding import ShardedComponent, even_stages, stage_of
from kvferry.layout.tensors import default_group, empty_shard, shard_from_tensors
from kvferry.layout.tokens import TokenPartition, TokenShare, contiguous, interleaved, zigzag
from kvferry.layout.virtual import PageOrder, VirtualPools, virtual_layout

__all__ = [
    "Axis",
    "Box",
    "Component",
    "Device",
    "Entry",
    "Interval",
    "MemoryKind",
    "PageGroup",
    "PageOrder",
    "Paging",
    "RankCoordinates",
    "RankLayout",
    "Region",
    "Shard",
    "ShardedComponent",
    "TokenPartition",
    "TokenShare",
    "VirtualPools",
    "all_coordinates",
    "attention_components",
    "contiguous",
    "default_group",
    "empty_shard",
    "even_stages",
    "interleaved",
    "latent_component",
    "packed_component",
    "shard_from_tensors",
    "split",
    "stage_layers",
    "stage_of",
    "state_component",
    "virtual_layout",
    "zigzag",
]
