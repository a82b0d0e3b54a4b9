"""kvferry moves LLM KV caches from prefill workers to decode workers: any parallel layout to any other.

Describe what a rank caches with `layout`, make a `PrefillEndpoint` on every prefill rank and a `DecodeEndpoint` on
every decode rank, open the same room number on both sides, and submit chunks of pages as they are computed.
"""

from kvferry._version import __version__
from kvferry.endpoint import DecodeEndpoint, PrefillEndpoint, Receiver, ReceiverStats, Sender, SenderStats
from kvferry.layout import (
    Axis,
    Component,
    Dealing,
    Entry,
    Interval,
    RankCoordinates,
    RankLayout,
    Shard,
    ShardedComponent,
    TokenShare,
    all_coordinates,
    attention_components,
    contiguous,
    empty_shard,
    interleaved,
    latent_component,
    packed_component,
    shard_from_tensors,
    split,
    stage_layers,
    state_component,
    zigzag,
)
from kvferry.protocol.chunks import GroupPages
from kvferry.protocol.states import TransferState
from kvferry.settings import Settings
from kvferry.transport import InProcessNetwork, InProcessTransport, NixlTransport

__all__ = [
    "Axis",
    "Component",
    "Dealing",
    "DecodeEndpoint",
    "Entry",
    "GroupPages",
    "InProcessNetwork",
    "InProcessTransport",
    "Interval",
    "NixlTransport",
    "PrefillEndpoint",
    "RankCoordinates",
    "RankLayout",
    "Receiver",
    "ReceiverStats",
    "Sender",
    "SenderStats",
    "Settings",
    "Shard",
    "ShardedComponent",
    "TokenShare",
    "TransferState",
    "__version__",
    "all_coordinates",
    "attention_components",
    "contiguous",
    "empty_shard",
    "interleaved",
    "latent_component",
    "packed_component",
    "shard_from_tensors",
    "split",
    "stage_layers",
    "state_component",
    "zigzag",
]
