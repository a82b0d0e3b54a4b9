"""What an engine's code is like by its sources: names are followed as an import would, and nothing is run."""

from __future__ import annotations

import pytest
from proof.engine_contracts.sources import Sources

from kvferry.engines.contract import parameters_of
from kvferry.engines.engine_code import MissingError

FILES = {
    "made/__init__.py": "from .queues import Queue as Line\nfrom .names import *\nraise RuntimeError('imported')",
    "made/names.py": "MODES = ['fast']\nadd_mode = MODES.extend\nstill = absent.thing",
    "made/queues.py": """
from enum import Enum, IntEnum, auto
from typing import TYPE_CHECKING, Generic
import made.base as below
from made.base import Base

if TYPE_CHECKING:
    from elsewhere import Settings
else:
    Settings = Base

class Queue(Generic[T], below.Middle):
    def own(self): ...
    also = own
    class Inner:
        limit: int = 3
        name: str

class Kind(Enum):
    SMALL = "small"
    PAIR = (0, 1)
    MASK = 1 << 3

class State(IntEnum):
    FIRST = auto()
    SECOND = auto()
    LAST = SECOND
    _hidden = 7

env = Queue()

class Record:
    def check(self): ...

Record = make("Record", vars(Record))

def read(path, /, *parts, mode="r", **more) -> None:
    '''Reads.'''
    for each in parts:
        yield [each.strip("ab") for other in more if other.size]

    def nested(key: "Unseen"):
        return key.deep
""",
    "made/base.py": """
class Base:
    size: int
    def __init__(self, size, *, name=None):
        self.size = size
    def shared(self): ...
class Middle(Base):
    def shared(self, more): ...
try:
    from fast import Fast
except ImportError:
    Fast = None
class Loop(Loop):
    pass
""",
}


@pytest.fixture
def code() -> Sources:
    return Sources(FILES.get)


@pytest.mark.parametrize(
    ("where", "parameters"),
    [
        ("made.queues:Queue.own", "self"),
        ("made.queues:Queue.also", "self"),
        ("made:Line.shared", "self, more"),
        ("made.queues:Settings.shared", "self"),
        ("made.queues:env.own", "self"),
        ("made.queues:Queue", "size, *, name="),
        ("made.queues:Record.check", "self"),
        ("made:add_mode", "iterable, /"),
        ("made:queues.read", "path, /, *parts, mode=, **more"),
    ],
)
def test_a_name_is_followed_to_its_function(code: Sources, where: str, parameters: str):
    assert parameters_of(code.signature(where)) == parameters


def test_members_have_their_values(code: Sources):
    assert code.members("made.queues:Kind") == {"SMALL": "small", "PAIR": (0, 1), "MASK": "1 << 3"}
    assert code.members("made.queues:State") == {"FIRST": 1, "SECOND": 2, "LAST": 2}


def test_a_class_has_what_it_inherits(code: Sources):
    assert code.fields("made.queues:Queue") == {"size"}
    assert code.fields("made.queues:Queue.Inner") == {"limit", "name"}
    assert code.attributes("made.queues:Queue") == {"own", "also", "Inner", "__init__", "shared"}
    assert code.attributes("made.queues:Queue.Inner") == {"limit"}
    assert "Kind" in code.attributes("made.queues")
    assert code.is_subclass("made:Line", "made.base:Base")
    assert not code.is_subclass("made.base:Base", "made:Line")


def test_a_class_that_is_its_own_base_ends(code: Sources):
    assert code.attributes("made.base:Loop") == set()


def test_a_function_speaks_of_names_and_texts_and_not_of_annotations(code: Sources):
    spoken = code.names_in("made.queues:read")
    assert {"each", "parts", "strip", "ab", "size", "nested", "deep", "mode"} <= spoken
    assert "Unseen" not in spoken


@pytest.mark.parametrize("where", ["made.gone", "made.queues:Gone", "made.queues:Queue.gone", "made.base:Fast.gone"])
def test_what_is_not_there_is_missing(code: Sources, where: str):
    with pytest.raises(MissingError, match=where.rpartition(".")[2].rpartition(":")[2]):
        code.check(where)


@pytest.mark.parametrize("where", ["made:still", "made:MODES", "made.queues:Kind.SMALL"])
def test_what_no_source_tells_is_no_function(code: Sources, where: str):
    code.check(where)
    with pytest.raises(TypeError, match="no function"):
        code.names_in(where)


def test_only_what_is_asked_for_is_read():
    asked: list[str] = []

    def read(path: str) -> str | None:
        asked.append(path)
        return FILES.get(path)

    code = Sources(read)
    code.check("made.base:Base.shared")
    assert (asked, code.modules) == (["made/base.py"], ("made.base",))
