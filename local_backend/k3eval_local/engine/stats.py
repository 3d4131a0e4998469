"""A snapshot of an engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineStats:
    """A snapshot for metrics. Counters only grow; gauges may be one step old."""

    running: int
    waiting: int
    total_pages: int
    free_pages: int
    running_pages: int
    cached_pages: int
    """Pages that only checkpoints hold: evicted when needed."""
    promised_pages: int
    """Pages that running sequences may still take."""
    page_bytes: int
    total_slots: int
    free_slots: int
    checkpoints: int
    cache_hits: int
    cache_misses: int
    hit_tokens: int
    evictions: int
    steps: int
    prompt_tokens: int
    """Prompt tokens of requests that were admitted."""
    prefilled_tokens: int
    """Prompt tokens that the model really ran."""
    generated_tokens: int
    failed_requests: int

    @property
    def cache_bytes(self) -> int:
        """Bytes that only checkpoints hold."""
        return self.cached_pages * self.page_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of pages that anybody holds."""
        return (self.total_pages - self.free_pages) * self.page_bytes
