"""What is said to a rank's process, and what it answers: typed MessagePack, the same through a pipe or a network."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias, TypeVar

import msgspec

from kvferry.applications.bench.pattern import Checked
from kvferry.errors import MessageError


class _Message(msgspec.Struct, frozen=True, tag=True):
    pass


# ---- commands -------------------------------------------------------------------------------------------------------


class Prepare(_Message, frozen=True):
    """Give back what an earlier case had, make the pools of this one and fill them. Answer: `Done`."""

    case: int


class Start(_Message, frozen=True):
    """Make an endpoint for every variant; a decode rank also connects it. Answer: `Started`.

    Attributes:
        registry_url: None has the rank run the registry.
        run: a name that no other run at this registry has.
    """

    registry_url: str | None
    run: str
    variants: tuple[str, ...]


class Open(_Message, frozen=True):
    """Open the first rooms of a repetition and wait until all ranks have. Answer: `Done`.

    Attributes:
        first_room: the number of the first; the others follow.
        passes: how often the repetition goes over the pages of all requests.
    """

    variant: str
    first_room: int
    passes: int
    timeout_s: float


class Transfer(_Message, frozen=True):
    """Move, or receive, the rooms of the repetition. Answer: `Sent`, `Received` or `Failed`."""

    timeout_s: float


class Check(_Message, frozen=True):
    """Compare every byte with what belongs there. Answer: `Found`."""


class Listen(_Message, frozen=True):
    """Make ready for bulk writes. Answer: `Listening`."""


class Target(msgspec.Struct, frozen=True):
    """Where a rank's bulk writes go.

    Attributes:
        metadata: what the decode rank answered to `Listen`.
        offset: where in its memory to begin.
        lengths: bytes of every write.
    """

    metadata: bytes
    offset: int
    lengths: tuple[int, ...]


class Aim(_Message, frozen=True):
    """Connect to where bulk writes go. Answer: `Done`."""

    targets: tuple[Target, ...]


class Bulk(_Message, frozen=True):
    """Write the bytes of all requests in bulk. Answer: `BulkTimes`."""

    is_in_blocks: bool
    timeout_s: float


class CopyMemory(_Message, frozen=True):
    """Copy so many bytes within the pools, or as many as half of them have. Answer: `Copied`."""

    num_bytes: int


class Leave(_Message, frozen=True):
    """Give everything back and end. No answer."""


Command: TypeAlias = Prepare | Start | Open | Transfer | Check | Listen | Aim | Bulk | CopyMemory | Leave


# ---- answers --------------------------------------------------------------------------------------------------------


class Done(_Message, frozen=True):
    """It was done."""


class Started(_Message, frozen=True):
    """Endpoints were made.

    Attributes:
        registry_url: where the registry answers.
        refused: why a variant has none, by its name.
    """

    registry_url: str
    refused: dict[str, str]


class Failed(_Message, frozen=True):
    """The variant could not do it, for a reason that a person can act on; the process goes on."""

    reason: str


class Way(msgspec.Struct, frozen=True):
    """How bytes travelled, and why so."""

    path: str
    why: str
    num_bytes: int


class Sent(_Message, frozen=True):
    """A prefill rank's account of one repetition; times are of its machine's steady clock.

    Attributes:
        submitted_at: of every transfer, just before its first chunk.
        computed_at: of every transfer, just behind its last chunk.
        submit_s: how long every submit took the caller.
        cpu_s: of the whole process, meanwhile.
        interpreter_s: of that, what the interpreter's threads have taken; None where nobody says.
        sent_bytes: for every transfer, how many went to each receiver.
        descriptors: of every transfer.
        writes: of every transfer, to all receivers; one may carry several chunks.
        ways: how the bytes went.
    """

    submitted_at: tuple[float, ...]
    computed_at: tuple[float, ...]
    submit_s: tuple[float, ...]
    cpu_s: float
    interpreter_s: float | None
    sent_bytes: tuple[dict[str, int], ...]
    descriptors: tuple[int, ...]
    writes: tuple[int, ...]
    ways: tuple[Way, ...]


class Received(_Message, frozen=True):
    """A decode rank's account of one repetition.

    Attributes:
        endpoint: how prefill ranks call it.
        ended_at: of every transfer, by its machine's steady clock.
        cpu_s: of the whole process, meanwhile.
        interpreter_s: of that, what the interpreter's threads have taken; None where nobody says.
    """

    endpoint: str
    ended_at: tuple[float, ...]
    cpu_s: float
    interpreter_s: float | None


class Found(_Message, frozen=True):
    """What a check found."""

    checked: Checked


class Listening(_Message, frozen=True):
    """What a sender of bulk writes needs to connect."""

    metadata: bytes


class BulkTimes(_Message, frozen=True):
    """When one rank's bulk writes began and ended, by its machine's steady clock, and their bytes."""

    started_at: float
    ended_at: float
    num_bytes: int


class Copied(_Message, frozen=True):
    """How fast memory was copied."""

    seconds_per_byte: float


class Crashed(_Message, frozen=True):
    """The process failed and ends."""

    error: str
    details: str


Answer: TypeAlias = Done | Started | Failed | Sent | Received | Found | Listening | BulkTimes | Copied | Crashed


_Kind = TypeVar("_Kind")


def _decode(decoder: msgspec.msgpack.Decoder[_Kind], data: bytes) -> _Kind:
    """Returns a message.

    Raises:
        MessageError: if the bytes are none.
    """
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MessageError(f"this is nothing that ranks of kvferry bench say to each other: {error}") from error


decode_command: Callable[[bytes], Command] = partial(_decode, msgspec.msgpack.Decoder(Command))
decode_answer: Callable[[bytes], Answer] = partial(_decode, msgspec.msgpack.Decoder(Answer))


def encode(message: Command | Answer) -> bytes:
    """As bytes."""
    return msgspec.msgpack.encode(message)
