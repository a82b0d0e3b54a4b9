"""SGLang's caches as a `RankLayout`.

Within an item of its buffers tokens come before heads, and heads before what each of them caches (NHD), unless a pool
says otherwise. What SGLang does not say is not guessed: a part whose heads or channels are unknown is the share of its
rank, which only the rank of the same number on a side of as many can have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

from kvferry import Axis, Component, Device, Entry, Interval, Paging, RankCoordinates, RankLayout, Shard, split
from kvferry.engines.sglang.caches import DRAFT, Attention, Block, Buffers, Caches, Heads, Stage, StateBuffer, Uncut
from kvferry.engines.sglang.placement import Part, Placement, placed
from kvferry.errors import LayoutError

KV_GROUP = "kv"
WINDOW_GROUP = "window"
STATE_GROUP = "state"
TAIL_GROUP = "index tail"
RING_GROUP = "window ring"
PENDING_GROUP = "pending index"
COMPRESSION_GROUP = "pending compression"
OVERLAP_GROUP = "pending overlap"
PAIR_GROUP = "pending pair"
ROW_GROUP = "request row"

DRAFT_GROUP = "draft"
INDEX_GROUP = "index"
"""Of a draft model, and of DeepSeek V3.2's index, where ranks divide the tokens of keys and values: elsewhere these are
in the pages of those."""

DENSE = "dense "
"""What the names of components of layers begin with that SGLang lists apart."""

_SPARSE = (INDEX_GROUP, TAIL_GROUP)
"""Groups of what DeepSeek V3.2 has beside latents."""

SHARE = "tensor-parallel share"
"""The axis of what is not cut: as long as there are tensor-parallel ranks, each of which holds the index of its own."""


def describe(caches: Caches, where: Placement | RankCoordinates, device: Device) -> RankLayout:
    """Describes a rank's caches.

    Raises:
        LayoutError: if sizes do not fit together, naming them; or if tokens are divided among ranks, and there is
            something that SGLang does not divide so.
    """
    place = placed(where)
    _check_tokens(caches, place)
    has_state_alone = bool(caches.state) and caches.window is None
    # A kind of layers may be elsewhere: in host memory, or on another stage.
    has_others = caches.dense is not None or caches.index is not None
    has_others |= any(each.group in (KV_GROUP, INDEX_GROUP) for each in caches.uncut)
    if not (caches.has_attention or has_state_alone or has_others):
        raise LayoutError("this model has no layer with full attention, whose pages a request is sent by")
    return RankLayout(shards=tuple(_Pools(caches, place, device).shards()), tokens=place.tokens)


def _check_tokens(caches: Caches, place: Placement) -> None:
    """Refuses what nobody has tried on ranks that divide a request's tokens.

    With decode context parallelism a draft model and an index have every token on every rank.
    """
    if place.token_parts == 1:
        return
    is_other = [each.group not in _SPARSE for each in caches.uncut]
    untried = {
        "a draft model": place.goes_round and len(caches.draft),
        "sliding windows": caches.window is not None,
        "scales of blocks": caches.scales is not None or caches.window_scales is not None,
        "an index of sparse attention": any(is_other) or (is_other and place.goes_round) or caches.index is not None,
        "layers that SGLang lists apart": caches.dense is not None,
    }
    if found := [name for name, is_there in untried.items() if is_there]:
        raise LayoutError(
            f"{place.token_parts} ranks divide the tokens of a request ({place.tokens.partition}), and {found} are not "
            "divided so: leave --dcp-size or --enable-kv-cache-sharding away"
        )


class _Pools:
    """Describes a rank's pools, one after the other."""

    def __init__(self, caches: Caches, place: Placement, device: Device) -> None:
        self._caches = caches
        self._place = place
        self._device = device
        is_divided = place.token_parts > 1
        self._draft_group = DRAFT_GROUP if is_divided else KV_GROUP
        self._index_group = INDEX_GROUP if is_divided else KV_GROUP
        # A page of a draft model's has the tokens of all ranks that divide them.
        self._draft_page = caches.page_tokens * place.token_parts
        # Pools that share page numbers may be rounded up to more pages than another one has.
        counts: dict[str, list[int]] = {}
        for group, buffers in (
            (self._draft_group, caches.draft),
            *((group, pool.buffers) for _, pool, _, group, _ in self._attention()),
            *((self._group_of(each), each.buffers) for each in caches.uncut),
        ):
            if len(buffers):
                counts.setdefault(group, []).append(_pages(buffers))
        self._counts = {group: min(pages) for group, pages in counts.items()}

    def shards(self) -> Iterator[Shard]:
        for row in self._attention():
            yield from self._keys_and_values(*row)
        yield from self._drafts()
        for each in self._caches.uncut:
            yield from self._uncut(each)
        yield from self._state(self._caches.state)

    def _attention(self) -> Iterator[tuple[str, Attention, Stage, str, str]]:
        """Yields pools with pages: what names begin with, the pool, its layers, its group, and what is whole in it."""
        caches, stages = self._caches, self._caches.stages
        for prefix, pool, stage, group, whole in (
            ("", caches.kv if caches.has_attention else None, stages.attention, KV_GROUP, "latent"),
            (DENSE, caches.dense, stages.dense, KV_GROUP, "latent"),
            ("", caches.index, stages.attention, KV_GROUP, "index of keys"),
            ("window ", caches.window, stages.window, WINDOW_GROUP, "latent"),
            ("scale of ", caches.scales, stages.attention, KV_GROUP, "latent"),
            ("scale of window ", caches.window_scales, stages.window, WINDOW_GROUP, "latent"),
        ):
            if pool is not None:
                yield prefix, pool, stage, group, whole

    def _group_of(self, given: Uncut) -> str:
        return self._index_group if given.group == INDEX_GROUP else given.group

    def _keys_and_values(self, prefix: str, pool: Attention, stage: Stage, group: str, whole: str) -> Iterator[Shard]:
        """Yields the shards of keys and values, or of latents, or of what else is `whole` on every rank."""
        for kind, (name, part, head_bytes) in enumerate(_kinds_of(pool, whole)):
            yield self._shard(
                prefix + name,
                replace(pool, buffers=part, part_bytes=pool.part_bytes[kind : kind + 1] if pool.part_bytes else None),
                head_bytes,
                _layers(len(part), stage),
                group,
            )

    def _drafts(self) -> Iterator[Shard]:
        """Yields the shards of a draft model, layer by layer, keys before values."""
        pool, number = Attention(self._caches.draft, self._caches.draft_heads), 0
        for _, part, head_bytes in _kinds_of(pool, "latent"):
            for index in range(len(part)):
                layer = replace(pool, buffers=part[index : index + 1])
                yield self._shard(f"{DRAFT}{number}", layer, head_bytes, (1, Interval(0, 1)), self._draft_group)
                number += 1

    def _shard(self, name: str, pool: Attention, head_bytes: int, layers: tuple[int, Interval], group: str) -> Shard:
        """Describes keys, or values, or what every rank has whole.

        Args:
            pool: with their buffers alone.
            head_bytes: of one head and token.
            layers: how many the model has, and which of them the rank holds.
        """
        is_drafts, buffers, heads = name.startswith(DRAFT), pool.buffers, pool.heads
        tokens = self._draft_page if is_drafts else self._caches.page_tokens
        row_bytes = heads.held * head_bytes if heads is not None else 0
        if len(buffers):
            row_bytes = _row_bytes(buffers, name, tokens, pool.part_bytes[0] if pool.part_bytes else None)
        if not row_bytes:
            raise LayoutError(
                f"no layer of this pipeline stage has {name}, and nothing says how long it is elsewhere: divide layers "
                "so that every stage has one (SGLANG_PP_LAYER_PARTITION)"
            )
        if heads is not None and row_bytes != heads.held * head_bytes:
            raise LayoutError(
                f"{name}: {row_bytes} bytes a token are not those of {heads.held} heads of {head_bytes} bytes, which "
                f"{'the draft model' if is_drafts else 'SGLang'}'s pool has"
            )
        divided, held = self._heads(heads, self._place.drafts if is_drafts else self._place.heads)
        packing = heads.packing if heads is not None else None
        # Either a page's tokens lie one behind the other, or only the heads do.
        entry, token_parts = (Entry.TOKEN, tokens) if packing is None else (Entry.PAGE, 1)
        page_bytes = buffers.item_bytes[0] if len(buffers) else row_bytes * tokens  # may be a part of larger items
        of_index = row_bytes // len(held) * (tokens // token_parts)
        return Shard(
            component=Component(
                name=name,
                axes=(Axis("layer", layers[0]), divided, Axis("byte", of_index)),
                dtype="uint8",
                entry=entry,
                packing=packing,
                window_tokens=self._caches.window_tokens if group == WINDOW_GROUP else None,
                is_optional=is_drafts,
            ),
            box=(layers[1], held, Interval(0, of_index)),
            addresses=buffers.addresses,
            strides=(of_index, 1),
            paging=Paging(
                page_tokens=tokens,
                num_pages=self._counts.get(group, pool.pages),
                page_stride=page_bytes,
                token_stride=page_bytes // tokens if entry is Entry.TOKEN else 0,
            ),
            device=self._device,
            group=group,
            has_every_token=group == DRAFT_GROUP,
        )

    def _uncut(self, given: Uncut) -> Iterator[Shard]:
        """Yields the shards of what every rank has whole: one for each run of neighbouring layers that have it."""
        sizes = set(given.buffers.item_bytes)
        if len(sizes) != 1:
            raise LayoutError(f"{given.name}: items have {sorted(sizes)} bytes: as many in every layer are needed")
        (item_bytes,), group = sizes, self._group_of(given)
        is_drafts = given.name.startswith(DRAFT)
        stage = self._caches.stages.attention if given.stage is None else given.stage
        total, mine = _layers(given.count, Stage() if is_drafts else stage)
        entry = Entry.REQUEST if given.packing is None else Entry.PAGE
        if given.window_tokens is not None:
            entry = Entry.TOKEN
        component = Component(
            name=given.name,
            axes=(Axis("layer", total), Axis("byte", item_bytes)),
            dtype="uint8",
            entry=entry,
            packing=given.packing,
            window_tokens=self._caches.window_tokens if given.group == WINDOW_GROUP else given.window_tokens,
            is_optional=is_drafts,
        )
        paging = Paging(
            page_tokens=self._caches.page_tokens if entry is Entry.PAGE else 1,
            num_pages=self._counts[group],
            page_stride=item_bytes,
            token_stride=item_bytes if entry is Entry.TOKEN else 0,
        )
        for start, stop in _runs(given.layers):
            first = mine.start + given.layers[start]
            yield Shard(
                component=component,
                box=(Interval(first, first + stop - start), Interval(0, item_bytes)),
                addresses=given.buffers.addresses[start:stop],
                strides=(1,),
                paging=paging,
                device=self._device,
                group=group,
                has_every_token=group == INDEX_GROUP,
            )

    def _state(self, buffers: Sequence[StateBuffer]) -> Iterator[Shard]:
        """Yields the shards of recurrent state."""
        stage, kinds = self._caches.stages.state, [*_kinds(buffers)]
        if stage.total is not None and len(counts := {len(layers) for layers in kinds}) > 1:
            raise LayoutError(
                f"with pipeline stages every layer with recurrent state needs the same kinds of it: {sorted(counts)} "
                "layers of this stage have them"
            )
        for number, layers in enumerate(kinds):
            first = layers[0]
            total, mine = _layers(len(layers), stage)
            name = f"state {number}"
            divided = max(1, first.channels) * first.rows
            if first.item_bytes % divided:
                raise LayoutError(
                    f"recurrent {name}: {first.item_bytes} bytes a slot are not {first.rows} rows of "
                    f"{first.channels} channels"
                )
            row_bytes = first.item_bytes // first.rows
            parts = [*self._channels(first, name)]
            for block, (start, axis, held, index_bytes) in enumerate(parts):
                component = Component(
                    name=name if len(parts) == 1 else f"{name}, block {block}",
                    axes=(Axis("layer", total), Axis("row", first.rows), axis, Axis("byte", index_bytes)),
                    dtype="uint8",
                    entry=Entry.REQUEST,
                )
                yield Shard(
                    component=component,
                    box=(mine, Interval(0, first.rows), held, Interval(0, index_bytes)),
                    addresses=tuple(layer.address + start * index_bytes for layer in layers),
                    strides=(row_bytes, index_bytes, 1),
                    paging=Paging(
                        page_tokens=1,
                        num_pages=first.length // first.item_bytes,
                        page_stride=first.item_bytes,
                        token_stride=0,
                    ),
                    device=self._device,
                    group=STATE_GROUP,
                )

    # ---- parts ------------------------------------------------------------------------------------------------------

    def _heads(self, heads: Heads | None, part: Part) -> tuple[Axis, Interval]:
        """Returns the axis that ranks divide, and this rank's part of it."""
        if heads is None:
            return Axis("head", 1), Interval(0, 1)
        if heads.total is None:
            return Axis(SHARE, part.count), _own(part)
        held = split(heads.total, part.count, part.index)
        if len(held) != heads.held:
            raise LayoutError(
                f"SGLang's pool has {heads.held} heads on rank {part.index} of {part.count}: of a model with "
                f"{heads.total} there would be {len(held)}"
            )
        return Axis("head", heads.total), held

    def _channels(self, state: StateBuffer, name: str) -> Iterator[tuple[int, Axis, Interval, int]]:
        """Yields, for every block, its start on this rank, its axis, this rank's part of it, and the bytes of one."""
        row_bytes, part = state.item_bytes // state.rows, self._place.states
        if state.channels == 0:
            yield 0, Axis("channel", 1), Interval(0, 1), row_bytes
            return
        if state.blocks is None:
            yield 0, Axis(SHARE, part.count), _own(part), row_bytes
            return
        held = [_held(block, part.count, part.index) for block in state.blocks]
        if sum(map(len, held)) != state.channels:
            raise LayoutError(
                f"recurrent {name}: {state.channels} channels on rank {part.index} of {part.count} are not its "
                f"parts {[len(each) for each in held]} of blocks of {[each.channels for each in state.blocks]} channels"
            )
        starts = accumulate(map(len, held), initial=0)
        for start, block, mine in zip(starts, state.blocks, held, strict=False):
            yield start, Axis("channel", block.channels), mine, row_bytes // state.channels


