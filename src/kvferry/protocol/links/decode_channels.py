"""The prefill rank's ends of the reliable channels to decode ranks. All of it belongs to the control thread."""

from __future__ import annotations

from collections.abc import Iterable

from kvferry.protocol.bounded import forget_oldest
from kvferry.protocol.links.reliable_channel import ReliableChannel
from kvferry.protocol.wire import codec, field_types, messages

_MOST_REMEMBERED = 1 << 16


class DecodeChannels:
    """Channels by decode rank: of those that have attached, and closed ones, of those that had. The oldest go first."""

    def __init__(self, endpoint: str) -> None:
        """Begins with none.

        Args:
            endpoint: this rank's name.
        """
        self._endpoint = endpoint
        self._channels: dict[str, ReliableChannel] = {}  # the latest stand last
        self._came_before: dict[str, tuple[int, int]] = {}  # of the channel before each: its epoch, what was received

    def attached(self, receiver: str, attempt: int) -> bool:
        """Begins a channel for a decode rank's attempt to attach. Returns False if it is no newer than the last."""
        known = self._channels.get(receiver)
        if known is not None and known.epoch >= attempt:
            return False
        self._channels.pop(receiver, None)
        self._channels[receiver] = ReliableChannel(attempt)
        self._came_before.pop(receiver, None)
        if known is not None:
            self._came_before[receiver] = known.epoch, known.received
        forget_oldest(self._channels, _MOST_REMEMBERED)
        forget_oldest(self._came_before, _MOST_REMEMBERED)
        return True

    def is_open(self, receiver: str) -> bool:
        """Whether there is a channel to a decode rank."""
        return receiver in self._channels and not self._channels[receiver].is_closed

    def is_unacknowledged(self, receiver: str) -> bool:
        """Whether a message to a decode rank may not have come."""
        return receiver in self._channels and self._channels[receiver].has_unacknowledged

    def close(self, receiver: str) -> None:
        """Ends the channel to a decode rank that is not attached any more."""
        if receiver in self._channels:
            self._channels[receiver].close()

    def outgoing(self, receiver: str, message: field_types.Message) -> list[field_types.Message]:
        """Returns what to send now for a message to a decode rank: none where it must wait, or is for nobody."""
        if not isinstance(message, messages.NumberedToDecode):
            return [message]
        channel = self._channels.get(receiver)
        return list(channel.send(codec.encode_body(message))) if channel is not None else []

    def take(self, receiver: str, message: messages.Numbered) -> list[messages.NumberedToPrefill] | None:
        """Takes a numbered message. Returns what counts of it; None if the decode rank is not attached, and not told.

        Raises:
            MessageError: if it is malformed.
        """
        channel = self._channels.get(receiver)
        if channel is None or channel.epoch < message.epoch or (channel.is_closed and channel.epoch == message.epoch):
            return None
        return [codec.decode_numbered_to_prefill(body) for body in channel.receive(message)]

    def answer(self, receiver: str, ping: messages.Ping) -> list[field_types.Message]:
        """Returns the answer to the heartbeat of a decode rank that is attached, and what it makes necessary."""
        channel = self._channels.get(receiver)
        if channel is None or channel.epoch != ping.epoch:
            return [messages.Pong(endpoint=self._endpoint, attached=True)]
        ready: Iterable[messages.Numbered] = channel.acknowledged(ping.received)
        if ping.resends:
            ready = channel.resend()
        return [*ready, self._pong(channel, heard_of=ping.sent)]

    def unasked_acknowledgement(self, receiver: str) -> list[field_types.Message]:
        """Returns an acknowledgement that should not wait for the next heartbeat, if there is one."""
        channel = self._channels.get(receiver)
        return [self._pong(channel)] if channel is not None and channel.owes_acknowledgement else []

    def _pong(self, channel: ReliableChannel, *, heard_of: int = 0) -> messages.Pong:
        return messages.Pong(
            endpoint=self._endpoint,
            attached=True,
            epoch=channel.epoch,
            sent=channel.sent,
            received=channel.acknowledge(),
            heard_of=heard_of,
        )

    def take_back(self, receiver: str, epoch: int, number: int) -> bool:
        """Takes back a message of a decode rank that has not come: it does not count if it does.

        Returns whether it has not come, and will not count. What may have come with an attempt to attach before the
        last two counts as come, and so does what was never sent (number 0).
        """
        channel = self._channels.get(receiver)
        if channel is None or channel.epoch < epoch:
            return number > 0
        if channel.epoch == epoch:
            return channel.take_back(number)
        before, received = self._came_before.get(receiver, (0, 0))
        return number > 0 and (before < epoch or (before == epoch and received < number))
