"""What outlives a request on a rank: the endpoint, and what a decode rank has looked up of prefill servers."""

from __future__ import annotations

import itertools
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.disaggregation.base.conn import KVArgs, StateType
from sglang.srt.disaggregation.common.conn import CommonKVManager, PrefillServerInfo
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_disagg, get_exec, get_model, get_parallel, get_spec
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.network import NetworkAddress

from kvferry import (
    DecodeEndpoint,
    Device,
    Entry,
    MemoryKind,
    PrefillEndpoint,
    RankCoordinates,
    RankLayout,
    Receiver,
    TransferState,
)
from kvferry.engines.device_threads import bind_thread
from kvferry.engines.fingerprint import CacheIdentity
from kvferry.engines.sglang import stock
from kvferry.engines.sglang.compressed import rings_of
from kvferry.engines.sglang.contract import engine_version
from kvferry.engines.sglang.device_events import DeviceEvents
from kvferry.engines.sglang.directory import Directory, ask, difference, registry_url
from kvferry.engines.sglang.heads import loaded_modules, totals_by_layer
from kvferry.engines.sglang.hisparse import JointReceiver, apart, beside, is_hisparse, stage
from kvferry.engines.sglang.hooks import check_hooks, check_pages_are_kept
from kvferry.engines.sglang.host_memory import host_arguments
from kvferry.engines.sglang.identity import cache_identity
from kvferry.engines.sglang.layer_steps import LayerSteps, layer_steps
from kvferry.engines.sglang.layouts import describe
from kvferry.engines.sglang.look_ups import LookUps
from kvferry.engines.sglang.metadata_rows import MetadataRows
from kvferry.engines.sglang.options import check_options
from kvferry.engines.sglang.placement import placement_of
from kvferry.engines.sglang.pools import caches_of, draft_modules
from kvferry.engines.sglang.prefill_server import PrefillServer, described, http_url
from kvferry.engines.sglang.settings import settings_beside
from kvferry.engines.sglang.versions import kv_layout
from kvferry.engines.sglang.weights import Weights
from kvferry.errors import (
    IncompatiblePeerError,
    RegistryError,
    RegistryUnreachableError,
    TransferError,
    UnknownRoomError,
    UsageError,
)
from kvferry.loggers import logger_of

log = logger_of(__name__)


