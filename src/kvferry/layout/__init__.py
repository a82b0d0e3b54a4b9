"""What is cached, who holds which part of it, and where it lies. No I/O, no model families.

`component` describes a kind of cached state by its logical axes, `interval` and `parallel` say which part a rank holds,
`shard` where the part lies in memory, and `tensors` makes shards from an engine's tensors.
"""

from kvferry.layout.component import Axis, Component, attention_components, latent_component
from kvferry.layout.interval import Box, Interval
from kvferry.layout.parallel import RankCoordinates, all_coordinates, split, stage_layers
from kvferry.layout.shard import Device, MemoryKind, Paging, RankLayout, Region, Shard
from kvferry.layout.tensors import empty_shard, shard_from_tensors

__all__ = [
    "Axis",
    "Box",
    "Component",
    "Device",
    "Interval",
    "MemoryKind",
    "Paging",
    "RankCoordinates",
    "RankLayout",
    "Region",
    "Shard",
    "all_coordinates",
    "attention_components",
    "empty_shard",
    "latent_component",
    "shard_from_tensors",
    "split",
    "stage_layers",
]
