"""The shell around the pure state machines: endpoints with their threads, queues, pollers and deadlines."""

from kvferry.endpoint.decode import DecodeEndpoint
from kvferry.endpoint.prefill import PrefillEndpoint
from kvferry.endpoint.receiving import Receiver
from kvferry.endpoint.sender import Sender
from kvferry.observe.records import ReceiverStats, SenderStats, WriteRecord

__all__ = [
    "DecodeEndpoint",
    "PrefillEndpoint",
    "Receiver",
    "ReceiverStats",
    "Sender",
    "SenderStats",
    "WriteRecord",
]
