"""The package, built and installed into an empty environment as a user would."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from tests.support.clones import ROOT, blocks

from kvferry import __version__

pytestmark = pytest.mark.timeout(300)

UNCOMPILED = {"PIP_NO_COMPILE": "0"}
"""Compiling all of torch takes longer than to compile what is run when it is. Pip takes the 0 for what it compiles."""

COPIES = "from kvferry.applications.doctor import machine; print(*machine.installed())"

MODEL = ROOT / "tests/data/configs/deepseek-v3.json"


def run(*command: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """What a command prints, if it does well."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a wheel and a source distribution."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    return folder


@pytest.mark.full
def test_the_wheel_has_all_of_the_package_and_nothing_else(built: Path):
    (wheel,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src/kvferry").rglob("*.py")}
    assert sources <= names
    assert names >= {"kvferry/py.typed", "kvferry/staging/blocks.so"}
    assert {name.split("/")[0] for name in names} == {"kvferry", f"kvferry-{__version__}.dist-info"}


@pytest.mark.full
def test_the_source_distribution_builds_by_itself(built: Path, tmp_path: Path):
    (source,) = built.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        names = archive.getnames()
        assert not [name for name in names if name.split("/")[1] in ("proof", "tests", ".venv", "site")]
        assert f"kvferry-{__version__}/deploy/grafana-dashboard.json" in names
        archive.extractall(tmp_path, filter="data")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", tmp_path / f"kvferry-{__version__}")


@pytest.mark.full
def test_it_installs_into_an_empty_environment(built: Path, tmp_path: Path):
    venv.create(tmp_path / "empty", with_pip=True)
    python = tmp_path / "empty/bin/python"
    (wheel,) = built.glob("*.whl")
    run(python, "-m", "pip", "install", "--quiet", wheel, env=dict(os.environ) | UNCOMPILED)
    command = tmp_path / "empty/bin/kvferry"
    assert run(command, "--version") == f"kvferry {__version__}\n"
    shown = run(command, "--help")
    for name in ("registry", "demo", "plan", "bench", "up", "doctor", "top", "trace"):
        assert name in shown
        assert len(run(command, name, "--help").splitlines()) > 5
    # It completes for the shell that started it; with a second command bash does not give its process to the first.
    assert "complete" in run("bash", "-c", f"{command} --show-completion; true")
    planned = run(command, "plan", "--config", MODEL, "--prefill", "tp=2", "--decode", "tp=1")
    assert "proved: every destination byte of 1 component on 1 rank is written exactly once" in planned
    run(python, "-c", "import kvferry; kvferry.Settings()", cwd=tmp_path)
    assert "by compiled code" in run(python, "-c", COPIES, cwd=tmp_path)


@pytest.mark.full
def test_without_a_compiler_it_installs_and_the_doctor_says_so(clone: Path, tmp_path: Path):
    """From an sdist or a clone, on a machine that has none."""
    venv.create(tmp_path / "empty", with_pip=True)
    python = tmp_path / "empty/bin/python"
    environment = dict(os.environ) | UNCOMPILED | {"CC": "no-such-compiler"}
    run(python, "-m", "pip", "install", "--quiet", clone, env=environment)
    said = run(python, "-c", COPIES, cwd=tmp_path)
    assert "by the interpreter, several times slower" in said
    assert "install a C compiler" in said


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What a fresh clone has: no environment, and nothing built."""
    made_here = shutil.ignore_patterns(".*", "__pycache__", "*.so", "dist", "site")
    return Path(shutil.copytree(ROOT, tmp_path / "clone", ignore=made_here))


@pytest.mark.long  # `.ci/run` installs from the clone itself, and the test above from the wheel
@pytest.mark.timeout(1200)
def test_the_readmes_installation_works_word_by_word(clone: Path, tmp_path: Path):
    """Once from the clone, and then, without it, from the wheel."""
    from_clone, from_wheel = blocks((ROOT / "README.md").read_text(), "bash")
    assert from_clone.splitlines()[1].startswith("pip install torch==2.13.0 "), "first, or the newest CUDA comes along"
    here = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    python = Path(sys.base_prefix) / "bin"
    here |= UNCOMPILED | {"HOME": str(tmp_path), "PATH": os.pathsep.join((str(python), here["PATH"]))}
    script = f"{from_clone}\npip uninstall --quiet --yes kvferry\n{from_wheel}"
    said = run("bash", "-ec", script, cwd=clone, env=here)
    assert "first token: 42 - tensors that arrived: 8" in said
    assert f"kvferry-{__version__}-py3-none-" in said
    assert "0 wrong" in said
    assert (tmp_path / "ferry/bin/kvferry").exists()
