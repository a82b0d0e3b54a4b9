"""The documents say what the code does."""

from __future__ import annotations

import inspect
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.clones import ROOT, blocks, docs_program

import kvferry.errors
from kvferry import Settings
from kvferry.control.registry_messages import LARGEST_BODY_BYTES
from kvferry.endpoint.prefill.rooms import MOST_EARLY_PAGE_BYTES
from kvferry.layout.component import LONGEST_NAME
from kvferry.plan.pieces import MOST_HOLDERS
from kvferry.plan.requests.page_numbers import MAX_PAGES
from kvferry.protocol.transfer.states import RECEIVER_TRANSITIONS, SENDER_TRANSITIONS
from kvferry.protocol.wire import codec, field_types
from kvferry.protocol.wire.registrations import MOST_ENGINES, MOST_RANKS
from kvferry.protocol.wire.versions import PROTOCOL_VERSION
from kvferry.transport.base import MOST_REGIONS


def python_blocks(document: str) -> list[str]:
    return blocks((ROOT / document).read_text(), "python")


def test_a_state_diagram_draws_every_move_once():
    assert docs_program("generate").mermaid(SENDER_TRANSITIONS).splitlines() == [
        "stateDiagram-v2",
        "    [*] --> BOOTSTRAPPING",
        "    BOOTSTRAPPING --> WAITING_FOR_INPUT: every receiver has opened the room",
        "    BOOTSTRAPPING --> DRAINING: abort, deadline or error",
        "    WAITING_FOR_INPUT --> TRANSFERRING: a chunk is written",
        "    WAITING_FOR_INPUT --> SUCCEEDED: the last chunk is sent and every receiver notified",
        "    WAITING_FOR_INPUT --> DRAINING: abort, deadline or error",
        "    TRANSFERRING --> TRANSFERRING: a chunk is written",
        "    TRANSFERRING --> SUCCEEDED: the last chunk is sent and every receiver notified",
        "    TRANSFERRING --> DRAINING: abort, deadline or error",
        "    SUCCEEDED --> [*]",
        "    DRAINING --> FAILED: no write is on its way",
        "    FAILED --> [*]",
    ]


@pytest.mark.parametrize("table", [SENDER_TRANSITIONS, RECEIVER_TRANSITIONS])
def test_a_state_diagram_holds_as_many_arrows_as_the_table(table: Any):
    arrows = [line for line in docs_program("generate").mermaid(table).splitlines() if "-->" in line]
    assert len(arrows) == 1 + sum(len(moves) for moves in table.values()) + 2


def test_the_state_diagrams_are_those_of_the_tables():
    assert (ROOT / "docs/design/protocol.md").read_text() == docs_program("generate").protocol_page(), "run `make docs`"


def test_the_page_on_reliability_has_the_table_of_what_holds_pages():
    assert (ROOT / "docs/reliability.md").read_text() == docs_program("generate").reliability_page(), "run `make docs`"


def test_the_page_on_caches_has_every_kind_that_a_plug_in_knows():
    assert (ROOT / "docs/design/caches.md").read_text() == docs_program("generate").caches_page(), "run `make docs`"


def test_the_page_to_read_first_names_files_that_are_there_and_their_lines_add_up():
    page = (ROOT / "docs/reading.md").read_text()
    files = re.findall(r"^\| \d+ \| `(\S+)` \| (\d+) \|", page, flags=re.MULTILINE)
    read = [len((ROOT / "src/kvferry" / name).read_text().splitlines()) for name, _ in files]
    assert [int(lines) for _, lines in files] == [round(lines, -1) for lines in read], "run `make docs`"
    assert f"| | {len(files)} files | {sum(int(lines) for _, lines in files):,} | |" in page
    assert page == docs_program("generate").reading_page(), "run `make docs`"


def test_the_core_is_read_in_an_afternoon():
    files = {Path(inspect.getfile(of)) for of in docs_program("generate").SPINE}
    assert len(files) == len(docs_program("generate").SPINE) <= 20
    assert sum(len(file.read_text().splitlines()) for file in files) <= 5_200


def test_the_settings_page_lists_every_setting():
    assert (ROOT / "docs/settings.md").read_text() == docs_program("generate").settings_page(), "run `make docs`"


def test_the_page_on_observability_lists_every_metric():
    assert (ROOT / "docs/observability.md").read_text() == docs_program("generate").observability_page(), (
        "run `make docs`"
    )


def test_the_readme_shows_the_example_as_it_is():
    assert (ROOT / "examples/two_processes.py").read_text() == python_blocks("README.md")[0]


@pytest.mark.parametrize("number", range(len(python_blocks("README.md"))))
def test_the_readmes_python_runs(number: int, tmp_path: Path):
    script = tmp_path / "pasted.py"
    script.write_text(python_blocks("README.md")[number])
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    if number == 0:
        assert run.stdout == "first token: 42 - tensors that arrived: 8\n"


def test_the_python_of_the_page_on_layouts_runs_from_top_to_bottom(tmp_path: Path):
    script = tmp_path / "pasted.py"
    script.write_text("\n".join(python_blocks("docs/design/layouts.md")))
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "['kv', 'window-1024', 'state']\n"


@pytest.mark.full
def test_the_tests_on_the_page_on_testing_pass_as_they_are(tmp_path: Path):
    (pasted,) = python_blocks("docs/design/testing.md")
    (tmp_path / "test_engine.py").write_text(pasted)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_engine.py"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"{pasted.count('def test_') + 2} passed" in run.stdout  # one of them three times


