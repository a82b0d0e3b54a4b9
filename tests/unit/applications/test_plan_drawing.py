"""The picture: what is coloured where."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from kvferry.applications.plan.counting import PagePlacement
from kvferry.applications.plan.drawing import draw, drawn_tokens, kinds_of, stretches
from kvferry.applications.plan.study import RequestOptions, SideOptions, Study, study
from kvferry.layout import PageOrder, TokenPartition, contiguous, interleaved, zigzag

CONFIGS = Path(__file__).parents[2] / "data" / "configs"
BLUE, ORANGE, GREEN, PINK = "#0072b2", "#e69f00", "#009e73", "#cc79a7"


def planned(config: Path, prefill: str, decode: str) -> Study:
    source, destination = (
        SideOptions(
            name=name, config=config, dtype=None, specification=specification, page_tokens=16, order=PageOrder.NHD
        )
        for name, specification in (("prefill", prefill), ("decode", decode))
    )
    return study(source, destination, RequestOptions(tokens=100, room=1, pages=PagePlacement.SCATTERED))


def svg(result: Study, directory: Path) -> str:
    draw(result, directory / "plan.svg")
    return (directory / "plan.svg").read_text()


def filled(picture: str) -> list[tuple[str, tuple[float, float, float, float]]]:
    """Colour and corners of every filled rectangle, in the order of drawing."""
    found = []
    for path, colour in re.findall(r'<path d="([^"]*)" clip-path="[^"]*" style="fill: (#\w+)"', picture):
        points = np.array([[float(each) for each in pair] for pair in re.findall(r"[ML] (\S+) (\S+)", path)])
        found.append((colour, (*points.min(axis=0).tolist(), *points.max(axis=0).tolist())))
    return found


def test_ranks_are_labelled_and_text_stays_text(tmp_path: Path):
    picture = svg(planned(CONFIGS / "qwen3-32b.json", "tp=4", "tp=8"), tmp_path)
    for label in ("prefill 0", "prefill 3", "decode 0", "decode 7", "heads 6-7, layers 0-63", "32 KiB/token", "proved"):
        assert label in picture
    assert "prefill 4" not in picture
    assert "decode 8" not in picture


def test_what_a_rank_receives_has_the_colour_of_the_writer_and_the_width_of_its_heads(tmp_path: Path):
    config = tmp_path / "config.json"
    component = {"name": "k", "layers": "all", "axes": {"head": 6, "dim": 4}, "dtype": "int8", "tp_axis": "head"}
    config.write_text(json.dumps({"kvferry": {"name": "six", "num_layers": 3, "components": [component]}}))
    picture = svg(planned(config, "tp=3", "tp=2"), tmp_path)
    boxes = [(colour, box) for colour, box in filled(picture) if colour in (BLUE, ORANGE, GREEN)]
    middle = max(box[2] for _, box in boxes) / 2
    widths = [(colour, round(box[2] - box[0], 1)) for colour, box in boxes if box[0] > middle]
    head = widths[1][1]
    # Heads 0-1 of rank 0 and head 2 of rank 1; head 3 of rank 1 and heads 4-5 of rank 2.
    assert widths == [(BLUE, 2 * head), (ORANGE, head), (ORANGE, head), (GREEN, 2 * head)]


def test_what_a_replica_sends_is_hatched_on_the_others(tmp_path: Path):
    picture = svg(planned(CONFIGS / "deepseek-v3.json", "tp=4", "dp=4"), tmp_path)
    assert picture.count("sends nothing") == 3
    assert picture.count("fill: url(#") > 3  # hatched; once in the legend
    assert "one of 4 data-parallel groups" in picture
    assert "rooms take turns" in picture
    assert "rooms take turns" not in svg(planned(CONFIGS / "qwen3-32b.json", "tp=4", "tp=8"), tmp_path)


def test_kinds_that_are_divided_alike_are_drawn_as_one():
    kinds = kinds_of(planned(CONFIGS / "qwen3-next-80b-a3b.json", "tp=4", "tp=2"))
    assert [(kind.title, kind.subtitle, kind.remark) for kind in kinds] == [
        ("k, v", "12 layers x 2 heads", ""),
        ("state, conv_v", "36 layers x 32 heads", "one slot a request"),
        ("conv_q, conv_k", "36 layers x 16 heads", "one slot a request"),
    ]


def test_windows_are_kinds_of_their_own():
    kinds = kinds_of(planned(CONFIGS / "gpt-oss-20b.json", "tp=2", "tp=4"))
    assert [(kind.title, kind.remark) for kind in kinds] == [("k, v", ""), ("window_k, window_v", "last 128 tokens")]


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(
    ("prefill", "decode", "suffix"),
    [
        pytest.param("tp=8,pp=8", "tp=64", "png", marks=pytest.mark.full),
        ("tp=2,cp=4:zigzag", "cp=2:interleaved:16", "svg"),
        ("tp=2,cp=4:zigzag", "cp=2:interleaved:16", "pdf"),
        ("pp=16", "tp=1", "png"),
    ],
)
def test_large_and_token_parallel_plans_are_drawn(tmp_path: Path, prefill: str, decode: str, suffix: str):
    file = tmp_path / f"plan.{suffix}"
    draw(planned(CONFIGS / "qwen3-32b.json", prefill, decode), file)
    assert file.stat().st_size > 10_000


def test_the_same_plan_gives_the_same_file(tmp_path: Path):
    pictures = [svg(planned(CONFIGS / "qwen3-32b.json", "tp=2", "tp=2"), tmp_path) for _ in range(2)]
    assert re.sub(r"\(\d+ ms\)", "", pictures[0]) == re.sub(r"\(\d+ ms\)", "", pictures[1])


@pytest.mark.parametrize(
    ("one", "other", "tokens"),
    [
        (TokenPartition(), TokenPartition(), 1),
        (contiguous(4), TokenPartition(), 4),
        (contiguous(4, 16), contiguous(2, 8), 64),
        (zigzag(2), contiguous(3), 12),
        (interleaved(2, 16), TokenPartition(), 32),
        (interleaved(2, 16), interleaved(4), 32),
        (interleaved(2, 16), contiguous(4), 128),
    ],
)
def test_enough_tokens_are_drawn_to_see_the_pattern(one: TokenPartition, other: TokenPartition, tokens: int):
    assert drawn_tokens(one, other) == tokens


def test_stretches_of_tokens():
    assert list(stretches(np.array([1, 1, 0, 1], np.bool_))) == [(0, 2), (3, 4)]
