"""Prometheus metrics of one server, in a registry of its own."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from k3eval_local.engine.request import GenerationResult
from k3eval_local.protocol.reply import Counts
from k3eval_local.server.generate import ServedEngine

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)

_GAUGES = {
    "running": "Requests that hold a slot",
    "waiting": "Requests that wait for one",
    "total_pages": "Cache pages",
    "free_pages": "Cache pages that nobody holds",
    "cached_pages": "Cache pages that only saved prefixes hold",
    "total_slots": "State slots",
    "free_slots": "State slots that nobody holds",
    "checkpoints": "Saved prefixes",
    "used_bytes": "Bytes of the pages that anybody holds",
}
_COUNTERS = {
    "cache_hits": "Requests that found a saved prefix",
    "cache_misses": "Requests that found none",
    "hit_tokens": "Prompt tokens that were not computed",
    "prefilled_tokens": "Prompt tokens that were computed",
    "generated_tokens": "Tokens generated",
    "evictions": "Saved prefixes that made room",
    "failed_requests": "Requests that the engine gave up",
}


class Metrics:
    """What is counted outside the engine, and a view of the engine's own counters."""

    def __init__(self, engine: ServedEngine) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "k3eval_requests", "HTTP requests", ("path", "status"), registry=self.registry
        )
        self.faults = Counter("k3eval_faults", "Faults injected", ("fault",), registry=self.registry)
        self.disconnects = Counter("k3eval_disconnects", "Clients that went away", registry=self.registry)
        self.in_flight = Gauge("k3eval_chat_in_flight", "Chat requests in progress", registry=self.registry)
        self._tokens = Counter("k3eval_tokens", "Tokens by kind", ("kind",), registry=self.registry)
        self._first = _Durations("k3eval_first_token_seconds", "Acceptance to first token")
        self._gap = _Durations("k3eval_token_gap_seconds", "Between two tokens of a stream")
        for collector in (self._first, self._gap, _EngineCollector(engine)):
            self.registry.register(collector)

    def observe(self, counts: Counts, results: list[GenerationResult]) -> None:
        """Count a reply that has ended."""
        for kind in ("prompt", "completion", "cached", "written", "reasoning"):
            self._tokens.labels(kind).inc(getattr(counts, kind))
        for result in results:
            seconds = np.array(result.token_ns) / 1e9
            self._first.observe(seconds[:1])
            self._gap.observe(np.diff(seconds))

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)


class _Durations(Collector):
    """A histogram that takes many values at once: a stream has thousands when it ends."""

    def __init__(self, name: str, text: str) -> None:
        self._name, self._text = name, text
        self._counts = np.zeros(len(_SECONDS) + 1, dtype=np.int64)
        self._sum = 0.0

    def observe(self, seconds: npt.NDArray[np.float64]) -> None:
        """Count every value."""
        places = np.searchsorted(_SECONDS, seconds)  # a bucket holds its upper bound
        self._counts += np.bincount(places, minlength=len(self._counts))
        self._sum += float(seconds.sum())

    def collect(self) -> Iterator[HistogramMetricFamily]:
        bounds = (*map(str, _SECONDS), "+Inf")
        buckets = list(zip(bounds, self._counts.cumsum().tolist(), strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)


class _EngineCollector(Collector):
    def __init__(self, engine: ServedEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        stats = self._engine.stats()
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(f"k3eval_engine_{name}", text, value=getattr(stats, name))
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"k3eval_engine_{name}", text, value=getattr(stats, name))
