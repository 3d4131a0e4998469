"""The statistics that scores and decode figures are reported with: pure functions, seeded, no files.

Scores are ratios over *valid* trials, and trials of one task are never taken for independent.
Each docstring gives the formula and its source. numpy and scipy are imported on use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, median
from typing import TYPE_CHECKING

from k3eval_harness.results.schema import Interval

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

RESAMPLES = 10_000
"""Bootstrap resamples: the Monte-Carlo error of a 2.5 % quantile's level is then 0.16 points."""

MAX_FIT_POINTS = 2_000
"""Theil-Sen looks at all pairs; a larger sample is thinned to this size with the seed."""


def wilson(passed: int, n: int, level: float = 0.95) -> Interval:
    """Wilson's score interval for a proportion of ``n`` independent trials.

    ``(p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n)`` with ``p = passed/n``
    (E. B. Wilson, JASA 22, 1927). Unlike ``p +- z s`` it has a width at 0 and at 1.

    Raises:
        ValueError: ``n < 1`` or ``passed`` outside ``0..n``, or a level outside (0, 1).
    """
    if n < 1 or not 0 <= passed <= n:
        raise ValueError(f"need 0 <= passed <= n and n >= 1, not passed={passed}, n={n}")
    z = _z(level)
    p = passed / n
    centre = p + z * z / (2 * n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    low = 0.0 if passed == 0 else (centre - half) / scale
    high = 1.0 if passed == n else (centre + half) / scale
    return Interval(low=low, high=high, level=level, method=f"wilson, n={n}")


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that at least one of ``k`` attempts passes, without bias from ``c`` passes in ``n`` attempts.

    ``1 - C(n-c, k) / C(n, k)`` (Chen et al., "Evaluating Large Language Models Trained on Code", 2021).

    Raises:
        ValueError: ``k`` outside ``1..n`` or ``c`` outside ``0..n``.
    """
    _check_nck(n, c, k)
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def pass_hat_k(n: int, c: int, k: int) -> float:
    """Chance that all of ``k`` attempts pass ("pass^k"), without bias: ``C(c, k) / C(n, k)``.

    Yao et al., "tau-bench", 2024. The pair of ``pass_at_k``: reliability instead of luck.

    Raises:
        ValueError: ``k`` outside ``1..n`` or ``c`` outside ``0..n``.
    """
    _check_nck(n, c, k)
    return math.comb(c, k) / math.comb(n, k)


def cluster_bootstrap_mean(
    groups: Iterable[Sequence[float]], level: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
) -> Interval:
    """Bootstrap interval of the pooled mean ``sum of values / number of values``, resampling whole groups.

    Attempts at one task resemble one another; drawing tasks with replacement, with all their attempts,
    keeps that (Davison and Hinkley, "Bootstrap Methods", 1997, section 3.8). The percentile interval of few
    groups is too narrow, so its tails are widened to ``Phi(-sqrt(G/(G-1)) t_{G-1})`` (Hesterberg, "What
    Teachers Should Know About the Bootstrap", 2015, expanded percentile interval).

    Raises:
        ValueError: fewer than two non-empty groups.
    """
    import numpy as np

    kept = [group for group in groups if len(group) > 0]
    if len(kept) < 2:
        raise ValueError(f"a cluster bootstrap needs two groups with values, not {len(kept)}")
    sums = np.array([math.fsum(group) for group in kept])
    sizes = np.array([len(group) for group in kept], dtype=np.float64)
    means = _bootstrap(
        len(kept), resamples, seed, lambda drawn: sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1)
    )
    low, high = np.quantile(means, _expanded_tails(len(kept), level))
    return Interval(
        low=float(low), high=float(high), level=level, method=f"cluster bootstrap, {len(kept)} tasks"
    )


def score_interval(
    groups: Mapping[str, Sequence[float]], level: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
) -> Interval | None:
    """The interval shown beside a score: ``groups`` holds each task's valid 0/1 results.

    One attempt a task: Wilson. Several: cluster bootstrap by task. Where every task has the same mean the
    bootstrap has no width to show and would claim certainty; then it is Wilson with each *task* counted
    once (attempts that agree carry no more evidence than one task). ``None`` without a valid trial.
    """
    kept = [values for values in groups.values() if len(values) > 0]
    if not kept:
        return None
    total = math.fsum(math.fsum(values) for values in kept)
    if all(len(values) == 1 for values in kept):
        return wilson(round(total), len(kept), level)
    means = {math.fsum(values) / len(values) for values in kept}
    if len(means) == 1:
        return _wilson_by_task(means.pop(), len(kept), level)
    return cluster_bootstrap_mean(kept, level, resamples, seed)


def mcnemar_exact(b: int, c: int) -> float:
    """Two-sided exact p-value for paired yes/no results.

    ``b`` pairs only the first passed, ``c`` pairs only the second. Under equal rates ``b`` is
    Binomial(b + c, 1/2) and the p-value ``min(1, 2 P(X <= min(b, c)))`` (McNemar, Psychometrika 12, 1947,
    in its exact form). 1.0 where no pair disagrees.

    Raises:
        ValueError: a negative count.
    """
    if b < 0 or c < 0:
        raise ValueError(f"counts cannot be negative: b={b}, c={c}")
    n = b + c
    tail = sum(math.comb(n, i) for i in range(min(b, c) + 1))
    return min(1.0, float(2 * tail / 2**n))


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """Mean of (second minus first) over the tasks that both runs have valid results for."""

    difference: float
    interval: Interval | None
    """``None`` with fewer than two common tasks, or where every task shows the same difference."""
    tasks: tuple[str, ...]


def paired_bootstrap(
    first: Mapping[str, Sequence[float]],
    second: Mapping[str, Sequence[float]],
    level: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> PairedDifference | None:
    """Difference of two runs on their common tasks, each task weighing the same, with a bootstrap interval.

    ``mean over tasks of (mean of second - mean of first)``; tasks are drawn with replacement as pairs, so
    that their difficulty cancels (Efron and Tibshirani, "An Introduction to the Bootstrap", 1993); expanded
    percentile interval as in ``cluster_bootstrap_mean``. ``None`` without a common task.
    """
    import numpy as np

    common = tuple(sorted(task for task in first.keys() & second.keys() if first[task] and second[task]))
    if not common:
        return None
    gaps = np.array([np.mean(second[task]) - np.mean(first[task]) for task in common])
    if len(np.unique(gaps)) < 2:
        return PairedDifference(float(gaps[0]), None, common)
    means = _bootstrap(len(common), resamples, seed, lambda drawn: gaps[drawn].mean(axis=1))
    low, high = np.quantile(means, _expanded_tails(len(common), level))
    method = f"paired bootstrap, {len(common)} tasks"
    return PairedDifference(
        float(gaps.mean()), Interval(low=float(low), high=float(high), level=level, method=method), common
    )


def median_interval(values: Sequence[float], level: float = 0.95) -> Interval | None:
    """Interval of the median of independent values, from order statistics, exact for any distribution.

    ``[x_(r), x_(n+1-r)]`` covers the median with ``1 - 2 P(Binomial(n, 1/2) < r)``; the largest ``r`` that
    reaches ``level`` is taken (David and Nagaraja, "Order Statistics", section 7.1). Fewer than six values
    cannot reach 95 %: then it is their range, with the level that a range has, ``1 - 2^(1-n)``. A bootstrap
    of the median falls short at such sizes (91 % instead of 95 % at n = 15 in our simulation).
    ``None`` for n < 2.
    """
    from scipy.stats import binom

    _z(level)
    n = len(values)
    if n < 2:
        return None
    ordered = sorted(values)
    rank = max(1, int(binom.ppf((1 - level) / 2, n, 0.5)))
    reached = 1 - 2 * float(binom.cdf(rank - 1, n, 0.5))
    method = f"order statistics {rank} and {n + 1 - rank} of {n}"
    return Interval(
        low=float(ordered[rank - 1]), high=float(ordered[n - rank]), level=min(level, reached), method=method
    )


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """First and third quartile, linear interpolation between order statistics (Hyndman and Fan's type 7).

    Raises:
        ValueError: no values.
    """
    import numpy as np

    if not values:
        raise ValueError("no values")
    low, high = np.quantile(np.asarray(values, dtype=np.float64), (0.25, 0.75))
    return float(low), float(high)


@dataclass(frozen=True, slots=True)
class LinearFit:
    """``y = intercept + slope * x``; the slope's interval is ``None`` with fewer than three points."""

    intercept: float
    slope: float
    slope_interval: Interval | None
    n: int

    def at(self, x: float) -> float:
        """The fitted value at ``x``."""
        return self.intercept + self.slope * x


def theil_sen(x: Sequence[float], y: Sequence[float], level: float = 0.95, seed: int = 0) -> LinearFit | None:
    """Robust line: slope = median of all pairwise slopes, intercept = median(y - slope x).

    Holds with up to 29 % of wild points (H. Theil, 1950; P. K. Sen, JASA 63, 1968, whose interval by
    Kendall's tau is used for the slope). Used for decode seconds per token against context tokens, where one
    noisy neighbour must not tilt the line. ``None`` with fewer than two different x.

    Raises:
        ValueError: ``x`` and ``y`` differ in length.
    """
    import numpy as np
    from scipy.stats import theilslopes

    if len(x) != len(y):
        raise ValueError(f"x has {len(x)} values, y has {len(y)}")
    xs, ys = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if len(xs) > MAX_FIT_POINTS:
        kept = np.random.default_rng(seed).choice(len(xs), MAX_FIT_POINTS, replace=False)
        xs, ys = xs[kept], ys[kept]
    if len(np.unique(xs)) < 2:
        return None
    with np.errstate(invalid="ignore"):  # ties in x and y can leave Sen's variance negative: no interval then
        slope, _, low, high = theilslopes(ys, xs, alpha=level)
    interval = None
    if len(xs) >= 3 and math.isfinite(low) and math.isfinite(high):
        interval = Interval(low=float(low), high=float(high), level=level, method=f"Theil-Sen, n={len(xs)}")
    return LinearFit(float(np.median(ys - slope * xs)), float(slope), interval, len(xs))


def median_or_none(values: Sequence[float]) -> float | None:
    """The median, or ``None`` without values."""
    return float(median(values)) if values else None


def _wilson_by_task(mean: float, tasks: int, level: float) -> Interval:
    """Wilson with each task counted once; a mean strictly between 0 and 1 keeps its centre."""
    if mean in (0.0, 1.0):
        return wilson(round(mean * tasks), tasks, level).model_copy(
            update={"method": f"wilson, {tasks} tasks counted once"}
        )
    low = wilson(math.floor(mean * tasks), tasks, level).low
    high = wilson(math.ceil(mean * tasks), tasks, level).high
    return Interval(low=low, high=high, level=level, method=f"wilson, {tasks} tasks counted once")


def _z(level: float) -> float:
    if not 0 < level < 1:
        raise ValueError(f"a level lies between 0 and 1, not {level}")
    return NormalDist().inv_cdf((1 + level) / 2)


def _expanded_tails(groups: int, level: float) -> tuple[float, float]:
    """The two quantile levels of Hesterberg's expanded percentile interval."""
    from scipy.stats import t

    _z(level)
    tail = NormalDist().cdf(-math.sqrt(groups / (groups - 1)) * float(t.ppf((1 + level) / 2, groups - 1)))
    return tail, 1 - tail


def _bootstrap(
    n: int, resamples: int, seed: int, statistic: Callable[[NDArray[np.intp]], NDArray[np.float64]]
) -> NDArray[np.float64]:
    """The statistic of each resample. It is given index rows [some, n], in blocks that bound the memory."""
    import numpy as np

    rng = np.random.default_rng(seed)
    block = max(1, min(resamples, 4_000_000 // n))
    sizes = [min(block, resamples - start) for start in range(0, resamples, block)]
    return np.concatenate([statistic(rng.integers(0, n, size=(size, n))) for size in sizes])


def _check_nck(n: int, c: int, k: int) -> None:
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"need 0 <= c <= n and 1 <= k <= n, not n={n}, c={c}, k={k}")
