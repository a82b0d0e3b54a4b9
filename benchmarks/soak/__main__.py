"""Load and soak: `python -m benchmarks.soak --minutes 10`.

Two prefill ranks, of which one sends directly and one through staging memory, two decode ranks, and a registry, each a
process of its own, over NIXL. All pairs exchange small rooms, as many in flight as told. Callers abort some, on either
side, also while another thread submits. Processes are frozen for moments and for long, killed and started again, and so
is the registry, as drawn from a seed that is printed. Every room must be byte-exact or end with a known cause that a
fault explains, no byte may change after pages were given back, everything must end in time, and no process may hold
more and more. The exit code is 0 only then.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import secrets
import sys
from typing import Any

from benchmarks.soak.soak import Account, Plan, Soak


def shown(plan: Plan, account: Account) -> str:
    """What was done and measured, for people."""
    lines = [
        f"{account.ended:,} rooms ended in {account.seconds:.0f} s, up to {account.most_in_flight:,} in flight "
        f"(seed {plan.seed}): {account.succeeded:,} byte-exact",
        "faults: " + (", ".join(f"{count} x {name}" for name, count in account.faults.items()) or "none"),
        "what callers did: " + ", ".join(f"{count:,} x {name}" for name, count in account.fates.items()),
    ]
    for side, causes in sorted(account.failures.items()):
        lines.append(f"failures on the {side} side: " + ", ".join(f"{n:,} x {why}" for why, n in causes.most_common()))
    if account.lost:
        lines.append("rooms that a killed process had: " + ", ".join(f"{n:,} {k}" for k, n in account.lost.items()))
    for trend in account.trends:
        pending, late = trend.pending, trend.late
        lines.append(
            f"{trend.name} ({trend.looks} s): {pending.memory_mib:.1f} -> {late.memory_mib:.1f} MiB, "
            f"{pending.threads} -> {late.threads} threads, {pending.descriptors} -> {late.descriptors} descriptors"
        )
    lines += [f"PROBLEM: {each}" for each in account.problems]
    lines.append("NOT well" if account.problems else "all is well")
    return "\n".join(lines)


def as_data(plan: Plan, account: Account) -> dict[str, Any]:
    """The same, for programs."""
    counted = {field.name: getattr(account, field.name) for field in dataclasses.fields(account)}
    return dataclasses.asdict(plan) | counted | {"trends": [dataclasses.asdict(each) for each in account.trends]}


def main() -> None:
    """Runs and judges."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="for how long rooms are begun")
    parser.add_argument("--in-flight", type=int, default=1000, help="rooms open at a time")
    parser.add_argument("--seed", type=int, help="of rooms and faults; drawn at random if not given")
    parser.add_argument("--quiet", type=float, default=4.0, help="mean seconds between faults; 0 for no faults")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    typed = parser.parse_args()
    if typed.minutes <= 0 or typed.in_flight < 4 or typed.quiet < 0:
        parser.error("--minutes must be positive, --in-flight 4 at least, --quiet not negative")
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")  # it complains of every process that is killed
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    seed = secrets.randbits(31) if typed.seed is None else typed.seed
    plan = Plan(typed.minutes, typed.in_flight, seed, typed.quiet or None)
    print(f"seed {seed}", file=sys.stderr, flush=True)
    account = Soak(plan).run()
    if typed.json:
        print(json.dumps(as_data(plan, account)))
    else:
        print(shown(plan, account))
    sys.exit(bool(account.problems))


if __name__ == "__main__":
    main()
