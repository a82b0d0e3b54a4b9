"""What outlives a request on a rank: the endpoint, and what a decode rank has looked up of prefill servers."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any

import msgspec
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.disaggregation.base.conn import KVArgs, StateType
from sglang.srt.disaggregation.common.conn import CommonKVManager, PrefillServerInfo
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_disagg, get_exec, get_model, get_spec
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.network import NetworkAddress

from kvferry import DecodeEndpoint, Device, Entry, MemoryKind, PrefillEndpoint, RankCoordinates, Receiver
from kvferry.engines.fingerprint import CacheIdentity
from kvferry.engines.sglang.compressed import ring_places
from kvferry.engines.sglang.directory import Directory, ask, difference, get, registry_url
from kvferry.engines.sglang.heads import loaded_modules, totals_by_layer
from kvferry.engines.sglang.hooks import check_hooks, check_pages_are_kept
from kvferry.engines.sglang.identity import cache_identity
from kvferry.engines.sglang.layouts import describe
from kvferry.engines.sglang.metadata_rows import MetadataRows
from kvferry.engines.sglang.options import check_options
from kvferry.engines.sglang.plugin import engine_version
from kvferry.engines.sglang.pools import caches_of
from kvferry.engines.sglang.settings import settings_beside
from kvferry.engines.sglang.versions import kv_layout
from kvferry.errors import IncompatiblePeerError, RegistryError, UsageError, quoted

log = logging.getLogger(__name__)

_FIRST_CONTACT_S = 0.1
"""How long the scheduler waits for the first look-up of a prefill server; then it goes on, and tries again a second
later."""

_ANY_RANK = "prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"


@dataclass(frozen=True, slots=True)
class PrefillServer:
    """What a decode rank has looked up of a prefill server.

    Attributes:
        engine: its name.
        attn_tp_size: how many tensor-parallel ranks it has.
        page_tokens: tokens in its pages; None if it does not say.
        refusal: why the two cannot work together; None if they can.
    """

    engine: str
    attn_tp_size: int
    page_tokens: int | None
    refusal: str | None


class KVFerryManager(CommonKVManager):  # type: ignore[misc]
    """A rank's endpoint. Made and called by SGLang's scheduler.

    Attributes:
        state_types: what the rank caches beside keys and values.
        ring_places: how many places a request's ring of a window has; None where windows are in no rings.
        metadata_rows: SGLang's metadata buffers.
    """

    supports_deferred_decode_kv_release = True

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
        self._coordinates = self._place()
        if get_disagg().disaggregation_enable_kv_checksum and self.attn_tp_size > 1 and self.attn_tp_rank == 0:
            log.warning(
                "--disaggregation-enable-kv-checksum: SGLang's checksum comes with the first token, from the first "
                "tensor-parallel rank, so that the first of %d ranks alone is verified, and only where the other side "
                "has as many. KVFERRY_CHECKSUMS=1 on the decode side verifies all, where caches are in CPU memory",
                self.attn_tp_size,
            )
        self._prefill: PrefillEndpoint | None = None
        self._decode: DecodeEndpoint | None = None
        settings = settings_beside(
            envs.SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT.get(), envs.SGLANG_DISAGGREGATION_WAITING_TIMEOUT.get()
        )
        model = ModelConfig.from_server_args(server_args)
        totals = totals_by_layer(loaded_modules()) if self.attn_tp_size > 1 else {}  # one rank has all heads
        caches = caches_of(args, model, mambaish_config(model), totals, place=self._coordinates)
        fingerprint = _identity(args, model).fingerprint()
        self.ring_places = ring_places(args.kvferry_pools.target)
        layout = describe(caches, self._coordinates, _device(server_args.device, args.gpu_id))
        self._uncut = [each.name for each in layout.components if each.entry is Entry.PAGE]
        if disaggregation_mode is DisaggregationMode.PREFILL:
            address = self._own_bootstrap_address()
            announcement = ask(address)
            where = settings.model_copy(update={"registry_url": registry_url(address, announcement, settings)})
            self._prefill = PrefillEndpoint(
                layout,
                engine=announcement.engine,
                coordinates=self._coordinates,
                settings=where,
                host_registry=False,
                fingerprint=fingerprint,
            )
            return
        self._directory = Directory(settings)
        self._decode = DecodeEndpoint(
            layout,
            engine="sglang-decode",
            coordinates=self._coordinates,
            settings=settings,
            registry=self._directory,
            fingerprint=fingerprint,
        )
        self._helper = ThreadPoolExecutor(4, "kvferry-sglang-look-up")
        self._look_ups: dict[str, Future[PrefillServerInfo]] = {}
        self._servers: dict[str, PrefillServer] = {}  # by bootstrap address
        self._receivers: dict[int, Receiver] = {}

    def close(self) -> None:
        """Closes the endpoint, within the settings' close_timeout_s."""
        for endpoint in (self._prefill, self._decode):
            if endpoint is not None:
                endpoint.close()
        # SGLang's manager has a socket that nothing here uses. Left to the garbage collector, a context can wait for
        # its socket for ever, in whatever thread it is collected.
        self._zmq_ctx.destroy(linger=0)

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

    # ---- prefill servers, as a decode rank knows them ---------------------------------------------------------------

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """Whether a prefill server was looked up; if not, that is done in the background."""
        if bootstrap_addr in self.prefill_info_table:
            return True
        look_up = self._look_ups.get(bootstrap_addr)
        if look_up is None:
            look_up = self._look_ups[bootstrap_addr] = self._helper.submit(self._look_up, bootstrap_addr)
        try:
            info = look_up.result(_FIRST_CONTACT_S)
        except FutureTimeoutError:
            return False
        except Exception as error:  # whatever a server answers, the scheduler goes on
            log.error("the prefill server at %s cannot be used: %s", bootstrap_addr, error)
            del self._look_ups[bootstrap_addr]
            return False
        del self._look_ups[bootstrap_addr]
        self.prefill_info_table[bootstrap_addr] = info
        return True

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
        if server is not None:
            self.decode.refuse(room, reason, engine=server.engine, prefill_dp_rank=prefill_dp_rank)

    def forget_prefill(self, bootstrap_address: str) -> None:
        """Makes the next request look a prefill server up again: another one may have come in its place."""
        self.prefill_info_table.pop(bootstrap_address, None)

    def should_verify_kv_checksum(self, bootstrap_addr: str) -> bool:
        """Whether SGLang's own checksum of a request is of the bytes that this rank has.

        It comes with the first token, from the first tensor-parallel rank, which digests what itself has.
        """
        server = self._servers.get(bootstrap_addr)
        return (
            server is not None
            and (server.attn_tp_size, server.page_tokens) == (self.attn_tp_size, self.kv_args.page_size)
            and self.attn_tp_rank == 0
        )

    def has_other_pages(self, bootstrap_address: str) -> bool:
        """Whether pages of a prefill server that was looked up have another size than this side's."""
        own: int = self.kv_args.page_size
        return self._servers[bootstrap_address].page_tokens != own

    def _look_up(self, address: str) -> PrefillServerInfo:
        """Looks up the prefill server behind a bootstrap server. Runs in the background."""
        announcement = ask(address)
        answer = get(address, f"/route?{_ANY_RANK}")
        if answer.status != 200:
            said = quoted(RegistryError(answer.body[:200].decode(errors="replace")))
            raise RegistryError(f"the bootstrap server at {address} is not ready (status {answer.status}): {said}")
        info = PrefillServerInfo(**msgspec.json.decode(answer.body))
        self._directory.add(announcement.engine, registry_url(address, announcement, self.decode.settings))
        refusal = self._refusal(info, address)
        self._servers[address] = PrefillServer(announcement.engine, info.attn_tp_size, info.page_size, refusal)
        return info

    def _refusal(self, info: PrefillServerInfo, address: str) -> str | None:
        """Returns why this side and a prefill server cannot work together, beyond their layouts; None if they can."""
        uncut = f"--page-size, since pages of {', '.join(self._uncut)} cannot be cut between tokens,"
        pairs = (
            (uncut, info.page_size if self._uncut else None, self.kv_args.page_size),
            ("--kv-cache-dtype", info.kv_cache_dtype, self.kv_cache_dtype_str),
            ("KV layout", kv_layout(info), kv_layout(self)),
            ("--disaggregation-decode-allocation-policy", info.decode_allocation_policy, "early"),
            ("attention context parallelism", info.attn_cp_size, 1),
        )
        return difference(address, pairs)

    # ---- rooms of a decode rank -------------------------------------------------------------------------------------

    def receives(self, room: int, receiver: Receiver) -> None:
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

    # ---- this rank --------------------------------------------------------------------------------------------------

    def _place(self) -> RankCoordinates:
        # As SGLang's bootstrap server numbers them.
        is_system_wide = self.system_dp_size > 1
        return RankCoordinates(
            tp_rank=self.attn_tp_rank,
            tp_size=self.attn_tp_size,
            pp_rank=self.pp_rank,
            pp_size=self.pp_size,
            dp_rank=self.system_dp_rank if is_system_wide else self.attn_dp_rank,
            dp_size=self.system_dp_size if is_system_wide else self.attn_dp_size,
        )

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
