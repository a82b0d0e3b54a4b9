"""The settings of kvferry, typed, with their environment variables.

The environment is read here and nowhere else. A value passed to `Settings` wins over the environment variable, which
wins over the default. What only one part of kvferry reads stands beside its code, in a class of `OWNERS`.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, SecretStr, ValidationError, model_validator
from pydantic.fields import FieldInfo

from kvferry.cpus import usable_cpus
from kvferry.errors import SettingsError
from kvferry.hosts import Lack, bracketed, hosts_of, is_loopback, is_wildcard, lacks
from kvferry.plan.cost import TransferPath
from kvferry.plan.fingerprint import parse_field_names
from kvferry.protocol.links.proofs import Proof, names_of, parse_proofs
from kvferry.secret_files import checked_secret, private_text
from kvferry.spelling import PREFIX, hint

_LAST_PORT = 65535
OWNERS = (
    "kvferry.control.etcd.address:EtcdSettings",
    "kvferry.control.kubernetes:KubernetesSettings",
    "kvferry.control.kubernetes:PodSettings",
    "kvferry.observe.settings:ObserveSettings",
    "kvferry.staging.sizes:StagingSettings",
    "kvferry.transport.mooncake.settings:MooncakeSettings",
    "kvferry.transport.nixl.settings:NixlSettings",
)
"""Where the settings of single parts are: named and not imported, since they lie in layers above."""


def default_workers(cpus: int) -> int:
    """Returns how many transfer workers suit a machine: an eighth of half its CPUs, from 4 to 12."""
    return min(max(4, int(0.5 * cpus) // 8), 12)


def default_gather_workers(cpus: int) -> int:
    """Returns how many threads gather: one for every eight CPUs, at least 1 and at most 4.

    Each can nearly fill a wire, and takes processors from the engine.
    """
    return min(max(1, cpus // 8), 4)


def default_scatter_workers(cpus: int) -> int:
    """Returns how many threads of their own scatter: one for every eight CPUs, at most 4; on a small machine none."""
    return min(cpus // 8, 4)


def default_nixl_threads(cpus: int) -> int:
    """Returns how many threads share a write: a few copy as fast as a machine's memory is."""
    return min(cpus, 4)


class OwnSettings(BaseModel):
    """Settings of one part of kvferry, beside its code: `Settings` reads and checks them, `Settings.of` returns them.

    Raises:
        SettingsError: if a value is impossible, naming the variable, the value and what is allowed.
    """

    # Values are hidden in pydantic's own errors: a secret, or a setting whose name was misspelled, may be among them.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            problems = []
            for item in error.errors():
                name = ".".join(str(part) for part in item["loc"])
                variable = f" ({PREFIX}{name.upper()})" if name else ""
                # What has no such name, or should have none, may be a secret under a misspelled one.
                field = type(self).model_fields.get(name)
                value = f" = {item['input']!r}" if field is not None and not is_secret(field) else ""
                problems.append(f"{name}{variable}{value}: {item['msg']}" if name else item["msg"])
            raise SettingsError("; ".join(problems)) from None  # pydantic's error holds the values themselves


OwnT = TypeVar("OwnT", bound=OwnSettings)


