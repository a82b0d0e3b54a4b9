"""One end of the reliable channel between a decode rank and a prefill rank, while the one has the other attached.

The peer channel keeps the order of messages as long as a connection lasts, and loses some when it breaks. Messages
that must come, once and in order, are numbered from 1 on and kept until the other end has acknowledged them. What a
broken connection may have lost is sent again (go-back-N): at once by the decode rank, which notices the break, and by
the prefill rank when it is told of it. As a safeguard heartbeats say what was sent and what has come: what was sent
before a heartbeat and has not come when it has is lost.

Each attempt to attach has a channel of its own, named by its number (the epoch), so that nothing of an earlier one
counts. What outlives a channel does not go through it, and is idempotent from end to end: `AbortRoom`, which is
repeated until `Drained` answers, and says which `OpenRoom` it takes back by the number that this had.

No threads and no sockets: methods take what has come, and return what is to be sent.
"""

from __future__ import annotations

from collections import OrderedDict, deque

import msgspec

from kvferry.protocol.bounded import remember
from kvferry.protocol.wire import codec, field_types, messages
from kvferry.protocol.wire.messages import Numbered, Ping, Pong

WINDOW = 1 << 14
"""Most messages that are on their way without having been acknowledged; more wait."""

_MOST_TAKEN_BACK = 1 << 16
"""Of how many messages that have not come it is remembered that they are not to: as many rooms may be open by default,
and each can be taken back, also while its open request waits for the window. Beyond it is remembered by the room."""

_ACKNOWLEDGED_UNASKED = WINDOW // 4
"""Received messages after which an acknowledgement does not wait for a heartbeat."""


