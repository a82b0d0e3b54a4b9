"""What travels: every message comes back as it was sent, and nothing else gets in."""

from __future__ import annotations

import pickle
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.message_examples import COORDINATES, EXAMPLES, PROCESS, encoded
from tests.support.tiers import examples

from kvferry.errors import MessageError, PeerError, UnknownMessageError, VersionError
from kvferry.layout import (
    Axis,
    Component,
    Interval,
    Paging,
    RankCoordinates,
    RankLayout,
    Shard,
    latent_component,
)
from kvferry.plan import Piece
from kvferry.plan.requests.demands import GroupRequest
from kvferry.plan.requests.page_numbers import PageNumbers
from kvferry.protocol.wire import codec
from kvferry.protocol.wire.codec import (
    MAX_MESSAGE_BYTES,
    decode_notification,
    decode_numbered_to_decode,
    decode_numbered_to_prefill,
    decode_to_decode,
    decode_to_prefill,
    encode,
)
from kvferry.protocol.wire.field_types import Message
from kvferry.protocol.wire.messages import (
    AbortRoom,
    Attach,
    Attached,
    ChunkArrived,
    Closed,
    Credit,
    Detach,
    Drained,
    ExpectRooms,
    Gone,
    Hello,
    IsGone,
    Notification,
    Numbered,
    NumberedToDecode,
    NumberedToPrefill,
    OpenRoom,
    Ping,
    Pong,
    Refused,
    RefuseRoom,
    RoomFailed,
    RoomVerified,
    SpanReleased,
    StagedArrived,
    ToDecode,
    ToPrefill,
    Welcome,
    WriterFinished,
)
from kvferry.protocol.wire.versions import PROTOCOL_VERSION, SPOKEN, Versions
from kvferry.transport import PeerMetadata


def numbered(outer: Any, inner: Any) -> Any:
    """Decodes a message that travels with a number."""

    def decode(data: bytes) -> Any:
        message = outer(data)
        if not isinstance(message, Numbered):
            raise MessageError(f"{type(message).__name__} has no number")
        return inner(message.body)

    return decode


DECODERS: dict[Any, Any] = {
    ToPrefill: decode_to_prefill,
    ToDecode: decode_to_decode,
    NumberedToPrefill: numbered(decode_to_prefill, decode_numbered_to_prefill),
    NumberedToDecode: numbered(decode_to_decode, decode_numbered_to_decode),
    Notification: decode_notification,
}
OPEN = DECODERS[NumberedToPrefill]
HEADER_BYTES = 6


def example_of(kind: type[Message]) -> Message:
    return next(message for message in EXAMPLES if isinstance(message, kind))


def decoder_of(message: Message) -> Any:
    return next(decoder for union, decoder in DECODERS.items() if isinstance(message, get_args(union)))


def changed(message: Message, path: tuple[str | int, ...], value: object) -> bytes:
    """The message's bytes with one field, somewhere inside, set to what our own classes would refuse."""
    body = msgspec.msgpack.decode(encode(message)[HEADER_BYTES:])
    inner = body
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    encoded_again = msgspec.msgpack.encode(body)
    if isinstance(message, NumberedToPrefill | NumberedToDecode):
        return encode(Numbered(epoch=3, number=4, body=msgspec.Raw(encoded_again)))
    return encode(message)[:HEADER_BYTES] + encoded_again


def with_body(body: bytes) -> bytes:
    return encode(Ping())[:HEADER_BYTES] + body


def test_there_is_an_example_of_every_message():
    classes = {member for union in DECODERS for member in get_args(union)}
    assert {type(example) for example in EXAMPLES} == classes


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_comes_back_as_it_was_sent(message: Message):
    assert decoder_of(message)(encoded(message)) == message


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_is_refused_where_another_kind_is_expected(message: Message):
    either_way = (
        {decode_to_prefill, decode_to_decode} if isinstance(message, NumberedToPrefill | NumberedToDecode) else set()
    )
    for decoder in DECODERS.values():
        if decoder is not decoder_of(message) and decoder not in either_way and not isinstance(message, Numbered):
            with pytest.raises(MessageError, match=f"{type(message).__name__}|Numbered"):
                decoder(encoded(message))


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_truncated_message_is_refused_wherever_it_was_cut(message: Message):
    data = encoded(message)
    for length in range(len(data)):
        with pytest.raises(MessageError):
            decoder_of(message)(data[:length])


