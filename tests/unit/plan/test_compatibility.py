"""What two sides cannot exchange is refused with both values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvferry.errors import IncompatiblePeerError
from kvferry.layout import Component, RankLayout, attention_components, empty_shard, latent_component
from kvferry.plan import check_exchangeable

MODEL: dict[str, Any] = {"num_layers": 2, "num_kv_heads": 4, "head_dim": 8, "dtype": "float16"}


def layout(*components: Component, page_tokens: int = 16, num_pages: int = 3) -> RankLayout:
    return RankLayout(
        shards=tuple(empty_shard(each, page_tokens=page_tokens, num_pages=num_pages) for each in components)
    )


def attention(**changes: Any) -> tuple[Component, ...]:
    return attention_components(**{**MODEL, **changes})


def check(source: RankLayout, destination: RankLayout) -> None:
    check_exchangeable(source, destination, source_name="prefill", destination_name="decode")


def refusal(source: RankLayout, destination: RankLayout) -> str:
    with pytest.raises(IncompatiblePeerError) as caught:
        check(source, destination)
    return str(caught.value)


def test_different_pools_and_orders_of_the_same_model_are_fine():
    k, v = attention()
    check(layout(k, v, num_pages=3), layout(v, k, num_pages=np.int64(1000).item()))


@pytest.mark.parametrize(
    ("changes", "prefill", "decode"),
    [
        ({"num_layers": 3}, "(layer 2, head 4, dim 8)", "(layer 3, head 4, dim 8)"),
        ({"num_kv_heads": 8}, "(layer 2, head 4, dim 8)", "(layer 2, head 8, dim 8)"),
        ({"head_dim": 16}, "(layer 2, head 4, dim 8)", "(layer 2, head 4, dim 16)"),
        ({"dtype": "bfloat16"}, "float16", "bfloat16"),
    ],
)
def test_a_different_model_is_refused(changes: dict[str, Any], prefill: str, decode: str):
    message = refusal(layout(*attention()), layout(*attention(**changes)))
    for name in ("k", "v"):
        assert f"of '{name}': prefill {prefill}, decode {decode}" in message


def test_only_what_differs_is_named():
    message = refusal(layout(*attention()), layout(*attention(value_head_dim=4)))
    assert "'v'" in message
    assert "'k'" not in message


def test_a_different_page_size_is_refused():
    message = refusal(layout(*attention()), layout(*attention(), page_tokens=32))
    assert "page size: prefill has 16 tokens a page, decode 32" in message


def test_different_components_are_refused():
    latent = latent_component(num_layers=2, latent_dim=8, dtype="float16")
    message = refusal(layout(latent), layout(*attention()))
    assert "components: prefill has ['latent'], decode has ['k', 'v']" in message
    assert "components: prefill has ['k', 'v'], decode has ['k']" in refusal(
        layout(*attention()), layout(attention()[0])
    )


def test_everything_that_differs_is_named_at_once():
    message = refusal(layout(*attention()), layout(attention(num_kv_heads=2, dtype="int8")[0], page_tokens=1))
    for part in ("components:", "dtype of 'k'", "axes of 'k'", "page size:"):
        assert part in message


def test_the_names_of_the_sides_are_the_callers():
    with pytest.raises(IncompatiblePeerError, match="engine A has 16 tokens a page, engine B 8"):
        check_exchangeable(
            layout(*attention()),
            layout(*attention(), page_tokens=8),
            source_name="engine A",
            destination_name="engine B",
        )