def test_the_page_on_security_has_the_bounds_of_the_code():
    page = (ROOT / "docs/security.md").read_text()
    bounds = page[page.index("## Bounds") :]
    mebi = 2**20
    for bound in (
        f"{codec.MAX_MESSAGE_BYTES // mebi} MiB",
        f"{field_types.MAX_AUX_BYTES // mebi} MiB; {field_types.MAX_METADATA_BYTES // mebi} MiB, {MOST_REGIONS:,}",
        f"{field_types.MAX_REASON:,} characters",
        f"{field_types.MAX_PIECES:,}, {MOST_HOLDERS:,}",
        f"| {MAX_PAGES:,} |",
        f"| {field_types.MAX_SEGMENTS:,} |",
        f"{MOST_ENGINES:,}, {MOST_RANKS:,}",
        f"{LARGEST_BODY_BYTES // 1024} KiB",
        f"{LONGEST_NAME} characters",
        f"`KVFERRY_MAX_DECODE_RANKS`, {Settings().max_decode_ranks:,}",
        f"twice `KVFERRY_MAX_ROOMS`, {2 * Settings().max_rooms:,}",
        f"{MOST_EARLY_PAGE_BYTES // mebi:,} MiB of page numbers",
    ):
        assert bound in bounds, bound


SHOWN = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "src").rglob("*.py")),
]


def test_nobody_is_told_to_install_from_an_index_what_is_on_none():
    for file in SHOWN:
        found = re.findall(r"pip install[^\n`]*[ '\"]kvferry\b.*", file.read_text())
        assert not found, f"{file.relative_to(ROOT)}: {found}"


def test_what_messages_say_to_install_is_what_the_extras_bring():
    project = (ROOT / "pyproject.toml").read_text()
    extras = project[project.index("[project.optional-dependencies]") : project.index("[project.scripts]")]
    offered = set(re.findall(r'"([a-z0-9-]+)[\[>=]', extras))
    for file in SHOWN:
        if file.suffix == ".py":
            for packages in re.findall(r"pip install ((?:[a-z0-9-]+ ?)+)", file.read_text()):
                assert set(packages.split()) <= offered, f"{file.relative_to(ROOT)}: {packages}"


def test_the_readmes_first_screen_says_what_it_is_shows_it_and_has_a_figure_that_was_measured():
    screen = "\n".join((ROOT / "README.md").read_text().splitlines()[:24])
    assert "moves it" in screen
    assert len(re.findall(r"^!\[.+\]\(docs/drawings/\w+\.svg\)$", screen, flags=re.MULTILINE)) == 1
    assert blocks(screen, "") == ["make demo\nmake test\n"]
    (figure,) = re.findall(r"\*\*(\d[\d.,]*x)\*\*", screen)
    assert f"| TP 4->2, 16-token pages, scattered | 4x the direct path | {figure} | yes |" in (
        (ROOT / "docs/design/benchmarks.md").read_text()
    )


def test_everything_that_the_package_promises_is_on_the_reference_page():
    page = (ROOT / "docs/reference.md").read_text()
    named = re.findall(r"^::: kvferry\.(\w+)$", page, flags=re.MULTILINE)
    assert sorted(set(named) - {"errors"}) == sorted(set(kvferry.__all__) - {"__version__"})
    assert len(named) == len(set(named))


def test_every_error_is_on_the_reference_page_and_in_the_tree():
    page = (ROOT / "docs/reference.md").read_text()
    assert page.rstrip().endswith("::: kvferry.errors"), "with all its members"
    classes = {
        name for name, each in vars(kvferry.errors).items() if isinstance(each, type) and issubclass(each, Exception)
    }
    tree = re.findall(r"(\w+Error)\b", (kvferry.errors.__doc__ or "").partition("\n\n`")[0])
    assert sorted(tree) == sorted(classes)


def test_the_changelog_has_the_protocol_version_of_the_code():
    versions = re.findall(r"^- Protocol version (\d+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert int(versions[0]) == PROTOCOL_VERSION


def test_documents_link_to_what_exists():
    for document in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


DOCUMENTS = ["README.md", "CONTRIBUTING.md", *sorted(str(page.relative_to(ROOT)) for page in ROOT.glob("docs/**/*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_of_the_code_that_a_page_names_are_there(document: str):
    named = set(re.findall(r"`([a-z_]+/[a-z_/]*\.py)`", (ROOT / document).read_text()))
    assert [each for each in named if not ((ROOT / each).exists() or (ROOT / "src/kvferry" / each).exists())] == []


def test_what_a_page_has_made_the_makefile_makes():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for document in DOCUMENTS:
        named = [each.split() for each in re.findall(r"`make\s([^`]+)`", (ROOT / document).read_text())]
        missing = {word for words in named for word in words if "=" not in word} - targets
        assert not missing, f"{document} names {missing}"


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("command", "".join(blocks((ROOT / "docs/design/algebra.md").read_text(), "bash")).splitlines())
def test_the_drawings_of_the_layout_algebra_can_be_drawn(command: str, tmp_path: Path):
    pytest.importorskip("matplotlib")
    program, *arguments = shlex.split(command)
    assert program == "kvferry"
    assert f"(../drawings/{Path(arguments[-1]).name})" in (ROOT / "docs/design/algebra.md").read_text()
    assert (ROOT / arguments[-1]).read_text().startswith("<?xml")
    arguments[-1] = str(tmp_path / "drawn.svg")
    run = subprocess.run(
        [sys.executable, "-m", "kvferry", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert "proved: every destination byte" in (tmp_path / "drawn.svg").read_text()
