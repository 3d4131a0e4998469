"""The statistics against scipy, brute force, published values and simulated coverage (fixed seeds)."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as reference

from k3eval_harness import stats


@pytest.mark.parametrize(
    ("passed", "n"), [(0, 1), (1, 1), (0, 10), (3, 10), (10, 10), (81, 263), (500, 1000)]
)
@pytest.mark.parametrize("level", [0.8, 0.95, 0.99])
def test_wilson_equals_scipy(passed: int, n: int, level: float) -> None:
    ours = stats.wilson(passed, n, level)
    theirs = reference.binomtest(passed, n).proportion_ci(level, method="wilson")
    assert ours.low == pytest.approx(theirs.low, abs=1e-12)
    assert ours.high == pytest.approx(theirs.high, abs=1e-12)
    assert ours.level == level


def test_wilson_has_a_width_at_both_ends() -> None:
    assert stats.wilson(0, 5).low == 0.0
    assert stats.wilson(0, 5).high > 0.4
    assert stats.wilson(5, 5).high == 1.0
    assert stats.wilson(5, 5).low < 0.6


@pytest.mark.parametrize("arguments", [(0, 0), (-1, 3), (4, 3)])
def test_wilson_refuses_impossible_counts(arguments: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="passed"):
        stats.wilson(*arguments)


@pytest.mark.parametrize("level", [0.0, 1.0, 95.0])
def test_levels_outside_the_unit_interval_are_refused(level: float) -> None:
    with pytest.raises(ValueError, match="level"):
        stats.wilson(1, 2, level)


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_equals_counting_all_draws(case: tuple[int, int, int]) -> None:
    n, c, k = case
    draws = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert stats.pass_at_k(n, c, k) == pytest.approx(sum(any(d) for d in draws) / len(draws))
    assert stats.pass_hat_k(n, c, k) == pytest.approx(sum(all(d) for d in draws) / len(draws))


def test_pass_at_k_is_unbiased() -> None:
    rng, rate, n, k = np.random.default_rng(5), 0.3, 6, 3
    counts = rng.binomial(n, rate, size=4000)
    assert np.mean([stats.pass_at_k(n, int(c), k) for c in counts]) == pytest.approx(1 - 0.7**3, abs=0.015)
    assert np.mean([stats.pass_hat_k(n, int(c), k) for c in counts]) == pytest.approx(0.3**3, abs=0.006)


@pytest.mark.parametrize("case", [(3, 4, 1), (3, 1, 0), (3, 1, 4), (0, 0, 1)])
def test_pass_at_k_refuses_impossible_counts(case: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="need 0 <= c <= n"):
        stats.pass_at_k(*case)


@pytest.mark.parametrize(("b", "c"), [(0, 1), (1, 1), (3, 9), (10, 2), (0, 6), (40, 61)])
def test_mcnemar_equals_the_binomial_test(b: int, c: int) -> None:
    assert stats.mcnemar_exact(b, c) == pytest.approx(reference.binomtest(b, b + c, 0.5).pvalue)


def test_mcnemar_without_a_disagreement_and_with_very_many() -> None:
    assert stats.mcnemar_exact(0, 0) == 1.0
    assert 0.0 < stats.mcnemar_exact(2000, 2300) < 1e-4
    with pytest.raises(ValueError, match="negative"):
        stats.mcnemar_exact(-1, 2)


def test_cluster_bootstrap_equals_all_resamples_of_a_small_case() -> None:
    groups = [[1.0, 0.0], [1.0, 1.0, 1.0], [0.0]]
    means = sorted(
        sum(math.fsum(groups[i]) for i in draw) / sum(len(groups[i]) for i in draw)
        for draw in itertools.product(range(3), repeat=3)
    )
    tail = 0.5 * math.erfc(math.sqrt(3 / 2) * float(reference.t.ppf(0.9, 2)) / math.sqrt(2))
    interval = stats.cluster_bootstrap_mean(groups, level=0.8, seed=3)
    assert interval.low == pytest.approx(np.quantile(means, tail), abs=0.12)
    assert interval.high == pytest.approx(np.quantile(means, 1 - tail), abs=0.12)
    assert "3 tasks" in interval.method


def test_cluster_bootstrap_needs_two_groups_and_is_reproducible() -> None:
    groups = [[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]]
    assert stats.cluster_bootstrap_mean(groups, seed=1) == stats.cluster_bootstrap_mean(groups, seed=1)
    with pytest.raises(ValueError, match="two groups"):
        stats.cluster_bootstrap_mean([[1.0, 0.0], []])


def test_coverage_of_the_score_interval_with_attempts_that_resemble_one_another() -> None:
    """20 tasks, 4 attempts, difficulty ~ Beta(1, 1): the interval holds the true 0.5 near 95 % of the time;
    Wilson over all 80 trials, which takes them for independent, does not."""
    rng, hits, naive = np.random.default_rng(11), 0, 0
    for run in range(400):
        difficulty = rng.beta(1, 1, size=20)
        results = rng.random((20, 4)) < difficulty[:, None]
        interval = stats.score_interval(
            {str(i): row.astype(float).tolist() for i, row in enumerate(results)}, resamples=1000, seed=run
        )
        assert interval is not None
        hits += interval.low <= 0.5 <= interval.high
        wrong = stats.wilson(int(results.sum()), 80)
        naive += wrong.low <= 0.5 <= wrong.high
    assert 0.92 <= hits / 400 <= 0.98
    assert naive / 400 < 0.88


def test_coverage_of_wilson() -> None:
    rng = np.random.default_rng(2)
    draws = rng.binomial(20, 0.3, size=2000)
    held = [stats.wilson(int(c), 20).low <= 0.3 <= stats.wilson(int(c), 20).high for c in draws]
    assert 0.93 <= np.mean(held) <= 0.985


def test_score_interval_takes_the_right_method() -> None:
    assert stats.score_interval({}) is None
    assert stats.score_interval({"a": []}) is None
    single = stats.score_interval({"a": [1.0], "b": [0.0], "c": []})
    assert single == stats.wilson(1, 2)
    several = stats.score_interval({"a": [1.0, 0.0], "b": [1.0, 1.0]})
    assert several is not None
    assert "bootstrap" in several.method


@pytest.mark.parametrize("values", [[1.0, 1.0, 1.0], [0.0, 0.0]])
def test_attempts_that_all_agree_do_not_claim_certainty(values: list[float]) -> None:
    interval = stats.score_interval({"a": values, "b": values})
    assert interval is not None
    assert interval.high - interval.low > 0.5
    assert "counted once" in interval.method
    one_task = stats.score_interval({"a": [1.0, 0.0]})
    assert one_task is not None
    assert (one_task.low, one_task.high) == (0.0, 1.0)


def test_paired_bootstrap_on_common_tasks_only() -> None:
    first = {"a": [1.0], "b": [0.0], "c": [1.0], "only-first": [1.0], "empty": []}
    second = {"a": [1.0], "b": [1.0], "c": [0.0, 1.0], "only-second": [0.0], "empty": [1.0]}
    paired = stats.paired_bootstrap(first, second)
    assert paired is not None
    assert paired.tasks == ("a", "b", "c")
    assert paired.difference == pytest.approx((0 + 1 - 0.5) / 3)
    assert paired.interval is not None
    assert paired.interval.low < paired.difference < paired.interval.high
    assert stats.paired_bootstrap({"a": [1.0]}, {"b": [1.0]}) is None
    alone = stats.paired_bootstrap({"a": [1.0]}, {"a": [0.0]})
    assert alone == stats.PairedDifference(-1.0, None, ("a",))


def test_paired_bootstrap_covers_and_is_narrower_than_unpaired() -> None:
    rng, hits = np.random.default_rng(8), 0
    for run in range(300):
        difficulty = rng.beta(1, 1, size=25)
        first = {str(i): [float(rng.random() < p * 0.8)] for i, p in enumerate(difficulty)}
        second = {str(i): [float(rng.random() < p)] for i, p in enumerate(difficulty)}
        paired = stats.paired_bootstrap(first, second, resamples=1000, seed=run)
        assert paired is not None
        hits += paired.interval is not None and paired.interval.low <= 0.1 <= paired.interval.high
    assert 0.91 <= hits / 300 <= 0.985


@pytest.mark.parametrize("n", [6, 9, 15, 40])
def test_median_interval_covers_at_least_as_often_as_it_says(n: int) -> None:
    draws = np.random.default_rng(n).lognormal(size=(1500, n))
    intervals = [stats.median_interval(row.tolist()) for row in draws]
    held = [i is not None and i.low <= 1.0 <= i.high for i in intervals]
    assert 0.94 <= np.mean(held) <= 0.995
    assert all(i is not None and i.level == 0.95 for i in intervals)


@pytest.mark.parametrize("n", [6, 7, 20, 101])
def test_median_interval_is_the_narrowest_pair_of_ranks_that_reaches_the_level(n: int) -> None:
    interval = stats.median_interval([float(i) for i in range(n, 0, -1)])
    assert interval is not None
    rank = int(interval.low)
    assert interval.high == n + 1 - rank
    tails = [2 * sum(math.comb(n, i) for i in range(r)) / 2**n for r in (rank, rank + 1)]
    assert tails[0] <= 0.05 < tails[1]


def test_few_values_give_their_range_with_its_true_level() -> None:
    assert stats.median_interval([]) is None
    assert stats.median_interval([1.0]) is None
    interval = stats.median_interval([3.0, 1.0, 2.0])
    assert interval is not None
    assert (interval.low, interval.high, interval.level) == (1.0, 3.0, 0.75)
    draws = np.random.default_rng(9).normal(size=(4000, 3))
    assert np.mean((draws.min(axis=1) < 0) & (draws.max(axis=1) > 0)) == pytest.approx(0.75, abs=0.02)


def test_a_bootstrap_of_many_groups_is_computed_in_blocks() -> None:
    groups = [[value] for value in np.random.default_rng(0).normal(size=50_000).tolist()]
    interval = stats.cluster_bootstrap_mean(groups, resamples=200)
    assert interval.low < np.mean([group[0] for group in groups]) < interval.high


def test_quartiles() -> None:
    assert stats.quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 4.0)
    assert stats.quartiles([7.0]) == (7.0, 7.0)
    with pytest.raises(ValueError, match="no values"):
        stats.quartiles([])


def test_theil_sen_equals_brute_force_and_ignores_a_wild_point() -> None:
    x = [1000.0, 4000.0, 8000.0, 16000.0, 32000.0, 64000.0, 128000.0]
    y = [0.01 + 2e-7 * c for c in x]
    y[3] = 9.0
    fit = stats.theil_sen(x, y)
    assert fit is not None
    slopes = [(y[j] - y[i]) / (x[j] - x[i]) for i, j in itertools.combinations(range(7), 2)]
    assert fit.slope == pytest.approx(np.median(slopes))
    assert fit.slope == pytest.approx(2e-7)
    assert fit.at(0.0) == pytest.approx(0.01)
    assert fit.slope_interval is not None
    assert fit.slope_interval.low <= 2e-7 <= fit.slope_interval.high


def test_theil_sen_slope_interval_covers() -> None:
    rng, hits = np.random.default_rng(21), 0
    x = np.repeat([4096.0, 8192.0, 16384.0, 32768.0], 4)
    for _ in range(300):
        y = 0.01 + 3e-7 * x + rng.normal(scale=0.002, size=len(x))
        fit = stats.theil_sen(x.tolist(), y.tolist())
        assert fit is not None
        assert fit.slope_interval is not None
        hits += fit.slope_interval.low <= 3e-7 <= fit.slope_interval.high
    assert 0.92 <= hits / 300 <= 0.985


def test_theil_sen_edges() -> None:
    assert stats.theil_sen([], []) is None
    assert stats.theil_sen([5.0, 5.0], [1.0, 2.0]) is None
    two = stats.theil_sen([0.0, 2.0], [1.0, 2.0])
    assert two is not None
    assert (two.intercept, two.slope, two.slope_interval) == (1.0, 0.5, None)
    tied = stats.theil_sen([1.0] * 4 + [2.0] * 4, [5.0] * 8)
    assert tied is not None
    assert (tied.slope, tied.slope_interval) == (0.0, None)
    with pytest.raises(ValueError, match="values"):
        stats.theil_sen([1.0], [])
    many = np.arange(5000.0)
    thinned = stats.theil_sen(many.tolist(), (2 * many).tolist())
    assert thinned is not None
    assert (thinned.n, thinned.slope) == (stats.MAX_FIT_POINTS, pytest.approx(2.0))


def test_median_or_none() -> None:
    assert stats.median_or_none([]) is None
    assert stats.median_or_none([1, 4]) == 2.5
