"""What outlives a request on a rank: the endpoint, and what a decode rank has looked up of prefill servers."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from sglang.srt.disaggregation.base.conn import KVArgs, StateType
from sglang.srt.disaggregation.common.conn import CommonKVManager, PrefillServerInfo
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_disagg, get_parallel
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.network import NetworkAddress

from kvferry import DecodeEndpoint, MemoryKind, PrefillEndpoint, RankCoordinates, RankLayout, Receiver, TransferState
from kvferry.engines.device_events import DeviceEvents
from kvferry.engines.sglang import stock
from kvferry.engines.sglang.directory import ask, difference, registry_url
from kvferry.engines.sglang.hisparse import JointReceiver, stage
from kvferry.engines.sglang.hooks import check_hooks, check_pages_are_kept
from kvferry.engines.sglang.layer_steps import LayerSteps, layer_steps
from kvferry.engines.sglang.metadata_rows import MetadataRows
from kvferry.engines.sglang.options import check_options
from kvferry.engines.sglang.placement import placement_of
from kvferry.engines.sglang.prefill_server import PrefillServers
from kvferry.engines.sglang.rank_caches import rank_caches
from kvferry.engines.sglang.settings import settings_beside
from kvferry.engines.sglang.transfers import ROOMS
from kvferry.engines.sglang.versions import kv_layout
from kvferry.engines.sglang.weights import Weights
from kvferry.errors import TransferError, UnknownRoomError, UsageError
from kvferry.loggers import logger_of

log = logger_of(__name__)

_ONE_IS_VERIFIED = (
    "--disaggregation-enable-kv-checksum: SGLang's checksum comes with the first token, from the first tensor-parallel "
    "rank, so that the first of %d ranks alone is verified, and only where the other side has as many. "
    "KVFERRY_CHECKSUMS=1 on the decode side verifies all, where caches are in CPU memory"
)


class KVFerryManager(CommonKVManager):  # type: ignore[misc]
    """A rank's endpoint. Made and called by SGLang's scheduler.

    Attributes:
        state_types: what the rank caches beside keys and values.
        caches: what the rank caches, and how it lies in memory.
        prefill: the endpoint of a prefill rank.
        decode: that of a decode rank.
        device_events: waits for the device, on a prefill rank.
        layer_steps: sends layers while the model computes the next ones; None where they leave with their step alone.
        is_closed: whether it has ended for good.
        is_released: whether SGLang has given the memory of the caches away, for now: there is no endpoint then.
        servers: what it knows of prefill servers, on a decode rank.
        rooms: the numbers of its requests' rooms.
        stock_peers: answers decode servers without kvferry, on a prefill rank.
    """

    prefill: PrefillEndpoint
    decode: DecodeEndpoint
    supports_deferred_decode_kv_release = True
    supports_host_destination = False  # but for ranks that have host pools

    def __init__(
        self,
        args: KVArgs,
        disaggregation_mode: DisaggregationMode,
        server_args: ServerArgs,
        is_mla_backend: bool | None = False,
    ) -> None:
        """Registers the caches and starts the endpoint.

        Raises:
            EngineContractError: if a hook of ours in SGLang is not in effect.
            UsageError: if an option is on that kvferry does not do, or SGLang's metadata is too large.
            LayoutError: if the caches cannot be described.
            KVFerryError: if memory cannot be registered, or the bootstrap server does not answer.
        """
        check_hooks()
        if disaggregation_mode is DisaggregationMode.DECODE:
            limit = envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT
            check_pages_are_kept(limit_is_users=limit.is_set())
        check_options(args, disaggregation_mode)
        self.metadata_rows = MetadataRows(tuple(args.aux_data_ptrs), tuple(args.aux_item_lens))
        self.metadata_rows.check_size()
        super().__init__(args, disaggregation_mode, server_args, is_mla_backend)
        self.state_types: tuple[StateType, ...] = tuple(args.state_types)
        self.place = placement_of(self, get_parallel())
        # SGLang's sender compares it with the room, or registers it: with plain --dp-size it is 0 on every replica.
        self.attn_dp_rank = self.place.coordinates.dp_rank
        self.is_dummy_cp_rank = False  # ranks that hold the same take turns: SGLang would have the first one send
        if get_disagg().disaggregation_enable_kv_checksum and self.attn_tp_size > 1 and self.attn_tp_rank == 0:
            log.warning(_ONE_IS_VERIFIED, self.attn_tp_size)
        self._settings = settings_beside(
            envs.SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT.get(), envs.SGLANG_DISAGGREGATION_WAITING_TIMEOUT.get()
        )
        self.caches = rank_caches(args, server_args, self.place)
        self.supports_host_destination = self.caches.has_host_pool
        self.weights = args.kvferry_pools.weights or Weights(self.caches.fingerprint["weights"])
        self._name_weights()
        self.device_events = DeviceEvents(self.caches.layout.device)
        self.layer_steps: LayerSteps | None = None
        if disaggregation_mode is DisaggregationMode.PREFILL and self._settings.layer_ranges > 1:
            self.layer_steps = layer_steps(args, self.caches.layout, self._settings.layer_ranges)
        self._host: DecodeEndpoint | None = None
        self._endpoints: list[PrefillEndpoint | DecodeEndpoint] = []  # those above that there are
        self.is_released = self.is_closed = False
        self.servers: PrefillServers | None = None
        if disaggregation_mode is DisaggregationMode.DECODE:
            self.servers = PrefillServers(
                self._settings, self.prefill_info_table, partial(stock.abort, self._zmq_ctx), self._refusal
            )
        self.rooms = RoomNumbers()
        # By room: all whose pages may still be written to, where its number was used again meanwhile.
        self._receivers: dict[int, list[Receiver | JointReceiver]] = {}
        self._open()  # graphs are captured by now: SGLang makes the manager once it has its model
        self.stock_peers: stock.StockPeers | None = None
        if disaggregation_mode is DisaggregationMode.PREFILL:
            end = None if self._settings.has_secret else self._end_unopened
            self.stock_peers = stock.StockPeers(
                self._zmq_ctx, self.server_socket, self._settings.bootstrap_timeout_s, end
            )

    # ---- the endpoint, which lives as long as the caches are in memory -------------------------------------------

    def register_buffer_to_engine(self) -> None:
        """Makes the endpoint anew, once SGLang has the memory of the caches back."""
        if self.is_released:
            self._open()
            self.is_released = False

    def deregister_buffer_to_engine(self) -> None:
        """Closes the endpoint, before SGLang gives the memory of the caches away.

        Raises:
            TransferError: if something may still write to the caches, or read them: SGLang must not go on then.
        """
        if self.is_released:
            return
        self.is_released = True
        self._close_endpoints()
        self._receivers.clear()

    @property
    def supports_role_switch(self) -> bool:
        """Whether SGLang may make a manager for the other role, which registers the memory of the caches at once."""
        if self.is_released:
            log.error("no role is switched while the caches' memory is given away: /resume_memory_occupation first")
        return not self.is_released

    def renew_weights(self) -> None:
        """Says to peers what the weights are by now. What is on its way fails on both sides.

        That is so whatever they are called: others may have the name of those before.

        Raises:
            KVFerryError: as `Endpoint.renew`.
        """
        self._name_weights()
        for endpoint in () if self.is_released else self._endpoints:
            side = "prefill" if isinstance(endpoint, PrefillEndpoint) else "decode"
            endpoint.renew(self.caches.fingerprint, f"the {side} server's weights were replaced while it ran")

    def _name_weights(self) -> None:
        self.caches = replace(self.caches, fingerprint={**self.caches.fingerprint, "weights": self.weights.said})

    def teardown(self) -> None:
        """Ends what the manager has, before SGLang makes one for the server's other role.

        Raises:
            TransferError: as `deregister_buffer_to_engine`. SGLang calls the server unhealthy then.
        """
        try:
            self.deregister_buffer_to_engine()
        finally:
            self.close()

    def close(self) -> None:
        """Closes the endpoint, within the settings' close_timeout_s, and ends all threads."""
        self.is_closed = True
        self.device_events.close()
        for endpoint in self._endpoints:
            endpoint.close()
        if self.servers is not None:
            self.servers.close()
        recomputing = getattr(self, "_prefill_recompute_executor", None)  # SGLang's, on a decode rank
        if recomputing is not None:
            recomputing.shutdown(wait=False, cancel_futures=True)
        if self.stock_peers is not None:
            self.stock_peers.close()
        # Left to the garbage collector, a context can wait for its socket for ever, in whatever thread it is collected.
        self._zmq_ctx.destroy(linger=0)

    def _end_unopened(self, room: int, reason: str) -> bool:
        """Ends a room that no decode rank has opened; returns whether there is one of that number. On any thread."""
        try:
            sender = self.prefill.sender(room)
        except UnknownRoomError:
            return False
        if sender.state is TransferState.BOOTSTRAPPING:
            sender.abort(reason)
        return True

    @property
    def is_on_device(self) -> bool:
        """Whether the caches are in a device's memory, and not in the CPU's."""
        return self.caches.layout.device.kind is MemoryKind.VRAM

    @property
    def host(self) -> DecodeEndpoint:
        """The endpoint of a decode rank that receives into host memory."""
        if self._host is None:
            raise UsageError("SGLang did not say where a request's cache could be in host memory")
        return self._host

    def _open(self) -> None:
        self._endpoints = []
        if self.disaggregation_mode is DisaggregationMode.PREFILL:
            address = self._own_bootstrap_address()
            announcement = ask(address)
            where = self._settings.model_copy(
                update={"registry_url": registry_url(address, announcement, self._settings)}
            )
            self.prefill = PrefillEndpoint(
                self.caches.layout,
                engine=announcement.engine,
                coordinates=self.place.coordinates,
                settings=where,
                host_registry=False,
                fingerprint=self.caches.fingerprint,
            )
            self._endpoints.append(self.prefill)
            return
        if hasattr(self, "decode"):  # there was one before
            self.prefill_servers.begin_anew()
        here, host_layout = self.place.coordinates, self.caches.host_layout
        if self.caches.is_hisparse:
            assert host_layout is not None
            self._host = self._receiving(host_layout, "sglang-decode", stage(here, 0))
            self.decode = self._receiving(self.caches.layout, "sglang-decode", stage(here, 1))
        else:
            self.decode = self._receiving(self.caches.layout, "sglang-decode", here)
            if host_layout is not None:
                self._host = self._receiving(host_layout, "sglang-decode-host", here)
        self.prefill_servers.serve(self.decode)

    def _receiving(self, layout: RankLayout, engine: str, coordinates: RankCoordinates) -> DecodeEndpoint:
        endpoint = DecodeEndpoint(
            layout,
            engine=engine,
            coordinates=coordinates,
            settings=self._settings,
            registry=self.prefill_servers.directory,
            fingerprint=self.caches.fingerprint,
        )
        self._endpoints.append(endpoint)
        return endpoint

    def _close_endpoints(self) -> None:
        for endpoint in self._endpoints:
            endpoint.close()
            if pages := endpoint.status().quarantined_pages:
                done = "read" if isinstance(endpoint, PrefillEndpoint) else "written"
                raise TransferError(
                    f"{pages} pages of SGLang's caches may still be {done} by a "
                    f"transfer that has ended here, {self._settings.close_timeout_s:g} s (KVFERRY_CLOSE_TIMEOUT_S) "
                    "after it was told to stop: their memory must not be given away"
                )

    # ---- prefill servers, as a decode rank knows them ---------------------------------------------------------------

    @property
    def prefill_servers(self) -> PrefillServers:
        """What a decode rank knows of them."""
        assert self.servers is not None
        return self.servers

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """Whether a prefill server was looked up; if not, that is done in the background."""
        return self.servers is not None and self.servers.is_found(bootstrap_addr)

    def should_verify_kv_checksum(self, bootstrap_addr: str) -> bool:
        """Whether SGLang's own checksum of a request is of the bytes that this rank has.

        It comes with the first token, from the first tensor-parallel rank, which digests what itself has.
        """
        server = self.prefill_servers.get(bootstrap_addr)
        return (
            server is not None
            and (server.info.attn_tp_size, server.info.page_size) == (self.attn_tp_size, self.kv_args.page_size)
            and not server.is_divided
            and self.pp_size == self.place.token_parts == 1
            and self.attn_tp_rank == 0
        )

    def _refusal(self, info: PrefillServerInfo, address: str) -> str | None:
        """Returns why this side and a prefill server cannot work together, beyond their layouts; None if they can."""
        uncut = f"--page-size, since pages of {', '.join(self.caches.uncut)} cannot be cut between tokens,"
        pairs = (
            (uncut, info.page_size if self.caches.uncut else None, self.kv_args.page_size),
            ("--kv-cache-dtype", info.kv_cache_dtype, self.kv_cache_dtype_str),
            ("KV layout", kv_layout(info), kv_layout(self)),
            ("--disaggregation-decode-allocation-policy", info.decode_allocation_policy, "early"),
        )
        return difference(address, pairs)

    def number_of(self, room: int, request: Any) -> int:
        """Returns the number that SGLang's tables have a new sender or receiver under, as `RoomNumbers.take`."""
        number = self.rooms.take(room, request)
        if number == room:
            self.request_status.pop(room, None)  # of a request that SGLang dropped
        return number

    # ---- rooms of a decode rank -------------------------------------------------------------------------------------

    def receives(self, room: int, receiver: Receiver | JointReceiver) -> None:
        """Remembers the receiver of a room that was opened."""
        self._receivers.setdefault(room, []).append(receiver)

    def received(self, room: int) -> None:
        """Forgets the receivers of a room that SGLang is done with, but for those whose pages may be written to."""
        left = [each for each in self._receivers.pop(room, []) if not each.pages_reusable]
        if left:
            self._receivers[room] = left

    def is_abort_release_safe(self, bootstrap_room: int, required_acks: int) -> bool:
        """Whether no write can reach a room's pages any more: proven, whatever was acknowledged.

        SGLang asks by number alone: where that was used again, those of all who had it count.
        """
        return all(each.pages_reusable for each in self._receivers.get(bootstrap_room, []))

    def clear_deferred_abort_state(self, bootstrap_room: int) -> None:
        """Forgets a failed room whose pages SGLang has taken back."""
        self.received(bootstrap_room)

    # ---- requests that were retracted, and that the prefill side computes again -----------------------------------

    def _resolve_rebootstrap_prefill_url(self, kv_receiver: Any) -> str | None:
        """Returns where the request's prefill server takes requests.

        SGLang's own knows none while a prefill server is to be looked up again, as after another request's failure.
        """
        address = kv_receiver.bootstrap_addr
        server = self.prefill_servers.get(address)
        return server.http_url(address) if server is not None else None

    def _fail_prefill_recompute(self, kv_receiver: Any, reason: str) -> None:
        """Fails a request that the prefill server would not compute again, on a thread of SGLang's.

        Its answer may come when the request has its cache, or its room's number is another's.
        """
        if not kv_receiver.is_over:
            kv_receiver.fail(reason)

    # ---- this rank --------------------------------------------------------------------------------------------------

    def _own_bootstrap_address(self) -> str:
        """Returns the address of this server's own bootstrap server, as `register_to_bootstrap` finds it."""
        if self.dist_init_addr:
            host = NetworkAddress.parse(self.dist_init_addr).resolved().host
        else:
            host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.bootstrap_host, self.bootstrap_host)  # noqa: S104
        return str(NetworkAddress(host, self.bootstrap_port).to_host_port_str())


class RoomNumbers:
    """The numbers that SGLang's tables have senders and receivers under."""

    def __init__(self) -> None:
        self._requests: WeakValueDictionary[int, Any] = WeakValueDictionary()  # senders or receivers, by room
        self._private = itertools.count(-2, -1)  # numbers that no room has

    def take(self, room: int, request: Any) -> int:
        """Returns the number for a new sender or receiver.

        That is its room's, unless another request has it, or no room can: then one of its own, so that it can fail
        alone.
        """
        has_it = room in ROOMS and self._requests.setdefault(room, request) is request
        return room if has_it else next(each for each in self._private if each != room)

    def free(self, room: int, request: Any) -> None:
        """Frees a room's number, once SGLang is done with the request."""
        if self._requests.get(room) is request:
            del self._requests[room]
