"""The package, built and installed into an empty environment as a user would."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from kvferry import __version__

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[2]


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """What a command prints, if it does well."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a wheel and a source distribution."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    return folder


def test_the_wheel_has_all_of_the_package_and_nothing_else(built: Path):
    (wheel,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src/kvferry").rglob("*.py")}
    assert sources <= names
    assert "kvferry/py.typed" in names
    assert {name.split("/")[0] for name in names} == {"kvferry", f"kvferry-{__version__}.dist-info"}


def test_the_source_distribution_builds_by_itself(built: Path, tmp_path: Path):
    (source,) = built.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        names = archive.getnames()
        assert not [name for name in names if "/.venv" in name or "__pycache__" in name or "/site/" in name]
        assert f"kvferry-{__version__}/deploy/grafana-dashboard.json" in names
        archive.extractall(tmp_path, filter="data")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", tmp_path / f"kvferry-{__version__}")


def test_it_installs_into_an_empty_environment(built: Path, tmp_path: Path):
    venv.create(tmp_path / "empty", with_pip=True)
    python = tmp_path / "empty/bin/python"
    (wheel,) = built.glob("*.whl")
    run(python, "-m", "pip", "install", "--quiet", wheel)
    command = tmp_path / "empty/bin/kvferry"
    assert run(command, "--version") == f"kvferry {__version__}\n"
    shown = run(command, "--help")
    for name in ("registry", "demo", "plan", "bench", "up", "doctor", "top", "trace", "sim"):
        assert name in shown
        assert len(run(command, name, "--help").splitlines()) > 5
    assert "complete" in run(command, "--show-completion", "bash")
    assert "Seed 7 keeps every law" in run(command, "sim", "--seed", "7")
    run(python, "-c", "import kvferry; kvferry.Settings()", cwd=tmp_path)
