"""Gateways in front of a prefill and a decode server of vLLM's: what each sends to whom, and in which order.

Stand-ins: written here from what the real ones send, whose names and versions docs/gateways.md has. They choose no
servers, balance nothing and keep no state; each speaks its protocol and no other.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import httpx

_ANSWER_S = 60.0
_NOTHING_YET = {"remote_engine_id": None, "remote_block_ids": None, "remote_host": None, "remote_port": None}


class Gateway(ABC):
    """Asks a prefill and a decode server for a client.

    Attributes:
        asks_at_once: whether it asks both at once.
    """

    asks_at_once: ClassVar[bool]

    def __init__(self, prefill_url: str, decode_url: str, client: httpx.Client | None = None) -> None:
        """Takes the servers.

        Args:
            client: what asks them; one of its own if None.
        """
        self._prefill, self._decode = prefill_url, decode_url
        self._client = client or httpx.Client(timeout=_ANSWER_S, trust_env=False)

    @abstractmethod
    def ask(self, body: Mapping[str, Any], path: str = "/v1/completions") -> httpx.Response:
        """Returns what the decode server answers, or what the prefill server says where it refuses."""

    def _post(self, url: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> httpx.Response:
        return self._client.post(url, json=body, headers=dict(headers))


class _OneAfterTheOther(Gateway):
    """Hands the decode server the parameters that the prefill server has answered."""

    asks_at_once = False

    def ask(self, body: Mapping[str, Any], path: str = "/v1/completions") -> httpx.Response:
        headers = {"X-Request-Id": str(uuid.uuid4())}
        answered = self._post(f"{self._prefill}{path}", self.of_prefill(body), headers)
        if not answered.is_success:
            return answered
        return self._post(f"{self._decode}{path}", self.of_decode(body, answered.json()), headers)

    @abstractmethod
    def of_prefill(self, body: Mapping[str, Any]) -> dict[str, Any]: ...

    @abstractmethod
    def of_decode(self, body: Mapping[str, Any], answered: Mapping[str, Any]) -> dict[str, Any]: ...


class ToyProxy(_OneAfterTheOther):
    """As vLLM's `toy_proxy_server.py`."""

    def of_prefill(self, body: Mapping[str, Any]) -> dict[str, Any]:
        asked = {name: value for name, value in body.items() if name not in ("stream_options", "min_tokens")}
        return _one_token(asked) | {"kv_transfer_params": _of_prefill(**_NOTHING_YET)}

    def of_decode(self, body: Mapping[str, Any], answered: Mapping[str, Any]) -> dict[str, Any]:
        parameters = answered.get("kv_transfer_params")
        return {**body, "kv_transfer_params": parameters} if parameters else dict(body)


class Nixlv2Sidecar(_OneAfterTheOther):
    """As llm-d's sidecar with `--kv-connector nixlv2`, which is in front of the decode server."""

    def of_prefill(self, body: Mapping[str, Any]) -> dict[str, Any]:
        asked = {name: value for name, value in body.items() if name != "stream_options"}
        limits = {"max_tokens": 1, "max_completion_tokens": 1}
        return {**asked, **limits, "stream": False, "kv_transfer_params": _of_prefill(**_NOTHING_YET)}

    def of_decode(self, body: Mapping[str, Any], answered: Mapping[str, Any]) -> dict[str, Any]:
        return {**body, "kv_transfer_params": as_go_reads(answered.get("kv_transfer_params"))}


class _AtOnce(Gateway):
    """Names the transfer to both servers, and does not look at what the prefill server says."""

    asks_at_once = True

    def ask(self, body: Mapping[str, Any], path: str = "/v1/completions") -> httpx.Response:
        headers, transfer = {"X-Request-Id": str(uuid.uuid4())}, f"xfer-{uuid.uuid4()}"
        rank, of_decode = self.engine()
        of_decode |= {"do_remote_decode": False, "do_remote_prefill": True, "transfer_id": transfer}
        of_prefill = _one_token({name: value for name, value in body.items() if name != "stream_options"})
        of_prefill["kv_transfer_params"] = self.of_prefill(transfer)
        with ThreadPoolExecutor(1) as aside:
            aside.submit(self._post, f"{self._prefill}{path}", of_prefill, headers | rank)
            return self._post(f"{self._decode}{path}", {**body, "kv_transfer_params": of_decode}, headers)

    @abstractmethod
    def engine(self) -> tuple[dict[str, str], dict[str, Any]]:
        """Returns headers that choose an engine of the prefill server, and what tells the decode server of it."""

    @abstractmethod
    def of_prefill(self, transfer: str) -> dict[str, Any]: ...


class MooncakeSidecar(_AtOnce):
    """As llm-d's sidecar with `--kv-connector mooncake`, and vLLM's `mooncake_connector_proxy.py`."""

    def engine(self) -> tuple[dict[str, str], dict[str, Any]]:
        rank, entry = next(iter(self._client.get(f"{self._prefill}/query").raise_for_status().json().items()))
        told = {"remote_engine_id": entry["engine_id"], "remote_bootstrap_addr": self._prefill}
        return {"X-data-parallel-rank": rank}, told

    def of_prefill(self, transfer: str) -> dict[str, Any]:
        return _of_prefill(transfer_id=transfer)


class PushProxy(_AtOnce):
    """As vLLM's `disagg_proxy_pushconnector_demo.py`, in its form with `transfer_id`; it is told the engine's name."""

    engine_id: ClassVar[str] = "prefill-0"

    def engine(self) -> tuple[dict[str, str], dict[str, Any]]:
        told = {"remote_engine_id": self.engine_id, "remote_host": "127.0.0.1", "remote_port": 5600}
        return {}, {**told, "tp_size": 1, "pp_size": 1, "remote_request_id": str(uuid.uuid4())}

    def of_prefill(self, transfer: str) -> dict[str, Any]:
        return _of_prefill(**_NOTHING_YET, transfer_id=transfer)


GATEWAYS: tuple[type[Gateway], ...] = (ToyProxy, Nixlv2Sidecar, MooncakeSidecar, PushProxy)


def as_go_reads(value: Any) -> Any:
    """Returns a JSON value as a gateway in Go hands it on, which takes every number for one of 64 bits with a point."""
    if isinstance(value, dict):
        return {name: as_go_reads(each) for name, each in value.items()}
    if isinstance(value, list):
        return [as_go_reads(each) for each in value]
    return int(float(value)) if isinstance(value, int) and not isinstance(value, bool) else value


def _one_token(body: Mapping[str, Any]) -> dict[str, Any]:
    limits = {name: 1 for name in ("max_tokens", "max_completion_tokens") if name == "max_tokens" or name in body}
    return {**body, **limits, "stream": False}


def _of_prefill(**more: Any) -> dict[str, Any]:
    return {"do_remote_decode": True, "do_remote_prefill": False, **more}
