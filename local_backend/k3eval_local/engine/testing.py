"""A `ModelRunner` without a model, for fast tests of the engine and of what is built on it.

The next token is a pure function of all tokens before it, computed from what lies in the slot *and* in the
pages: a wrong page, a state of another boundary or a write into somebody's memory changes the output, which
`expected_output` (a function of the tokens alone) reveals. Fresh memory is filled with garbage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from k3eval_local.engine.pages import Pages
from k3eval_local.engine.prefix import TokenArray
from k3eval_local.engine.runner import CacheLayout, Row

_PRIME = 1_000_003
_GARBAGE = 777_777


def _advance(state: int, tokens: Iterable[int]) -> int:
    for token in tokens:
        state = (state * 31 + token + 1) % _PRIME
    return state


def _logits(state: int, pages_sum: int, vocab_size: int) -> torch.Tensor:
    """Distinct values for distinct ids, so that the most likely token is unique."""
    mixed = torch.arange(vocab_size) * 7_919 + state * 131 + pages_sum
    return (mixed % _PRIME).float() / 1e5


def expected_output(prompt: Sequence[int], count: int, vocab_size: int) -> tuple[int, ...]:
    """The greedy output that a correct engine produces over a `FakeRunner`."""
    tokens = list(prompt)
    for _ in range(count):
        pages_sum = sum((i + 1) * (token + 1) for i, token in enumerate(tokens)) % _PRIME
        tokens.append(int(_logits(_advance(0, tokens), pages_sum, vocab_size).argmax()))
    return tuple(tokens[len(prompt) :])


@dataclass(frozen=True)
class Call:
    """One call of the runner. slot: of a prefill."""

    kind: Literal["prefill", "decode"]
    tokens: int
    slot: int | None = None


class FakeRunner:
    """Deterministic stand-in for a model; counts what it runs.

    before_run: called with the tokens of each prefill or decode before anything happens; it may raise.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 64,
        pages: int = 256,
        slots: int = 8,
        page_tokens: int = 4,
        state_pages: int = 2,
        max_positions: int = 1_048_576,
        attention_parity: float = 1e9,
        before_run: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        self.layout = CacheLayout(
            vocab_size=vocab_size,
            max_positions=max_positions,
            page_tokens=page_tokens,
            page_bytes=page_tokens * 8,
            slot_bytes=state_pages * page_tokens * 8,
            state_pages=state_pages,
            pages=pages,
            slots=slots,
            attention_parity=attention_parity,
        )
        self._before_run = before_run
        self._pool = np.full((pages, page_tokens), _GARBAGE, dtype=np.int64)
        self._states = np.full(slots, _GARBAGE, dtype=np.int64)
        self.calls: list[Call] = []
        """Everything that was run, in order."""

    @property
    def tokens_run(self) -> int:
        """Tokens that the model ran in all."""
        return sum(call.tokens for call in self.calls)

    def prefill(self, row: Row, tokens: TokenArray, *, last: bool) -> torch.Tensor | None:
        """Runs a piece of a prompt."""
        ids = [int(token) for token in tokens]
        if self._before_run is not None:
            self._before_run(ids)
        self.calls.append(Call("prefill", len(ids), row.slot))
        logits = self._run(row, ids)
        return logits if last else None

    def decode(self, rows: Sequence[Row], tokens: Sequence[int]) -> torch.Tensor:
        """Runs one token a row."""
        if self._before_run is not None:
            self._before_run(tokens)
        self.calls.append(Call("decode", len(rows)))
        return torch.stack([self._run(row, [token]) for row, token in zip(rows, tokens, strict=True)])

    def reset_state(self, slot: int) -> None:
        """Empty sequence."""
        self._states[slot] = 0

    def save_state(self, slot: int, pages: Pages) -> None:
        """Overwrites whole pages, so a page that somebody else holds is noticed."""
        self._pool[pages] = self._states[slot]

    def load_state(self, slot: int, pages: Pages) -> None:
        """All saved copies must agree; without state pages there is no state to restore."""
        values = set(self._pool[pages].flatten().tolist()) or {0}
        self._states[slot] = values.pop() if len(values) == 1 else _GARBAGE

    def copy_page(self, source: int, target: int, tokens: int) -> None:
        """First tokens of a page."""
        self._pool[target, :tokens] = self._pool[source, :tokens]

    def _run(self, row: Row, ids: Sequence[int]) -> torch.Tensor:
        size, length = self.layout.page_tokens, row.cached + len(ids)
        for i, token in enumerate(ids, start=row.cached):
            self._pool[row.table[i // size], i % size] = token + 1
        cached = self._pool[row.table].flatten()[:length]
        pages_sum = int((cached * np.arange(1, length + 1)).sum() % _PRIME)
        if self.layout.state_pages:
            self._states[row.slot] = _advance(int(self._states[row.slot]), ids)
            state = int(self._states[row.slot])
        else:
            state = _advance(0, (cached - 1).tolist())
        return _logits(state, pages_sum, self.layout.vocab_size)
