"""Moves bytes between endpoints. `base` is the contract; one file a transport."""

from kvferry.transport.base import Flight, FlightReport, PeerMetadata, PreparedList, Transport
from kvferry.transport.inprocess import InProcessNetwork, InProcessTransport
from kvferry.transport.nixl import NixlTransport

__all__ = [
    "Flight",
    "FlightReport",
    "InProcessNetwork",
    "InProcessTransport",
    "NixlTransport",
    "PeerMetadata",
    "PreparedList",
    "Transport",
]
