"""Messages that are nearly right: made from the types, or from a real deployment, and then changed.

A message is changed as a tree (a value of another type, a list that is longer, a part of another message) and as bytes
(flipped, cut, spliced, with a length that lies). Everything comes of the given source of chance, and of nothing else.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias, get_args

import msgspec
import numpy as np
from msgspec import inspect
from tests.support.caches import Model, Shape, pool

from kvferry.errors import PeerError
from kvferry.layout import Device, RankCoordinates, RankLayout, all_coordinates
from kvferry.plan import Unit, pieces_for_receiver
from kvferry.plan.requests.demands import GroupRequest
from kvferry.plan.requests.moved_blocks import pack_units
from kvferry.plan.requests.page_numbers import PageNumbers
from kvferry.protocol.wire import codec, field_types, messages
from kvferry.transport import PeerMetadata

Tree: TypeAlias = Any
"""What MessagePack and JSON know: dictionaries, lists, numbers, texts, bytes."""

HEADER = codec.encode(messages.Ping())[:6]
KINDS = tuple(
    get_args(messages.ToPrefill)
    + get_args(messages.ToDecode)
    + get_args(messages.NumberedToPrefill)
    + get_args(messages.NumberedToDecode)
    + get_args(messages.Notification)
)

_NUMBERS = (0, 1, -1, 2, 7, 255, 256, 2**31 - 1, 2**31, 2**32, 2**48, 2**48 + 1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63))
_TEXTS = ("", "k", "kv", "layer", "Ping", "Attach", "x" * 300, "line\nfeed", "\x00", "\N{SNOWMAN}", "%s%n", "nan")
_OTHERS: tuple[Tree, ...] = (None, True, False, [], {}, b"", 0.5, float("nan"), float("inf"), -1e308)
_LENGTHS = (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc6\x7f\xff\xff\xff")
_LONG = 2000
"""What has so many parts already is not repeated: the test's own memory is bounded, too."""

_SHAPES = (Shape(), Shape(tp=2), Shape(pp=2), Shape(tp=2, heads_first=True))
_MODELS = (Model(), Model(latent_dim=16), Model(window_tokens=8, has_state=True), Model(is_packed=True))


def layouts() -> list[tuple[RankCoordinates, RankLayout]]:
    """Real ones, of unlike caches."""
    return [
        (place, _at_known_addresses(pool(model, shape, place).layout))
        for model in _MODELS
        for shape in _SHAPES
        for place in all_coordinates(tp_size=shape.tp, pp_size=shape.pp)
    ]


def _at_known_addresses(layout: RankLayout) -> RankLayout:
    """The same in every process, so that a seed replays what it did."""
    known = sorted({address for shard in layout.shards for address in shard.addresses})
    return msgspec.structs.replace(
        layout,
        shards=tuple(
            msgspec.structs.replace(
                shard, addresses=tuple((known.index(address) + 1) << 32 for address in shard.addresses)
            )
            for shard in layout.shards
        ),
    )


PROCESS = field_types.ProcessIdentity(machine="a machine", pid=1, started=2)


def examples() -> list[field_types.Message]:
    """Messages of every kind, as endpoints send them."""
    made: list[field_types.Message] = []
    for place, layout in layouts():
        metadata = PeerMetadata(name="hostile-0", device=Device(), regions=layout.regions(), private=b"private")
        made += [
            messages.Hello(),
            messages.Welcome(
                endpoint="p0",
                engine="hostile",
                coordinates=place,
                layout=layout,
                transport="inprocess",
                process=PROCESS,
                fingerprint={"weights": "3f9a", "rope": "1"},
            ),
            messages.Attach(
                endpoint="hostile-0",
                attempt=1,
                engine="hostile",
                coordinates=place,
                layout=layout,
                pieces=pieces_for_receiver({0: layout}, layout),
                transport="inprocess",
                transport_metadata=metadata.encode(),
                staging=messages.Staging(ring=messages.StagingRing(address=4096, num_bytes=1 << 20, epoch=3)),
                fingerprint={"weights": "3f9a"},
            ),
            messages.OpenRoom(
                room=5,
                generation=6,
                receivers=1,
                tokens=16,
                groups=tuple(
                    GroupRequest(group.name, 0, 0, 16, 0, PageNumbers.of(np.arange(4))) for group in layout.groups
                ),
                depends_on={"prompt": bytes(16), "LoRA adapter": b"1"},
            ),
        ]
    made += [
        messages.Detach(endpoint="hostile-0"),
        messages.Ping(epoch=1, sent=5, received=4),
        messages.Numbered(epoch=1, number=1, body=codec.encode_body(messages.RoomVerified(room=5, generation=6))),
        messages.AbortRoom(room=5, generation=6, reason="no reason"),
        messages.RefuseRoom(
            endpoint="p0",
            engine="decode",
            coordinates=RankCoordinates(),
            room=5,
            generation=6,
            reason="no reason",
        ),
        messages.Credit(epoch=3, position=64),
        messages.Attached(endpoint="p0", attempt=1, only_staged=False),
        messages.Refused(attempt=1, error="IncompatiblePeerError", reason="no reason"),
        messages.Closed(endpoint="p0"),
        messages.Pong(endpoint="p0", attached=True),
        messages.RoomFailed(room=5, generation=6, writer=0, error="PageError", reason="no reason"),
        messages.RoomVerified(room=5, generation=6),
        messages.IsGone(process=PROCESS),
        messages.ExpectRooms(rooms=(1, 2)),
        messages.Gone(process=PROCESS),
        messages.Drained(endpoint="p0", room=5, generation=6, writer=0),
        messages.SpanReleased(endpoint="p0", epoch=3, start=0, begin=0, stop=64),
        messages.ChunkArrived(room=5, generation=6, writer=0, sequence=0),
        messages.WriterFinished(room=5, generation=6, writer=0, chunks=1, aux=b"token"),
        messages.StagedArrived(
            room=5,
            generation=6,
            writer=0,
            sequence=0,
            part=0,
            is_last=True,
            epoch=3,
            start=0,
            begin=0,
            stop=64,
            unit=Unit.WHOLE,
            segments=(messages.StagedSegment(0, 0, 1, pack_units(np.array([0, 1, 5]))),),
        ),
    ]
    assert {type(each) for each in made} == set(KINDS), "a kind of message has no example"
    return made


