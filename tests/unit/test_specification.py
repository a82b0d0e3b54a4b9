"""The wire and the layout as documents: made from the code, and enough to build another implementation from."""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from packaging.version import Version
from tests.support import vector_reader
from tests.support.clones import ROOT, docs_program

from kvferry.protocol.wire import codec, messages
from kvferry.protocol.wire.versions import PROTOCOL_VERSION

pytest.importorskip("griffe")

FOLDER = ROOT / "docs/specification"
EXAMPLES: list[dict[str, Any]] = json.loads((FOLDER / "messages.json").read_text())
VECTORS = {file.stem: json.loads(file.read_text()) for file in sorted((FOLDER / "vectors").iterdir())}
DECODERS: dict[Any, Any] = {
    messages.ToPrefill: codec.decode_to_prefill,
    messages.ToDecode: codec.decode_to_decode,
    messages.Notification: codec.decode_notification,
}
PAGE = (FOLDER / "messages.md").read_text()
SCHEMA_OF = Version("0.23")
"""The msgspec whose words the schema has: older ones say nothing of keys, and too much of arrays with defaults."""


def test_no_file_has_fallen_behind():
    made = docs_program("generate").specification_files()
    kept = {str(file.relative_to(FOLDER)) for file in FOLDER.rglob("*.*") if file.suffix in (".md", ".json")}
    assert kept == set(made), "a file that is not made any more, or `make docs` was not run"
    if Version(msgspec.__version__) < SCHEMA_OF:
        del made["layout.schema.json"]  # what it allows is tested below
    assert [name for name, text in made.items() if (FOLDER / name).read_text() != text] == [], "run `make docs`"


# ---- messages -------------------------------------------------------------------------------------------------------


def every_message() -> Iterator[tuple[type, str]]:
    """Every message, and how its docstring has to begin."""
    for union in (messages.ToPrefill, messages.NumberedToPrefill):
        yield from ((of, "Decode to prefill") for of in get_args(union) if of is not messages.Numbered)
    for union in (messages.ToDecode, messages.NumberedToDecode):
        yield from ((of, "Prefill to decode") for of in get_args(union) if of is not messages.Numbered)
    yield from ((of, "Notification") for of in get_args(messages.Notification))
    yield messages.Numbered, "Either way"


