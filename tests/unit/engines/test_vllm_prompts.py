"""Long prompts are digested aside, and all of them as before."""

from __future__ import annotations

import hashlib
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.waiting import eventually

from kvferry.engines.fingerprint import PROMPT, prompt_digest, request_conditions
from kvferry.engines.vllm import aside, identity
from kvferry.engines.vllm.aside import LONGEST_AT_ONCE, PromptDigest, PromptDigests
from kvferry.engines.vllm.identity import Conditions

LONG = [number * 7919 % 150_000 for number in range(5 * LONGEST_AT_ONCE)]


def request(name: str, tokens: list[int] | None, embeddings: Any = None) -> Any:
    return SimpleNamespace(request_id=name, prompt_token_ids=tokens, prompt_embeds=embeddings)


@pytest.mark.parametrize("count", [0, 1, 1 << 14, (1 << 14) + 1, len(LONG) - 1, len(LONG), 10 * len(LONG), None])
def test_a_digest_in_parts_is_that_of_the_whole(count: int | None):
    whole = hashlib.blake2b(np.array(LONG[:count], "<i8").tobytes(), digest_size=16).digest()
    assert prompt_digest(LONG, count) == prompt_digest(np.array(LONG), count) == whole
    assert request_conditions(prompt_digest(LONG, count)) == {PROMPT: whole}
    assert request_conditions(whole) == {PROMPT: whole}


def test_a_long_prompt_is_digested_aside_and_a_short_one_at_once(monkeypatch: pytest.MonkeyPatch):
    may_go_on, threads = threading.Event(), []

    def slow(tokens: Any, count: int) -> bytes:
        threads.append(threading.current_thread().name)
        assert threading.current_thread() is threading.main_thread() or may_go_on.wait(30)
        return prompt_digest(tokens, count)

    monkeypatch.setattr(aside, "prompt_digest", slow)
    conditions, short, long = Conditions(), request("short", LONG[:100]), request("long", LONG)
    assert conditions.are_known(short, 99)
    assert conditions.of(short, 99) == request_conditions(prompt_digest(LONG, 99))
    for _ in range(2):
        assert not conditions.are_known(long, len(LONG) - 1)
    may_go_on.set()
    eventually("it is known", lambda: conditions.are_known(long, len(LONG) - 1))
    assert conditions.of(long, len(LONG) - 1) == request_conditions(prompt_digest(LONG, len(LONG) - 1))
    assert threads == ["MainThread", "kvferry-vllm-prompts_0"]


def test_however_many_requests_wait_each_is_known_soon_and_stays_so():
    """vLLM asks about all that wait in every step, one after the other."""
    digests = PromptDigests()
    waiting = [request(str(number), LONG[: LONGEST_AT_ONCE + 1]) for number in range(1500)]
    for each in waiting:
        digests.is_known(each, len(LONG))

    def known() -> int:
        return sum(digests.is_known(each, len(LONG)) for each in waiting)

    eventually("all are known", lambda: known() == len(waiting))
    assert digests.of(waiting[-1], len(LONG)).tokens == prompt_digest(waiting[-1].prompt_token_ids)


def test_what_was_asked_for_is_forgotten_and_so_are_requests_that_end_before(monkeypatch: pytest.MonkeyPatch):
    digests = PromptDigests()
    monkeypatch.setattr(identity, "PromptDigests", lambda: digests)
    conditions, prompt = Conditions(), request("r", LONG)
    assert conditions.of(prompt, len(LONG)) == request_conditions(prompt_digest(LONG))
    ended = request("ended", LONG)
    conditions.are_known(ended, len(LONG))
    assert len(digests.found) == 1
    conditions.ended("ended")
    assert not digests.found


def test_another_number_of_tokens_is_another_digest():
    digests, prompt = PromptDigests(), request("r", LONG)
    digests.is_known(prompt, len(LONG))
    assert digests.of(prompt, len(LONG) - 1).tokens == prompt_digest(LONG[:-1])


def test_a_prompt_that_is_given_as_an_embedding_is_digested_aside_and_has_no_tokens(monkeypatch: pytest.MonkeyPatch):
    """64 MiB of embeddings, 8,192 tokens of a small model, take a quarter of a second."""
    may_go_on = threading.Event()

    def slow(tokens: Any, count: int) -> bytes:
        assert may_go_on.wait(30)
        return prompt_digest(tokens, count)

    monkeypatch.setattr(aside, "prompt_digest", slow)
    digests, rows = PromptDigests(), torch.arange(12, dtype=torch.bfloat16).reshape(4, 3)
    assert not digests.is_known(request("r", None, rows), 3)
    may_go_on.set()
    eventually("it is known", lambda: digests.is_known(request("r", None, rows), 3))
    embedding = hashlib.blake2b(rows[:3].view(torch.uint8).numpy().tobytes(), digest_size=16).digest()
    assert digests.of(request("r", None, rows), 3) == PromptDigest(prompt_digest(()), embedding)
    assert digests.of(request("without", None), 3) == PromptDigest(prompt_digest(()), b"")
