"""Every error that kvferry raises, as one tree.

    KVFerryError
    |-- ConfigurationError          something was set up wrongly, by the operator or by our caller
    |   |-- SettingsError           a setting has an impossible value, or a port is taken
    |   |-- LayoutError             a cache, a shard or a tensor is described wrongly
    |   |-- ModelError              a model directory or configuration cannot be used
    |   `-- EngineContractError     a serving engine is not what our plug-in for it builds on; names what has changed
    |-- UsageError                  our caller broke the rules of a transfer; the transfer itself goes on
    |   |-- UnknownRoomError        no transfer of this number is open here
    |   |-- RoomExistsError         this number is already in use here
    |   |-- ChunkError              a chunk after the last one, or one that leaves a gap
    |   |-- PageError               pages out of range, repeated, or too few or too many
    |   |-- QueueFullError          too much waits already: nothing was taken, try again later
    |   |-- EndpointClosedError     the endpoint was closed
    |   `-- EndpointDrainingError   the endpoint is draining, or was replaced: ask another engine
    |-- PeerError                   the peer broke the rules
    |   |-- MessageError            bytes that are no message of ours
    |   |   `-- UnknownMessageError a message of a type that a newer release has; it is ignored
    |   |-- VersionError            the two sides share no version of the protocol
    |   `-- IncompatiblePeerError   the two sides cannot exchange caches; names both values
    |-- TransportError              memory or bytes could not be registered, connected or moved
    |   |-- TransportUnavailableError  the transport's library or hardware is missing
    |   |-- RegistrationError       an address outside registered memory
    |   `-- PeerDisconnectedError   the connection to the peer is gone
    |-- RegistryError               the registry refused or could not be reached
    |   |-- RegistryUnreachableError
    |   |-- EngineEndedError        the engine has ended, and nobody will register under its name again
    |   |-- RegistryAccessError     the registry has a secret, and this side none or another
    |   `-- RegistrationRefusedError
    |       `-- RankReplacedError   another start of the rank has registered in its place
    |-- OrchestratorError           the Kubernetes API refused or could not be reached
    |-- ObserveError                metrics and status cannot be served, or asked for
    `-- TransferError               how a transfer ended, if not well
        |-- TransferAbortedError    one side called abort
        |   `-- TransferRefusedError    or refused the room before it began
        |-- TransferTimeoutError    a deadline passed
        |-- ChecksumError           what arrived is not what was sent; says where
        `-- TransferFailedError     something failed; `__cause__` is the original exception where it arose here

`ConfigurationError` and `UsageError` are our side's mistakes, `PeerError` is the other side's. What failed on another
rank arrives as `TransferFailedError` whose message names the rank and quotes the exception's type and text.
"""

from __future__ import annotations

from collections.abc import Collection

LONGEST_QUOTE = 500


def quoted(error: Exception) -> str:
    """Returns an error's text in a form that a log can take: on one line, and not too long.

    Parsers quote what they did not expect, all of it, and it may come from anybody.
    """
    text = str(error)
    shown = "".join(each if each.isprintable() else f"\\x{ord(each):02x}" for each in text[:LONGEST_QUOTE])
    if max(len(text), len(shown)) <= LONGEST_QUOTE:
        return shown
    return f"{shown[:LONGEST_QUOTE]}... ({len(text)} characters)"


class KVFerryError(Exception):
    """Base of everything that kvferry raises on purpose."""


class ConfigurationError(KVFerryError):
    """Something was set up wrongly on this side."""


class SettingsError(ConfigurationError):
    """A setting has an impossible value, or names something that is taken.

    Attributes:
        missing: names of settings that are not set, where others reach this machine, and should be.
    """

    def __init__(self, text: str = "", *, missing: Collection[str] = ()) -> None:
        super().__init__(text)
        self.missing = tuple(missing)


class LayoutError(ConfigurationError):
    """A component, a shard, a tensor or a parallel layout is described wrongly."""


