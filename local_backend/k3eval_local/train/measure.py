"""How often the model repeats whole conversations, from one parallel pass instead of token-by-token writing.

Greedy writing reproduces a recorded turn exactly if, and only if, every token of it is the most likely one
given the true text before it. A conversation whose turns are all reproduced would therefore have been played
out live to the same end, because equal calls give equal tool results. The share of such conversations is the
*replay pass rate*: a lower bound of the live pass rate (another right way counts as a miss).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from k3eval_local.model.decoder import K3Model
from k3eval_local.train.batches import Batch, collate, row_of
from k3eval_local.train.forward import LayerCarry, Precision, hidden, logits
from k3eval_local.train.render import Example

_PART_TOKENS = 16_384


@dataclass(frozen=True)
class Score:
    """One conversation: which of its turns are reproduced, and the summed loss over their tokens."""

    id: str
    kind: str
    turns: tuple[bool, ...]
    loss: float
    tokens: int

    @property
    def passed(self) -> bool:
        """Every trained turn is reproduced."""
        return all(self.turns)


@torch.no_grad()
def head_carry(
    model: K3Model, head: Sequence[int], precision: Precision | None = None
) -> list[LayerCarry] | None:
    """What the shared head leaves to the rows; None for an empty head."""
    if not head:
        return None
    return hidden(model, torch.tensor([head]), precision=precision)[1]


@torch.no_grad()
def replay(
    model: K3Model,
    examples: Iterable[Example],
    *,
    pad: int,
    rows: int = 8,
    turns: int | None = None,
    precision: Precision | None = None,
) -> list[Score]:
    """Score every example, in the order given; only the first ``turns`` written turns where that is set.

    Up to ``rows`` examples are run together, fewer where they are long.
    """
    every = sorted(
        ((at, _prepared(example, turns)) for at, example in enumerate(examples)),
        key=lambda pair: len(pair[1].ids),
    )
    scores: dict[int, Score] = {}
    carry: list[LayerCarry] | None = None
    known: tuple[int, ...] | None = None
    for part in _parts_of(every, rows):
        for head in sorted({example.ids[: example.prefix] for _, example in part}):
            same = [(at, example) for at, example in part if example.ids[: example.prefix] == head]
            if head != known:
                carry, known = head_carry(model, head, precision), head
            batch = collate([row_of(example) for _, example in same], pad, None)
            right, loss = _predict(model, batch, carry, precision)
            width = batch.ids.shape[1]
            for line, (at, example) in enumerate(same):
                scores[at] = _score(example, right, loss, batch.positions, line * width)
    return [scores[at] for at in range(len(every))]


def _prepared(example: Example, turns: int | None) -> Example:
    short = example if turns is None else example.first(turns)
    # behind a shared head attention needs a mask, which grows with the square of the length
    return replace(short, prefix=0) if len(short.ids) > _PART_TOKENS // 2 else short


def _parts_of(every: list[tuple[int, Example]], rows: int) -> Iterator[list[tuple[int, Example]]]:
    """Neighbours together: at most ``rows``, and at most _PART_TOKENS tokens where it is more than one."""
    while every:
        count = rows
        while count > 1 and count * len(every[min(count, len(every)) - 1][1].ids) > _PART_TOKENS:
            count -= 1
        yield every[:count]
        every = every[count:]


def _predict(
    model: K3Model, batch: Batch, carry: list[LayerCarry] | None, precision: Precision | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether each chosen target is the most likely token, and its loss."""
    out, _ = hidden(model, batch.ids, carry, precision=precision)
    right, losses = [], []
    for where, target in zip(_parts(batch.positions), _parts(batch.targets), strict=True):
        scores = logits(model, out.flatten(0, 1)[where], precision)
        right.append(scores.argmax(-1) == target)
        losses.append(torch.nn.functional.cross_entropy(scores, target, reduction="none"))
    return torch.cat(right), torch.cat(losses)


def _parts(values: torch.Tensor) -> Sequence[torch.Tensor]:
    """At most 1024 of the values at a time: their logits are large."""
    return values.tensor_split(list(range(1024, len(values), 1024))) if len(values) else []


def _score(
    example: Example, right: torch.Tensor, loss: torch.Tensor, positions: torch.Tensor, base: int
) -> Score:
    turns: list[bool] = []
    total, count = 0.0, 0
    for turn in example.turns:
        if turn.trained:
            low, high = base + turn.start - example.prefix - 1, base + turn.end - example.prefix - 1
            own = (positions >= low) & (positions < high)
            turns.append(bool(right[own].all()))
            total, count = total + float(loss[own].sum()), count + int(own.sum())
    return Score(example.id, example.kind, tuple(turns), total, count)


def pass_rate(scores: Sequence[Score]) -> float:
    """Share of conversations that are reproduced whole."""
    return sum(score.passed for score in scores) / max(1, len(scores))


def turn_columns(scores: Sequence[Score]) -> list[list[bool]]:
    """Whether the first turns, second turns, ... are reproduced, of the conversations that have them."""
    longest = max((len(score.turns) for score in scores), default=0)
    return [[score.turns[at] for score in scores if len(score.turns) > at] for at in range(longest)]


def turn_rates(scores: Sequence[Score]) -> list[float]:
    """Share of reproduced first turns, second turns, ..."""
    return [sum(column) / len(column) for column in turn_columns(scores)]
