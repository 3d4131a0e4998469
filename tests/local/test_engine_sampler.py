from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats
from scipy.special import log_softmax, softmax

from k3eval_local.engine.request import Sampling
from k3eval_local.engine.sampler import Choice, choose, uniform


def choice(**options: float | int | None) -> Choice:
    return Choice(Sampling(**options), seed=1, index=0)


def test_uniform_is_uniform_and_a_function_of_seed_and_index():
    numbers = [uniform(seed, index) for seed in range(40) for index in range(100)]
    assert all(0 <= number < 1 for number in numbers)
    assert stats.kstest(numbers, "uniform").pvalue > 0.01
    assert uniform(3, 4) == uniform(3, 4) != uniform(4, 3)


def test_greedy_takes_the_largest():
    logits = np.array([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]])
    assert [chosen.id for chosen in choose(logits, [choice(temperature=0)] * 2)] == [1, 0]


def test_draws_follow_the_distribution():
    logits = np.array([1.0, 0.0, 2.0, -1.0])
    rows = [Choice(Sampling(temperature=0.7), seed, 5) for seed in range(4000)]
    ids = [chosen.id for chosen in choose(np.tile(logits, (len(rows), 1)), rows)]
    expected = softmax(logits / 0.7) * len(rows)
    assert stats.chisquare(np.bincount(ids, minlength=4), expected).pvalue > 0.01


@pytest.mark.parametrize(
    ("top_p", "allowed"), [(0.5, {2}), (0.75, {2, 0}), (0.96, {0, 1, 2}), (1.0, {0, 1, 2, 3})]
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, allowed: set[int]):
    logits = np.log([0.25, 0.12, 0.6, 0.03])
    rows = [Choice(Sampling(top_p=top_p), seed, 0) for seed in range(800)]
    assert {chosen.id for chosen in choose(np.tile(logits, (len(rows), 1)), rows)} == allowed


def test_a_row_does_not_depend_on_its_company():
    logits = np.random.default_rng(0).normal(size=(6, 50)).astype(np.float32)
    rows = [
        Choice(Sampling(temperature=t, top_p=p), seed, i)
        for i, (t, p, seed) in enumerate(
            [(1, 1, 3), (0, 1, 4), (0.5, 0.9, 5), (2, 0.3, 6), (1, 1, 7), (0, 1, 8)]
        )
    ]
    together = [chosen.id for chosen in choose(logits, rows)]
    assert together == [choose(logits[i : i + 1], [row])[0].id for i, row in enumerate(rows)]


def test_masks_bind_greedy_and_sampled_rows():
    mask = np.array([True, False, False, True])
    logits = np.array([[0.0, 9.0, 9.0, 1.0]])
    assert choose(logits, [Choice(Sampling(temperature=0), 0, 0, mask)])[0].id == 3
    drawn = {choose(logits, [Choice(Sampling(), seed, 0, mask)])[0].id for seed in range(60)}
    assert drawn == {0, 3}


def test_a_tiny_temperature_is_greedy_and_overflows_nowhere():
    logits = np.array([[1000.0, 999.0, -1000.0]])
    assert choose(logits, [choice(temperature=1e-30)])[0].id == 0


def test_logprobs_are_the_models_own():
    logits = np.array([[0.0, 2.0, 1.0]])
    mask = np.array([True, False, True])
    chosen = choose(logits, [Choice(Sampling(temperature=0, logprobs=2), 0, 0, mask)])[0]
    expected = log_softmax(logits[0])
    assert chosen.id == 2
    assert math.isclose(chosen.logprob, expected[2])
    assert [top.id for top in chosen.top_logprobs] == [1, 2]
    assert math.isclose(chosen.top_logprobs[0].logprob, expected[1])
    assert choose(logits, [choice(temperature=0)])[0].logprob is None
    assert choose(logits, [choice(temperature=0, logprobs=0)])[0].top_logprobs == ()
    assert len(choose(logits, [choice(temperature=0, logprobs=20)])[0].top_logprobs) == 3


def test_rows_that_are_not_finite_are_named_and_harm_nobody():
    logits = np.array([[0.0, float("nan")], [0.0, 1.0], [float("inf"), 0.0]])
    assert [chosen and chosen.id for chosen in choose(logits, [choice(temperature=1, top_p=0.9)] * 3)][
        ::2
    ] == [None] * 2
    assert choose(logits, [choice(temperature=0)] * 3)[1].id == 1
