"""`benchmarks.gpu_contact`, as far as no GPU is needed: limits that hold, what is asked, the page, the wheels."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from benchmarks.gpu_contact import __main__ as contact
from benchmarks.gpu_contact import page, running, wheels
from benchmarks.gpu_contact.probes import transfers
from benchmarks.gpu_contact.running import Answer, Outcome
from benchmarks.gpu_contact.sections import NAMED_S, TOTAL_S, Section, Verdict, chosen, of_part, sections
from tests.support.clones import ROOT

from kvferry.applications.bench.options import BenchArguments, prepare
from kvferry.layout import MemoryKind
from kvferry.settings import Settings
from kvferry.staging.sizes import CHUNKS_IN_RING, StagingSettings, staging_sizes

BULK = {"device": "cuda", "exact": True, "legacy_ipc_capable": True}
MAPPED = {"config": "cuda_ipc/cuda", "how": "zero-copy", "emulated": False}
EMULATED = {"config": "tcp/lo", "how": "software emulation", "emulated": True}

HANGS = """
import signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print("child", child.pid, flush=True)
time.sleep(60)
"""


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def run(code: str, folder: Path, limit_s: float = 30.0) -> Answer:
    return running.run(python(code), folder / "log", limit_s=limit_s, cwd=folder, environment=os.environ)


def section(name: str, code: str, **options: Any) -> Section:
    return Section(name, 1, "What?", python(code), options.pop("limit_s", 30.0), **options)


def named(name: str) -> Section:
    return next(each for each in sections("cuda") if each.name == name)


def said_of(name: str, result: dict[str, Any]) -> dict[str, bool | None]:
    return {verdict.expected: verdict.is_so for verdict in named(name).verdicts(result)}


def test_what_a_command_prints_is_kept_and_its_last_json_is_its_result(tmp_path: Path):
    answer = run("import sys; print('{\"a\": 1}'); print('{not json'); print('late', file=sys.stderr)", tmp_path)
    assert (answer.outcome, answer.result, answer.why) == (Outcome.DONE, {"a": 1}, "")
    assert {"late", "{not json"} <= set((tmp_path / "log").read_text().splitlines())


def test_a_command_that_fails_says_its_last_words_and_what_it_found_before(tmp_path: Path):
    answer = run("print('{\"a\": 1}'); raise SystemExit('no such luck')", tmp_path)
    assert (answer.outcome, answer.result) == (Outcome.FAILED, {"a": 1})
    assert answer.why == "exit code 1: no such luck"
    missing = running.run(["/nonexistent"], tmp_path / "log", limit_s=1, cwd=tmp_path, environment={})
    assert (missing.outcome, "could not be started" in missing.why) == (Outcome.FAILED, True)


@pytest.mark.full
def test_a_command_that_hangs_costs_its_limit_and_leaves_nobody_behind(tmp_path: Path):
    before = time.monotonic()
    answer = run(HANGS, tmp_path, limit_s=2.0)
    assert time.monotonic() - before < 20, "it was not killed"
    assert answer.outcome is Outcome.OVERTIME
    assert answer.why == "not through after 2 s: interrupted and killed"
    child = Path("/proc") / answer.tail[0].split()[1]
    end = time.monotonic() + 10
    while child.exists() and "\nState:\tZ" not in (child / "status").read_text():
        assert time.monotonic() < end, "a process of its group lives on"
        time.sleep(0.01)


@pytest.mark.full
def test_a_command_that_can_be_interrupted_says_what_it_knows(tmp_path: Path, request: pytest.FixtureRequest):
    """Also where this process ignores interruptions, as in the background of a shell."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    code = "import time\ntry:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    print('{\"half\": 1}')"
    answer = run(code, tmp_path, limit_s=4.0)
    assert (answer.outcome, answer.result) == (Outcome.OVERTIME, {"half": 1})
    assert answer.why.endswith(": interrupted")


