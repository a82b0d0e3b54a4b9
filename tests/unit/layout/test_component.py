"""Components: axes with global sizes, what has one entry, and which descriptions contradict themselves."""

from __future__ import annotations

import msgspec
import pytest

from kvferry.errors import LayoutError
from kvferry.layout import (
    Axis,
    Component,
    Entry,
    Interval,
    attention_components,
    latent_component,
    packed_component,
    state_component,
)
from kvferry.layout.component import BYTES_PER_ELEMENT

AXES = (Axis("layer", 2), Axis("head", 3))


def test_attention_has_keys_and_values_whose_dims_may_differ():
    k, v = attention_components(num_layers=2, num_kv_heads=3, head_dim=4, value_head_dim=5, dtype="bfloat16")
    assert (k.name, k.axes) == ("k", (Axis("layer", 2), Axis("head", 3), Axis("dim", 4)))
    assert (v.name, v.axes[2]) == ("v", Axis("dim", 5))
    assert attention_components(num_layers=2, num_kv_heads=3, head_dim=4, dtype="int8")[1].axes == k.axes


def test_a_second_kind_of_attention_has_names_of_its_own():
    window = attention_components(
        num_layers=1, num_kv_heads=1, head_dim=2, dtype="int8", window_tokens=128, prefix="window_"
    )
    assert [(each.name, each.window_tokens) for each in window] == [("window_k", 128), ("window_v", 128)]
    assert {each.entry for each in window} == {Entry.TOKEN}


def test_state_has_one_entry_per_request():
    state = state_component("conv_q", num_layers=3, axes=(Axis("channel", 8), Axis("width", 4)), dtype="float32")
    assert state.entry is Entry.REQUEST
    assert state.axes == (Axis("layer", 3), Axis("channel", 8), Axis("width", 4))
    assert (state.window_tokens, state.packing) == (None, None)


def test_packed_pages_have_one_entry_per_page_and_name_their_format():
    packed = packed_component(
        "kv", num_layers=2, num_kv_heads=4, packed=512, dtype="uint8", packing="cpu-1", window_tokens=64
    )
    assert (packed.entry, packed.packing, packed.window_tokens) == (Entry.PAGE, "cpu-1", 64)
    assert packed.axes == (Axis("layer", 2), Axis("head", 4), Axis("packed", 512))


def test_a_component_is_for_tokens_and_needed_unless_it_says_otherwise():
    plain = Component(name="k", axes=AXES, dtype="int8")
    assert (plain.entry, plain.window_tokens, plain.packing, plain.is_optional) == (Entry.TOKEN, None, None, False)


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


@pytest.mark.parametrize("names", [[], ["layer", "layer"], ["layer", "token", "dim"], ["page"], ["layer", "slot"]])
def test_missing_repeated_or_reserved_axes_are_refused(names: list[str]):
    with pytest.raises(LayoutError) as caught:
        Component(name="odd", axes=tuple(Axis(name, 1) for name in names), dtype="int8")
    assert str(names) in str(caught.value)
    assert "'odd'" in str(caught.value)


@pytest.mark.parametrize(("entry", "packing"), [(Entry.TOKEN, "cpu-1"), (Entry.REQUEST, "cpu-1"), (Entry.PAGE, None)])
def test_packed_pages_and_only_they_name_their_format(entry: Entry, packing: str | None):
    with pytest.raises(LayoutError, match=f"'odd' with one entry per {entry.value} has packing {packing!r}"):
        Component(name="odd", axes=AXES, dtype="int8", entry=entry, packing=packing)


@pytest.mark.parametrize(("entry", "window"), [(Entry.TOKEN, 0), (Entry.TOKEN, -4), (Entry.REQUEST, 16)])
def test_windows_that_keep_nothing_or_belong_to_state_are_refused(entry: Entry, window: int):
    with pytest.raises(LayoutError, match=f"'odd' has window_tokens {window} and one entry per {entry.value}: a win"):
        Component(name="odd", axes=AXES, dtype="int8", entry=entry, window_tokens=window)


def test_a_window_of_one_token_is_a_window():
    assert Component(name="k", axes=AXES, dtype="int8", window_tokens=1).window_tokens == 1


def test_an_unknown_dtype_is_refused_with_the_known_ones():
    with pytest.raises(LayoutError, match=r"'latent' has dtype 'fp16': known are float64, .*bfloat16"):
        latent_component(num_layers=1, latent_dim=1, dtype="fp16")


def test_every_dtype_has_the_size_that_torch_says():
    torch = pytest.importorskip("torch")
    for name, size in BYTES_PER_ELEMENT.items():
        assert torch.empty(0, dtype=getattr(torch, name)).element_size() == size


@pytest.mark.parametrize(
    "component",
    [
        latent_component(num_layers=2, latent_dim=8, dtype="float16"),
        state_component("state", num_layers=2, axes=(Axis("head", 4),), dtype="float32"),
        packed_component("kv", num_layers=2, num_kv_heads=4, packed=8, dtype="int8", packing="cpu-1", window_tokens=9),
        Component(name="draft", axes=AXES, dtype="int8", is_optional=True),
    ],
    ids=lambda component: component.name,
)
def test_components_travel(component: Component):
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(component), type=Component) == component
