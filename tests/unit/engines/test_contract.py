"""What a plug-in builds on in its engine: an engine that has changed is noticed, and what has changed is named.

Each line is tried both ways: with the engine imported, and by its sources alone.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from functools import wraps
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from proof.engine_contracts.sources import Sources

from kvferry.engines.contract import (
    Attributes,
    Call,
    Contract,
    Fields,
    Inherits,
    Line,
    Members,
    Mentions,
    Present,
    Signature,
    Uses,
    contract_for,
    enforce,
    holds,
    lines,
)
from kvferry.engines.engine_code import EngineCode, Imported
from kvferry.errors import EngineContractError

WHY = "ours is called so"

ENGINE = """
from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any


class State(Enum):
    FAILED = 0
    DONE = auto()


class Sender:
    def init(self, pages: int, index: int | None = None) -> None: ...

    @staticmethod
    def send(pages: list[int], /, *more: int, last: bool = False, **options: Any) -> None: ...


class FastSender(Sender):
    pass


@dataclass
class Arguments:
    pointers: list[int]


class Queue:
    def __init__(self) -> None:
        self.hold_s = 30.0

    def release(self) -> bool:
        return any(age > self.hold_s for age in [1.0])

    @property
    def is_empty(self) -> bool:
        return True


def entry(room: int, *, key: str = "") -> None: ...
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the engine's source is, from which it can be imported."""
    (tmp_path / "an_engine.py").write_text(ENGINE)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("an_engine", None)


@pytest.fixture
def engine(folder: Path) -> ModuleType:
    """The engine, which a test may change."""
    return import_module("an_engine")


@pytest.fixture(params=["imported", "by its sources"])
def code(request: pytest.FixtureRequest, folder: Path) -> EngineCode:
    if request.param == "imported":
        return Imported()
    texts = {file.name: file.read_text() for file in folder.iterdir()}
    return Sources(texts.get)


HOLDS: list[Line] = [
    Present("an_engine", WHY),
    Present("an_engine:Sender.init", WHY),
    Signature("an_engine:Sender.init", "self, pages, index=", WHY),
    Signature("an_engine:FastSender.init", "self, pages, index=", WHY),
    Signature("an_engine:Sender.send", "pages, /, *more, last=, **options", WHY),
    Signature("an_engine:entry", "room, *, key=", WHY),
    Call("an_engine:entry", 1, ("key",), WHY),
    Call("an_engine:entry", 1, (), WHY),
    Members("an_engine:State", {"FAILED": 0}, WHY),
    Members("an_engine:State", {"FAILED": 0, "DONE": 1}, WHY, and_no_others=True),
    Fields("an_engine:Arguments", ("pointers",), WHY),
    Attributes("an_engine:Sender", ("init", "send"), WHY, and_no_others=True),
    Inherits("an_engine:FastSender", "an_engine:Sender", WHY),
    Uses("an_engine:Queue.__init__", ("hold_s",), WHY),
    Mentions("an_engine:Queue.release", ("hold_s", "any"), WHY),
]

