"""Prefill and decode on two real vLLM engines: greedy tokens are those of one engine that does everything itself."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from examples.tiny_model import write
from tests.real_engines.prompts import prompts
from tests.real_engines.vllm.engine import EngineError, Output
from tests.real_engines.vllm.pairs import COUNT, Engines, Pair
from tests.support.real_transport import skip_unless_installed
from tests.support.waiting import eventually

from kvferry.engines.vllm.parameters import ROOM

pytestmark = [pytest.mark.servers, pytest.mark.timeout(600)]

ENDS_S = 5.0
"""By when both sides have ended, and have all blocks back, after one has refused a request."""

ABORTED_S = 2.0
"""The same after one has given a request up."""


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    begun = Engines(write("qwen3", tmp_path_factory.mktemp("qwen3")))
    begun.alone()
    begun.prefill("prefill")
    begun.decode("decode", prefix_cache=True, is_asynchronous=True)  # the others schedule as before
    yield begun
    begun.close()


@pytest.fixture(scope="module")
def both(engines: Engines) -> Pair:
    """One engine of either kind, of one rank each."""
    return Pair(engines.prefill("prefill"), engines.decode("decode"))


def are_as_alone(engines: Engines, each: Sequence[Sequence[int]], outputs: Sequence[Output]) -> None:
    """The tokens are those of the undivided engine."""
    assert [output.tokens for output in outputs] == engines.alone().started().generate(each, COUNT)


def check(engines: Engines, pair: Pair, each: Sequence[Sequence[int]], tag: str, *, by_transfer: bool = False) -> None:
    """The tokens of all prompts at once are right, and no prompt was computed on the decode side."""
    before = pair.received
    outputs = pair.run(each, tag, by_transfer=by_transfer)
    assert all(output.tokens for output in outputs), pair.said
    are_as_alone(engines, each, outputs)
    assert pair.received - before == len(each), "prompts were computed on the decode side"


@pytest.mark.shows("vllm", "FullAttentionSpec")
def test_sixteen_prompts_at_once(engines: Engines, both: Pair):
    check(engines, both, prompts(1), "equal")


def test_one_server_after_the_other(engines: Engines, both: Pair):
    each, before = prompts(2, 3), both.received
    are_as_alone(engines, each, [both.run_in_turn(prompt, f"turn-{number}") for number, prompt in enumerate(each)])
    assert both.received - before == len(each), "prompts were computed on the decode side"


@pytest.mark.parametrize("prefill_tp", [2, 1])
def test_ranks_of_different_number(engines: Engines, prefill_tp: int):
    if prefill_tp == 2:
        # By the name that gateways want which refuse ours: Dynamo's handler.
        pair = Pair(engines.prefill("prefill-tp2", tp=2, called="NixlConnector"), engines.decode("decode"))
    else:
        pair = Pair(engines.prefill("prefill"), engines.decode("decode-tp2", tp=2))
    check(engines, pair, prompts(3 + prefill_tp), f"tp{prefill_tp}")


def test_pages_leave_while_a_prompt_is_computed(engines: Engines):
    """A prompt of 600 tokens in steps of 64; the decode engine has most of it before the last step."""
    pair = Pair(engines.prefill("prefill-chunked", step_tokens=64), engines.decode("decode"))
    each = prompts(7)
    before = pair.prefill.ask("submitted_chunks")
    check(engines, pair, each, "chunked")
    assert pair.prefill.ask("submitted_chunks") - before > 2 * len(each)


@pytest.mark.full
def test_pages_leave_so_too_where_a_gateway_names_the_transfer_to_both(engines: Engines):
    pair = Pair(engines.prefill("prefill-chunked", step_tokens=64), engines.decode("decode"))
    each = prompts(9, 3, shortest=300)
    before = pair.prefill.ask("submitted_chunks")
    check(engines, pair, each, "transfer", by_transfer=True)
    assert pair.prefill.ask("submitted_chunks") - before > 2 * len(each)


LAYERS = {"layer_ranges": 4}


def test_layers_leave_while_the_next_ones_are_computed(engines: Engines):
    """Of a model of four layers, in steps of 64 tokens."""
    pair = Pair(engines.prefill("prefill-layers", step_tokens=64, settings=LAYERS), engines.decode("decode"))
    each = prompts(41)
    before = pair.prefill.ask("chunks_of_some_layers")
    check(engines, pair, each, "layers")
    assert pair.prefill.ask("chunks_of_some_layers") - before > 2 * 3 * len(each)


@pytest.mark.full
def test_layers_that_leave_before_they_are_computed_change_the_tokens(engines: Engines):
    pair = Pair(engines.prefill("prefill-layers", step_tokens=64, settings=LAYERS), engines.decode("decode"))
    each = prompts(42, 4, shortest=200)
    pair.prefill.ask("plant", "layers leave before they are computed")
    outputs = pair.run(each, "early")
    pair.prefill.ask("heal")
    right = engines.alone().started().generate(each, COUNT)
    assert all(output.tokens for output in outputs)
    assert [output.tokens for output in outputs] != right


@pytest.mark.full
def test_another_transport_carries_the_same_tokens_and_both_sides_must_have_it(engines: Engines):
    skip_unless_installed("mooncake")
    over = {"transport": "mooncake"}
    decode = engines.decode("decode-mooncake", settings=over)
    check(engines, Pair(engines.prefill("prefill-mooncake", tp=2, settings=over), decode), prompts(61), "mooncake")
    unlike = Pair(engines.prefill("prefill"), decode)
    unlike.run(prompts(62, 1), "unlike")
    assert "transport: prefill rank 0 of 'prefill' uses nixl, this decode rank mooncake" in unlike.said


def test_what_the_decode_side_has_does_not_travel(engines: Engines, both: Pair):
    (prompt,) = prompts(8, 1, shortest=600)
    first = both.run([prompt[:400]], "cold")
    cold_bytes = both.prefill.ask("metric", "vllm:kvferry_sent_bytes_sum")
    both.prefill.wait_idle()
    warm = both.run([prompt], "warm")
    both.prefill.wait_idle()
    are_as_alone(engines, [prompt[:400], prompt], [*first, *warm])
    sent = both.prefill.ask("metric", "vllm:kvferry_sent_bytes_sum") - cold_bytes
    block_bytes = both.prefill.ask("block_bytes")
    assert sent == (19 - 12) * block_bytes, "600 tokens are 19 blocks of 32; 12 whole ones were there"


def test_pages_of_different_size_are_refused_in_words_and_both_sides_end(engines: Engines):
    """On CPU a block's inner order depends on its size. vLLM's own connector takes it, and answers something else."""
    pair = Pair(engines.prefill("prefill"), engines.decode("decode-64", block_tokens=64))
    free = pair.free_blocks()
    for number, prompt in enumerate(prompts(9, 3, shortest=100)):  # the first connects
        pair.begin(f"refused-{number}", prompt)
        begun_at = time.monotonic()
        assert pair.decode.output(f"refused-{number}").reason == "error"
        pair.prefill.output(f"refused-{number}")
        assert pair.free_blocks() == free
        assert time.monotonic() - begun_at < ENDS_S
    assert "32 tokens a page" in pair.said
    assert "64 tokens a page" in pair.said
    said = r"(room \d+): decode rank 0 of 'decode-64' refused it: IncompatiblePeerError: "
    refused = {room for line in pair.prefill.ask("logged") for room in re.findall(said, line)}
    assert len(refused) == 4, "those three, and the control of every pair"


def test_a_request_that_ends_on_the_prefill_side_before_it_is_computed_fails_on_the_other(engines: Engines, both: Pair):
    """It never had a room there."""
    free = both.free_blocks()
    (prompt,) = prompts(17, 1, shortest=100)
    name, room = "never-computed", 10**6
    both.prefill.ask("submit_and_abort", name, prompt, {"do_remote_decode": True, ROOM: room})
    parameters = {"do_remote_prefill": True, "remote_engine_id": both.prefill.shape.name, ROOM: room}
    both.decode.submit(name, prompt, COUNT, parameters)
    assert both.decode.output(name, ENDS_S).reason == "error"
    assert "ended on the prefill side before any of it was computed" in both.said
    assert both.free_blocks() == free


def test_an_engine_that_a_gateway_misspells_is_named_in_the_logs_of_both_servers(engines: Engines, tmp_path: Path):
    """In vLLM's own log, which is what an operator has. Once before any decode server is connected, and once after."""
    logs = {name: tmp_path / f"{name}.log" for name in ("prefill-asked", "decode-misled")}
    settings = {"bootstrap_timeout_s": 12.0}
    prefill = engines.prefill("prefill-asked", log=logs["prefill-asked"], settings=settings).started()
    decode = engines.decode("decode-misled", log=logs["decode-misled"], settings=settings).started()
    (prompt,) = prompts(18, 1, shortest=100)

    def misspell(room: int, connected: str) -> None:
        name = f"misspelled-{room}"
        prefill.submit(name, prompt, 1, {"do_remote_decode": True, ROOM: room})
        parameters = {"do_remote_prefill": True, "remote_engine_id": f"prefil-{room}", ROOM: room}
        decode.submit(name, prompt, COUNT, parameters)
        here = rf"WARNING .*\[early_warnings\.py:\d+\] prefill engine 'prefil-{room}' is not found: .*'prefill-asked'"
        there = (
            rf"WARNING .*\[early_warnings\.py:\d+\] prefill rank 0 of 'prefill-asked': .* room {room}, .*{connected}"
        )
        for said, server in ((here, "decode-misled"), (there, "prefill-asked")):
            eventually(f"{server} says it", lambda s=said, log=logs[server]: re.search(s, log.read_text()) is not None)

    misspell(1_000_001, "no decode rank is connected")
    assert decode.output("misspelled-1000001").reason == "error"
    prefill.output("misspelled-1000001")
    Pair(prefill, decode).run([prompt], "connected")
    misspell(1_000_002, "connected are decode ranks, 1 of 'decode-misled'")
    assert decode.output("misspelled-1000002").reason == "error"
    prefill.output("misspelled-1000002")


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_prefill_engine_that_is_killed_fails_or_costs_a_recomputation(engines: Engines, policy: str):
    decode = engines.decode("decode") if policy == "fail" else engines.decode("decode-recompute", policy=policy)
    pair = Pair(engines.prefill(f"killed-{policy}", step_tokens=64), decode)
    expected = engines.alone().started().generate(prompts(10, 1, shortest=600), COUNT)
    (prompt,) = prompts(10, 1, shortest=600)
    pair.run(prompts(11, 1, shortest=40), f"before-{policy}")
    before = pair.prefill.ask("submitted_chunks")
    pair.begin(f"lost-{policy}", prompt)
    while pair.prefill.ask("submitted_chunks") - before < 3:
        time.sleep(0.001)
    pair.prefill.kill()
    killed_at = time.monotonic()
    output = pair.decode.output(f"lost-{policy}")
    assert time.monotonic() - killed_at < 5.0
    if policy == "fail":
        assert output.reason == "error"
    else:
        assert output.tokens == expected[0]
    assert "has ended: its process" in "\n".join(pair.decode.ask("logged"))
    pair.decode.wait_idle()


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("settings", [{}, LAYERS], ids=["whole steps", "layers"])
def test_an_abort_in_the_middle_gives_every_block_back_on_both_sides(
    engines: Engines, side: str, settings: dict[str, int]
):
    """The prefill engine stands still with a prompt half computed, or has computed it and withholds its end."""
    called = "prefill-layers" if settings else "prefill-chunked"
    pair = Pair(engines.prefill(called, step_tokens=64, settings=settings), engines.decode("decode"))
    free, name = pair.free_blocks(), f"aborted-{side}-{called}"
    (prompt,) = prompts(12 + len(side), 1, shortest=600)
    pair.prefill.ask("plant", {"prefill": "no more steps", "decode": "no end"}[side])

    def free_now() -> tuple[int, int]:
        return pair.prefill.ask("free_blocks"), pair.decode.ask("free_blocks")

    pair.begin(name, prompt)
    eventually("a part of it is sent, and no more", pair.prefill.ask, "is_in_the_middle")
    assert all(now < then for now, then in zip(free_now(), free, strict=True)), "nothing is under way"
    aborted_at = time.monotonic()
    (pair.prefill if side == "prefill" else pair.decode).ask("abort", name)
    eventually("every block is back on both sides", lambda: free_now() == free)
    took_s = time.monotonic() - aborted_at
    pair.prefill.ask("heal")
    assert took_s < ABORTED_S
    if side == "prefill":
        assert pair.decode.output(name).reason == "error"
        assert "aborted on the prefill side" in pair.said
    else:
        pair.prefill.output(name)
    check(engines, pair, prompts(13, 4), f"after-{side}-{called}")


