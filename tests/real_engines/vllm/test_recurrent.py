"""Models with recurrent state, most of them beside attention: a request's state arrives, on any number of ranks.

Granite 4 has Mamba 2 with one group for all heads, which every rank has; Nemotron-H with two, which ranks divide;
Falcon-H1 has attention and Mamba 2 in every layer; Mamba 2 has no attention at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from examples.tiny_model import write
from tests.real_engines.prompts import prompts
from tests.real_engines.vllm.pairs import COUNT, Engines, Pair

from kvferry.applications.up.supervision import free_ports

GATED_DELTA_NET: dict[str, Any] = {"dtype": "bfloat16", "pool_mib": 128}
"""vLLM's kernels for gated delta nets compute nothing else on a CPU."""

pytestmark = [pytest.mark.servers, pytest.mark.full, pytest.mark.timeout(600)]


@pytest.fixture(
    scope="module",
    params=[
        "granite4",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("nemotron-h", "falcon-h1", "mamba2")),
    ],
)
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    begun = Engines(write(request.param, tmp_path_factory.mktemp(request.param)))
    for begin in (begun.alone, lambda: begun.prefill("prefill", step_tokens=128), lambda: begun.decode("decode")):
        begin()
    yield begun
    begun.close()


def check(engines: Engines, pair: Pair, seed: int) -> None:
    """The tokens are those of the undivided engine, no prompt was computed on the decode side, and no block is lost."""
    # Lengths around the edges of blocks and of steps: the state is that of exactly so many tokens.
    each = [*prompts(seed), *prompts(seed + 1, 6, shortest=126, longest=131)]
    before = pair.received
    outputs = pair.run(each, f"state-{seed}")
    expected = engines.alone().started().generate(each, COUNT)
    wrong = [number for number, output in enumerate(outputs) if output.tokens != expected[number]]
    assert not wrong, f"{len(wrong)} of {len(each)} prompts: {pair.said}"
    assert pair.received - before == len(each), "prompts were computed on the decode side"
    free = pair.free_blocks()
    assert pair.run(each[:1], f"once-more-{seed}")[0].tokens == expected[0]
    assert pair.free_blocks() == free


@pytest.mark.shows("vllm", "MambaSpec")
def test_state_and_pages_arrive_together(engines: Engines):
    check(engines, Pair(engines.prefill("prefill"), engines.decode("decode")), 40)


def test_tokens_depend_on_the_state(engines: Engines):
    """Else the tests beside this one would prove nothing."""
    pair = Pair(engines.prefill("prefill"), engines.decode("decode"))
    (prompt,) = prompts(42, 1, shortest=200)
    pair.prefill.ask("plant", "no state")
    (output,) = pair.run([prompt], "no-state")
    pair.prefill.ask("heal")
    assert output.tokens != engines.alone().started().generate([prompt], COUNT)[0]


def test_a_gateway_asks_one_side_after_the_other(engines: Engines):
    pair = Pair(engines.prefill("prefill"), engines.decode("decode"))
    each = prompts(43, 3, shortest=1)
    expected = engines.alone().started().generate(each, COUNT)
    assert [pair.run_in_turn(prompt, f"turn-{number}").tokens for number, prompt in enumerate(each)] == expected


def test_other_choices_of_a_request_are_computed(engines: Engines):
    """The first one has gone on, and its state with it.

    All of them in one step: vLLM's CPU worker fails at seeded choices of which a step computes a part.
    """
    pair = Pair(engines.prefill("prefill"), engines.decode("decode"))
    (prompt,) = prompts(44, 1, shortest=40)
    output = pair.run_in_turn(prompt, "choices", 3)
    alone = engines.alone().started()
    alone.submit("choices", prompt, COUNT, None, 3)
    assert output.choices == alone.output("choices").choices


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.long)])
def test_ranks_of_another_number_get_their_part_of_the_state(engines: Engines, prefill_tp: int, decode_tp: int):
    prefill = engines.prefill(f"prefill-tp{prefill_tp}" if prefill_tp > 1 else "prefill", tp=prefill_tp)
    decode = engines.decode(f"decode-tp{decode_tp}" if decode_tp > 1 else "decode", tp=decode_tp)
    check(engines, Pair(prefill, decode), 50 + decode_tp)


@pytest.mark.long
def test_vllms_own_connector_generates_the_same(engines: Engines):
    """A second reference beside the undivided engine, between ranks of the same number: NIXL, without kvferry."""
    ports = ({"VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)} for port in free_ports(2))
    stock = {"connector": "nixl", "settings": None}
    prefill = engines.prefill("stock-prefill", environment=next(ports), **stock)
    decode = engines.decode("stock-decode", environment=next(ports), **stock)
    theirs, ours = Pair(prefill, decode), Pair(engines.prefill("prefill"), engines.decode("decode"))
    each = [*prompts(46, 4), *prompts(47, 4, shortest=126, longest=131)]
    expected = engines.alone().started().generate(each, COUNT)
    for name, pair in (("theirs", theirs), ("ours", ours)):
        found = [pair.run_in_turn(prompt, f"{name}-{number}").tokens for number, prompt in enumerate(each)]
        assert found == expected, name
    assert theirs.decode.ask("metric", "vllm:nixl_xfer_time_seconds_count") >= len(each), "NIXL moved nothing"


@pytest.mark.long
def test_gated_delta_nets(tmp_path_factory: pytest.TempPathFactory):
    """Qwen3-Next: kernels round otherwise where a prompt's last token is computed by itself, as the decode side does.

    So the undivided engine is told to do that too.
    """
    engines = Engines(write("qwen3-next", tmp_path_factory.mktemp("qwen3-next")))
    try:
        alone = engines.begin("alone", connector="", step_tokens=480, **GATED_DELTA_NET)
        pair = Pair(engines.prefill("prefill", **GATED_DELTA_NET), engines.decode("decode", **GATED_DELTA_NET))
        for number, prompt in enumerate(prompts(45, 6, shortest=481, longest=481)):
            before = pair.received
            (output,) = pair.run([prompt], f"gdn-{number}")
            assert output.tokens == alone.started().generate([prompt], COUNT)[0]
            assert pair.received - before == 1
    finally:
        engines.close()