DIFFERS: list[tuple[Line, str]] = [
    (Present("no_such_engine.queue", WHY), "no_such_engine.queue "),
    (Present("an_engine:Sender.begin", WHY), "an_engine:Sender.begin is gone: there is no 'begin'"),
    (
        Signature("an_engine:Sender.init", "self, pages", WHY),
        "an_engine:Sender.init takes (self, pages, index=), and took (self, pages)",
    ),
    (
        Call("an_engine:entry", 2, (), WHY),
        "an_engine:entry takes (room, *, key=), and is called with 2 by place: too many positional arguments",
    ),
    (Call("an_engine:entry", 1, ("salt",), WHY), "is called with 1 by place, salt=: got an unexpected keyword"),
    (Members("an_engine:State", {"FAILED": 0, "LOST": 2}, WHY), "an_engine:State: LOST is gone"),
    (Members("an_engine:State", {"FAILED": 9}, WHY), "an_engine:State: FAILED is 0, and was 9"),
    (Members("an_engine:State", {"FAILED": 0}, WHY, and_no_others=True), "an_engine:State: DONE is new"),
    (Fields("an_engine:Arguments", ("pointers", "layers"), WHY), "an_engine:Arguments has no field layers"),
    (Attributes("an_engine:Sender", ("poll",), WHY), "an_engine:Sender: poll is gone"),
    (Attributes("an_engine:Sender", ("init",), WHY, and_no_others=True), "an_engine:Sender: send is new"),
    (Inherits("an_engine:Queue", "an_engine:Sender", WHY), "an_engine:Queue is no an_engine:Sender any more"),
    (Uses("an_engine:Queue.release", ("deadline",), WHY), "an_engine:Queue.release does not use deadline any more"),
    (Uses("an_engine:State", ("deadline",), WHY), "an_engine:State is no function any more"),
    (Signature("an_engine:Queue.is_empty", "self", WHY), "an_engine:Queue.is_empty cannot be read (TypeError: "),
    (Signature("an_engine:State.DONE", "self", WHY), "an_engine:State.DONE cannot be read (TypeError: "),
]


@pytest.mark.parametrize("line", HOLDS, ids=str)
def test_an_engine_as_it_was(code: EngineCode, line: Line):
    contract = Contract("An engine", ("1.0",), (line,))
    assert contract.broken(code) == contract.moved(code) == ()


@pytest.mark.parametrize(("line", "said"), DIFFERS, ids=[text for _, text in DIFFERS])
def test_an_engine_that_has_changed(code: EngineCode, line: Line, said: str):
    contract = Contract("An engine", ("1.0",), (line,))
    (text,) = contract.broken(code)
    assert said in text
    assert text.endswith(f"({WHY})")
    assert contract.moved(code) == ()


MOVED = Mentions("an_engine:Queue.release", ("hold_s", "deadline"), WHY)
SAID_OF_IT = f"an_engine:Queue.release does not use deadline any more ({WHY})"


def test_what_was_merely_read_breaks_nothing(code: EngineCode):
    contract = Contract("An engine", ("1.0",), (*HOLDS, MOVED))
    assert (contract.broken(code), contract.moved(code)) == ((), (SAID_OF_IT,))


@pytest.mark.usefixtures("engine")
def test_what_was_merely_read_is_named_and_the_server_serves(caplog: pytest.LogCaptureFixture):
    contract = Contract("An engine", ("1.0",), (*HOLDS, MOVED))
    with caplog.at_level(logging.WARNING):
        assert enforce((contract,), "1.0") is contract
    assert caplog.messages == [
        f"An engine 1.0 is not all that was read of it when kvferry's plug-in was written: {SAID_OF_IT}. The plug-in "
        "meets none of that when it runs, and serves; whether what was concluded from it still holds, nobody has tried."
    ]


def test_a_function_that_is_wrapped_has_its_own_signature_and_code(engine: ModuleType):
    before = engine.Queue.release

    @wraps(before)
    def wrapped(*arguments: Any) -> Any:
        return before(*arguments)

    engine.Queue.release = wrapped
    try:
        lines = (
            Signature("an_engine:Queue.release", "self", WHY),
            Uses("an_engine:Queue.release", ("hold_s",), WHY),
        )
        assert Contract("An engine", ("1.0",), lines).broken() == ()
    finally:
        engine.Queue.release = before


def test_what_has_changed_stops_the_server_with_all_of_its_names(engine: ModuleType):
    contract = Contract("An engine", ("1.0", "1.1"), (*HOLDS, DIFFERS[1][0], DIFFERS[5][0]))
    with pytest.raises(EngineContractError) as caught:
        enforce((contract,), "1.1+cpu")
    assert str(caught.value) == (
        "kvferry's plug-in does not fit An engine 1.1+cpu, and refuses to serve with it: an_engine:Sender.begin is "
        "gone: there is no 'begin' (ours is called so); an_engine:State: LOST is gone (ours is called so). Every line "
        "of the contract was tried with An engine 1.0 and 1.1: install one of these, or a kvferry that knows An engine "
        "1.1+cpu"
    )


