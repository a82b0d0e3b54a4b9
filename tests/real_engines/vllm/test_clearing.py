"""Loads into pools full of NaN, of a model for which vLLM clears blocks but those that are loaded.

Blocks are of 128 tokens on one side and of 256 on the other, and kernels divide both into pages of 32: a prompt's last
page is sent, and what its block has behind that page nobody has written when the request comes to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from examples.tiny_model import write
from tests.real_engines.prompts import prompts
from tests.real_engines.vllm.pairs import COUNT, Engines, Pair

pytestmark = [pytest.mark.servers, pytest.mark.timeout(600)]

PAGE = 32


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    begun = Engines(write("granite4", tmp_path_factory.mktemp("granite4")))
    begun.alone()
    begun.prefill("prefill", kernel_tokens=PAGE)
    begun.decode("decode", kernel_tokens=PAGE, block_tokens=256, is_asynchronous=True)
    yield begun
    begun.close()


def prompts_that_end_before_a_page() -> list[list[int]]:
    """What is generated comes to a page of which nothing was sent."""
    return [prompts(60 + pages, 1, shortest=PAGE * pages - 3, longest=PAGE * pages - 3)[0] for pages in (1, 2, 3, 5, 9)]


def choices_alone(engines: Engines, each: Sequence[Sequence[int]], choices: int) -> list[tuple[tuple[int, ...], ...]]:
    alone = engines.alone().started()
    for number, prompt in enumerate(each):
        alone.submit(f"alone-{number}", prompt, COUNT, None, choices)
    return [alone.output(f"alone-{number}").choices for number in range(len(each))]


@pytest.mark.parametrize("choices", [1, 2])
def test_what_a_load_has_not_written_is_cleared(engines: Engines, choices: int):
    """One choice fetches it for all, and the others copy what it has."""
    pair = Pair(engines.prefill("prefill"), engines.decode("decode"))
    each = prompts_that_end_before_a_page()
    expected = choices_alone(engines, each, choices)
    for engine in (pair.prefill, pair.decode):
        engine.ask("poison")
    before = pair.received
    outputs = pair.run(each, f"clearing-{choices}", choices)
    assert [output.choices for output in outputs] == expected, pair.said
    assert pair.received - before == len(each), "prompts were computed on the decode side"


@pytest.mark.parametrize("choices", [1, 2])
def test_tokens_depend_on_it(engines: Engines, choices: int):
    """Else the test beside this one would prove nothing: a kernel reads what lies behind the last token."""
    pair = Pair(engines.prefill("prefill"), engines.decode("decode"))
    each = prompts_that_end_before_a_page()
    expected = choices_alone(engines, each, choices)
    pair.decode.ask("poison")
    pair.decode.ask("plant", "nothing is cleared")
    outputs = pair.run(each, f"not-cleared-{choices}", choices)
    pair.decode.ask("heal")
    wrong = sum(output.choices != alone for output, alone in zip(outputs, expected, strict=True))
    assert wrong == len(each), f"{wrong} of {len(each)}"
