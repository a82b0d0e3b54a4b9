"""The shell around the pure state machines: endpoints with their threads, queues, pollers and deadlines."""

from kvferry.endpoint.decode.endpoint import DecodeEndpoint
from kvferry.endpoint.prefill.endpoint import PrefillEndpoint
from kvferry.endpoint.transfer import Receiver, Sender
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
