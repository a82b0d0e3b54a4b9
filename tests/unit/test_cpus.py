"""How many processors a process may use, by its affinity and by control groups of both versions."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from kvferry import Settings
from kvferry.cpus import usable_cpus


@pytest.fixture
def _many_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 128)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)


V2 = "0::/kubepods/pod7/engine\n"
V1 = "12:memory:/docker/7\n4:cpu,cpuacct:/docker/7\n1:name=systemd:/docker/7\n0::/\n"


@pytest.mark.usefixtures("_many_cpus")
@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        (None, {}, 64),
        ("", {}, 64),
        ("nonsense\n", {"cpu.max": "100000 100000"}, 64),
        (V2, {}, 64),
        (V2, {"kubepods/pod7/engine/cpu.max": "max 100000\n"}, 64),
        (V2, {"kubepods/pod7/engine/cpu.max": "400000 100000\n"}, 4),
        (V2, {"kubepods/pod7/engine/cpu.max": "max 100000\n", "kubepods/pod7/cpu.max": "250000 100000\n"}, 2),
        (V2, {"kubepods/pod7/engine/cpu.max": "50000 100000\n"}, 1),
        (V2, {"kubepods/pod7/engine/cpu.max": "100000 0\n"}, 64),
        (V2, {"cpu.max": "9900000 100000\n"}, 64),
        ("0::/\n", {"cpu.max": "800000 100000\n"}, 8),
        ("0::/../../outside\n", {"cpu.max": "800000 100000\n"}, 8),
        (
            V1,
            {"cpu,cpuacct/docker/7/cpu.cfs_quota_us": "-1\n", "cpu,cpuacct/docker/7/cpu.cfs_period_us": "100000\n"},
            64,
        ),
        (
            V1,
            {"cpu,cpuacct/docker/7/cpu.cfs_quota_us": "600000\n", "cpu,cpuacct/docker/7/cpu.cfs_period_us": "100000\n"},
            6,
        ),
        (V1, {"cpu,cpuacct/cpu.cfs_quota_us": "300000\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"}, 3),
        ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2),
    ],
)
def test_the_smallest_of_affinity_and_quotas_counts(
    tmp_path: Path, groups: str | None, files: Mapping[str, str], expected: int
):
    if groups is not None:
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        (tmp_path / "sys/fs/cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "sys/fs/cgroup" / name).write_text(text)
    assert usable_cpus(tmp_path) == expected


def test_pools_follow_what_this_process_may_use(monkeypatch: pytest.MonkeyPatch):
    for name in ("NIXL_THREADS", "WORKERS", "GATHER_WORKERS", "SCATTER_WORKERS"):
        monkeypatch.delenv(f"KVFERRY_{name}", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 192)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3}, raising=False)
    settings = Settings()
    assert (settings.workers, settings.gather_workers, settings.scatter_workers, settings.nixl_threads) == (4, 1, 0, 1)


def test_nothing_else_asks_how_many_processors_the_machine_has():
    package = Path(__file__).parents[2] / "src/kvferry"
    asking = {str(file.relative_to(package)) for file in package.rglob("*.py") if "os.cpu_count" in file.read_text()}
    assert asking == {"cpus.py"}
