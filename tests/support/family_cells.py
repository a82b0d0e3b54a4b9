"""What becomes of every family on every engine and in every shape, and which test shows it: docs/families.md.

A cell is a line: what changes its status changes that line. Tests read them too, so that a family which is refused
today and is exchanged tomorrow fails them until its line says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from tests.support.families import FAMILIES
from tests.support.model_family import Family


class Shape(Enum):
    """How two engines differ, or are divided."""

    TENSOR = "tensor-parallel 1, 2, 4 to 1, 2, 4"
    PAGES = "pages of other sizes"
    STAGES = "pipeline stages"
    DATA = "data parallel"
    CONTEXT = "context parallel"


class Status(Enum):
    """What is known of a cell."""

    TOKENS = "tokens"
    BYTES = "bytes"
    ENGINE = "refused"
    NOT_YET = "not yet"


@dataclass(frozen=True, slots=True)
class Cell:
    """One engine, family and shape.

    Attributes:
        status: what is known.
        test: the test that shows it, as pytest names it; with its case, where that is of the family alone.
        why: why the engine itself cannot, or what kvferry lacks; empty where it is exchanged.
    """

    status: Status
    test: str
    why: str = ""

    def __post_init__(self) -> None:
        assert bool(self.why) == (self.status in (Status.ENGINE, Status.NOT_YET)), self


VLLM_FOLDER: Final = "tests/real_engines/vllm"
_BUILT: Final = f"{VLLM_FOLDER}/test_families.py"
_OF_RANKS: Final = f"{_BUILT}::test_every_rank_gets_what_it_would_have_computed"
_CROSSES: Final = f"{_BUILT}::test_requests_cross"
_REFUSED: Final = f"{_BUILT}::test_a_family_that_vllm_lacks_is_refused_by_vllm"


def _tokens(test: str) -> Cell:
    return Cell(Status.TOKENS, f"{VLLM_FOLDER}/{test}")


_VLLM_TOKENS: Final[Mapping[str, Cell]] = {
    "qwen3": _tokens("test_disaggregated.py::test_ranks_of_different_number"),
    "gemma-3": _tokens("test_hybrid.py::test_only_the_window_travels_and_tokens_are_the_same"),
    "llama-4": _tokens("test_chunks.py::test_only_the_current_chunk_travels_and_tokens_are_the_same"),
    "mimo-v2": _tokens("test_heads_by_layer.py::test_every_rank_gets_the_heads_of_its_layers"),
    "granite-4": _tokens("test_recurrent.py::test_state_and_pages_arrive_together"),
}
"""Where real engines generate the tokens of the undivided one. Ranks of any number are compared byte by byte, too."""

_NO_INDEX: Final = Cell(
    Status.NOT_YET,
    f"{_BUILT}::test_a_family_that_is_not_described_yet_is_refused",
    "the keys of the index are not described",
)
_VLLM_NOT_DESCRIBED: Final = ("deepseek-v3.2", "glm-5")
_VLLM_WITHOUT_STAGES: Final = ("mamba-2",)


def vllm_cell(family: Family, shape: Shape) -> Cell:
    """What vLLM's plug-in does with a family."""
    name = family.name
    if family.vllm is not None:
        return Cell(Status.ENGINE, f"{_REFUSED}[{name}]", family.vllm)
    if shape is Shape.CONTEXT:
        return Cell(
            Status.NOT_YET,
            "tests/unit/engines/test_vllm_guards.py::test_what_would_be_wrong_is_refused_by_name",
            "the server stops at its start and says what to leave out",
        )
    if name in _VLLM_NOT_DESCRIBED:
        return Cell(_NO_INDEX.status, f"{_NO_INDEX.test}[{name}]", _NO_INDEX.why)
    if shape is Shape.STAGES and name in _VLLM_WITHOUT_STAGES:
        return Cell(
            Status.ENGINE,
            f"{_BUILT}::test_stages_that_vllm_does_not_have_are_refused_by_vllm[{name}]",
            "vLLM's class for it does not have pipeline stages (`SupportsPP`)",
        )
    if shape is Shape.STAGES and family.drafts is not None:
        test = f"{_BUILT}::test_stages_of_which_the_last_alone_drafts_are_refused[{name}]"
        return Cell(Status.NOT_YET, test, "the stages before the last do not say what the last one's draft has")
    if shape in (Shape.TENSOR, Shape.DATA):  # a data-parallel engine of vLLM's is an engine of its own
        return _VLLM_TOKENS.get(name) or Cell(Status.BYTES, f"{_OF_RANKS}[{name}-2-4]")
    case = {Shape.PAGES: "blocks", Shape.STAGES: "stages"}[shape]
    return Cell(Status.BYTES, f"{_CROSSES}[{name}-{case}]")


