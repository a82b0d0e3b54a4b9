"""Layers of several kinds in several pipeline stages of vLLM's, where a stage has none of a kind.

Requests go through the whole plug-in; every stage has vLLM's groups, without the layers that it lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from threading import Barrier, local
from typing import Any

import pytest
from tests.support.vllm_ranks import Deployment, Engine, Kind, plugged_in, transfer

from kvferry import Axis, Component, RankCoordinates
from kvferry.engines.vllm import components
from kvferry.engines.vllm.caches import CacheGroup, ModelShape
from kvferry.engines.vllm.components import ComponentForm, OtherStageError, named, of_all_stages, telling_problems
from kvferry.engines.vllm.layouts import describe
from kvferry.errors import LayoutError
from kvferry.testing.network import LocalNetwork


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalNetwork]:
    with plugged_in(monkeypatch) as found:
        yield found


FULL, WINDOW, CHUNK, STATE = (
    Kind((0,)),
    Kind((1, 2, 3), window=9),
    Kind((1, 2, 3), chunk=16),
    Kind((1, 2, 3), has_state=True),
)
OTHER_HEADS, DRAFT = Kind((1, 3), heads=2), Kind((0, 1), is_draft=True)

MODELS = {
    "window": (FULL, WINDOW),
    "chunk": (FULL, CHUNK),
    "state": (FULL, STATE),
    "state alone": (STATE,),
    "draft": (Kind((0, 1, 2, 3)), DRAFT),
    "other heads": (Kind((0, 2)), OTHER_HEADS),
    "all": (FULL, Kind((1,), window=9), Kind((2,), has_state=True), Kind((3,), heads=2), DRAFT),
}

ONE, TWO, THREE = (
    Deployment(),
    Deployment(stages=(range(1), range(1, 4))),
    Deployment(tp=2, block_tokens=8, stages=(range(1), range(1, 3), range(3, 4))),
)


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize(("here", "there"), [*permutations((ONE, TWO, THREE), 2)], ids=str)
@pytest.mark.parametrize("kinds", MODELS.values(), ids=MODELS)
def test_what_each_stage_has_arrives_where_it_is_needed(
    network: LocalNetwork, kinds: tuple[Kind, ...], here: Deployment, there: Deployment
):
    prefill = Engine(network, "prefill", kinds, here, sends=True, layers=4)
    decode = Engine(network, "decode", kinds, there, sends=False, layers=4)
    prefixes = (0,) if any(kind.has_state for kind in kinds) else (0, 8, 21)
    try:
        for tokens, prefix in [(5, 0), *((34, prefix) for prefix in prefixes)]:
            decode.wipe()
            decode.check(transfer(prefill, decode, tokens, prefix), tokens - 1, prefix)
    finally:
        decode.close()
        prefill.close()


def test_a_draft_in_one_stage_may_be_missing_on_the_other_side(network: LocalNetwork):
    target = Kind((0, 1, 2, 3))
    for number, (ours, theirs) in enumerate(permutations([(target,), (target, DRAFT)])):
        prefill = Engine(network, f"prefill-{number}", ours, TWO, sends=True, layers=4)
        decode = Engine(network, f"decode-{number}", theirs, THREE, sends=False, layers=4)
        try:
            request = transfer(prefill, decode, 34, 8)
            decode.check(request, 33, 8, absent=theirs[1:])
        finally:
            decode.close()
            prefill.close()


def form(kind: str, *distinctions: str, dtype: str = "float32", size: int = 2) -> ComponentForm:
    component = Component(name=kind, axes=(Axis("layer", 4), Axis("head", size)), dtype=dtype)
    return ComponentForm(kind, distinctions, component, f"layers.{size}.{dtype}")


def test_a_name_says_what_tells_a_component_from_others_of_its_kind():
    forms = [form("kv", "4 heads", "8 a head"), form("kv", "2 heads", "8 a head", size=3), form("draft", "2", "8")]
    assert [each.name for each in named(forms).values()] == ["kv, 4 heads", "kv, 2 heads", "draft"]
    assert [each.name for each in named(forms[1:]).values()] == ["kv", "draft"]
    assert named([*forms, *forms]) == named(forms), "several stages have the same"


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (form("kv", "4 heads", dtype="float16"), "differ in their element type alone"),
        (form("kv", "4 heads", size=5), r"keep different things: layer 4, head 2 of float32 and layer 4, head 5 of f"),
    ],
    ids=["type", "size"],
)
def test_what_no_name_tells_apart_is_refused(other: ComponentForm, said: str):
    with pytest.raises(LayoutError, match=said):
        named([form("kv", "4 heads"), other])


def test_a_stage_without_any_layers_lists_what_the_others_have():
    forms = [form("kv", "4 heads")]
    found = describe(
        {}, [CacheGroup("group 0", (), 4)], ModelShape(4), RankCoordinates(), heads={}, num_blocks=3,
        everywhere=lambda own: [*own, *forms],
    )  # fmt: skip
    assert [(shard.component.name, len(shard.box[0])) for shard in found.layout.shards] == [("kv", 0)]
    assert not found.pages_per_block


# ---- what stages tell each other ------------------------------------------------------------------------------------


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Runs a function for each of two stages at once; returns what each has returned or raised."""
    told: dict[int, Any] = {}
    meeting = Barrier(2, timeout=10)
    own = local()

    def gathered(given: Any) -> list[Any]:
        told[own.number] = given
        meeting.wait()
        found = [told[number] for number in (0, 1)]
        meeting.wait()
        return found

    monkeypatch.setattr(components, "_gathered", gathered)

    def run(function: Callable[[int], Any]) -> list[Any]:
        def stage(number: int) -> Any:
            own.number = number
            try:
                with telling_problems(2):
                    return function(number)
            except Exception as error:
                return error

        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(stage, (0, 1)))

    return run


def test_each_stage_gets_what_all_have_told(stages: Callable[..., list[Any]]):
    assert stages(lambda number: [of_all_stages(number), of_all_stages(-number)]) == [[[0, 1], [0, -1]]] * 2


@pytest.mark.parametrize("told_before", [0, 1])
def test_a_stage_that_fails_keeps_the_others_from_waiting(stages: Callable[..., list[Any]], told_before: int):
    def start(number: int) -> None:
        for _ in range(told_before):
            of_all_stages(number)
        if number == 1:
            raise LayoutError("layer 3 has no cache")
        of_all_stages(number)

    other, failed = stages(start)
    assert str(failed) == "layer 3 has no cache"
    assert isinstance(other, OtherStageError)
    assert str(other) == "pipeline stage 1 cannot take part: layer 3 has no cache"


def test_stages_that_all_fail_each_say_why(stages: Callable[..., list[Any]]):
    def fail(number: int) -> None:
        raise LayoutError(f"stage {number}")

    assert [str(each) for each in stages(fail)] == ["stage 0", "stage 1"]


def test_a_single_stage_has_nobody_to_tell():
    with pytest.raises(LayoutError, match="alone"), telling_problems(1):
        raise LayoutError("alone")
