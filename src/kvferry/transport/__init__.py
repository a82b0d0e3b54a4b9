"""Moves bytes between endpoints. `base` is the contract; every transport has a file."""

from kvferry.transport.base import PeerMetadata, PreparedList, Promises, TransferHandle, TransferReport, Transport
from kvferry.transport.diagnosis import Diagnosis, WayTaken
from kvferry.transport.inprocess import InProcessNetwork, InProcessTransport
from kvferry.transport.nixl import NixlTransport

__all__ = [
    "Diagnosis",
    "InProcessNetwork",
    "InProcessTransport",
    "NixlTransport",
    "PeerMetadata",
    "PreparedList",
    "Promises",
    "TransferHandle",
    "TransferReport",
    "Transport",
    "WayTaken",
]