def test_a_run_goes_on_after_a_section_that_hangs_and_writes_after_each(tmp_path: Path):
    asked = [
        section("first", "print('{\"exact\": true}')", judge=_exactly),
        section("hangs", HANGS, limit_s=1.0),
        section("absent", "", needs="no-such-program"),
        section("looks", f"print(open({str(tmp_path / 'contact.md')!r}).read())"),
    ]
    found = contact.ask(asked, tmp_path, os.environ, {"GPU": "none"}, total_s=60)
    outcomes = [each.answer.outcome for each in found]
    assert outcomes == [Outcome.DONE, Outcome.OVERTIME, Outcome.LEFT_OUT, Outcome.DONE]
    assert "no-such-program is not on the PATH" in found[2].answer.why
    assert "### hangs" in (tmp_path / "looks.log").read_text(), "the page was not written before the next section"
    written = json.loads((tmp_path / "contact.json").read_text())
    assert [each["outcome"] for each in written["sections"]] == ["done", "overtime", "left_out", "done"]
    assert written["sections"][0]["verdicts"] == [["every byte is right", True]]
    assert not contact.is_well(found)
    wrong = page.Found(found[0].section, Answer(Outcome.DONE, result={"exact": False}))
    assert (contact.is_well([wrong]), contact.is_well([wrong], judges=False)) == (False, True)
    assert contact.is_well([found[0], found[3]])


def _exactly(result: Any) -> Iterator[Verdict]:
    yield Verdict("every byte is right", result["exact"], stops=True)


def test_where_writes_are_emulated_what_needs_no_wire_runs(tmp_path: Path):
    asked = [
        section("wrong", "print('{\"exact\": false}')", judge=_exactly),
        section("wired", "print(1)", needs_wire=True),
        section("next", "print(1)"),
    ]
    found = contact.ask(asked, tmp_path, os.environ, {}, total_s=60)
    assert [each.answer.outcome for each in found[1:]] == [Outcome.LEFT_OUT, Outcome.DONE]
    assert "--sections wired" in found[1].answer.why
    wired = {each.name for each in sections("cuda") if each.needs_wire}
    assert wired == {"beside", "unequal", "equal", "mps", "locked", "direct", "first-write"}


