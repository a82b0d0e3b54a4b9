"""What a decode rank has looked up of a prefill server."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import msgspec
from sglang.srt.disaggregation.common.conn import PrefillServerInfo
from sglang.srt.utils.network import NetworkAddress

from kvferry.engines.sglang.directory import get
from kvferry.errors import RegistryError, quoted

_ANY_RANK = "prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"
_ANSWER = msgspec.json.Decoder(dict[str, Any])


@dataclass(frozen=True, slots=True)
class PrefillServer:
    """What a decode rank has looked up of a prefill server.

    Attributes:
        engine: its name; empty if it does not run kvferry.
        info: what its bootstrap server says of it.
        http_url: where it takes requests; None if it does not say.
        attn_tp_size: how many tensor-parallel ranks it has.
        page_tokens: tokens in its pages; None if it does not say.
        is_divided: whether one of its tensor-parallel ranks has a part of the layers, or of a request's pages, alone.
        refusal: why the two cannot work together; None if they can.
    """

    engine: str
    info: PrefillServerInfo
    http_url: str | None
    attn_tp_size: int
    page_tokens: int | None
    is_divided: bool
    refusal: str | None


def described(bootstrap_address: str) -> PrefillServerInfo:
    """Requests what a prefill server's bootstrap server says of it. What this SGLang has no field for is ignored.

    Raises:
        RegistryUnreachableError: if nothing answers.
        RegistryError: if the server is not ready, or does not say what this SGLang must know.
    """
    answer = get(bootstrap_address, f"/route?{_ANY_RANK}")
    if answer.status != 200:
        said = quoted(RegistryError(answer.body[:200].decode(errors="replace")))
        raise RegistryError(
            f"the bootstrap server at {bootstrap_address} is not ready (status {answer.status}): {said}"
        )
    try:
        told = _ANSWER.decode(answer.body)
        return PrefillServerInfo(
            **{each.name: told[each.name] for each in fields(PrefillServerInfo) if each.name in told}
        )
    except (msgspec.MsgspecError, TypeError) as error:
        problem = quoted(error)
        raise RegistryError(
            f"what the bootstrap server at {bootstrap_address} says of its server is not understood: {problem}; is it "
            "another SGLang than this one?"
        ) from error


def http_url(bootstrap_address: str, info: PrefillServerInfo) -> str | None:
    """Returns where a prefill server takes requests, by what its bootstrap server says; None if it says nothing."""
    port = getattr(info, "prefill_http_port", None)
    if port is None:
        return None
    return str(NetworkAddress(NetworkAddress.parse(bootstrap_address).host, port).to_url())
