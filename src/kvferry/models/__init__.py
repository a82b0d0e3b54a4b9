"""What published models cache: components read from a config.json, or described by hand.

`reading` is the way in, and has the form for architectures that are not known; `families` has one small function for
each family of those that are, put together from the `parts` that models have in common, and `fields` checks what they
read. `cache` is what comes out. Nothing here knows about ranks or memory.
"""

from kvferry.models.cache import ModelCache, with_block_scales
from kvferry.models.families import FAMILIES, Family
from kvferry.models.reading import model_cache_from_config, read_model_cache

__all__ = [
    "FAMILIES",
    "Family",
    "ModelCache",
    "model_cache_from_config",
    "read_model_cache",
    "with_block_scales",
]
