"""What `kvferry bench` accepts, and what it refuses before anything starts."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from kvferry.applications.bench import pool as memory
from kvferry.applications.bench.measure import Place
from kvferry.applications.bench.options import PRESETS, VARIANTS, BenchArguments, BenchOptions, prepare, preset_model
from kvferry.applications.bench.pattern import Checked
from kvferry.applications.bench.pool import Pool, allocate, block_bytes, pool_bytes, storage_bytes
from kvferry.applications.bench.ranks import bulk_settings
from kvferry.applications.bench.report import case_data
from kvferry.applications.bench.run import agreed, checked_place, run
from kvferry.applications.bench.summary import Case
from kvferry.cpus import usable_cpus
from kvferry.errors import ConfigurationError, ModelError, SettingsError, TransportUnavailableError
from kvferry.layout import Device, MemoryKind
from kvferry.settings import Settings
from kvferry.testing.transports import FaultyTransport

OWN = "kvferry.testing.transports:FaultyTransport"
ARGUMENTS = BenchArguments(preset="small", prefill_tp=2, tokens=64, requests=2, in_flight=1, repetitions=1)


def options(**changes: Any) -> BenchOptions:
    """Checked options of one case."""
    (prepared,) = prepare(dataclasses.replace(ARGUMENTS, **changes))
    return prepared


def test_a_preset_is_the_cache_of_its_model():
    model = preset_model("qwen3-32b")
    assert [sharded.component.name for sharded in model.components] == ["k", "v"]
    for sharded in model.components:
        assert [axis.size for axis in sharded.component.axes] == [64, 8, 128]
        assert sharded.component.element_bytes == 2


def test_the_standard_request_has_half_a_gibibyte():
    shape = options(preset="qwen3-32b", tokens=2048, requests=8, prefill_tp=1)
    pages = 8 * 128 + 8 * 128 // 8 + 1
    (rank,) = shape.decode.coordinates
    assert 0 <= pool_bytes(shape, shape.decode, rank) - pages * 16 * 64 * 2 * 8 * 128 * 2 < 64 * 1024


def test_page_sizes_and_ways_that_pages_lie_are_cases_of_their_own():
    prepared = prepare(dataclasses.replace(ARGUMENTS, page_size="1,16", pages="both"))
    assert [(each.prefill.page_tokens, each.is_scattered) for each in prepared] == [
        (1, True),
        (1, False),
        (16, True),
        (16, False),
    ]


def test_a_models_configuration_takes_the_presets_place():
    config = Path(__file__).parents[2] / "data" / "configs" / "qwen3-32b.json"
    shape = options(config=config, preset="not looked at")
    assert shape.model.num_layers == 64
    assert shape.model.components[0].component.axes[1].size == 8


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"preset": "huge"}, "--preset 'huge': it is one of small"),
        ({"page_size": "16,x"}, "--page-size '16,x'"),
        ({"page_size": "0"}, "--page-size '0'"),
        ({"decode_page_size": 0}, "--decode-page-size 0"),
        ({"pages": "random"}, "--pages 'random': it is one of scattered"),
        ({"prefill_layout": "packed"}, "--prefill-layout 'packed': it is one of nhd, hnd"),
        ({"tokens": 0}, "--tokens 0"),
        ({"in_flight": 0}, "--in-flight 0"),
        ({"seconds": -1.0}, "--seconds -1"),
        ({"chunks": 5}, "--chunks 5: 64 tokens have only 4 pages of 16"),
        ({"device": "tpu"}, "--device 'tpu': it is cpu or cuda"),
        ({"device": "cuda"}, "--device cuda: a GPU was asked for"),
        ({"variants": "direct,fast"}, "--variants 'direct,fast': 'fast' is none; there are synchronous, direct"),
        ({"variants": ""}, "--variants ''"),
        ({"passes": 0}, "--passes 0"),
        ({"passes": 2, "in_flight": 2}, "--passes 2 with --requests 2"),
        ({"prefill_tp": 0}, "--prefill-tp 0"),
        ({"decode_tp": -1}, "--decode-tp -1"),
        ({"layer_time_ms": -1.0}, "--layer-time-ms -1"),
        ({"layer_ranges": 0}, "--layer-ranges 0"),
        ({"layer_time_ms": 1.0, "variants": "synchronous"}, "--layer-time-ms with --variants synchronous"),
    ],
)
def test_what_cannot_be_is_refused_by_the_options_name(changes: dict[str, Any], said: str):
    with pytest.raises(ConfigurationError, match="^" + re.escape(said)):
        prepare(dataclasses.replace(ARGUMENTS, **changes))


def test_a_configuration_that_is_not_there_is_said():
    with pytest.raises(ModelError, match="does not exist"):
        options(config=Path("nowhere.json"))


@pytest.mark.parametrize("changes", [{}, {"decode_page_size": 48, "decode_layout": "hnd"}, {"pages": "contiguous"}])
def test_the_estimate_is_what_is_allocated(changes: dict[str, Any]):
    shape = options(**changes)
    for side in shape.sides:
        for coordinates in side.coordinates:
            estimated = pool_bytes(shape, side, coordinates)
            pool = Pool(shape, side, coordinates, allocate(estimated, shape.device))
            assert pool.memory.host.nbytes == estimated
            regions = pool.layout.regions()
            assert min(region.address for region in regions) == pool.storage.address
            assert 0 <= pool.storage.region.stop - max(region.stop for region in regions) < 4096


def test_cases_that_follow_each_other_share_the_largest_memory():
    planned = prepare(dataclasses.replace(ARGUMENTS, page_size="1,48", pages="both", decode_page_size=16))
    (rank,) = planned[0].decode.coordinates
    sizes = [pool_bytes(shape, shape.decode, rank) for shape in planned]
    assert storage_bytes(planned, "decode", rank) == max(sizes)
    ranks = planned[0].prefill.coordinates
    sizes = [pool_bytes(shape, shape.prefill, ranks[0]) for shape in planned]
    assert storage_bytes(planned, "prefill", ranks[0]) == max(sizes) > min(sizes)


def test_a_shape_that_does_not_fit_is_refused_with_both_numbers():
    shape = options()
    needed = memory.needed(shape, shape.sides)
    assert needed.gpu == 0
    memory.check_fits(shape, shape.sides, needed.main)
    memory.check_fits(shape, shape.sides, None)
    with pytest.raises(SettingsError, match=r"need \d\.\d\d GiB in 3 processes, and 0\.50 GiB is available"):
        memory.check_fits(shape, shape.sides, 1 << 29)


def test_only_the_sides_that_run_here_need_memory_here():
    shape = options()
    both, decode = memory.needed(shape, shape.sides).main, memory.needed(shape, [shape.decode]).main
    assert decode == both - memory.needed(shape, [shape.prefill]).main
    memory.check_fits(shape, [shape.decode], decode)
    with pytest.raises(SettingsError, match="in 1 processes"):
        memory.check_fits(shape, [shape.decode], decode - 1)


def test_staging_memory_is_counted_for_every_variant_that_may_take_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KVFERRY_GATHER_WORKERS", "3")
    monkeypatch.setenv("KVFERRY_STAGING_RING_MIB", "16")
    monkeypatch.setenv("KVFERRY_STAGING_CHUNK_MIB", "4")
    direct, staged = options(variants="synchronous,direct"), options(variants="staged")
    everything = options(variants=",".join(VARIANTS))
    assert memory.staging_bytes(direct, direct.prefill) == memory.staging_bytes(direct, direct.decode) == 0
    assert (
        memory.staging_bytes(staged, staged.prefill) == 3 * 16 + 2 << 20
    )  # as much as a ring for every worker that gathers, and 2 MiB to measure with
    assert memory.staging_bytes(staged, staged.decode) == 2 * 16 << 20  # a ring for every prefill rank
    assert memory.staging_bytes(everything, everything.prefill) == 2 * (3 * 16 + 2) << 20
    without = memory.needed(direct, direct.sides).main
    assert memory.needed(staged, staged.sides).main - without == 2 * (3 * 16 + 2) + 2 * 16 << 20
    monkeypatch.setenv("KVFERRY_STAGING_MEMORY_MIB", "20")
    assert memory.staging_bytes(staged, staged.prefill) == 20 << 20


def test_a_gpus_memory_is_counted_apart():
    shape = dataclasses.replace(options(), device=Device(MemoryKind.VRAM))
    pools = sum(pool_bytes(shape, side, rank) for side in shape.sides for rank in side.coordinates)
    staging = sum(side.tp_size * memory.staging_bytes(shape, side) for side in shape.sides)
    needed = memory.needed(shape, shape.sides)
    assert needed.gpu == pools + staging + 3 * memory.GPU_CONTEXT_BYTES
    assert needed.main == pools + 3 * memory.GPU_PROCESS_BYTES
    memory.check_fits(shape, shape.sides, needed.main, needed.gpu)
    with pytest.raises(SettingsError, match="of the GPU's memory in 3 processes"):
        memory.check_fits(shape, shape.sides, needed.main, needed.gpu - 1)


@pytest.mark.parametrize(
    ("role", "registry", "said"),
    [("both sides", None, "--role 'both sides'"), ("prefill", None, "--role prefill needs --registry URL")],
)
def test_roles_that_cannot_be_are_refused(role: str, registry: str | None, said: str):
    with pytest.raises(SettingsError, match="^" + re.escape(said)):
        checked_place(role, registry)


def test_the_registry_of_a_side_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KVFERRY_REGISTRY_URL", "http://127.0.0.1:1")
    assert checked_place("decode", None) == Place("decode", "http://127.0.0.1:1", shares_clock=False)
    assert checked_place("decode", "http://127.0.0.1:2").registry_url == "http://127.0.0.1:2"
    assert checked_place("both", None) == Place("both", None, shares_clock=True)
    assert checked_place("prefill", "http://127.0.0.1:2", one_clock=True).shares_clock


def test_the_prefill_side_shows_nothing():
    with pytest.raises(SettingsError, match="the decode side shows"):
        run(ARGUMENTS, checked_place("prefill", "http://127.0.0.1:1"), picture=None, wants_json=True)


def test_variants_keep_the_order_in_which_they_are_measured():
    assert options(variants=" auto, direct,auto").variants == ("direct", "auto")


def test_the_block_of_a_case_is_what_lies_together_on_both_sides():
    token = 4 * 64 * 2  # four heads of a layer
    assert block_bytes(options(prefill_tp=1)) == 16 * token
    assert block_bytes(options(prefill_tp=1, page_size="1")) == token
    assert block_bytes(options(prefill_tp=1, pages="contiguous")) == 64 * token
    assert block_bytes(options(prefill_tp=2)) == token // 2
    assert block_bytes(options(prefill_tp=2, prefill_layout="hnd", decode_layout="hnd")) == 16 * token // 2
    assert block_bytes(options(prefill_tp=1, decode_layout="hnd")) == token // 4


def test_every_pass_reads_what_the_pass_before_did_not_put_there():
    shape = options(requests=3, in_flight=2, passes=3)
    sources = [[shape.source_of(number) for number in range(first, first + 3)] for first in (0, 3, 6)]
    assert [sorted(each) for each in sources] == [[0, 1, 2]] * 3
    assert all(len(set(slot)) == 3 for slot in zip(*sources, strict=True))


def test_a_shape_is_refused_before_anything_is_allocated(monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise AssertionError("something was started")

    monkeypatch.setattr("kvferry.applications.bench.run.measure", fail)
    with pytest.raises(SettingsError, match="is available"):
        run(
            dataclasses.replace(ARGUMENTS, requests=100_000_000),
            checked_place("both", None),
            picture=None,
            wants_json=True,
        )


def test_available_memory_is_known_here():
    available = memory.available_bytes()
    assert available is not None
    assert available > 1 << 20


def test_a_limit_of_the_process_group_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    limit, usage = tmp_path / "limit", tmp_path / "usage"
    usage.write_text("1000\n")
    monkeypatch.setattr(memory, "_CGROUPS", ((limit, usage),))
    unlimited = memory.available_bytes()
    limit.write_text("max\n")
    assert memory.available_bytes() is not None
    limit.write_text("5000\n")
    assert memory.available_bytes() == 4000
    assert unlimited is not None
    assert unlimited > 4000


def test_the_help_of_the_command_knows_every_preset_and_variant():
    described = get_type_hints(BenchArguments, include_extras=True)
    (presets,), (variants,) = (described[name].__metadata__ for name in ("preset", "variants"))
    assert all(name in presets.help for name in PRESETS)
    assert all(name in variants.help for name in VARIANTS)


@pytest.mark.parametrize("threads", [0, 3])
def test_the_bulk_write_has_the_transport_and_the_threads_of_the_others(threads: int):
    settings = bulk_settings(options(transport=OWN, nixl_threads=threads))
    assert settings.transport == OWN
    assert settings.nixl_threads == (threads or usable_cpus()), "without any it would be no limit"


def test_the_transport_is_what_was_typed_or_else_set(monkeypatch: pytest.MonkeyPatch):
    assert options().transport == Settings().transport
    monkeypatch.setenv("KVFERRY_TRANSPORT", OWN)
    assert options().transport == OWN
    assert options(transport="nixl").transport == "nixl"


def test_several_transports_are_a_case_each():
    planned = prepare(dataclasses.replace(ARGUMENTS, transport=f"nixl, {OWN},nixl", page_size="16,64"))
    assert [(each.prefill.page_tokens, each.transport) for each in planned] == [
        (16, "nixl"),
        (16, OWN),
        (64, "nixl"),
        (64, OWN),
    ]
    assert [each.name.rpartition(", ")[2] for each in planned] == ["nixl", OWN, "nixl", OWN]
    assert agreed(ARGUMENTS, planned)["--transport"] == f"nixl,{OWN}"
    (alone,) = prepare(dataclasses.replace(ARGUMENTS, transport="nixl"))
    assert "nixl" not in alone.name
    assert bulk_settings(planned[1]).transport == OWN


def test_the_transport_is_said_of_every_case():
    planned = prepare(dataclasses.replace(ARGUMENTS, transport=f"nixl,{OWN}"))
    cases = [Case(each, "direct", 1.0, Checked(), None, "refused") for each in planned]
    assert [case_data(case)["transport"] for case in cases] == ["nixl", OWN]


def test_a_transport_that_is_not_known_is_refused():
    with pytest.raises(SettingsError, match="transport \\(KVFERRY_TRANSPORT\\) is 'pigeons': known are"):
        options(transport="pigeons")


def test_a_transport_that_is_not_installed_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch):
    def fails() -> None:
        raise TransportUnavailableError("pip install it")

    monkeypatch.setattr(FaultyTransport, "check_available", fails)
    with pytest.raises(TransportUnavailableError, match="pip install it"):
        run(dataclasses.replace(ARGUMENTS, transport=OWN), checked_place("both", None), picture=None, wants_json=True)