CUT_OFF = """
import os, sys
from pathlib import Path
from benchmarks.gpu_contact import __main__ as contact
from benchmarks.gpu_contact.archive import packed_at_the_end
from benchmarks.gpu_contact.sections import Section

def section(name, code):
    return Section(name, 1, "What?", (sys.executable, "-c", code), 60.0)

says = f"open({sys.argv[2]!r}, 'w').write(str(os.getpid()))"
hangs = f"import os, time; print('begun', flush=True); {says}; time.sleep(60)"
dies = "import os, signal; print('half', flush=True); os.kill(os.getpid(), signal.SIGKILL)"
archive = Path(sys.argv[1])
with packed_at_the_end(archive) as folder:
    asked = [section("dies", dies), section("hangs", hangs), section("never", "")]
    contact.ask(asked, folder, os.environ, {}, total_s=600, archive=archive)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
def test_a_run_that_is_cut_off_leaves_one_archive(tmp_path: Path, number: signal.Signals):
    begun, archive = tmp_path / "begun", tmp_path / "out" / "contact-1.tar.gz"
    os.mkfifo(begun)
    run = subprocess.Popen([*python(CUT_OFF), str(archive), str(begun)], cwd=ROOT)
    section_pid = int(begun.read_text())  # waits until the second section has said something
    run.send_signal(number)
    try:
        assert run.wait(30) == (-number if number is signal.SIGKILL else 128 + number)
        assert list(archive.parent.iterdir()) == [archive]
        with tarfile.open(archive) as packed:
            files = {Path(each.name).name: packed.extractfile(each).read().decode() for each in packed}  # type: ignore[union-attr]
        ended = {each["name"]: (each["outcome"], each["why"]) for each in json.loads(files["contact.json"])["sections"]}
        assert ended.pop("dies") == ("failed", "exit code -9: half")
        assert files["dies.log"] == "half\n"
        if number is signal.SIGKILL:  # what it knew before
            assert not ended
            return
        assert ended == {"hangs": ("overtime", "the run was cut off")}
        assert files["hangs.log"] == "begun\n"
        assert "### hangs" in files["contact.md"]
    finally:
        with suppress(ProcessLookupError):
            os.kill(section_pid, signal.SIGKILL)


def test_without_time_a_section_is_left_out(tmp_path: Path):
    (found,) = contact.ask([section("late", "print(1)")], tmp_path, os.environ, {}, total_s=1.0)
    assert found.answer.outcome is Outcome.LEFT_OUT
    assert "no time is left" in found.answer.why


@pytest.mark.parametrize(
    ("ways", "expected"),
    [([MAPPED], [True, True, True]), ([EMULATED], [True, False, False]), ([], [True, None, None])],
    ids=["mapped", "emulated", "not said"],
)
def test_the_way_that_a_write_takes_is_judged(ways: list[dict[str, object]], expected: list[bool | None]):
    verdicts = named("bulk").verdicts({**BULK, "ways": ways})
    assert [verdict.is_so for verdict in verdicts] == expected
    assert [verdict.stops for verdict in verdicts] == [False, False, True]
    assert "no zero-copy" not in str(verdicts)


def test_figures_are_judged_beside_their_limits():
    row = {"mib": 64, "shape": "16 runs of 1 KiB, of 2 KiB rows"}
    assert list(said_of("kernels", {"rows": [{**row, "gather_of_copy": 0.4}]}).values()) == [False]
    assert list(said_of("kernels", {"rows": [{**row, "gather_of_copy": 0.5}]}).values()) == [True]
    case = {"refused": None, "efficiency": 0.6, "gb_per_s": 6.0, "chunk/ring/workers": "as they are"}
    cases = [{**case, "variant": "auto"}, {**case, "variant": "staged", "gb_per_s": 9.0}]
    assert list(said_of("unequal", {"exact": True, "rows": cases}).values()) == [True, True, False]
    assert list(said_of("equal", {"exact": True, "rows": cases[:1]}).values()) == [True]
    lost = {"exact": True, "lost_beside_against": {"apart": {"step p50": 0.031, "step p99": 0.09}}}
    speeds = {"beside": 8.0, "apart": 10.0}
    assert list(said_of("beside", {**lost, "gb_per_s": speeds}).values()) == [True, True, False, True]
    for still in ({"beside": 0.0, "apart": 10.0}, {"beside": 0.0, "apart": 0.0}):
        assert list(said_of("beside", {**lost, "gb_per_s": still}).values()) == [True, False, False, True]
    ends = [{"killed": "holder", "other": "writer", "well": False, "at_rest": True}]
    assert list(said_of("killed", {"rows": ends}).values()) == [False, True]
    rows = [
        {"mode": mode, "beside": step, "capture": "ended" if (mode, step) == ("global", "connect") else "", "step": ""}
        for mode in ("global", "relaxed")
        for step in ("connect", "gather")
    ]
    loads = {"mode": "relaxed", "beside": "load NIXL", "capture": "ended", "step": ""}
    assert list(said_of("capture", {"rows": [loads, *rows]}).values()) == [False, True]


def test_the_sections_of_each_part_fit_into_its_time():
    every = sections("cuda", ["tests/unit/staging/test_on_gpu.py"])
    for part, total_s in TOTAL_S.items():
        assert sum(each.limit_s for each in of_part(every, part)) < total_s
    assert TOTAL_S == {1: 350, 2: 330}
    assert sum(each.limit_s for each in of_part(every, 0)) < NAMED_S
    assert {each.step for each in every} == {1, 2, 3, 4, 5}
    names = [each.name for each in every]
    assert len(names) == len(set(names))
    assert names == [each.name for each in sections("cpu")], "a rehearsal leaves something out"
    assert not [each.name for each in sections("cpu") if each.needs]
    assert [each.name for each in chosen(every, ["kernels", "bulk"])] == ["kernels", "bulk"]
    with pytest.raises(ValueError, match="'nothing' is none of smi, doctor"):
        chosen(every, ["nothing"])
    for each in every:
        if "-m" in each.command and "probes" in each.command[2]:
            assert (ROOT / f"{each.command[2].replace('.', '/')}.py").is_file()
            assert each.command[3:5] == ("--device", "cuda")


def test_no_size_that_is_measured_takes_more_memory_than_an_endpoint_may(monkeypatch: pytest.MonkeyPatch):
    """Beyond it bytes go directly, and the figure would be another path's."""
    options = prepare(BenchArguments(prefill_tp=2))[0]
    for case in list(transfers.cases(options, transfers.SIZES, ("staged",), Path("nowhere")))[1:]:
        for name, value in case.environment.items():
            monkeypatch.setenv(name, value)
        settings = Settings()
        sizes, most = staging_sizes(settings, MemoryKind.VRAM), settings.of(StagingSettings).most_bytes
        assert sum(sizes.of_sender(settings.gather_workers)) <= most
        assert options.prefill.tp_size * sizes.ring_bytes <= most
        assert sizes.ring_bytes >= CHUNKS_IN_RING * sizes.chunk_bytes


