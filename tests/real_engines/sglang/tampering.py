"""A plug-in of SGLang's for tests: writes down what kvferry is asked, and does wrong what a file says.

It runs in SGLang's own processes, which a test reaches through files alone.
"""

from __future__ import annotations

import ctypes
import json
import os
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import msgspec
from tests.real_engines import plugins
from tests.real_engines.sglang import overlapping

DIRECTORY = "KVFERRY_TAMPERING"
"""The environment variable with the directory of those files."""


class Tampering:
    """The files, on the test's side."""

    def __init__(self, directory: Path) -> None:
        """Makes the plug-in findable in the directory, which goes on SGLang's module path."""
        self.directory = directory
        plugins.install(directory, "tampering", __name__)
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

    def forget(self) -> None:
        """Forgets what was written down of requests."""
        for what in ("submitted", "asked", "compared"):
            (self.directory / f"{what}.jsonl").unlink(missing_ok=True)

    def said(self, what: str) -> list[dict[str, Any]]:
        """What was written down."""
        file = self.directory / f"{what}.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def let_checksums_run_on_cpus(note: Callable[..., None]) -> None:
    """Computes SGLang's checksums on a CPU, of the same items in the same order: SGLang does it on GPUs alone.

    Args:
        note: writes down what was compared.
    """
    from sglang.srt.disaggregation import decode
    from sglang.srt.disaggregation.checksum import KvChecksumComputer

    verify = decode.SchedulerDisaggregationDecodeMixin._verify_kv_checksums

    @wraps(verify)  # SGLang has to be what kvferry's contract says
    def verifying(scheduler: Any, batch: Any) -> None:
        expected = {req.bootstrap_room: req for req in batch.reqs if req.expected_kv_checksum}
        pages = {room: _pages_behind_the_prefix(scheduler, req) for room, req in expected.items()}
        verify(scheduler, batch)
        kept = {req.bootstrap_room for req in batch.reqs}
        for room, count in pages.items():
            note("compared", room=room, pages=count, mismatch=room not in kept)

    def compute(self: Any, pages: Any, state: Any = None) -> int:
        digest = 1
        for address, size in zip(self._kv_data_ptrs, self._kv_item_lens, strict=True):
            for page in pages.tolist():
                digest = zlib.adler32(ctypes.string_at(address + page * size, size), digest)
        return digest

    KvChecksumComputer.compute = compute
    decode.SchedulerDisaggregationDecodeMixin._verify_kv_checksums = verifying


def _pages_behind_the_prefix(scheduler: Any, req: Any) -> int:
    page_tokens: int = scheduler.token_to_kv_pool_allocator.page_size
    tokens: int = len(req.origin_input_ids) - req.kv.cache_protected_len
    return -(-tokens // page_tokens)


def watch_tokens(scheduler: Any, note: Callable[..., None]) -> None:
    """Writes down how many tokens a scheduler can give to requests, and since when, and whether its steps overlap."""
    side = scheduler.disaggregation_mode.value
    note("all", side=side, tokens=scheduler.max_total_num_tokens, overlaps=scheduler.enable_overlap)

    def look() -> None:
        before = None
        while True:
            cached = scheduler.tree_cache.evictable_size()
            free = scheduler.token_to_kv_pool_allocator.available_size() + cached
            if free != before:
                note("free", side=side, tokens=free, at=time.time())
                before = free
            time.sleep(0.02)

    threading.Thread(target=look, daemon=True).start()


def register() -> None:
    """Called by SGLang."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from kvferry.endpoint import DecodeEndpoint, Sender
    from kvferry.engines.layer_ranges import LayerRanges
    from kvferry.engines.sglang.manager import RoomNumbers
    from kvferry.engines.sglang.metadata_rows import MetadataRows
    from kvferry.engines.sglang.sender import KVFerrySender

    directory = Path(os.environ[DIRECTORY])

    def note(what: str, **values: Any) -> None:
        with (directory / f"{what}.jsonl").open("a") as file:
            file.write(json.dumps(values) + "\n")

    def fault() -> str:
        return (directory / "fault").read_text()

    submit, open_room, read, take = Sender.submit, DecodeEndpoint.open, MetadataRows.read, RoomNumbers.take
    pop, before_layer = KVFerrySender.pop_decode_prefix_len, LayerRanges.before

    def submitting(sender: Any, pages: Mapping[str, Any], **more: Any) -> None:
        is_last = more.get("last", False)
        if fault() == "no end" and is_last:
            note("withheld", room=sender.room)
            return
        note("submitted", room=sender.room, pages=len(pages["kv"].pages), last=is_last)
        if fault() == "another page" and len(pages["kv"].pages):
            wrong = pages["kv"].pages.copy()
            wrong[0] = next(number for number in range(1, len(wrong) + 2) if number not in wrong)
            pages = {**pages, "kv": replace(pages["kv"], pages=wrong)}
        submit(sender, pages, **more)

    def before(ranges: LayerRanges, number: int) -> int:
        return ranges.count - 1 if fault() == "layers too early" else before_layer(ranges, number)

    def opening(endpoint: Any, room: int, pages: Any, **more: Any) -> Any:
        note("asked", room=room, pages=len(pages["kv"].pages), prefix_tokens=more["prefix_tokens"])
        return open_room(endpoint, room, pages, **more)

    def taking(numbers: Any, room: int, request: Any) -> int:
        number = take(numbers, room, request)
        if number != room:
            note("in use", room=room)
        return number

    def reading(rows: MetadataRows, index: int) -> bytes:
        aux = read(rows, index)
        if fault() != "another first token":
            return aux
        first, *others = msgspec.msgpack.decode(aux)
        return msgspec.msgpack.encode([bytes([first[0] ^ 1]) + first[1:], *others])

    let_checksums_run_on_cpus(note)
    overlapping.register()
    HookRegistry.register(
        "sglang.srt.managers.scheduler.Scheduler.__init__",
        lambda _, scheduler, *__, **___: watch_tokens(scheduler, note),
        HookType.AFTER,
    )

    def popping(sender: Any) -> int:
        return 0 if fault() == "no prefix" else pop(sender)

    KVFerrySender.pop_decode_prefix_len = popping  # type: ignore[method-assign, assignment]
    LayerRanges.before = before  # type: ignore[method-assign, assignment]
    Sender.submit = submitting  # type: ignore[method-assign, assignment]
    DecodeEndpoint.open = opening  # type: ignore[method-assign, assignment]
    RoomNumbers.take = taking  # type: ignore[method-assign, assignment]
    MetadataRows.read = reading  # type: ignore[method-assign, assignment]
