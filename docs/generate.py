"""Writes what the documents say about the code from the code: `make docs`.

The state diagrams of docs/design/protocol.md come from the transition tables, docs/settings.md from the settings, the
tables of docs/reliability.md and docs/observability.md from `protocol/transfer/states.py` and `observe/metrics.py`,
those of docs/design/caches.md from the plug-ins, docs/design/families.md from the families that tests build, the
spine of docs/reading.md from the files that it names, docs/specification from the types that travel and the machines.
A test checks that none has fallen behind.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from pydantic_core import PydanticUndefined
from tests.simulation import enumerated, pins
from tests.support.family_cells import Cell, Shape, cells

import kvferry
from kvferry.endpoint.decode.arrivals import Arrivals
from kvferry.endpoint.decode.room import ReceivingRoom
from kvferry.endpoint.prefill.room import SendingRoom
from kvferry.endpoint.prefill.room_write import DirectWrites
from kvferry.endpoint.transfer import Transfer
from kvferry.engines.sglang import cache_kinds as sglang
from kvferry.engines.vllm import cache_kinds as vllm
from kvferry.errors import UsageError
from kvferry.layout import Component, Shard, TokenShare
from kvferry.observe.metrics import Metrics
from kvferry.observe.status import EndpointStatus, PeerStatus, Side, StagingStatus
from kvferry.plan.pair import PairPlan
from kvferry.plan.pieces import Piece
from kvferry.plan.requests.chunks import Chunk
from kvferry.plan.requests.moves import Move
from kvferry.plan.routes import Route
from kvferry.protocol.transfer.receiver import ReceiverMachine
from kvferry.protocol.transfer.sender import SenderMachine
from kvferry.protocol.transfer.states import (
    HOLDINGS,
    RECEIVER_TRANSITIONS,
    SENDER_TRANSITIONS,
    SenderState,
    TransferState,
    Waits,
)
from kvferry.protocol.wire.messages import OpenRoom
from kvferry.settings import Settings, all_fields
from kvferry.spelling import PREFIX

DOCS = Path(__file__).parent
DESIGN = DOCS / "design"

CACHE_KINDS = {"vllm": vllm.KINDS, "sglang": sglang.KINDS}
"""What each plug-in transfers, by the mark in docs/design/caches.md."""

SPINE: dict[type, str] = {
    Component: "A kind of cached state is its axes, and whether a token, a page or a request has an entry.",
    Shard: "What a rank holds of it is a box, and one formula says at which address each element lies.",
    TokenShare: "Which token positions a rank holds, under context parallelism: blocks, dealt in a pattern.",
    Piece: "Boxes and shares are intersected; of ranks that hold the same, one is elected writer, room by room.",
    Route: "Token positions become ranges that lie together on both sides, cut into units.",
    PairPlan: "All that a rank may send to another, worked out once, when the two connect.",
    Chunk: "What a caller submits, and the rules for it: no gap, no repetition, one last chunk.",
    Move: "A chunk is checked against what a receiver opened, and what it needs of the chunk is selected.",
    TransferState: "All transitions of both sides, as tables, and which states hold pages.",
    SenderMachine: "The prefill side: when a chunk is written, when the room ends, when its pages are reusable.",
    ReceiverMachine: "The decode side: chunks are counted by writer, and who may still write is known.",
    OpenRoom: "What ranks say to each other, each message with its bounds.",
    Transfer: "What a caller holds: submit and state, which never block; wait and abort; and when pages are reusable.",
    SendingRoom: "The room on a prefill rank: its machine, and what that has done through a port: writes, messages.",
    ReceivingRoom: "The room on a decode rank, of the same shape; its port is `endpoint/decode/rooms.py`.",
    DirectWrites: "A write waits until it is admitted, is posted straight into the receiver's pages, and ends once.",
    Arrivals: "Notifications become the receiver's events, if they are of this use of the room.",
}
"""The core in reading order, for docs/reading.md: a class of each file, and what the file says."""


def reading_page() -> str:
    """docs/reading.md with its list of files, and about how long each is."""
    package = Path(kvferry.__file__).parent
    rows, total = [], 0
    for number, (of, sentence) in enumerate(SPINE.items(), 1):
        path = Path(inspect.getfile(of))
        lines = round(len(path.read_text().splitlines()), -1)
        total += lines
        rows.append(f"| {number} | `{path.relative_to(package)}` | {lines} | {sentence} |")
    head = ["| | file | lines, about | what it says |", "|---|---|---|---|"]
    table = "\n".join([*head, *rows, f"| | {len(rows)} files | {total:,} | |"])
    return _between((DOCS / "reading.md").read_text(), "spine", table)


def reliability_page() -> str:
    """docs/reliability.md with its tables of what holds pages, and of what finds planted faults, made anew."""
    settings = Settings()
    waits = Waits(
        bootstrap_s=settings.bootstrap_timeout_s,
        waiting_s=settings.waiting_timeout_s,
        write_s=settings.write_timeout_s,
        peer_s=settings.peer_timeout_s,
        heartbeat_s=settings.heartbeat_interval_s,
        quarantine_s=settings.quarantine_s,
    )
    text = (DOCS / "reliability.md").read_text()
    tables = {
        "holding": holding_table(waits),
        "planted": pins.markdown(pins.pinned(), {**enumerated.SOON, **enumerated.CLOSED}),
    }
    for mark, table in tables.items():
        before, rest = text.split(f"<!-- {mark} -->\n")
        _, after = rest.split(f"<!-- /{mark} -->")
        text = f"{before}<!-- {mark} -->\n{table}\n<!-- /{mark} -->{after}"
    return text


def holding_table(waits: Waits) -> str:
    """What holds pages, until when, and for how long at most with these settings."""
    lines = [
        "| whose pages | while the transfer is | until | longest without progress | unless |",
        "|---|---|---|---|---|",
    ]
    for row in HOLDINGS:
        side = "prefill" if isinstance(row.state, SenderState) else "decode"
        terms = " + ".join(f"`{term}`" for term in row.terms) or "0"
        seconds = f"{terms} = {row.longest_s(waits):g} s" if row.terms else "0 s"
        lines.append(f"| {side} | {row.state.value} | {row.until} | {seconds} | {row.unless or '-'} |")
    return "\n".join(lines)


def mermaid(table: Mapping[Any, Mapping[Any, Any]]) -> str:
    """A transition table as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", f"    [*] --> {TransferState.BOOTSTRAPPING.name}"]
    for state, moves in table.items():
        lines += [f"    {state.name} --> {target.name}: {trigger.value}" for trigger, target in moves.items()]
        if not moves:
            lines.append(f"    {state.name} --> [*]")
    return "\n".join(lines)