# ---- SGLang ---------------------------------------------------------------------------------------------------------

SGLANG_FOLDER: Final = "tests/real_engines/sglang"
_MADE: Final = f"{SGLANG_FOLDER}/test_families.py"
_SGLANG_TOKENS: Final[Mapping[tuple[str, Shape], str]] = {
    ("llama-3", Shape.PAGES): "test_unequal_pages.py::test_tokens_are_those_of_the_undivided_engine",
    ("llama-3", Shape.STAGES): "test_disaggregated.py::test_pipeline_stages_on_the_prefill_side",
    ("mimo-v2", Shape.TENSOR): "test_heads_by_layer.py::test_tokens_are_those_of_the_undivided_engine",
}
"""Where real engines generate the tokens of the undivided one."""

_SPARSE: Final = ("deepseek-v3.2", "glm-5")
_SGLANG_WITHOUT_ATTENTION: Final = ("mamba-2", "mamba-1")
_SGLANG_FULL_ATTENTION: Final = (
    "qwen3",
    "qwen3-moe",
    "llama-3",
    "llama-4",
    "gemma-3",
    "mistral",
    "minimax-m2",
    "glm-4.5",
    "deepseek-v3",
)
"""Those that have nothing else in SGLang's pools: it keeps windows and chunks of some as long as the prompt."""


def sglang_cell(family: Family, shape: Shape) -> Cell:
    """What SGLang's plug-in does with a family."""
    name = family.name
    if family.sglang is not None:
        test = f"{_MADE}::test_a_family_that_sglang_lacks_is_not_in_its_registry[{name}]"
        return Cell(Status.ENGINE, test, family.sglang)
    if shape is Shape.CONTEXT:
        test = f"{SGLANG_FOLDER}/test_cache_kinds.py::test_what_kvferry_does_not_do_is_refused_at_the_start"
        return Cell(Status.NOT_YET, test, "the server stops at its start and names the option")
    if name in _SGLANG_WITHOUT_ATTENTION:
        test = f"{_MADE}::test_a_family_without_attention_is_refused[{name}]"
        return Cell(Status.NOT_YET, test, "requests without pages are not described")
    if shape is Shape.DATA:
        return Cell(
            Status.BYTES,
            "tests/unit/endpoint/test_exchange.py::test_requests_travel_between_any_two_data_parallel_groups",
        )
    if family.draft is not None:
        test = "tests/unit/engines/test_sglang_layouts.py::test_a_draft_models_cache_may_be_missing_on_the_other_side"
        return Cell(Status.NOT_YET, test, "a draft model's layers go to as many ranks alone, or stay behind")
    if name in _SPARSE:
        if shape is Shape.TENSOR:
            return Cell(Status.BYTES, f"{SGLANG_FOLDER}/test_companions.py::test_the_index_goes_with_its_latents")
        test = f"{SGLANG_FOLDER}/test_companions.py::test_what_cannot_be_cut_alike_is_refused"
        if shape is Shape.PAGES:
            return Cell(Status.ENGINE, test, "SGLang sets the size of pages itself where attention is sparse, to 64")
    if shape is Shape.STAGES and name not in _SGLANG_FULL_ATTENTION:
        if name in _SPARSE:
            test = "tests/unit/engines/test_sglang_companions.py::test_a_stages_index_is_that_of_its_layers"
            return Cell(Status.NOT_YET, test, "stages are described, and no request has crossed from one")
        test = f"{_MADE}::test_stages_with_more_than_full_attention_are_refused[{name}]"
        return Cell(Status.NOT_YET, test, "stages are described of full attention alone")
    if (name, shape) in _SGLANG_TOKENS:
        return Cell(Status.TOKENS, f"{SGLANG_FOLDER}/{_SGLANG_TOKENS[name, shape]}")
    test, case = {
        Shape.TENSOR: ("test_every_rank_gets_what_it_would_have_computed", f"{name}-2-4"),
        Shape.PAGES: ("test_pages_may_differ_in_size", name),
        Shape.STAGES: ("test_stages_of_the_prefill_side_send_their_layers", name),
    }[shape]
    return Cell(Status.BYTES, f"{_MADE}::{test}[{case}]")


def cells() -> Iterator[tuple[str, Family, Shape, Cell]]:
    """Yields every cell, with its engine."""
    for family in FAMILIES:
        for shape in Shape:
            yield "vLLM", family, shape, vllm_cell(family, shape)
    for family in FAMILIES:
        for shape in Shape:
            yield "SGLang", family, shape, sglang_cell(family, shape)
