"""The vectors of docs/specification: small caches of every kind, between sides that hold them differently."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvferry.applications.plan.counting import PagePlacement
from kvferry.applications.plan.study import RequestOptions, SideOptions, study
from kvferry.applications.plan.vector import Vector, vector_of
from kvferry.layout import PageOrder


@dataclass(frozen=True, slots=True)
class Case:
    """A cache, two sides and a request.

    Attributes:
        title: what it is about.
        layers: of the model.
        components: as a description by hand has them.
        prefill: how the side is divided, as `kvferry plan` is told.
        decode: likewise.
        page_tokens: of either side.
        orders: of either side's pages.
        tokens: of the request.
        prefix_tokens: of these, how many the decode side holds.
        room: the transfer's number.
    """

    title: str
    layers: int
    components: tuple[Mapping[str, Any], ...]
    prefill: str
    decode: str
    page_tokens: tuple[int, int] = (16, 16)
    orders: tuple[PageOrder, PageOrder] = (PageOrder.NHD, PageOrder.NHD)
    tokens: int = 20
    prefix_tokens: int = 0
    room: int = 1


def heads_of(heads: int, dim: int, *names: str, **more: Any) -> tuple[Mapping[str, Any], ...]:
    """Describes keys or values of all layers, if nothing else is said of them."""
    axes = {"head": heads, "dim": dim}
    common = {"layers": "all", "axes": axes, "dtype": "bfloat16", "tp_axis": "head"}
    return tuple({"name": name, **common, **more} for name in names)


_HND = (PageOrder.HND, PageOrder.HND)
LATENT = {"name": "latent", "layers": "all", "axes": {"latent": 6}, "dtype": "bfloat16"}
STATE = {
    "name": "state",
    "layers": [0, 2],
    "axes": {"head": 4, "key": 2, "value": 3},
    "dtype": "float32",
    "tp_axis": "head",
    "entry": "request",
}
_CONVOLUTION = {
    "name": "conv",
    "layers": [0, 2],
    "axes": {"channel": 6, "width": 3},
    "dtype": "bfloat16",
    "tp_axis": "channel",
    "entry": "request",
}

CASES = {
    "heads": Case("GQA, TP 2 to TP 4", 1, heads_of(4, 4, "k", "v"), "tp=2", "tp=4", tokens=9),
    "replicas": Case(
        "GQA with more ranks than heads, TP 4 to TP 2: one of two holders sends, by room",
        2,
        heads_of(2, 4, "k", "v"),
        "tp=4",
        "tp=2",
        room=7,
    ),
    "uneven_heads": Case("6 heads, TP 4 to TP 3", 1, heads_of(6, 2, "k"), "tp=4", "tp=3", orders=_HND),
    "order": Case(
        "NHD to HND, TP 2 to TP 1", 1, heads_of(2, 4, "k", "v"), "tp=2", "tp=1", orders=(PageOrder.NHD, PageOrder.HND)
    ),
    "larger_pages": Case("pages of 16 to pages of 64", 2, heads_of(2, 4, "k", "v"), "", "", (16, 64), tokens=70),
    "smaller_pages": Case(
        "pages of 64 to pages of 16, HND to NHD, after a prefix that ends in a page",
        1,
        heads_of(2, 2, "k"),
        "",
        "",
        (64, 16),
        (PageOrder.HND, PageOrder.NHD),
        tokens=70,
        prefix_tokens=37,
    ),
    "unlike_pages": Case(
        "pages of 48 to pages of 32, which share units of 16", 1, heads_of(1, 4, "k", "v"), "", "", (48, 32), tokens=90
    ),
    "latents": Case("MLA, TP 2 to TP 4: every rank holds all of it", 2, (LATENT,), "tp=2", "tp=4", room=3),
    "stages": Case(
        "5 layers, stages of 2 and 3 to stages of 1 and 4, TP 1 to TP 2",
        5,
        heads_of(2, 4, "k"),
        "stages=2+3",
        "tp=2,stages=1+4",
        orders=_HND,
    ),
    "window": Case(
        "full attention beside a window of 24 tokens, pages of 16 to pages of 32",
        2,
        (
            *heads_of(2, 2, "k", layers=[0]),
            *heads_of(2, 2, "window_k", layers=[1], window_tokens=24),
        ),
        "tp=2",
        "tp=1",
        (16, 32),
        _HND,
        tokens=70,
    ),
    "states": Case(
        "recurrent and convolution state beside attention, TP 2 to TP 4",
        3,
        (*heads_of(2, 2, "k", layers=[1]), STATE, _CONVOLUTION),
        "tp=2",
        "tp=4",
        orders=_HND,
    ),
    "packed": Case(
        "packed pages, cut between heads alone, TP 1 to TP 2",
        2,
        heads_of(2, 4, "k", "v"),
        "",
        "tp=2",
        orders=(PageOrder.PACKED, PageOrder.PACKED),
    ),
    "context": Case(
        "context parallelism: a zigzag over 2 ranks to blocks of 4 tokens by turns over 3",
        1,
        heads_of(1, 4, "k"),
        "cp=2:zigzag",
        "cp=3:interleaved:4",
        tokens=45,
    ),
    "whole_pages": Case(
        "context parallelism: whole pages to one rank",
        1,
        heads_of(1, 4, "k", "v"),
        "cp=3:contiguous:16",
        "",
        tokens=70,
    ),
}


def made(case: Case) -> Vector:
    """Plans a case.

    Raises:
        KVFerryError: if no such sides can be, or they cannot exchange caches.
    """
    description = {"name": case.title, "num_layers": case.layers, "components": case.components}
    with TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps({"kvferry": description}))
        planned = study(
            SideOptions("prefill", config, None, case.prefill, case.page_tokens[0], case.orders[0]),
            SideOptions("decode", config, None, case.decode, case.page_tokens[1], case.orders[1]),
            RequestOptions(case.tokens, case.room, PagePlacement.SCATTERED),
        )
    assert planned.is_proved, planned.refuted
    return vector_of(planned, title=case.title, prefix_tokens=case.prefix_tokens)