@pytest.mark.parametrize(("version", "warns"), [("1.0", False), ("1.0+cpu", False), ("1.0.post1", True), ("2.0", True)])
def test_a_version_that_was_not_tried_is_said(
    engine: ModuleType, caplog: pytest.LogCaptureFixture, version: str, warns: bool
):
    with caplog.at_level(logging.WARNING):
        enforce((Contract("An engine", ("1.0",), tuple(HOLDS)),), version)
    assert [record.getMessage() for record in caplog.records] == warns * [
        f"An engine {version} is not among the versions that kvferry's plug-in was tried with: 1.0. All 14 names and "
        "signatures that it builds on are there; whether they still mean the same, nobody has tried."
    ]


def test_each_version_has_the_contract_that_was_tried_with_it():
    old, new = Contract("An engine", ("1.0",), ()), Contract("An engine", ("1.1", "1.2"), ())
    assert [contract_for((old, new), version) for version in ("1.0", "1.1", "1.2", "3")] == [old, new, new, new]


def test_a_version_whose_sources_were_read_has_its_contract_and_was_not_tried(caplog: pytest.LogCaptureFixture):
    old, new = Contract("An engine", ("1.0",), ()), Contract("An engine", (), (), read=("1.1",))
    with caplog.at_level(logging.WARNING):
        assert enforce((old, new), "1.1+cu130") is new
    (said,) = caplog.messages
    assert said.startswith("An engine 1.1+cu130 is not among the versions that kvferry's plug-in was tried with: 1.0. ")


def test_a_version_that_was_not_tried_has_the_contract_of_the_one_before_it():
    old, new = Contract("An engine", ("1.9.0",), ()), Contract("An engine", ("1.10.0",), ())
    of = {"1.9.1+cpu": old, "1.9.7rc2": old, "1.10.1": new, "2.0": new, "0.1.dev7+g1f": new, "unknown": new}
    assert {version: contract_for((old, new), version) for version in of} == of


@pytest.mark.usefixtures("engine")
def test_what_a_plug_in_serves_well_without_is_said_and_no_more(caplog: pytest.LogCaptureFixture):
    lines = (Attributes("an_engine:Queue", ("release",), WHY), Attributes("an_engine:Queue", ("drain",), WHY), MOVED)
    assert holds(Contract("Engine", ("1.0",), lines[:1]), "1.1", "It ends late")
    assert not caplog.records
    assert not holds(Contract("Engine", ("0.9", "1.0"), lines), "1.1", "It ends late")
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert caplog.messages == [
        f"kvferry's plug-in does not fit Engine 1.1 in everything: an_engine:Queue: drain is gone ({WHY}); {SAID_OF_IT}"
        ". It ends late. All of it was tried with Engine 0.9 and 1.0"
    ]


def test_a_table_says_what_lines_are_needed_for_where_and_of_what_kind():
    found = lines("""
ours is called so
    takes engine.conn:Sender.send: self, pages, *,
        tokens=
    call engine.conn:Sender.close: 1
states are told apart so
    members engine.conn:State: open done
    all engine.conn:Sender: send close
""")
    assert found == (
        Signature("engine.conn:Sender.send", "self, pages, *, tokens=", "ours is called so"),
        Call("engine.conn:Sender.close", 1, (), "ours is called so"),
        Members("engine.conn:State", {"OPEN": "open", "DONE": "done"}, "states are told apart so"),
        Attributes("engine.conn:Sender", ("send", "close"), "states are told apart so", and_no_others=True),
    )


@pytest.mark.parametrize(
    "row", ["    takes engine.conn:Sender.send", "    asks engine.conn: a", "  uses engine.conn: a"]
)
def test_a_row_that_is_no_line_of_a_contract_is_refused(row: str):
    with pytest.raises(ValueError, match=re.escape(row)):
        lines(f"ours is called so\n{row}\n")
