"""Prompts for tiny models."""

from __future__ import annotations

import random

from examples.tiny_model import VOCABULARY


def prompts(seed: int, count: int = 16, *, shortest: int = 5, longest: int = 600) -> list[list[int]]:
    """Prompts of lengths from the shortest to the longest. No two seeds have a prefix in common."""
    random_numbers = random.Random(seed)
    lengths = [shortest + (longest - shortest) * number // max(1, count - 1) for number in range(count)]
    return [[random_numbers.randrange(VOCABULARY) for _ in range(length)] for length in lengths]