def tree_of(message: msgspec.Struct) -> Tree:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message))


NUMBERED = {kind.__name__ for kind in get_args(messages.NumberedToPrefill) + get_args(messages.NumberedToDecode)}


def packed(tree: Tree) -> bytes:
    """The message, with its header, and numbered if it is of such a kind; short where an encoder cannot take it."""
    try:
        body = msgspec.msgpack.encode(tree)
    except (OverflowError, RecursionError, UnicodeEncodeError):
        return HEADER
    if isinstance(tree, dict) and isinstance(tree.get("type"), str) and tree["type"] in NUMBERED:
        return codec.encode(messages.Numbered(epoch=1, number=1, body=msgspec.Raw(body)))
    return HEADER + body


def renumbered(data: bytes, epoch: int, numbers: Iterator[int]) -> bytes:
    """The same message; if it is a numbered one, with the number and epoch for which it would be heard."""
    try:
        message = codec.decode_to_prefill(data)
    except PeerError:
        return data
    if not isinstance(message, messages.Numbered):
        return data
    return codec.encode(messages.Numbered(epoch=epoch, number=next(numbers), body=message.body))


def as_json(tree: Tree) -> bytes:
    try:
        return msgspec.json.encode(tree)
    except (OverflowError, RecursionError, UnicodeEncodeError):
        return b"{}"


