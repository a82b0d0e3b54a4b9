"""Every family of models, as vLLM's own classes cache it, between ranks of any number, byte for byte.

No model runs: its layers, cache specs, groups and pools are vLLM's, and the plug-in describes them as in a worker.
Blocks are as GPUs have them, where tokens can be told apart. What runs on a CPU is compared token by token elsewhere:
`docs/design/families.md` says where.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from tests.real_engines.vllm import built as built_module
from tests.real_engines.vllm.built import Built, BuiltRank, Shape, install_stand_ins
from tests.support.collecting import missing_tests
from tests.support.crossings import cross
from tests.support.described import wrong_bytes
from tests.support.families import FAMILIES, family_of
from tests.support.family_cells import SPARSE, Status, cells, vllm_cell
from tests.support.family_cells import Shape as FamilyShape
from tests.support.model_family import Family

from kvferry import Interval, RankCoordinates, RankLayout
from kvferry.engines.vllm import configuration, layouts, states
from kvferry.engines.vllm.caches import HeldPart

pytestmark = pytest.mark.timeout(120)

SIZES = (1, 2, 4)
ROOMS = range(4)


def status(family: Family, shape: FamilyShape) -> Status:
    return vllm_cell(family, shape).status


DESCRIBED = [each for each in FAMILIES if each.vllm is None and each.name not in SPARSE]


@pytest.fixture(scope="module", autouse=True)
def stand_ins() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        install_stand_ins(patch)
        yield


def has_stages(family: Family) -> bool:
    """Whether stages of it are built here; those of which the last alone drafts are described elsewhere."""
    return status(family, FamilyShape.STAGES) is not Status.ENGINE and family.drafts is None


def of_every_family(*more: str, cases: Sequence[tuple[Any, ...]]) -> pytest.MarkDecorator:
    """Parametrizes a test with `built` and with cases, but for pipeline stages that are refused."""
    every = [
        pytest.param(family, *case, id="-".join(map(str, (family.name, *case))))
        for family, case in product(DESCRIBED, cases)
        if "stages" not in str(case) or has_stages(family)
    ]
    return pytest.mark.parametrize(("built", *more), every, indirect=["built"])


def assert_all_is_described(ranks: dict[int, BuiltRank]) -> None:
    """What the layers keep in a page is what the layout has of it: nothing is left out, and nothing counts twice."""
    for rank in ranks.values():
        layout, described = rank.described.layout, dict.fromkeys(rank.page_bytes, 0)
        for shard in layout.shards:
            described[shard.group] += shard.bytes_per_page * rank.described.pages_per_block[shard.group]
        assert described == rank.page_bytes, f"rank {rank.coordinates.engine_rank}"


@of_every_family("prefill_tp", "decode_tp", cases=list(product(SIZES, SIZES)))
def test_every_rank_gets_what_it_would_have_computed(built: Built, prefill_tp: int, decode_tp: int):
    """What that is, vLLM's loaders say of its weights."""
    prefill, decode = Shape(tp=prefill_tp), Shape(tp=decode_tp)
    assert_all_is_described(built.engine(decode))
    assert [*wrong_bytes(built.labelled(prefill), built.labelled(decode), ROOMS)] == []


CROSSINGS = {
    "one": (Shape(tp=2), Shape()),
    "blocks": (Shape(tp=2), Shape(block_tokens=64)),
    "stages": (Shape(pp=2), Shape(tp=2)),
    "decode stages": (Shape(tp=2), Shape(pp=2)),
}
"""Prefill and decode engines between which whole requests cross."""


@pytest.mark.parametrize(
    "built", [pytest.param(each, id=each.name) for each in DESCRIBED if each.drafts is not None], indirect=True
)
def test_a_draft_is_a_component_of_its_own(built: Built):
    """Else the tests beside this one would say nothing of it."""
    (rank,) = built.engine(Shape()).values()
    assert [each.name for each in rank.described.layout.components] == ["kv", "draft"]


@of_every_family("crossing", cases=[(name,) for name in CROSSINGS])
def test_requests_cross(built: Built, crossing: str):
    """In chunks, behind a prefix that ends inside of a block, into pages elsewhere; and nothing else is written."""
    prefill, decode = CROSSINGS[crossing]
    cross(places(built, prefill), places(built, decode))


def places(built: Built, shape: Shape) -> list[tuple[RankCoordinates, RankLayout]]:
    return [(rank.coordinates, rank.described.layout) for rank in built.engine(shape).values()]


def test_the_tests_that_cells_name_are_run(pytestconfig: pytest.Config):
    assert missing_tests((cell for *_, cell in cells()), "tests/real_engines/vllm", pytestconfig) == []


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family",
    [pytest.param(each, id=each.name) for each in DESCRIBED if status(each, FamilyShape.STAGES) is Status.ENGINE],
)
def test_stages_that_vllm_does_not_have_are_refused_by_vllm(family: Family, tmp_path: Path):
    with pytest.raises(NotImplementedError, match="Pipeline parallelism is not supported for this model"):
        Built(family, tmp_path).engine(Shape(pp=2))


@pytest.mark.parametrize("family", [pytest.param(each, id=each.name) for each in FAMILIES if each.vllm is not None])
def test_a_family_that_vllm_lacks_is_refused_by_vllm(family: Family, tmp_path: Path):
    with pytest.raises(
        ValueError, match=r"supported in vLLM until v0\.23\.0, and is not supported anymore|no other way"
    ):
        Built(family, tmp_path).engine(Shape())


# ---- planted --------------------------------------------------------------------------------------------------------


def of_family(name: str, folder: Path) -> Built:
    return Built(family_of(name), folder)


def test_heads_shifted_by_one_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What the tests above assert can fail."""
    held_heads = configuration.heads_of

    def shifted(config: Any, kept: Any, place: Any) -> Any:
        found = held_heads(config, kept, place)
        return {
            name: HeldPart(2, Interval(1 - place.tp_rank, 2 - place.tp_rank)) if place.tp_size == 2 else each
            for name, each in found.items()
        }

    monkeypatch.setattr(built_module, "heads_of", shifted)
    built = of_family("llama-3", tmp_path)
    wrong = [*wrong_bytes(built.labelled(Shape(tp=2)), built.labelled(Shape()), ROOMS)]
    assert "gets 'kv' layer [0, 4) head [0, 1)" in wrong[0]


def test_channels_that_are_another_ranks_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """x of a convolution of Mamba 2 divided from the last rank to the first."""
    states_of = states.states_of

    def backwards(spec: Any, layer: Any, place: Any, **named: Any) -> Any:
        mirrored = RankCoordinates(tp_rank=place.tp_size - 1 - place.tp_rank, tp_size=place.tp_size)
        return states_of(spec, layer, mirrored, **named)

    monkeypatch.setattr(configuration, "states_of", backwards)
    built = of_family("granite-4", tmp_path)
    wrong = [*wrong_bytes(built.labelled(Shape(tp=2)), built.labelled(Shape()), ROOMS)]
    assert any("'state 0, part 0'" in each for each in wrong)
    assert any("'state 1'" in each for each in wrong)


def test_a_component_that_is_not_sent_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    describe = layouts.describe

    def without_one(*arguments: Any, **named: Any) -> Any:
        described = describe(*arguments, **named)
        kept = [shard for shard in described.layout.shards if shard.component.name != "state 1"]
        return replace(described, layout=RankLayout(shards=tuple(kept)))

    monkeypatch.setattr(built_module, "describe", without_one)
    with pytest.raises(AssertionError, match="rank 0"):
        assert_all_is_described(of_family("granite-4", tmp_path).engine(Shape()))