def _kinds_of(pool: Attention, whole: str) -> Iterator[tuple[str, Buffers, int]]:
    """Yields what a pool has of each kind, and the bytes of one head and token."""
    if pool.heads is None:
        yield whole, pool.buffers, 0
        return
    half, odd = divmod(len(pool), 2)
    if odd:
        raise LayoutError(f"{len(pool)} buffers are not keys and values of as many layers")
    yield "k", pool.buffers[:half], pool.heads.key_bytes
    yield "v", pool.buffers[half:], pool.heads.value_bytes


def _row_bytes(buffers: Buffers, name: str, tokens: int, part_bytes: int | None = None) -> int:
    """Returns the bytes of one token in one layer, in pages of so many."""
    sizes = set(buffers.item_bytes)
    item_bytes = buffers.item_bytes[0] if part_bytes is None else part_bytes
    if len(sizes) != 1 or item_bytes % tokens:
        raise LayoutError(
            f"{name}: pages of {tokens} tokens have {sorted(sizes)} bytes: they must have as many in every layer, "
            "and each token must have as many"
        )
    return item_bytes // tokens


def _layers(held: int, stage: Stage) -> tuple[int, Interval]:
    """Returns how many layers the model has, and which of them a rank holds."""
    if stage.total is None:
        return held, Interval(0, held)
    return stage.total, Interval(stage.first, stage.first + held)


def _own(part: Part) -> Interval:
    """Returns the index of a rank's own share, where that is all that is known of it."""
    return Interval(part.index, part.index + 1)


def _pages(buffers: Buffers) -> int:
    return min(length // size for length, size in zip(buffers.lengths, buffers.item_bytes, strict=True))


def _runs(layers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields where neighbouring layers begin and end in a list of layers."""
    start = 0
    for index in range(1, len(layers) + 1):
        if index == len(layers) or layers[index] != layers[index - 1] + 1:
            yield start, index
            start = index


def _held(block: Block, parts: int, index: int) -> Interval:
    """Returns the channels of a block that a rank holds."""
    units, width = split(block.units, parts, index), block.channels // block.units
    return Interval(units.start * width, units.stop * width)


def _kinds(buffers: Sequence[StateBuffer]) -> Iterator[list[StateBuffer]]:
    """Groups buffers to describe together: SGLang lists all layers of one kind of state, then those of the next."""
    kind: list[StateBuffer] = []
    for each in buffers:
        if kind and (each.kind != kind[-1].kind or each.layer <= kind[-1].layer):
            yield kind
            kind = []
        kind.append(each)
    if kind:
        yield kind