@dataclass(frozen=True)
class Mutator:
    """Makes and changes messages, of one source of chance.

    Attributes:
        random: the source.
        trees: real messages, to begin with and to take parts of.
        real: real values for types that could hardly be made up.
    """

    random: random.Random
    trees: list[Tree]
    real: dict[type, list[Tree]]

    def message(self) -> bytes:
        """A message of any kind, changed a little or not at all, as bytes."""
        chance = self.random
        tree = chance.choice(self.trees) if chance.random() < 0.7 else self.made(chance.choice(KINDS))
        for _ in range(chance.choice((0, 1, 1, 1, 2, 3))):
            tree = self.changed(tree)
        return self.damaged(packed(tree)) if chance.random() < 0.5 else packed(tree)

    # ---- from the types -----------------------------------------------------------------------------------------

    def made(self, kind: type) -> Tree:
        """A value of a type, within what the type says."""
        return self._made(inspect.type_info(kind))

    def _made(self, kind: inspect.Type) -> Tree:
        chance = self.random
        match kind:
            case inspect.IntType():
                low = -(2**63) if kind.ge is None else kind.ge
                high = 2**64 - 1 if kind.le is None else kind.le
                return chance.choice([each for each in (*_NUMBERS, low, high) if low <= each <= high])
            case inspect.FloatType():
                return chance.choice((0.0, 1.0, 1e9))
            case inspect.RawType():  # the body of a numbered message
                return self.made(chance.choice([each for each in KINDS if each.__name__ in NUMBERED]))
            case inspect.Metadata():  # a type and what is said of it
                return self._made(kind.type)
            case inspect.BoolType():
                return chance.random() < 0.5
            case inspect.NoneType():
                return None
            case inspect.StrType():
                return chance.choice(("hostile-0", "kv", "k", "inprocess", "PageError"))
            case inspect.BytesType():
                return chance.randbytes(8 * chance.choice((0, 1, 2, 4, 9)))
            case inspect.EnumType():
                return chance.choice(list(kind.cls)).value
            case inspect.UnionType():
                return self._made(chance.choice(kind.types))
            case inspect.VarTupleType():
                return [self._made(kind.item_type) for _ in range(chance.choice((0, 1, 2, 5)))]
            case inspect.DictType():
                return {self._made(kind.key_type): self._made(kind.value_type) for _ in range(chance.choice((0, 1, 2)))}
            case inspect.StructType():
                if kind.cls in self.real:
                    return chance.choice(self.real[kind.cls])
                fields = {field.encode_name: self._made(field.type) for field in kind.fields}
                if kind.array_like:
                    return list(fields.values())
                return fields if kind.tag_field is None else {kind.tag_field: kind.tag, **fields}
        raise NotImplementedError(kind)

    # ---- as trees -----------------------------------------------------------------------------------------------

    def changed(self, tree: Tree) -> Tree:
        """The same with one part changed, somewhere inside."""
        chance = self.random
        if isinstance(tree, dict) and tree and chance.random() < 0.85:
            key = chance.choice(list(tree))
            return {**tree, key: self.changed(tree[key])}
        if isinstance(tree, list) and tree and chance.random() < 0.85:
            place = chance.randrange(len(tree))
            return [*tree[:place], self.changed(tree[place]), *tree[place + 1 :]]
        return self._replaced(tree)

    def _replaced(self, tree: Tree) -> Tree:
        chance = self.random
        if isinstance(tree, dict) and tree and chance.random() < 0.5:
            without = dict(tree)
            taken = without.pop(chance.choice(list(without)))
            return chance.choice((without, {**without, "unknown": taken}, {**tree, "type": "Unknown"}))
        if isinstance(tree, list) and tree and chance.random() < 0.6:
            place = chance.randrange(len(tree))
            ways: list[Callable[[], Tree]] = [
                lambda: tree[:place] + tree[place + 1 :],
                lambda: [*tree, tree[place]],
                lambda: self._repeated(tree, (2, 10, 300)),
                lambda: tree[::-1],
                lambda: [tree],
            ]
            return chance.choice(ways)()
        if isinstance(tree, int) and chance.random() < 0.7:
            return chance.choice((tree + 1, tree - 1, -tree, tree * 2, tree << 20, chance.choice(_NUMBERS)))
        if isinstance(tree, bytes) and chance.random() < 0.7:
            return self.damaged(tree) or tree
        if isinstance(tree, str) and chance.random() < 0.3:
            return self._repeated(tree, (2, 100, 5000))
        return chance.choice(
            (
                chance.choice(_NUMBERS),
                chance.choice(_TEXTS),
                chance.choice(_OTHERS),
                chance.randbytes(chance.choice((1, 8, 16, 1000))),
                self.part(chance.choice(self.trees)),
            )
        )

    def _repeated(self, tree: Tree, times: tuple[int, ...]) -> Tree:
        return tree * self.random.choice(times) if len(tree) < _LONG else tree

    def part(self, tree: Tree) -> Tree:
        """A part of a message."""
        while isinstance(tree, (dict, list)) and tree and self.random.random() < 0.8:
            tree = self.random.choice(list(tree.values()) if isinstance(tree, dict) else tree)
        return tree

    # ---- as bytes -----------------------------------------------------------------------------------------------

    def damaged(self, data: bytes) -> bytes:
        """The same with one thing wrong somewhere."""
        chance = self.random
        if not data:
            return chance.randbytes(8)
        place, size = chance.randrange(len(data)), chance.choice((1, 1, 2, 4, 16))
        match chance.randrange(10):
            case 0 | 1:
                return data[:place] + bytes([data[place] ^ (1 << chance.randrange(8))]) + data[place + 1 :]
            case 2:
                return data[:place] + bytes([chance.randrange(256)]) + data[place + 1 :]
            case 3:
                return data[:place]
            case 4:
                return data[:place] + data[place + size :]
            case 5:
                return data[:place] + chance.randbytes(size) + data[place:]
            case 6:
                return data[:place] + chance.choice(_LENGTHS) + data[place + chance.choice((0, 1, 5)) :]
            case 7:
                other = packed(chance.choice(self.trees))
                return data[:place] + other[chance.randrange(len(other)) :]
            case 8:
                deep = chance.choice((b"\x91", b"\x81\xa1a", b"\x92\xc0", b"[", b'{"a":'))
                return data[:place] + deep * chance.choice((3, 500, 5000)) + data[place:]
            case _:
                begin = chance.choice((b"", b"kvfy", b"kvfy\x02\x00", chance.randbytes(place % 64)))
                return begin + data[min(6, place) :]


class Corpus:
    """Real messages, read once; a mutator for every round begins with them."""

    def __init__(self) -> None:
        self.messages = examples()
        self._trees = [tree_of(each) for each in self.messages]
        places = layouts()
        self._real: dict[type, list[Tree]] = {
            RankLayout: [tree_of(layout) for _, layout in places],
            RankCoordinates: [tree_of(place) for place, _ in places],
        }

    def mutator(self, chance: random.Random, more: list[Tree] | None = None) -> Mutator:
        """Args:
        more: further real messages.
        """
        return Mutator(chance, self._trees + (more or []) * (1 + len(self._trees) // 10), self._real)
