"""The credentials of peers and the registry, all derived from one shared secret.

Whoever knows the secret has everything here; whoever has one of the derived keys learns neither the secret nor the
others (HKDF with SHA-256, a context each). The token goes to the registry, and over plain HTTP whoever listens on the
wire has it then: it opens the registry and nothing else. The keys of the peer channel are CurveZMQ's and never travel.
Nothing here has a value in its `repr`.
"""

from __future__ import annotations

import hashlib
import hmac
import ssl
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from kvferry.errors import SettingsError

_SALT = b"kvferry 1"
"""Other derivations from the same secret, in other programs or later versions, have nothing in common with these."""


def bearing(token: str | None) -> dict[str, str]:
    """Returns the header with which a request carries a token; none without one."""
    return {} if token is None else {"authorization": f"Bearer {token}"}


def bears(headers: Iterable[tuple[bytes, bytes]], token: str) -> bool:
    """Returns whether a request carries a token, in a time that does not depend on how much of it is right.

    Args:
        headers: the request's, of which one alone must be `authorization`.
    """
    given = [value for name, value in headers if name == b"authorization"]
    return len(given) == 1 and hmac.compare_digest(given[0], bearing(token)["authorization"].encode())


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A Curve25519 key pair, in ZMQ's encoding (Z85)."""

    public: bytes = field(repr=False)
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Credentials:
    """All that is derived from a shared secret.

    Attributes:
        registry_token: the registry's bearer token.
        observe_token: an observe server's bearer token, for whoever drains an endpoint.
        listening: keys of prefill ranks' end of the peer channel.
        connecting: keys of decode ranks' end.
    """

    registry_token: str = field(repr=False)
    observe_token: str = field(repr=False)
    listening: KeyPair = field(repr=False)
    connecting: KeyPair = field(repr=False)

    @staticmethod
    def derived_from(secret: str) -> Credentials:
        """Derives the credentials of everyone who has this secret."""
        return Credentials(
            registry_token=_derived(secret, "registry bearer token").hex(),
            observe_token=_derived(secret, "observe bearer token").hex(),
            listening=_key_pair(_derived(secret, "peer channel, listening side")),
            connecting=_key_pair(_derived(secret, "peer channel, connecting side")),
        )


@dataclass(frozen=True, slots=True)
class ServerCertificate:
    """A registry's certificate and private key, in PEM files."""

    certificate: Path
    key: Path

    def context(self) -> ssl.SSLContext:
        """Loads the files into a server's TLS context.

        Raises:
            SettingsError: if the files cannot be used.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        load_own(context, self.certificate, self.key, "the registry's certificate", "KVFERRY_REGISTRY_TLS_")
        return context


def load_own(context: ssl.SSLContext, certificate: Path, key: Path, what: str, variables: str) -> None:
    """Loads the certificate that a context shows to others, with its key.

    Args:
        what: names it in errors.
        variables: what those begin with that name the two files.

    Raises:
        SettingsError: if the files cannot be used.
    """
    try:
        # Without a password of ours OpenSSL would ask for one on the terminal, and wait.
        context.load_cert_chain(certificate, key, password=lambda: "")
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"{what} {certificate} ({variables}CERTIFICATE) and its key {key} ({variables}KEY) cannot be used: "
            f"{_reason(error)}. Both must be PEM files, the key unencrypted and the certificate's own"
        ) from error


def secret_hint(*, has_secret: bool) -> str:
    """Returns a hint for messages about a side that does not let the other in.

    Args:
        has_secret: whether this side has one.
    """
    mine = "has a secret" if has_secret else "has no secret"
    return f"this side {mine} (KVFERRY_SECRET_FILE, KVFERRY_SECRET), and both need the same"


def client_context(certificates: Path | None) -> ssl.SSLContext | bool:
    """Returns what httpx checks a registry's certificate with.

    Args:
        certificates: PEM file of those that are trusted; None trusts those that httpx trusts.

    Raises:
        SettingsError: if the file cannot be used.
    """
    if certificates is None:
        return True
    try:
        return ssl.create_default_context(cafile=str(certificates))
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"the certificates in {certificates} (KVFERRY_REGISTRY_TLS_CA) cannot be used: {_reason(error)}. It must "
            "be a PEM file"
        ) from error


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


def _derived(secret: str, purpose: str) -> bytes:
    """Derives 32 bytes for one purpose: HKDF (RFC 5869), whose second half is a single block here."""
    key = hmac.digest(_SALT, secret.encode(), hashlib.sha256)
    return hmac.digest(key, purpose.encode() + b"\x01", hashlib.sha256)


def _key_pair(secret: bytes) -> KeyPair:
    encoded = z85.encode(secret)
    return KeyPair(public=zmq.curve_public(encoded), secret=encoded)
