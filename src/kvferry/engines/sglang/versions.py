"""What SGLang 0.5.22 has otherwise than the version after it. Nothing else here knows one version from another.

When 0.5.22 is dropped, this module goes, and `_in_0_5_22` in `contract.py`; what calls them says what stays.
"""

from __future__ import annotations

import abc
from typing import Any, NoReturn, TypeVar

T = TypeVar("T", bound=type)


def kv_layout(described: Any) -> str | None:
    """Returns the order within pages that a server's caches, or its description, say; 0.5.22 has one order only.

    Args:
        described: KVArgs, a manager, or a PrefillServerInfo.
    """
    return getattr(described, "kv_layout", None)


def completed(request: T) -> T:
    """Adds to a sender or receiver of ours what 0.5.22's own have not; with 0.5.23 it stays what it is."""
    if "failure_exception" in request.__abstractmethods__:  # type: ignore[attr-defined]  # an ABC's
        for name, value in _ADDED.items():
            setattr(request, name, value)
        abc.update_abstractmethods(request)
    return request


def _trace_ctx(_: Any) -> Any:
    from sglang.srt.observability.trace import TraceNullContext

    return TraceNullContext()


def _failure_exception(self: Any) -> NoReturn:
    """Raises why the request failed, and forgets it, as 0.5.23's own do."""
    from sglang.srt.disaggregation.base.conn import KVPoll
    from sglang.srt.disaggregation.common.conn import KVTransferError

    self.conclude_state = KVPoll.Failed
    self.clear()
    with self.kv_mgr.failure_lock:
        reason = self.kv_mgr.failure_records.pop(self.bootstrap_room, None)
    raise KVTransferError(
        self.bootstrap_room,
        reason or "Failed due to an unknown reason from another rank",
        is_from_another_rank=reason is None,
    )


_ADDED: dict[str, Any] = {
    "failure_exception": _failure_exception,
    "trace_ctx": property(_trace_ctx),
    "_early_send_wait_event": None,
}


def refused(
    manager: type, *, is_decode: bool, has_checksums: bool, has_rust_server: bool, divides_tokens: bool
) -> dict[str, bool]:
    """Returns options that 0.5.22 does not let us do, and whether each is on.

    Args:
        is_decode: whether the server is a decode server.
        has_checksums: whether SGLang is to compare checksums.
        has_rust_server: whether SGLang's server is the one in Rust.
        divides_tokens: whether ranks compute, or keep, other tokens of a request than others.
    """
    if hasattr(manager, "should_verify_kv_checksum"):
        return {}
    return {
        # On every rank with the first prefill rank's. What the decode side had already was never the prefill side's,
        # and another rank has other heads: it finds faults where there are none.
        "--disaggregation-enable-kv-checksum with SGLang 0.5.22, which digests whole prompts (KVFERRY_CHECKSUMS=1 "
        "finds what it would)": has_checksums,
        "SGLANG_RUST_SERVER on the prefill side with SGLang 0.5.22, which starts no bootstrap server but its own "
        "there": has_rust_server and not is_decode,
        "context parallelism and --enable-kv-cache-sharding with SGLang 0.5.22, whose managers do not say which tokens "
        "a rank has": divides_tokens,
    }
