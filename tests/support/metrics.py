"""Metrics as Prometheus reads them."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Every sample, by its name without the prefix and the values of its labels."""
    return {
        (sample.name.removeprefix("kvferry_"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