@pytest.mark.parametrize(("of", "begins"), list(every_message()), ids=lambda each: getattr(each, "__name__", ""))
def test_a_message_says_who_sends_it_as_the_types_do_and_the_page_has_all_of_it(of: type, begins: str):
    assert inspect.cleandoc(of.__doc__ or "").startswith(begins)
    section = PAGE.partition(f"\n### {of.__name__}\n")[2].partition("\n#")[0]
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| `")]
    assert [row[0] for row in rows] == [f"| `{field.encode_name}`" for field in msgspec.structs.fields(of)]
    assert all(row[1] and row[3].strip(" |") for row in rows), "every field has a type and a meaning"


def test_there_is_an_example_of_every_message():
    assert {each["message"] for each in EXAMPLES} == {of.__name__ for of, _ in every_message()}


def bytes_again(value: Any) -> Any:
    """A decoded example, with bytes in place of their digits."""
    match value:
        case {"hex": digits}:
            return bytes.fromhex(digits)
        case dict():
            return {name: bytes_again(each) for name, each in value.items()}
        case list():
            return [bytes_again(each) for each in value]
    return value


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda each: each["message"])
def test_an_example_is_read_as_the_page_says_and_written_again(example: dict[str, Any]):
    data = bytes.fromhex(example["hex"])
    assert data[:6] == b"kvfy" + PROTOCOL_VERSION.to_bytes(2, "little")
    assert msgspec.msgpack.decode(data[6:]) == bytes_again(example["decoded"])
    assert msgspec.msgpack.encode(bytes_again(example["decoded"])) == data[6:]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda each: each["message"])
def test_an_example_means_the_same_to_this_release(example: dict[str, Any]):
    data = bytes.fromhex(example["hex"])
    name = example["decoded"]["type"]
    decode = next(decode for union, decode in DECODERS.items() if name in {of.__name__ for of in get_args(union)})
    message = decode(data)
    assert codec.encode(message, codec.version_of(data)) == data
    if example["sent"].endswith("numbered"):
        is_up = example["sent"].startswith("decode")
        decode = codec.decode_numbered_to_prefill if is_up else codec.decode_numbered_to_decode
        assert bytes(codec.encode_body(decode(message.body))) == bytes(message.body)


def test_the_order_and_the_states_are_those_of_the_machines():
    """Looked at by hand, once, against docs/design/protocol.md."""
    for line in (
        "| READY | ready | OpenRoom (number 1), AbortRoom, ExpectRooms, Ping, IsGone |",
        "| prefill | Drained | FAILED | FAILED |",
        "| `RefuseRoom` |  | BOOTSTRAPPING → FAILED |",
        "| `RoomVerified` | TRANSFERRING → SUCCEEDED | TRANSFERRING → SUCCEEDED<br>FAILED |",
    ):
        assert f"\n{line}\n" in PAGE, line


# ---- layouts --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def validated() -> Any:
    """Checks a value against a definition of the schema."""
    jsonschema: Any = pytest.importorskip("jsonschema")
    schema = json.loads((FOLDER / "layout.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["$id"].endswith(f":{PROTOCOL_VERSION}")

    def check(definition: str, value: Any) -> list[str]:
        validator = jsonschema.Draft202012Validator({**schema, "$ref": f"#/$defs/{definition}"})
        return [error.json_path for error in validator.iter_errors(value)]

    return check


@pytest.mark.parametrize("name", VECTORS)
def test_vectors_and_their_layouts_keep_to_the_schema(name: str, validated: Any):
    vector = VECTORS[name]
    assert vector["protocol"] == PROTOCOL_VERSION
    assert validated("Vector", vector) == []
    for rank in (*vector["prefill"], *vector["decode"]):
        assert validated("RankLayout", rank["layout"]) == []


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        (("component", "dtype"), "float12"),
        (("component", "axes", 0), ["layer"]),
        (("box", 0), [-1, 2]),
        (("addresses", 0), "0x100000"),
        (("device",), ["DISK", 0]),
        (("paging",), [16, 4]),
    ],
)
def test_what_is_no_layout_does_not(path: tuple[str | int, ...], wrong: Any, validated: Any):
    layout = json.loads(json.dumps(VECTORS["heads"]["prefill"][0]["layout"]))
    inner = layout["shards"][0]
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = wrong
    assert validated("RankLayout", layout)


# ---- vectors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VECTORS)
def test_a_second_reader_comes_to_the_same_moves(name: str):
    vector = VECTORS[name]
    assert vector_reader.moves(vector) == vector["moves"]
    for rank in (*vector["prefill"], *vector["decode"]):
        assert vector_reader.regions(rank) == rank["regions"]


def test_the_second_reader_is_short_and_shares_nothing_with_kvferry():
    source = Path(vector_reader.__file__).read_text()
    assert len(source.splitlines()) <= 200
    imported = {
        name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    assert imported == {"__future__", "collections.abc", "itertools", "math", "typing", "zlib"}


def changed(vector: dict[str, Any], what: str) -> dict[str, Any]:
    """A vector of which one thing is another."""
    copy: dict[str, Any] = json.loads(json.dumps(vector))
    shard = copy["decode"][0]["layout"]["shards"][0]
    match what:
        case "a page":
            copy["decode"][0]["groups"][0]["pages"][0] -= 1
        case "a stride":
            shard["strides"][0] //= 2
        case "an address":
            shard["addresses"].reverse()
        case "the room":
            copy["room"] = 4
        case "the end":
            copy["decode"][0]["groups"][0]["stop"] -= 16
        case "a page's tokens":
            copy["prefill"][0]["layout"]["shards"][0]["paging"][0] //= 2
        case "what is held":
            copy["decode"][0]["groups"][0]["held"] -= 1
            copy["decode"][0]["groups"][0]["start"] -= 1
    return copy


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("heads", "a page"),
        ("order", "a stride"),
        ("larger_pages", "an address"),
        ("replicas", "the room"),
        ("latents", "the room"),
        ("window", "the end"),
        ("larger_pages", "a page's tokens"),
        ("smaller_pages", "what is held"),
        ("states", "a page"),
        ("context", "the end"),
    ],
)
def test_other_inputs_come_to_other_moves(name: str, what: str):
    assert vector_reader.moves(changed(VECTORS[name], what)) != VECTORS[name]["moves"]


def test_vectors_are_few_enough_to_be_read():
    for name, vector in VECTORS.items():
        assert 0 < len(vector["moves"]) <= 130, name
        assert len((FOLDER / "vectors" / f"{name}.json").read_text()) <= 15_000, name
