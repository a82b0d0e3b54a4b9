"""What becomes of every family on every engine and in every shape, and which test shows it: docs/design/families.md.

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


@dataclass(frozen=True, slots=True)
class Cell:
    """One engine, family and shape.

    Attributes:
        status: what is known.
        test: the test that shows it, as pytest names it; with its case, where that is of the family alone.
        why: why the engine itself cannot; empty where it is exchanged.
    """

    status: Status
    test: str
    why: str = ""

    def __post_init__(self) -> None:
        assert bool(self.why) == (self.status is Status.ENGINE), self


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

WINDOWS: Final = ("gemma-3", "gemma-4", "gpt-oss", "mimo-v2", "llama-4")
"""Families of which some layers attend to the last tokens alone, or to those of a chunk."""

STATES: Final = (
    *("granite-4", "nemotron-h", "falcon-h1", "jamba", "bamba", "lfm-2", "qwen3-next", "qwen3.5", "kimi-linear"),
    *("minimax-m1", "ling-2.5"),
)
"""Families with recurrent state beside attention."""

WITHOUT_ATTENTION: Final = ("mamba-1", "mamba-2")
SPARSE: Final = ("deepseek-v3.2", "glm-5")
"""Families with the index of DeepSeek's sparse attention. Their ranks are built elsewhere."""

_STAGES: Final = "tests/unit/engines/test_vllm_stages.py"
_SHARES: Final = f"{VLLM_FOLDER}/test_shares.py"
_VLLM_SPARSE: Final[Mapping[Shape, Cell]] = {
    Shape.TENSOR: Cell(Status.BYTES, f"{VLLM_FOLDER}/test_cache_forms.py::test_what_a_model_keeps_arrives"),
    Shape.DATA: Cell(Status.BYTES, f"{VLLM_FOLDER}/test_cache_forms.py::test_what_a_model_keeps_arrives"),
    Shape.PAGES: Cell(
        Status.ENGINE,
        "tests/unit/engines/test_vllm_forms.py::"
        "test_an_order_depends_on_the_pages_of_a_kernel_and_on_whether_they_are_shuffled",
        "the scales of the index lie behind the keys of a page, which has the size that vLLM's kernel wants",
    ),
    Shape.STAGES: Cell(Status.BYTES, f"{_STAGES}::test_what_each_stage_has_arrives_where_it_is_needed"),
    Shape.CONTEXT: Cell(Status.BYTES, f"{VLLM_FOLDER}/test_divided_index.py::test_an_index_arrives_with_its_latents"),
}
_VLLM_WITHOUT_STAGES: Final = ("mamba-2",)


def vllm_cell(family: Family, shape: Shape) -> Cell:
    """What vLLM's plug-in does with a family."""
    name = family.name
    if family.vllm is not None:
        return Cell(Status.ENGINE, f"{_REFUSED}[{name}]", family.vllm)
    if name in SPARSE:
        return _VLLM_SPARSE[shape]
    if shape is Shape.CONTEXT:
        return _vllm_context(name)
    if shape is Shape.STAGES and name in _VLLM_WITHOUT_STAGES:
        return Cell(
            Status.ENGINE,
            f"{_BUILT}::test_stages_that_vllm_does_not_have_are_refused_by_vllm[{name}]",
            "vLLM's class for it does not have pipeline stages (`SupportsPP`)",
        )
    if shape is Shape.STAGES and family.drafts is not None:
        return Cell(Status.BYTES, f"{_STAGES}::test_a_draft_in_one_stage_may_be_missing_on_the_other_side")
    if shape in (Shape.TENSOR, Shape.DATA):  # a data-parallel engine of vLLM's is an engine of its own
        return _VLLM_TOKENS.get(name) or Cell(Status.BYTES, f"{_OF_RANKS}[{name}-2-4]")
    case = {Shape.PAGES: "blocks", Shape.STAGES: "stages"}[shape]
    return Cell(Status.BYTES, f"{_CROSSES}[{name}-{case}]")


def _vllm_context(name: str) -> Cell:
    if name in WINDOWS:
        test = f"{_SHARES}::test_what_the_docs_say_that_vllm_forbids_it_forbids_in_these_words"
        return Cell(Status.ENGINE, test, "vLLM lets ranks share no tokens of layers with windows or chunks")
    if name in WITHOUT_ATTENTION:
        test = "tests/unit/engines/test_vllm_shares.py::test_recurrent_state_is_divided_by_tensor_parallelism_alone"
        return Cell(Status.BYTES, test)
    return Cell(Status.BYTES, f"{_SHARES}::test_tokens_arrive_in_the_slots_that_vllm_looks_in")


# ---- SGLang ---------------------------------------------------------------------------------------------------------

