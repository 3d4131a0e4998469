"""Batches in a fixed order: every step's rows, weights and drills follow from the seed and the step alone.

Rows of similar length go together; a row as long as a batch is a batch of its own and rides along with an
ordinary one, so that no update rests on one conversation. A *drill* is a list of random token lines followed
by the same lines in another order; only the second half counts. Drills come mostly at the start and teach
copying.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from k3eval_local.tokenizer import Tokenizer
from k3eval_local.train.render import Example

CONTEXT_WEIGHT = 0.2
CONTEXT_SHARE = 0.25
"""Of the tokens that the model only reads, this share is predicted too, at this weight by default."""


@dataclass(frozen=True)
class Row:
    """Token ids after the shared head and the weight of predicting each (0: not, -1: read only)."""

    ids: np.ndarray
    weights: np.ndarray
    head: tuple[int, ...] = ()


@dataclass(frozen=True)
class Batch:
    """ids and valid [B, T] behind the shared head; positions (flat), targets and weights [n] to predict."""

    head: tuple[int, ...]
    ids: Tensor
    positions: Tensor
    targets: Tensor
    weights: Tensor
    valid: Tensor


def row_of(example: Example) -> Row:
    """An example without its shared head; cut after the last turn that the model writes."""
    end = example.turns[-1].end
    ids = np.asarray(example.ids[example.prefix : end], dtype=np.int64)
    weights = np.full(len(ids), -1.0, dtype=np.float32)  # -1: read only
    for turn in example.turns:
        weights[turn.start - example.prefix : turn.end - example.prefix] = 1.0 if turn.trained else 0.0
    return Row(ids, weights, example.ids[: example.prefix])


def excerpt_of(example: Example) -> Row:
    """One turn and the message before it, without the head: the pair that is longest together.

    What a turn needs is mostly in the message before it; leaving out the rest saves two thirds of the work.
    The longest pair is the edit, or the reading of a long output.
    """
    before = [0, *(turn.end - example.prefix for turn in example.turns[:-1])]
    pairs = [
        (start, turn.end - example.prefix)
        for start, turn in zip(before, example.turns, strict=True)
        if turn.trained
    ]
    start, end = max(pairs, key=lambda pair: pair[1] - pair[0])
    row = row_of(example)
    return Row(row.ids[start:end], row.weights[start:end])


def drill(rng: np.random.Generator, words: np.ndarray, newline: int, separators: np.ndarray) -> Row:
    """Lines of 2 to 6 tokens, then the same lines shuffled."""
    lines = []
    for _ in range(int(rng.integers(6, 24))):
        body = rng.choice(words, size=int(rng.integers(2, 6)))
        lines.append(np.concatenate([body[:1], rng.choice(separators, size=1), body[1:], [newline]]))
    first = np.concatenate(lines)
    second = np.concatenate([lines[at] for at in rng.permutation(len(lines))])
    return Row(
        np.concatenate([first, second]).astype(np.int64),
        np.concatenate([np.zeros(len(first)), np.ones(len(second))]).astype(np.float32),
    )


class Batches:
    """``batches(step)`` for any step, the same whenever it is asked for.

    The examples are gone through in a seeded order, again and again, a share ``excerpts`` of them as
    excerpts; ``tokens`` is the size of a batch. The first ``drill_steps`` steps are drills with probability
    0.7; later ones would throw a trained model back for some ten steps each.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        tokenizer: Tokenizer,
        *,
        tokens: int,
        seed: int,
        drill_steps: int,
        excerpts: float = 0.0,
    ) -> None:
        rng = np.random.default_rng((seed, 0))
        shorten = rng.random(len(examples)) < excerpts
        self._rows = [
            excerpt_of(example) if short else row_of(example)
            for example, short in zip(examples, shorten, strict=True)
        ]
        self._tokens, self._seed = tokens, seed
        self._pad = tokenizer.control.pad
        self._newline = tokenizer.encode("\n")[0]
        self._words = np.arange(256, tokenizer.n_ranks)
        self._separators = np.asarray([tokenizer.encode(text)[0] for text in ("_", " ", "(", ".", "/")])
        self._drill_steps = drill_steps
        self._heads = {head: at for at, head in enumerate(sorted({row.head for row in self._rows}))}
        self._plan: list[list[list[int]]] = []
        self._epochs = 0

    def _rows_of(self, step: int) -> list[list[Row]]:
        while len(self._plan) <= step:
            rng = np.random.default_rng((self._seed, 1, self._epochs))
            self._epochs += 1
            order = rng.permutation(len(self._rows))
            epoch: list[list[int]] = []
            for start in range(0, len(order), 512):
                pool = sorted(order[start : start + 512].tolist(), key=self._place)
                while pool:
                    longest = len(self._rows[pool[0]].ids)
                    taken = [pool.pop(0)]
                    while (
                        pool
                        and self._alike(taken[0], pool[0])
                        and max(longest, len(self._rows[pool[0]].ids)) * (len(taken) + 1) <= self._tokens
                    ):
                        taken.append(pool.pop(0))
                        longest = len(self._rows[taken[-1]].ids)
                    epoch.append(taken)
            order = rng.permutation(len(epoch))
            steps = [[epoch[at]] for at in order if not self._alone(epoch[at])]
            for at in order:
                if self._alone(epoch[at]):  # one long row: an ordinary batch takes it along
                    if not steps:
                        steps.append([])
                    steps[int(rng.integers(len(steps)))].append(epoch[at])
            self._plan += steps
        return [[self._rows[at] for at in rows] for rows in self._plan[step]]

    def _alone(self, rows: list[int]) -> bool:
        return len(rows) == 1 and 2 * len(self._rows[rows[0]].ids) > self._tokens

    def _place(self, at: int) -> tuple[int, int, int]:
        """Rows of one head together, then by length."""
        row = self._rows[at]
        return self._heads[row.head], len(row.ids), at

    def _alike(self, one: int, other: int) -> bool:
        return self._rows[one].head == self._rows[other].head

    def batches(self, step: int, context_weight: float = CONTEXT_WEIGHT) -> list[Batch]:
        """The batches of one step, whose gradients are added; ``context_weight`` of what is only read."""
        rng = np.random.default_rng((self._seed, 2, step))
        if (step < self._drill_steps and rng.random() < 0.7) or not self._rows:
            rows, budget = [], self._tokens
            while budget > 0:
                rows.append(drill(rng, self._words, self._newline, self._separators))
                budget -= len(rows[-1].ids)
            return [collate(rows, self._pad, rng, context_weight)]
        first, *long = self._rows_of(step)
        return [
            collate(first, self._pad, rng, context_weight),
            *(collate(rows, self._pad, None) for rows in long),
        ]


def collate(
    rows: Sequence[Row],
    pad: int,
    rng: np.random.Generator | None,
    context_weight: float = CONTEXT_WEIGHT,
) -> Batch:
    """Rows as one batch. Without ``rng`` no read-only token is predicted."""
    width = max(len(row.ids) for row in rows)
    ids = np.full((len(rows), width), pad, dtype=np.int64)
    weights = np.zeros((len(rows), width), dtype=np.float32)
    valid = np.zeros((len(rows), width), dtype=bool)
    for at, row in enumerate(rows):
        ids[at, : len(row.ids)] = row.ids
        weights[at, : len(row.ids)] = row.weights
        valid[at, : len(row.ids)] = True
    read_only = weights < 0
    weights[read_only] = 0.0
    if rng is not None:
        weights[read_only & (rng.random(weights.shape) < CONTEXT_SHARE)] = context_weight
    # position t predicts the token at t + 1
    row_index, column = np.nonzero(weights[:, 1:])
    return Batch(
        rows[0].head,
        torch.from_numpy(ids),
        torch.from_numpy(row_index * width + column),
        torch.from_numpy(ids[row_index, column + 1]),
        torch.from_numpy(weights[row_index, column + 1]),
        torch.from_numpy(valid),
    )
