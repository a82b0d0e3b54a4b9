"""The registry, and endpoints that run: what they say of themselves and of each other."""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Iterator, Sequence

import httpx

from kvferry._version import __version__
from kvferry.answers import request
from kvferry.applications.top.asking import Sample, ask_once
from kvferry.applications.top.view import troubles
from kvferry.control.construction import create_registry_client
from kvferry.control.etcd.address import is_etcd
from kvferry.control.kubernetes import KubernetesSettings, PodSettings, create_kubernetes_client
from kvferry.errors import IncompatiblePeerError, KVFerryError, OrchestratorError, RegistryAccessError
from kvferry.findings import Finding, error, good, warning
from kvferry.observe.logs import clock_time
from kvferry.observe.status import EndpointStatus, Side
from kvferry.plan.fingerprint import check_same_fingerprint
from kvferry.protocol.links.proofs import Proof
from kvferry.protocol.wire.field_types import PodIdentity
from kvferry.settings import Settings

_MOST_SKEW_S = 1.0
_ANSWER_S = 2.0
_FAR_S = 0.02
_RETRANSMITTED_S = 0.18
"""By how much an answer is late of which a packet was lost: TCP waits 0.2 s before it sends one again."""

_LARGEST_ANSWER_BYTES = 64 * 1024
_LEAVES = "new requests are for other engines; it leaves when nothing is open"
_NOBODY = "kvferry-doctor-asks-for-nobody"


def registry(settings: Settings) -> Iterator[Finding]:
    """Whether the registry answers, and who is there."""
    where = settings.registry_address
    found: list[Finding] = []
    try:
        with create_registry_client(settings) as client:
            found += client.findings()
            engines = client.engines()
    except KVFerryError as problem:
        if settings.registry_url is None:
            yield good("registry", f"none at {where} yet: the first prefill rank will run one")
            return
        yield from found
        starting = "start its members" if is_etcd(where) else "start it with `kvferry registry`"
        remedy = f"{starting}, or mend KVFERRY_REGISTRY_URL"
        if is_etcd(where) and isinstance(problem, RegistryAccessError):
            remedy = "docs/etcd.md says who gets in, and how"
        yield error("registry", str(problem), remedy)
        return
    yield from found
    for engine in engines:
        ranks = f"{len(engine.registrations)} of {engine.world_size} ranks"
        if engine.draining:
            left = sum(each.open_rooms for each in engine.registrations)
            what = f"engine {engine.engine!r}: {ranks}, draining: {left} rooms are open"
            yield warning("registry", what, _LEAVES)
        elif engine.complete:
            yield good("registry", f"engine {engine.engine!r}: {ranks}")
        else:
            yield warning("registry", f"engine {engine.engine!r}: {ranks}", "start the others; look at their logs")


def orchestrator(settings: Settings) -> Iterator[Finding]:
    """Whether the Kubernetes API answers what a decode rank would ask it."""
    if Proof.KUBERNETES not in settings.proofs:
        return
    client, url = create_kubernetes_client(settings), settings.of(KubernetesSettings).kubernetes_url
    namespace = settings.of(PodSettings).pod_namespace or "default"
    try:
        # The API says that there is no such object only to those who may ask for it.
        client.pod(PodIdentity(uid=_NOBODY, name=_NOBODY, namespace=namespace))
        client.node(_NOBODY)
    except OrchestratorError as problem:
        yield error("kubernetes", str(problem), "docs/kubernetes.md has the role, and what to mount")
    else:
        yield good("kubernetes", f"{url} says which pods in {namespace!r} and which nodes there are")
    finally:
        client.close()


def endpoints(targets: Sequence[str], *, are_expected: bool) -> Iterator[Finding]:
    """How endpoints are that run, and whom they miss.

    Args:
        targets: hosts and ports of what they show.
        are_expected: whether the user has named them.
    """
    samples = ask_once(targets)
    for sample in samples:
        yield from endpoint_findings(sample, is_expected=are_expected)
    yield from _fingerprints([sample.status for sample in samples if sample.status is not None])
    for trouble in troubles([sample for sample in samples if sample.status is not None]):
        yield error("endpoints", trouble, "docs/observability.md says what to look at")