class Settings(OwnSettings):
    """Settings of one endpoint. Each is also an environment variable: `workers` is KVFERRY_WORKERS.

    Those of `OWNERS` are given here, too, and kept beside the fields: `of` returns them.

    Raises:
        SettingsError: if a value is impossible, naming the variable, the value and what is allowed.
    """

    model_config = ConfigDict(extra="allow")

    host: str = Field("127.0.0.1", description="Address that the peer channel binds to.")
    advertise_host: str | None = Field(
        None,
        description="Address that peers connect to. By default host, or where that is a wildcard such as 0.0.0.0 or "
        "::, the address of this machine that packets to the registry leave from; docs/hosts.md.",
    )
    control_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="Port of the peer channel: this port plus the rank's number; 0 takes any free one.",
    )
    advertise_port: int | None = Field(
        None,
        ge=1,
        le=65535,
        description="Port that peers connect to: this port plus the rank's number; needed where it is not the peer "
        "channel's own, as behind a container's port mapping or a proxy.",
    )

    registry_host: str = Field("127.0.0.1", description="Address that an embedded registry binds to.")
    registry_port: int = Field(8998, ge=0, le=65535, description="Port of an embedded registry; 0 takes any free one.")
    registry_url: str | None = Field(
        None,
        description="Where the registry answers; by default at registry_host and registry_port. "
        "etcd://a:2379,b:2379,c:2379/prefix names the members of an etcd cluster, etcds:// those that speak TLS, and "
        "what all keys begin with, else /kvferry.",
    )
    registry_lease_s: float = Field(
        10.0,
        gt=0,
        le=3600,
        description="How long a registration lasts without renewal; of whoever runs the registry, or of prefill ranks "
        "where it is etcd, in whole seconds.",
    )

    secret: SecretStr | None = Field(
        None,
        description="Secret that all endpoints and the registry share: without it nobody can register, connect or "
        "look anything up. At least 16 characters, such as `openssl rand -hex 32` prints.",
    )
    secret_file: Path | None = Field(
        None, description="A file with the secret, instead of the secret itself; only its owner may read it."
    )
    allow_unauthenticated: bool = Field(
        False, description="Listen on other addresses than loopback without a secret, for everyone who reaches them."
    )
    registry_tls_certificate: Path | None = Field(
        None, description="Certificate (PEM) of the registry, which then serves TLS; with registry_tls_key."
    )
    registry_tls_key: Path | None = Field(None, description="The certificate's private key (PEM), unencrypted.")
    registry_tls_ca: Path | None = Field(
        None,
        description="Certificates (PEM) that clients trust for a registry with TLS; else those that httpx trusts.",
    )

    transport: str = Field(
        "nixl",
        max_length=256,
        description="What moves the bytes, on both sides the same: nixl, mooncake, or a class of your own as "
        "package.module:ClassName.",
    )
    nixl_threads: int = Field(
        default_factory=lambda: default_nixl_threads(usable_cpus()),
        ge=0,
        le=256,
        description="Threads that share a prefill rank's large direct writes, each with a NIXL connection of its own "
        "to every decode rank; with 0 or 1 the workers write, one at a time.",
    )

    workers: int = Field(
        default_factory=lambda: default_workers(usable_cpus()),
        ge=1,
        le=256,
        description="Threads that move chunks on the prefill side.",
    )
    gather_workers: int = Field(
        default_factory=lambda: default_gather_workers(usable_cpus()),
        ge=1,
        le=64,
        description="Threads that gather and write on the prefill side, where bytes go through staging memory.",
    )
    scatter_workers: int = Field(
        default_factory=lambda: default_scatter_workers(usable_cpus()),
        ge=0,
        le=64,
        description="Threads that put staged bytes into their pages on the decode side; with 0 its own thread does.",
    )
    queues: int = Field(
        4, ge=1, le=256, description="Queues that rooms are spread over; no more are used than there are workers."
    )
    path: Literal["auto", "direct", "staged", "mapped"] = Field(
        "auto",
        description="Which way bytes go: straight from pages to pages, through staging memory, or whichever of the two "
        "is faster. mapped, on both sides, is for GPUs of one host: a prefill rank maps decode ranks' pools and copies "
        "into their pages by a kernel (docs/design/paths.md says at which risk).",
    )
    direct_mib: float = Field(
        1024.0,
        gt=0,
        le=2**24,
        description="Most bytes of direct writes that a prefill rank has on their way at a time; what is posted uses "
        "the wire even when nobody waits for it any more. Further writes wait for their turn; a larger one goes alone.",
    )
    direct_receiver_mib: float = Field(
        256.0, gt=0, le=2**24, description="The same, to one decode rank: one that is slow holds up no other."
    )
    checksums: bool = Field(
        False,
        description="Digest every page where it is read, and again where it has arrived, before a transfer succeeds. "
        "The decode side's setting counts; pools must be in CPU memory. The decode side takes a thread for it even "
        "where scatter_workers is 0.",
    )

    may_differ: str | None = Field(
        None,
        description="Fields of the fingerprint that may differ between prefill and decode ranks, with commas between, "
        "such as weights,quantization: for who knows that a difference changes no cached value, or little enough. Of "
        "both sides; each logs what it lets pass. Else a peer whose caches mean something else is refused.",
    )
    bootstrap_timeout_s: float = Field(60.0, gt=0, description="Longest wait for the two sides to find each other.")
    waiting_timeout_s: float = Field(
        300.0, gt=0, description="Longest wait without progress while it is the caller's or the peer's turn."
    )
    write_timeout_s: float = Field(
        60.0,
        gt=0,
        description="Longest time in which no write to a decode rank ends or progresses while one is on its way.",
    )
    heartbeat_interval_s: float = Field(2.0, gt=0, description="Time between two heartbeats to a prefill rank.")
    peer_timeout_s: float = Field(15.0, gt=0, description="Silence after which a peer counts as lost.")
    close_timeout_s: float = Field(5.0, ge=0, description="How long close waits for writes that are on their way.")
    drain_grace_s: float = Field(
        5.0,
        ge=0,
        description="How long an endpoint that is told to drain still takes new rooms: of requests that gateways had "
        "sent here before they saw it. Engines that refuse new requests by themselves let all come that they have.",
    )
    drain_timeout_s: float = Field(
        60.0,
        gt=0,
        description="How long after an operator's word or a SIGTERM rooms may stay open; those that still are are "
        "aborted then, caches among them that no decode side has fetched. docs/drain.md.",
    )
    quarantine_s: float = Field(
        2.0,
        ge=0,
        description="How long after a prefill rank's process has ended, or a write has failed, the network may still "
        "deliver what was sent. After a failed write each side counts it, one after the other, while it runs.",
    )
    end_proofs: str = Field(
        "process,rank,operator",
        description="What counts as proof that a lost prefill rank's process has ended, with commas between: process "
        "(this machine's), rank (a prefill rank beside it says so), kubernetes (the API says so of its pod), operator "
        "(kvferry release). Of the decode side; docs/kubernetes.md.",
    )
    unproven_path: Literal["staged", "auto"] = Field(
        "staged",
        description="Path from prefill ranks whose end neither process nor kubernetes can prove, where path is auto: "
        "after a crash pages come back at once from staged, and only by another proof from auto.",
    )
    max_rooms: int = Field(
        65_536, ge=1, description="Rooms that may be open at once on a rank; more are refused when they are opened."
    )
    layer_ranges: int = Field(
        1,
        ge=1,
        le=1024,
        description="Into how many ranges an engine's layers are divided at most, each of which leaves once it is "
        "computed; 1 sends all layers when a step is over. Of the prefill side; docs/vllm.md, docs/sglang.md.",
    )
    max_decode_ranks: int = Field(
        4096, ge=1, description="Decode ranks that may be connected to a prefill rank at a time."
    )

    _shared_secret: SecretStr | None = PrivateAttr(None)

    def __init__(self, **values: Any) -> None:
        given = {**_given_by_environment(), **values}
        problems, owned = list[str](), dict[str, Any]()
        for owner in owners():
            try:
                owned |= owner(**_those_of(owner, given))
            except SettingsError as error:
                problems.append(str(error))
        for name in values:
            if name not in all_fields():
                problems.append(f"{name} ({PREFIX}{name.upper()}): no such setting; {hint(name, all_fields())}")
        try:
            super().__init__(**_those_of(Settings, given), **owned)
        except SettingsError as error:
            problems.insert(0, str(error))
        if problems:
            raise SettingsError("; ".join(problems))
        try:
            self._shared_secret = self._read_secret()
        except SettingsError as error:
            problems.append(str(error))
        missing = [*lacks(self)]
        problems += self._lacking(missing)
        if problems:
            raise SettingsError("; ".join(problems), missing=[lack.name for lack in missing])

    def of(self, owner: type[OwnT]) -> OwnT:
        """Returns those of one part, as they were given, or copied, here."""
        return owner.model_construct(**{name: getattr(self, name) for name in owner.model_fields})

    @model_validator(mode="after")
    def _check(self) -> Settings:
        if self.advertise_host is not None and is_wildcard(self.advertise_host):
            raise ValueError(
                f"advertise_host (KVFERRY_ADVERTISE_HOST) is {self.advertise_host!r}, which peers cannot connect to: "
                "set it to an address of this machine that they reach, or leave it out"
            )
        if self.peer_timeout_s <= self.heartbeat_interval_s:
            raise ValueError(
                f"peer_timeout_s (KVFERRY_PEER_TIMEOUT_S) is {self.peer_timeout_s:g}: it must be longer than "
                f"heartbeat_interval_s (KVFERRY_HEARTBEAT_INTERVAL_S), {self.heartbeat_interval_s:g}"
            )
        try:
            parse_proofs(self.end_proofs)
        except ValueError as error:
            raise ValueError(
                f"end_proofs (KVFERRY_END_PROOFS) is {self.end_proofs!r}: {error}; allowed are {names_of(list(Proof))}"
            ) from None
        try:
            parse_field_names(self.may_differ or "")
        except ValueError as error:
            raise ValueError(f"may_differ (KVFERRY_MAY_DIFFER) is {self.may_differ!r}: {error}") from None
        if (self.registry_tls_certificate is None) != (self.registry_tls_key is None):
            raise ValueError(
                "registry_tls_certificate (KVFERRY_REGISTRY_TLS_CERTIFICATE) and registry_tls_key "
                "(KVFERRY_REGISTRY_TLS_KEY) belong together: set both, or neither"
            )
        return self

    def _read_secret(self) -> SecretStr | None:
        """Reads the secret from the setting that has it.

        Raises:
            SettingsError: if it is too short or too long, or others could read it. The message never contains it.
        """
        if self.secret is None and self.secret_file is None:
            return None
        if self.secret is not None and self.secret_file is not None:
            raise SettingsError(
                "secret (KVFERRY_SECRET) and secret_file (KVFERRY_SECRET_FILE) are both set: leave one out"
            )
        if self.secret_file is None:
            assert self.secret is not None
            return checked_secret(self.secret.get_secret_value(), "secret (KVFERRY_SECRET)")
        text = private_text(self.secret_file, "secret_file", "a new secret")
        return checked_secret(text, f"the secret in {self.secret_file}")

    def _lacking(self, found: Collection[Lack]) -> Iterator[str]:
        """Says all that is missing where others reach this rank, if it is refused without some of it."""
        if any(lack.is_refused for lack in found):
            doors = [f"{name} ({PREFIX}{name.upper()}) is {host!r}" for name, host in self._beyond_loopback()]
            yield f"{' and '.join(doors)}, which asks for more: " + "; ".join(
                f"{lack.name} ({PREFIX}{lack.name.upper()}) is not set: {lack.why}" for lack in found
            )

    def _beyond_loopback(self) -> Iterator[tuple[str, str]]:
        hosts = (("host", self.host), ("registry_host", self.registry_host))
        return ((name, host) for name, host in hosts if not is_loopback(host))

    @property
    def has_secret(self) -> bool:
        """Whether peers must prove that they know a secret."""
        return self._shared_secret is not None

    @property
    def shared_secret(self) -> str | None:
        """The secret itself, whichever setting has it: not for messages or logs."""
        return None if self._shared_secret is None else self._shared_secret.get_secret_value()

    def of_rank(self, engine_rank: int) -> Settings:
        """Returns the settings of one rank of an engine, whose ports are those of rank 0 plus its number.

        Raises:
            SettingsError: if there is no such port.
        """
        ports = {"control_port": self.control_port, "advertise_port": self.advertise_port}
        moved = {name: port + engine_rank for name, port in ports.items() if port}
        for name, port in moved.items():
            if port > _LAST_PORT:
                raise SettingsError(
                    f"{name} ({PREFIX}{name.upper()}) is {ports[name]}: rank {engine_rank} would have port {port}, and "
                    f"{_LAST_PORT} is the last one. Choose a lower one"
                )
        return self.model_copy(update=moved)

    @property
    def is_on_loopback(self) -> bool:
        """Whether nothing here reaches beyond this machine: neither host nor the registry does."""
        return is_loopback(self.host) and all(map(is_loopback, hosts_of(self.registry_address)))

    @property
    def forced_path(self) -> TransferPath | None:
        """The only path that may be taken; None where the cost model chooses."""
        return None if self.path == "auto" else TransferPath(self.path)

    @property
    def proofs(self) -> frozenset[Proof]:
        """What counts as proof of a process's end."""
        return parse_proofs(self.end_proofs)

    @property
    def fields_that_may_differ(self) -> frozenset[str]:
        """Fields of the fingerprint that may differ between the two sides."""
        return parse_field_names(self.may_differ or "")

    @property
    def registry_address(self) -> str:
        """The registry's URL."""
        has_tls = self.registry_tls_certificate is not None or self.registry_tls_ca is not None
        scheme = "https" if has_tls else "http"
        return self.registry_url or f"{scheme}://{bracketed(self.registry_host)}:{self.registry_port}"

    @property
    def used_queues(self) -> int:
        """How many queues are used: a queue without a worker would stand still."""
        return min(self.queues, self.workers)


