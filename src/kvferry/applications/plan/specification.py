"""How one side is divided, as it is written on the command line: "tp=4,pp=2,dp=2,cp=2:interleaved:16"."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.errors import SettingsError
from kvferry.layout import RankCoordinates, TokenPartition, all_coordinates, contiguous, interleaved, zigzag

FORM = (
    "write sizes such as tp=4,pp=2,dp=2,cp=2,ep=8; stages=7+8 instead of pp for the layers of every stage; "
    "cp=2:contiguous, cp=2:zigzag, cp=2:interleaved or, for pages or blocks of 16 tokens, cp=2:contiguous:16 and "
    "cp=2:interleaved:16 for how tokens are partitioned; draft if this side caches the draft model's layers too"
)
_SIZES = ("tp", "pp", "dp", "ep")

_MOST_RANKS = 4096


@dataclass(frozen=True, slots=True)
class SideSpecification:
    """How an engine is divided.

    Attributes:
        tp: ranks under tensor parallelism.
        pp: ranks under pipeline parallelism.
        dp: ranks under data parallelism.
        ep: ranks under expert parallelism, which divides no cache.
        stages: layers of every pipeline stage; None divides them as evenly as possible.
        partition: how context parallelism partitions tokens over its ranks.
        has_draft: whether the side has the draft model's layers.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    stages: tuple[int, ...] | None = None
    partition: TokenPartition = field(default_factory=TokenPartition)
    has_draft: bool = False

    @property
    def cp(self) -> int:
        """Ranks under context parallelism."""
        return self.partition.num_parts

    @property
    def coordinates(self) -> tuple[RankCoordinates, ...]:
        """Every rank of the first data-parallel group, whose group rank is its number here."""
        ranks = all_coordinates(tp_size=self.tp, pp_size=self.pp, dp_size=self.dp, cp_size=self.cp)
        return tuple(rank for rank in ranks if rank.dp_rank == 0)

    @property
    def short(self) -> str:
        """Such as "TP 4, PP 7+8"."""
        stages = str(self.pp) if self.stages is None else "+".join(map(str, self.stages))
        sizes = {"TP": (self.tp, self.tp), "PP": (self.pp, stages), "CP": (self.cp, self._cp)}
        sizes |= {"DP": (self.dp, self.dp), "EP": (self.ep, self.ep)}
        named = [f"{name} {text}" for name, (size, text) in sizes.items() if size > 1]
        return ", ".join([*(named or ["TP 1"]), *(["draft"] if self.has_draft else [])])

    @property
    def _cp(self) -> str:
        partition = self.partition
        if partition.block_tokens is not None:
            return f"{self.cp} interleaved by {partition.block_tokens}"
        if partition.page_tokens is not None:
            return f"{self.cp} contiguous in pages of {partition.page_tokens}"
        return f"{self.cp} {'contiguous' if len(partition.pattern) == self.cp else 'zigzag'}"


def parse_side(text: str, *, option: str) -> SideSpecification:
    """Reads how a side is divided.

    Args:
        text: comma-separated items; every one may be left out, and so may all.
        option: the command line's, for errors.

    Raises:
        SettingsError: naming the item that is wrong, and the form.
    """
    sizes: dict[str, int] = {}
    stages: tuple[int, ...] | None = None
    partition, has_draft = TokenPartition(), False
    seen: set[str] = set()
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = item.partition("=")
        if key in seen:
            raise SettingsError(f"{option} {text!r}: {key!r} appears twice; {FORM}")
        seen.add(key)
        where = f"{option} {text!r}: {item!r}"
        if item == "draft":
            has_draft = True
        elif key in _SIZES:
            sizes[key] = _size(value, where)
        elif key == "stages":
            stages = tuple(_number(part, where) for part in value.split("+"))
        elif key == "cp":
            partition = _partition(value, where)
        else:
            raise SettingsError(f"{where} is not understood; {FORM}")
    if stages is not None:
        if sizes.get("pp", len(stages)) != len(stages):
            raise SettingsError(
                f"{option} {text!r}: pp={sizes['pp']}, but stages={'+'.join(map(str, stages))} has {len(stages)} stages"
            )
        sizes["pp"] = len(stages)
    side = SideSpecification(**sizes, stages=stages, partition=partition, has_draft=has_draft)
    if (ranks := side.tp * side.cp * side.pp * side.dp) > _MOST_RANKS:
        raise SettingsError(f"{option} {text!r} has {ranks} ranks: {_MOST_RANKS} can be planned")
    return side


def _partition(value: str, where: str) -> TokenPartition:
    size_text, *kind = value.split(":")
    size = _size(size_text, where)
    if size == 1 and len(kind) <= 1:
        return TokenPartition()
    match kind:
        case [] | ["contiguous"]:
            return contiguous(size)
        case ["contiguous", page]:
            return contiguous(size, _size(page, where))
        case ["zigzag"]:
            return zigzag(size)
        case ["interleaved"]:
            return interleaved(size)
        case ["interleaved", block]:
            return interleaved(size, _size(block, where))
    raise SettingsError(f"{where} partitions tokens in no known way; {FORM}")


def _size(value: str, where: str) -> int:
    size = _number(value, where)
    if not 1 <= size <= _MOST_RANKS:
        raise SettingsError(f"{where}: a size is 1 to {_MOST_RANKS}; {FORM}")
    return size


def _number(value: str, where: str) -> int:
    if not (value.isascii() and value.isdigit()):
        raise SettingsError(f"{where}: {value!r} is not a number; {FORM}")
    return int(value)
