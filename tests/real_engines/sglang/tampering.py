"""A plug-in of SGLang's for tests: writes down what kvferry is asked, and does wrong what a file says.

It runs in SGLang's own processes, which a test reaches through files alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

DIRECTORY = "KVFERRY_TAMPERING"
"""The environment variable with the directory of those files."""

METADATA = "Metadata-Version: 2.1\nName: kvferry-tampering\nVersion: 0\n"
ENTRY_POINTS = f"[sglang.srt.plugins]\ntampering = {__name__}:register\n"


class Tampering:
    """The files, on the test's side."""

    def __init__(self, directory: Path) -> None:
        """Makes the plug-in findable in the directory, which goes on SGLang's module path."""
        self.directory = directory
        info = directory / "kvferry_tampering-0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(METADATA)
        (info / "entry_points.txt").write_text(ENTRY_POINTS)
        self.heal()

    @property
    def environment(self) -> dict[str, str]:
        return {DIRECTORY: str(self.directory)}

    def plant(self, fault: str) -> None:
        """From now on this goes wrong."""
        (self.directory / "fault").write_text(fault)

    def heal(self) -> None:
        """Nothing goes wrong any more."""
        (self.directory / "fault").write_text("")

    def said(self, what: str) -> list[dict[str, Any]]:
        """What was written down."""
        file = self.directory / f"{what}.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def register() -> None:
    """Called by SGLang."""
    from kvferry.endpoint import DecodeEndpoint, Sender
    from kvferry.engines.sglang.metadata_rows import MetadataRows

    directory = Path(os.environ[DIRECTORY])

    def note(what: str, **values: Any) -> None:
        with (directory / f"{what}.jsonl").open("a") as file:
            file.write(json.dumps(values) + "\n")

    def fault() -> str:
        return (directory / "fault").read_text()

    submit, open_room, read = Sender.submit, DecodeEndpoint.open, MetadataRows.read

    def submitting(sender: Any, pages: Mapping[str, Any], **more: Any) -> None:
        note("submitted", room=sender.room, pages=len(pages["kv"].pages), last=more["last"])
        if fault() == "another page" and len(pages["kv"].pages):
            wrong = pages["kv"].pages.copy()
            wrong[0] = next(number for number in range(1, 100) if number not in wrong)
            pages = {**pages, "kv": replace(pages["kv"], pages=wrong)}
        submit(sender, pages, **more)

    def opening(endpoint: Any, room: int, pages: Any, **more: Any) -> Any:
        note("asked", room=room, pages=len(pages["kv"].pages), prefix_tokens=more["prefix_tokens"])
        return open_room(endpoint, room, pages, **more)

    def reading(rows: MetadataRows, index: int) -> bytes:
        aux = read(rows, index)
        if fault() != "another first token":
            return aux
        first, *others = msgspec.msgpack.decode(aux)
        return msgspec.msgpack.encode([bytes([first[0] ^ 1]) + first[1:], *others])

    Sender.submit = submitting  # type: ignore[method-assign, assignment]
    DecodeEndpoint.open = opening  # type: ignore[method-assign, assignment]
    MetadataRows.read = reading  # type: ignore[method-assign, assignment]
