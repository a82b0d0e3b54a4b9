"""What `kvferry bench` accepts, and what it refuses before anything starts."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from kvferry.cli.bench import memory
from kvferry.cli.bench.options import PRESETS, BenchOptions, preset_model
from kvferry.cli.bench.pool import Pool, pool_bytes
from kvferry.cli.bench.run import Typed, prepare, run
from kvferry.errors import ConfigurationError, ModelError, SettingsError

TYPED = Typed(
    preset="small",
    config=None,
    device="cpu",
    prefill_tp=2,
    decode_tp=1,
    page_size="16",
    decode_page_size=None,
    prefill_layout="nhd",
    decode_layout="nhd",
    pages="scattered",
    tokens=64,
    chunks=1,
    requests=2,
    in_flight=1,
    repetitions=1,
    seconds=0.0,
    nixl_threads=None,
    plant_wrong_byte=False,
)


def options(**changes: Any) -> BenchOptions:
    """Checked options of one case."""
    (prepared,) = prepare(dataclasses.replace(TYPED, **changes))
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
    prepared = prepare(dataclasses.replace(TYPED, page_size="1,16", pages="both"))
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
        ({"device": "cuda"}, "--device cuda"),
    ],
)
def test_what_cannot_be_is_refused_by_the_options_name(changes: dict[str, Any], said: str):
    with pytest.raises(ConfigurationError, match="^" + re.escape(said)):
        prepare(dataclasses.replace(TYPED, **changes))


def test_a_configuration_that_is_not_there_is_said():
    with pytest.raises(ModelError, match="does not exist"):
        options(config=Path("nowhere.json"))


@pytest.mark.parametrize("changes", [{}, {"decode_page_size": 48, "decode_layout": "hnd"}, {"pages": "contiguous"}])
def test_the_estimate_is_what_is_allocated(changes: dict[str, Any]):
    shape = options(**changes)
    for side in shape.sides:
        for coordinates in side.coordinates:
            estimated = pool_bytes(shape, side, coordinates)
            allocated = Pool(shape, side, coordinates).memory.nbytes
            assert 0 <= estimated - allocated <= 4096


def test_a_shape_that_does_not_fit_is_refused_with_both_numbers():
    shape = options()
    needed = memory.needed_bytes(shape)
    memory.check_fits(shape, needed)
    memory.check_fits(shape, None)
    with pytest.raises(SettingsError, match=r"need 0\.59 GiB in 3 processes, and 0\.50 GiB is available"):
        memory.check_fits(shape, 1 << 29)


def test_a_shape_is_refused_before_anything_is_allocated(monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise AssertionError("something was started")

    monkeypatch.setattr("kvferry.cli.bench.run.measure", fail)
    with pytest.raises(SettingsError, match="is available"):
        run(dataclasses.replace(TYPED, requests=100_000_000), picture=None, wants_json=True)


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


def test_the_help_of_the_command_knows_every_preset():
    from kvferry.cli.app import bench

    shown = repr(bench.__annotations__["preset"])
    assert all(name in shown for name in PRESETS)