@pytest.mark.parametrize("decoder", DECODERS.values())
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"kvf",
        b"GET / HTTP/1.1\r\n\r\n",
        b"kvfx\x01\x00\xc0",
        with_body(b""),
        with_body(b"\xc0"),
        with_body(b"\x80"),
        with_body(msgspec.msgpack.encode({"type": "Unheard"})),
        with_body(msgspec.msgpack.encode([1, 2, 3])),
        encode(Ping()) + b"\x00",
    ],
    ids=["empty", "short", "http", "magic", "no-body", "nil", "no-tag", "tag", "array", "trailing"],
)
def test_garbage_is_no_message(decoder: Any, data: bytes):
    with pytest.raises(MessageError):
        decoder(data)


@pytest.mark.parametrize("decoder", DECODERS.values())
@pytest.mark.parametrize(("version", "side"), [(513, "this"), (0, "the peer's")])
def test_another_version_is_refused_with_what_each_side_speaks(decoder: Any, version: int, side: str):
    spoken = rf"version {version}, and this side speaks protocol version {PROTOCOL_VERSION}: "
    with pytest.raises(VersionError, match=rf"{spoken}upgrade kvferry on {side} side first"):
        decoder(encode(Ping(), version))


@pytest.mark.parametrize("version", [1, 2])
def test_a_next_release_reads_both_versions(version: int):
    data = encode(Detach(endpoint="d0"), version)
    assert (codec.version_of(data), decode_to_prefill(data, Versions(1, 2))) == (version, Detach(endpoint="d0"))


@pytest.mark.parametrize("decoder", DECODERS.values())
def test_a_message_of_a_type_that_is_new_to_us_is_told_from_a_malformed_one(decoder: Any):
    novelty = msgspec.msgpack.encode({"type": "Novelty" * 100, "room": 1})
    with pytest.raises(UnknownMessageError, match=r"of type 'Novelty.{,60}', which kvferry \S+ does not know"):
        decoder(with_body(novelty))


@pytest.mark.parametrize("body", [{"room": 1}, {"type": 3}, {"type": "Detach", "endpoint": 3}, ["Novelty"], 7])
def test_what_is_malformed_is_no_message_of_a_type_that_is_new_to_us(body: Any):
    with pytest.raises(MessageError) as caught:
        decode_to_prefill(with_body(msgspec.msgpack.encode(body)))
    assert not isinstance(caught.value, UnknownMessageError)


def test_another_version_is_told_before_its_body_is_read():
    with pytest.raises(VersionError):
        decode_to_prefill(codec.MAGIC + b"\xff\x00" + b"whatever the future holds")


def test_the_largest_message_passes_and_a_byte_more_is_refused_on_both_sides(monkeypatch: pytest.MonkeyPatch):
    message = Detach(endpoint="d" * 100)
    data = encode(message)
    body = len(data) - HEADER_BYTES
    monkeypatch.setattr(codec, "MAX_MESSAGE_BYTES", body)
    assert decode_to_prefill(encode(message)) == message
    monkeypatch.setattr(codec, "MAX_MESSAGE_BYTES", body - 1)
    with pytest.raises(MessageError, match=f"Detach of {body} bytes exceeds the limit of {body - 1}"):
        encode(message)
    with pytest.raises(MessageError, match=f"exceeds the limit of {body - 1}"):
        decode_to_prefill(data)


@pytest.mark.parametrize(
    "message",
    [
        OpenRoom(room=2**64, generation=1, receivers=1, tokens=None, groups=()),
        Detach(endpoint="caf\udce9"),
    ],
    ids=["number", "surrogate"],
)
def test_what_cannot_be_encoded_is_a_message_error(message: Message):
    with pytest.raises(MessageError, match=type(message).__name__):
        encode(message)


@pytest.mark.parametrize("kind", [Refused, RoomFailed, AbortRoom])
def test_a_reason_always_arrives_as_far_as_it_can(kind: type[Message]):
    """Whoever waits for the answer must get it, however long or odd the sentence in it is."""
    message = msgspec.structs.replace(example_of(kind), reason="rank 7 holds " * 5000 + "caf\udce9")
    arrived = decoder_of(message)(encoded(message))
    assert arrived == message
    assert arrived.reason.startswith("rank 7 holds rank 7 holds")
    assert arrived.reason.endswith("... (65004 characters)")
    odd = msgspec.structs.replace(example_of(kind), reason="cannot open 'caf\udce9'")
    assert decoder_of(odd)(encoded(odd)).reason == "cannot open 'caf?'"


