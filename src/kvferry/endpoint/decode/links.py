"""A decode endpoint's links to prefill engines: looked up, kept alive, given up, and remembered while they may write.

All of it runs on the endpoint's one thread, with two exceptions. Look-ups at the registry block: they run on a small
pool, which queues their results. And `wait_ready` waits on its caller's thread.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Protocol

from kvferry.control.credentials import secret_hint
from kvferry.control.ends import ConnectingEnd, Connection
from kvferry.control.registry_client import RegistryClient
from kvferry.endpoint.decode.connections import Connections
from kvferry.endpoint.decode.end_proofs import EndProofs
from kvferry.endpoint.decode.look_ups import LookUps
from kvferry.endpoint.decode.waiting_callers import WaitingCaller, WaitingCallers
from kvferry.endpoint.early_warnings import MissedEngines
from kvferry.endpoint.runtime.platform import Platform
from kvferry.endpoint.runtime.settling import Settling
from kvferry.errors import (
    KVFerryError,
    PeerDisconnectedError,
    PeerError,
    TransferTimeoutError,
)
from kvferry.layout import RankLayout
from kvferry.observe.logs import report_silence
from kvferry.observe.observer import Observer, Retry
from kvferry.observe.status import LostPeerStatus, PeerStatus
from kvferry.plan import Piece
from kvferry.protocol.bounded import forget_oldest
from kvferry.protocol.links.link import Link, LinkCommand, LinkKey, LinkState, OpenRooms
from kvferry.protocol.links.lost_ranks import LostRanks
from kvferry.protocol.links.proofs import Proof
from kvferry.protocol.links.rank_link import Send
from kvferry.protocol.time_awake import Lateness
from kvferry.protocol.wire import messages
from kvferry.protocol.wire.rank_identity import Identity
from kvferry.protocol.wire.registrations import RankRegistration
from kvferry.settings import Settings
from kvferry.staging.receiving import ReceivingStaging
from kvferry.transport import Promises

log = logging.getLogger(__name__)

_MOST_WAITED_FOR = 1 << 12  # prefill ranks to be remembered; of one that is forgotten the same is waited for once more


class LinkUser(Protocol):
    """The owner of the rooms that rely on links. Called on the endpoint's thread, but for `submit`."""

    @property
    def links_with_rooms(self) -> Collection[Link]:
        """Links through which rooms are open."""

    def submit(self, work: Callable[[float], None]) -> None:
        """Runs work soon, on the endpoint's thread, with the time as its argument. May be called from any thread."""

    @property
    def links_with_refusals(self) -> Collection[Link]:
        """Links to ranks that are still to hear of rooms that were refused."""

    def link_looked_up(self, link: Link, now: float) -> None:
        """Called when the registry has named ranks of a link's group, all or some."""

    def link_ready(self, link: Link, now: float) -> None:
        """Called when rooms can be opened through a link."""

    def link_failed(self, link: Link, error: KVFerryError, now: float) -> None:
        """Called when a link was given up, and with it every room that relies on it."""

    def rank_settled(self, endpoint: str, now: float) -> None:
        """Called when a prefill rank will not write again."""


class _Offers:
    """Staging memory to offer to prefill ranks, which hear through their links what was read of it."""

    def __init__(self, staging: ReceivingStaging, send: Callable[[str, messages.NumberedToPrefill], None]) -> None:
        self._staging = staging
        self._send = send
        self.metadata = staging.metadata
        self.attached = staging.attached

    def offer(self, endpoint: str, source: RankLayout, pieces: tuple[Piece, ...]) -> messages.Staging:
        return self._staging.offer(endpoint, source, pieces, partial(self._send, endpoint))


