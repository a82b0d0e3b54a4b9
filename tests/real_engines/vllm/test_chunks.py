"""Llama 4 attends within chunks, here of 64 tokens, in three layers of four: only the current chunk travels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from examples.tiny_model import write
from tests.real_engines.prompts import prompts
from tests.real_engines.vllm.pairs import COUNT, Engines, Pair

pytestmark = [pytest.mark.servers, pytest.mark.full, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    begun = Engines(write("llama4", tmp_path_factory.mktemp("llama4")))
    begun.alone()
    for begin in (begun.prefill, begun.decode):
        begin(begin.__name__, step_tokens=128, prefix_cache=True)
    yield begun
    begun.close()


def around_edges(seed: int) -> list[list[int]]:
    """Prompts of any length, and such that end around the edges of chunks, of blocks, and of steps."""
    lengths = (1, 63, 64, 65, 66, 97, 128, 129, 130, 193, 257)
    return [*prompts(seed, 5), *(of_length(seed + length, length) for length in lengths)]


def of_length(seed: int, length: int) -> list[int]:
    return prompts(seed, 1, shortest=length)[0]


def check(engines: Engines, pair: Pair, each: Sequence[Sequence[int]], tag: str) -> None:
    """The tokens are those of the undivided engine, no prompt was computed on the decode side, and no block is lost."""
    before, free = pair.received, pair.free_blocks()
    outputs = pair.run(each, tag)
    expected = engines.alone().started().generate(each, COUNT)
    wrong = [len(each[number]) for number, output in enumerate(outputs) if output.tokens != expected[number]]
    assert not wrong, f"prompts of {wrong} tokens: {pair.said}"
    assert pair.received - before == sum(len(prompt) > 1 for prompt in each), "prompts were computed on the decode side"
    assert pair.free_blocks() == free


@pytest.mark.shows("vllm", "ChunkedLocalAttentionSpec")
def test_only_the_current_chunk_travels_and_tokens_are_the_same(engines: Engines):
    check(engines, Pair(engines.prefill("prefill"), engines.decode("decode")), around_edges(1), "chunks")


def test_a_prefix_that_is_here_ends_in_any_chunk(engines: Engines):
    """On either side or on both: what is needed begins in the same chunk, or in a later one."""
    pair = Pair(engines.prefill("prefill"), engines.decode("decode"))
    prompt = of_length(400, 300)
    for number, (side, length) in enumerate(
        [(pair.decode, 40), (pair.prefill, 100), (pair.decode, 100), (pair.decode, 128), (pair.prefill, 300)]
    ):
        side.generate([prompt[:length]], 1)
        longer = [prompt[:end] for end in (length + 1, length + 30, length + 66) if end <= len(prompt)]
        expected = engines.alone().started().generate(longer, COUNT)
        assert [pair.run([each], f"prefix-{number}-{len(each)}")[0].tokens for each in longer] == expected, pair.said


def test_tokens_depend_on_the_chunk(engines: Engines):
    """Else the tests beside this one would prove nothing."""
    pair = Pair(engines.prefill("prefill"), engines.decode("decode"))
    prompt = of_length(500, 190)
    pair.prefill.ask("plant", "no chunk")
    (output,) = pair.run([prompt], "no-chunk")
    pair.prefill.ask("heal")
    assert output.tokens != engines.alone().started().generate([prompt], COUNT)[0]


@pytest.mark.long
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 1), (1, 2)])
def test_ranks_of_another_number_get_their_heads(engines: Engines, prefill_tp: int, decode_tp: int):
    prefill = engines.prefill(f"prefill-tp{prefill_tp}" if prefill_tp > 1 else "prefill", tp=prefill_tp)
    decode = engines.decode(f"decode-tp{decode_tp}" if decode_tp > 1 else "decode", tp=decode_tp)
    check(engines, Pair(prefill, decode), around_edges(600 + decode_tp), f"tp-{decode_tp}")