def protocol_page() -> str:
    """docs/design/protocol.md with the diagrams between its marks made anew."""
    text = (DESIGN / "protocol.md").read_text()
    for mark, diagram in (("sender", mermaid(SENDER_TRANSITIONS)), ("receiver", mermaid(RECEIVER_TRANSITIONS))):
        before, rest = text.split(f"<!-- {mark} -->\n")
        _, after = rest.split(f"<!-- /{mark} -->")
        text = f"{before}<!-- {mark} -->\n```mermaid\n{diagram}\n```\n<!-- /{mark} -->{after}"
    return text


def observability_page() -> str:
    """docs/observability.md with its table of metrics made anew."""
    lines = ["| metric, labels | type | meaning |", "|---|---|---|"]
    for family in exported():
        labels = sorted({label for sample in family.samples for label in sample.labels if label != "le"})
        name = family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")
        braces = f"{{{', '.join(labels)}}}" if labels else ""
        lines.append(f"| `{name}{braces}` | {family.type} | {family.documentation} |")
    before, rest = (DOCS / "observability.md").read_text().split("<!-- metrics -->\n")
    _, after = rest.split("<!-- /metrics -->")
    table = "\n".join(lines)
    return f"{before}<!-- metrics -->\n{table}\n<!-- /metrics -->{after}"


def exported() -> list[Metric]:
    """Every metric of an endpoint to which everything has happened once."""
    peer = PeerStatus(name="a", state="ready", is_ready=True, silent_s=1e9)
    status = EndpointStatus(
        side=Side.PREFILL,
        engine="",
        rank=0,
        endpoint="",
        version="",
        process=0,
        at_unix_s=0.0,
        up_s=0.0,
        peer_timeout_s=1.0,
        heartbeat_s=1.0,
        problem="",
        states={},
        oldest_room_s=0.0,
        quarantined_pages=0,
        quarantine_s=0.0,
        rooms=(),
        peers=(peer,),
        staging=StagingStatus(),
        threads=(),
    )
    metrics = Metrics(lambda: status)
    metrics.refused(UsageError())
    families = text_string_to_metric_families(metrics.exposition().decode())
    return [family for family in families if not family.name.endswith("_created")]


