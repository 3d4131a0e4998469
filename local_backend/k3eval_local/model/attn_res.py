"""Block Attention Residuals: each sublayer chooses what to read from depth (K3 report section 2.2).

Instead of one residual stream there is a bank of finished blocks and a partial sum p. Before every
attention, every feed-forward network and the head, a mix reads them::

    score_i = query . rms(row_i),  query = w * gamma (elementwise);   a = softmax(score);   sum_i a_i row_i

At a block's first layer p goes into the bank, and the new p is that layer's attention output alone.
Queries are parameters, so the bank's share of all mixes of a block can be computed at once (``two_phase``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from k3eval_local.model.norm import exact, wide

AttnResForm = Literal["direct", "two_phase"]


def row_scores(rows: Tensor, queries: Tensor, eps: float) -> Tensor:
    """``query . row / sqrt(mean(row^2) + eps)`` in fp32, without 1/sqrt(d).

    rows: [..., d], queries: [Q, d] -> [..., Q].
    """
    wider = rows.to(wide(rows.dtype))
    return (wider @ queries.T) * torch.rsqrt(wider.square().mean(-1, keepdim=True) + eps)


def mix(rows: Sequence[Tensor], query: Tensor, eps: float) -> Tensor:
    """Direct form: softmax over the rows' scores, then the weighted sum of the raw rows.

    rows: R tensors [..., d]; query: [d] = w * gamma -> [..., d].
    """
    stacked = torch.stack(list(rows), dim=-2)
    weights = row_scores(stacked, query[None], eps).softmax(-2)
    return (weights.transpose(-1, -2) @ stacked.to(weights.dtype)).squeeze(-2).to(stacked.dtype)


@dataclass(frozen=True)
class BankRead:
    """The bank's share of Q mixes, ready to be merged with a partial row.

    peak: [..., Q] largest score. total: [..., Q] sum of exp(score - peak). values: [..., Q, d] the sum of
    exp(score - peak) row.
    """

    peak: Tensor
    total: Tensor
    values: Tensor


def read_bank(bank: Sequence[Tensor], queries: Tensor, eps: float) -> BankRead:
    """Phase one: all queries of a block over the finished rows. bank: R x [..., d]; queries: [Q, d]."""
    stacked = torch.stack(list(bank), dim=-2)
    scores = row_scores(stacked, queries, eps)
    peak = scores.amax(-2)
    weights = (scores - peak[..., None, :]).exp()
    return BankRead(peak, weights.sum(-2), weights.transpose(-1, -2) @ stacked.to(weights.dtype))


def merge_partial(read: BankRead, which: int, partial: Tensor, query: Tensor, eps: float) -> Tensor:
    """Phase two: add the partial row to mix ``which`` by online softmax. partial: [..., d] -> [..., d]."""
    score = row_scores(partial, query[None], eps)
    peak = torch.maximum(read.peak[..., which : which + 1], score)
    keep, add = (read.peak[..., which : which + 1] - peak).exp(), (score - peak).exp()
    total = keep * read.total[..., which : which + 1] + add
    return ((keep * read.values[..., which, :] + add * partial) / total).to(partial.dtype)


class BlockStream:
    """The residual stream of one forward pass: read, write attention, read, write FFN, ... , read.

    queries: [2 L + 1, d] in the order in which mixes happen (attention and FFN of each layer, then the head).
    """

    def __init__(self, embedding: Tensor, queries: Tensor, block: int, eps: float, form: AttnResForm) -> None:
        self.bank: list[Tensor] = []
        self.partial = embedding
        self._queries, self._block, self._eps, self._form = queries, block, eps, form
        self._reads = 0
        self._layer = 0
        self._phase_one: BankRead | None = None
        self._phase_start = 0

    def read(self) -> Tensor:
        """The input of the next sublayer, [..., d]. The first one is the embedding itself."""
        which = self._reads
        self._reads += 1
        if not self.bank:
            return self.partial
        query = self._queries[which]
        with exact(self.partial.device):
            if self._form == "direct":
                return mix([*self.bank, self.partial], query, self._eps)
            if self._phase_one is None:
                self._phase_start = which
                ahead = self._queries[which : which + 2 * self._block]
                self._phase_one = read_bank(self.bank, ahead, self._eps)
            return merge_partial(self._phase_one, which - self._phase_start, self.partial, query, self._eps)

    def write_attention(self, output: Tensor) -> None:
        """Add an attention output; at a block's first layer close the block before it."""
        if self._layer % self._block == 0:
            self.bank.append(self.partial)
            self._phase_one = None
            self.partial = output
        else:
            self.partial = self.partial + output

    def write_ffn(self, output: Tensor) -> None:
        """Add a feed-forward output and go to the next layer."""
        self.partial = self.partial + output
        self._layer += 1
