"""What tells a model's components from each other, over all of its pipeline stages.

Every rank of an engine lists every component, also those of which it holds nothing, and all ranks call them alike. A
stage of vLLM's knows its own layers alone; and the name of a component says no more than what tells it from the model's
others. So each stage says what its layers keep, in forms without names, and each names the components from the forms of
all stages.

Stages tell each other when their caches are registered, which all of them do at once: the ranks with the same place in
every stage. One that fails says so in the place of what it was to tell: the others would wait for it, and vLLM for
them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, TypeVar

import msgspec

from kvferry import Component, Interval, Shard, empty_shard, shard_from_tensors
from kvferry.errors import LayoutError

Own = TypeVar("Own")


@dataclass(frozen=True, slots=True)
class ComponentForm:
    """What some layers keep, in whichever stages they are: they are one component.

    Attributes:
        kind: how the component is called where no other is of its kind.
        distinctions: what may tell it from others of its kind, always in the same order. Those in which any two of them
            differ become part of their names.
        component: the component, which is called as its kind is.
        layer: the name of one of the layers, for messages.
    """

    kind: str
    distinctions: tuple[str, ...]
    component: Component
    layer: str = field(compare=False)


def named(forms: Iterable[ComponentForm]) -> dict[ComponentForm, Component]:
    """Returns the components of a model, with their names.

    Args:
        forms: those of all pipeline stages, in any order.

    Raises:
        LayoutError: if two of them cannot be told apart by a name, naming a layer of each.
    """
    kinds: dict[str, dict[ComponentForm, None]] = {}
    for form in forms:
        kinds.setdefault(form.kind, {})[form] = None
    found: dict[ComponentForm, Component] = {}
    for kind, members in kinds.items():
        names: dict[str, ComponentForm] = {}
        telling = [len(set(values)) > 1 for values in zip(*(form.distinctions for form in members), strict=True)]
        for form in members:
            name = kind + "".join(
                f", {value}" for value, tells in zip(form.distinctions, telling, strict=True) if tells
            )
            other = names.setdefault(name, form)
            if other is not form:
                raise LayoutError(_alike(other, form))
            found[form] = msgspec.structs.replace(form.component, name=name)
    return found


def _alike(one: ComponentForm, other: ComponentForm) -> str:
    layers = f"layers {one.layer!r} and {other.layer!r}"
    if msgspec.structs.replace(one.component, dtype=other.component.dtype) == other.component:
        return f"{layers} differ in their element type alone"
    if msgspec.structs.replace(one.component, dtype=other.component.dtype, packing=other.component.packing) == (
        other.component
    ):
        return f"{layers} differ in the type of their elements, or the order within a block, alone"
    parts = (f"{', '.join(map(str, each.component.axes))} of {each.component.dtype}" for each in (one, other))
    return f"{layers} are of one kind and keep different things: {' and '.join(parts)}"


@dataclass(frozen=True, slots=True)
class Piece:
    """What one layer has of one component.

    Attributes:
        form: of the component, with the name of this layer.
        number: of the layer, in the whole model; of a draft model's, among those of the draft.
        group: the name of its group.
        view: of the layer's tensor.
        dims: what the view's dimensions are, as `shard_from_tensors` has them.
        held: what this rank has, by axis; all of those that are missing.
        page_tokens: tokens in a page where tokens do not lie apart; else None.
        has_every_token: whether it has every token of a request, also where the rank has a share of others'.
    """

    form: ComponentForm
    number: int
    group: str
    view: Any
    dims: tuple[str, ...]
    held: Mapping[str, Interval]
    page_tokens: int | None = None
    has_every_token: bool = False


def by_form(pieces: Iterable[Piece]) -> dict[ComponentForm, list[Piece]]:
    """Groups pieces by what they are.

    Args:
        pieces: in the order of their layers' numbers.

    Raises:
        LayoutError: if two layers have the same number, naming both.
    """
    forms: dict[ComponentForm, list[Piece]] = {}
    for piece in pieces:
        alike = forms.setdefault(piece.form, [])
        if alike and alike[-1].number == piece.number:
            raise LayoutError(f"layers {alike[-1].form.layer!r} and {piece.form.layer!r} have the same number")
        alike.append(piece)
    return forms


def shards_of(component: Component, pieces: Iterable[Piece]) -> Iterator[Shard]:
    """Yields a shard for each run of layers that follow each other, with the same block table and the same held."""

    def alike(numbered: tuple[int, Piece]) -> tuple[int, object, object]:
        index, piece = numbered
        return piece.number - index, piece.group, piece.held

    for _, numbered in groupby(enumerate(pieces), alike):
        run = [piece for _, piece in numbered]
        first = run[0]
        yield shard_from_tensors(
            component,
            [piece.view for piece in run],
            dims=first.dims,
            held={"layer": Interval(first.number, first.number + len(run)), **first.held},
            group=first.group,
            page_tokens=first.page_tokens,
            has_every_token=first.has_every_token,
        )


def with_those_elsewhere(shards: Collection[Shard], components: Iterable[Component]) -> Iterator[Shard]:
    """Yields a rank's shards, and an empty one for every component of which it holds nothing.

    Args:
        components: those of the whole model.
    """
    yield from shards
    held = {shard.component.name for shard in shards}
    device = next((shard.device for shard in shards), None)
    for component in components:
        if component.name not in held:
            group = f"no layers of {component.name!r}"
            yield empty_shard(component, page_tokens=1, num_pages=1, device=device, group=group)


# ---- what pipeline stages tell each other ----------------------------------------------------------------------------


class OtherStageError(LayoutError):
    """Another stage has failed."""


@dataclass(frozen=True, slots=True)
class _Problem:
    """What a stage tells that has failed."""

    said: str


def of_all_stages(own: Own) -> list[Own]:
    """Returns what each stage has given, in the order of the stages. Waits for all of them.

    What they give is pickled.

    Raises:
        OtherStageError: if another one has failed, with what it has said.
    """
    found = _gathered(own)
    for number, each in enumerate(found):
        if isinstance(each, _Problem):
            raise OtherStageError(f"pipeline stage {number} cannot take part: {each.said}")
    return found


@contextmanager
def telling_problems(stages: int) -> Iterator[None]:
    """Tells the other stages if something is raised, in the place of what they are to be told next."""
    try:
        yield
    except OtherStageError:
        raise  # which all others raise as well
    except Exception as error:
        if stages > 1:
            _gathered(_Problem(str(error)))
        raise


def _gathered(own: Any) -> list[Any]:
    from vllm.distributed.parallel_state import get_pp_group

    stages: Any = get_pp_group()
    if stages.world_size == 1:
        return [own]
    from torch.distributed import all_gather_object

    found: list[Any] = [None] * stages.world_size
    all_gather_object(found, own, group=stages.cpu_group)
    return found
