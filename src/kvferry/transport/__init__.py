"""Moves bytes between endpoints. `base` is the contract; every transport has a file."""

from kvferry.transport.base import PeerMetadata, PreparedList, Promises, TransferHandle, TransferReport, Transport
from kvferry.transport.confined_ports import confine, sockets_on_every_interface
from kvferry.transport.copies import Copies
from kvferry.transport.diagnosis import Diagnosis, WayTaken
from kvferry.transport.inprocess import InProcessNetwork, InProcessTransport
from kvferry.transport.message_channel import ChannelAddress, MessageChannel, MessageSender
from kvferry.transport.nixl import NixlTransport
from kvferry.transport.ranges import Connection, RangeTransport
from kvferry.transport.registered import RegisteredMemory
from kvferry.transport.text_notifications import TextNotifications

__all__ = [
    "ChannelAddress",
    "Connection",
    "Copies",
    "Diagnosis",
    "InProcessNetwork",
    "InProcessTransport",
    "MessageChannel",
    "MessageSender",
    "NixlTransport",
    "PeerMetadata",
    "PreparedList",
    "Promises",
    "RangeTransport",
    "RegisteredMemory",
    "TextNotifications",
    "TransferHandle",
    "TransferReport",
    "Transport",
    "WayTaken",
    "confine",
    "sockets_on_every_interface",
]
