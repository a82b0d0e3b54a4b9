"""What SGLang 0.5.22 has otherwise, with classes like SGLang's: no SGLang is needed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.engines.sglang.contract import SERVING, TRIED
from kvferry.engines.sglang.versions import completed, kv_layout, refused


class Older:
    """Like CommonKVManager in 0.5.22."""


class Newer:
    """Like that in 0.5.23."""

    def should_verify_kv_checksum(self, bootstrap_addr: str) -> bool:
        raise NotImplementedError


class BaseRequest(ABC):
    """Like BaseKVSender in both."""

    @abstractmethod
    def failure_exception(self) -> None: ...


def test_each_version_has_one_contract():
    assert [each.tried for each in SERVING] == [(version,) for version in TRIED]


@pytest.mark.parametrize("is_decode", [False, True])
def test_what_0_5_22_cannot_do_is_refused(is_decode: bool):
    def found(manager: type, *, is_on: bool) -> list[str]:
        options = refused(
            manager, is_decode=is_decode, has_checksums=is_on, has_rust_server=is_on, divides_tokens=is_on
        )
        return [name.partition(" with ")[0] for name, is_refused in options.items() if is_refused]

    everywhere = ["--disaggregation-enable-kv-checksum", "context parallelism and --enable-kv-cache-sharding"]
    of_prefill_servers = [] if is_decode else ["SGLANG_RUST_SERVER on the prefill side"]
    assert found(Older, is_on=True) == [everywhere[0], *of_prefill_servers, everywhere[1]]
    assert found(Older, is_on=False) == found(Newer, is_on=True) == []


def test_a_request_of_0_5_22_is_completed():
    request: Any = type("Request", (BaseRequest,), {})
    with pytest.raises(TypeError, match="failure_exception"):
        request()
    assert completed(request) is request
    assert request()._early_send_wait_event is None


def test_a_request_of_0_5_23_stays_what_it_is():
    class Request(BaseRequest):
        def failure_exception(self) -> None:
            raise NotImplementedError

    before = dict(vars(Request))
    assert completed(Request) is Request
    assert dict(vars(Request)) == before


def test_0_5_22_knows_no_other_order_within_pages():
    assert kv_layout(SimpleNamespace()) is None
    assert kv_layout(SimpleNamespace(kv_layout="page-major")) == "page-major"