def endpoint_findings(sample: Sample, *, is_expected: bool) -> Iterator[Finding]:
    """Yields what an endpoint's status shows."""
    status = sample.status
    if status is None:
        if is_expected:
            yield error(
                "endpoints",
                f"{sample.address} {sample.problem}",
                sample.remedy or "is it an endpoint, and of this version?",
            )
        else:
            yield good("endpoints", f"nobody at {sample.address}")
        return
    rooms = sum(status.states.values())
    yield good(
        "endpoints",
        f"{sample.address}: {status.side.value} {status.engine}/{status.rank}, kvferry {status.version}, process "
        f"{status.process}, since {clock_time(status.up_s)}, {rooms} rooms, {len(status.peers)} peers"
        + (f", at {status.address}" if status.address else ""),
    )
    if status.is_draining:
        what = f"{sample.address} is draining: {status.load.open_rooms} rooms are open"
        yield warning("endpoints", what, _LEAVES)
    if status.version != __version__:
        yield warning("endpoints", f"{sample.address} runs {status.version}, this is {__version__}", "run the same")


def _fingerprints(statuses: Sequence[EndpointStatus]) -> Iterator[Finding]:
    """Whether the caches of prefill and decode endpoints mean the same: each pair of engines is named once."""
    sides = {side: {each.engine: each for each in statuses if each.side is side} for side in Side}
    for prefill, decode in itertools.product(sides[Side.PREFILL].values(), sides[Side.DECODE].values()):
        try:
            check_same_fingerprint(
                prefill.fingerprint,
                decode.fingerprint,
                may_differ=(),
                prefill_name=f"prefill engine {prefill.engine!r}",
                decode_name=f"decode engine {decode.engine!r}",
            )
        except IncompatiblePeerError as problem:
            yield warning("endpoints", str(problem), "they refuse each other, unless a setting of both lets it pass")


def peer(address: str) -> Iterator[Finding]:
    """Whether an endpoint on another machine fits this one: that it answers, how fast, and its clock.

    Args:
        address: host and port of what it shows.
    """
    sent_at, begun_at = time.time(), time.monotonic()
    (sample,) = ask_once([address])
    if sample.status is None:
        yield error("peer", f"{address} {sample.problem}", sample.remedy or "is it an endpoint, and of this version?")
        return
    took_s = time.monotonic() - begun_at
    yield from endpoint_findings(sample, is_expected=True)
    for trouble in troubles([sample]):
        yield error("peer", trouble, "docs/observability.md says what to look at")
    # Its clock was read somewhere between our asking and its answer.
    pending, late = sample.status.at_unix_s - (sent_at + took_s), sample.status.at_unix_s - sent_at
    skew_s = 0.0 if pending <= 0 <= late else min(abs(pending), abs(late))
    if skew_s > _MOST_SKEW_S:
        yield warning(
            "clock", f"that of {address} differs by {skew_s:.1f} s", "run an NTP client: logs and traces mislead"
        )
    else:
        yield good("clock", f"that of {address} differs by less than {max(skew_s, took_s):.2f} s")
    if sample.status.address:
        yield control_finding(sample.status.address)
    yield from _round_trip(address)


def control_finding(address: str) -> Finding:
    """Whether decode ranks here can connect to a prefill rank: its control port is another than the one asked."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _ANSWER_S).close()
    except OSError as problem:
        return error(
            "peer",
            f"decode ranks are told {address}, which cannot be connected to from here: {problem}",
            "let that port through (KVFERRY_CONTROL_PORT), or mend KVFERRY_ADVERTISE_HOST there; docs/hosts.md",
        )
    return good("peer", f"decode ranks are told {address}, which can be connected to from here")


def _round_trip(address: str) -> Iterator[Finding]:
    times = []
    with httpx.Client(trust_env=False, timeout=_ANSWER_S) as client:
        for _ in range(10):
            begun_at = time.monotonic()
            try:
                request(client, f"http://{address}/health", most_bytes=_LARGEST_ANSWER_BYTES, timeout_s=_ANSWER_S)
            except httpx.HTTPError as problem:
                yield error("peer", f"{address} answers at times only: {problem}", "look at the network in between")
                return
            times.append(time.monotonic() - begun_at)
    yield judged(address, times)


def judged(address: str, times: Sequence[float]) -> Finding:
    """What round trips of so many seconds mean."""
    middle_s, longest_s = sorted(times)[len(times) // 2], max(times)
    said = f"{address} answers within {middle_s * 1e3:.1f} ms"
    if longest_s > middle_s + _RETRANSMITTED_S:
        return warning(
            "peer",
            f"{said}, but once took {longest_s * 1e3:.0f} ms: packets get lost, or it is overloaded",
            "look at errors and drops of the interfaces on both sides: `ip -s link`",
        )
    if middle_s > _FAR_S:
        return warning(
            "peer",
            f"{said}: that is far. A transfer takes several such times, whatever its size",
            "is it in another place than meant, or is a link in between full?",
        )
    return good("peer", said)