class ReliableChannel:
    """One end. It belongs to one thread.

    Attributes:
        epoch: the attempt to attach that it belongs to.
        last_number: of the message that was handed in last; 0 if there was none.
        received: the number of the last message that has come; none before it is missing.
        is_closed: whether nothing is sent or taken any more.
        taken_back: numbers of messages that have not come and are not to.
    """

    def __init__(self, epoch: int) -> None:
        """Begins with nothing sent or received."""
        self.epoch = epoch
        self.last_number = 0
        self.received = 0
        self.is_closed = False
        self._kept: deque[tuple[int, msgspec.Raw]] = deque()  # messages that were not acknowledged, by number
        self._on_way = 0  # how many of them were sent; the others wait for the window
        self._acknowledged = 0  # what the other end was told to have been received
        self.taken_back: set[int] = set()  # of messages that have not come

    @property
    def sent(self) -> int:
        """The number of the last message that was sent; 0 if there was none."""
        return self.last_number - (len(self._kept) - self._on_way)

    @property
    def has_unacknowledged(self) -> bool:
        """Whether the other end may not have received everything yet."""
        return bool(self._kept)

    def send(self, body: msgspec.Raw) -> list[Numbered]:
        """Takes a message to send. Returns it with its number, or nothing while it must wait."""
        if self.is_closed:
            return []
        self.last_number += 1
        self._kept.append((self.last_number, body))
        return self._sendable()

    def receive(self, message: Numbered) -> list[msgspec.Raw]:
        """Takes a message that has come. Returns it if it is the next and counts.

        What has come before, or comes too early since one is missing, is dropped: the latter will come again.
        """
        if self.is_closed or message.epoch != self.epoch or message.number != self.received + 1:
            return []
        self.received += 1
        if self.received in self.taken_back:
            self.taken_back.discard(self.received)
            return []
        return [message.body]

    def take_back(self, number: int) -> bool:
        """Has a message that has not come yet dropped when it does. Returns False if it has come."""
        if number <= self.received:
            return False
        if len(self.taken_back) < _MOST_TAKEN_BACK:
            self.taken_back.add(number)
        return True

    def ping(self, *, resends: bool = False) -> Ping:
        """Makes the decode rank's heartbeat, with what was sent and what has come.

        Args:
            resends: whether what has not come of the prefill rank's must be sent again.
        """
        self._acknowledged = self.received
        return Ping(epoch=self.epoch, sent=self.sent, received=self.received, resends=resends)

    def pong(self, endpoint: str, *, heard_of: int = 0) -> Pong:
        """Makes the prefill rank's answer to one.

        Args:
            endpoint: the prefill rank's name.
            heard_of: what the decode rank said that it had sent.
        """
        self._acknowledged = self.received
        return Pong(
            endpoint=endpoint,
            attached=True,
            epoch=self.epoch,
            sent=self.sent,
            received=self.received,
            heard_of=heard_of,
        )

    def answer(self, ping: Ping, endpoint: str) -> list[Numbered | Pong]:
        """Takes a heartbeat, at the prefill rank's end. Returns the answer, and before it what it makes necessary."""
        ready = self.acknowledged(ping.received)
        return [*(self.resend() if ping.resends else ready), self.pong(endpoint, heard_of=ping.sent)]

    def answered(self, pong: Pong) -> list[Numbered | Ping]:
        """Takes the answer to a heartbeat, at the decode rank's end. Returns what it makes necessary."""
        ready = self.acknowledged(pong.received)
        if pong.received < pong.heard_of:
            ready = self.resend()
        return [*ready, self.ping(resends=True)] if pong.sent > self.received else [*ready]

    def broke(self) -> list[Numbered | Ping]:
        """A connection broke, and the decode rank has noticed. Returns what makes up for it, either way."""
        return [self.ping(resends=True), *self.resend()]

    @property
    def owes_acknowledgement(self) -> bool:
        """Whether so much has come that the other end should not wait for the next heartbeat."""
        return self.received - self._acknowledged >= _ACKNOWLEDGED_UNASKED

    def acknowledged(self, number: int) -> list[Numbered]:
        """The other end has received all up to this number. Returns what was waiting for that and can be sent."""
        while self._on_way and self._kept[0][0] <= number:
            self._kept.popleft()
            self._on_way -= 1
        return self._sendable()

    def resend(self) -> list[Numbered]:
        """A connection broke. Returns all that is not acknowledged again, as much of it as may be on its way."""
        self._on_way = 0
        return self._sendable()

    def close(self) -> None:
        """Ends the channel: one side has given the other up."""
        self.is_closed = True
        self._kept.clear()
        self.taken_back.clear()
        self._on_way = 0

    def _sendable(self) -> list[Numbered]:
        ready = [
            Numbered(epoch=self.epoch, number=self._kept[index][0], body=self._kept[index][1])
            for index in range(self._on_way, min(len(self._kept), WINDOW))
        ]
        self._on_way += len(ready)
        return ready


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

    def channel_to(self, receiver: str) -> ReliableChannel:
        """Returns the channel to a decode rank; an empty one if there is none."""
        return self._channels.get(receiver, self._none)

    def attached(self, receiver: str, attempt: int) -> bool:
        """Begins a channel for a decode rank's attempt to attach. Returns False if it is no newer than the last."""
        before = self.channel_to(receiver)
        if before.epoch >= attempt:
            return False
        remember(self._channels, receiver, ReliableChannel(attempt), _MOST_REMEMBERED)
        earlier = (*self._earlier.get(receiver, ()), (before.epoch, before.received))[-_MOST_EARLIER:]
        remember(self._earlier, receiver, earlier, _MOST_REMEMBERED)
        return True

    def is_open(self, receiver: str) -> bool:
        """Whether there is a channel to a decode rank."""
        return not self.channel_to(receiver).is_closed

    def is_over(self, receiver: str, attempt: int) -> bool:
        """Whether what a decode rank began with an attempt to attach has ended: a copy of it attaches nobody."""
        channel = self.channel_to(receiver)
        return channel.is_closed and channel.epoch >= attempt

    def close(self, receiver: str) -> None:
        """Ends the channel to a decode rank that is not attached any more."""
        self.channel_to(receiver).close()

    def outgoing(self, receiver: str, message: field_types.Message) -> list[field_types.Message]:
        """Returns what to send now for a message to a decode rank: none where it must wait, or is for nobody."""
        if not isinstance(message, messages.NumberedToDecode):
            return [message]
        return [*self.channel_to(receiver).send(codec.encode_body(message))]

    def take(self, receiver: str, message: messages.Numbered) -> list[messages.NumberedToPrefill] | None:
        """Takes a numbered message. Returns what counts of it; None if the decode rank is not attached, and not told.

        Raises:
            MessageError: if it is malformed.
        """
        channel = self.channel_to(receiver)
        if channel.epoch < message.epoch or (channel.is_closed and channel.epoch == message.epoch):
            return None
        return [codec.decode_numbered_to_prefill(body) for body in channel.receive(message)]

    def answer(self, receiver: str, ping: messages.Ping) -> list[field_types.Message]:
        """Returns the answer to the heartbeat of a decode rank that is attached, and what it makes necessary."""
        channel = self.channel_to(receiver)
        if channel.epoch != ping.epoch:
            return [messages.Pong(endpoint=self._endpoint, attached=True)]
        return [*channel.answer(ping, self._endpoint)]

    def unasked_acknowledgement(self, receiver: str) -> list[field_types.Message]:
        """Returns an acknowledgement that should not wait for the next heartbeat, if there is one."""
        channel = self.channel_to(receiver)
        return [channel.pong(self._endpoint)] if channel.owes_acknowledgement else []

    def take_back(self, receiver: str, epoch: int, number: int) -> bool:
        """Takes back a message of a decode rank that has not come: it does not count if it does.

        Returns whether it has not come, and will not count. What was sent with an attempt to attach so long ago that it
        is forgotten counts as come, and so does what was never sent (number 0).
        """
        channel = self.channel_to(receiver)
        if channel.epoch == epoch:
            return channel.take_back(number)
        for attempt, received in ((channel.epoch, 0), *reversed(self._earlier.get(receiver, ()))):
            if attempt <= epoch:
                return number > (received if attempt == epoch else 0)
        return False