LONG = "x" * 100_000


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        (Attach, ("endpoint",), "x" * 256),
        (Attach, ("endpoint",), ""),
        (Attach, ("endpoint",), "two words"),
        (Attach, ("endpoint",), "line\n"),
        (Attach, ("engine",), "x" * 257),
        (Attach, ("coordinates", "tp_size"), 2**64 - 1),
        (Attach, ("host",), "x" * 257),
        (Attach, ("transport",), LONG),
        (Attach, ("transport_metadata",), bytes(16 * 2**20 + 1)),
        (Attach, ("staging", "problem"), LONG),
        (Attach, ("staging", "scatter_bytes_per_s"), -1.0),
        (Attach, ("staging", "scatter_bytes_per_s"), float("inf")),
        (Attach, ("staging", "scatter_bytes_per_s"), float("nan")),
        (Attach, ("staging", "ring", "epoch"), -1),
        (Attach, ("pieces",), [["k", [], 0, [0]]] * (2**17 + 1)),
        (Attach, ("pieces", 0, 0), LONG),
        (Attach, ("pieces", 0, 1), [[0, 1]] * 9),
        (Attach, ("pieces", 0, 1, 0), [0, 2**48 + 1]),
        (Attach, ("pieces", 0, 3), [0] * (2**14 + 1)),
        (Attach, ("layout", "shards", 0, "group"), LONG),
        (Attach, ("layout", "shards", 0, "component", "name"), LONG),
        (Attach, ("layout", "shards", 0, "component", "axes", 0), [LONG, 2]),
        (Attach, ("layout", "shards", 0, "component", "axes"), [["layer", 1]] * 9),
        (Attach, ("layout", "shards", 0, "addresses"), [0] * 2049),
        (Attach, ("layout", "shards", 0, "addresses", 0), -1),
        (Attach, ("layout", "shards", 0, "strides", 0), 2**48 + 1),
        (Attach, ("layout", "shards", 0, "device"), ["DRAM", 2**20]),
        (Attach, ("layout", "shards"), []),
        (Attach, ("layout", "tokens"), {"partition": {"pattern": [0] * (2**14 + 1)}}),
        (OpenRoom, ("room",), 2**63),
        (OpenRoom, ("generation",), -1),
        (OpenRoom, ("receivers",), 2**40),
        (OpenRoom, ("groups",), [["kv", 0, 0, 0, 0, b""]] * 513),
        (OpenRoom, ("groups", 0, 0), LONG),
        (OpenRoom, ("groups", 0, 5), bytes(8 * 2**21 + 8)),
        (AbortRoom, ("reason",), LONG),
        (Refused, ("reason",), LONG),
        (Refused, ("error",), LONG),
        (RoomFailed, ("reason",), LONG),
        (StagedArrived, ("segments",), [[0, 0, 1, b""]] * (2**16 + 1)),
        (StagedArrived, ("segments", 0, 3), bytes(8 * 2**21 + 16)),
        (WriterFinished, ("aux",), bytes(2**20 + 1)),
        (Attach, ("fingerprint",), {f"field_{number}": "v" for number in range(65)}),
        (Attach, ("fingerprint", "weights"), LONG),
        (Attach, ("fingerprint", "a\nb"), "v"),
        (OpenRoom, ("depends_on",), {f"digest {number}": b"d" for number in range(9)}),
        (OpenRoom, ("depends_on", "prompt"), bytes(33)),
        (OpenRoom, ("depends_on", "prompt\n"), b"d"),
    ],
)
def test_what_is_larger_than_anything_real_is_refused(kind: type[Message], path: tuple[str | int, ...], value: object):
    message = example_of(kind)
    with pytest.raises(MessageError):
        decoder_of(message)(changed(message, path, value))


@pytest.mark.parametrize("kind", ["x" * 1_000_000, "\x00" * 5000, "line\nfeed\u2028 and \x1b[31m more"])
def test_what_a_peer_said_is_quoted_on_one_line_and_not_all_of_it(kind: str):
    with pytest.raises(MessageError) as caught:
        decode_to_prefill(with_body(msgspec.msgpack.encode({"type": kind})))
    assert len(str(caught.value)) < 700
    assert str(caught.value).isprintable()
    assert "type" in str(caught.value) or "characters)" in str(caught.value)