def test_a_decode_engine_that_aborts_lets_both_sides_go_on(engines: Engines, both: Pair):
    """At ten moments, from before a room is open to after its end."""
    free = both.free_blocks()
    (prompt,) = prompts(12, 1, shortest=600)
    for number in range(10):
        both.begin(f"aborted-{number}", prompt)
        time.sleep(0.01 * number)
        aborted_at = time.monotonic()
        both.decode.ask("abort", f"aborted-{number}")
        both.prefill.output(f"aborted-{number}")
        assert both.free_blocks() == free
        assert time.monotonic() - aborted_at < ABORTED_S, "every block is back on both sides"
    check(engines, both, prompts(13, 4), "after-aborts")


CHOICES = 3


def check_choices(engines: Engines, pair: Pair, prompt: Sequence[int], output: Output, name: str) -> None:
    """The tokens of all choices are right."""
    alone = engines.alone().started()
    alone.submit(name, prompt, COUNT, None, CHOICES)
    expected = alone.output(name).choices
    assert len(set(expected)) == CHOICES, "choices that do not differ show nothing"
    assert output.choices == expected, pair.said


@pytest.mark.full
@pytest.mark.parametrize("decode", ["decode", "decode-recompute"], ids=["prefix cache", "no prefix cache"])
def test_three_choices_share_one_cache(engines: Engines, decode: str):
    """Asked for at once or one server after the other; on the decode side one choice fetches it for all."""
    changes = {"prefix_cache": True} if decode == "decode" else {"policy": "recompute"}
    pair = Pair(engines.prefill("prefill"), engines.decode(decode, **changes))
    free, before, said = pair.free_blocks(), pair.received, pair.said
    at_once, in_turn = prompts(17 + len(decode), 2, shortest=300, longest=420)
    pair.begin("choices-at-once", at_once, choices=CHOICES)
    pair.prefill.output("choices-at-once")
    check_choices(engines, pair, at_once, pair.decode.output("choices-at-once"), "at-once")
    check_choices(engines, pair, in_turn, pair.run_in_turn(in_turn, "choices-in-turn", CHOICES), "in-turn")
    assert pair.received - before == 2, "one fetch for each request"
    begun_at = time.monotonic()
    assert pair.free_blocks() == free
    assert time.monotonic() - begun_at < 2.0, "blocks waited for somebody who does not come"
    assert pair.said == said, "something went wrong on the way"


