"""Chooses the next token of each row of a batch, from logits, in NumPy: microseconds count here.

A row's choice depends on its logits, its options, its seed and its index only: the random number is a hash of
(seed, index), so the same request draws the same numbers whatever else is in the batch. Log-probabilities are
the model's own, before temperature, top_p and masks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from k3eval_local.engine.request import Sampling, TopLogprob

Logits = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Choice:
    """One row's instructions."""

    sampling: Sampling
    seed: int
    index: int
    """Number of tokens that the request has generated so far."""
    mask: Mask | None = None
    """[vocab], the tokens that may be chosen; at least one."""


@dataclass(frozen=True)
class Chosen:
    """One row's outcome."""

    id: int
    logprob: float | None
    top_logprobs: tuple[TopLogprob, ...]


def uniform(seed: int, index: int) -> float:
    """Number in [0, 1) that is a pure function of its arguments."""
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=7).digest()
    return (int.from_bytes(digest) >> 3) * 2.0**-53


def choose(logits: Logits, choices: Sequence[Choice]) -> list[Chosen | None]:
    """Chooses one token for each row of logits [rows, vocab]; None where a row holds NaN or +inf."""
    finite = np.isfinite(logits.max(axis=1)).tolist()
    masked = logits
    if any(choice.mask is not None for choice in choices):
        allowed = np.ones(logits.shape, dtype=np.bool_)
        for row, choice in enumerate(choices):
            if choice.mask is not None:
                allowed[row] = choice.mask
        masked = np.where(allowed, logits, np.float32("-inf"))
    ids = masked.argmax(axis=1).tolist()
    drawn = [row for row, choice in enumerate(choices) if choice.sampling.temperature > 0 and finite[row]]
    if drawn:
        for row, token in zip(drawn, _draw(masked[drawn], [choices[row] for row in drawn]), strict=True):
            ids[row] = token
    chosen: list[Chosen | None] = []
    for row, choice in enumerate(choices):
        if not finite[row]:
            chosen.append(None)
        elif choice.sampling.logprobs is None:
            chosen.append(Chosen(ids[row], None, ()))
        else:
            chosen.append(_with_logprobs(ids[row], logits[row], choice.sampling.logprobs))
    return chosen


def _draw(logits: Logits, choices: Sequence[Choice]) -> list[int]:
    """Inverse-CDF sampling in vocabulary order, after temperature and top_p, in fp64."""
    temperature = np.array([choice.sampling.temperature for choice in choices])
    # The maximum is taken off first: a tiny temperature must not overflow.
    p = (logits - logits.max(axis=1, keepdims=True)).astype(np.float64)
    p = np.exp(p / temperature[:, None])
    for row, choice in enumerate(choices):
        if choice.sampling.top_p < 1:
            p[row, p[row] < _smallest_kept(p[row], choice.sampling.top_p)] = 0.0
    cumulative = p.cumsum(axis=1)
    tokens = []
    for row, choice in enumerate(choices):
        wanted = uniform(choice.seed, choice.index) * cumulative[row, -1]
        # side="right": a token of probability 0 occupies no interval and cannot be drawn.
        token = int(np.searchsorted(cumulative[row], wanted, side="right"))
        # u * total can round up to the total itself: then the last token with mass is meant.
        tokens.append(token if token < len(p[row]) else int(p[row].nonzero()[0][-1]))
    return tokens


def _smallest_kept(p: npt.NDArray[np.float64], top_p: float) -> float:
    """Of the smallest set of most likely tokens that holds top_p of the mass, the least likely one's p.

    Tokens that are equally likely as that one stay too, so that the set does not depend on an order.
    """
    ranked = np.sort(p)[::-1]
    mass = ranked.cumsum()
    return float(ranked[np.searchsorted(mass, top_p * mass[-1])])


def _with_logprobs(token: int, logits: Logits, count: int) -> Chosen:
    shifted = logits.astype(np.float64) - logits.max()
    logprobs = shifted - np.log(np.exp(shifted).sum())
    best = np.argsort(-logprobs, kind="stable")[:count] if count else ()
    top = tuple(TopLogprob(int(i), float(logprobs[i])) for i in best)
    return Chosen(token, float(logprobs[token]), top)
