"""Which kinds of cache a plug-in transfers and which it refuses, as data.

One tuple in each plug-in says what is known of every kind that its engine has. The plug-in looks every cache up in it,
so that a kind which nobody has thought of is refused by name; docs/design/caches.md is made from the same tuple, and a
test checks that the test of every row is there. Nothing here knows an engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from kvferry.errors import LayoutError


@dataclass(frozen=True, slots=True)
class CacheKind:
    """One kind of cache that an engine has.

    Attributes:
        name: what the engine calls it, such as a class or the member of an enum; a variant of one is "NAME with WHAT".
        meaning: what is cached, in words that go on with "keep".
        test: the test that shows it, as `tests/unit/engines/test_vllm_layouts.py::test_name`.
        transfer: how it is transferred; None if it is refused.
        refusal: why it is not transferred; None if it is.

    Raises:
        LayoutError: unless exactly one of transfer and refusal is given.
    """

    name: str
    meaning: str
    test: str
    transfer: str | None = None
    refusal: str | None = None

    def __post_init__(self) -> None:
        if (self.transfer is None) == (self.refusal is None):
            raise LayoutError(f"cache kind {self.name!r} is either transferred or refused, and says how or why")


@dataclass(frozen=True, slots=True)
class CacheKinds:
    """All kinds of cache of one engine.

    Attributes:
        engine: its name and version, as messages call it.
        kinds: one for each, no name twice.

    Raises:
        LayoutError: if a name appears twice.
    """

    engine: str
    kinds: tuple[CacheKind, ...]

    def __post_init__(self) -> None:
        names = [kind.name for kind in self.kinds]
        if twice := {name for name in names if names.count(name) > 1}:
            raise LayoutError(f"kinds of cache appear twice: {sorted(twice)}")

    def transferred(self, name: str, *, where: str) -> CacheKind:
        """Returns the kind of that name.

        Args:
            name: what the engine calls it.
            where: how the message calls the layers, such as "layers such as 'model.layers.0.mixer'".

        Raises:
            LayoutError: if it is refused, or not known at all, naming it and all that are transferred.
        """
        kind = next((kind for kind in self.kinds if kind.name == name), None)
        if kind is not None and kind.refusal is None:
            return kind
        known = ", ".join(kind.name for kind in self.kinds if kind.refusal is None)
        what = f"{name}, which kvferry's plug-in for {self.engine} does not know"
        if kind is not None:
            what = (
                f"{kind.meaning} ({name}), which kvferry's plug-in for {self.engine} does not transfer: {kind.refusal}"
            )
        raise LayoutError(f"{where} keep {what}. It transfers {known}; serve this model without kvferry")

    def markdown(self) -> str:
        """Makes the table for docs/design/caches.md: neighbours of one fate that one test shows share a row."""
        return "\n".join(self._rows())

    def _rows(self) -> Iterator[str]:
        yield f"| {self.engine} calls it | what it is | how it is transferred | shown by |"
        yield "|---|---|---|---|"
        for (transfer, refusal, test), alike in groupby(
            self.kinds, lambda kind: (kind.transfer, kind.refusal, kind.test)
        ):
            kinds = list(alike)
            names = ", ".join(f"`{kind.name}`" for kind in kinds)
            meanings = "; ".join(dict.fromkeys(kind.meaning for kind in kinds))
            answer = transfer if refusal is None else f"refused: {refusal}"
            yield f"| {names} | {meanings} | {answer} | `{test}` |"


def names_missing(known: CacheKinds, engine_names: Sequence[str]) -> list[str]:
    """Returns the names in which a plug-in's table and an engine differ: what either has and the other lacks.

    Args:
        known: the plug-in's table.
        engine_names: what the engine has, without variants.
    """
    ours = {kind.name.partition(" with ")[0] for kind in known.kinds}
    return sorted(ours.symmetric_difference(engine_names))
