"""Whatever bytes arrive: a decoder makes a message of them or says that it is none, soon and with little memory."""

from __future__ import annotations

import random
import resource
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, get_args

import msgspec
import pytest
from tests.fuzz.conftest import Fuzz
from tests.fuzz.mutation import HEADER, Corpus, Mutator, as_json, tree_of

from kvferry.answers import Answer
from kvferry.control.registry_app import _decode_registration
from kvferry.control.registry_client import RegistryClient
from kvferry.control.registry_messages import EngineList, Health, Lease, Problem
from kvferry.errors import (
    ConfigurationError,
    IncompatiblePeerError,
    MessageError,
    PageError,
    RegistryError,
    VersionError,
)
from kvferry.layout import Device, RankCoordinates, RankLayout
from kvferry.plan import check_exchangeable, pieces_for_receiver
from kvferry.plan.requests.demands import GroupRequest, wanted_groups
from kvferry.plan.requests.moved_blocks import unpack_units
from kvferry.plan.requests.page_numbers import MAX_PAGES, PageNumbers
from kvferry.protocol.wire import codec, messages
from kvferry.protocol.wire.registrations import EngineView, RankRegistration
from kvferry.transport import PeerMetadata

LONGEST_S = 10.0
"""For one input: the largest layouts that are not refused at once take seconds."""

MOST_MEMORY = 1 << 30

DAMAGED = 10
"""Inputs made of each message by damaging its bytes."""

REGISTRATION = RankRegistration(
    engine="prefill",
    incarnation="first",
    coordinates=RankCoordinates(tp_rank=1, tp_size=2),
    control_address="tcp://127.0.0.1:1",
    layout_digest="digest",
    started_at=0.0,
    protocol_version=3,
)
ANSWERS: list[tuple[Callable[[RegistryClient], Any], Any]] = [
    (lambda client: client.grant(REGISTRATION), Lease(lease_s=10.0)),
    (
        lambda client: client.engine("prefill"),
        EngineView(engine="prefill", registrations=(REGISTRATION,), world_size=2, complete=False),
    ),
    (RegistryClient.engines, EngineList(engines=())),
    (RegistryClient.health, Health(version="0.1.0", api_version=1, uptime_s=5.0)),
    (RegistryClient.health, Problem(error="PageError", message="no reason")),
]
"""What a registry is asked, and what it answers."""


class _Answered(RegistryClient):
    """A client of whatever gives one answer."""

    def __init__(self, answer: Answer) -> None:
        super().__init__("http://127.0.0.1:1")
        self.answer = answer

    def exchange(self, method: str, path: str, **arguments: Any) -> Answer:
        return self.answer


_INNER: dict[Any, Any] = {
    codec.decode_to_prefill: codec.decode_numbered_to_prefill,
    codec.decode_to_decode: codec.decode_numbered_to_decode,
}
"""What decodes the body of a numbered message, by what decodes that."""


def _wanted_groups(message: messages.OpenRoom, layout: RankLayout) -> dict[str, GroupRequest]:
    filled = {group.name for group in layout.groups}
    return wanted_groups(
        message.groups, layout, receivers=message.receivers, tokens=message.tokens, filled=filled, where="fuzz"
    )


