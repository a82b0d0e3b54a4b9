"""Components: axes with global sizes, and the fingerprint that ranks compare."""

from __future__ import annotations

import msgspec
import pytest

from kvferry.errors import LayoutError
from kvferry.layout import Axis, Component, Interval, attention_components, latent_component
from kvferry.layout.component import BYTES_PER_ELEMENT, digest


def test_attention_has_keys_and_values_whose_dims_may_differ():
    k, v = attention_components(num_layers=2, num_kv_heads=3, head_dim=4, value_head_dim=5, dtype="bfloat16")
    assert (k.name, k.axes) == ("k", (Axis("layer", 2), Axis("head", 3), Axis("dim", 4)))
    assert (v.name, v.axes[2]) == ("v", Axis("dim", 5))
    assert attention_components(num_layers=2, num_kv_heads=3, head_dim=4, dtype="int8")[1].axes == k.axes


def test_a_latent_has_no_heads():
    latent = latent_component(num_layers=2, latent_dim=576, dtype="float8_e4m3fn")
    assert latent.axes == (Axis("layer", 2), Axis("latent", 576))
    assert latent.element_bytes == 1


def test_the_whole_component_and_its_boxes_in_words():
    k, _ = attention_components(num_layers=2, num_kv_heads=3, head_dim=4, dtype="float16")
    assert k.whole == (Interval(0, 2), Interval(0, 3), Interval(0, 4))
    assert k.describe(k.whole) == "layer [0, 2) head [0, 3) dim [0, 4)"
    with pytest.raises(ValueError, match="zip"):
        k.describe(k.whole[:2])


@pytest.mark.parametrize("size", [0, -1])
def test_an_axis_without_indices_is_refused(size: int):
    with pytest.raises(LayoutError, match=f"axis 'head' has size {size}: a cache needs at least one head"):
        Axis("head", size)


@pytest.mark.parametrize("names", [[], ["layer", "layer"], ["layer", "token", "dim"]])
def test_missing_repeated_or_reserved_axes_are_refused(names: list[str]):
    with pytest.raises(LayoutError) as caught:
        Component(name="odd", axes=tuple(Axis(name, 1) for name in names), dtype="int8")
    assert str(names) in str(caught.value)
    assert "'odd'" in str(caught.value)


def test_an_unknown_dtype_is_refused_with_the_known_ones():
    with pytest.raises(LayoutError, match=r"'latent' has dtype 'fp16': known are float64, .*bfloat16"):
        latent_component(num_layers=1, latent_dim=1, dtype="fp16")


def test_every_dtype_has_the_size_that_torch_says():
    torch = pytest.importorskip("torch")
    for name, size in BYTES_PER_ELEMENT.items():
        assert torch.empty(0, dtype=getattr(torch, name)).element_size() == size


def test_the_digest_tells_engines_apart_but_not_the_order_of_components():
    k, v = attention_components(num_layers=2, num_kv_heads=2, head_dim=4, dtype="float16")
    same = digest([k, v], 16)
    assert digest([v, k], 16) == same
    others = [
        digest([k], 16),
        digest([k, v], 32),
        digest(attention_components(num_layers=3, num_kv_heads=2, head_dim=4, dtype="float16"), 16),
        digest(attention_components(num_layers=2, num_kv_heads=2, head_dim=4, dtype="bfloat16"), 16),
    ]
    assert len({same, *others}) == 5


def test_components_travel():
    component = latent_component(num_layers=2, latent_dim=8, dtype="float16")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(component), type=Component) == component
