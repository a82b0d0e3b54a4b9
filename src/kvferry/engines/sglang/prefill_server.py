"""What a decode rank has looked up of a prefill server."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.disaggregation.common.conn import PrefillServerInfo
from sglang.srt.utils.network import NetworkAddress


@dataclass(frozen=True, slots=True)
class PrefillServer:
    """What a decode rank has looked up of a prefill server.

    Attributes:
        engine: its name.
        http_url: where it takes requests; None if it does not say.
        attn_tp_size: how many tensor-parallel ranks it has.
        page_tokens: tokens in its pages; None if it does not say.
        refusal: why the two cannot work together; None if they can.
    """

    engine: str
    http_url: str | None
    attn_tp_size: int
    page_tokens: int | None
    refusal: str | None


def http_url(bootstrap_address: str, info: PrefillServerInfo) -> str | None:
    """Returns where a prefill server takes requests, by what its bootstrap server says; None if it says nothing."""
    port = getattr(info, "prefill_http_port", None)
    if port is None:
        return None
    return str(NetworkAddress(NetworkAddress.parse(bootstrap_address).host, port).to_url())
