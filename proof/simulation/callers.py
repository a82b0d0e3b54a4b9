"""What the callers of both engines do: they make requests, open them, hand in chunks."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product

from kvferry.endpoint import DecodeEndpoint, PrefillEndpoint
from kvferry.errors import EndpointDrainingError, RoomExistsError
from kvferry.layout import Interval
from kvferry.testing.probe import probe
from proof.simulation.adversary import Adversary
from proof.simulation.circumstances import WAITS, Engine
from proof.simulation.laws import Law, demand
from proof.simulation.memory import DESTINATION_GONE, HELD, SOURCE_GONE
from proof.simulation.processes import Process
from proof.simulation.requests import Computing, RankSide, ReceiveSide, Request, SendSide, new_request
from proof.simulation.universe import Universe
from proof.simulation.users_code import UsersCode

_HASTY_ODDS = 0.4  # how often who gives up does so at once: the abort may overtake the open request then

_WRONGED_BY = frozenset(
    {"crash", "close", "freeze", "cut", "leave", "unproved end", "close waits", "freeze while it settles"}
)
"""Troubles after which a rank that was started again may not have been found yet."""

_LONGEST_STEP_S = 0.2  # of a model, in which it computes layers


class Callers:
    """The callers in one world.

    Attributes:
        coming: requests that were not made yet.
    """

    def __init__(self, world: Universe, adversary: Adversary) -> None:
        self._world = world
        self._adversary = adversary
        self.coming = world.circumstances.requests
        self._code = UsersCode(world, adversary)
        self._next_comes_at = 0.0
        self._unfinished: list[RankSide] = []  # those that are to be opened, or to be fed
        # Chances of their own, so that other requests are as they were without them.
        self._refusing = random.Random(f"{world.seed} which are refused")
        self._prompts = random.Random(f"{world.seed} which prompts differ")
        self._queues = random.Random(f"{world.seed} which are queued")

    def act(self) -> bool:
        """A caller does something."""
        todo: list[RankSide | None] = []  # a side on which something is to be done, or None for a new request
        if self.coming and not self._world.is_ending and self._world.now >= self._next_comes_at:
            todo.append(None)
        todo += [
            side
            for side in self._unfinished
            if not (side.is_released or self._is_queued(side)) and side.process.takes_work
        ]
        if not todo:
            return False
        side = self._world.order.choice(todo)
        if side is None:
            self._new_request()
            return True
        side.process.acts()
        if side.is_refusing:
            self._refuse(side)
        elif isinstance(side, ReceiveSide):
            self._open_receiver(side)
        else:
            assert isinstance(side, SendSide)
            (self._submit if side.sender is not None else self._open_sender)(side)
        self._unfinished = [side for side in self._unfinished if not (side.is_released or side.is_handed_in)]
        return True

    def _new_request(self) -> None:
        draw = random.Random(f"{self._world.seed} request {self.coming}")
        number = self.coming
        self.coming -= 1
        self._next_comes_at = self._world.now + draw.random() * self._world.circumstances.comes_within_s
        room = draw.randrange(self._world.circumstances.rooms)
        prefill = draw.choice([engine for engine in self._world.circumstances.engines.values() if engine.is_prefill])
        decode = draw.choice([engine for engine in self._world.circumstances.engines.values() if not engine.is_prefill])
        if number in self._world.limits.without_requests:
            return
        if any(request.room == room and not request.is_over for request in self._world.requests):
            return  # a number is used again only when its last use is over
        if self._world.network.carries_refusal_of(room):
            return  # nor while that may still be refused: docs/reliability.md, "What is not promised"
        if len(prefill.ranks) < len(prefill.shapes) or len(decode.ranks) < len(decode.shapes):
            return
        if not all(process.is_alive for process in (*prefill.ranks, *decode.ranks)):
            return
        if any(self._stands_for_another(room, rank, decode) for rank in prefill.ranks):
            return  # nor for another decode engine soon after it was sent to one: likewise
        request = new_request(number, room, prefill.ranks, decode.ranks, self._world.circumstances.layers, draw)
        self._world.add(request)
        self._unfinished += request.sides
        for process in (*prefill.ranks, *decode.ranks):
            if not process.takes_work or process.endpoint.is_draining or self._is_wronged(process):
                request.excused(f"{process.name} was not well")
        adversary, pairs = self._adversary, [*product(prefill.ranks, decode.ranks)]
        longer_s = WAITS.quarantine_s if adversary.broken_off.intersection(pairs) else 0.0
        if self._world.now < adversary.unwell_until + longer_s:
            request.excused("peers may not have found each other again")
        if any(self._world.now < adversary.kept_until.get(both, 0.0) for both in pairs):
            request.excused("a failed write may keep a ring, or the two ranks, from others")
        if any(line.is_cut for line in self._world.network.lines) or not self._world.registry.answers:
            request.excused("the network was not well")
        if "absent" in self._world.circumstances.odds and draw.random() < 0.3:
            side = draw.choice(request.sides)
            side.is_released = True
            request.is_abandoned = True
            request.excused(f"nobody comes on {side.process.name}")
        if "miscount" in self._world.circumstances.odds and draw.random() < 0.3:
            request.senders[0].chunks[-1] += draw.choice([-1, 1])
            request.excused("one side miscounts")
        if self._prompts.random() < self._world.circumstances.odds.get("another prompt", 0.0):
            request.is_another_prompt = True
            self._world.outcomes["trouble: another prompt"] += 1
            request.excused("the two sides have different prompts")
        if self._refusing.random() < self._world.circumstances.odds.get("refuse", 0.0):
            side = self._refusing.choice(request.sides)
            side.is_refusing = True
            request.excused(f"{side.process.name} refuses")
        if self._queues.random() < self._world.circumstances.odds.get("queue", 0.0):
            self._queue(request)

    def _stands_for_another(self, room: int, process: Process, decode: Engine) -> bool:
        """Whether a prefill rank takes a number for an earlier use, of which its predecessor may have been a part.

        It keeps a refusal or an open request of that, or has just sent it to another decode engine.
        """
        assert isinstance(process.endpoint, PrefillEndpoint)
        table = probe(process.endpoint).table
        names = [rank.endpoint.transport.endpoint_name for rank in decode.ranks]
        return table.holds(room) or room in table.pending or any(table.sent_elsewhere(room, name) for name in names)

    def _queue(self, request: Request) -> None:
        """Has a request wait on the decode side for longer than the prefill side would wait for it."""
        until = self._world.now + WAITS.bootstrap_s * (1.0 + self._queues.random())
        for side in request.receivers:
            endpoint = side.process.endpoint
            if not side.is_released and side.process.takes_work:
                assert isinstance(endpoint, DecodeEndpoint)
                endpoint.expect(request.room, engine=request.prefill)
                side.queued_until = until
        self._world.outcomes["trouble: queue"] += 1
        self._world.note("%s waits until %.3f", request, until)

    def _is_queued(self, side: RankSide) -> bool:
        is_waiting = isinstance(side, ReceiveSide) and self._world.now < side.queued_until
        return is_waiting and not self._world.is_ending

    def _refuse(self, side: RankSide) -> None:
        endpoint, room, reason = side.process.endpoint, side.request.room, "the simulation refuses it"
        if isinstance(endpoint, PrefillEndpoint):
            endpoint.refuse(room, reason)
        else:
            endpoint.refuse(room, reason, engine=side.request.prefill)
        side.is_released = True
        side.failed_at = self._world.now
        self._world.outcomes["trouble: refuse"] += 1
        self._world.note("%s: %s is refused", side.process.name, side.request)

    def _is_refused(self, side: RankSide) -> None:
        """A rank that drains does not take a room that is new to it."""
        demand(bool(side.request.excuse), Law.ISOLATED, f"{side.process.name} drains and refuses {side.request}")
        side.is_released = True
        side.failed_at = self._world.now

    def _is_wronged(self, process: Process) -> bool:
        return process.life > 0 and bool(_WRONGED_BY & self._world.troubles)

    def _open_sender(self, side: SendSide) -> None:
        endpoint = side.process.endpoint
        assert isinstance(endpoint, PrefillEndpoint)
        count = sum(side.chunks)
        pages = side.process.pool.take(count, side)
        if pages is None:
            self._waits_for_pages(side)
            return
        try:
            side.sender = endpoint.open(side.request.room, depends_on=side.request.depends_on(on_prefill=True))
        except RoomExistsError:
            side.process.pool.give_back(pages, SOURCE_GONE)  # its last use is not quite over here: later
            return
        except EndpointDrainingError as error:
            side.process.pool.give_back(pages, SOURCE_GONE)
            endpoint.refuse(side.request.room, str(error))
            self._is_refused(side)
            return
        side.pages = pages
        side.opened_at = self._world.now
        side.process.pool.fill(pages, side.request.computed, 0)
        self._code.add_callback(side)
        self._world.note("%s: %s opens, pages %s", side.process.name, side.request, pages)

    def _waits_for_pages(self, side: SendSide) -> None:
        """Where the wire is slow, others may keep pages so long that decode ranks give this side up."""
        now = self._world.now
        side.waits_since = now if side.waits_since is None else side.waits_since
        side.may_be_late = now - side.waits_since > WAITS.bootstrap_s / 2
        if side.may_be_late:
            side.request.excused(f"{side.process.name} had no pages for it")

    def _open_receiver(self, side: ReceiveSide) -> None:
        endpoint, sending = side.process.endpoint, side.request.senders[0].process.endpoint
        assert isinstance(endpoint, DecodeEndpoint)
        assert isinstance(sending, PrefillEndpoint)
        pages = side.process.pool.take(side.count, side)
        if pages is None:
            return
        try:
            side.receiver = endpoint.open(
                side.request.room,
                pages,
                engine=side.request.prefill,
                prefix_tokens=side.held,
                tokens=side.request.tokens,
                depends_on=side.request.depends_on(on_prefill=False),
                instance=sending.instance,
            )
        except RoomExistsError:
            side.process.pool.give_back(pages, DESTINATION_GONE)
            return
        except EndpointDrainingError as error:
            side.process.pool.give_back(pages, DESTINATION_GONE)
            endpoint.refuse(side.request.room, str(error), engine=side.request.prefill)
            self._is_refused(side)
            return
        side.pages = pages
        side.opened_at = self._world.now
        side.generation = side.process.platform.last_bits
        self._code.add_callback(side)
        if {"abort", "reorder"} & self._world.troubles and self._world.order.random() < _HASTY_ODDS:
            side.request.excused("it was aborted as soon as it was opened")
            side.receiver.abort("the simulation says so, at once")
        side.process.pool.spread(pages, HELD)
        self._world.note(
            "%s: %s opens, pages %s, %d of %d tokens held",
            side.process.name, side.request, pages, side.held, side.request.tokens,
        )  # fmt: skip

    def _submit(self, side: SendSide) -> None:
        assert side.sender is not None
        if not side.ranges:
            side.ranges = self._ranges(side)
        count, layers = side.chunks[0], side.ranges.pop(0)
        is_last = len(side.chunks) == 1 and not side.ranges
        pages = side.pages[side.position : side.position + count]
        is_ready = self._computed_later(side, pages, layers) if layers is not None else None
        is_ready = self._code.signal(side, is_ready)
        side.sender.submit(
            pages,
            start=None,
            last=is_last,
            aux=side.request.aux if is_last else None,
            layers=layers,
            ready=is_ready,
        )
        if not side.ranges:
            side.position += side.chunks.pop(0)
        self._world.note(
            "%s: %s submits %d pages%s%s",
            side.process.name, side.request, count, "" if layers is None else f", layers {layers}",
            ", the last" if is_last else "",
        )  # fmt: skip

    def _computed_later(self, side: SendSide, pages: list[int], layers: Interval) -> Callable[[], bool] | None:
        """Lets a model compute layers of pages for a while; returns what says whether it has. None if it has."""
        draw = random.Random(f"{self._world.seed} computes {side.request.number} {side.process.rank} {layers} {pages}")
        if draw.random() < 0.5:
            return None
        computing = Computing(side, pages, layers, side.position, self._world.now + draw.random() * _LONGEST_STEP_S)
        computing.begin()
        self._world.computing.append(computing)
        return computing.is_over

    def _ranges(self, side: SendSide) -> list[Interval | None]:
        """The ranges of layers in which a chunk is handed in; None for all at once."""
        layers = self._world.circumstances.layers
        if layers == 1 or not self._world.hands_layers_in:
            return [None]
        draw = random.Random(f"{self._world.seed} layers of {side.request.number} {side.process.rank} {side.position}")
        cut = draw.randint(1, layers - 1)
        ranges = [Interval(0, cut), Interval(cut, layers)]
        draw.shuffle(ranges)
        return [*ranges]
