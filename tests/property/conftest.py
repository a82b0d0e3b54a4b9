"""What searches for planted faults have in common."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture
def nothing_remembered() -> Iterator[None]:
    """No result of a fault outlives it, and none from before hides it."""
    modules = [module for name, module in sys.modules.items() if name.startswith("kvferry.")]
    caches = [each for module in modules for each in vars(module).values() if hasattr(each, "cache_clear")]
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()
