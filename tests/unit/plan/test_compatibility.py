"""What two sides cannot exchange is refused with both values."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvferry.errors import IncompatiblePeerError
from kvferry.layout import (
    Axis,
    Component,
    Interval,
    Paging,
    RankLayout,
    Shard,
    TokenPartition,
    TokenShare,
    attention_components,
    contiguous,
    empty_shard,
    interleaved,
    latent_component,
    packed_component,
    state_component,
    zigzag,
)
from kvferry.plan import check_exchangeable

MODEL: dict[str, Any] = {"num_layers": 2, "num_kv_heads": 4, "head_dim": 8, "dtype": "float16"}
EVERY_TOKEN = TokenPartition()
PACKED = packed_component("kv", num_layers=2, num_kv_heads=4, packed=8, dtype="int8", packing="cpu-1")


def layout(*components: Component, page_tokens: int = 16, num_pages: int = 3) -> RankLayout:
    return RankLayout(
        shards=tuple(empty_shard(each, page_tokens=page_tokens, num_pages=num_pages) for each in components)
    )


def attention(**changes: Any) -> tuple[Component, ...]:
    return attention_components(**{**MODEL, **changes})


def optional(component: Component) -> Component:
    return msgspec.structs.replace(component, is_optional=True)


def check(source: RankLayout, destination: RankLayout) -> None:
    check_exchangeable(source, destination, source_name="prefill", destination_name="decode")


def refusal(source: RankLayout, destination: RankLayout) -> str:
    with pytest.raises(IncompatiblePeerError) as caught:
        check(source, destination)
    message = str(caught.value)
    assert message.startswith("the two sides cannot exchange caches: ")
    return message


# --- components


def test_different_pools_pages_and_orders_of_the_same_model_are_fine():
    k, v = attention()
    check(layout(k, v, num_pages=3), layout(v, k, num_pages=1000, page_tokens=48))


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


def test_another_dtype_is_refused_and_not_converted():
    message = refusal(layout(*attention()), layout(*attention(dtype="float8_e4m3fn")))
    assert (
        "dtype of 'k': prefill float16, decode float8_e4m3fn, and kvferry converts no values; let both sides cache the "
        "same dtype" in message
    )


@pytest.mark.parametrize(
    ("theirs", "ours", "prefill", "decode"),
    [
        (None, 128, "every token", "the last 128 tokens"),
        (128, None, "the last 128 tokens", "every token"),
        (128, 64, "the last 128 tokens", "the last 64 tokens"),
    ],
)
def test_a_different_window_is_refused(theirs: int | None, ours: int | None, prefill: str, decode: str):
    message = refusal(layout(*attention(window_tokens=theirs)), layout(*attention(window_tokens=ours)))
    assert f"window of 'k': prefill keeps {prefill}, decode {decode}" in message


def test_only_what_differs_is_named():
    message = refusal(layout(*attention()), layout(*attention(value_head_dim=4)))
    assert "'v'" in message
    assert "'k'" not in message


def test_different_components_are_refused():
    latent = latent_component(num_layers=2, latent_dim=8, dtype="float16")
    message = refusal(layout(latent), layout(*attention()))
    assert "components: prefill has ['latent'], decode has ['k', 'v']" in message
    one = attention()[0]
    assert "components: prefill has ['k', 'v'], decode has ['k']" in refusal(layout(*attention()), layout(one))
    assert "components: prefill has ['k'], decode has ['k', 'v']" in refusal(layout(one), layout(*attention()))


def test_either_side_may_lack_what_is_optional():
    k, v = attention()
    check(layout(k, optional(v)), layout(k))
    check(layout(k), layout(k, optional(v)))
    check(layout(k, optional(v)), layout(k, v))
    assert "components:" in refusal(layout(k), layout(k, v))


def test_an_optional_component_that_both_have_must_be_the_same():
    theirs, ours = optional(attention()[0]), optional(attention(dtype="int8")[0])
    assert "dtype of 'k': prefill float16, decode int8" in refusal(layout(theirs), layout(ours))


def test_everything_that_differs_is_named_at_once():
    message = refusal(layout(*attention()), layout(attention(num_kv_heads=2, dtype="int8", window_tokens=4)[0]))
    for part in ("components:", "dtype of 'k'", "axes of 'k'", "window of 'k'"):
        assert part in message


def test_the_names_of_the_sides_are_the_callers():
    with pytest.raises(IncompatiblePeerError, match="engine A float16, engine B int8"):
        check_exchangeable(
            layout(*attention()), layout(*attention(dtype="int8")), source_name="engine A", destination_name="engine B"
        )


# --- forms of entries


def test_packed_pages_and_entries_for_tokens_are_refused_with_both_layouts():
    plain = msgspec.structs.replace(attention()[0], name="kv")
    assert (
        "layout of 'kv': prefill has packed pages (cpu-1), decode has entries for every token; let both sides store "
        "tokens in the same form" in refusal(layout(PACKED), layout(plain))
    )
    message = refusal(layout(plain), layout(PACKED))
    assert "layout of 'kv': prefill has entries for every token, decode has packed pages (cpu-1)" in message


def test_different_packings_are_refused_with_both_names():
    other = msgspec.structs.replace(PACKED, packing="cpu-2")
    message = refusal(layout(PACKED), layout(other))
    assert "layout of 'kv': prefill has packed pages (cpu-1), decode has packed pages (cpu-2)" in message


def share(tp_size: int, layers: Interval) -> RankLayout:
    """What the first of so many ranks holds, where its engine does not say which part that is."""
    axes = (Axis("layer", 4), Axis("tensor-parallel share", tp_size), Axis("byte", 8))
    held = Shard(
        component=Component(name="kv", axes=axes, dtype="uint8"),
        box=(layers, Interval(0, 1), Interval(0, 8)),
        addresses=tuple(4096 * (number + 1) for number in range(len(layers))),
        strides=(0, 1),
        paging=Paging(page_tokens=4, num_pages=3, page_stride=32, token_stride=8),
    )
    return RankLayout(shards=(held,))


def test_shares_of_another_number_of_ranks_are_refused_with_their_layers_and_what_to_do():
    check(share(4, Interval(0, 4)), share(4, Interval(0, 2)))
    with pytest.raises(IncompatiblePeerError) as raised:
        check(share(4, Interval(0, 2)), share(2, Interval(0, 2)))
    assert str(raised.value).endswith(
        "prefill (layer 4, tensor-parallel share 4, byte 8), decode (layer 4, tensor-parallel share 2, byte 8); an "
        "engine does not say which part of 'kv' its ranks have in layer [0, 2): give both sides the same "
        "tensor-parallel size"
    )


def test_state_and_entries_for_tokens_are_refused():
    state = state_component("k", num_layers=2, axes=(Axis("head", 4), Axis("dim", 8)), dtype="float16")
    slots = RankLayout(shards=(empty_shard(state, page_tokens=1, num_pages=2),))
    message = refusal(slots, layout(attention()[0]))
    assert "layout of 'k': prefill has one entry per request, decode has entries for every token" in message


# --- packed pages


def packed(
    page_tokens: int = 16, partition: TokenPartition = EVERY_TOKEN, part: int = 0, heads: Interval = PACKED.whole[1]
) -> RankLayout:
    shard = Shard(
        component=PACKED,
        box=(PACKED.whole[0], heads, PACKED.whole[2]),
        addresses=(0x1000, 0x2000),
        strides=(8, 1),
        paging=Paging(page_tokens=page_tokens, num_pages=3, page_stride=32, token_stride=0),
    )
    return RankLayout(shards=(shard,), tokens=TokenShare(partition, part))


def test_packed_pages_may_be_cut_by_head():
    check(packed(), packed(heads=Interval(1, 3)))


@pytest.mark.parametrize(("theirs", "ours"), [(16, 64), (64, 16), (16, 48)])
def test_packed_pages_of_different_sizes_are_refused_with_both(theirs: int, ours: int):
    message = refusal(packed(theirs), packed(ours))
    assert (
        "layout of 'kv': packed pages (cpu-1) cannot be cut between tokens, but prefill has pages of "
        f"{theirs} tokens (every token) and decode pages of {ours} (every token); give both sides the same" in message
    )


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (contiguous(2), EVERY_TOKEN),
        (EVERY_TOKEN, contiguous(2)),
        (zigzag(2), contiguous(2)),
        (interleaved(2), EVERY_TOKEN),
        (EVERY_TOKEN, interleaved(2, 8)),
        (interleaved(2, 24), EVERY_TOKEN),
        (interleaved(2, 32), interleaved(2, 8)),
    ],
)
def test_packed_pages_that_context_parallelism_would_cut_are_refused_with_both(
    theirs: TokenPartition, ours: TokenPartition
):
    message = refusal(packed(partition=theirs), packed(partition=ours))
    assert f"prefill has pages of 16 tokens ({theirs}) and decode pages of 16 ({ours})" in message


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (contiguous(2), contiguous(2)),
        (interleaved(2), interleaved(2)),
        (interleaved(2, 16), EVERY_TOKEN),
        (EVERY_TOKEN, interleaved(3, 32)),
        (interleaved(2, 16), interleaved(3, 32)),
        (contiguous(1), EVERY_TOKEN),
    ],
)
def test_packed_pages_that_stay_whole_may_be_exchanged(theirs: TokenPartition, ours: TokenPartition):
    check(packed(partition=theirs), packed(partition=ours))


def test_packed_pages_that_do_not_meet_do_not_matter():
    check(packed(16, heads=Interval(0, 2)), packed(64, heads=Interval(2, 4)))
    empty = RankLayout(shards=(empty_shard(PACKED, page_tokens=64, num_pages=1),))
    check(packed(16), empty)


def test_a_refusal_is_said_once_for_many_shards():
    def in_two_groups(page_tokens: int) -> RankLayout:
        (shard,) = packed(page_tokens).shards
        shards = (
            msgspec.structs.replace(
                shard,
                box=(Interval(layer, layer + 1), *shard.box[1:]),
                addresses=shard.addresses[layer : layer + 1],
                group=f"group-{layer}",
            )
            for layer in range(2)
        )
        return RankLayout(shards=tuple(shards))

    assert refusal(in_two_groups(16), in_two_groups(64)).count("cannot be cut") == 1
    check(in_two_groups(16), packed(16))


def test_entries_for_tokens_may_be_cut_anywhere():
    components = attention()
    for theirs in (EVERY_TOKEN, contiguous(2), interleaved(2, 3)):
        source = msgspec.structs.replace(layout(*components), tokens=TokenShare(theirs, 0))
        check(source, layout(*components, page_tokens=7))