@pytest.mark.full
def test_choices_are_computed_from_what_was_copied(engines: Engines):
    """What the test above asserts can fail."""
    pair = Pair(engines.prefill("prefill"), engines.decode("decode-recompute", policy="recompute"))
    (prompt,) = prompts(41, 1, shortest=300)
    pair.decode.ask("plant", "choices copy nothing")
    try:
        with pytest.raises(AssertionError):
            check_choices(engines, pair, prompt, pair.run_in_turn(prompt, "copied", CHOICES), "copied")
    finally:
        pair.decode.ask("heal")


@pytest.mark.full
def test_in_a_multi_connector_beside_one_without_hybrid_caches(engines: Engines, tmp_path: Path):
    storage = {
        "kv_connector": "ExampleConnector",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    prefill = engines.prefill("prefill-beside", beside=(storage,), step_tokens=64)
    decode = engines.decode("decode-beside", beside=(), is_asynchronous=True)
    pair = Pair(prefill, decode)
    free = pair.free_blocks()
    check(engines, pair, prompts(42, 6), "beside")
    assert pair.free_blocks() == free
    assert any(tmp_path.rglob("*.safetensors")), "the other connector did nothing: the test shows nothing"


def offloading(journal: Path, **more: Any) -> dict[str, Any]:
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "HostSpec",
            "spec_module_path": "tests.real_engines.vllm.host_memory",
            "cpu_bytes_to_use": 256 << 20,
            "journal": str(journal),
            **more,
        },
    }


