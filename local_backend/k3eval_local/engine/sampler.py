"""Chooses the next token of each row of a batch, from logits.

A row's choice depends on its logits, its options, its seed and its index only: the random number is a hash of
(seed, index), so the same request draws the same numbers whatever else is in the batch. Log-probabilities are
the model's own, before temperature, top_p and masks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from k3eval_local.engine.request import Sampling, TopLogprob


@dataclass(frozen=True)
class Choice:
    """One row's instructions."""

    sampling: Sampling
    seed: int
    index: int
    """Number of tokens that the request has generated so far."""
    mask: torch.Tensor | None = None
    """Boolean [vocab] of the tokens that may be chosen; at least one."""


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


def choose(logits: torch.Tensor, choices: Sequence[Choice]) -> list[Chosen | None]:
    """Chooses one token for each row of logits [rows, vocab]; None where a row holds NaN or +inf."""
    logits = logits.float()
    finite = torch.isfinite(logits.amax(dim=1)).tolist()
    masked = logits
    if any(choice.mask is not None for choice in choices):
        masked = logits.clone()
        for row, choice in enumerate(choices):
            if choice.mask is not None:
                masked[row].masked_fill_(~choice.mask, float("-inf"))
    ids = masked.argmax(dim=1).tolist()
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


def _draw(logits: torch.Tensor, choices: Sequence[Choice]) -> list[int]:
    """Inverse-CDF sampling in vocabulary order, after temperature and top_p."""
    device = logits.device
    temperature = torch.tensor([choice.sampling.temperature for choice in choices], device=device)
    # The maximum is taken off first: a tiny temperature must not overflow.
    shifted = (logits - logits.amax(dim=1, keepdim=True)).double() / temperature.double()[:, None]
    p = torch.softmax(shifted, dim=1)
    if any(choice.sampling.top_p < 1 for choice in choices):
        top_p = torch.tensor([choice.sampling.top_p for choice in choices], device=device, dtype=p.dtype)
        ranked, order = p.sort(dim=1, descending=True, stable=True)
        outside = ranked.cumsum(dim=1) - ranked >= top_p[:, None]
        outside[:, 0] = False
        p = p.masked_fill(torch.zeros_like(outside).scatter(1, order, outside), 0.0)
    cumulative = p.cumsum(dim=1)
    u = torch.tensor([uniform(choice.seed, choice.index) for choice in choices], device=device, dtype=p.dtype)
    # right=True: a token of probability 0 occupies no interval and cannot be drawn.
    ids = torch.searchsorted(cumulative, (u * cumulative[:, -1])[:, None], right=True)[:, 0]
    # u * total can round up to the total itself: then the last token with mass is meant.
    last = p.shape[1] - 1 - (p.flip(1) > 0).int().argmax(dim=1)
    return [int(token) for token in torch.minimum(ids, last).tolist()]


def _with_logprobs(token: int, logits: torch.Tensor, count: int) -> Chosen:
    logprobs = torch.log_softmax(logits.double(), dim=0)
    values, ids = logprobs.topk(min(count, len(logprobs)))
    top = tuple(TopLogprob(i, value) for i, value in zip(ids.tolist(), values.tolist(), strict=True))
    return Chosen(token, float(logprobs[token]), top)
