"""Weights are told apart by what they are, on however many ranks they lie."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvferry.engines.vllm.weights import WeightsVersion, content_of, parameter_sums
from kvferry.errors import ModelError

HIDDEN, WIDTH, HEADS, KV_HEADS = 32, 8, 4, 2


class Projection(torch.nn.Module):
    """Queries, keys and values in one, as vLLM divides them: ranks beyond the KV heads have copies."""

    def __init__(self, whole: torch.Tensor, rank: int, ranks: int) -> None:
        super().__init__()
        self.num_heads, self.head_size = HEADS // ranks, WIDTH
        self.num_kv_head_replicas = max(1, ranks // KV_HEADS)
        queries, keys, values = whole.split([HEADS * WIDTH, KV_HEADS * WIDTH, KV_HEADS * WIDTH])
        held = min(ranks, KV_HEADS)
        parts = [queries.chunk(ranks)[rank], *(each.chunk(held)[rank * held // ranks] for each in (keys, values))]
        self.weight = torch.nn.Parameter(torch.cat(parts))


def worker(
    whole: dict[str, torch.Tensor], rank: int = 0, ranks: int = 1, *, stages: range = range(2), **parallel: Any
) -> Any:
    """One of so many ranks of a model, with some of its layers."""
    model = torch.nn.Module()
    for layer in stages:
        block = torch.nn.Module()
        block.norm = torch.nn.Module()
        block.norm.weight = torch.nn.Parameter(whole["norm"])
        block.attention = Projection(whole["qkv"], rank, ranks)
        block.down = torch.nn.Linear(HIDDEN // ranks, HIDDEN, bias=False, dtype=torch.bfloat16)
        block.down.weight = torch.nn.Parameter(whole["down"].chunk(ranks, dim=1)[rank].t().contiguous().t())
        block.experts = torch.nn.Module()
        block.experts.w = torch.nn.Parameter(whole["experts"].chunk(ranks)[rank])
        model.add_module(f"layer{layer}", block)
    if 1 in stages:
        model.lm_head = torch.nn.Linear(4, 4)
    usual = {"enable_expert_parallel": False, "enable_eplb": False, "data_parallel_size": 1}
    config = SimpleNamespace(parallel_config=SimpleNamespace(**usual | parallel))
    return SimpleNamespace(get_model=lambda: model, vllm_config=config)


def whole(seed: int = 1) -> dict[str, torch.Tensor]:
    numbers = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=numbers).to(torch.bfloat16)

    return {
        "norm": drawn(HIDDEN),
        "qkv": drawn((HEADS + 2 * KV_HEADS) * WIDTH, HIDDEN),
        "down": drawn(HIDDEN, HIDDEN),
        "experts": drawn(4, HIDDEN),
    }


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_it_does_not_matter_how_many_ranks_and_stages_divide_them(ranks: int):
    """Four ranks are more than KV heads."""
    ours = content_of([parameter_sums(worker(whole()))])
    theirs = [
        parameter_sums(worker(whole(), rank, ranks, stages=stage))
        for rank in range(ranks)
        for stage in (range(1), range(1, 2))
    ]
    assert content_of(theirs) == ours != content_of([parameter_sums(worker(whole(2)))])


@pytest.mark.parametrize("name", ["norm", "qkv", "down", "experts"])
def test_the_least_change_of_one_number_counts(name: str):
    changed = whole()
    changed[name].view(torch.int16).view(-1)[5] += 1
    assert content_of([parameter_sums(worker(changed))]) != content_of([parameter_sums(worker(whole()))])


@pytest.mark.parametrize("name", ["_k_scale", "_v_scale"])
def test_the_scales_of_caches_count_which_are_no_parameters(name: str):
    given = worker(whole())
    attention = given.get_model().layer0.attention
    for each in ("_k_scale", "_v_scale", "another"):
        attention.register_buffer(each, torch.tensor(1.0))
    before = content_of([parameter_sums(given)])
    attention.another.fill_(2.0)
    assert content_of([parameter_sums(given)]) == before
    getattr(attention, name).fill_(2.0)
    assert content_of([parameter_sums(given)]) != before


@pytest.mark.parametrize("parallel", [{"data_parallel_size": 2}, {"enable_eplb": True}])
def test_experts_do_not_count_where_ranks_of_other_engines_have_some(parallel: dict[str, Any]):
    changed = whole()
    changed["experts"] += 1
    ours, theirs = (
        parameter_sums(worker(each, enable_expert_parallel=True, **parallel)) for each in (whole(), changed)
    )
    assert ours == theirs
    assert len(ours) == 2 * 4, "of each layer: the norm, queries, keys and values, the projection down"


def test_an_adapters_layers_are_called_as_without_adapters():
    inner = torch.nn.Module()
    inner.base_layer = torch.nn.Linear(2, 2, bias=False)
    model = torch.nn.Module()
    model.q = inner
    given = worker(whole())
    given.get_model = lambda: model
    assert list(parameter_sums(given)) == ["q.weight"]


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [
        (torch.uint8, torch.uint8),
        (torch.int8, torch.uint8),
        (torch.bfloat16, torch.int16),
        (torch.float32, torch.int32),
        (torch.float64, torch.int64),
    ],
    ids=str,
)
def test_a_cpu_sums_as_other_devices_do(dtype: torch.dtype, bits: torch.dtype):
    """Torch would sum there too, fifteen times as slowly."""
    numbers = torch.randint(0, 256, (48, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    model, given = torch.nn.Module(), worker(whole())
    model.w = torch.nn.Parameter(numbers.view(dtype).t(), requires_grad=False)
    given.get_model = lambda: model
    assert parameter_sums(given) == {".w": int(numbers.view(bits).sum(dtype=torch.int64))}


def test_in_the_middle_of_an_update_nothing_can_be_said():
    given = worker(whole())
    given.get_model().to("meta")
    with pytest.raises(ModelError, match="meta"):
        content_of([parameter_sums(worker(whole())), parameter_sums(given)])


# ---- versions ------------------------------------------------------------------------------------------------------


def test_those_of_the_start_need_no_version_and_others_are_what_they_are():
    ours, theirs = WeightsVersion(), WeightsVersion()
    assert not ours.found("a")
    assert ours.text == ""
    assert ours.found("b")
    assert not ours.found("b")
    theirs.found("other start")
    theirs.found("b")
    assert ours.text == theirs.text == "content b"
    ours.found("a")
    assert ours.text == "", "they are again what they were"


def test_a_name_stands_for_them_until_they_change():
    version = WeightsVersion()
    version.found("a")
    version.named("step-1")
    assert version.text == "named step-1"
    version.found("b")
    assert version.text == "content b"
    version.named("step-2")
    assert version.text == "named step-2"


def test_as_long_as_nobody_knows_them_they_are_like_no_others():
    one, other = WeightsVersion(), WeightsVersion()
    for each in (one, other):
        each.lost()
    assert one.text != other.text != ""
    one.found("a")
    assert one.text == "content a", "whether it began with them nobody knows"
    other.named("step-1")
    assert other.text == "named step-1"
