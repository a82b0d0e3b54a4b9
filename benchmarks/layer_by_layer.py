"""What is left of a transfer once its prompt is computed, sent whole and layer by layer, on a wire of a known rate.

The two sides are in network namespaces of their own, between which the wire passes so much and no more; NIXL goes over
TCP. Each layer takes as long to compute as its bytes take on that wire, so that all but the last range could be hidden.

    python -m benchmarks.layer_by_layer --rate-mbit 2000 --ranges 4,8,16 --plot docs/drawings/layers.svg

Takes what `slow_wire` does. Without --rate-mbit processes of one host share memory, and each layer takes as long as
--wire-gbit-s says that its bytes do.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.slow_wire import Host, enter_namespace, two_hosts

REGISTRY_PORT = 8998


@dataclass(frozen=True)
class Case:
    """Whose caches, and how both sides are divided.

    Attributes:
        config: as a model's config.json has it.
        flags: of `kvferry bench`, beside those.
        token_bytes: of one token in all layers, as far as they keep every token.
        fixed_bytes: of what a request has once.
    """

    name: str
    config: dict[str, Any]
    flags: tuple[str, ...]
    token_bytes: int
    fixed_bytes: int = 0


LAYERS = 32
ATTENTION = {
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "head_dim": 128,
    "torch_dtype": "bfloat16",
}
GQA = {"model_type": "qwen3", **ATTENTION}
LATENTS = {
    **{key: ATTENTION[key] for key in ("num_hidden_layers", "num_attention_heads", "hidden_size", "torch_dtype")},
    "model_type": "deepseek_v3",
    "num_key_value_heads": 32,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": None,
}
WINDOWS = {
    **ATTENTION,
    "model_type": "gemma3_text",
    "sliding_window": 1024,
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * (LAYERS // 4),
}
STATE = {
    **ATTENTION,
    "model_type": "qwen3_next",
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * (LAYERS // 4),
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_GQA_BYTES = 2 * 2 * 8 * 128 * LAYERS
_STATE_BYTES = LAYERS * 3 // 4 * (16 * 128 * 128 * 4 + 3 * (2 * 8 * 128 + 16 * 128) * 2)

CASES = (
    Case("GQA, TP 1 -> 1", GQA, (), _GQA_BYTES),
    Case("GQA, TP 2 -> 1", GQA, ("--prefill-tp", "2"), _GQA_BYTES),
    Case("MLA, TP 1 -> 1", LATENTS, (), 2 * (512 + 64) * LAYERS),
    Case("windows and full attention, TP 1 -> 1", WINDOWS, (), _GQA_BYTES),
    Case("recurrent state and full attention, TP 1 -> 1", STATE, (), _GQA_BYTES // 4, _STATE_BYTES),
)


def flags_of(case: Case, config: Path, ranges: int, options: argparse.Namespace) -> list[str]:
    """Returns the flags of `kvferry bench` that measure a case."""
    kept_bytes = options.request_mb * 1e6 - case.fixed_bytes
    tokens = max(16, round(kept_bytes / case.token_bytes / 16) * 16)
    layer_s = options.computing * (tokens * case.token_bytes + case.fixed_bytes) / LAYERS / options.bytes_per_s
    return [
        *("--config", str(config), *case.flags),
        *("--page-size", "16", "--tokens", str(tokens), "--requests", "4", "--variants", options.variants),
        *("--repetitions", str(options.repetitions)),
        *("--layer-time-ms", f"{1e3 * layer_s:.4f}", "--layer-ranges", str(ranges)),
    ]


def bench(flags: Sequence[str], hosts: tuple[Host, Host] | None) -> dict[str, Any]:
    """Runs `kvferry bench`; returns what it found.

    Args:
        hosts: of the prefill and of the decode side; None for one host, in whose memory both are.
    """
    command = [sys.executable, "-m", "kvferry"]
    if hosts is None:
        return _said(subprocess.Popen([*command, "bench", "--json", *flags], **_PIPES))
    prefill, decode = hosts
    registry = ["registry", "--host", prefill.address, "--port", str(REGISTRY_PORT)]
    with _running([*command, *registry], _environment(prefill)):
        both = [*flags, "--registry", f"http://{prefill.address}:{REGISTRY_PORT}", "--one-clock"]
        with _running([*command, "bench", "--role", "prefill", *both], _environment(prefill)):
            there = [*decode.inside, *command, "bench", "--role", "decode", "--json", *both]
            return _said(subprocess.Popen(there, env=_environment(decode), **_PIPES))


def _environment(host: Host) -> dict[str, str]:
    """Of a process on one of two hosts."""
    return {
        **os.environ,
        "KVFERRY_HOST": host.address,
        "KVFERRY_ALLOW_UNAUTHENTICATED": "1",
        "UCX_TLS": "tcp,self",
        "UCX_NET_DEVICES": host.device,
    }


_PIPES: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


@contextmanager
def _running(command: Sequence[str], environment: dict[str, str]) -> Iterator[None]:
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def _said(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate()
    if process.returncode:
        raise SystemExit((err or out)[-2000:])
    found: dict[str, Any] = json.loads(out)
    return found


def measured(
    case: Case, ranges: int, options: argparse.Namespace, hosts: tuple[Host, Host] | None
) -> list[dict[str, Any]]:
    """Measures a case once; returns a row for each variant that was sent whole and by layer."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(case.config))
        cases = bench(flags_of(case, config, ranges, options), hosts)["cases"]
    found = {each["variant"]: each for each in cases}
    rows = []
    for variant in options.variants.split(","):
        whole, by_layer = found[variant], found[f"{variant}, by layer"]
        whole_ms, by_layer_ms = whole["exposed"]["ms"], by_layer["exposed"]["ms"]
        rows.append(
            {
                "case": case.name,
                "variant": variant,
                "ranges": ranges,
                "request_mb": round(whole["bytes_per_request"] / 1e6, 1),
                "whole_ms": whole_ms["p50"],
                "by_layer_ms": by_layer_ms["p50"],
                "by_layer_p95_ms": by_layer_ms["p95"],
                "share_of_whole": by_layer["exposed"]["share_of_whole"],
                "limit_ms": by_layer["exposed"]["limit_ms"],
                "of_rate": round(whole["bytes_per_request"] / (whole_ms["p50"] / 1e3) / options.bytes_per_s, 3),
                "exact": whole["exact"] and by_layer["exact"],
            }
        )
    return rows


