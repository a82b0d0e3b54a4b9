"""Which pod this process runs in, and which start of a container: whom the Kubernetes API is asked about.

A container may end and start again in the same pod, which goes on. What tells its starts apart is a line in its
termination message: the kubelet reads that file when the container has terminated, and no start sees another's.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from pathlib import Path

from kvferry.errors import SettingsError
from kvferry.protocol.wire.field_types import PodIdentity
from kvferry.settings import Settings

_BEGIN = "kvferry container "
_LARGEST_MESSAGE = 4096
"""What the kubelet reads of a termination message, from its end."""


def pod_of(settings: Settings) -> PodIdentity | None:
    """Returns the pod that the settings name; None if they name none.

    Raises:
        SettingsError: if the termination message file cannot be used.
    """
    if settings.pod_uid is None or settings.pod_name is None or settings.pod_namespace is None:
        return None
    container = _container(settings.pod_termination_log) if settings.pod_termination_log is not None else ""
    return PodIdentity(settings.pod_uid, settings.pod_name, settings.pod_namespace, container)


def _container(file: Path) -> str:
    """Returns the word for this start of the container: the one in the file, or a new one, which is put there."""
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        with os.fdopen(descriptor, "r+", errors="replace") as opened:
            fcntl.flock(opened, fcntl.LOCK_EX)  # ranks of one container start at once
            message = opened.read()
            for line in message[-_LARGEST_MESSAGE:].splitlines():
                if line.startswith(_BEGIN) and len(line) > len(_BEGIN):
                    return line.removeprefix(_BEGIN)
            word = secrets.token_hex(16)
            begins_a_line = not message or message.endswith("\n")
            opened.write(("" if begins_a_line else "\n") + f"{_BEGIN}{word}\n")
            return word
    except OSError as error:
        raise SettingsError(
            f"pod_termination_log (KVFERRY_POD_TERMINATION_LOG) = {str(file)!r} cannot be used: {error.strerror}"
        ) from error
