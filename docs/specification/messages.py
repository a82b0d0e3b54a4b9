"""What docs/specification/messages.md says of the code, and messages.json, with an example of every message."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, get_args

import msgspec
from docs.specification import order, rooms
from docs.specification.described import classes_in, default_of, described, in_words, meaning_of, referred_to
from docs.specification.tables import table
from msgspec import inspect as types
from tests.support.message_examples import EXAMPLES, encoded

from kvferry.applications.plan.vector import in_lines
from kvferry.layout import RankLayout
from kvferry.protocol.links.link import LinkState
from kvferry.protocol.transfer.states import ReceiverState, SenderState
from kvferry.protocol.wire import codec, messages
from kvferry.protocol.wire.field_types import Message
from kvferry.protocol.wire.versions import PROTOCOL_VERSION

HEADER_BYTES = 6
KINDS: dict[Any, tuple[str, str]] = {
    messages.ToPrefill: ("decode to prefill", "alone"),
    messages.NumberedToPrefill: ("decode to prefill", "numbered"),
    messages.ToDecode: ("prefill to decode", "alone"),
    messages.NumberedToDecode: ("prefill to decode", "numbered"),
    messages.Notification: ("prefill to decode", "notification"),
}
"""Who sends the messages of each union, and how."""


def parts() -> dict[str, str]:
    """Makes what messages.md says of the code, by the marks between which it stands."""
    return {
        "encoding": _encoding(),
        "link": _link(),
        "transfer": _said(),
        "aborted": _said(aborts=True),
        "states": _states(),
        "types": _types(),
    }


def _encoding() -> str:
    header = codec.encode(messages.Hello(), PROTOCOL_VERSION)[:HEADER_BYTES].hex()
    rows = (
        ("0 to 3", f"`{codec.MAGIC.decode()}`, in ASCII"),
        ("4 and 5", f"the protocol's version, unsigned, little-endian: with the magic `{header}` in this one"),
        ("from 6 on", f"a MessagePack map of {codec.MAX_MESSAGE_BYTES:,} bytes at most: `type`, and fields by name"),
    )
    return table(("bytes", f"in protocol version {PROTOCOL_VERSION}"), rows)


def _types() -> str:
    sections: list[str] = []
    for union, (direction, how) in KINDS.items():
        sections.append(f"## From {direction}, {how}\n")
        sections += [_section(of) for of in get_args(union) if of is not messages.Numbered]
    sections += ["## Either way, alone\n", _section(messages.Numbered)]
    sections.append("## What fields hold\n\nTypes of a layout are in [layout.schema.json](layout.schema.json).\n")
    sections += [_section(of) for of in _held()]
    sections.append("## What these refer to\n")
    sections += [f"### {name}\n\n{text}\n" for name, text in referred_to(list(sections)).items()]
    return "\n".join(sections)


def _link() -> str:
    sent = order.of_link()
    rows = ((state.name, state.value, ", ".join(sent[state]) or "nothing") for state in LinkState)
    return table(("state", "the link is", "sends"), rows)


def _said(*, aborts: bool = False) -> str:
    rows = (
        (
            "decode" if each.is_up else "prefill",
            each.message,
            each.prefill.name if each.prefill is not None else "",
            each.decode.name if each.decode is not None else "",
        )
        for each in order.of_transfer(aborts=aborts)
    )
    return table(("from", "message", "prefill room", "decode room"), rows)


def _states() -> str:
    sent, taken = rooms.moves()
    everything = (of for union in KINDS for of in get_args(union) if of in sent or of in taken)
    rows = ((f"`{of.__name__}`", _moves(sent.get(of, {})), _moves(taken.get(of, {}))) for of in everything)
    return table(("message", "a room sends it", "a room takes it"), rows)


def _moves(found: Iterable[tuple[rooms.State, rooms.State]]) -> str:
    """Says from which state a room moves to which, the states in the order of their declaration."""
    by_state: dict[rooms.State, list[rooms.State]] = {}
    for before, after in found:
        by_state.setdefault(before, []).append(after)
    return "<br>".join(
        f"{state.name} → {', '.join(each.name for each in type(state) if each in by_state[state])}"
        if by_state[state] != [state]
        else state.name
        for state in (*SenderState, *ReceiverState)
        if state in by_state
    )


def _held() -> Iterator[type]:
    """Yields what fields of messages hold, but layouts, which have a document of their own."""
    of_layouts = classes_in(RankLayout)
    every = classes_in(*(of for union in KINDS for of in get_args(union)))
    return (of for name, of in every.items() if name not in of_layouts and not issubclass(of, Message))


def _section(of: type) -> str:
    says = described(of)
    lines = [f"### {of.__name__}", "", " ".join([says.text, *(f"Refused {each}" for each in says.refused)]), ""]
    kind = types.type_info(of)
    if isinstance(kind, types.EnumType):
        return "\n".join([*lines, f"One of {', '.join(f'`{each.value}`' for each in kind.cls)}.", ""])
    assert isinstance(kind, types.StructType)
    elsewhere = dict.fromkeys(classes_in(RankLayout), "layout.schema.json")
    rows = [
        (f"`{each.encode_name}`", in_words(each.type, elsewhere), default_of(each), meaning_of(each, says))
        for each in kind.fields
    ]
    if kind.array_like:
        lines += ["An array.", ""]
    if rows:
        lines += [table(("field", "type", "default", "meaning"), rows), ""]
    return "\n".join(lines)


def examples() -> str:
    """Makes messages.json."""
    return in_lines([_example(each) for each in EXAMPLES]) + "\n"


def _example(message: Message) -> dict[str, Any]:
    data = encoded(message)
    direction, how = next(says for union, says in KINDS.items() if isinstance(message, get_args(union)))
    decoded = msgspec.msgpack.decode(data[HEADER_BYTES:])
    return {
        "message": type(message).__name__,
        "sent": f"{direction}, {how}",
        "hex": data.hex(),
        "decoded": json.loads(msgspec.json.encode(plain(decoded))),
    }


def plain(value: Any) -> Any:
    """Writes bytes inside of a value as their hexadecimal digits, in an object that says so."""
    match value:
        case bytes():
            return {"hex": value.hex()}
        case dict():
            return {name: plain(each) for name, each in value.items()}
        case list():
            return [plain(each) for each in value]
    return value
