"""What a shared secret becomes: the same everywhere, good for one thing each, and never shown."""

from __future__ import annotations

from pathlib import Path

import pytest
import zmq

from kvferry.control.credentials import Credentials, ServerCertificate, client_context
from kvferry.errors import SettingsError

SECRET = "correct horse battery staple"


def test_everyone_with_the_secret_derives_the_same():
    assert Credentials.derived_from(SECRET) == Credentials.derived_from(SECRET)
    # Of another process, of another version: what was derived once is derived for ever.
    known = "54ab35a24e0f2ada39647fa862a8d8e53db6b337fdcda3feca62884b9fbc82b4"
    assert Credentials.derived_from(SECRET).registry_token == known


def test_another_secret_derives_nothing_that_is_the_same():
    one, other = Credentials.derived_from(SECRET), Credentials.derived_from(SECRET + ".")
    values = [
        value
        for each in (one, other)
        for value in (each.registry_token, each.listening.secret, each.connecting.secret, each.listening.public)
    ]
    assert len(set(values)) == len(values)


def test_keys_are_pairs_that_zmq_accepts():
    credentials = Credentials.derived_from(SECRET)
    for pair in (credentials.listening, credentials.connecting):
        assert zmq.curve_public(pair.secret) == pair.public


def test_nothing_shows_a_value():
    credentials = Credentials.derived_from(SECRET)
    shown = f"{credentials!r} {credentials} {credentials.listening!r}"
    for value in (SECRET, credentials.registry_token, credentials.listening.secret.decode()):
        assert value not in shown
    assert shown == "Credentials() Credentials() KeyPair()"


@pytest.mark.parametrize("content", [None, "", "no certificate"])
def test_files_that_are_no_certificates_are_named_with_their_settings(tmp_path: Path, content: str | None):
    file = tmp_path / "file.pem"
    if content is not None:
        file.write_text(content)
    with pytest.raises(SettingsError, match=r"file\.pem .*KVFERRY_REGISTRY_TLS_CA"):
        client_context(file)
    with pytest.raises(SettingsError, match=r"file\.pem .*KVFERRY_REGISTRY_TLS_CERTIFICATE.*KVFERRY_REGISTRY_TLS_KEY"):
        ServerCertificate(file, file).context()