SGLANG_FOLDER: Final = "tests/real_engines/sglang"
_MADE: Final = f"{SGLANG_FOLDER}/test_families.py"
_SGLANG_TOKENS: Final[Mapping[tuple[str, Shape], str]] = {
    ("llama-3", Shape.PAGES): "test_unequal_pages.py::test_tokens_are_those_of_the_undivided_engine",
    ("llama-3", Shape.STAGES): "test_disaggregated.py::test_pipeline_stages_on_the_prefill_side",
    ("mimo-v2", Shape.TENSOR): "test_heads_by_layer.py::test_tokens_are_those_of_the_undivided_engine",
}
"""Where real engines generate the tokens of the undivided one."""

_SGLANG_STAGES: Final = f"{SGLANG_FOLDER}/test_stages.py"
_DRAFTS: Final = f"{SGLANG_FOLDER}/test_drafts.py"
_DIVIDED: Final = f"{SGLANG_FOLDER}/test_divided_tokens.py"
_SGLANG_WINDOWS: Final = ("gemma-4", "gpt-oss", "mimo-v2")
"""Those with windows in a pool of their own: SGLang keeps windows and chunks of others as long as the prompt."""


def sglang_cell(family: Family, shape: Shape) -> Cell:
    """What SGLang's plug-in does with a family."""
    name = family.name
    if family.sglang is not None:
        test = f"{_MADE}::test_a_family_that_sglang_lacks_is_not_in_its_registry[{name}]"
        return Cell(Status.ENGINE, test, family.sglang)
    if shape is Shape.DATA:
        return Cell(Status.BYTES, f"{_DIVIDED}::test_each_data_parallel_group_sends_its_own_requests")
    if shape is Shape.CONTEXT:
        return _sglang_context(family)
    if family.draft is not None:
        if shape is Shape.STAGES:
            return Cell(Status.BYTES, f"{_DRAFTS}::test_a_draft_model_is_sent_by_the_last_pipeline_stage")
        if shape is Shape.PAGES:
            return Cell(Status.BYTES, f"{_DRAFTS}::test_pages_may_differ_in_size")
        return Cell(Status.BYTES, f"{_DRAFTS}::test_a_draft_models_cache_is_cut_by_its_own_heads")
    if name in SPARSE:
        if shape is Shape.TENSOR:
            return Cell(Status.BYTES, f"{SGLANG_FOLDER}/test_companions.py::test_the_index_goes_with_its_latents")
        test = f"{SGLANG_FOLDER}/test_companions.py::test_what_cannot_be_cut_alike_is_refused"
        if shape is Shape.PAGES:
            return Cell(Status.ENGINE, test, "SGLang sets the size of pages itself where attention is sparse, to 64")
        return Cell(Status.BYTES, f"{SGLANG_FOLDER}/test_companions.py::test_a_stages_index_goes_with_its_latents")
    if shape is Shape.STAGES and name in STATES:
        return Cell(Status.BYTES, f"{_SGLANG_STAGES}::test_stages_have_their_own_recurrent_state")
    if shape is Shape.STAGES and name in _SGLANG_WINDOWS:
        return Cell(Status.BYTES, f"{_SGLANG_STAGES}::test_stages_have_their_own_full_attention_and_windows")
    if (name, shape) in _SGLANG_TOKENS:
        return Cell(Status.TOKENS, f"{SGLANG_FOLDER}/{_SGLANG_TOKENS[name, shape]}")
    test, case = {
        Shape.TENSOR: ("test_every_rank_gets_what_it_would_have_computed", f"{name}-2-4"),
        Shape.PAGES: ("test_pages_may_differ_in_size", name),
        Shape.STAGES: ("test_stages_of_the_prefill_side_send_their_layers", name),
    }[shape]
    return Cell(Status.BYTES, f"{_MADE}::{test}[{case}]")


def _sglang_context(family: Family) -> Cell:
    if family.name in _SGLANG_WINDOWS:
        return Cell(
            Status.ENGINE,
            f"{_DIVIDED}::test_sglang_cannot_write_windows_where_ranks_divide_tokens",
            "SGLang's pool of windows does not take which tokens are a rank's own (`dcp_kv_mask`), with `--dcp-size`",
        )
    if family.draft is not None or family.name in SPARSE:
        test = "test_a_draft_and_an_index_have_every_token_on_ranks_that_divide_them"
        return Cell(Status.BYTES, f"{_DIVIDED}::{test}")
    if family.name in (*STATES, *WITHOUT_ATTENTION):
        test = "test_state_is_divided_among_context_parallel_ranks_that_share_their_group"
        return Cell(Status.BYTES, f"{_DIVIDED}::{test}")
    return Cell(Status.BYTES, f"{_DIVIDED}::test_tokens_may_go_round_on_both_sides")


def cells() -> Iterator[tuple[str, Family, Shape, Cell]]:
    """Yields every cell, with its engine."""
    for family in FAMILIES:
        for shape in Shape:
            yield "vLLM", family, shape, vllm_cell(family, shape)
    for family in FAMILIES:
        for shape in Shape:
            yield "SGLang", family, shape, sglang_cell(family, shape)