def test_lists_are_refused_by_their_length_before_they_are_made():
    """Five bytes that announce four billion shards, pieces or pages."""
    for path in (("layout", "shards"), ("pieces",), ("layout", "shards", 0, "addresses")):
        data = changed(ATTACH, path, ["here"])
        cut = data[: data.index(b"\x91\xa4here")] + b"\xdd\xff\xff\xff\xff"
        with pytest.raises(MessageError):
            decode_to_prefill(cut)


def large_layout(rank: int) -> RankLayout:
    """256 layers of keys, values and their scales, in 8 groups of pages, on one of 512 ranks."""
    shards: list[Shard] = []
    for group in range(8):
        for name, dim, dtype in (("k", 256, "float8_e4m3fn"), ("v", 256, "float8_e4m3fn"), ("ks", 1, "float32")):
            axes = (Axis("layer", 256), Axis("head", 512), Axis("dim", dim))
            component = Component(name=f"{name} of kind {group}", axes=axes, dtype=dtype)
            element = component.element_bytes
            shards.append(
                Shard(
                    component=component,
                    box=(Interval(0, 256), Interval(rank, rank + 1), Interval(0, dim)),
                    addresses=tuple((1 << 44) + (len(shards) * 256 + layer << 32) for layer in range(256)),
                    strides=(dim * element, element),
                    paging=Paging(
                        page_tokens=1, num_pages=2**20, page_stride=dim * element, token_stride=dim * element
                    ),
                    group=f"group {group}",
                )
            )
    return RankLayout(shards=tuple(shards))


def test_a_large_deployment_stays_far_below_the_limits():
    layout = large_layout(3)
    place = RankCoordinates(tp_rank=3, tp_size=512)
    box = tuple(Interval(0, 1) for _ in range(3))
    pieces = tuple(
        Piece(f"{name} of kind {group}", box, 0, tuple(range(512)))
        for group in range(8)
        for name in ("k", "v", "ks")
        for _ in range(64)  # of as many pipeline stages
    )
    regions = layout.regions()
    metadata = PeerMetadata(name="decode-3", device=layout.device, regions=regions, private=bytes(400 * len(regions)))
    pages = PageNumbers.of(2 * np.arange(1_000_000))  # tokens, one a page, in no run
    large = [
        Welcome(
            endpoint="p0", engine="prefill", coordinates=place, layout=layout, transport="inprocess", process=PROCESS
        ),
        Attach(
            endpoint="d0",
            attempt=2**40,
            engine="decode",
            coordinates=place,
            layout=layout,
            pieces=pieces,
            transport="inprocess",
            transport_metadata=metadata.encode(),
        ),
        OpenRoom(
            room=1,
            generation=1,
            receivers=512,
            tokens=1_000_000,
            groups=tuple(GroupRequest(f"group {number}", 0, 0, 1_000_000, 0, pages) for number in range(2)),
        ),
    ]
    for message in large:
        data = encoded(message)
        assert decoder_of(message)(data) == message
        assert len(data) < MAX_MESSAGE_BYTES / 2
    assert PeerMetadata.decode(metadata.encode()) == metadata


ATTACH = EXAMPLES[1]
SHARD = ("layout", "shards", 0)


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        (("coordinates", "tp_rank"), 2, "tp_rank is 2"),
        (("coordinates", "pp_size"), 0, "pp_size is 0"),
        (("coordinates", "dp_rank"), -1, "`int` >= 0"),
        (("layout", "shards"), [], "at least one"),
        ((*SHARD, "component", "dtype"), "float7", "float7"),
        ((*SHARD, "component", "axes"), [], "at least one"),
        ((*SHARD, "component", "axes", 0, 1), 0, "size 0"),
        ((*SHARD, "box", 0), [1, 0], r"\[1, 0\)"),
        ((*SHARD, "box", 1), [1, 9], "not a part of it"),
        ((*SHARD, "addresses"), [4096], "2 addresses"),
        ((*SHARD, "strides"), [8, 1], "overlap"),
        ((*SHARD, "paging", 0), 0, "0 tokens"),
        ((*SHARD, "device", 0), "TAPE", "TAPE"),
        (("pieces", 0, 1, 0), [-1, 1], "`int` >= 0"),
        (("pieces", 0, 3), ["one"], "Expected `int`"),
        (("pieces", 0, 2), "one", "Expected `int | null`"),
        (("layout", "tokens", "part"), 1, "part 1 does not exist"),
        (("layout", "tokens", "partition", "pattern"), [0, 2], "every part from 0 on"),
        (("layout", "tokens", "partition", "block_tokens"), 0, "block_tokens is 0"),
        ((*SHARD, "component", "entry"), "layer", "layer"),
        ((*SHARD, "component", "window_tokens"), 0, "at least 1 token long"),
        (("transport_metadata",), "text", "Expected `bytes`"),
    ],
)
def test_an_impossible_layout_inside_a_message_is_a_malformed_message(
    path: tuple[str | int, ...], value: object, reason: str
):
    with pytest.raises(MessageError, match=reason):
        decode_to_prefill(changed(ATTACH, path, value))


