"""Prometheus metrics of one server, in a registry of its own."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from k3eval_local.engine.request import GenerationResult
from k3eval_local.protocol.reply import Counts
from k3eval_local.server.generate import ServedEngine

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)

_GAUGES = {
    "running": "Requests that hold a slot",
    "waiting": "Requests that wait for one",
    "free_pages": "Cache pages that nobody holds",
    "cached_pages": "Cache pages that only saved prefixes hold",
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
        self._first = Histogram(
            "k3eval_first_token_seconds",
            "Acceptance to first token",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._gap = Histogram(
            "k3eval_token_gap_seconds",
            "Between two tokens of a stream",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.registry.register(_EngineCollector(engine))

    def observe(self, counts: Counts, results: list[GenerationResult]) -> None:
        """Count a reply that has ended."""
        for kind in ("prompt", "completion", "cached", "written", "reasoning"):
            self._tokens.labels(kind).inc(getattr(counts, kind))
        for result in results:
            if result.token_ns:
                self._first.observe(result.token_ns[0] / 1e9)
            for before, after in pairwise(result.token_ns):
                self._gap.observe((after - before) / 1e9)

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    def __init__(self, engine: ServedEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        stats = self._engine.stats()
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(f"k3eval_engine_{name}", text, value=getattr(stats, name))
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"k3eval_engine_{name}", text, value=getattr(stats, name))
