"""Transfers in vLLM's own metrics: its log line and its Prometheus endpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

from kvferry.engines.vllm.stats import KINDS, added, no_figures

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_BYTES = tuple(float(1 << power) for power in range(12, 37, 2))
_DESCRIPTORS = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0, 262144.0)

_HISTOGRAMS = {
    "sent_bytes": ("sent_bytes", "Bytes that a rank sent for a request.", _BYTES),
    "sent_descriptors": ("sent_descriptors", "Descriptors that a rank posted for a request.", _DESCRIPTORS),
    "send_s": ("send_seconds", "Time during which at least one write of a request was on its way.", _SECONDS),
    "receive_s": ("receive_seconds", "Time from asking for a request's cache to having it.", _SECONDS),
}
"""By figure, its metric's name, what it says, and its buckets."""

_COUNTERS = {
    "failed_sends": "Requests that a rank did not send.",
    "failed_receives": "Requests that a rank did not receive.",
}


@dataclass
class KVFerryStats(KVConnectorStats):  # type: ignore[misc]
    """Figures of transfers; `data` is a `TransferFigures`."""

    data: dict[str, Any] = field(default_factory=lambda: dict(no_figures()))

    def reset(self) -> None:
        self.data = dict(no_figures())

    def is_empty(self) -> bool:
        """Whether nothing was moved."""
        return self.data == no_figures()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Adds the figures of another worker, or of a later interval."""
        for name, figures in other.data.items():
            mine = self.data[name]
            self.data[name] = added(mine, figures) if isinstance(mine, dict) else mine + figures
        return self

    def reduce(self) -> dict[str, int | float]:
        """Returns what the log line shows."""
        data = self.data
        summary: dict[str, int | float] = {"sent": len(data["sent_bytes"]), "received": len(data["receive_s"])}
        for what in ("sends", "receives"):
            failed = data[f"failed_{what}"]
            summary[f"failed {what}"] = sum(failed.values())
            summary |= {f"failed {what} ({kind})": count for kind, count in failed.items()}
        if data["sent_bytes"]:
            summary["mean MB sent"] = round(sum(data["sent_bytes"]) / len(data["sent_bytes"]) / 1e6, 3)
            summary["mean ms on the wire"] = round(sum(data["send_s"]) / len(data["send_s"]) * 1e3, 3)
        if data["receive_s"]:
            summary["mean ms to receive"] = round(sum(data["receive_s"]) / len(data["receive_s"]) * 1e3, 3)
        return summary


class KVFerryPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Figures of transfers, for Prometheus."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)

        def made(kind: type, name: str, documentation: str, labels: list[str], **more: Any) -> Any:
            return metric_types[kind](
                name=f"vllm:kvferry_{name}", documentation=documentation, labelnames=labels, **more
            )

        self._histograms = {
            figure: create_metric_per_engine(
                made(Histogram, name, documentation, labelnames, buckets=buckets), per_engine_labelvalues
            )
            for figure, (name, documentation, buckets) in _HISTOGRAMS.items()
        }
        self._counters = {}
        for name, documentation in _COUNTERS.items():
            counter = made(Counter, name, documentation, [*labelnames, "kind"])
            self._counters[name] = {
                kind: create_metric_per_engine(
                    counter, {engine: [*values, kind] for engine, values in per_engine_labelvalues.items()}
                )
                for kind in KINDS
            }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Counts the figures of an interval."""
        for name, histograms in self._histograms.items():
            for figure in transfer_stats_data[name]:
                histograms[engine_idx].observe(figure)
        for name, counters in self._counters.items():
            for kind, count in transfer_stats_data[name].items():
                counters[kind][engine_idx].inc(count)
