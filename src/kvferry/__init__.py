"""kvferry moves LLM KV caches from prefill workers to decode workers: any parallel layout to any other.

Describe what a rank caches with `layout`, make a `PrefillEndpoint` on every prefill rank and a `DecodeEndpoint` on
every decode rank, open the same room number on both sides, and submit chunks of pages as they are computed.
"""

from kvferry._version import __version__
from kvferry.control.construction import create_registry, create_registry_client
from kvferry.control.registry import Registry
from kvferry.control.registry_client import RegistryClient
from kvferry.control.registry_server import RegistryServer
from kvferry.endpoint import DecodeEndpoint, PrefillEndpoint, Receiver, ReceiverStats, Sender, SenderStats
from kvferry.layout import (
    Axis,
    Component,
    Device,
    Entry,
    Interval,
    MemoryKind,
    Paging,
    RankCoordinates,
    RankLayout,
    Region,
    Shard,
    ShardedComponent,
    TokenPartition,
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
from kvferry.layout.tensors import TensorGeometry, geometry
from kvferry.plan.requests.page_numbers import GroupPages
from kvferry.protocol.transfer.states import TransferState
from kvferry.protocol.wire.registrations import EngineView, check_engine_name
from kvferry.settings import Settings
from kvferry.transport import InProcessNetwork, InProcessTransport, NixlTransport

__all__ = [
    "Axis",
    "Component",
    "DecodeEndpoint",
    "Device",
    "EngineView",
    "Entry",
    "GroupPages",
    "InProcessNetwork",
    "InProcessTransport",
    "Interval",
    "MemoryKind",
    "NixlTransport",
    "Paging",
    "PrefillEndpoint",
    "RankCoordinates",
    "RankLayout",
    "Receiver",
    "ReceiverStats",
    "Region",
    "Registry",
    "RegistryClient",
    "RegistryServer",
    "Sender",
    "SenderStats",
    "Settings",
    "Shard",
    "ShardedComponent",
    "TensorGeometry",
    "TokenPartition",
    "TokenShare",
    "TransferState",
    "__version__",
    "all_coordinates",
    "attention_components",
    "check_engine_name",
    "contiguous",
    "create_registry",
    "create_registry_client",
    "empty_shard",
    "geometry",
    "interleaved",
    "latent_component",
    "packed_component",
    "shard_from_tensors",
    "split",
    "stage_layers",
    "state_component",
    "zigzag",
]