def markdown(rows: list[dict[str, Any]]) -> str:
    """Renders the rows as a table."""
    lines = [
        "| caches | path | ranges | MB a request | left, whole (ms) | left, by layer (ms; p95) | share | least (ms) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['case']} | {row['variant']} | {row['ranges']} | {row['request_mb']:.0f} | {row['whole_ms']:.1f} | "
        f"{row['by_layer_ms']:.1f}; {row['by_layer_p95_ms']:.1f} | {row['share_of_whole']:.3f} | "
        f"{row['limit_ms']:.1f} |"
        for row in rows
    ]
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], file: str) -> None:
    """Draws what is left by the number of ranges, in shares of what is left of a whole prompt."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    lines = list(dict.fromkeys((row["case"], row["variant"]) for row in rows))
    for case, variant in lines:
        those = [row for row in rows if (row["case"], row["variant"]) == (case, variant)]
        axes.plot(
            [row["ranges"] for row in those],
            [row["share_of_whole"] for row in those],
            marker="o" if variant == "direct" else "s",
            linestyle="-" if variant == "direct" else "--",
            label=f"{case}, {variant}",
        )
    ranges = sorted({row["ranges"] for row in rows})
    axes.plot(ranges, [1 / count for count in ranges], color="black", linestyle=":", label="the last range alone")
    axes.set(xscale="log", xticks=ranges, xticklabels=ranges, ylim=(0, None))
    axes.set(xlabel="ranges of layers", ylabel="left when the prompt is computed, of what is left of it whole")
    axes.minorticks_off()
    axes.legend(fontsize="x-small")
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    """Measures every case with every number of ranges."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate-mbit", type=int, default=0, help="the wire's rate; 0 for shared memory")
    parser.add_argument(
        "--wire-gbit-s", type=float, default=10.0, help="without --rate-mbit: how fast layers' bytes go"
    )
    parser.add_argument("--computing", type=float, default=1.0, help="how often as long as its bytes a layer takes")
    parser.add_argument("--request-mb", type=float, default=50.0)
    parser.add_argument("--ranges", default="8", help="numbers of ranges, separated by commas")
    parser.add_argument("--cases", default="", help="only those whose names hold this")
    parser.add_argument("--variants", default="direct,staged")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--plot", help="also draw to this file")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    options.bytes_per_s = (options.rate_mbit * 1e6 or options.wire_gbit_s * 1e9) / 8
    if options.rate_mbit:
        enter_namespace("benchmarks.layer_by_layer")
    with two_hosts(options.rate_mbit * 1_000_000) if options.rate_mbit else nullcontext() as hosts:
        rows = [
            row
            for case in CASES
            if options.cases in case.name
            for ranges in options.ranges.split(",")
            for row in measured(case, int(ranges), options, hosts)
        ]
    if options.plot:
        draw(rows, options.plot)
    print(json.dumps({"rows": rows}) if options.json else markdown(rows))


if __name__ == "__main__":
    main()
