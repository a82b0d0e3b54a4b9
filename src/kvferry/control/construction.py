"""Makes registries, their clients and everyone's credentials from the settings."""

from __future__ import annotations

from kvferry.control.credentials import Credentials, ServerCertificate
from kvferry.control.etcd.address import EtcdSettings, is_etcd
from kvferry.control.registry import Registry
from kvferry.control.registry_client import RegistryClient
from kvferry.control.registry_server import RegistryServer
from kvferry.settings import Settings


def credentials_of(settings: Settings) -> Credentials | None:
    """Derives the credentials for peers and the registry; None where there is no secret."""
    secret = settings.shared_secret
    return None if secret is None else Credentials.derived_from(secret)


def create_registry(settings: Settings) -> RegistryServer:
    """Makes the registry that the settings ask for, not started.

    Raises:
        SettingsError: if its certificate or key cannot be used.
    """
    credentials = credentials_of(settings)
    certificate = None
    if settings.registry_tls_certificate is not None and settings.registry_tls_key is not None:
        certificate = ServerCertificate(settings.registry_tls_certificate, settings.registry_tls_key)
    return RegistryServer(
        settings.registry_host,
        settings.registry_port,
        lease_s=settings.registry_lease_s,
        token=credentials.registry_token if credentials else None,
        certificate=certificate,
    )


def create_registry_client(settings: Settings, url: str | None = None) -> Registry:
    """Makes a client that the registry lets in: of kvferry's own, or of etcd, as the url's scheme says.

    Args:
        url: the registry's address; the settings' if None.

    Raises:
        SettingsError: if the url makes no sense, or what it needs is not installed.
    """
    address = url or settings.registry_address
    if is_etcd(address):
        from kvferry.control.etcd.registry import EtcdRegistry  # which few deployments need

        own, trusted = settings.of(EtcdSettings), settings.registry_tls_ca
        return EtcdRegistry(address, settings.registry_lease_s, own=own, trusted=trusted)
    credentials = credentials_of(settings)
    return RegistryClient(
        address,
        token=credentials.registry_token if credentials else None,
        trusted_certificates=settings.registry_tls_ca,
    )