class Links:
    """The links of a decode endpoint: at most one to a group of prefill ranks, and those that were given up."""

    def __init__(
        self,
        identity: Identity,
        registry: RegistryClient,
        settings: Settings,
        staging: ReceivingStaging,
        *,
        end: ConnectingEnd,
        platform: Platform,
        promises: Promises,
        observer: Observer,
        settling: Settling,
        user: LinkUser,
    ) -> None:
        """Begins with no link; the first room that asks for an engine makes one.

        Args:
            end: what connections are made with; it stays the caller's.
            platform: the machine.
            promises: of the transport.
            observer: is told what happens.
            settling: counts the time in which what failed writes had sent may arrive here.
            user: whose rooms rely on the links.
        """
        self._identity = identity
        self._registry = registry
        self._settings = settings
        self._staging = staging
        self._offers = _Offers(staging, self.send)
        self._platform = platform
        self._observer = observer
        self._settling = settling
        self._user = user
        self._look_ups = LookUps(
            registry,
            platform=platform,
            submit=user.submit,
            resolved=self._resolved,
            looked_up=self._looked_up,
            not_resolved=self._not_resolved,
            refused=self.fail,
        )
        self._current: dict[LinkKey, Link] = {}
        self._retired: list[Link] = []
        self._unready: dict[Link, None] = {}  # those of the current ones that still have to become ready
        self._through: dict[str, list[Link]] = {}  # links by address, and some that do not use it any more
        self._callers = WaitingCallers()
        self._missed = MissedEngines(settings.bootstrap_timeout_s)
        self._lost = LostRanks(settle_s=settings.quarantine_s)
        self._ends = EndProofs(settings, platform, registry, promises=promises, submit=user.submit, ended=self._ended)
        self._connections = Connections(end, identity.endpoint)
        self._next_attempt = partial(next, itertools.count(1))
        # Numbers of prefill ranks' last failed writes, by endpoint: those that may arrive yet, and those that cannot.
        self._waiting_for: dict[str, int] = {}
        self._waited_for: dict[str, int] = {}
        self._silent: frozenset[tuple[LinkKey, int]] = frozenset()  # prefill ranks whose silence was logged
        self._lateness = Lateness()

    # ---- from any thread ----------------------------------------------------------------------------------------

    def statuses(self, now: float) -> list[PeerStatus]:
        """Returns the status of every prefill rank that is connected or looked up."""
        shown = []
        for link in list(self._current.values()):
            ranks = link.rank_statuses(now)
            is_ready = link.state is LinkState.READY
            if not ranks:
                name = f"{link.key.engine}/dp{link.key.dp_rank}"
                problem = str(link.problem or "")
                shown.append(
                    PeerStatus(name=name, state=link.state.value, is_ready=False, silent_s=0.0, problem=problem)
                )
            for rank in ranks:
                name = rank.endpoint or f"{link.key.engine}/{rank.rank}"
                state = "ready" if is_ready else link.state.value
                shown.append(PeerStatus(name=name, state=state, is_ready=is_ready, silent_s=rank.silent_s))
        return shown

    def lost(self, pages: Mapping[str, int], now: float) -> list[LostPeerStatus]:
        """Returns the ranks that were lost and may still write.

        Args:
            pages: how many pages each may write to, by endpoint.
        """
        return [
            LostPeerStatus(
                endpoint=endpoint,
                lost_for_s=max(0.0, now - lost.since),
                pages=pages.get(endpoint, 0),
                ring_bytes=self._staging.bytes_of(endpoint),
                proof=lost.proof.value if lost.proof is not None else "",
                frees=self._ends.reach.how(lost.process, endpoint) if lost.proof is None else (),
                problem=self._ends.problem if lost.proof is None else "",
            )
            for endpoint, lost in self._lost.all
        ]

    def wait_ready(self, key: LinkKey, timeout_s: float) -> None:
        """Waits until a link is ready, making it if there is none; see `DecodeEndpoint.connect`."""
        caller = self._callers.begin()
        try:
            self._user.submit(lambda now: self._take_caller(caller, key, now))
            if caller.wait(timeout_s):
                return
        finally:
            self._callers.end(caller)
        problem = caller.link.problem if caller.link is not None else None
        raise TransferTimeoutError(
            f"prefill engine {key.engine!r} was not connected within {timeout_s:g} s; is it running, and "
            f"registered at the same registry, {self._registry.url_for(key.engine)}? {problem or ''}"
        ) from problem

    # ---- what there is ------------------------------------------------------------------------------------------

    @property
    def current(self) -> tuple[Link, ...]:
        """Links in use, ready or not."""
        return tuple(self._current.values())

    @property
    def retired(self) -> tuple[Link, ...]:
        """Links that were given up, and that messages may still have to pass through."""
        return tuple(self._retired)

    @property
    def are_awaited(self) -> bool:
        """Whether a caller waits for a link to become ready."""
        return bool(self._callers)

    def is_current(self, link: Link) -> bool:
        """Whether a link has not been given up."""
        return self._current.get(link.key) is link

    def behind(self, address: str) -> Link | None:
        """Returns the current link to a rank at an address; None if there is none."""
        return next((link for link in self._through.get(address, []) if self._uses(link, address, retired=False)), None)

    def through(self, address: str) -> list[Link]:
        """Returns the links to a rank at an address: the current ones first, then those that were given up."""
        links = [link for link in self._through.get(address, []) if self._uses(link, address)]
        return sorted(links, key=lambda link: not self.is_current(link))

    def _uses(self, link: Link, address: str, *, retired: bool = True) -> bool:
        is_known = self.is_current(link) or (retired and link in self._retired)
        return is_known and link.rank_at(address) is not None

    def carries_messages_of(self, address: str, endpoint: str) -> bool:
        """Whether an endpoint has answered at an address: from no other may its messages come."""
        return any(link.address_of(endpoint) == address for link in self.through(address))

    def owns(self, connection: Connection) -> bool:
        """Whether a connection is still open."""
        return self._connections.owns(connection)

    # ---- sending ------------------------------------------------------------------------------------------------

    def send(self, endpoint: str, message: messages.NumberedToPrefill) -> None:
        """Sends to a prefill rank through its current link. Without one nobody waits for the message."""
        for link in self._current.values():
            rank = link.rank_of(endpoint)
            if rank is not None:
                self.execute(link, link.send(rank, message), self._platform.now())
                return

    def execute(self, link: Link, commands: Iterable[LinkCommand], now: float) -> None:
        """Executes a link's commands.

        What cannot be sent is lost, as what a connection loses that breaks: most of it is sent again with a heartbeat.
        """
        for command in commands:
            match command:
                case Send(address, message):
                    try:
                        self._connections.send(address, message)
                    except PeerDisconnectedError as error:
                        log.debug("%s to %s was lost: %s", type(message).__name__, address, error)
                case OpenRooms():
                    self._ready(link, now)

    # ---- the life of a link -------------------------------------------------------------------------------------

    def to(self, key: LinkKey, deadline: float) -> Link:
        """Returns the link of that key, making it if there is none; its deadline is the given one or later."""
        if key in self._current:
            self._current[key].deadline = max(self._current[key].deadline, deadline)
        else:
            self._current[key] = Link(
                key,
                self._identity,
                self._offers,
                next_attempt=self._next_attempt,
                can_prove_end=self._ends.can_prove_end,
                deadline=deadline,
            )
            self._unready[self._current[key]] = None
            self._look_ups.begin(self._current[key])
        return self._current[key]

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
                if self.carries_messages_of(address, endpoint):
                    self._rank_closed(endpoint, now, after_failure=after_failure)
            case messages.Gone(process):
                is_there = any(each.knows_machine(address, process.machine) for each in self._all)
                if is_there and self._ends.is_declared(Proof.RANK):
                    self._lost.gone(process, Proof.RANK)
            case messages.Attached(endpoint) if message.last_failure > self._waited_for.get(endpoint, 0):
                is_new = message.last_failure > self._waiting_for.get(endpoint, 0)
                if is_new and self.carries_messages_of(address, endpoint):
                    self._waiting_for[endpoint] = message.last_failure
                    self._settling.add(partial(self._settled, address, message))
            case messages.Welcome(endpoint) if self._addresses_of(endpoint) - {address}:
                raise PeerError(f"at {address} somebody answers under the name of another prefill rank")
            case _ if link is not None:
                self.execute(link, link.received(address, message, now), now)
                if link.state is LinkState.RESOLVING:
                    self._started_over(link, now)

    def take(self, address: str, message: messages.Numbered, now: float) -> list[messages.NumberedToDecode]:
        """Takes a numbered message. Returns what counts of it.

        Raises:
            MessageError: if it is malformed.
        """
        for link in self.through(address):
            if link.attempt == message.epoch:
                taken, sends = link.take(address, message)
                self.execute(link, sends, now)
                return taken
        return []

    def _settled(self, address: str, message: messages.Attached) -> None:
        """Takes a rank for attached: nothing can arrive any more of what its failed writes had sent."""
        self._waited_for.pop(message.endpoint, None)
        self._waited_for[message.endpoint] = message.last_failure
        forget_oldest(self._waited_for, _MOST_WAITED_FOR)
        if self._waiting_for[message.endpoint] == message.last_failure:
            del self._waiting_for[message.endpoint]
        self.received(address, self.behind(address), message, self._platform.now())

    def fail(self, link: Link, error: KVFerryError, now: float) -> None:
        """Gives a link up, and every room that relies on it. It stays connected while a rank may still write."""
        if not self.is_current(link):
            return
        log.error("the link to prefill engine %r is down: %s", link.key.engine, error)
        self._observer.peer_lost(f"{link.key.engine}/dp{link.key.dp_rank}", error)
        del self._current[link.key]
        link.give_up()
        self._unready.pop(link, None)
        self._retired.append(link)
        for peer in link.peers:
            self._lost.add(peer.endpoint, peer.process, now)
        self._callers.link_failed(link, error)
        self._user.link_failed(link, error, now)
        self.close_retired()

    def broke(self, address: str, now: float) -> None:
        """A connection broke: what was on its way through its links may be lost."""
        link = self.behind(address)
        if link is None:
            return
        try:
            self._check_processes(link, now)
            if link.rank_at(address) is not None:
                self.execute(link, link.broke(address, now), now)
        except KVFerryError as error:
            self.fail(link, error, now)

    def close_retired(self) -> None:
        """Drops the retired links through which no message can come that matters, and closes their connections."""
        in_use = {*self._user.links_with_rooms, *self._user.links_with_refusals}
        dropped = [link for link in self._retired if link not in in_use and not self._has_ring_in_doubt(link)]
        for link in dropped:
            self._retired.remove(link)
        # Those to ranks that were named and not greeted have carried refusals.
        named = [each.control_address for link in dropped for each in link.registrations]
        self._close_unused(dict.fromkeys([*(address for link in dropped for address in link.addresses), *named]))

    def close(self) -> None:
        """Sends a close message to every peer, after the endpoint's thread has ended."""
        self._look_ups.close()
        self._ends.close()
        self._keep_rings_in_doubt()
        for address in self._connections.addresses:
            self._connections.close(address)
        self._callers.close()

    def _take_caller(self, caller: WaitingCaller, key: LinkKey, now: float) -> None:
        caller.link = self.to(key, now + self._settings.bootstrap_timeout_s)
        if caller.link.state is LinkState.READY:
            caller.ready.set_result(None)

    def _ready(self, link: Link, now: float) -> None:
        self._unready.pop(link, None)
        for difference in link.tolerated:
            log.warning("differs because KVFERRY_MAY_DIFFER lets it: %s", difference)
        for peer in link.peers:
            self._lost.discard(peer.endpoint)
            self._ends.connected(peer.process)
        self._callers.link_ready(link)
        self._user.link_ready(link, now)

    def _started_over(self, link: Link, now: float) -> None:
        """Counts the ranks that a link had before as lost: they may write until they connect anew, or have ended."""
        self._observer.retried(Retry.CONNECT)
        while link.left_behind:
            peer = link.left_behind.pop()
            self._lost.add(peer.endpoint, peer.process, now)
        self._close_unused(self._connections.addresses)

    def _rank_closed(self, endpoint: str, now: float, *, after_failure: bool) -> None:
        """Handles a prefill rank's close message: it serves no requests any more, and will not write again."""
        for link in self.current:
            rank = link.rank_of(endpoint)
            if rank is not None:
                problem = PeerDisconnectedError(f"prefill rank {rank} of {link.key.engine!r} was closed")
                self.fail(link, problem, now)
        if after_failure:  # the link was given up: what it may still write to is kept as for any rank that was lost
            self._settling.add(lambda: self._will_not_write(endpoint, self._platform.now()))
        else:
            self._will_not_write(endpoint, now)

    # ---- the registry -------------------------------------------------------------------------------------------

    def _looked_up(self, link: Link, registrations: tuple[RankRegistration, ...], now: float) -> None:
        link.registrations = registrations
        self._user.link_looked_up(link, now)

    def _not_resolved(self, link: Link, problem: KVFerryError, now: float) -> None:
        link.problem = problem
        self._missed.missed(link.key.engine, problem, now)
        link.look_up_at = now + link.next_pause_s(self._platform.jitter())

    def _resolved(self, link: Link, registrations: tuple[RankRegistration, ...], now: float) -> None:
        self._missed.found(link.key.engine)
        if not self.is_current(link):
            return
        self._looked_up(
            link, tuple(each for each in registrations if each.coordinates.dp_rank == link.key.dp_rank), now
        )
        try:
            greetings = link.resolved(registrations, now)
            for address in link.addresses:
                self._connections.open(address, link.attempt)
                self._through[address] = [*(each for each in self.through(address) if each is not link), link]
            self.execute(link, greetings, now)
        except KVFerryError as error:
            self.fail(link, error, now)
        except Exception as error:  # else it would stay half greeted
            log.exception("connecting to %r met an unexpected error", link.key.engine)
            problem = PeerDisconnectedError(f"connecting to {link.key.engine!r} met {type(error).__name__}: {error}")
            problem.__cause__ = error
            self.fail(link, problem, now)

    # ---- connections --------------------------------------------------------------------------------------------

    @property
    def _all(self) -> tuple[Link, ...]:
        return *self._current.values(), *self._retired

    def _addresses_of(self, endpoint: str) -> set[str]:
        """Returns the addresses at which an endpoint has answered: one, or none."""
        return {address for link in self._all if (address := link.address_of(endpoint)) is not None}

    def tell(self, registration: RankRegistration, message: messages.RefuseRoom) -> None:
        """Sends a message to a rank that was looked up, whether or not it was greeted.

        Raises:
            PeerDisconnectedError: if it cannot be sent.
        """
        self._connections.send(registration.control_address, message)

    def _close_unused(self, addresses: Iterable[str]) -> None:
        """Closes the connections to those of some addresses that no link uses any more."""
        for address in addresses:
            if not self.through(address):
                self._through.pop(address, None)
                self._connections.close(address)

    # ---- time ---------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Repeats look-ups that are due, and gives up links that are not ready by their deadline."""
        for link in list(self._unready):
            if link.look_up_at is not None and link.look_up_at <= now < link.deadline:
                link.look_up_at = None
                self._observer.retried(Retry.LOOK_UP)
                self._look_ups.begin(link)
            elif now >= link.deadline:
                self.fail(link, self.why_not_ready(link), now)

    def why_not_ready(self, link: Link) -> KVFerryError:
        """Returns the error that says what a link still waits for."""
        if link.state is LinkState.RESOLVING and link.problem is not None:
            return link.problem
        hint = ""
        if link.state is LinkState.GREETING:
            mine = secret_hint(has_secret=self._settings.has_secret)
            hint = f". Nobody answered, or whoever did has another secret: {mine}"
        return PeerDisconnectedError(
            f"prefill engine {link.key.engine!r}: still {link.state.value} after "
            f"{self._settings.bootstrap_timeout_s:g} s (KVFERRY_BOOTSTRAP_TIMEOUT_S){hint}"
        )

    def heartbeat(self, now: float, *, longest_sleep_s: float) -> None:
        """Sends a heartbeat to every rank, and gives up links to those that are silent or dead.

        Args:
            longest_sleep_s: by how much a heartbeat may come later than it should while all is well.
        """
        most_apart_s = 2 * self._settings.heartbeat_interval_s + longest_sleep_s
        late_s = self._lateness.seconds(now, most_apart_s=most_apart_s)
        for link in self._current.values():
            link.forgive(late_s, now)
        self._report_silence(now)
        for link in self.current:
            silent = link.silent_rank(now, self._settings.peer_timeout_s)
            try:
                self._check_processes(link, now)
                if silent is not None and link.state is LinkState.GREETING:
                    link.start_over(now)
                    self._started_over(link, now)
                elif silent is not None:
                    raise PeerDisconnectedError(
                        f"prefill rank {silent[0]} of {link.key.engine!r} has been silent for {silent[1]:.1f} s "
                        "(KVFERRY_PEER_TIMEOUT_S)"
                    )
                self.execute(link, link.ask(now), now)
            except KVFerryError as error:
                self.fail(link, error, now)

    def _report_silence(self, now: float) -> None:
        """Logs, once for each, which prefill ranks have fallen silent."""
        silent = {}
        for link in self._current.values():
            for rank in link.rank_statuses(now):
                if rank.silent_s > 2 * self._settings.heartbeat_interval_s:
                    silent[link.key, rank.rank] = rank
        for (key, number), rank in silent.items():
            if (key, number) not in self._silent:
                who = f"prefill rank {number} of {key.engine!r} ({rank.endpoint or 'not connected yet'})"
                report_silence(who, rank.endpoint, rank.silent_s)
        self._silent = frozenset(silent)

    def _check_processes(self, link: Link, now: float) -> None:
        """Starts a link over if the process of one of its ranks is known to have ended and no room relies on the link.

        Raises:
            PeerDisconnectedError: if rooms rely on it.
        """
        for peer in link.peers:
            if not self._ends.is_gone(peer.process):
                continue
            if link.state is LinkState.READY:
                raise PeerDisconnectedError(
                    f"prefill rank {link.rank_of(peer.endpoint)} of {link.key.engine!r} has ended: its process "
                    f"{peer.process.pid} is gone"
                )
            link.start_over(now)
            self._started_over(link, now)
            return

    # ---- ranks that were lost -----------------------------------------------------------------------------------

    def release_settled_ranks(self, now: float) -> None:
        """Gives back what lost ranks might have written to, once they are proved not to write again."""
        if not len(self._lost):
            return
        at_stake = {peer.endpoint for link in self._user.links_with_rooms for peer in link.peers}
        self._lost.keep_only(at_stake | self._staging.writers)
        self._lost.look(self._ends.is_gone)
        for endpoint in self._lost.take_settled(now):
            self._will_not_write(endpoint, now)

    def ask_about_lost_ranks(self, now: float) -> None:
        """Asks other ranks whether the processes of lost ranks that may still write have ended."""
        self._ends.ask(self._lost.doubtful)
        asked = self._lost.doubtful if self._ends.is_declared(Proof.RANK) else []
        for _, process in asked:
            for link in self._all:
                self.execute(link, link.ask_whether_gone(process), now)
        # The rank in its place may know what became of it; a rank that lives gives its old ring up for a new one.
        doubtful = [endpoint for endpoint, _ in self._lost.doubtful]
        for link in self._retired:
            if link.key not in self._current and any(link.rank_of(endpoint) is not None for endpoint in doubtful):
                self.to(link.key, now + self._settings.bootstrap_timeout_s)

    def release(self, endpoint: str, now: float) -> None:
        """Takes an operator's word that a lost rank has ended."""
        self._ended(endpoint, Proof.OPERATOR, now)

    def _ended(self, endpoint: str, proof: Proof, now: float) -> None:
        """Takes a proof that a lost rank has ended; what it might have written to is given back a while later."""
        log.warning("prefill endpoint %s has ended, proof: %s", endpoint, proof.value)
        self._lost.ended(endpoint, proof)

    def _will_not_write(self, endpoint: str, now: float) -> None:
        """Gives back the rings, and drains the rooms, of a prefill rank that will not write again."""
        self._lost.discard(endpoint)
        self._staging.closed(endpoint)
        self._user.rank_settled(endpoint, now)
        self.close_retired()

    def _has_ring_in_doubt(self, link: Link) -> bool:
        """Whether a lost rank may still write into staging memory; its close message may yet come."""
        return any(peer.endpoint in self._staging.rings and peer.endpoint in self._lost for peer in link.peers)

    def _keep_rings_in_doubt(self) -> None:
        """Keeps staging memory for good that a rank may still write to: nothing here could stop that."""
        ready = [link for link in self._current.values() if link.state is LinkState.READY]
        with_rooms = self._user.links_with_rooms
        settled = {peer.endpoint for link in ready if link not in with_rooms for peer in link.peers}
        kept = self._staging.keep_for_good(settled)
        if kept:
            log.warning("%d bytes of staging memory are kept for good: prefill ranks may still write to them", kept)