def test_the_page_shows_what_was_expected_first_and_every_figure():
    result = {**BULK, "gb_per_s": 123.456, "ways": [{**MAPPED, "config": "a|b"}], "us": {"x": {"p50": 1.0, "p99": 2.0}}}
    found = [
        page.Found(named("bulk"), Answer(Outcome.DONE, 2.0, result=result)),
        page.Found(named("bulk-vmm"), Answer(Outcome.OVERTIME, 30.0, "not through", tail=("its last words",))),
    ]
    shown = page.markdown({"GPU": "a GPU, 80 GiB"}, found)
    assert "| bulk | UCX takes cuda_ipc | **no** |" in shown
    assert "| bulk-vmm | it ends | **not through in time**: not through |" in shown
    assert shown.index("What was expected") < shown.index("### bulk:")
    assert "* gb_per_s: 123" in shown
    assert "| a\\|b | zero-copy | no |" in shown
    assert "| us | p50 | p99 |" in shown
    assert "    its last words" in shown
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True python -m" in shown
    assert "/" + str(ROOT).strip("/") not in shown, "the page names a place on this machine"


def test_a_dry_run_says_what_it_would_do_and_that_there_is_no_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: Any):
    monkeypatch.setattr(contact, "gpu", lambda environment: ({}, "there is none that torch can use"))
    for part in ("1", "2"):
        contact.main(["--dry-run", "--part", part, "--wheels", "nowhere"])
    said = capsys.readouterr().out
    assert said.startswith("There is no GPU here: there is none")
    assert "There are no wheels in nowhere" in said
    for each in (each for each in sections("cuda", contact.gpu_tests()) if each.part):
        assert page.command_line(each) in said
        assert f"at most {each.limit_s:g} s" in said
    assert "test_on_gpu.py" in said
    assert "one file: contact-1.tar.gz" in said
    assert "one file: contact-2.tar.gz" in said
    assert sys.executable not in said


def test_without_a_gpu_a_run_ends_with_a_status_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(contact, "gpu", lambda environment: ({}, "there is none that torch can use"))
    with pytest.raises(SystemExit) as ended:
        contact.main(["--part", "1", "--out", str(tmp_path), "--wheels", str(tmp_path)])
    assert ended.value.code == contact.NO_GPU != 0
    assert "a GPU asked for where there is none" in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["contact-1.tar.gz"]


def test_packages_come_after_what_the_path_has(tmp_path: Path):
    environment = contact.environment_of(tmp_path, {"PYTHONPATH": "/mine:/yours", "HOME": "/"})
    paths = environment["PYTHONPATH"].split(":")
    assert paths == [str(ROOT / "src"), str(ROOT), "/mine", "/yours", str(tmp_path)]


