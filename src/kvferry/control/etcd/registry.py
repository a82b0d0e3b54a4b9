"""A registry that survives its hosts: registrations as keys in an etcd cluster.

Under the prefix and a version stand

    engines/{engine}/lease          attached to the engine's lease
    engines/{engine}/ranks/{rank}   the rank's `RankRegistration`, attached to the same
    engines/{engine}/draining/{endpoint}
                                    an operator's word that this start of a rank is to drain, attached to its own lease
    released/{endpoint}             an operator's word, attached to nothing

**One lease an engine.** The first rank has a lease granted and writes the engine's `lease` key, attached to it, where
none stands; the others attach theirs to that one. Every rank comes back within a third of the lease, as at any
registry; whoever finds less than two thirds of it left renews it for all. So 64 ranks have one lease in etcd, and it is
renewed once or twice in a third of it. In between nothing is written.

**A rank that dies among living ones** cannot renew, but the others do. So from time to time, and when an operator
releases an endpoint, there is a roll call: the `lease` key moves to a new lease, living ranks attach their keys to that
when they come back, and nobody renews the old one, with which the keys of the dead go. With its last rank an engine's
lease ends by itself.

**Every write compares.** A rank's key is written only if the engine's `lease` key and the rank's own are as they were
read; a rank that found no other writes the `lease` key too, and only while there is no other still. So of two layouts
that race for a name one comes in, and the rules of `leases` hold whichever members answer. A write whose answer was
lost is found done when it is tried again.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import quote, unquote

import msgspec

from kvferry.control.etcd.address import EtcdSettings, EtcdUrl
from kvferry.control.etcd.members import EtcdLeaseNotFoundError, EtcdMembers
from kvferry.control.etcd.messages import (
    Done,
    KeptAlive,
    KeyValue,
    Lease,
    Range,
    Status,
    Transaction,
    encoded,
    has_value,
    none_but,
    put,
    span,
    unchanged,
)
from kvferry.control.registration_rules import (
    check_agreement,
    check_is_newest,
    refuse_drain,
    refuse_release,
    unknown,
    view_of,
)
from kvferry.control.registry import OnChange, Registry
from kvferry.errors import KVFerryError, RegistryError, RegistryUnreachableError, SettingsError, quoted
from kvferry.findings import Finding, error, good, warning
from kvferry.hosts import hosts_of, is_loopback
from kvferry.loggers import logger_of
from kvferry.protocol.wire.registrations import (
    LONGEST_INCARNATION,
    MOST_ENGINES,
    MOST_RANKS,
    MOST_RELEASED,
    EngineView,
    RankRegistration,
    check_engine_name,
    check_text,
)

log = logger_of(__name__)

API_VERSION = 1
"""Of the keys and their values: other versions have keys of their own."""

ROLL_CALL_LEASES = 6
"""After as many leases there is a roll call: a rank that died among living ones is listed for one more at most."""

_RENEWED_BELOW = 2 / 3
_MOST_TRIES = 40  # of writes that others came before: a whole engine may start at once
_LONGEST_PAUSE_S = 0.1  # between two of them
_QUIET_S = 5.0  # so long a watch may be silent before another member is asked
_WATCH_RETRY_S = 0.25
_CLOSING_S = 1.0
_TOLD_TO_DRAIN_S = 3600  # how long an operator's word waits for ranks that do not come back to hear it
_DRAINING = "draining/"  # begins the keys of these words, behind the engine's


# Made here, in one thread: msgspec 0.22 crashes the process where two threads are the first to decode a type.
_REGISTRATION = msgspec.json.Decoder(RankRegistration)
_ABSENT = KeyValue()


@dataclass(frozen=True, slots=True)
class _Held:
    """A rank's key as it was read, with what it means."""

    entry: KeyValue
    registration: RankRegistration