@pytest.mark.parametrize(
    ("message", "field", "value"),
    [
        (example_of(OpenRoom), "room", -1),
        (example_of(AbortRoom), "room", -1),
        (example_of(ChunkArrived), "sequence", -1),
        (example_of(WriterFinished), "chunks", -1),
        (example_of(WriterFinished), "chunks", 1.5),
        (example_of(WriterFinished), "room", True),
    ],
)
def test_a_number_that_counts_nothing_is_a_malformed_message(message: Message, field: str, value: object):
    with pytest.raises(MessageError, match=field):
        decoder_of(message)(changed(message, (field,), value))


@pytest.mark.parametrize("number", [-1, 2**48 + 1, 1.5, "1", None])
@pytest.mark.parametrize("field", range(1, 5))
def test_a_position_in_a_group_that_no_request_has_is_a_malformed_message(field: int, number: object):
    with pytest.raises(MessageError, match="groups"):
        OPEN(changed(example_of(OpenRoom), ("groups", 1, field), number))


def test_the_last_position_that_a_request_may_have_travels():
    message = OPEN(changed(example_of(OpenRoom), ("groups", 1, 3), 2**48))
    assert isinstance(message, OpenRoom)
    assert message.groups[1].stop == 2**48
    with pytest.raises(MessageError, match="tokens"):
        OPEN(changed(example_of(OpenRoom), ("tokens",), 2**48 + 1))
    with pytest.raises(MessageError, match="tokens"):
        OPEN(changed(example_of(OpenRoom), ("tokens",), -1))


def test_text_that_is_not_utf_8_is_a_malformed_message():
    data = encode(Detach(endpoint="abc")).replace(b"abc", b"\xff\xfe\xfd")
    with pytest.raises(MessageError, match=r"(?i)utf-8"):
        decode_to_prefill(data)


def test_bottomless_nesting_is_a_malformed_message():
    known = {"type": "Detach", "endpoint": "d0"}
    fields = b"".join(msgspec.msgpack.encode(text) for item in known.items() for text in item)
    nested = msgspec.msgpack.encode("novelty") + b"\x91" * 200_000 + b"\xc0"
    with pytest.raises(MessageError):
        decode_to_prefill(with_body(b"\x83" + fields + nested))


def test_an_announced_size_allocates_nothing():
    for body in (b"\xdd\x7f\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"):
        fields = msgspec.msgpack.encode("type") + msgspec.msgpack.encode("Attach") + msgspec.msgpack.encode("pieces")
        with pytest.raises(MessageError):
            decode_to_prefill(with_body(b"\x82" + fields + body))


REQUIRED: dict[Any, str] = {
    AbortRoom: "room generation reason",
    Attach: "endpoint attempt engine coordinates layout pieces transport transport_metadata",
    Attached: "endpoint attempt only_staged",
    ChunkArrived: "room generation writer sequence",
    Closed: "endpoint",
    Credit: "epoch position",
    Detach: "endpoint",
    Drained: "endpoint room generation writer",
    ExpectRooms: "rooms",
    Gone: "process",
    Hello: "",
    IsGone: "process",
    Numbered: "epoch number body",
    OpenRoom: "room generation receivers tokens groups",
    Ping: "",
    Pong: "endpoint attached",
    RefuseRoom: "endpoint engine coordinates room generation reason",
    Refused: "attempt error reason",
    RoomFailed: "room generation writer error reason",
    RoomVerified: "room generation",
    SpanReleased: "endpoint epoch start begin stop",
    StagedArrived: "room generation writer sequence part is_last epoch start begin stop unit segments",
    Welcome: "endpoint engine coordinates layout transport process",
    WriterFinished: "room generation writer chunks",
}
"""What every message of version 1 has had from the first on. Whatever else one gains must have a default."""