def wheel(folder: Path, name: str, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(folder / name, "w") as archive:
        for path, content in files.items():
            archive.writestr(path, content)
    return folder / name


def test_wheels_that_are_too_heavy_are_refused_naming_the_largest(tmp_path: Path):
    wheel(tmp_path, "small-1-py3-none-any.whl", {"small.py": b"x" * 100})
    assert wheels.check_weight(tmp_path) > 100
    wheel(tmp_path, "large-2-py3-none-any.whl", {"large.py": b"x" * 5000})
    with pytest.raises(wheels.TooHeavyError, match=r"2 wheels .*largest is large-2-py3-none-any\.whl with 0\.0 MiB"):
        wheels.check_weight(tmp_path, 4000)
    assert wheels.MOST_BYTES == 60 << 20


def test_nixls_wheel_loses_what_nothing_uses(tmp_path: Path):
    record = "nixl_cu13/_api.py,,\nnixl_ep_cu13/large.so,,\nnixl_cu13-1.5.1.data/headers/nixl.h,,\n"
    kept = {"nixl_cu13/_api.py": b"1", "nixl_cu13.libs/libucp.so": b"2", ".nixl_cu13.mesonpy.libs/plugins/p.so": b"3"}
    dropped = dict.fromkeys(
        [
            "nixl_ep_cu13/large.so",
            "nixl_cu13-1.5.1.data/headers/nixl.h",
            "nixl_cu13.scripts/example",
            "nixl_cu13.libs/ucx/libucx_perftest_cuda.so.0",
        ],
        b"0" * 1000,
    )
    made = wheel(
        tmp_path, "nixl_cu13-1.5.1-cp312-cp312-x.whl", {**kept, **dropped, "n.dist-info/RECORD": record.encode()}
    )
    wheels.slim(made)
    with zipfile.ZipFile(made) as archive:
        assert set(archive.namelist()) == {*kept, "n.dist-info/RECORD"}
        assert archive.read("n.dist-info/RECORD") == b"nixl_cu13/_api.py,,\n"
    assert list(tmp_path.iterdir()) == [made]


def test_wheels_are_unpacked_once_and_can_be_imported(tmp_path: Path):
    folder, target = tmp_path / "wheels", tmp_path / "packages"
    folder.mkdir()
    wheel(
        folder,
        "one-1-py3-none-any.whl",
        {"one.py": b"X = 1", "one-1.data/purelib/two.py": b"X = 2", "one-1.data/scripts/three": b""},
    )
    assert wheels.unpack(folder, target)
    code = "import one, two; print(one.X + two.X)"
    run = subprocess.run(python(code), env={"PYTHONPATH": str(target)}, capture_output=True, text=True, check=True)
    assert run.stdout == "3\n"
    assert not (target / "three").exists()
    assert not wheels.unpack(folder, target)
    wheel(folder, "one-1-py3-none-any.whl", {"one.py": b"X = 100"})
    assert wheels.unpack(folder, target)
    assert not (target / "two.py").exists()


def test_wheels_for_another_python_are_named(tmp_path: Path):
    for name in (
        "a-1-py3-none-any.whl",
        "b-1-cp312-cp312-manylinux_2_28_x86_64.whl",
        "c-1-cp312-abi3-manylinux_2_28_x86_64.whl",
        "d-1-1-cp311.cp312-cp312-manylinux_2_28_x86_64.whl",
    ):
        (tmp_path / name).write_bytes(b"")
    assert list(wheels.unfit(tmp_path, (3, 12))) == []
    assert [each.split()[0] for each in wheels.unfit(tmp_path, (3, 11))] == [
        "b-1-cp312-cp312-manylinux_2_28_x86_64.whl"
    ]


def test_the_wheels_are_what_kvferry_needs_but_for_numpy():
    text = (ROOT / "pyproject.toml").read_text()
    needed = re.findall(r'"([^"]+)"', text.partition("\ndependencies = [")[2].partition("]")[0])
    assert [each for each in needed if not each.startswith("numpy")] == list(wheels.KVFERRY)
    assert all(f'"{each}"' in text for each in wheels.TESTS)
    lone, others = wheels.commands(Path("to"), "3.12", "12", "x86_64")
    assert {"--no-deps", "nixl-cu12==1.5.1", "--python-version", "3.12", "manylinux_2_28_x86_64"} <= set(lone)
    assert "--no-deps" not in others
    assert not {name for name in others if re.match(r"torch|triton|numpy|exceptiongroup", name)}
    assert "exceptiongroup" in wheels.commands(Path("to"), "3.10", "13", "x86_64")[1]
