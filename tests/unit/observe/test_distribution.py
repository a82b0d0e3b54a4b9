"""Our histograms say what the Prometheus client's say."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import HistogramMetricFamily

from kvferry.observe.metrics import Distribution

BOUNDS = (0.001, 0.01, 1.0, 10.0)


class _Ours:
    def __init__(self, found: Distribution) -> None:
        self._found = found

    def collect(self):
        family = HistogramMetricFamily("times", "Some times.")
        family.add_metric([], self._found.buckets(), self._found.sum)
        yield family


@given(st.lists(st.sampled_from(BOUNDS) | st.floats(0.0, 100.0)))
def test_it_is_the_histogram_of_the_client(values: list[float]):
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    reference, found = Histogram("times", "Some times.", buckets=BOUNDS, registry=theirs), Distribution(BOUNDS)
    for each in values:
        reference.observe(each)
        found.add(each)
    ours.register(_Ours(found))

    def lines(registry: CollectorRegistry) -> list[str]:
        return sorted(line for line in generate_latest(registry).decode().splitlines() if "_created" not in line)

    assert lines(ours) == lines(theirs)
