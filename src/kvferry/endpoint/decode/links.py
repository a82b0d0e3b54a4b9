"""A decode endpoint's links to prefill engines: looked up, made, given up.

All of it runs on the endpoint's one thread, with two exceptions. Look-ups at the registry block: they run on a small
pool, which queues their results. And `wait_ready` waits on its caller's thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from functools import partial
from math import inf

from kvferry.endpoint.decode.connections import Connections, Refusals, look_up, why_gone, why_not_ready
from kvferry.endpoint.decode.context import DecodeContext
from kvferry.endpoint.decode.quarantine import Quarantine
from kvferry.endpoint.decode.room import ReceivingRoom
from kvferry.endpoint.early_warnings import MissedEngines
from kvferry.errors import (
    EndpointClosedError,
    EngineEndedError,
    KVFerryError,
    PeerDisconnectedError,
    PeerError,
    RegistryAccessError,
    TransferTimeoutError,
)
from kvferry.layout import RankLayout
from kvferry.loggers import logger_of
from kvferry.observe.records import Retry
from kvferry.observe.status import PeerStatus
from kvferry.plan import Piece
from kvferry.protocol.links.link import Link, LinkKey, LinkState
from kvferry.protocol.links.rank_link import Send
from kvferry.protocol.transfer.events import ConnectFailed, SenderDrained
from kvferry.protocol.wire import messages
from kvferry.protocol.wire.registrations import EngineView, RankRegistration

log = logger_of(__name__)


@dataclass(eq=False, slots=True)
class Caller:
    """Somebody who waits, on a thread of their own, until a link is ready.

    Attributes:
        ready: has a result when the link is ready, and an exception when it failed.
        link: what it waits for; None until the endpoint's thread has taken the call.
        deadline: when it has waited for long enough, however long others that came later have the link looked for.
    """

    ready: Future[None] = field(default_factory=Future)
    link: Link | None = None
    deadline: float = inf


class Links:
    """The links of a decode endpoint: at most one to a group of prefill ranks, and those that were given up.

    To them it is what offers staging memory (`RingOffers`).

    Attributes:
        retired: those that were given up, and that messages may still have to pass through.
        connections: what they go through.
        rooms_of: the rooms that are open through each.
        refusals: of rooms that will not be opened, which ranks are still to hear of.
        quarantine: ranks that were lost, and may still write.
        is_closed: whether `close` was called: nothing may be looked up or connected any more.
        context: what the endpoint's parts share.
        callers: who waits for a link.
        next_attempt: numbers the attempts to attach.
        metadata: returns the transport's metadata, with all memory that was offered.
        attached: records that a prefill rank has attached.
    """

    def __init__(
        self,
        context: DecodeContext,
        take_again: Callable[[ReceivingRoom, LinkKey, EngineView | None, float], None],
    ) -> None:
        """Begins with no link; the first room that asks for an engine makes one.

        Args:
            take_again: takes a room that relies on no link any more, with what the registry says by then of the engine.
        """
        self.context = context
        self._take_again = take_again
        self._resolver = context.platform.background_executor("kvferry-decode-resolver")
        self._missed = MissedEngines(context.settings.bootstrap_timeout_s)
        self.connections = Connections(context.end, context.identity.endpoint)
        self.quarantine = Quarantine(context)
        self.refusals = Refusals(context, self.connections)
        self.metadata = context.staging.metadata
        self.attached = context.staging.attached
        self.rooms_of: dict[Link, dict[ReceivingRoom, None]] = {}
        self._current: dict[LinkKey, Link] = {}
        self.retired: list[Link] = []
        self.callers: list[Caller] = []
        self.is_closed = False
        self._is_watching = False
        self._overtaken: set[Link] = set()  # whose look-up may have missed a change
        # Who asked who is there now: those behind the look-up that is on its way, and those whom it answers.
        self._asked: dict[LinkKey, list[Callable[[EngineView | None, float], None]]] = {}
        self._answered_next: dict[LinkKey, list[Callable[[EngineView | None, float], None]]] = {}
        self.next_attempt = partial(next, itertools.count(1))

    # ---- from any thread ----------------------------------------------------------------------------------------

    @property
    def current(self) -> tuple[Link, ...]:
        """Links in use, ready or not."""
        return tuple(self._current.values())

    @property
    def are_awaited(self) -> bool:
        """Whether a caller waits for a link to become ready."""
        return bool(self.callers)

    def statuses(self, now: float) -> list[PeerStatus]:
        """Returns the status of every prefill rank that is connected or looked up."""
        shown = []
        for link in list(self._current.values()):
            engine, state, ranks = link.key.engine, link.state, list(link.ranks.values())
            for rank in ranks:
                name, is_ready = rank.endpoint or f"{engine}/{rank.number}", state is LinkState.READY
                shown.append(PeerStatus(name=name, state=state.value, is_ready=is_ready, silent_s=rank.silent_s(now)))
            if not ranks:
                name, problem = f"{engine}/dp{link.key.dp_rank}", str(link.problem or "")
                shown.append(PeerStatus(name=name, state=state.value, is_ready=False, silent_s=0.0, problem=problem))
        return shown

    def wait_ready(self, key: LinkKey, timeout_s: float) -> None:
        """Waits until a link is ready, making it if there is none; see `DecodeEndpoint.connect`."""
        caller = Caller()
        try:
            self.begin_waiting(caller, key)
            if self.is_closed:  # `close` answers whoever had been added before
                raise EndpointClosedError("the endpoint was closed")
            caller.ready.result(timeout_s)
            return
        except FutureTimeoutError:
            problem = caller.link.problem if caller.link is not None else None
        finally:
            if caller in self.callers:  # else it was interrupted before
                self.callers.remove(caller)
        raise TransferTimeoutError(
            f"prefill engine {key.engine!r} was not connected within {timeout_s:g} s; is it running, and "
            f"registered at the same registry, {self.context.registry.url_for(key.engine)}? {problem or ''}"
        ) from problem

    def connecting(self, key: LinkKey) -> Future[None]:
        """Begins to make a link, unless there is one; see `DecodeEndpoint.connecting`."""
        caller = Caller()
        caller.ready.add_done_callback(lambda _: self.callers.remove(caller))
        self.begin_waiting(caller, key)
        if self.is_closed:
            raise EndpointClosedError("the endpoint was closed")
        return caller.ready

    def begin_waiting(self, caller: Caller, key: LinkKey) -> None:
        """Begins what `wait_ready` waits for."""
        self.callers.append(caller)
        self.context.submit(partial(self._take_caller, caller, key))

    def _take_caller(self, caller: Caller, key: LinkKey, now: float) -> None:
        caller.deadline = now + self.context.settings.bootstrap_timeout_s
        caller.link = self.to(key, caller.deadline)
        if caller.link.state is LinkState.READY:
            caller.ready.set_result(None)

    def _waiting(self, link: Link) -> list[Caller]:
        return [caller for caller in list(self.callers) if caller.link is link and not caller.ready.done()]

    # ---- sending ------------------------------------------------------------------------------------------------

    def send(self, endpoint: str, message: messages.NumberedToPrefill) -> None:
        """Sends to a prefill rank through its current link. Without one nobody waits for the message."""
        for link in self._current.values():
            rank = link.rank_of(endpoint)
            if rank is not None:
                self.send_all(link.send(rank, message))
                return

    def offer(self, endpoint: str, source: RankLayout, pieces: tuple[Piece, ...]) -> messages.Staging:
        """Returns the staging memory to offer a prefill rank, which hears through its link what was read of it."""
        return self.context.staging.offer(endpoint, source, pieces, partial(self.send, endpoint))

    def send_all(self, sends: Iterable[Send]) -> None:
        """Sends what a link says is to be sent."""
        for each in sends:
            self.connections.send(each.address, each.message, each.version)

    # ---- the life of a link -------------------------------------------------------------------------------------

    def to(self, key: LinkKey, deadline: float) -> Link:
        """Returns the link of that key, making it if there is none; its deadline is the given one or later."""
        link = self._current.get(key)
        if link is None:
            link = self._current[key] = Link(
                key,
                self.context.identity,
                self,
                next_attempt=self.next_attempt,
                can_prove_end=self.quarantine.can_prove_end,
                deadline=deadline,
            )
            self._look_up(link)
        link.deadline = max(link.deadline, deadline)
        return link

    def _look_up(self, link: Link) -> None:
        """Looks a link's engine up, once, on the pool."""
        self._ask_registry(link.key, partial(self._looked_up, link))

    def _ask_registry(
        self, key: LinkKey, then: Callable[[EngineView | None, KVFerryError | None, float], None]
    ) -> None:
        self._resolver.submit(lambda: self.context.submit(partial(then, *look_up(self.context.registry, key))))

    def look_up_again(self, key: LinkKey, then: Callable[[EngineView | None, float], None]) -> None:
        """Asks the registry who is there now, whatever a link knows; None if it does not answer.

        One look-up at a time, for all who asked before it.
        """
        self._asked.setdefault(key, []).append(then)
        if key not in self._answered_next:
            self._ask(key)

    def _ask(self, key: LinkKey) -> None:
        self._answered_next[key] = self._asked.pop(key)
        self._ask_registry(key, partial(self._answer, key))

    def _answer(self, key: LinkKey, view: EngineView | None, problem: KVFerryError | None, now: float) -> None:
        for then in self._answered_next.pop(key):
            self.context.submit(partial(then, view))
        if key in self._asked:
            self._ask(key)

    def replace(self, key: LinkKey, view: EngineView, instance: str, now: float) -> None:
        """Leaves the ranks of an earlier start behind, if that with the given name is registered by now."""
        link, group = self._current.get(key), view.group(key.dp_rank)
        newer = next((each for each in group if each.instance == instance), None)
        if link is None or newer is None or link.in_place_of(instance) is None:
            return
        if link.state is LinkState.READY:
            where = f"registered is {instance}, with rank {newer.engine_rank} at {newer.control_address}"
            self.fail(link, PeerDisconnectedError(f"prefill engine {key.engine!r} was started anew: {where}"), now)
            return
        if link.state is not LinkState.RESOLVING:
            self.start_over(link, now)
        link.registrations = group

    def _is_relied_on(self, link: Link) -> bool:
        """Whether anybody waits for a link; else a lost engine is looked up for a proof of its end."""
        return link in self.rooms_of or bool(self._waiting(link))

    def _looked_up(self, link: Link, view: EngineView | None, problem: KVFerryError | None, now: float) -> None:
        """Takes what the registry says: greets the ranks if they are all there, else asks again some time."""
        is_overtaken = link in self._overtaken
        self._overtaken.discard(link)
        if view is not None and view.registrations:
            link.registrations = view.group(link.key.dp_rank)
            self.refusals.link_looked_up(link)
            for room in list(self.rooms_of.get(link, ())):
                if why_gone(link, room.instance) is not None:  # or it came after this was asked, and its start with it
                    self.leave(link, room)
                    room.link = None  # else it would be opened at the start that this link has by then
                    self.look_up_again(link.key, partial(self._take_again, room, link.key))
        if isinstance(problem, RegistryAccessError | EngineEndedError):  # asking again would not help
            self.fail(link, problem, now)
        elif problem is not None:
            link.problem = problem
            if self._is_relied_on(link):
                self._missed.missed(link.key.engine, problem, now)
            pause_s = link.next_pause_s(self.context.platform.jitter())
            if view is not None:
                pause_s = max(pause_s, view.retry_s)
            link.look_up_at = now if is_overtaken else now + pause_s
            self._watch()
        else:
            link.problem = None
            self._missed.found(link.key.engine)
            if view is not None and any(each.draining for each in view.group(link.key.dp_rank)):
                log.warning(
                    "prefill engine %r is draining: it still serves requests that were sent there before, and others "
                    "fail; ask another engine",
                    link.key.engine,
                )
            if view is not None and not link.is_given_up:
                self._greet(link, view.registrations, now)

    def leave(self, link: Link, room: ReceivingRoom) -> None:
        """Takes note that a room does not rely on its link any more."""
        rooms = self.rooms_of[link]
        del rooms[room]
        if not rooms:
            del self.rooms_of[link]

    def _watch(self) -> None:
        """Has links that wait looked up again as soon as the registry tells of a change, if it is one that does."""
        if not self._is_watching:
            self._is_watching = True
            self.context.registry.watch(lambda engine: self.context.submit(partial(self._changed, engine)))

    def _changed(self, engine: str | None, now: float) -> None:
        for link in self._current.values():
            if link.state is LinkState.RESOLVING and engine in (None, link.key.engine):
                if link.look_up_at is None:
                    self._overtaken.add(link)
                else:
                    link.look_up_at = now

    def _greet(self, link: Link, registrations: tuple[RankRegistration, ...], now: float) -> None:
        try:
            greetings = link.resolved(registrations, now)
            self.connections.open(link)
            self.send_all(greetings)
        except KVFerryError as error:
            self.fail(link, error, now)
        except Exception as error:  # else it would stay half greeted
            log.exception("connecting to %r met an unexpected error", link.key.engine)
            problem = PeerDisconnectedError(f"connecting to {link.key.engine!r} met {type(error).__name__}: {error}")
            problem.__cause__ = error
            self.fail(link, problem, now)

    def received(self, address: str, link: Link | None, message: messages.ToDecode, now: float) -> None:
        """Handles a message about a link, or about a rank behind one.

        Args:
            address: of the rank that it came from.
            link: the current one to that rank, if there is one.

        Raises:
            KVFerryError: if that link fails by it; the caller must give it up.
        """
        match message:
            case messages.Closed(endpoint, after_failure):
                if self.connections.carries_messages_of(address, endpoint):
                    self._rank_closed(endpoint, now, after_failure=after_failure)
            case messages.Gone(process):
                if any(each.knows_machine(address, process.machine) for each in self._all):
                    self.quarantine.gone(process)
            case messages.Attached(endpoint) if not self.quarantine.has_settled(message):
                if self.connections.carries_messages_of(address, endpoint):
                    self.quarantine.settle(message, partial(self._settled, address, message))
            case messages.Welcome(endpoint) if {each.address_of(endpoint) for each in self._all} - {address, None}:
                raise PeerError(f"at {address} somebody answers under the name of another prefill rank")
            case messages.Welcome() if link is not None and link.is_restarted(address, message):
                self.start_over(link, now)
            case messages.Pong() if link is not None and link.is_given_up_there(message):
                self.start_over(link, now)
            case _ if link is not None:
                was_ready = link.state is LinkState.READY
                self.send_all(link.received(address, message))
                if link.state is LinkState.READY and not was_ready:
                    self._ready(link, now)

    def _settled(self, address: str, message: messages.Attached) -> None:
        """Takes a rank for attached: nothing can arrive any more of what its failed writes had sent."""
        self.received(address, self.connections.behind(address), message, self.context.platform.now())

    def take(self, address: str, message: messages.Numbered) -> list[messages.NumberedToDecode]:
        """Takes a numbered message. Returns what counts of it.

        Raises:
            MessageError: if it is malformed.
        """
        for link in self.connections.through(address):
            if link.attempt == message.epoch:
                taken, sends = link.take(address, message)
                self.send_all(sends)
                return taken
        return []

    def _ready(self, link: Link, now: float) -> None:
        for difference in link.tolerated:
            log.warning("differs because KVFERRY_MAY_DIFFER lets it: %s", difference)
        for peer in link.peers:
            self.quarantine.connected(peer)
        for caller in self._waiting(link):
            caller.ready.set_result(None)
        for room in list(self.rooms_of.get(link, ())):
            room.apply(link.connected(room.room), now)

    def start_over(self, link: Link, now: float) -> None:
        """Looks a link's ranks up again: those that it has may be of an earlier start, and count as lost."""
        self.context.observer.retried(Retry.CONNECT)
        self.context.registry.lost(link.key.engine)
        self.quarantine.add(link.start_over(now), now)
        self.connections.leave(link)

    def fail(self, link: Link, error: KVFerryError, now: float) -> None:
        """Gives a link up, and every room that relies on it. It stays connected while a rank may still write."""
        if link.is_given_up:
            return
        if link.state is LinkState.READY or self._is_relied_on(link):
            log.error("the link to prefill engine %r is down: %s", link.key.engine, error)
            self.context.observer.peer_lost(f"{link.key.engine}/dp{link.key.dp_rank}", error)
        del self._current[link.key]
        self.context.registry.lost(link.key.engine)
        link.is_given_up = True
        self.retired.append(link)
        self.quarantine.add(link.peers, now)
        for caller in self._waiting(link):
            caller.ready.set_exception(error)
        for room in list(self.rooms_of.get(link, ())):
            room.apply(ConnectFailed(error), now)
        self.close_retired()

    def _rank_closed(self, endpoint: str, now: float, *, after_failure: bool) -> None:
        """Handles a prefill rank's close message: it serves no requests any more, and will not write again."""
        for link in self.current:
            rank = link.rank_of(endpoint)
            if rank is not None:
                problem = PeerDisconnectedError(f"prefill rank {rank} of {link.key.engine!r} was closed")
                self.fail(link, problem, now)
        if after_failure:  # the link was given up: what it may still write to is kept as for any rank that was lost
            self.context.settling.add(lambda: self._will_not_write(endpoint, self.context.platform.now()))
        else:
            self._will_not_write(endpoint, now)

    def close_retired(self) -> None:
        """Drops the retired links through which no message can come that matters, and closes their connections."""
        for link in list(self.retired):
            is_used = link in self.rooms_of or self.refusals.are_told_through(link)
            if not (is_used or self.quarantine.has_ring_of(link)):
                self.retired.remove(link)
                self.connections.leave(link)

    def close(self) -> None:
        """Sends a close message to every peer, after the endpoint's thread has ended. May be called again."""
        self.is_closed = True
        self._resolver.close()
        self.quarantine.close()
        ready = [link for link in self.current if link.state is LinkState.READY]
        unused = set(ready) - set(self._with_rooms)
        self.quarantine.keep_for_good({peer.endpoint for link in unused for peer in link.peers})
        for link in ready:
            self.send_all(link.resend())
        self.connections.close()
        for caller in list(self.callers):
            if not caller.ready.done():
                caller.ready.set_exception(EndpointClosedError("the endpoint was closed"))

    @property
    def _all(self) -> tuple[Link, ...]:
        return *self._current.values(), *self.retired

    @property
    def _with_rooms(self) -> list[Link]:
        """Links through which rooms are open."""
        return [link for link in self.rooms_of if link.state is LinkState.READY]

    # ---- time ---------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Repeats look-ups that are due, and gives up links that are not ready by their deadline, or a caller's."""
        for link in [link for link in self._current.values() if link.state is not LinkState.READY]:
            if link.look_up_at is not None and link.look_up_at <= now < link.deadline:
                link.look_up_at = None
                self.context.observer.retried(Retry.LOOK_UP)
                self._look_up(link)
            elif now >= link.deadline:
                self.fail(link, why_not_ready(link, self.context.settings), now)
            else:
                for caller in self._waiting(link):
                    if now >= caller.deadline:
                        caller.ready.set_exception(why_not_ready(link, self.context.settings))

    # ---- ranks that were lost -----------------------------------------------------------------------------------

    def release_settled_ranks(self, now: float) -> None:
        """Gives back what lost ranks might have written to, once they are proved not to write again."""
        for endpoint in self.quarantine.take_settled(self._with_rooms, now):
            self._will_not_write(endpoint, now)

    def ask_about_lost_ranks(self, now: float) -> None:
        """Asks whether lost ranks that may still write have ended."""
        doubtful, processes = self.quarantine.ask()
        for process in processes:
            for link in self._all:
                self.send_all(link.ask_whether_gone(process))
        # The rank in its place may know what became of it; a rank that lives gives its old ring up for a new one.
        for link in self.retired:
            if link.key not in self._current and any(link.rank_of(endpoint) is not None for endpoint in doubtful):
                self.to(link.key, now + self.context.settings.bootstrap_timeout_s)

    def _will_not_write(self, endpoint: str, now: float) -> None:
        """Gives back the rings, and drains the rooms, of a prefill rank that will not write again."""
        self.quarantine.release(endpoint)
        for link in self._with_rooms:
            rank = link.rank_of(endpoint)
            if rank is not None:
                for room in list(self.rooms_of.get(link, ())):
                    room.apply(SenderDrained(rank), now)
        self.close_retired()
