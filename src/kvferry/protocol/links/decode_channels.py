"""The prefill rank's ends of the reliable channels to decode ranks. All of it belongs to the control thread."""

from __future__ import annotations

from collections import OrderedDict

from kvferry.protocol.bounded import remember
from kvferry.protocol.links.reliable_channel import ReliableChannel
from kvferry.protocol.wire import codec, field_types, messages

_MOST_REMEMBERED = 1 << 16
_MOST_EARLIER = 16  # a decode rank repeats an abort with every heartbeat, and seldom attaches anew in between


class DecodeChannels:
    """Channels by decode rank: of those that have attached, and closed ones, of those that had. The oldest go first."""

    def __init__(self, endpoint: str) -> None:
        """Begins with none; `endpoint` is this rank's name."""
        self._endpoint = endpoint
        self._channels: OrderedDict[str, ReliableChannel] = OrderedDict()  # the latest stand last
        # Of the channels before each: their epochs, and what was received; the latest stand last.
        self._earlier: OrderedDict[str, tuple[tuple[int, int], ...]] = OrderedDict()
        self._none = ReliableChannel(-1)  # to whoever has never attached
        self._none.close()

    def _to(self, receiver: str) -> ReliableChannel:
        return self._channels.get(receiver, self._none)

    def attached(self, receiver: str, attempt: int) -> bool:
        """Begins a channel for a decode rank's attempt to attach. Returns False if it is no newer than the last."""
        before = self._to(receiver)
        if before.epoch >= attempt:
            return False
        remember(self._channels, receiver, ReliableChannel(attempt), _MOST_REMEMBERED)
        earlier = (*self._earlier.get(receiver, ()), (before.epoch, before.received))[-_MOST_EARLIER:]
        remember(self._earlier, receiver, earlier, _MOST_REMEMBERED)
        return True

    def is_open(self, receiver: str) -> bool:
        """Whether there is a channel to a decode rank."""
        return not self._to(receiver).is_closed

    def is_unacknowledged(self, receiver: str) -> bool:
        """Whether a message to a decode rank may not have come."""
        return self._to(receiver).has_unacknowledged

    def close(self, receiver: str) -> None:
        """Ends the channel to a decode rank that is not attached any more."""
        self._to(receiver).close()

    def outgoing(self, receiver: str, message: field_types.Message) -> list[field_types.Message]:
        """Returns what to send now for a message to a decode rank: none where it must wait, or is for nobody."""
        if not isinstance(message, messages.NumberedToDecode):
            return [message]
        return [*self._to(receiver).send(codec.encode_body(message))]

    def take(self, receiver: str, message: messages.Numbered) -> list[messages.NumberedToPrefill] | None:
        """Takes a numbered message. Returns what counts of it; None if the decode rank is not attached, and not told.

        Raises:
            MessageError: if it is malformed.
        """
        channel = self._to(receiver)
        if channel.epoch < message.epoch or (channel.is_closed and channel.epoch == message.epoch):
            return None
        return [codec.decode_numbered_to_prefill(body) for body in channel.receive(message)]

    def answer(self, receiver: str, ping: messages.Ping) -> list[field_types.Message]:
        """Returns the answer to the heartbeat of a decode rank that is attached, and what it makes necessary."""
        channel = self._to(receiver)
        if channel.epoch != ping.epoch:
            return [messages.Pong(endpoint=self._endpoint, attached=True)]
        return [*channel.answer(ping, self._endpoint)]

    def unasked_acknowledgement(self, receiver: str) -> list[field_types.Message]:
        """Returns an acknowledgement that should not wait for the next heartbeat, if there is one."""
        channel = self._to(receiver)
        return [channel.pong(self._endpoint)] if channel.owes_acknowledgement else []

    def take_back(self, receiver: str, epoch: int, number: int) -> bool:
        """Takes back a message of a decode rank that has not come: it does not count if it does.

        Returns whether it has not come, and will not count. What was sent with an attempt to attach so long ago that it
        is forgotten counts as come, and so does what was never sent (number 0).
        """
        channel = self._to(receiver)
        if channel.epoch == epoch:
            return channel.take_back(number)
        for attempt, received in ((channel.epoch, 0), *reversed(self._earlier.get(receiver, ()))):
            if attempt <= epoch:
                return number > (received if attempt == epoch else 0)
        return False