def test_within_a_version_messages_only_gain_fields_with_defaults():
    """During an upgrade both releases read one another. Whatever else changes takes a new version, and a new table."""
    assert Versions(1, 1) == SPOKEN
    assert {kind for union in DECODERS for kind in get_args(union)} == set(REQUIRED)
    for kind, names in REQUIRED.items():
        assert {each.name for each in msgspec.structs.fields(kind) if each.required} == set(names.split())


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_field_that_an_older_peer_does_not_send_takes_its_default(message: Message):
    kind = type(message)
    for field in msgspec.structs.fields(kind):
        if field.required:
            continue
        body = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
        body.pop(field.encode_name, None)
        default = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
        data = msgspec.msgpack.encode(body)
        if isinstance(message, NumberedToPrefill | NumberedToDecode):
            whole = encode(Numbered(epoch=3, number=4, body=msgspec.Raw(data)))
        else:
            whole = with_body(data)
        assert getattr(decoder_of(message)(whole), field.name) == default


def test_a_field_of_the_same_version_that_is_new_to_us_is_skipped():
    body = msgspec.msgpack.encode({"type": "Detach", "endpoint": "d0", "novelty": [1, {"two": b"3"}]})
    assert decode_to_prefill(with_body(body)) == Detach(endpoint="d0")


class Bomb:
    exploded = False

    def __reduce__(self) -> Any:
        return setattr, (Bomb, "exploded", True)


def test_nothing_is_ever_unpickled():
    bomb = pickle.dumps(Bomb())
    for decoder in DECODERS.values():
        for data in (bomb, with_body(bomb), with_body(msgspec.msgpack.encode(bomb))):
            with pytest.raises(MessageError):
                decoder(data)
    assert not Bomb.exploded
    pickle.loads(bomb)
    assert Bomb.exploded


# ---- whatever arrives, the peer is to blame and nothing else breaks ------------------------------------------------


def refuse_or_read(data: bytes) -> None:
    for decoder in DECODERS.values():
        try:
            message = decoder(data)
        except PeerError:
            continue
        assert decoder(encoded(message)) == message


anything: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=8) | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
fields = sorted({field for example in EXAMPLES for field in type(example).__struct_fields__})
tags = sorted({type(example).__name__ for example in EXAMPLES})


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes):
    refuse_or_read(data)
    refuse_or_read(with_body(data))


@given(st.sampled_from(tags), st.dictionaries(st.sampled_from(fields), anything))
def test_random_fields_of_a_known_message_are_read_or_refused(tag: str, body: dict[str, Any]):
    refuse_or_read(with_body(msgspec.msgpack.encode({"type": tag, **body})))


@settings(max_examples=examples(300))
@given(st.data())
def test_damaged_messages_are_read_or_refused(data: st.DataObject):
    damaged = bytearray(encode(data.draw(st.sampled_from(EXAMPLES))))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        match data.draw(st.sampled_from(["flip", "drop", "insert"])):
            case "flip":
                damaged[at] = data.draw(st.integers(0, 255))
            case "drop" if len(damaged) > 1:
                del damaged[at]
            case _:
                damaged[at:at] = data.draw(st.binary(max_size=4))
    refuse_or_read(bytes(damaged))


@given(st.data())
def test_a_message_with_one_impossible_value_inside_is_read_or_refused(data: st.DataObject):
    message = data.draw(st.sampled_from(EXAMPLES))
    path: list[str | int] = []
    inner: Any = msgspec.msgpack.decode(encode(message)[HEADER_BYTES:])
    while isinstance(inner, (dict, list)) and inner:
        steps: list[Any] = list(inner) if isinstance(inner, dict) else list(range(len(inner)))
        path.append(data.draw(st.sampled_from(steps)))
        inner = inner[path[-1]]  # type: ignore[index]
        if data.draw(st.integers(0, 9)) == 0:
            break
    refuse_or_read(changed(message, tuple(path), data.draw(anything)))


def test_a_latent_layout_travels_too():
    component = latent_component(num_layers=1, latent_dim=8, dtype="uint8")
    paging = Paging(page_tokens=1, num_pages=1, page_stride=8, token_stride=8)
    shard = Shard(component=component, box=component.whole, addresses=(0,), strides=(1,), paging=paging)
    message = Welcome(
        endpoint="p",
        engine="e",
        coordinates=COORDINATES,
        layout=RankLayout(shards=(shard,)),
        transport="t",
        process=PROCESS,
    )
    assert decode_to_decode(encode(message)) == message
