"""An upgrade under load: `python -m benchmarks.upgrade --requests 10000`.

Two prefill engines, of which one sends directly and one through staging memory, two decode engines, each a process of
its own over NIXL with a shared secret, and three members of etcd as their registry. All begin with this tree. While
requests keep coming, every engine is replaced by one of a next release, which speaks one version of the protocol more,
one after the other: it drains, a prefill engine by `kvferry drain`, its process ends, and its successor registers under
the same name. Then every member of etcd is killed and started again; with `--registry http` kvferry's
own registry is there instead, and replaced like an engine. Last, a prefill engine leaves for good. Every
request must arrive byte-exact on the decode side. The exit code is 0 only then.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.upgrade.registries import HttpRegistry
from benchmarks.upgrade.releases import THIS_TREE, next_release
from benchmarks.upgrade.upgrade import ENGINES, SETTINGS, Account, Ended, Plan, Upgrade
from tests.support.etcd import EtcdCluster

MEMBERS = 3
_STEPS = ("drained_s", "ended_s", "started_s")


def latencies(requests: list[Ended], begin: float, end: float) -> dict[str, float]:
    """How long the requests took that came within a time: median and 99th percentile, in milliseconds."""
    took = sorted(each.seconds for each in requests if begin <= each.at < end)
    if not took:
        return {"requests": 0, "p50_ms": 0.0, "p99_ms": 0.0}
    at = {share: took[min(len(took) - 1, int(share * len(took)))] for share in (0.5, 0.99)}
    return {"requests": len(took), "p50_ms": round(1e3 * at[0.5], 1), "p99_ms": round(1e3 * at[0.99], 1)}


def as_data(account: Account, versions: dict[str, str]) -> dict[str, Any]:
    """What was done and measured, for programs."""
    first = account.replacements[0].begin if account.replacements else account.seconds
    phases = {"before": (0.0, first)} | {each.what: (each.begin, each.end) for each in account.replacements}
    return {
        "releases": versions,
        "seconds": round(account.seconds, 1),
        "requests": len(account.requests) + account.failed["decode"],
        "failed": dict(account.failed),
        "failed_look_ups": account.registry_problems,
        "replacements": [dataclasses.asdict(each) for each in account.replacements],
        "latencies": {name: latencies(account.requests, *times) for name, times in phases.items()},
        "problems": account.problems,
    }


def shown(data: dict[str, Any]) -> str:
    """The same, for people."""
    lines = [
        f"{data['requests']:,} requests in {data['seconds']:.0f} s, from {data['releases']['first']} to "
        f"{data['releases']['then']}: {sum(data['failed'].values())} failed; the gateway could not ask the registry "
        f"{data['failed_look_ups']} times",
        f"{'':16}" + "".join(f" {name:>9}" for name in ("drained", "ended", "started", "requests", "p50", "p99")),
    ]
    took = {each["what"]: each for each in data["replacements"]}
    for name, measured in data["latencies"].items():
        times = "".join(f" {took[name][key]:7.2f} s" if name in took else f" {'':9}" for key in _STEPS)
        lines.append(
            f"{name:16}{times} {measured['requests']:9,} {measured['p50_ms']:6.1f} ms {measured['p99_ms']:6.1f} ms"
        )
    lines += [f"PROBLEM: {each}" for each in data["problems"]]
    lines.append("NOT well" if data["problems"] else "all is well")
    return "\n".join(lines)


def main() -> None:
    """Runs and judges."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.upgrade", description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000, help="how many, at least")
    parser.add_argument("--rate", type=float, default=150.0, help="how many come in a second")
    parser.add_argument("--replaced", type=int, default=ENGINES, help="engines of each side that are replaced")
    parser.add_argument("--registry", choices=("etcd", "http"), default="etcd", help="three members, or kvferry's own")
    parser.add_argument("--members", type=int, default=MEMBERS, help="processes of it that are restarted, at most")
    parser.add_argument(
        "--quiet", type=float, default=3.0, help="seconds before the first replacement and after the last"
    )
    parser.add_argument("--back", action="store_true", help="from the next release back to this tree")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    typed = parser.parse_args()
    if typed.requests < 1 or typed.rate <= 0 or not 0 <= typed.replaced <= ENGINES or not 0 <= typed.members <= MEMBERS:
        parser.error(
            f"--requests and --rate must be positive, --replaced at most {ENGINES}, --members at most {MEMBERS}"
        )
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    plan = Plan(typed.requests, typed.rate, typed.replaced, typed.members, typed.quiet)
    with tempfile.TemporaryDirectory() as folder:
        newer = next_release(Path(folder) / "newer")
        first, then = (newer, THIS_TREE) if typed.back else (THIS_TREE, newer)
        if typed.registry == "etcd":
            with EtcdCluster(Path(folder), MEMBERS) as cluster:
                account = Upgrade(plan, first, then, cluster).run()
        else:
            secret = str(SETTINGS["secret"])
            registry = HttpRegistry(first, then, lease_s=SETTINGS["registry_lease_s"], secret=secret)
            try:
                account = Upgrade(plan, first, then, registry).run()
            finally:
                registry.kill()
    data = as_data(account, {"first": first.name, "then": then.name})
    print(json.dumps(data) if typed.json else shown(data))
    sys.exit(bool(account.problems))


if __name__ == "__main__":
    main()
