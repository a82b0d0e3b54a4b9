"""The figures of `kvferry plan`: counted by hand, and by expanding the descriptors that a transport would prepare."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvferry.applications.plan import study as study_module
from kvferry.applications.plan.counting import PagePlacement, units_in_request
from kvferry.applications.plan.report import as_json, numbers_in_words, verdict
from kvferry.applications.plan.study import Pair, RequestOptions, SideOptions, Study, bulk_writes, study
from kvferry.errors import IncompatiblePeerError, LayoutError, ModelError, SettingsError
from kvferry.layout import MemoryKind, PageOrder
from kvferry.plan import PairPlan, SourceGroup, Unit, places, selectors
from kvferry.settings import Settings
from kvferry.staging.sizes import staging_sizes

ATTENTION = {
    name: {"name": name, "layers": "all", "axes": {"head": 2, "dim": 4}, "dtype": "bfloat16", "tp_axis": "head"}
    for name in ("k", "v")
}
STATE = {
    "name": "state",
    "layers": [0],
    "axes": {"head": 4, "dim": 8},
    "dtype": "float32",
    "tp_axis": "head",
    "entry": "request",
}
LATENT = {"name": "latent", "layers": "all", "axes": {"latent": 16}, "dtype": "bfloat16"}


@dataclass
class Case:
    """A model of two layers and how it is planned."""

    directory: Path
    components: list[dict[str, Any]] = field(default_factory=lambda: list(ATTENTION.values()))
    prefill: str = ""
    decode: str = ""
    page_tokens: tuple[int, int] = (4, 4)
    order: tuple[PageOrder, PageOrder] = (PageOrder.NHD, PageOrder.NHD)
    tokens: int = 8
    room: int = 1
    decode_components: list[dict[str, Any]] | None = None

    def config(self, name: str, components: list[dict[str, Any]]) -> Path:
        file = self.directory / f"{name}.json"
        file.write_text(json.dumps({"kvferry": {"name": "small", "num_layers": 2, "components": components}}))
        return file

    def study(self) -> Study:
        prefill, decode = (
            SideOptions(
                name=name,
                config=self.config(name, components),
                dtype=None,
                specification=specification,
                page_tokens=self.page_tokens[index],
                order=self.order[index],
            )
            for index, (name, specification, components) in enumerate(
                (
                    ("prefill", self.prefill, self.components),
                    ("decode", self.decode, self.decode_components or self.components),
                )
            )
        )
        return study(prefill, decode, RequestOptions(tokens=self.tokens, room=self.room, pages=PagePlacement.SCATTERED))


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def counts(pair: Pair) -> tuple[int, int, int]:
    """Runs, and descriptors of scattered and of adjacent pages."""
    descriptors = pair.travelling.descriptors
    return pair.travelling.runs, descriptors[PagePlacement.SCATTERED], descriptors[PagePlacement.ADJACENT]


# ---- by hand --------------------------------------------------------------------------------------------------------


def test_whole_pages_are_one_run_each_and_merge_where_they_adjoin(case: Case):
    (pair,) = case.study().pairs
    assert pair.bytes_per_token == 2 * 2 * 2 * 4 * 2  # layers, k and v, heads, dim, bytes
    assert pair.runs_per_page == 4  # two layers, k and v
    assert pair.travelling.num_bytes == 8 * 64
    assert counts(pair) == (8, 8, 4)


def test_heads_cut_out_of_tokens_are_one_run_a_token(case: Case):
    case.decode = "tp=2"
    pairs = case.study().pairs
    assert [(pair.source, pair.receiver, pair.bytes_per_token, pair.runs_per_page) for pair in pairs] == [
        (0, 0, 32, 16),
        (0, 1, 32, 16),
    ]
    assert counts(pairs[0]) == (32, 32, 32)


def test_heads_cut_out_of_pages_are_one_run_a_page(case: Case):
    case.decode, case.order = "tp=2", (PageOrder.HND, PageOrder.HND)
    assert [pair.runs_per_page for pair in case.study().pairs] == [4, 4]
    assert counts(case.study().pairs[0]) == (8, 8, 8)


def test_pages_of_other_sizes_merge_inside_a_page(case: Case):
    # Units of 4: the source's pages end after 2, 4 and 6 of them, the receiver's after 3 and 6.
    case.page_tokens, case.tokens = (8, 12), 24
    (pair,) = case.study().pairs
    assert pair.runs_per_page == 8
    assert counts(pair) == (4 * 6, 4 * 4, 4)


def test_a_last_page_that_is_partly_filled_travels_whole(case: Case):
    case.tokens = 6
    (pair,) = case.study().pairs
    assert (pair.travelling.tokens, counts(pair)) == (8, (8, 8, 4))


def test_of_a_window_only_its_pages_travel(case: Case):
    case.components = [ATTENTION["k"] | {"window_tokens": 3}, ATTENTION["v"]]
    (pair,) = case.study().pairs
    assert (pair.bytes_per_token, pair.bytes_per_window_token) == (64, 32)
    assert pair.travelling.num_bytes == 4 * 32 + 8 * 32
    assert counts(pair) == (2 + 4, 2 + 4, 2 + 2)


def test_slots_travel_once(case: Case):
    case.components, case.prefill = [ATTENTION["k"], STATE], "tp=2"
    pairs = case.study().pairs
    assert [(pair.bytes_per_request, pair.runs_per_slot) for pair in pairs] == [(64, 1), (64, 1)]
    assert [pair.travelling.num_bytes for pair in pairs] == [8 * 16 + 64] * 2


def test_token_interleaved_parts_are_single_tokens(case: Case):
    case.prefill = "cp=2:interleaved"
    pairs = case.study().pairs
    assert [(pair.source, pair.bytes_per_token, pair.travelling.tokens) for pair in pairs] == [(0, 64, 4), (1, 64, 4)]
    assert counts(pairs[0]) == (16, 16, 16)


def test_stages_that_share_no_layer_exchange_nothing(case: Case):
    case.prefill = case.decode = "pp=2"
    assert [(pair.source, pair.receiver) for pair in case.study().pairs] == [(0, 0), (1, 1)]


def test_replicas_take_turns(case: Case):
    case.components, case.prefill = [LATENT], "tp=4"
    result = case.study()
    assert len(result.pairs) == 1
    assert sorted(result.balance.this_room) == [0, 0, 0, 8 * 64]
    assert sum(result.balance.mean) == pytest.approx(8 * 64)
    assert all(0.2 < share < 0.3 for share in result.balance.shares)
    writers = set()
    for case.room in range(16):
        writers.add(case.study().pairs[0].source)
    assert writers == {0, 1, 2, 3}


def test_the_path_is_that_of_the_cost_model(case: Case):
    case.tokens, case.page_tokens = 1000, (8, 8)
    result = case.study()
    assert result.path(PagePlacement.ADJACENT) == "direct"  # four descriptors
    case.decode = "tp=2"
    assert case.study().path(PagePlacement.ADJACENT) == "staged"  # eight bytes each
    case.prefill, case.components = "", [ATTENTION["k"], {**STATE, "axes": {"head": 4, "dim": 8}}]
    assert case.study().path(PagePlacement.SCATTERED) == "staged"


def test_bulk_writes_are_of_the_size_that_endpoints_write():
    assert staging_sizes(Settings(), MemoryKind.DRAM).chunk_bytes == 16 << 20
    assert [bulk_writes(size) for size in (1, 16 << 20, (16 << 20) + 1, 80 << 20)] == [1, 1, 2, 5]


# ---- by expanding descriptors ---------------------------------------------------------------------------------------


def expanded(result: Study, pair: Pair, pages: PagePlacement) -> int:
    """Descriptors after merging, from the rows that a transport would prepare, over all layers."""
    source, destination = result.prefill.layouts[pair.source], result.decode.layouts[pair.receiver]
    pieces = [
        piece for piece in SourceGroup(result.prefill.layouts).pieces_for(destination) if pair.source in piece.holders
    ]
    plan = PairPlan(source, destination, pieces)
    rows = plan.descriptor_rows(Unit.WHOLE)
    merged = 0
    for elected in plan.elected(result.request.room, writer=pair.source, receiver=pair.receiver):
        window = destination.group(elected.route.destination_group).window_tokens
        units, single = units_in_request(elected.route, window, result.request.tokens)
        assert not len(single)
        of_pool = np.arange(1000, dtype=np.int64) * pages.step
        lies = [
            array
            for numbers, page_tokens in (
                (units.source, elected.route.source_page_tokens),
                (units.destination, elected.route.destination_page_tokens),
            )
            for array in places(numbers, unit_tokens=units.tokens, page_tokens=page_tokens, pages=of_pool, first_page=0)
        ]
        (selector,) = selectors(rows.pieces, elected.pieces, merged_bytes=1 << 40)
        sides = []
        for table, indices in zip((rows.source, rows.destination), selector.select(*lies), strict=True):
            first = np.repeat(np.cumsum(table[:, 4]) - table[:, 4], table[:, 4].astype(np.int64))[indices]
            row = np.repeat(np.arange(len(table)), table[:, 4].astype(np.int64))[indices]
            address = table[row, 0] + table[row, 3] * (indices.astype(np.uint64) - first)
            sides.append((address.astype(np.int64), table[row, 1].astype(np.int64)))
        joins = np.ones(len(sides[0][0]) - 1, np.bool_)
        for address, length in sides:
            joins &= address[:-1] + length[:-1] == address[1:]
        merged += 1 + int(np.count_nonzero(~joins))
    return merged


@pytest.mark.parametrize(
    ("prefill", "decode", "page_tokens", "order", "tokens"),
    [
        ("tp=2", "tp=1", (4, 4), ("nhd", "nhd"), 21),
        ("tp=1", "tp=2", (4, 8), ("hnd", "hnd"), 32),
        ("tp=2", "tp=2", (16, 4), ("hnd", "hnd"), 64),
        ("tp=1", "tp=1", (8, 12), ("nhd", "nhd"), 48),
        ("tp=2", "tp=1", (8, 8), ("hnd", "nhd"), 40),
        ("pp=2", "tp=4", (4, 12), ("nhd", "hnd"), 24),
    ],
)
@pytest.mark.parametrize("pages", list(PagePlacement))
def test_merging_is_counted_as_the_descriptors_lie(
    case: Case,
    prefill: str,
    decode: str,
    page_tokens: tuple[int, int],
    order: tuple[str, str],
    tokens: int,
    pages: PagePlacement,
):
    case.components.append(ATTENTION["k"] | {"name": "window", "window_tokens": 8})
    case.prefill, case.decode, case.page_tokens, case.tokens = prefill, decode, page_tokens, tokens
    case.order = PageOrder(order[0]), PageOrder(order[1])
    result = case.study()
    assert result.pairs
    for pair in result.pairs:
        assert pair.travelling.descriptors[pages] == expanded(result, pair, pages)


# ---- verdict and refusals -------------------------------------------------------------------------------------------


def test_a_proved_plan_says_what_was_proved(case: Case):
    case.decode = "tp=2"
    assert verdict(case.study()).startswith(
        "proved: every destination byte of 2 components on 2 ranks is written exactly once ("
    )


def test_a_plan_that_leaves_something_out_is_not_proved(case: Case, monkeypatch: pytest.MonkeyPatch):
    whole = SourceGroup.pieces_for
    monkeypatch.setattr(SourceGroup, "pieces_for", lambda group, receiver: whole(group, receiver)[1:])
    result = case.study()
    assert not result.is_proved
    assert verdict(result).startswith("NOT PROVED: decode rank 0: 'k'")
    assert json.loads(as_json(result))["proved"] is False


def test_every_pair_of_packed_ranks_is_checked(case: Case, monkeypatch: pytest.MonkeyPatch):
    checked = []
    monkeypatch.setattr(study_module, "check_exchangeable", lambda *_, **names: checked.append(tuple(names.values())))
    case.prefill, case.order = "tp=2", (PageOrder.PACKED, PageOrder.PACKED)
    case.study()
    assert checked == [("prefill rank 0", "decode rank 0"), ("prefill rank 1", "decode rank 0")]


def test_windows_that_differ_are_refused(case: Case):
    case.components = [ATTENTION["k"] | {"window_tokens": 3}]
    case.decode_components = [ATTENTION["k"] | {"window_tokens": 4}]
    with pytest.raises(IncompatiblePeerError, match="the last 3 tokens, decode rank 0 the last 4 tokens"):
        case.study()


def test_whole_pages_that_are_not_the_pools_are_refused(case: Case):
    case.prefill, case.page_tokens = "cp=2:contiguous:4", (8, 4)
    with pytest.raises(
        LayoutError, match=r"prefill rank 0: .* whole pages of 4 tokens, but pages of group 'kv' have 8"
    ):
        case.study()
    case.prefill = "cp=2:contiguous:8"
    assert sum(delivery.travelling.num_bytes for delivery in case.study().deliveries)


def test_draft_layers_on_one_side_do_not_travel(case: Case):
    draft = ATTENTION["k"] | {"name": "draft_k", "layers": [2], "optional": True}
    case.components, case.prefill = [ATTENTION["k"], draft], "draft"
    result = case.study()
    assert result.absent == {"draft_k": "prefill"}
    assert {delivery.piece.component for delivery in result.deliveries} == {"k"}
    case.decode = "draft"
    assert {delivery.piece.component for delivery in case.study().deliveries} == {"k", "draft_k"}


def test_draft_layers_that_nobody_described_are_refused(case: Case):
    case.decode = "draft"
    with pytest.raises(ModelError, match="--decode 'draft'"):
        case.study()


def test_stages_that_do_not_add_up_name_the_side(case: Case):
    case.decode = "stages=1+2"
    with pytest.raises(SettingsError, match=r"--decode 'stages=1\+2'.*3 together"):
        case.study()


@pytest.mark.parametrize(("tokens", "room"), [(0, 1), (8, -1), (8, 1 << 64)])
def test_a_request_that_cannot_be_is_refused(case: Case, tokens: int, room: int):
    case.tokens, case.room = tokens, room
    with pytest.raises(SettingsError, match=r"--tokens|--room"):
        case.study()


@pytest.mark.parametrize(
    ("numbers", "words"),
    [((3,), "3"), ((0, 1, 2, 3), "0-3"), ((3, 7), "3, 7"), ((3, 7, 11, 15), "3-15 (4 of them)"), ((0, 1), "0-1")],
)
def test_layers_in_words(numbers: tuple[int, ...], words: str):
    assert numbers_in_words(numbers) == words
