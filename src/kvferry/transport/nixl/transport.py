"""NIXL: RDMA, shared memory or TCP, whatever UCX finds between two endpoints.

This talks to NIXL's bindings directly, because its Python wrapper fixes the progress thread's delay at 0, which burns a
core in an idle process. A side that receives needs the thread: it completes nothing without it. It wakes up for events
and, as a safeguard, every `PROGRESS_DELAY_US`; at 50 ms an idle process costs 0.2 % of a core and notifications are as
fast as at 1 ms.

A side that only writes is better off without it. Between two processes of one machine a post copies all bytes itself,
under a lock of UCX's that spins: the thread, and everyone else who posts or polls, would burn a core until the copy is
done (a third of the prefill side's CPU time, measured). Polling makes the progress there, one caller at a time.

A large write is shared by several threads, each with a connection of its own. They are ours, and each share is a
request of its own, with a status of its own: the write has ended when all of them have. NIXL's own threads
(num_threads) are not used. The first error of one of them is the error of the whole write, and what the others had not
sent stays queued, is read when they next have work, and lands then: any time later, in pages that are somebody else's.

NIXL posts descriptor by descriptor. Where one fails, it raises and forgets those before, which UCX reads and sends all
the same: 52 of 67 MB after the raise, over 200 Mbit/s, and as many where the peer was invalidated at once. So that is a
write, too, and has ended with a write of no bytes behind it, for which NIXL flushes the connection, or when that broke.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from kvferry.errors import (
    PeerDisconnectedError,
    RegistrationError,
    TransportError,
    TransportUnavailableError,
)
from kvferry.layout import Device, MemoryKind, Region
from kvferry.loggers import logger_of
from kvferry.open_files import CONNECTION, SHARE, START, lack
from kvferry.plan import TransferPath
from kvferry.plan.descriptors import DescriptorIndices, RowArray
from kvferry.settings import Settings, environment
from kvferry.transport.base import (
    PeerMetadata,
    PreparedList,
    Promises,
    TransferHandle,
    TransferReport,
)
from kvferry.transport.compiled_posts import SharedLock
from kvferry.transport.confined_ports import listening_sockets
from kvferry.transport.copies import Copies
from kvferry.transport.crowded_ports import CrowdedPorts
from kvferry.transport.nixl.bindings import agent_config, as_transport_error, load_bindings, translated
from kvferry.transport.nixl.device_choice import chosen_device
from kvferry.transport.nixl.nixl_diagnosis import NixlDiagnosis
from kvferry.transport.nixl.nixl_posts import NixlWay, compiled_posts
from kvferry.transport.nixl.scatter_gather import check_lists as check_scatter_gather
from kvferry.transport.nixl.scatter_gather import plugin_file, told
from kvferry.transport.nixl.settings import NixlSettings
from kvferry.transport.nixl.shares import Lane, NixlConnection, NixlHandle, Share, on_lanes, parts, report_of, sum_of
from kvferry.transport.ranges import RangeTransport
from kvferry.transport.registered import check_regions

log = logger_of(__name__)

_FLUSH_AGAIN_S = 1.0
"""How long after a flush that could not be posted the next one is tried. Each is logged."""


class NixlTransport(RangeTransport[NixlConnection]):
    """Moves bytes with NIXL.

    What it promises is what NIXL 1.5.1 was measured to do on UCX's shared memory and TCP. Release is no abort: over TCP
    213 of 268 MB arrived afterwards. A write into memory that its owner had deregistered was done all the same, by
    shared memory. Several threads share a write, and nothing orders them. After a process was killed in the middle of a
    write, its last bytes arrived within 8 ms. Of other backends nothing was measured.
    """

    name = "nixl"
    memory_kinds = frozenset(MemoryKind)
    promises = Promises(
        can_abort=False,
        fenced_by_deregistration=False,
        fenced_by_death=True,
        keeps_order=False,
        posts_all_or_nothing=True,
    )
    diagnosis = NixlDiagnosis()

    @classmethod
    def check_available(cls) -> None:
        load_bindings()

    @classmethod
    def from_settings(cls, settings: Settings, endpoint_name: str, *, writes: bool) -> NixlTransport:
        own, parameters = settings.of(NixlSettings), {}
        # Bulk writes from staging memory are not shared: there the threads would only cost connections to every peer.
        is_shared = writes and settings.forced_path in (None, TransferPath.DIRECT)
        if own.nixl_backend == "UCX":
            # Else UCX waits for TCP's connection while it holds everybody up: minutes, where packets get lost.
            configuration = ["TCP_CONN_NB=y"]
            # A lost connection has to break. Else writes through it hang for as long as TCP tries, a quarter of an
            # hour, and the next connection to that peer waits for them. Whoever acknowledges nothing for as long has
            # been given up, too.
            configuration.append(f"TCP_USER_TIMEOUT={settings.peer_timeout_s:g}s")
            device = chosen_device(settings).device
            if device is not None:
                # By default UCX listens on every interface of the machine. NIXL's device_list takes InfiniBand's only.
                configuration.append(f"NET_DEVICES={device}")
            parameters["engine_config"] = ",".join(configuration)
        return cls(
            endpoint_name,
            backend=own.nixl_backend,
            backend_parameters=parameters,
            only_writes=writes,
            threads=settings.nixl_threads if is_shared else 0,
            hands_lists=writes and own.nixl_sgl,
        )

    def __init__(
        self,
        endpoint_name: str,
        *,
        backend: str = "UCX",
        backend_parameters: Mapping[str, str] | None = None,
        only_writes: bool = False,
        threads: int = 0,
        smallest_share: int = 64,
        hands_lists: bool = False,
    ) -> None:
        """Starts a NIXL agent with one backend.

        Args:
            endpoint_name: the agent's name, unique among all endpoints and new at every start.
            backend: NIXL's backend.
            backend_parameters: the backend's own parameters.
            only_writes: whether peers never write to this endpoint, which then goes without that thread.
            threads: how many of ours share a large write; with 0 or 1 its caller posts all of it.
            smallest_share: fewest descriptors, before any are merged, that are worth handing to another thread, which
                takes a tenth of a millisecond.
            hands_lists: whether UCX gets the descriptors of a write as a list, and not one by one.

        Raises:
            TransportUnavailableError: if NIXL or the backend is missing, or lists are asked for that it does not know.
        """
        super().__init__(endpoint_name)
        self.promises = replace(self.promises, fenced_by_death=backend == "UCX")
        self._nixl = load_bindings()
        self._translated = partial(translated, self._nixl)
        self._in_progress, self._success = self._nixl.NIXL_IN_PROG, self._nixl.NIXL_SUCCESS
        # Guards progress: one at a time, and the others sleep instead of spinning on UCX's own lock.
        self._progress = SharedLock()
        if problem := lack(START + SHARE * threads):
            raise TransportError(f"creating NIXL backend {backend!r}: {problem}")  # UCX would end the process
        self._agent: Any = self._nixl.nixlAgent(endpoint_name, agent_config(self._nixl, only_writes=only_writes))
        available = self._agent.getAvailPlugins()
        if backend not in available:
            raise TransportUnavailableError(f"NIXL has no backend {backend!r} here (KVFERRY_NIXL_BACKEND): {available}")
        parameters = dict(backend_parameters or {})
        if threads > 1:
            parameters["num_workers"] = str(threads)  # UCX's, each with a connection to every peer
        listened = listening_sockets()
        self._backend = self._create_backend(backend, parameters, hands_lists=hands_lists)
        opened = listening_sockets() - listened if backend == "UCX" else ()
        self._ports = CrowdedPorts(opened) if opened else None
        # Each of one thread, since NIXL ties a thread to one of UCX's workers.
        self._lanes = tuple(Lane(1, f"{endpoint_name}-lane") for _ in range(threads if threads > 1 else 0))
        self._smallest_share = smallest_share
        self._are_lanes_tied = False
        self._registered: list[Any] = []
        self._posts = compiled_posts(self._nixl, self._agent, self._progress)

    @property
    def has_compiled_ways(self) -> bool:
        return self._posts is not None

    def compiled_way(self, peer: str) -> NixlWay | None:
        connection = self.connection(peer)
        if self._posts is None or connection.memory.device.kind is not self._memory.device.kind:
            return None
        return NixlWay(self._posts, connection, self._memory.device, self._ask_why)

    def _create_backend(self, backend: str, parameters: Mapping[str, str], *, hands_lists: bool) -> int:
        if hands_lists:
            check_scatter_gather(backend, plugin_file(self._nixl, environment()))
        with self._translated(f"creating NIXL backend {backend!r} with {parameters}"), told(hands_lists=hands_lists):
            created: int = self._agent.createBackend(backend, parameters)
        return created

    def _memory_type(self, device: Device) -> Any:
        return getattr(self._nixl, f"{device.kind.value}_SEG")

    def register(self, regions: Sequence[Region], device: Device) -> None:
        check_regions(regions)
        self._memory.check_device(device)
        descriptors = [(region.address, region.length, device.index, "") for region in regions]
        if descriptors:
            registered = self._nixl.nixlRegDList(self._memory_type(device), descriptors)
            try:
                with self._translated(f"registering {len(regions)} regions of {device}"):
                    self._agent.registerMem(registered, [self._backend])
            except TransportError as error:
                raise RegistrationError(str(error)) from error.__cause__
            self._registered.append(registered)
        self._memory.add(regions, device)

    def private_metadata(self) -> bytes:
        metadata: bytes = self._agent.getLocalMD()
        return metadata

    def open(self, peer: PeerMetadata) -> NixlConnection:
        if problem := lack(CONNECTION + SHARE * len(self._lanes)):
            raise TransportError(f"connecting to {peer.name}: {problem}")
        self.disconnect(peer.name)  # NIXL refuses to add an agent of a known name
        try:
            with self._translated(f"connecting to {peer.name}", peer.name):
                name = self._agent.loadRemoteMD(peer.private)
                if isinstance(name, bytes):
                    name = name.decode()
                if name != peer.name:
                    with self._lock:
                        if name not in self._connections:  # else its connection would go, and whatever is written by it
                            self._agent.invalidateRemoteMD(name)
                    raise TransportError(f"a peer that calls itself {peer.name!r} sent the metadata of {name!r}")
                self._agent.makeConnection(name, [self._backend])
                connection = NixlConnection(peer)
                with self._lock:
                    self._tie_lanes(connection)
        except TransportError:
            self._invalidate(peer.name)  # NIXL keeps what it loaded before it failed, and would refuse the next try
            raise
        return connection

    def _tie_lanes(self, connection: NixlConnection) -> None:
        """Makes each lane's first request, one after the other: NIXL gives threads UCX's workers in that order.

        Called before any other thread can have made one, so that no two lanes have the same.
        """
        if self._are_lanes_tied or not len(self._memory) or not len(connection.memory):
            return
        source, address = Region(self._memory.regions[0].address, 1), connection.memory.regions[0].address
        for lane in self._lanes:
            self._agent.releaseXferReq(lane.submit(self._request, source, connection, address).result())
        self._are_lanes_tied = True

    def hang_up(self, connection: NixlConnection) -> None:
        self._invalidate(connection.peer.name)

    def _invalidate(self, peer: str) -> None:
        with contextlib.suppress(TransportError), self._translated(f"disconnecting from {peer}", peer):
            self._agent.invalidateRemoteMD(peer)

    def make_list(self, rows: RowArray, peer: str | None) -> PreparedList:
        memory = self._memory if peer is None else self.connection(peer).memory
        rows = rows.copy()
        rows[:, 3] = np.maximum(rows[:, 3], rows[:, 1])  # NIXL wants it so, also where nothing repeats
        with self._translated(f"preparing {len(rows)} descriptor rows of {peer or 'this endpoint'}", peer):
            handle = self._agent.prepXferDlist(
                self._nixl.NIXL_INIT_AGENT if peer is None else peer,
                self._memory_type(memory.device),
                rows,
                [self._backend],
            )
        return PreparedList(peer, handle, len(rows), int(rows[:, 4].sum()))

    def drop_list(self, prepared: PreparedList) -> None:
        self._agent.releasedDlistH(prepared.handle)

    def start_selected(
        self,
        connection: NixlConnection,
        local: PreparedList,
        local_indices: DescriptorIndices,
        remote: PreparedList,
        remote_indices: DescriptorIndices,
        notification: bytes,
    ) -> TransferHandle:
        peer = connection.peer.name

        def request(which: slice) -> int:
            handle: int = self._agent.makeXferReq(
                self._nixl.NIXL_WRITE,
                local.handle,
                local_indices[which],
                remote.handle,
                remote_indices[which],
                "",
                [self._backend],
                False,
            )
            return handle

        with self._translated(f"posting {len(local_indices)} descriptors to {peer}", peer):
            num_shares = min(len(self._lanes), len(local_indices) // self._smallest_share)
            if num_shares < 2 or len(local_indices) != len(remote_indices):  # the latter NIXL refuses
                return self._start_shares([Share(request(slice(None)))], connection, notification)
            requests = on_lanes(self._lanes, request, parts(len(local_indices), num_shares))
            problem = next((each for each in requests if isinstance(each, BaseException)), None)
            handles = [each for each in requests if not isinstance(each, BaseException)]
            if problem is not None:
                for handle in handles:
                    self._release_unposted(handle, peer)
                raise problem
            shares = [Share(handle, lane) for handle, lane in zip(handles, self._lanes, strict=False)]
            return self._start_shares(shares, connection, notification)

    def start(self, connection: NixlConnection, copies: Copies, notification: bytes) -> TransferHandle:
        """Starts a write of one range: those that are selected from lists, NIXL takes as such."""
        ((source, address, length),) = copies
        with self._translated(f"writing {length} bytes to {connection.peer.name}", connection.peer.name):
            share = Share(self._request(Region(source, length), connection, address))
            return self._start_shares([share], connection, notification)

    def _request(self, source: Region, connection: NixlConnection, address: int) -> int:
        """Makes a request to write one range."""
        descriptors, ours, theirs = self._nixl.nixlXferDList, self._memory.device, connection.memory.device
        handle: int = self._agent.createXferReq(
            self._nixl.NIXL_WRITE,
            descriptors(self._memory_type(ours), [(source.address, source.length, ours.index)]),
            descriptors(self._memory_type(theirs), [(address, source.length, theirs.index)]),
            connection.peer.name,
            "",
            [self._backend],
        )
        return handle

    def _start_shares(self, shares: list[Share], connection: NixlConnection, notification: bytes) -> NixlHandle:
        """Posts the shares of a write, each on its lane. The notification leaves when all of them have ended."""
        is_one = len(shares) == 1  # whose request can carry the notification
        transfer = NixlHandle(connection, shares, b"" if is_one else notification)
        post = partial(self._post, transfer, notification if is_one else b"")
        with self._progress:
            if is_one:
                post(shares[0])
            else:
                on_lanes(self._lanes, post, shares)
            with contextlib.suppress(Exception):  # `poll` meets this again
                self._look(transfer)  # before another thread takes the lock, perhaps for long
        return transfer

    def _post(self, transfer: NixlHandle, notification: bytes, share: Share) -> None:
        """Posts a share. Never raises: what was posted before an error goes on, and `poll` says when it has ended."""
        try:
            with self._translated(f"posting to {transfer.peer}", transfer.peer):
                # Between processes of one machine posting copies: asking again would give the interpreter's lock away.
                if self._is_done(self._agent.postXferReq(share.handle, notification), transfer.peer):
                    self._end(share, share.handle)
        except Exception as error:
            transfer.half_posted(share, as_transport_error(error, f"posting to {transfer.peer}"))

    def _ask_why(self, transfer: NixlHandle, share: Share | None) -> None:
        """Asks the bindings what compiled code has met: as it posted a share, or (None) as it was to make another."""
        peer, ours = transfer.peer, self._memory.regions[0].address
        what = f"posting to {peer}"
        problem = TransportError(f"{what}: it failed, and NIXL does not say why")
        try:
            with self._progress, self._translated(what, peer):
                if share is not None:
                    self._is_done(self._agent.getXferStatus(share.handle), peer)
                else:
                    address = transfer.connection.memory.regions[0].address
                    self._release_unposted(self._request(Region(ours, 0), transfer.connection, address), peer)
        except Exception as error:
            problem = as_transport_error(error, what)
        transfer.half_posted(share, problem)

    def _flush(self, share: Share, transfer: NixlHandle) -> None:
        """Posts a write of no bytes behind what was half posted, on its thread, which NIXL ties to a connection."""
        connection, peer, ours = transfer.connection, transfer.peer, self._memory.regions[0].address

        def post() -> int:
            handle = self._request(Region(ours, 0), connection, connection.memory.regions[0].address)
            try:
                self._is_done(self._agent.postXferReq(handle, b""), peer)
            except BaseException:
                self._release_unposted(handle, peer)
                raise
            return handle

        share.flushed_at = time.monotonic()
        try:
            with self._translated(f"writing to {peer}", peer):
                share.flush = post() if share.lane is None else share.lane.submit(post).result()
        except PeerDisconnectedError:  # and with the connection all that was posted has ended
            share.has_ended = True
        except TransportError as error:
            log.warning("what was half posted to %s may go on: %s", peer, error)

    def _release_unposted(self, handle: int, peer: str) -> None:
        """Releases a request that could not be posted. Never raises, which would hide why it could not."""
        try:
            self._agent.releaseXferReq(handle)
        except Exception as error:
            log.warning("a write to %s that was not posted could not be released: %s", peer, error)

    def poll(self, transfer: TransferHandle) -> TransferReport | None:
        assert isinstance(transfer, NixlHandle)
        if transfer.report is None and (transfer.problem is None or not transfer.has_ended):
            with self._progress:
                self._look(transfer)
        if transfer.problem is not None and transfer.has_ended:
            raise transfer.problem
        return transfer.report

    def _look(self, transfer: NixlHandle) -> None:
        """Makes progress, and takes the report, or the problem, of a write of which nothing moves any more."""
        for share in transfer.shares:
            if not share.has_ended:
                self._look_at(share, transfer)
        if not transfer.has_ended or transfer.problem is not None:
            return
        if transfer.notification:
            try:
                with self._translated(f"notifying {transfer.peer}", transfer.peer):
                    self._agent.genNotif(transfer.peer, transfer.notification, [self._backend])
            except TransportError as error:
                transfer.problem = error
                return
        transfer.report = sum_of([share.report for share in transfer.shares if share.report is not None])

    def _look_at(self, share: Share, transfer: NixlHandle) -> None:
        if share.is_half_posted and share.flush is None:
            with self._lock:
                is_connected = self._connections.get(transfer.peer) is transfer.connection
            if not is_connected:  # nothing tells of an earlier connection
                raise RuntimeError(
                    f"{transfer.peer} was disconnected while a write to it was half posted, and may go on"
                )
            if time.monotonic() >= share.flushed_at + _FLUSH_AGAIN_S:
                self._flush(share, transfer)
            return
        handle = share.handle if share.flush is None else share.flush
        try:
            if self._is_done(self._agent.getXferStatus(handle), transfer.peer):
                self._end(share, handle)
        except self._nixl.nixlNotFoundError as error:
            # NIXL forgot the peer, not the write, which may go on: this must not pass for an end.
            raise RuntimeError(f"a write to {transfer.peer} is not known to NIXL any more, and may go on") from error
        except Exception as error:  # translated here, not around all of it: this runs many times for every write
            try:
                with self._translated(f"writing to {transfer.peer}", transfer.peer):
                    raise error
            except TransportError as problem:
                share.has_ended = True
                transfer.problem = transfer.problem or problem

    def _end(self, share: Share, handle: int) -> None:
        """Takes the report of a share that has ended."""
        telemetry = self._agent.getXferTelemetry(handle)
        share.has_ended, share.report = True, report_of(telemetry)

    def _is_done(self, status: Any, peer: str) -> bool:
        """Returns whether a write has ended. NIXL raises for failures, but may also return them."""
        if status == self._in_progress:
            return False
        if status == self._success:
            return True
        raise TransportError(f"the write to {peer} ended with status {status}")

    def release(self, transfer: TransferHandle) -> None:
        assert isinstance(transfer, NixlHandle)
        releasing = f"releasing a write to {transfer.peer}"
        with self._translated(releasing, transfer.peer), contextlib.ExitStack() as stack:
            for share in transfer.shares:  # all of them, whichever raises
                for handle in (share.handle, share.flush):
                    if handle:
                        stack.callback(self._agent.releaseXferReq, handle)

    def notify(self, peer: str, notification: bytes) -> None:
        self.connection(peer)
        with self._progress, self._translated(f"notifying {peer}", peer):
            self._agent.genNotif(peer, notification, [self._backend])

    def take_notifications(self) -> list[tuple[str, bytes]]:
        if not self._progress.acquire(blocking=False):
            return []  # another thread makes progress; the next call takes what came
        try:
            received = self._agent.getNotifs({}, [self._backend])
        finally:
            self._progress.release()
        return [(peer, notification) for peer, notifications in received.items() for notification in notifications]

    def close(self) -> None:
        if self._agent is None:
            return
        if self._ports is not None:
            self._ports.close()
        for lane in self._lanes:
            lane.shutdown()
        super().close()
        for registered in self._registered:
            with contextlib.suppress(TransportError), self._translated("deregistering memory"):
                self._agent.deregisterMem(registered, [self._backend])
        self._posts = None  # which keeps the agent
        self._agent = None  # ends NIXL's progress thread
