"""Which pod this process runs in, and which start of a container: whom the Kubernetes API is asked about.

A container may end and start again in the same pod, which goes on. What tells its starts apart is a line in its
termination message: the kubelet reads that file when the container has terminated, and no start sees another's.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from pathlib import Path

from pydantic import Field, model_validator

from kvferry.errors import SettingsError
from kvferry.protocol.wire.field_types import PodIdentity
from kvferry.settings import OwnSettings, Settings

_BEGIN = "kvferry container "
_LARGEST_MESSAGE = 4096
"""What the kubelet reads of a termination message, from its end."""


class PodSettings(OwnSettings):
    """Which pod this is, as Kubernetes tells its containers."""

    pod_uid: str | None = Field(
        None, min_length=1, max_length=256, description="UID of the pod that this process runs in (downward API)."
    )
    pod_name: str | None = Field(None, min_length=1, max_length=256, description="Its name (downward API).")
    pod_namespace: str | None = Field(None, min_length=1, max_length=256, description="Its namespace (downward API).")
    pod_termination_log: Path | None = Field(
        None,
        description="The container's termination message file, usually /dev/termination-log: a line is added there, by "
        "which the Kubernetes API tells one start of the container from the next.",
    )

    @model_validator(mode="after")
    def _check(self) -> PodSettings:
        given = {name for name in ("pod_uid", "pod_name", "pod_namespace") if getattr(self, name) is not None}
        if len(given) in (1, 2):
            raise ValueError(
                "pod_uid (KVFERRY_POD_UID), pod_name (KVFERRY_POD_NAME) and pod_namespace (KVFERRY_POD_NAMESPACE) "
                f"belong together: of them only {', '.join(sorted(given))} is set"
            )
        return self


def pod_of(settings: Settings) -> PodIdentity | None:
    """Returns the pod that the settings name; None if they name none.

    Raises:
        SettingsError: if the termination message file cannot be used.
    """
    own = settings.of(PodSettings)
    if own.pod_uid is None or own.pod_name is None or own.pod_namespace is None:
        return None
    container = _container(own.pod_termination_log) if own.pod_termination_log is not None else ""
    return PodIdentity(own.pod_uid, own.pod_name, own.pod_namespace, container)


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
