"""SGLang's own pools with the pull request that we have drafted: they say what the plug-in derives."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from prototypes import self_describing_pools
from prototypes.described_layout import layout_of
from prototypes.self_describing_pools import Share, StateBlock
from sglang.srt.mem_cache import memory_pool, swa_memory_pool
from tests.real_engines.sglang.built import Built, BuiltRank, Shape, state_blocks
from tests.real_engines.sglang.test_families import exchanged
from tests.support.families import FAMILIES as ALL_FAMILIES
from tests.support.family_cells import Shape as FamilyShape
from tests.support.model_family import Family

from kvferry import Device

pytestmark = pytest.mark.timeout(120)

PATCH = Path(__file__).parents[3] / "docs/upstream/sglang-pools.patch"
FUTURE = "from __future__ import annotations\n"
ADDED = ("set_shares", "get_cache_views")
FAMILIES = [each for each in ALL_FAMILIES if each in exchanged(FamilyShape.TENSOR)]


@pytest.fixture
def patched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's pools with the methods that they have once the patch is applied."""
    modules = (memory_pool, swa_memory_pool)
    folder = tmp_path / "sglang/srt/mem_cache"
    folder.mkdir(parents=True)
    for module in modules:
        assert module.__file__ is not None
        shutil.copy(module.__file__, folder)
    subprocess.run(["git", "apply", str(PATCH)], cwd=tmp_path, check=True)
    monkeypatch.setitem(sys.modules, "sglang.srt.mem_cache.cache_views", self_describing_pools)
    for module in modules:
        tree = ast.parse((folder / f"{module.__name__.rpartition('.')[2]}.py").read_text())
        for pool in (node for node in tree.body if isinstance(node, ast.ClassDef)):
            for method in (each for each in pool.body if isinstance(each, ast.FunctionDef) and each.name in ADDED):
                # Within a function that has `__class__`, which `super()` looks for.
                body = textwrap.indent(ast.unparse(method), "    ")
                names = {**vars(module), **vars(self_describing_pools)}
                exec(f"{FUTURE}def of(__class__):\n{body}\n    return {method.name}", names)
                kind = getattr(module, pool.name)
                monkeypatch.setattr(kind, method.name, names["of"](kind), raising=False)


def views(rank: BuiltRank, configuration: Any) -> list[self_describing_pools.CacheView]:
    """What the rank's pool says, handed what its model knows."""
    pool, place, named = rank.owner.tokens, rank.coordinates, {}
    heads = configuration.get("num_global_key_value_heads") or configuration["num_key_value_heads"]
    of_windows = configuration.get("swa_num_key_value_heads") or configuration["num_key_value_heads"]
    pools = [(getattr(pool, "full_kv_pool", pool), heads)]
    if isinstance(pool, swa_memory_pool.SWAKVPool):
        pools.append((pool.swa_kv_pool, of_windows))
        named = {"window_tokens": rank.owner.window}
    states = getattr(rank.owner.requests, "mamba_pool", None)
    if states is not None:
        blocks = state_blocks(configuration) if any(each.numel() for each in states.mamba_cache.conv) else []
        states.set_shares(
            layers=Share(0, states.num_mamba_layers),
            ranks=Share(place.tp_rank, place.tp_size),
            blocks=[StateBlock(units * width, units) for units, width in blocks],
        )
    for each, total in pools:
        share = Share(place.tp_rank * total // place.tp_size, total)
        each.set_shares(layers=Share(0, each.layer_num), heads=share)
    apart = [] if states is None or hasattr(pool, "mamba_pool") else [states]
    return [*pool.get_cache_views(**named), *(view for each in apart for view in each.get_cache_views())]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_pool_says_what_the_plug_in_derives(family: Family, tmp_path: Path, patched: None):
    for tp in (1, 2):
        for rank in Built(family, tmp_path).engine(Shape(tp=tp)).values():
            assert layout_of(views(rank, family.configuration), Device()) == rank.layout


def test_what_a_pool_is_told_wrongly_is_found(tmp_path: Path, patched: None):
    family = next(each for each in FAMILIES if "num_key_value_heads" in each.configuration)
    (rank, *_) = Built(family, tmp_path).engine(Shape(tp=2)).values()
    heads = family.configuration["num_key_value_heads"]
    assert layout_of(views(rank, {**family.configuration, "num_key_value_heads": 2 * heads}), Device()) != rank.layout


def test_a_pool_that_keeps_more_is_not_described_as_if_it_did_not(patched: None):
    with pytest.raises(NotImplementedError, match="MHATokenToKVPoolMXFP8 does not describe itself"):
        object.__new__(memory_pool.MHATokenToKVPoolMXFP8).get_cache_views()
