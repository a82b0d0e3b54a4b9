"""What becomes of every family on every engine and in every shape, and which test shows it: docs/families.md.

A cell is a line: what changes its status changes that line. Tests read them too, so that a family which is refused
today and is exchanged tomorrow fails them until its line says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from tests.support.families import FAMILIES, Family


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
            "tests/unit/engines/test_vllm_guards.py",
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
    if shape in (Shape.TENSOR, Shape.DATA):  # a data-parallel engine of vLLM's is an engine of its own
        return _VLLM_TOKENS.get(name) or Cell(Status.BYTES, f"{_OF_RANKS}[{name}-2-4]")
    case = {Shape.PAGES: "blocks", Shape.STAGES: "stages"}[shape]
    return Cell(Status.BYTES, f"{_CROSSES}[{name}-{case}]")


def cells() -> Iterator[tuple[str, Family, Shape, Cell]]:
    """Yields every cell, with its engine."""
    for family in FAMILIES:
        for shape in Shape:
            yield "vLLM", family, shape, vllm_cell(family, shape)
