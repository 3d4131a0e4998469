"""Decode speed as a function of real context length: bins, a robust line, and the contexts that were reached.

Never one average over all contexts. Used for a trial's turns in place and for the controlled sweep.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median

from k3eval_harness import stats
from k3eval_harness.results.schema import DecodeSample, Interval, Record


class Spread(Record):
    """Median of ``n`` values with its interval and the quartiles."""

    median: float
    q1: float
    q3: float
    n: int
    interval: Interval | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """``None`` without values."""
        if not values:
            return None
        q1, q3 = stats.quartiles(values)
        return cls(median=median(values), q1=q1, q3=q3, n=len(values), interval=stats.median_interval(values))


class ContextBin(Record):
    """Turns whose context lies in ``[low, high)`` tokens."""

    low: int
    high: int
    seconds_per_token: Spread


class DecodeFit(Record):
    """``d(c) = a + b c``: seconds per token at context ``c`` (Theil-Sen)."""

    a_s: float
    """Seconds per token that do not depend on the context."""
    b_s_per_token: float
    """Marginal seconds per output token per token of context."""
    b_interval: Interval | None
    n: int


class ContextReach(Record):
    """Which context lengths the model calls really had."""

    n: int
    smallest: int
    median: int
    p90: int
    largest: int
    turns_by_bin: dict[str, int]
    """Model calls by power-of-two bin of their context, as ``1024-2047``."""


class DecodeSeries(Record):
    """All that is reported of decode speed against context."""

    bins: tuple[ContextBin, ...]
    fit: DecodeFit | None
    samples: int
    void: dict[str, int]
    """Replies that could not be measured, by reason."""
    bundled: int
    """Samples whose first event's tokens are estimated."""


def bin_edges(context: int) -> tuple[int, int]:
    """The power-of-two bin ``[2^k, 2^(k+1))`` of a context length; lengths below 1024 share one bin."""
    if context < 1024:
        return 0, 1024
    low = 1 << (context.bit_length() - 1)
    return low, 2 * low


def decode_series(samples: Iterable[DecodeSample]) -> DecodeSeries:
    """Group measured replies by context and fit the line; the others are counted by reason."""
    everything = list(samples)
    measured = [
        (s.context_tokens, s.seconds_per_token) for s in everything if s.seconds_per_token is not None
    ]
    grouped: dict[tuple[int, int], list[float]] = {}
    for context, seconds in measured:
        grouped.setdefault(bin_edges(context), []).append(seconds)
    bins = [
        ContextBin(low=low, high=high, seconds_per_token=spread)
        for (low, high), values in sorted(grouped.items())
        if (spread := Spread.of(values)) is not None
    ]
    reasons = Counter(s.void_reason or "not measured" for s in everything if s.seconds_per_token is None)
    return DecodeSeries(
        bins=tuple(bins),
        fit=decode_fit(measured),
        samples=len(measured),
        void=dict(sorted(reasons.items())),
        bundled=sum(s.bundled for s in everything),
    )


def decode_fit(points: Sequence[tuple[int, float]]) -> DecodeFit | None:
    """Robust line through (context tokens, seconds per token); ``None`` below three points or one context."""
    if len(points) < 3:
        return None
    fit = stats.theil_sen([float(c) for c, _ in points], [d for _, d in points])
    if fit is None:
        return None
    return DecodeFit(a_s=fit.intercept, b_s_per_token=fit.slope, b_interval=fit.slope_interval, n=fit.n)


def context_reach(contexts: Iterable[int]) -> ContextReach | None:
    """Distribution of context lengths; ``None`` without a model call."""
    ordered = sorted(contexts)
    if not ordered:
        return None
    counts = Counter(bin_edges(c) for c in ordered)
    return ContextReach(
        n=len(ordered),
        smallest=ordered[0],
        median=int(median(ordered)),
        p90=ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))],
        largest=ordered[-1],
        turns_by_bin={f"{low}-{high - 1}": n for (low, high), n in sorted(counts.items())},
    )
