"""The tree is what the picture says: layers import only layers below them, and the documents name the same layers."""

from __future__ import annotations

import ast
import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import kvferry.errors
from kvferry.models.families import FAMILIES
from kvferry.settings import all_fields
from kvferry.transport.chosen import TRANSPORTS

PACKAGE = Path(kvferry.__file__).parent
ROOT = PACKAGE.parent.parent

LAYERS = (
    "layout",
    "plan",
    "protocol",
    "transport",
    "staging",
    "control",
    "observe",
    "endpoint",
    "models",
    "pools",
    "testing",
    "engines",
    "applications",
    "cli",
)
"""From the ground up."""

FLOORS = {
    "plan": ("requests",),
    "protocol": ("wire", "transfer", "links"),
    "endpoint": ("runtime", "prefill", "decode"),
}
"""The folders within a layer, likewise."""

BESIDE = ("proof", "prototypes", "tests", "benchmarks", "docs", "examples", "release")
"""What is in no wheel."""

ENGINES = {file.parent.name for file in (PACKAGE / "engines").glob("*/__init__.py")}

SANS_IO = ("layout", "plan", "protocol")
FORBIDDEN_WITHOUT_IO = {"asyncio", "httpx", "logging", "os", "queue", "random", "secrets", "socket", "subprocess"} | {
    "threading",
    "time",
    "zmq",
}