def _given_by_environment() -> dict[str, str]:
    """Returns what the environment says of settings, by their names. Those of variables may be in small letters."""
    given = {name.upper(): value for name, value in os.environ.items()}
    return {name.removeprefix(PREFIX).lower(): value for name, value in given.items() if name.startswith(PREFIX)}


def _those_of(owner: type[OwnSettings], given: dict[str, Any]) -> dict[str, Any]:
    return {name: given[name] for name in owner.model_fields if name in given}


@cache
def owners() -> tuple[type[OwnSettings], ...]:
    """Returns the classes of `OWNERS`."""
    places = (each.split(":") for each in OWNERS)
    return tuple(getattr(importlib.import_module(module), name) for module, name in places)


@cache
def all_fields() -> Mapping[str, FieldInfo]:
    """Returns every setting that there is, by its name."""
    classes: tuple[type[OwnSettings], ...] = (Settings, *owners())
    return {name: field for each in classes for name, field in each.model_fields.items()}


NO_SETTINGS = frozenset({f"{PREFIX}SGLANG_REPLACES_NIXL"})
"""Variables that are no settings, but mean something."""


def known_variables() -> frozenset[str]:
    """Returns the names of all environment variables that mean something here."""
    return NO_SETTINGS | {f"{PREFIX}{name.upper()}" for name in all_fields()}


def is_secret(field: FieldInfo) -> bool:
    """Whether nobody is shown a field's value."""
    return SecretStr in get_args(field.annotation)


def environment() -> dict[str, str]:
    """Returns all of this process's environment, for tools that show it or pass it on."""
    return dict(os.environ)


_changing = threading.Lock()  # global, since the environment is the process's


@contextlib.contextmanager
def environment_with(name: str, value: str) -> Iterator[None]:
    """Sets a variable for as long as a library starts that reads it and can be told in no other way.

    One such library at a time, so that what was there before is there afterwards.
    """
    with _changing:
        before = os.environ.get(name)
        os.environ[name] = value
        try:
            yield
        finally:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before
