"""Secrets, and files that only their owner may read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from pydantic import SecretStr

from kvferry.errors import SettingsError
from kvferry.spelling import PREFIX

SHORTEST_SECRET = 16
LONGEST_SECRET = 4096


def private_text(file: Path, name: str, anew: str) -> str:
    """Reads a file that only its owner may read.

    Args:
        name: of the setting that names it.
        anew: what is to be made if others have read it.

    Raises:
        SettingsError: if others may read it too, or it cannot be read.
    """
    where = f"{name} ({PREFIX}{name.upper()}) = {str(file)!r}"
    try:
        with file.open("rb") as opened:
            status = os.fstat(opened.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise SettingsError(f"{where}: not a file")
            if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise SettingsError(
                    f"{where}: others than its owner may use it (mode {stat.S_IMODE(status.st_mode):o}): chmod 600 "
                    f"{file}, and make {anew} if strangers were on this machine"
                )
            return opened.read(LONGEST_SECRET + 1).decode()
    except OSError as error:
        raise SettingsError(f"{where}: cannot be read: {error.strerror or type(error).__name__}") from None
    except UnicodeDecodeError:
        raise SettingsError(f"{where}: not text: write the secret in hexadecimal, say") from None


def checked_secret(text: str, name: str) -> SecretStr:
    """Returns a secret of an allowed length, without the spaces and line breaks around it.

    Args:
        name: of the setting that has it, or words for where it was.

    Raises:
        SettingsError: if it is too short or too long. The message never contains it.
    """
    text = text.strip()
    if not SHORTEST_SECRET <= len(text) < LONGEST_SECRET:
        raise SettingsError(
            f"{name} has {len(text)} characters: it needs {SHORTEST_SECRET} at least and fewer than {LONGEST_SECRET}; "
            "`openssl rand -hex 32` makes a good one"
        )
    return SecretStr(text)
