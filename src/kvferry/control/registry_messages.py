"""The messages between the registry and its clients over HTTP, beside the registrations themselves.

    PUT    /v1/engines/{engine}/ranks/{rank}                      RankRegistration -> Lease
    DELETE /v1/engines/{engine}/ranks/{rank}?incarnation={id}     -> Removal
    GET    /v1/engines                                            -> EngineList
    GET    /v1/engines/{engine}                                   -> EngineView
    PUT    /v1/draining/{engine}                                  -> ToldToDrain
    PUT    /v1/released/{endpoint}                                -> Released
    GET    /v1/released                                           -> Released
    GET    /health                                                -> Health

All bodies are JSON. Every answer that is not a success is a `Problem`. A registry with a secret refuses every request
without `Authorization: Bearer` and the token that comes of it (`credentials`): status 401, and the connection ends.

The answer about an engine has an `ETag`: whoever sends it back with `If-None-Match` gets status 304 and no body where
nothing has changed. Where ranks of it are missing, `Retry-After` says in how many seconds to ask again, if many ask.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvferry.protocol.wire.field_types import EndpointName
from kvferry.protocol.wire.registrations import (
    MOST_ENGINES,
    MOST_NAMED,
    MOST_RANKS,
    MOST_RELEASED,
    EngineView,
    KnownEngine,
)

API_VERSION = 1
"""The `v1` of the routes. A client of another version does not find them."""

LARGEST_BODY_BYTES = 64 * 1024
"""The largest body of a request. A registration takes less than one kilobyte."""

LONGEST_LEASE_S = 86400.0
"""A lease longer than a day would keep dead ranks listed for longer than anyone would wait."""

LONGEST_RETRY_S = 10.0
"""No `Retry-After` is longer: whoever waits for an engine finds it soon after it has come, however many wait."""

LONGEST_PROBLEM = 16 * 1024
"""Characters of a `Problem`'s message."""

UNKNOWN_ENGINE = "UnknownEngine"
"""The `error` of a `Problem` that says that the engine has no live rank."""


class Lease(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A registration was granted: it lasts `lease_s` seconds unless it is renewed.

    Attributes:
        renew_s: after how many seconds to renew it; a third of the lease if None, as registries of older releases have
            it.
        return_s: over how many seconds to spread what ranks do at once, as in `Grant`.
        draining: whether an operator has told the rank to drain.
    """

    lease_s: Annotated[float, msgspec.Meta(gt=0, le=LONGEST_LEASE_S)]
    renew_s: Annotated[float, msgspec.Meta(gt=0, le=LONGEST_LEASE_S)] | None = None
    return_s: Annotated[float, msgspec.Meta(ge=0, le=LONGEST_LEASE_S)] = 0.0
    draining: bool = False


class Removal(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the removal ended a lease; if not, this incarnation held none."""

    removed: bool


class EngineList(msgspec.Struct, frozen=True, kw_only=True):
    """Every engine that has a live rank, by name."""

    engines: Annotated[tuple[EngineView, ...], msgspec.Meta(max_length=MOST_ENGINES)]


class Released(msgspec.Struct, frozen=True, kw_only=True):
    """Endpoints that an operator says have ended: a start of a rank each."""

    endpoints: Annotated[tuple[EndpointName, ...], msgspec.Meta(max_length=MOST_RELEASED)]


class ToldToDrain(msgspec.Struct, frozen=True, kw_only=True):
    """Endpoints that an operator has told to drain: a start of a rank each."""

    endpoints: Annotated[tuple[EndpointName, ...], msgspec.Meta(max_length=MOST_RANKS)]


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of a registry that is up.

    Attributes:
        version: the version of kvferry that it runs.
        api_version: the version of its routes and messages.
        uptime_s: seconds since it started; the registrations are no older.
    """

    version: Annotated[str, msgspec.Meta(max_length=128)]
    api_version: int
    uptime_s: float


class Problem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why a request failed.

    Attributes:
        error: the kind, mostly the name of one of kvferry's errors.
        message: a sentence for a person.
        others: where an engine is unknown, the names of others, as in `EngineView`.
        num_others: likewise, how many there are.
    """

    error: Annotated[str, msgspec.Meta(max_length=128)]
    message: Annotated[str, msgspec.Meta(max_length=LONGEST_PROBLEM)]
    others: Annotated[tuple[KnownEngine, ...], msgspec.Meta(max_length=MOST_NAMED)] = ()
    num_others: Annotated[int, msgspec.Meta(ge=0, le=MOST_ENGINES)] = 0
