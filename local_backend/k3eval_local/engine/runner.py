"""What the engine needs from a model, and nothing more: page and slot operations, prefill, decode.

The runner owns the tensors; the engine owns who uses which page and slot. `CacheLayout` tells the engine the
sizes it must account for. Everything is called from the engine's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from k3eval_local.engine.pages import Pages
from k3eval_local.engine.prefix import TokenArray

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class CacheLayout:
    """Sizes of the cache memory. A page holds `page_tokens` tokens of every attention layer."""

    vocab_size: int
    max_positions: int
    page_tokens: int
    page_bytes: int
    slot_bytes: int
    """Recurrent state of one running sequence, all layers."""
    state_pages: int
    """Pages that one saved recurrent state fills; 0 for a model without recurrent layers."""
    pages: int
    slots: int
    attention_parity: float
    """Context length at which attention costs a token as much as everything else in the model."""

    @property
    def total_bytes(self) -> int:
        """Everything that the runner reserves for caches and states."""
        return self.pages * self.page_bytes + self.slots * self.slot_bytes

    def pages_for(self, tokens: int) -> int:
        """Pages that `tokens` tokens fill."""
        return -(-tokens // self.page_tokens)


@dataclass(frozen=True)
class Row:
    """One sequence in a step: its slot, its block table and how many tokens the cache already holds."""

    slot: int
    table: Pages
    cached: int


class ModelRunner(Protocol):
    """A model with paged cache memory."""

    @property
    def layout(self) -> CacheLayout:
        """Sizes, fixed for the runner's life."""
        ...

    def prefill(self, row: Row, tokens: TokenArray, *, last: bool) -> torch.Tensor | None:
        """Runs `tokens` after the `row.cached` tokens of the sequence, writing cache and state.

        Returns the logits [vocab] after the final token when `last`, else None. The result does not depend
        on other sequences.
        """
        ...

    def decode(self, rows: Sequence[Row], tokens: Sequence[int]) -> torch.Tensor:
        """Runs one token of each row; returns logits [len(rows), vocab]."""
        ...

    def reset_state(self, slot: int) -> None:
        """Sets the slot's recurrent state to that of an empty sequence."""
        ...

    def save_state(self, slot: int, pages: Pages) -> None:
        """Copies the slot's recurrent state into `layout.state_pages` pages."""
        ...

    def load_state(self, slot: int, pages: Pages) -> None:
        """Copies a saved state into the slot."""
        ...

    def copy_page(self, source: int, target: int, tokens: int) -> None:
        """Copies the first `tokens` tokens of a page, all attention layers."""
        ...
