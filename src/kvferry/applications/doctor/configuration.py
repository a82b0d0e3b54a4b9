"""Settings: which are set, where each came from, and whether addresses make sense."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Mapping

from kvferry.addresses import default_address, with_found_address
from kvferry.applications.command_line import why_not_listening
from kvferry.errors import SettingsError
from kvferry.findings import Finding, error, good, warning
from kvferry.hosts import is_loopback, is_wildcard
from kvferry.observe.settings import ObserveSettings
from kvferry.settings import Settings, all_fields, is_secret, known_variables
from kvferry.spelling import PREFIX, meaningless
from kvferry.transport import Diagnosis
from kvferry.transport.devices import interface_of

_USER_INFO = re.compile(r"//.*@")


def variables(environment: Mapping[str, str], transport: Diagnosis) -> Iterator[Finding]:
    """What the environment says, and what in it means nothing.

    Args:
        environment: all of it.
        transport: knows which variables its library reads.
    """
    fields = {f"{PREFIX}{name.upper()}": field for name, field in all_fields().items()}
    known = known_variables()
    given = {name: value for name, value in environment.items() if name.upper() in known}
    for name, value in sorted(given.items()):
        field = fields.get(name.upper())
        shown = "(a secret)" if field is not None and is_secret(field) else repr(_USER_INFO.sub("//(a secret)@", value))
        yield good("settings", f"{name} = {shown}, from the environment")
    unknown = meaningless(environment, known)
    for name, hint in unknown.items():
        yield warning("settings", f"{name} is set, and means nothing", hint)
    if not given and not unknown:
        yield good("settings", "all at their defaults: docs/settings.md")
    for name in sorted(name for name in environment if name.startswith(transport.variables)):
        yield good("settings", f"{name} = {environment[name]!r}, which {transport.read_by} read")


def addresses(settings: Settings) -> Iterator[Finding]:
    """What peers are told to connect to."""
    try:
        advertised = with_found_address(settings).advertise_host or settings.host
    except SettingsError as problem:
        yield error("addresses", str(problem), "is the network up? `ip route get` says which way leads to the registry")
        return
    if settings.advertise_host is None and is_wildcard(settings.host):
        yield good(
            "addresses",
            f"peers are told {advertised}{_on(advertised)}, which packets to the registry leave from "
            "(KVFERRY_ADVERTISE_HOST is not set)",
        )
    elif is_loopback(advertised):
        here = default_address() or "an address of this machine"
        yield good(
            "addresses",
            f"peers are told {advertised}: only this machine can reach it (KVFERRY_HOST). For others "
            f"KVFERRY_HOST={here} is enough, with a secret (KVFERRY_SECRET_FILE), or, in a network of friends alone, "
            "with KVFERRY_ALLOW_UNAUTHENTICATED=1",
        )
    else:
        yield from _is_ours(advertised)
    if not settings.has_secret and not is_loopback(settings.host):
        yield warning(
            "secret",
            f"everyone who reaches {settings.host} may read and write caches (KVFERRY_ALLOW_UNAUTHENTICATED)",
            "give all ranks and the registry one secret: KVFERRY_SECRET_FILE",
        )
    elif not is_loopback(settings.host):
        yield good("secret", "peers and whoever asks the registry must have the same secret as this rank")
    for what, host, port in _ports(settings):
        yield _port(what, host, port)


def _is_ours(host: str) -> Iterator[Finding]:
    try:
        found = sorted({str(each[4][0]) for each in socket.getaddrinfo(host, None)})
    except OSError as problem:
        what = f"peers are told {host}, which cannot be looked up: {problem}"
        yield error("addresses", what, "set KVFERRY_ADVERTISE_HOST to a name or an address that peers know")
        return
    if all(is_loopback(each) for each in found):
        yield error(
            "addresses",
            f"peers are told {host}, which is {', '.join(found)} here: other machines would reach themselves",
            "advertise an address of a network that peers are on: KVFERRY_ADVERTISE_HOST",
        )
    elif any(why_not_listening(each, 0) is None for each in found):
        yield good("addresses", f"peers are told {host} ({', '.join(each + _on(each) for each in found)})")
    else:
        yield warning(
            "addresses",
            f"peers are told {host} ({', '.join(found)}), which no interface of this machine has",
            "right behind a port mapping; otherwise set KVFERRY_ADVERTISE_HOST to an address of this machine",
        )


def _on(address: str) -> str:
    interface = interface_of(address)
    return f" on {interface}" if interface else ""


def _ports(settings: Settings) -> Iterator[tuple[str, str, int]]:
    yield "KVFERRY_CONTROL_PORT", settings.host, settings.control_port
    if settings.registry_url is None:
        yield "KVFERRY_REGISTRY_PORT", settings.registry_host, settings.registry_port
    observe = settings.of(ObserveSettings)
    if observe.observe_port is not None:
        yield "KVFERRY_OBSERVE_PORT", observe.observe_host, observe.observe_port


def _port(what: str, host: str, port: int) -> Finding:
    if not port:
        return good("ports", f"{what} is 0: any free one")
    if problem := why_not_listening(host, port):
        return warning(
            "ports",
            f"{what}: {host}:{port} cannot be listened on: {problem.strerror}",
            "right if an endpoint or a registry is running there already; otherwise choose another",
        )
    return good("ports", f"{what}: {host}:{port} is free")