class EtcdRegistry(Registry):
    """A registry that an etcd cluster keeps. May be used from several threads at once.

    Args:
        url: the members and what all keys begin with, such as "etcd://a:2379,b:2379,c:2379/kvferry"; etcds for TLS.
        lease_s: how long a registration lasts without being renewed; rounded up to whole seconds, and etcd may take
            longer.
        own: how the cluster lets us in.
        trusted: PEM file of the certificates that may vouch for its members; None trusts those that httpx trusts.

    Raises:
        SettingsError: if the url is no address of a cluster, or a certificate cannot be used.

    Attributes:
        members: of the cluster, of which one is asked.
        root: what all keys begin with.
    """

    def __init__(
        self, url: str, lease_s: float = 10.0, *, own: EtcdSettings | None = None, trusted: Path | None = None
    ) -> None:
        own = own or EtcdSettings.model_construct()
        address = EtcdUrl.parsed(url)
        self._url = address.url
        self._lease_s = max(1, math.ceil(lease_s))
        self.members = EtcdMembers(address, own, trusted)
        self.root = f"{address.prefix}/v{API_VERSION}/"
        self._lock = threading.Lock()
        self._written: dict[str, RankRegistration] = {}  # by the keys of ranks that this process has registered
        # By engine: the lease that its ranks were seen attached to, and when this process calls the roll.
        self._epochs: dict[str, tuple[int, float]] = {}
        self._told_to_drain: set[str] = set()  # endpoints that were registered here
        self._watchers: list[OnChange] = []
        self._watching: threading.Thread | None = None
        self._closing = threading.Event()
        if not address.has_tls and own.etcd_user is not None and not all(map(is_loopback, hosts_of(url))):
            log.warning(
                "the registry at %s is asked without TLS: whoever listens on that network learns the password; "
                "see docs/security.md",
                self._url,
            )

    @property
    def url(self) -> str:
        return self._url

    # ---- what ranks ask -----------------------------------------------------------------------------------------

    def register(self, registration: RankRegistration) -> float:
        """Registers a rank, or renews its engine's lease if nobody has; see `Registry.register`."""
        hold = self._renew(registration)
        for number in range(_MOST_TRIES) if hold is None else ():
            hold = self._try_to_register(registration)
            if hold is not None:
                break
            self._closing.wait(random.uniform(0, min(2**number * 1e-3, _LONGEST_PAUSE_S)))  # noqa: S311
        if hold is None:
            raise self._changes_too_fast(registration.engine)
        self._call_the_roll_if_due(registration, hold.id)
        return hold.ttl

    def remove(self, engine: str, engine_rank: int, incarnation: str) -> bool:
        check_engine_name(engine)
        key = self._rank_key(engine, engine_rank)
        self._written.pop(key, None)
        for _ in range(_MOST_TRIES):
            held = _held(self._range(key), key)
            if held is None or held.registration.incarnation != incarnation:
                return False
            if self._commit([unchanged(key, held.entry)], [{"request_delete_range": {"key": encoded(key)}}]):
                return True
        raise self._changes_too_fast(engine)

    def engine(self, name: str) -> EngineView:
        check_engine_name(name)
        folder = self.engine_folder(name)
        entries = self._range(folder, is_folder=True)
        ranks = self._ranks(entries).get(name)
        return _view(name, ranks, _told_to_drain(entries)) if ranks else unknown(name, self._names())

    def engines(self) -> tuple[EngineView, ...]:
        entries = self._range(self.root + "engines/", is_folder=True)
        found, told = self._ranks(entries), _told_to_drain(entries)
        return tuple(_view(name, ranks, told) for name, ranks in sorted(found.items()))[:MOST_ENGINES]

    def drain(self, engine: str) -> tuple[str, ...]:
        view = self.engine(engine)
        if not view.registrations:
            raise refuse_drain(view)
        told = tuple(each.incarnation for each in view.registrations)
        lease = self._granted(_TOLD_TO_DRAIN_S)
        for each in told:
            body = {"key": encoded(self._draining_key(engine, each)), "lease": lease}
            self.members.ask("kv/put", body, Done)
        return told

    def drains(self, endpoint: str) -> bool:
        return endpoint in self._told_to_drain

    def release(self, endpoint: str) -> None:
        """Tells decode ranks that an endpoint has ended, see `Registry.release`. Refusing, it calls the roll."""
        check_text("the endpoint", endpoint, LONGEST_INCARNATION)
        for view in self.engines():
            for each in view.registrations:
                if each.incarnation == endpoint:
                    self._call_the_roll(view.engine)
                    raise refuse_release(each, self._lease_s)
        folder = self.root + "released/"
        self.members.ask("kv/put", {"key": encoded(folder + quote(endpoint, safe=""))}, Done)
        oldest = self._range(folder, is_folder=True, sort_target="MOD", sort_order="ASCEND")
        for key in list(oldest)[:-MOST_RELEASED]:
            self.members.ask("kv/deleterange", {"key": encoded(key)}, Done)

    def released(self) -> tuple[str, ...]:
        folder = self.root + "released/"
        return tuple(unquote(key[len(folder) :]) for key in self._range(folder, is_folder=True, limit=MOST_RELEASED))

    def findings(self) -> Iterator[Finding]:
        for member, status in self.members.ask_each("maintenance/status", Status):
            if isinstance(status, str):
                yield warning("registry", f"{member} does not answer: {status}", "start it: most members must run")
            elif not status.leader:
                yield error("registry", f"{member} has no leader", "start most of the members, and look at their logs")
            else:
                role = "leads" if status.leader == status.header.member_id else "follows"
                size = f"{status.database_bytes / 2**20:.1f} MiB in its database"
                yield good("registry", f"{member} {role}: etcd {status.version}, {size}")
            if not isinstance(status, str) and any("NOSPACE" in each for each in status.errors):
                what = f"{member} has no space left: nothing new can be registered"
                yield error("registry", what, "compact, defragment, `etcdctl alarm disarm`: docs/etcd.md")

    def watch(self, changed: OnChange) -> None:
        """Has a callable called when registrations change, and when the cluster may have been away; see `Registry`."""
        with self._lock:
            if self._watching is None and not self._closing.is_set():
                watching = threading.Thread(target=self._watch, name="kvferry-etcd-watch", daemon=True)
                watching.start()
                self._watching = watching  # only now: nobody can wait for the end of one that could not start
            self._watchers.append(changed)

    def load(self) -> None:
        self.members.load()

    def close(self) -> None:
        with self._lock:
            self._closing.set()
            watching = self._watching
        self.members.close()
        if watching is not None and watching is not threading.current_thread():
            watching.join(_CLOSING_S)

    # ---- registering --------------------------------------------------------------------------------------------

    def _renew(self, registration: RankRegistration) -> Lease | None:
        """Renews what this process has registered: what it is attached to; None if it is not there as it was."""
        key, engine_key = self._keys(registration)
        if self._written.get(key) != registration:
            return None
        told_key = self._draining_key(registration.engine, registration.incarnation)
        reads = [{"request_range": {"key": encoded(each), "keys_only": True}} for each in (key, engine_key, told_key)]
        body = {"compare": [has_value(key, msgspec.json.encode(registration))], "success": reads}
        answer = self.members.ask("kv/txn", body, Transaction)
        if not answer.succeeded:
            return None
        *own, told = [response.response_range.kvs for response in answer.responses]
        if told:
            self._told_to_drain.add(registration.incarnation)
        leases = [each.lease for found in own for each in found]
        if len(leases) != len(own) or len(set(leases)) != 1:  # the engine has moved to another one
            return None
        return self._kept_alive(leases[0])

    def _try_to_register(self, registration: RankRegistration) -> Lease | None:
        """Registers a rank, as the engine is now: what it is attached to; None if the engine changed meanwhile."""
        engine, rank = registration.engine, registration.engine_rank
        key, engine_key = self._keys(registration)
        folder = self.engine_folder(engine)
        entries = self._range(folder, is_folder=True)
        if self._draining_key(engine, registration.incarnation) in entries:
            self._told_to_drain.add(registration.incarnation)
        ranks = self._ranks(entries).get(engine, {})
        held = ranks.get(rank)
        if held is not None:
            check_is_newest(registration, held.registration)
        other = next((each.registration for number, each in ranks.items() if number != rank), None)
        if other is not None:
            check_agreement(registration, other, self._lease_s)
        own, of_engine = entries.get(key, _ABSENT), entries.get(engine_key, _ABSENT)
        lease = of_engine.lease or self._granted()
        compared = [unchanged(key, own), unchanged(engine_key, of_engine)]
        writes = [put(key, msgspec.json.encode(registration), lease)]
        if other is None:
            compared += none_but(key, folder + "ranks/")
        if other is None or not of_engine.lease:
            writes.append(put(engine_key, b"", lease))
        try:
            if not self._commit(compared, writes):
                if not of_engine.lease:  # another rank has had one granted
                    self._revoke(lease)
                return None
            hold = self._kept_alive(lease)
        except EtcdLeaseNotFoundError:
            return None
        self._written[key] = registration
        return hold

    def _kept_alive(self, lease: int) -> Lease | None:
        """Renews a lease, if no other rank has just now; None if it has run out."""
        now = self.members.ask("lease/timetolive", {"ID": lease}, Lease)
        if now.ttl < 0:
            return None
        # In whole seconds, of which the last has begun.
        if now.ttl > 0 and now.ttl + 1 > now.granted_ttl * _RENEWED_BELOW:
            # A leader that has just been elected counts no lease yet, and says that it lasts for centuries.
            return Lease(lease, min(now.ttl, now.granted_ttl))
        renewed = self.members.ask("lease/keepalive", {"ID": lease}, KeptAlive).result
        return Lease(lease, renewed.ttl) if renewed.ttl > 0 else None

    def _granted(self, lease_s: int | None = None) -> int:
        return self.members.ask("lease/grant", {"TTL": lease_s or self._lease_s}, Lease).id

    def _revoke(self, lease: int) -> None:
        try:
            self.members.ask("lease/revoke", {"ID": lease}, Done)
        except RegistryError as problem:
            log.debug("lease %x, which nobody uses, was not revoked and will run out: %s", lease, problem)

    # ---- roll calls ---------------------------------------------------------------------------------------------

    def _call_the_roll_if_due(self, registration: RankRegistration, lease: int) -> None:
        """Calls the roll if the ranks of an engine have been attached to one lease for long."""
        engine, key = registration.engine, self._keys(registration)[0]
        now, (known, ends_at) = time.monotonic(), self._epochs.get(engine, (0, 0.0))
        if known != lease:
            # Not all ranks of the engine at once: one is enough.
            lasts_s = self._lease_s * ROLL_CALL_LEASES * random.uniform(0.75, 1.0)  # noqa: S311
            self._epochs[engine] = lease, now + lasts_s
        elif now >= ends_at:
            value = msgspec.json.encode(self._written[key])
            try:
                self._call_the_roll(engine, {key: value})
            except RegistryError as problem:  # the registration stands all the same
                log.warning("ranks of %r that have died stay registered for now: %s", engine, problem)

    def _call_the_roll(self, engine: str, present: Mapping[str, bytes] = MappingProxyType({})) -> None:
        """Moves an engine to a new lease, to which its living ranks follow; nothing changes if another does so first.

        Args:
            present: keys of ranks that follow at once, with their values.
        """
        engine_key = self.engine_folder(engine) + "lease"
        entries = self._range(self.engine_folder(engine), is_folder=True)
        lease = self._granted()
        followed = {key: value for key, value in present.items() if key in entries and entries[key].value == value}
        compared = [unchanged(key, entries.get(key, _ABSENT)) for key in (engine_key, *followed)]
        writes = [put(key, value, lease) for key, value in {engine_key: b"", **followed}.items()]
        if not self._commit(compared, writes):
            self._revoke(lease)

    # ---- watching -----------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        body = {"create_request": span(self.root + "engines/")}
        retry_s = _WATCH_RETRY_S
        while not self._closing.is_set():
            try:
                for news in self.members.watch(body, _QUIET_S):
                    if news.canceled:
                        log.debug("changes at the registry are not told: %s", news.cancel_reason)
                        self.members.forget_token()  # it may have been that
                        retry_s = min(2 * retry_s, _QUIET_S)
                        break
                    retry_s = _WATCH_RETRY_S
                    # What happened before the watch was there was not told: whoever waits must look.
                    names = {None} if news.created else {self._engine_of(_text(each.kv.key)) for each in news.events}
                    for name in names:
                        self._tell(name)
            except RegistryUnreachableError as problem:
                log.debug("changes at the registry are not told for now: %s", problem)
            except KVFerryError as problem:  # such as a password that is wrong, which takes etcd long to find
                retry_s = min(2 * retry_s, _QUIET_S)
                log.debug("changes at the registry are not told: %s", problem)
            except Exception:
                log.exception("watching the registry at %s met an unexpected error", self._url)
            self._closing.wait(retry_s)

    def _tell(self, engine: str | None) -> None:
        with self._lock:
            watchers = list(self._watchers)
        for changed in watchers:
            try:
                changed(engine)
            except Exception:
                log.exception("a watcher of the registry raised an error")

    # ---- keys and values ----------------------------------------------------------------------------------------

    def engine_folder(self, engine: str) -> str:
        """Returns what all keys of an engine begin with."""
        return f"{self.root}engines/{engine}/"

    def _rank_key(self, engine: str, engine_rank: int) -> str:
        return f"{self.engine_folder(engine)}ranks/{engine_rank}"

    def _draining_key(self, engine: str, endpoint: str) -> str:
        return f"{self.engine_folder(engine)}{_DRAINING}{quote(endpoint, safe='')}"

    def _keys(self, registration: RankRegistration) -> tuple[str, str]:
        """Returns the keys of a rank and of its engine's lease."""
        engine = registration.engine
        return self._rank_key(engine, registration.engine_rank), self.engine_folder(engine) + "lease"

    def _engine_of(self, key: str) -> str | None:
        name, slash, _ = key.removeprefix(self.root + "engines/").partition("/")
        try:
            check_engine_name(name)
        except SettingsError:
            return None
        return name if slash else None

    def _names(self) -> tuple[str, ...]:
        """Returns the names of engines that have live ranks."""
        entries = self._range(self.root + "engines/", is_folder=True, keys_only=True)
        names = {self._engine_of(key) for key in entries if "/ranks/" in key}
        return tuple(sorted(name for name in names if name is not None))[:MOST_ENGINES]

    def _ranks(self, entries: Mapping[str, KeyValue]) -> dict[str, dict[int, _Held]]:
        """Returns the live ranks of engines, by number. What is no registration, or of another rank, is none."""
        found: dict[str, dict[int, _Held]] = {}
        for key in entries:
            held = _held(entries, key) if "/ranks/" in key else None
            if held is not None and self._keys(held.registration)[0] == key:
                registration = held.registration
                found.setdefault(registration.engine, {})[registration.engine_rank] = held
        return found

    def _range(self, key: str, *, is_folder: bool = False, **options: Any) -> dict[str, KeyValue]:
        """Reads a key, or all that begin with it."""
        selected = span(key) if is_folder else {"key": encoded(key)}
        body = {"limit": MOST_RANKS + MOST_ENGINES, **options, **selected}
        return {_text(each.key): each for each in self.members.ask("kv/range", body, Range).kvs}

    def _commit(self, compared: list[dict[str, Any]], writes: list[dict[str, Any]]) -> bool:
        """Writes all, if all that is compared is so; else nothing."""
        return self.members.ask("kv/txn", {"compare": compared, "success": writes}, Transaction).succeeded

    def _changes_too_fast(self, engine: str) -> RegistryError:
        return RegistryError(
            f"the registry at {self._url} changes faster than engine {engine!r} can be written: do two engines of "
            "this name start over and over?"
        )


def _held(entries: Mapping[str, KeyValue], key: str) -> _Held | None:
    """Returns a rank's key with what it means; None if it is not there, or no registration."""
    entry = entries.get(key)
    if entry is None:
        return None
    try:
        return _Held(entry, _REGISTRATION.decode(entry.value))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, KVFerryError) as problem:
        log.warning("what the registry has at %r is no registration, and counts as none: %s", key, quoted(problem))
        return None


def _view(engine: str, ranks: Mapping[int, _Held], told_to_drain: Collection[str]) -> EngineView:
    return view_of(engine, (held.registration for held in ranks.values()), told_to_drain)


def _told_to_drain(entries: Iterable[str]) -> frozenset[str]:
    """Returns the endpoints that keys say an operator has told to drain."""
    marked = (key.partition(f"/{_DRAINING}") for key in entries)
    return frozenset(unquote(endpoint) for _, mark, endpoint in marked if mark)


def _text(key: bytes) -> str:
    return key.decode(errors="replace")