def counted(journal: Path, what: str) -> int:
    """Returns how many blocks were stored in host memory, or loaded."""
    lines = [line.split() for line in journal.read_text().splitlines()] if journal.exists() else []
    return sum(int(count) for name, count in lines if name == what)


CROWDED: dict[str, Any] = {"prefix_cache": True, "pool_mib": 9, "step_tokens": 64}
"""So that what a request leaves in the prefix cache is soon gone."""


def and_a_turn_more(each: Sequence[Sequence[int]]) -> list[list[int]]:
    return [
        [*prompt, *more] for prompt, more in zip(each, prompts(53, len(each), shortest=40, longest=60), strict=True)
    ]


@pytest.mark.full
def test_in_a_multi_connector_beside_vllms_offloading_to_host_memory(engines: Engines, tmp_path: Path):
    """A prefill server sends what it has back from host memory, and a decode server keeps there what it was sent.

    Neither finds there what other weights have computed.
    """
    kept, received = tmp_path / "prefill", tmp_path / "decode"
    prefill = engines.prefill("prefill-offloads", beside=(offloading(kept),), **CROWDED)
    decode = engines.decode("decode-offloads", beside=(offloading(received),), prefix_cache=True, is_asynchronous=True)
    pair = Pair(prefill, decode)
    free = pair.free_blocks()
    first, others = prompts(51, 2, shortest=300, longest=400), prompts(52, 8, shortest=400)
    check(engines, pair, first, "first")
    check(engines, pair, others, "others")
    before = counted(kept, "loaded")
    check(engines, pair, and_a_turn_more(first), "again")
    assert counted(kept, "loaded") > before, "the prefill server had all of it: the test shows nothing"
    assert counted(received, "stored") > 0
    assert pair.free_blocks() == free
    changed = [prefill, decode, engines.alone().started()]
    other = write("qwen3", tmp_path / "other", seed=12)
    running, before = prompts(56, 1, shortest=300), counted(kept, "stored")
    prefill.submit("running", running[0], 400)
    eventually("a request that runs is in host memory", lambda: counted(kept, "stored") > before)
    for engine in changed:
        engine.ask("rpc", "reload_weights", {"weights_path": str(other)})
    assert prefill.output("running").reason == "length"
    check(engines, pair, [*first, *running], "with other weights")
    for engine in changed:
        engine.ask("rpc", "reload_weights", {"weights_path": str(write("qwen3", tmp_path / "as before"))})