class Decoders:
    """Every decoder, with the errors that it says it raises."""

    def __init__(self, corpus: Corpus) -> None:
        self._layouts = [each.layout for each in corpus.messages if isinstance(each, messages.Welcome)]
        regions = self._layouts[0].regions()
        self.metadata = tree_of(PeerMetadata(name="hostile-0", device=Device(), regions=regions, private=b"private"))
        self.registration = tree_of(REGISTRATION)
        self.answers = [(ask, tree_of(answer)) for ask, answer in ANSWERS]
        self.slowest_s = 0.0
        self.accepted = 0

    def feed(self, decode: Callable[[bytes], Any], data: bytes, *allowed: type[Exception]) -> Any:
        """One input. None if it was refused as it should be."""
        started_at = time.perf_counter()
        refusal = ""
        try:
            decoded = decode(data)
        except allowed as error:
            decoded, refusal = None, str(error)
        if VersionError in allowed:  # of bytes that just came: it goes into a log as it is
            assert len(refusal) < 1000
            assert "\n" not in refusal
        took_s = time.perf_counter() - started_at
        self.slowest_s = max(self.slowest_s, took_s)
        assert took_s < LONGEST_S
        self.accepted += decoded is not None
        return decoded

    def feed_message(self, data: bytes) -> int:
        """One input for each of the three directions, and for what looks at messages next; returns how many."""
        for decode in (codec.decode_to_prefill, codec.decode_to_decode, codec.decode_notification):
            message = self.feed(decode, data, MessageError, VersionError)
            if message is None:
                continue
            again = codec.encode(message)  # what was accepted can travel on
            assert type(decode(again)) is type(message)
            if isinstance(message, messages.Numbered):
                body, inner = bytes(message.body), _INNER[decode]
                message = self.feed(lambda _: inner(msgspec.Raw(body)), b"", MessageError)  # noqa: B023
            match message:
                case messages.OpenRoom():
                    for layout in self._layouts[:3]:
                        self._look(lambda: _wanted_groups(message, layout), PageError)  # noqa: B023
                case messages.Welcome():
                    self._look(lambda: self._planned(message.layout), IncompatiblePeerError, ConfigurationError)  # noqa: B023
        return 3

    def _pages(self, pages: PageNumbers) -> PageNumbers:
        pages.check(pool_pages=1000, where="fuzz")
        assert len(pages.numbers()) == len(pages)
        return pages

    def _planned(self, layout: RankLayout) -> None:
        mine = self._layouts[0]
        check_exchangeable(layout, mine, source_name="hostile", destination_name="mine")
        pieces_for_receiver({0: layout}, mine)

    def _look(self, look: Callable[[], Any], *allowed: type[Exception]) -> None:
        self.feed(lambda _: look(), b"", *allowed)

    def feed_rest(self, mutator: Mutator) -> int:
        """Metadata, page numbers, units, and what registries and their clients read."""
        chance = mutator.random
        metadata = msgspec.msgpack.encode(self.metadata)
        for _ in range(5):
            self.feed(PeerMetadata.decode, mutator.damaged(metadata), MessageError)
        self.feed(PeerMetadata.decode, msgspec.msgpack.encode(_packable(mutator.changed(self.metadata))), MessageError)
        numbers = chance.randbytes(chance.choice((0, 7, 8, 16, 48, 1600)))
        claimed = chance.choice((0, 2, 6, 200, MAX_PAGES))
        self.feed(lambda data: self._pages(PageNumbers(claimed, data)), numbers, MessageError, PageError)
        self.feed(lambda data: unpack_units(data, most=chance.choice((0, 1, 1000))), numbers, MessageError)
        body = as_json(mutator.changed(self.registration))
        for data in (body, mutator.damaged(body)):
            self.feed(_decode_registration, data, MessageError, ConfigurationError)
        ask, answer = chance.choice(self.answers)
        body = as_json(mutator.changed(answer))
        for data in (body, mutator.damaged(body)):
            for status in (200, 400):
                self.feed(lambda given: ask(_Answered(Answer(status, given))), data, RegistryError)  # noqa: B023
        return 14


def _packable(tree: Any) -> Any:
    try:
        msgspec.msgpack.encode(tree)
    except (OverflowError, RecursionError, UnicodeEncodeError):
        return None
    return tree


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus()


def test_every_decoder_answers_or_refuses(fuzz: Fuzz, corpus: Corpus):
    decoders = Decoders(corpus)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for chance in fuzz.rounds():
        mutator = corpus.mutator(chance)
        for _ in range(20):
            data = mutator.message()
            fuzz.inputs += decoders.feed_message(data)
            for _ in range(DAMAGED):
                fuzz.inputs += decoders.feed_message(mutator.damaged(data))
            fuzz.inputs += decoders.feed_rest(mutator)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < MOST_MEMORY, f"{grown} bytes more memory at the peak"
    assert decoders.accepted > fuzz.inputs / 200, "hardly any input was nearly right"


def test_the_mutator_makes_what_is_right_from_the_types_alone(corpus: Corpus):
    """Else a fuzzer would test the first check of every decoder and nothing behind it."""
    mutator = corpus.mutator(random.Random(1))
    for union, decode in (
        (messages.ToPrefill, codec.decode_to_prefill),
        (messages.ToDecode, codec.decode_to_decode),
        (messages.NumberedToPrefill, lambda data: codec.decode_numbered_to_prefill(msgspec.Raw(data[6:]))),
        (messages.NumberedToDecode, lambda data: codec.decode_numbered_to_decode(msgspec.Raw(data[6:]))),
        (messages.Notification, codec.decode_notification),
    ):
        for kind in get_args(union):
            right = 0
            for _ in range(200):
                if right > 10:
                    break
                with suppress(MessageError):
                    right += type(decode(HEADER + msgspec.msgpack.encode(mutator.made(kind)))) is kind
            assert right > 10, kind