def caches_page() -> str:
    """docs/design/caches.md with a table for every engine made anew."""
    text = (DESIGN / "caches.md").read_text()
    for mark, kinds in CACHE_KINDS.items():
        before, rest = text.split(f"<!-- {mark} -->\n")
        _, after = rest.split(f"<!-- /{mark} -->")
        text = f"{before}<!-- {mark} -->\n{kinds.markdown()}\n<!-- /{mark} -->{after}"
    return text


def families_page() -> str:
    """docs/design/families.md with a table for every engine, and the list of what shows their cells, made anew."""
    text = (DESIGN / "families.md").read_text()
    notes: dict[tuple[str, str], int] = {}
    rows: dict[str, dict[str, list[str]]] = {}
    for engine, family, shape, cell in cells():
        row = rows.setdefault(engine, {}).setdefault(family.name, [f"{family.members}: {family.special}"])
        assert len(row) == 1 + list(Shape).index(shape), "cells come in the order of the columns"
        row.append(_cell(cell, notes))
    for engine, families in rows.items():
        head = [f"family ({engine})", *(shape.value for shape in Shape)]
        lines = [head, ["---"] * len(head), *families.values()]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        text = _between(text, engine.lower(), table)
    said = (f"{number}. {f'{why}: ' if why else ''}`{test}`" for (test, why), number in notes.items())
    return _between(text, "tests", "\n".join(said))


def _cell(cell: Cell, notes: dict[tuple[str, str], int]) -> str:
    """What stands in a cell: its status, and the number of the note that says what shows it."""
    test, _, _ = cell.test.partition("[")
    number = notes.setdefault((test, cell.why), len(notes) + 1)
    return f"{cell.status.value} ({number})"


def _between(text: str, mark: str, content: str) -> str:
    before, rest = text.split(f"<!-- {mark} -->\n")
    _, after = rest.split(f"<!-- /{mark} -->")
    return f"{before}<!-- {mark} -->\n{content}\n<!-- /{mark} -->{after}"


def settings_page() -> str:
    """docs/settings.md."""
    lines = [
        "# Settings",
        "",
        "Each is an environment variable and a field of `kvferry.Settings`: `KVFERRY_WORKERS` and `workers`. What is",
        "passed to `Settings` wins over the variable, which wins over the default. Made from the code by `make docs`.",
        "",
        "| variable | default | meaning |",
        "|---|---|---|",
    ]
    for name, field in all_fields().items():
        default = (
            "from the CPUs that this process may use" if field.default is PydanticUndefined else f"`{field.default}`"
        )
        meaning = re.sub(r"\s+", " ", field.description or "")
        lines.append(f"| `{PREFIX}{name.upper()}` | {default} | {meaning} |")
    return "\n".join(lines) + "\n"


def specification_files() -> dict[str, str]:
    """The files in docs/specification that are made, by name."""
    from docs.specification import layouts, messages, schema  # with griffe, which no other page needs

    pages = {}
    for name, parts in {"messages.md": messages.parts(), "layouts.md": layouts.parts()}.items():
        pages[name] = (DOCS / "specification" / name).read_text()
        for mark, content in parts.items():
            pages[name] = _between(pages[name], mark, content)
    return {
        **pages,
        "messages.json": messages.examples(),
        "layout.schema.json": schema.text(),
        **{f"vectors/{name}": text for name, text in layouts.vector_files().items()},
    }


def main() -> None:
    """Writes all of them."""
    for name, text in specification_files().items():
        (DOCS / "specification" / name).write_text(text)
    (DESIGN / "protocol.md").write_text(protocol_page())
    (DOCS / "settings.md").write_text(settings_page())
    (DOCS / "reliability.md").write_text(reliability_page())
    (DOCS / "observability.md").write_text(observability_page())
    (DESIGN / "caches.md").write_text(caches_page())
    (DESIGN / "families.md").write_text(families_page())
    (DOCS / "reading.md").write_text(reading_page())


if __name__ == "__main__":
    main()