@pytest.mark.full
def test_blocks_that_another_connector_still_reads_are_fetched_into_once_it_has(engines: Engines, tmp_path: Path):
    """It stores what a request has computed last once that has ended, and the one that waits gets its blocks then."""
    host, crowded = tmp_path / "decode", {**CROWDED, "step_tokens": 512, "is_asynchronous": True}
    keeps = offloading(host, offload_prompt_only=False)
    decode = engines.decode("decode-reads", beside=(keeps,), **crowded).started()
    pair = Pair(engines.prefill("prefill"), decode)
    (runs,), (ends,), (comes,), (more,) = (
        prompts(58 + number, 1, shortest=length) for number, length in enumerate((200, 300, 600, 20))
    )
    pair.prefill.submit("comes", comes, 1, {"do_remote_decode": True})
    parameters = pair.prefill.output("comes").parameters
    decode.ask("slow_down", 0.1)
    decode.submit("runs", runs, 60)
    decode.submit("ends", ends, 21)  # the last but one fills a block
    decode.submit("comes", comes, 4, parameters)
    longer = [*ends, *decode.output("ends").tokens, *more]
    decode.wait_idle()
    before = counted(host, "loaded")
    found = decode.generate([longer], COUNT)
    assert counted(host, "loaded") > before, "it had all of it: the test shows nothing"
    assert found == engines.alone().started().generate([longer], COUNT)
    assert len(decode.output("comes").tokens) == 4


@pytest.mark.full
def test_a_request_that_another_connector_loads_is_not_fetched(engines: Engines, tmp_path: Path):
    """One that stands before ours on a decode server: the prefill server is told, and gives the blocks back."""
    host = tmp_path / "decode"
    host_first = {"before": (offloading(host),), "beside": (), "policy": "recompute"}
    decode = engines.decode("decode-loads", **host_first, **CROWDED, is_asynchronous=True)
    pair = Pair(engines.prefill("prefill"), decode)
    free = pair.free_blocks()
    first, others = prompts(54, 2, shortest=300, longest=400), prompts(55, 8, shortest=400)
    check(engines, pair, first, "here-first")
    check(engines, pair, others, "here-others")
    longer, received = and_a_turn_more(first), pair.received
    are_as_alone(engines, longer, pair.run(longer, "here-again"))
    assert counted(host, "loaded") > 0, "the decode server had all of it: the test shows nothing"
    assert pair.received == received
    eventually("every block is back on both sides", lambda: pair.free_blocks() == free)