class ModelError(ConfigurationError):
    """A model directory or configuration cannot be used."""


class EngineContractError(ConfigurationError):
    """A serving engine is not what our plug-in for it builds on. The message names all that has changed."""


class UsageError(KVFerryError):
    """Our caller broke the rules of a transfer. Nothing was sent; the transfer goes on as it was."""


class UnknownRoomError(UsageError):
    """No transfer with this room number is open at this endpoint."""


class RoomExistsError(UsageError):
    """A transfer with this room number is already open at this endpoint."""


class ChunkError(UsageError):
    """A chunk came after the last one, or does not follow the one before it."""


class PageError(UsageError):
    """Page indices are out of range, repeated, or of the wrong number."""


class QueueFullError(UsageError):
    """Too many rooms are open, or too many chunks wait. Nothing was taken; it may be tried again later."""


class EndpointClosedError(UsageError):
    """The endpoint was closed and takes no more work."""


class EndpointDrainingError(UsageError):
    """The endpoint is draining, so that what is open goes on, or was replaced; what is new is for another engine."""


class PeerError(KVFerryError):
    """The peer broke the rules."""


class MessageError(PeerError):
    """Bytes arrived that are no message of this protocol."""


class UnknownMessageError(MessageError):
    """A message of a type that this release does not know. It is ignored, and what it came through goes on."""


class VersionError(PeerError):
    """The peer speaks no version of the protocol that this side speaks. The message says which side to upgrade."""


class IncompatiblePeerError(PeerError):
    """The two sides cannot exchange caches. The message names both values of everything that differs."""


class TransportError(KVFerryError):
    """Memory could not be registered, a peer not connected, or bytes not moved."""


class TransportUnavailableError(TransportError):
    """The transport's library or device is missing on this machine."""


class RegistrationError(TransportError):
    """An address lies outside the memory that was registered."""


class PeerDisconnectedError(TransportError):
    """The connection to the peer is gone, or there never was one."""


class RegistryError(KVFerryError):
    """The registry refused a request or could not be reached."""


class RegistryUnreachableError(RegistryError):
    """Nothing answered at the registry's address.

    Attributes:
        timed_out: whether it may be there, and too busy to answer in time.
    """

    timed_out = False


class EngineEndedError(RegistryError):
    """The engine has ended, and no rank will register under its name again: there is nothing to wait for."""


class RegistryAccessError(RegistryError):
    """The registry requires its secret, and this side has none or another."""


class RegistrationRefusedError(RegistryError):
    """The registry refused a rank's registration."""


class RankReplacedError(RegistrationRefusedError):
    """Another start of the rank has registered in this one's place. The message says where it is."""


class OrchestratorError(KVFerryError):
    """The Kubernetes API refused, could not be reached, or is none."""


class ObserveError(KVFerryError):
    """Metrics and status cannot be served, or the endpoint that was asked for them does not answer."""


class TransferError(KVFerryError):
    """How a transfer ended, if it did not end well."""


class TransferAbortedError(TransferError):
    """One of the two sides aborted the transfer."""


class TransferRefusedError(TransferAbortedError):
    """One of the two sides refused the transfer before it began there."""


class TransferTimeoutError(TransferError):
    """A deadline passed before the transfer was complete."""


class ChecksumError(TransferError):
    """What lies in the decode rank's pages is not what was read from the prefill rank's. The message says where."""


class TransferFailedError(TransferError):
    """Something failed on the way. `__cause__` holds the original exception where it arose on this side.

    Attributes:
        there: the name of the other side's error, where that has told of one; else empty.
    """

    there: str = ""


def caused(what: str, cause: BaseException) -> TransferFailedError:
    """Makes the error of a transfer that another exception ended; its message quotes that one's type and text."""
    try:
        text = str(cause)
    except BaseException as problem:  # code of whoever has raised it
        text = f"(its text raises {type(problem).__name__})"
    error = TransferFailedError(f"{what}: {type(cause).__name__}: {text}")
    error.__cause__ = cause
    return error