@cache
def imports_of(file: Path) -> tuple[frozenset[str], frozenset[str]]:
    """Every module that a file imports, anywhere in it; and those of them that it does not import for types alone."""
    found, for_types = list[tuple[ast.stmt, str]](), set[ast.AST]()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            for_types.update(ast.walk(node))
        elif isinstance(node, ast.Import):
            found += [(node, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} uses a relative import"
            assert node.module is not None
            found += [(node, node.module), *((node, f"{node.module}.{alias.name}") for alias in node.names)]
    return frozenset(name for _, name in found), frozenset(name for node, name in found if node not in for_types)


def imports(file: Path, *, also_for_types: bool = False) -> frozenset[str]:
    """Every module that a file imports, anywhere in it, but not for type checking alone if that is not asked for."""
    everything, when_run = imports_of(file)
    return everything if also_for_types else when_run


def layer_files(layer: str) -> list[Path]:
    return sorted((PACKAGE / layer).rglob("*.py"))


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_imports_only_layers_below_it(layer: str):
    allowed = LAYERS[: LAYERS.index(layer) + 1]
    for file in layer_files(layer):
        for module in imports(file):
            parts = module.split(".")
            if parts[0] == "kvferry" and len(parts) > 1 and parts[1] in LAYERS:
                assert parts[1] in allowed, f"{file.relative_to(ROOT)} imports {module}, a layer above it"


@pytest.mark.parametrize("layer", FLOORS)
def test_a_folder_of_a_layer_imports_only_folders_below_it(layer: str):
    floors = FLOORS[layer]
    assert {each.parent.name for each in (PACKAGE / layer).glob("*/*.py")} == set(floors)
    for index, floor in enumerate(floors):
        for file in layer_files(f"{layer}/{floor}"):
            above = {module for module in imports(file) for each in floors[index + 1 :] if f".{layer}.{each}" in module}
            assert not above, f"{file.relative_to(ROOT)} imports {above}"


def test_the_two_sides_of_an_endpoint_do_not_know_each_other():
    for file in layer_files("endpoint/decode"):
        assert not {module for module in imports(file) if module.startswith("kvferry.endpoint.prefill")}


def test_nothing_that_ships_needs_what_proves_it_releases_it_or_is_planned():
    for file in PACKAGE.rglob("*.py"):
        needs = {module.split(".")[0] for module in imports(file)}
        assert not needs & {"proof", "prototypes", "release"}, file.relative_to(ROOT)


def test_a_prototype_uses_what_others_may_and_a_planned_interface_nothing_of_ours():
    files = {file.stem: file for file in (ROOT / "prototypes").glob("*.py")}
    ours = {name: {module for module in imports(file) if module.startswith("kvferry")} for name, file in files.items()}
    assert not ours.pop("transport_interface") | ours.pop("self_describing_pools")
    parts = {".".join(module.split(".")[:2]) for modules in ours.values() for module in modules}
    assert parts <= {f"kvferry.{name}" for name in (*kvferry.__all__, "errors", "transport")} | {"kvferry"}


def test_commands_need_nothing_that_tests_are_written_with():
    for file in (*layer_files("applications"), *layer_files("cli")):
        assert not {module for module in imports(file) if f"{module}.".startswith("kvferry.testing.")}, file


def test_no_imports_go_in_a_circle():
    """Also those that only types need, and those of what stands beside the library."""
    files = {file: file.relative_to(PACKAGE.parent) for file in PACKAGE.rglob("*.py")}
    files |= {file: file.relative_to(ROOT) for beside in BESIDE for file in (ROOT / beside).rglob("*.py")}
    modules = {".".join(path.with_suffix("").parts): file for file, path in files.items()}
    sorter: TopologicalSorter[str] = TopologicalSorter()
    for module, file in modules.items():
        if file.name != "__init__.py":  # a package names what is in it
            sorter.add(module, *(imports(file, also_for_types=True) & modules.keys()))
    sorter.prepare()  # raises CycleError


@pytest.mark.parametrize("layer", SANS_IO)
def test_layers_without_io_import_nothing_that_does_any(layer: str):
    for file in (*layer_files(layer), PACKAGE / "control" / "leases.py"):
        for module in imports(file):
            assert module.split(".")[0] not in FORBIDDEN_WITHOUT_IO, f"{file.relative_to(ROOT)} imports {module}"


@cache
def words_of_code(file: Path) -> set[str]:
    """Every name and every text in a file's code, in lower case: not its documentation."""
    words = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = ""  # a docstring
        for text in (getattr(node, field, None) for field in ("id", "attr", "arg", "name", "value")):
            if isinstance(text, str):
                words.add(text.lower())
    return words


@pytest.mark.parametrize("layer", ["layout", "plan", "protocol", "transport", "staging", "control", "endpoint"])
def test_no_layer_below_models_knows_a_model_family(layer: str):
    families = {re.match("[a-z]+", family).group() for family in FAMILIES} | {"mla", "gqa"}  # type: ignore[union-attr]
    assert {"qwen", "deepseek", "mamba"} <= families
    for file in layer_files(layer):
        found = {family for family in families for word in words_of_code(file) if family in word}
        assert not found, f"{file.relative_to(ROOT)} speaks of {found}"


def test_nothing_above_transport_knows_a_library_that_moves_bytes():
    """A transport is one file: what is said and asked of its library stands there. Settings may be named."""
    libraries = {*TRANSPORTS, "ucx"}
    assert "nixl" in libraries
    allowed = {*all_fields(), *(f"kvferry_{name}" for name in all_fields())}
    above = [layer for layer in LAYERS[LAYERS.index("transport") + 1 :] if layer != "engines"]
    for file in (file for layer in above for file in layer_files(layer)):
        for library in libraries:
            found = {word for word in words_of_code(file) if library in word and word not in allowed}
            found -= {word for word in found if allowed & set(re.findall(r"\w+", word))} | {"sglang_replaces_nixl"}
            assert not found, f"{file.relative_to(ROOT)} speaks of {found}"


def test_plug_ins_leave_the_transport_to_the_setting():
    makes = {"PrefillEndpoint": 0, "DecodeEndpoint": 0}
    for node in (node for file in layer_files("engines") for node in ast.walk(ast.parse(file.read_text()))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in makes:
            makes[node.func.id] += 1
            assert not {keyword.arg for keyword in node.keywords} & {"transport", None}
    assert all(makes.values())


def test_every_folder_is_a_layer():
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == set(LAYERS)


def test_the_library_knows_nothing_of_what_stands_on_it():
    on_top = {"applications", "cli"}
    for layer in (each for each in LAYERS if each not in on_top):
        for file in layer_files(layer):
            assert not {f"kvferry.{each}" for each in on_top} & {".".join(m.split(".")[:2]) for m in imports(file)}


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_a_plug_in_uses_the_front_door_and_no_other_engine(engine: str):
    """What everyone else is told to use must be enough for our own engines."""
    open_to_all = {"kvferry", "kvferry.errors", *(f"kvferry.{name}" for name in kvferry.__all__)}
    open_to_all |= {f"kvferry.errors.{name}" for name in vars(kvferry.errors)}
    open_to_all |= {"kvferry.answers", "kvferry.answers.Answer", "kvferry.answers.request"}
    open_to_all |= {"kvferry.loggers", "kvferry.loggers.logger_of"}
    shared = {f"kvferry.engines.{file.stem}" for file in (PACKAGE / "engines").glob("*.py")}
    for file in layer_files(f"engines/{engine}"):
        for module in imports(file):
            package = module.split(".")[0]
            assert package not in ENGINES - {engine}, f"{file.relative_to(ROOT)} imports {module}, of another engine"
            is_own = f"{module}.".startswith((f"kvferry.engines.{engine}.", *(f"{each}." for each in shared)))
            if package == "kvferry" and not is_own:
                assert module in open_to_all, f"{file.relative_to(ROOT)} imports {module}, which is no front door"


def test_what_engines_share_needs_none_of_their_packages():
    assert {"vllm", "sglang"} <= ENGINES
    assert imports(PACKAGE / "engines" / "__init__.py") == set()
    for file in (PACKAGE / "engines").glob("*.py"):
        packages = {module.split(".")[0] for module in imports(file)}
        assert not packages & {*ENGINES, "torch", "transformers"}, f"{file.relative_to(ROOT)} imports {packages}"


def test_the_fingerprint_of_engines_is_pure():
    packages = {module.split(".")[0] for module in imports(PACKAGE / "engines" / "fingerprint.py")}
    assert not packages & FORBIDDEN_WITHOUT_IO


@pytest.mark.parametrize(("module", "error"), [("contract", "EngineContractError"), ("cache_kinds", "LayoutError")])
def test_what_checks_engines_knows_none(module: str, error: str):
    ours = {module for module in imports(PACKAGE / "engines" / f"{module}.py") if module.startswith("kvferry")}
    allowed = {"kvferry.loggers", "kvferry.loggers.logger_of"}
    asked = {each for each in ours if f"{each}.".startswith("kvferry.engines.engine_code.")}
    assert ours - allowed - asked == {"kvferry.errors", f"kvferry.errors.{error}"}
    assert not {each for each in imports(PACKAGE / "engines" / "engine_code.py") if each.startswith("kvferry")}


def test_only_settings_read_the_environment():
    for file in PACKAGE.rglob("*.py"):
        if file != PACKAGE / "settings.py":
            assert not re.search(r"os\.(environ|getenv)", file.read_text()), f"{file.relative_to(ROOT)}"


def test_the_picture_names_the_layers_in_order():
    page = (ROOT / "docs/design/architecture.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|", page, flags=re.MULTILINE)
    assert tuple(rows) == LAYERS