class KVFerryManager(CommonKVManager):  # type: ignore[misc]
    """A rank's endpoint. Made and called by SGLang's scheduler.

    Attributes:
        state_types: what the rank caches beside keys and values.
        rings: how long DeepSeek V4's rings are; None with another model.
        metadata_rows: SGLang's metadata buffers.
        device_events: waits for the device, on a prefill rank.
        layer_steps: sends layers while the model computes the next ones; None where they leave with their step alone.
        weights: what the rank says of them by now.
        is_released: whether SGLang has given the memory of the caches away, for now: there is no endpoint then.
        place: where the rank stands.
        groups: what it caches is in pages, or slots, of these groups.
        is_hisparse: whether sparse attention reads from host memory: `host` and `decode` receive a request together.
        stock_peers: answers decode servers without kvferry, on a prefill rank.
    """

    supports_deferred_decode_kv_release = True
    supports_role_switch = True
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
            UsageError: if an option is on that kvferry does not do.
            LayoutError: if the caches cannot be described.
            KVFerryError: if memory cannot be registered, or the bootstrap server does not answer.
        """
        check_hooks()
        if disaggregation_mode is DisaggregationMode.DECODE:
            limit = envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT
            check_pages_are_kept(limit_is_users=limit.is_set())
        check_options(args, disaggregation_mode)
        super().__init__(args, disaggregation_mode, server_args, is_mla_backend)
        self.state_types: tuple[StateType, ...] = tuple(args.state_types)
        self.metadata_rows = MetadataRows(tuple(args.aux_data_ptrs), tuple(args.aux_item_lens))
        self.place = placement_of(self, get_parallel())
        # SGLang's sender compares it with the room, or registers it: with plain --dp-size it is 0 on every replica.
        self.attn_dp_rank = self.place.coordinates.dp_rank
        self.is_dummy_cp_rank = False  # ranks that hold the same take turns: SGLang would have the first one send
        if get_disagg().disaggregation_enable_kv_checksum and self.attn_tp_size > 1 and self.attn_tp_rank == 0:
            log.warning(
                "--disaggregation-enable-kv-checksum: SGLang's checksum comes with the first token, from the first "
                "tensor-parallel rank, so that the first of %d ranks alone is verified, and only where the other side "
                "has as many. KVFERRY_CHECKSUMS=1 on the decode side verifies all, where caches are in CPU memory",
                self.attn_tp_size,
            )
        device = _device(server_args.device, args.gpu_id)
        self.device_events = DeviceEvents(partial(bind_thread, device))
        self._prefill: PrefillEndpoint | None = None
        self._decode: DecodeEndpoint | None = None
        self._host: DecodeEndpoint | None = None
        self.is_released = False
        self._settings = settings_beside(
            envs.SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT.get(), envs.SGLANG_DISAGGREGATION_WAITING_TIMEOUT.get()
        )
        model = ModelConfig.from_server_args(server_args)
        is_divided = self.place.tp_size > 1  # else a rank has all heads
        totals = totals_by_layer(loaded_modules(apart_from=draft_modules(args))) if is_divided else {}
        caches = caches_of(args, model, mambaish_config(model), totals, place=self.place)
        self._fingerprint = _identity(args, model).fingerprint()
        self.weights = Weights(self._fingerprint["weights"])
        self.rings = rings_of(args.kvferry_pools.target)
        self.is_hisparse = is_hisparse(args.kvferry_pools)
        if self.is_hisparse and self.place.token_parts > 1:
            raise UsageError(
                f"--enable-hisparse where {self.place.token_parts} ranks divide the tokens of a request: kvferry has "
                "not tried it. Leave --dcp-size or --enable-kv-cache-sharding away"
            )
        self._host_layout: RankLayout | None = None
        if self.is_hisparse:
            on_host, caches = apart(caches)
            self._host_layout = describe(on_host, self.place, Device(MemoryKind.DRAM))
        self._layout = describe(caches, self.place, device)
        if self._host_layout is not None:
            there, here = self._host_layout, self._layout
            self._host_layout, self._layout = beside(there, here), beside(here, there)
        self.layer_steps: LayerSteps | None = None
        if disaggregation_mode is DisaggregationMode.PREFILL and self._settings.layer_ranges > 1:
            self.layer_steps = layer_steps(args, self._layout, self._settings.layer_ranges)
        host = host_arguments(args)
        self.supports_host_destination = host is not None
        if host is not None:
            caches = caches_of(host, model, None, totals, place=self.place)
            self._host_layout = describe(caches, self.place, Device(MemoryKind.DRAM))
        self.groups = frozenset(group.name for group in self._layout.groups)
        layouts = [self._layout] if self._host_layout is None else [self._layout, self._host_layout]
        uncut = {each.name for layout in layouts for each in layout.components if each.entry is Entry.PAGE}
        self._uncut = sorted(uncut)
        self.look_ups: LookUps[PrefillServerInfo] | None = None
        self._servers: dict[str, PrefillServer] = {}  # by bootstrap address
        self._connections: dict[tuple[str, int], Future[None]] = {}  # by engine and data-parallel rank
        self._requests: WeakValueDictionary[int, Any] = WeakValueDictionary()  # senders or receivers, by room
        self._private = itertools.count(-2, -1)  # numbers that no room has
        self._stock_aborts = ThreadPoolExecutor(1, "kvferry-sglang-stock")  # a decode rank's
        self._receivers: dict[int, Receiver | JointReceiver] = {}
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

    def renew_weights(self) -> None:
        """Says to peers what the weights are by now, where they are others. What is on its way fails on both sides.

        Raises:
            KVFerryError: as `Endpoint.renew`.
        """
        said = self.weights.said
        if said == self._fingerprint["weights"]:
            return
        self._fingerprint = {**self._fingerprint, "weights": said}
        for endpoint in () if self.is_released else self._endpoints:
            side = "prefill" if endpoint is self._prefill else "decode"
            endpoint.renew(self._fingerprint, f"the {side} server's weights were replaced while it ran")

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
        self.device_events.close()
        for endpoint in self._endpoints:
            endpoint.close()
        self._stock_aborts.shutdown(wait=False, cancel_futures=True)
        if self.look_ups is not None:
            self.look_ups.close()
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
        return self._layout.device.kind is MemoryKind.VRAM

    @property
    def prefill(self) -> PrefillEndpoint:
        """The endpoint of a prefill rank."""
        assert self._prefill is not None
        return self._prefill

    @property
    def decode(self) -> DecodeEndpoint:
        """The endpoint of a decode rank."""
        assert self._decode is not None
        return self._decode

    @property
    def host(self) -> DecodeEndpoint:
        """The endpoint of a decode rank that receives into host memory."""
        if self._host is None:
            raise UsageError("SGLang did not say where a request's cache could be in host memory")
        return self._host

    @property
    def _endpoints(self) -> tuple[PrefillEndpoint | DecodeEndpoint, ...]:
        return tuple(each for each in (self._prefill, self._decode, self._host) if each is not None)

    def _open(self) -> None:
        if self.disaggregation_mode is DisaggregationMode.PREFILL:
            address = self._own_bootstrap_address()
            announcement = ask(address)
            where = self._settings.model_copy(
                update={"registry_url": registry_url(address, announcement, self._settings)}
            )
            self._prefill = PrefillEndpoint(
                self._layout,
                engine=announcement.engine,
                coordinates=self.place.coordinates,
                settings=where,
                host_registry=False,
                fingerprint=self._fingerprint,
            )
            return
        self._directory = Directory(self._settings, lost=self.forget_prefill)
        self.prefill_info_table.clear()  # another directory knows no server: each is looked up anew
        self._connections.clear()
        if self.look_ups is not None:
            self.look_ups.close()
        self.look_ups = LookUps(self._look_up, self.prefill_info_table)
        here = self.place.coordinates
        if self.is_hisparse:
            assert self._host_layout is not None
            self._host = self._receiving(self._host_layout, "sglang-decode", stage(here, 0))
            self._decode = self._receiving(self._layout, "sglang-decode", stage(here, 1))
            return
        self._decode = self._receiving(self._layout, "sglang-decode", here)
        if self._host_layout is not None:
            self._host = self._receiving(self._host_layout, "sglang-decode-host", here)

    def _receiving(self, layout: RankLayout, engine: str, coordinates: RankCoordinates) -> DecodeEndpoint:
        return DecodeEndpoint(
            layout,
            engine=engine,
            coordinates=coordinates,
            settings=self._settings,
            registry=self._directory,
            fingerprint=self._fingerprint,
        )

    def _close_endpoints(self) -> None:
        for endpoint in self._endpoints:
            endpoint.close()
            if pages := endpoint.status().quarantined_pages:
                raise TransferError(
                    f"{pages} pages of SGLang's caches may still be {'read' if self._prefill else 'written'} by a "
                    f"transfer that has ended here, {self._settings.close_timeout_s:g} s (KVFERRY_CLOSE_TIMEOUT_S) "
                    "after it was told to stop: their memory must not be given away"
                )

    # ---- prefill servers, as a decode rank knows them ---------------------------------------------------------------

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """Whether a prefill server was looked up; if not, that is done in the background."""
        return self.look_ups is not None and self.look_ups.is_found(bootstrap_addr)

    def why_not_found(self, bootstrap_address: str, since: float, now: float) -> str | None:
        """Returns why a request that has waited since then for a look-up should wait no longer; None if it should."""
        problem = self.look_ups.problem(bootstrap_address, since) if self.look_ups is not None else None
        longest_s = self._settings.bootstrap_timeout_s
        if now - since < (longest_s if problem is None else problem.wait_s(longest_s)):
            return None
        reason = problem.error if problem is not None else "it has not answered yet"
        return f"the prefill server at {bootstrap_address} was not found within {now - since:.1f} s: {reason}"

    def connection(self, engine: str, dp_rank: int) -> Future[None]:
        """Returns what has a result once the ranks of a prefill engine are connected, and an error if they cannot be.

        Raises:
            KVFerryError: as `DecodeEndpoint.connecting`.
        """
        key = engine, dp_rank
        known = self._connections.get(key)
        if known is None or (known.done() and known.exception() is not None):
            known = self._connections[key] = self.decode.connecting(engine, prefill_dp_rank=dp_rank)
        return known

    def engine_at(self, bootstrap_address: str) -> str:
        """Returns the name of the prefill engine behind a bootstrap server.

        Raises:
            IncompatiblePeerError: if the two servers cannot work together.
        """
        server = self._servers[bootstrap_address]
        if server.refusal is not None:
            self.forget_prefill(bootstrap_address)  # it may come back with other options
            raise IncompatiblePeerError(server.refusal)
        return server.engine

    def refuse(self, bootstrap_address: str, room: int, prefill_dp_rank: int, reason: str) -> None:
        """Tells a prefill server that was looked up that a room will not be opened here.

        Args:
            prefill_dp_rank: the data-parallel group there that has the request.
            reason: why, in words.
        """
        server = self._servers.get(bootstrap_address)
        if server is not None and not server.engine:
            self._stock_aborts.submit(stock.abort, self._zmq_ctx, bootstrap_address, server.info, room, prefill_dp_rank)
        elif server is not None:
            self.decode.refuse(room, reason, engine=server.engine, prefill_dp_rank=prefill_dp_rank)

    def forget_prefill(self, bootstrap_address: str) -> None:
        """Makes the next request look a prefill server up again: another one may have come in its place."""
        self.prefill_info_table.pop(bootstrap_address, None)
        server = self._servers.get(bootstrap_address)
        for key in list(self._connections):
            if server is not None and key[0] == server.engine:
                self._connections.pop(key, None)

    def should_verify_kv_checksum(self, bootstrap_addr: str) -> bool:
        """Whether SGLang's own checksum of a request is of the bytes that this rank has.

        It comes with the first token, from the first tensor-parallel rank, which digests what itself has.
        """
        server = self._servers.get(bootstrap_addr)
        return (
            server is not None
            and (server.attn_tp_size, server.page_tokens) == (self.attn_tp_size, self.kv_args.page_size)
            and not server.is_divided
            and self.pp_size == self.place.token_parts == 1
            and self.attn_tp_rank == 0
        )

    def has_other_pages(self, bootstrap_address: str) -> bool:
        """Whether pages of a prefill server that was looked up have another size than this side's."""
        own: int = self.kv_args.page_size
        return self._servers[bootstrap_address].page_tokens != own

    def _look_up(self, address: str) -> PrefillServerInfo:
        """Looks up the prefill server behind a bootstrap server. Runs in the background."""
        engine, refusal = "", None
        try:
            announcement = ask(address)
        except RegistryUnreachableError:
            raise
        except RegistryError as error:
            try:
                info = described(address)
            except RegistryError:
                raise error from None
            refusal = str(error)  # a server of SGLang's, without kvferry
        else:
            engine, info = announcement.engine, described(address)
            self._directory.add(engine, registry_url(address, announcement, self.decode.settings), address)
        self._servers[address] = PrefillServer(
            engine=engine,
            info=info,
            http_url=http_url(address, info),
            attn_tp_size=info.attn_tp_size,
            page_tokens=info.page_size,
            is_divided=info.pp_size > 1 or getattr(info, "enable_kv_cache_sharding", False),
            refusal=refusal or self._refusal(info, address),
        )
        return info

    def _refusal(self, info: PrefillServerInfo, address: str) -> str | None:
        """Returns why this side and a prefill server cannot work together, beyond their layouts; None if they can."""
        uncut = f"--page-size, since pages of {', '.join(self._uncut)} cannot be cut between tokens,"
        pairs = (
            (uncut, info.page_size if self._uncut else None, self.kv_args.page_size),
            ("--kv-cache-dtype", info.kv_cache_dtype, self.kv_cache_dtype_str),
            ("KV layout", kv_layout(info), kv_layout(self)),
            ("--disaggregation-decode-allocation-policy", info.decode_allocation_policy, "early"),
        )
        return difference(address, pairs)

    # ---- requests, by the numbers of their rooms --------------------------------------------------------------------

    def number_of(self, room: int, request: Any) -> int:
        """Returns the number that SGLang's tables have a new sender or receiver under.

        That is its room's, unless another request has it: then one of its own, so that it can fail alone.
        """
        if self._requests.setdefault(room, request) is not request:
            return next(self._private)
        self.request_status.pop(room, None)  # of a request that SGLang dropped
        return room

    def forget_request(self, room: int, request: Any) -> None:
        """Frees a room's number, once SGLang is done with the request."""
        if self._requests.get(room) is request:
            del self._requests[room]

    # ---- rooms of a decode rank -------------------------------------------------------------------------------------

    def receives(self, room: int, receiver: Receiver | JointReceiver) -> None:
        """Remembers the receiver of a room that was opened."""
        self._receivers[room] = receiver

    def received(self, room: int) -> None:
        """Forgets a room that SGLang is done with, unless its pages may still be written to."""
        receiver = self._receivers.get(room)
        if receiver is not None and receiver.pages_reusable:
            del self._receivers[room]

    def is_abort_release_safe(self, bootstrap_room: int, required_acks: int) -> bool:
        """Whether no write can reach a room's pages any more: proven, whatever was acknowledged."""
        receiver = self._receivers.get(bootstrap_room)
        return receiver is None or receiver.pages_reusable

    def clear_deferred_abort_state(self, bootstrap_room: int) -> None:
        """Forgets a failed room whose pages SGLang has taken back."""
        self._receivers.pop(bootstrap_room, None)

    # ---- requests that were retracted, and that the prefill side computes again -----------------------------------

    def _resolve_rebootstrap_prefill_url(self, kv_receiver: Any) -> str | None:
        """Returns where the request's prefill server takes requests.

        SGLang's own knows none while a prefill server is to be looked up again, as after another request's failure.
        """
        server = self._servers.get(kv_receiver.bootstrap_addr)
        return server.http_url if server is not None else None

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


def _identity(args: KVArgs, model: Any) -> CacheIdentity:
    return cache_identity(
        args,
        model,
        given=get_model(),
        speculative=get_spec(),
        execution=get_exec(),
        version=engine_version(),
    )


def _device(name: str, index: int) -> Device:
    kinds = {"cpu": MemoryKind.DRAM, "cuda": MemoryKind.VRAM}
    if name not in kinds:
        raise UsageError(f"--device is {name}: kvferry transfers between pools of cpu and cuda")
    return Device(kinds[name], index if name == "cuda" else 0)