@pytest.mark.full
@pytest.mark.parametrize("settings", [{}, LAYERS], ids=["whole steps", "layers"])
def test_requests_that_are_preempted_while_they_are_sent_end_well_or_are_computed_again(
    engines: Engines, settings: dict[str, int]
):
    """Requests that only the prefill engine has grow, and take blocks from those that are computed to be sent."""
    called = f"prefill-crowded{'-layers' if settings else ''}"
    prefill = engines.prefill(called, step_tokens=64, pool_mib=9, settings=settings)
    pair = Pair(prefill, engines.decode("decode-recompute", policy="recompute"))
    free, before = pair.free_blocks(), prefill.ask("preemptions")
    own, each = prompts(15, 3, shortest=200, longest=260), prompts(16, 6, shortest=400)
    for number, prompt in enumerate(own):
        prefill.submit(f"own-{number}", prompt, 300)
    outputs = pair.run(each, called)
    are_as_alone(engines, each, outputs)
    for number in range(len(own)):
        assert len(prefill.output(f"own-{number}").tokens) == 300
    assert prefill.ask("preemptions") > before, "nothing was preempted: the test shows nothing"
    assert pair.free_blocks() == free


def test_a_request_that_is_preempted_after_its_last_step_was_scheduled_is_computed_and_sent_again(engines: Engines):
    """Weights that are changed, or a pool that is full, take its blocks while the step that fills them is queued."""
    pair = Pair(engines.prefill("prefill-chunked", step_tokens=64), engines.decode("decode"))
    free, each, before = pair.free_blocks(), prompts(19, 3, shortest=300), pair.received
    outputs = []
    for number, prompt in enumerate(each):
        name, begun_at = f"taken-{number}", time.monotonic()
        pair.prefill.ask("submit_and_preempt", name, prompt, {"do_remote_decode": True})
        pair.decode.submit(name, prompt, COUNT, pair.prefill.output(name).parameters)
        outputs.append(pair.decode.output(name, ENDS_S))
        assert pair.free_blocks() == free
        assert time.monotonic() - begun_at < ENDS_S
    are_as_alone(engines, each, outputs)
    assert pair.received - before == len(each), "prompts were computed on the decode side"


@pytest.mark.full
def test_a_request_whose_pages_are_read_when_it_is_preempted_ends_on_both_sides(engines: Engines):
    """The decode engine has asked for it, so that pages leave as they are computed."""
    pair = Pair(
        engines.prefill("prefill-chunked", step_tokens=64), engines.decode("decode-recompute", policy="recompute")
    )
    free, each = pair.free_blocks(), prompts(20, 3, shortest=300)
    outputs = []
    for number, prompt in enumerate(each):
        name, room, begun_at = f"taken-at-once-{number}", 2_000_000 + number, time.monotonic()
        there = {"do_remote_prefill": True, "remote_engine_id": pair.prefill.shape.name, ROOM: room}
        pair.decode.submit(name, prompt, COUNT, there)
        pair.prefill.ask("submit_and_preempt", name, prompt, {"do_remote_decode": True, ROOM: room})
        pair.prefill.output(name)
        outputs.append(pair.decode.output(name, ENDS_S))
        assert pair.free_blocks() == free
        assert time.monotonic() - begun_at < ENDS_S
    are_as_alone(engines, each, outputs)


def test_two_hundred_requests_leave_every_block_free(both: Pair):
    free = both.free_blocks()
    for batch in range(10):
        both.run(prompts(100 + batch, 20, longest=200), f"many-{batch}")
    assert both.free_blocks() == free


@pytest.mark.parametrize("fault", ["swapped pages", "a head is missing", "the last chunk is missing"])
def test_a_planted_fault_is_seen(engines: Engines, fault: str):
    """What the other tests assert can fail."""
    pair = Pair(engines.prefill("prefill-planted"), engines.decode("decode"))
    each = prompts(200 + len(fault), 2, shortest=300)
    pair.prefill.ask("plant", fault)
    try:
        with pytest.raises((AssertionError, EngineError)):
            check(engines, pair, each, fault)
    finally:
        pair.prefill.ask("heal")
    check(engines, pair, prompts(300 + len(fault), 2, shortest=300), f"healed from {fault}")
