"""From the setting `transport` to the class that it names: a name of the table, or a class anywhere.

The table names modules and imports none: what is not chosen costs nothing.
"""

from __future__ import annotations

import importlib
import inspect

from kvferry.errors import SettingsError, TransportUnavailableError, quoted
from kvferry.transport.base import Transport

TRANSPORTS = {
    "nixl": "kvferry.transport.nixl:NixlTransport",
    "mooncake": "kvferry.transport.mooncake.transport:MooncakeTransport",
}
"""Those that come with kvferry and are made from settings: where each is, by the name that it has in handshakes."""

_LONGEST_NAME = 64


def transport_class(chosen: str) -> type[Transport]:
    """Returns the transport that a setting names.

    Args:
        chosen: a name in `TRANSPORTS`, or `package.module:ClassName`.

    Raises:
        SettingsError: if there is none, naming the value, those that there are, and what to do.
    """
    where = TRANSPORTS.get(chosen, chosen)
    module, colon, name = where.partition(":")
    if not (module and colon and name):
        known = ", ".join(TRANSPORTS)
        raise _refusal(chosen, f"known are: {known}; a class of your own is named as package.module:ClassName")
    try:
        found = getattr(importlib.import_module(module), name, None)
    except Exception as error:  # of a stranger's module: anything may happen while it is imported
        remedy = "install it, or set PYTHONPATH, where this process runs"
        raise _refusal(
            chosen, f"{module} cannot be imported: {type(error).__name__}: {quoted(error)}; {remedy}"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Transport)):
        raise _refusal(chosen, f"{name} in {module} is no class that derives from kvferry.transport.Transport")
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise _refusal(chosen, f"{name} lacks what every transport does: {missing}")
    if not 0 < len(str(getattr(found, "name", ""))) <= _LONGEST_NAME:
        raise _refusal(chosen, f"{name} has no `name` of 1 to {_LONGEST_NAME} characters, by which peers compare it")
    return found


def available_transport_class(chosen: str) -> type[Transport]:
    """Returns the transport that a setting names, if it can be used on this machine.

    Args:
        chosen: as for `transport_class`.

    Raises:
        SettingsError: as `transport_class`.
        TransportUnavailableError: if its library is missing, saying what to install, and which other one is there.
    """
    found = transport_class(chosen)
    try:
        found.check_available()
    except TransportUnavailableError as error:
        others = [name for name in TRANSPORTS if name != found.name and _is_available(name)]
        if not others:
            raise
        instead = " or ".join(f"KVFERRY_TRANSPORT={name}" for name in others)
        hint = f"What is installed here is used with {instead}, on both sides"
        raise TransportUnavailableError(f"{error}. {hint}") from error
    return found


def _is_available(name: str) -> bool:
    try:
        transport_class(name).check_available()
    except (SettingsError, TransportUnavailableError):
        return False
    return True


def _refusal(chosen: str, why: str) -> SettingsError:
    return SettingsError(f"transport (KVFERRY_TRANSPORT) is {chosen!r}: {why}")
