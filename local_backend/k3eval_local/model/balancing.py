"""Quantile Balancing: the correction bias that gives every expert the same load (K3 report section 2.3).

With m tokens in a step, n experts and k of them a token, each expert should get q = m k / n tokens.
Token i takes expert j when ``s_ij + b_j`` is above its cutoff alpha_i, the (k+1)-th largest biased score,
that is when b_j is above ``r_ij = alpha_i - s_ij``. So the new b_j is the (k / n)-quantile of r_:j over
the tokens; then the mean over experts is subtracted. It counts from the next step on. There is no
gradient, no loss term and no step size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from k3eval_local.model.decoder import K3Model

BalancingForm = Literal["exact", "histogram"]


def required_bias(scores: Tensor, bias: Tensor, top_k: int) -> Tensor:
    """Bias from which each token takes each expert, r [N, E].

    scores: [N, E] raw, bias: [E] that routes now; k must be below E.
    """
    cutoff = (scores + bias).topk(top_k + 1, dim=-1).values[:, -1:]
    return cutoff - scores


def exact_bias(required: Tensor, top_k: int) -> Tensor:
    """The (k / E)-quantile of each column of r [m, E] (its ceil(m k / E)-th smallest value), centred: [E]."""
    tokens, experts = required.shape
    rank = math.ceil(tokens * top_k / experts)
    bias = required.kthvalue(rank, dim=0).values
    return bias - bias.mean()


@dataclass
class BiasHistogram:
    """Counts of r in equal bins, E rows: adds over micro-batches and devices as plain integers.

    Scores lie in (0, 1), so r lies in [min b - 1, max b + 1]: the range is known before the step.
    """

    low: float
    width: float
    counts: Tensor
    """[E, bins] int64."""

    @classmethod
    def for_bias(cls, bias: Tensor, bins: int = 1000) -> BiasHistogram:
        """An empty histogram for a step that routes with ``bias`` [E]."""
        low, high = float(bias.min()) - 1, float(bias.max()) + 1
        counts = torch.zeros(bias.shape[0], bins, dtype=torch.int64, device=bias.device)
        return cls(low, (high - low) / bins, counts)

    def add(self, required: Tensor) -> None:
        """Count r [N, E]."""
        bins = self.counts.shape[1]
        bin_of = ((required - self.low) / self.width).floor().clamp(0, bins - 1).to(torch.int64)
        self.counts.scatter_add_(1, bin_of.T, torch.ones_like(bin_of.T))

    def quantile(self, top_k: int) -> Tensor:
        """Estimate of each expert's quantile [E], within one bin of the exact one, not centred.

        The first bin whose running count reaches ceil(q), and inside it the place where q is reached.
        """
        experts = self.counts.shape[0]
        tokens = int(self.counts[0].sum())
        target = tokens * top_k / experts
        running = self.counts.cumsum(1)
        found = (running < math.ceil(target)).sum(1, keepdim=True)
        inside = self.counts.gather(1, found)[:, 0]
        before = running.gather(1, found)[:, 0] - inside
        share = ((target - before.to(torch.float64)) / inside).clamp(0, 1)
        return self.low + (found[:, 0] + share) * self.width


class QuantileBalancer:
    """Watches the router during training steps and sets the correction biases after each.

    Pass it as ``observer`` to ``K3Model.forward`` for the micro-batches of a step, then call ``step``.
    Padding never reaches it (give ``lengths``), and evaluation must run without it.

    Args:
        model: whose biases are set.
        form: ``histogram`` as in the report, or ``exact``, which keeps every score of the step.
        bins: of the histogram.
        ema: share of the old bias that is kept, 0 for none.
    """

    def __init__(
        self, model: K3Model, form: BalancingForm = "histogram", *, bins: int = 1000, ema: float = 0.0
    ) -> None:
        if not 0 <= ema < 1:
            raise ValueError(f"ema must be at least 0 and below 1, not {ema}")
        self._gates = {
            index: layer.block_sparse_moe.gate for index, layer in enumerate(model.layers) if layer.is_moe
        }
        self._top_k = model.config.num_experts_per_token
        self._form, self._bins, self._ema = form, bins, ema
        self._required: dict[int, list[Tensor]] = {}
        self._histograms: dict[int, BiasHistogram] = {}
        self._loads: dict[int, Tensor] = {}

    def observe(self, layer: int, scores: Tensor, bias: Tensor) -> None:
        """Take in one micro-batch's scores [N, E] of one layer, made with ``bias`` [E]."""
        experts = scores.shape[1]
        if scores.shape[0] == 0:
            return
        chosen = (scores + bias).topk(self._top_k, dim=-1).indices.flatten().bincount(minlength=experts)
        self._loads[layer] = self._loads.get(layer, torch.zeros_like(chosen)) + chosen
        if self._top_k == experts:
            return
        required = required_bias(scores, bias, self._top_k)
        if self._form == "exact":
            self._required.setdefault(layer, []).append(required)
        else:
            if layer not in self._histograms:
                self._histograms[layer] = BiasHistogram.for_bias(bias, self._bins)
            self._histograms[layer].add(required)

    def step(self) -> dict[int, Tensor]:
        """Set the biases for the next step; returns each layer's load [E] in tokens during this one."""
        for layer, gate in self._gates.items():
            if layer in self._required:
                bias = exact_bias(torch.cat(self._required[layer]), self._top_k)
            elif layer in self._histograms:
                bias = self._histograms[layer].quantile(self._top_k)
                bias = bias - bias.mean()
            else:
                continue
            old = gate.e_score_correction_bias
            old.copy_(self._ema * old + (1 - self._ema) * bias)
        loads = self._loads
        self._required, self._histograms, self._loads = {}, {}, {}
        return loads
