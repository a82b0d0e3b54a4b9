"""Where an etcd cluster is, and how it lets us in."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, model_validator

from kvferry.control.credentials import client_context, load_own
from kvferry.errors import SettingsError
from kvferry.secret_files import private_text
from kvferry.settings import OwnSettings

_SCHEMES = ("etcd", "etcds")
DEFAULT_PREFIX = "/kvferry"
_DEFAULT_PORT = 2379


def is_etcd(url: str) -> bool:
    """Whether a registry's address is that of an etcd cluster."""
    return url.partition("://")[0].lower() in _SCHEMES


class EtcdSettings(OwnSettings):
    """How an etcd lets us in. A password in a file is read at once, and stands in `etcd_password` from then on."""

    etcd_user: str | None = Field(
        None, min_length=1, max_length=256, description="User at an etcd with authentication; with a password."
    )
    etcd_password: SecretStr | None = Field(None, description="The user's password.")
    etcd_password_file: Path | None = Field(
        None, description="A file with the password, instead of the password itself; only its owner may read it."
    )
    etcd_certificate: Path | None = Field(
        None, description="Certificate (PEM) that is shown to an etcd that asks its clients for one; with etcd_key."
    )
    etcd_key: Path | None = Field(None, description="The certificate's private key (PEM), unencrypted.")

    @model_validator(mode="after")
    def _check(self) -> EtcdSettings:
        if self.etcd_password is not None and self.etcd_password_file is not None:
            raise SettingsError(
                "etcd_password (KVFERRY_ETCD_PASSWORD) and etcd_password_file (KVFERRY_ETCD_PASSWORD_FILE) are both "
                "set: leave one out"
            )
        if self.etcd_password_file is not None:
            text = private_text(self.etcd_password_file, "etcd_password_file", "a new password")
            self.__dict__ |= {"etcd_password": SecretStr(text.strip()), "etcd_password_file": None}
        if (not self.password) != (self.etcd_user is None):
            raise SettingsError(
                "etcd_user (KVFERRY_ETCD_USER) and its password (KVFERRY_ETCD_PASSWORD_FILE, KVFERRY_ETCD_PASSWORD) "
                "belong together: set both, or neither"
            )
        if (self.etcd_certificate is None) != (self.etcd_key is None):
            raise ValueError(
                "etcd_certificate (KVFERRY_ETCD_CERTIFICATE) and etcd_key (KVFERRY_ETCD_KEY) belong together: set "
                "both, or neither"
            )
        return self

    @property
    def password(self) -> str | None:
        """The password itself: not for messages or logs."""
        return None if self.etcd_password is None else self.etcd_password.get_secret_value()

    def context(self, trusted: Path | None) -> ssl.SSLContext | bool:
        """Returns what httpx checks members' certificates with, and shows them ours.

        Args:
            trusted: PEM file of the certificates that may vouch for members; None trusts those that httpx trusts.

        Raises:
            SettingsError: if one cannot be used.
        """
        context = client_context(trusted)
        if self.etcd_certificate is None or self.etcd_key is None:
            return context
        if isinstance(context, bool):
            import httpx

            context = httpx.create_ssl_context()
        load_own(context, self.etcd_certificate, self.etcd_key, "the certificate", "KVFERRY_ETCD_")
        return context


@dataclass(frozen=True, slots=True)
class EtcdUrl:
    """What an address such as `etcd://a:2379,b:2379,c:2379/kvferry` says.

    Attributes:
        url: all of it, without a slash at the end.
        members: host and port of each, IPv6 in brackets.
        prefix: what all keys begin with, without a slash at the end.
        has_tls: whether the members speak TLS.
    """

    url: str
    members: tuple[str, ...]
    prefix: str
    has_tls: bool

    @staticmethod
    def parsed(url: str) -> EtcdUrl:
        """Parses an address.

        Raises:
            SettingsError: if it is none.
        """
        scheme, _, rest = url.partition("://")
        authority, slash, path = rest.partition("/")
        if "@" in authority:
            # Not quoted: every message about the registry, this one too, would carry the password into logs.
            raise SettingsError(
                "the registry's url carries a user name or a password: give them as KVFERRY_ETCD_USER and "
                "KVFERRY_ETCD_PASSWORD_FILE"
            )
        members = tuple(map(_member, authority.split(",")))
        is_text = url.isascii() and url.isprintable() and not set(url) & set(" ?#")
        if not is_etcd(url) or None in members or not is_text:
            raise SettingsError(
                f"{url!r} is no address of an etcd cluster: it must read like etcd://a:2379,b:2379,c:2379 or "
                "etcds://a:2379/prefix (IPv6 in brackets)"
            )
        return EtcdUrl(
            url=url.rstrip("/"),
            members=tuple(each for each in members if each is not None),
            prefix=(slash + path).rstrip("/") or DEFAULT_PREFIX,
            has_tls=scheme.lower() == "etcds",
        )


def _member(text: str) -> str | None:
    """Returns a member's host and port; None if it is none."""
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        return None
    if not host or port == 0 or parts.netloc != text:
        return None
    return text if port is not None else f"{text.rstrip(':')}:{_DEFAULT_PORT}"
