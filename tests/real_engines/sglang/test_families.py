"""Every family of models, as SGLang's own configurator caches it, between ranks of any number, byte for byte.

No model runs. What runs on a CPU is compared token by token elsewhere: docs/design/families.md says where.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.models.registry import ModelRegistry
from tests.real_engines.sglang import built as built_module
from tests.real_engines.sglang.built import Built, BuiltRank, Shape
from tests.support.collecting import missing_tests
from tests.support.crossings import cross
from tests.support.described import wrong_bytes
from tests.support.families import FAMILIES, family_of
from tests.support.family_cells import Shape as FamilyShape
from tests.support.family_cells import Status, cells, sglang_cell
from tests.support.model_family import Family

from kvferry import RankCoordinates, RankLayout
from kvferry.engines.sglang import layouts, pools, recurrent
from kvferry.errors import IncompatiblePeerError

pytestmark = pytest.mark.timeout(120)

SIZES = (1, 2, 4)
ROOMS = range(4)


HERE = "tests/real_engines/sglang/test_families.py::"


def status(family: Family, shape: FamilyShape) -> Status:
    return sglang_cell(family, shape).status


def exchanged(shape: FamilyShape) -> list[Family]:
    """The families of which a shape is exchanged here, or between real engines."""
    return [
        each
        for each in FAMILIES
        if status(each, shape) is Status.TOKENS
        or (status(each, shape) is Status.BYTES and sglang_cell(each, shape).test.startswith(HERE))
    ]


def of_families(
    families: Sequence[Family], *more: str, cases: Sequence[tuple[Any, ...]] = ((),)
) -> pytest.MarkDecorator:
    """Parametrizes a test with `built`, and with cases."""
    every = [
        pytest.param(family, *case, id="-".join(map(str, (family.name, *case))))
        for family, case in product(families, cases)
    ]
    return pytest.mark.parametrize(("built", *more), every, indirect=["built"])


def places(built: Built, shape: Shape) -> list[tuple[RankCoordinates, RankLayout]]:
    return [(rank.coordinates, rank.layout) for rank in built.engine(shape).values()]


def assert_all_is_described(ranks: dict[int, BuiltRank]) -> None:
    """What the pools keep in a page is what the layout has of it: nothing is left out, and nothing counts twice."""
    for rank in ranks.values():
        described = dict.fromkeys(rank.page_bytes, 0)
        for shard in rank.layout.shards:
            described[shard.group] += shard.bytes_per_page
        assert described == rank.page_bytes, f"rank {rank.coordinates.engine_rank}"


@of_families(exchanged(FamilyShape.TENSOR), "prefill_tp", "decode_tp", cases=list(product(SIZES, SIZES)))
def test_every_rank_gets_what_it_would_have_computed(built: Built, prefill_tp: int, decode_tp: int):
    prefill, decode = Shape(tp=prefill_tp), Shape(tp=decode_tp)
    assert_all_is_described(built.engine(decode))
    assert [*wrong_bytes(built.labelled(prefill), built.labelled(decode), ROOMS)] == []


@of_families(exchanged(FamilyShape.PAGES))
def test_pages_may_differ_in_size(built: Built):
    """Whole requests, in chunks and behind a prefix; and nothing else is written."""
    cross(places(built, Shape(tp=2)), places(built, Shape(page_tokens=32)))


@of_families(exchanged(FamilyShape.STAGES))
def test_stages_of_the_prefill_side_send_their_layers(built: Built):
    cross(places(built, Shape(pp=2)), places(built, Shape(tp=2)))


def test_the_tests_that_cells_name_are_run(pytestconfig: pytest.Config):
    assert missing_tests((cell for *_, cell in cells()), "tests/real_engines/sglang", pytestconfig) == []


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [pytest.param(each, id=each.name) for each in FAMILIES if each.sglang is not None])
def test_a_family_that_sglang_lacks_is_not_in_its_registry(family: Family):
    supported = ModelRegistry.get_supported_archs()
    assert "Qwen3ForCausalLM" in supported
    assert family.architecture not in supported


# ---- planted --------------------------------------------------------------------------------------------------------


def of_family(name: str, folder: Path) -> Built:
    return Built(family_of(name), folder)


def mirrored(place: RankCoordinates) -> RankCoordinates:
    return RankCoordinates(tp_rank=place.tp_size - 1 - place.tp_rank, tp_size=place.tp_size)


@pytest.mark.parametrize(("name", "part"), [("qwen3", "'k'"), ("granite-4", "'state 0, block 0'")])
def test_heads_and_channels_that_are_another_ranks_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, part: str
):
    """What the tests above assert can fail: ranks are described from the last to the first."""

    def backwards(caches: Any, place: RankCoordinates, device: Any) -> Any:
        return layouts.describe(caches, mirrored(place), device)

    monkeypatch.setattr(built_module, "describe", backwards)
    built = of_family(name, tmp_path)
    wrong = [*wrong_bytes(built.labelled(Shape(tp=2)), built.labelled(Shape()), ROOMS)]
    assert any(part in each for each in wrong)


def test_a_component_that_is_not_sent_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def without_state(*arguments: Any, **named: Any) -> Any:
        caches = pools.caches_of(*arguments, **named)
        return replace(caches, state=tuple(each for each in caches.state if each.channels != 8))

    monkeypatch.setattr(built_module, "caches_of", without_state)
    with pytest.raises(AssertionError, match="rank 0"):
        assert_all_is_described(of_family("granite-4", tmp_path).engine(Shape()))


def test_groups_that_are_not_known_are_refused_between_unequal_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recurrent, "_GROUPS", {})
    built = of_family("nemotron-h", tmp_path)
    with pytest.raises(IncompatiblePeerError, match="tensor-parallel share"):
        [*wrong_bytes(built.labelled(Shape(tp=2)), built.labelled(Shape()), ROOMS)]
