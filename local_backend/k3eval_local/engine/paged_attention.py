"""Latent attention (absorbed MLA) over a paged cache, without copying long contexts.

Keys and values are the cached latents themselves, shared by all heads, so heads are query rows. A long
sequence is read stretch by stretch where it lies, and the parts are merged by their log-sum-exp (online
softmax). Short sequences of a batch are gathered and padded, which costs fewer operations than a loop.
Memory beyond a sequence's length may hold anything, NaN included: it never reaches a result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from k3eval_local.engine.pages import Pages, stretches

GATHER_TOKENS = 1024
"""Sequences up to this length are gathered when several decode together; measured on CPU."""
_GATHER_STRETCH_TOKENS = 1024
"""A sequence whose stretches are shorter than this on average is gathered too."""

Spans = tuple[tuple[int, int], ...]
"""Token ranges [start, stop) of the pool, in the sequence's order."""


def spans(table: Pages, length: int, page_tokens: int) -> Spans:
    """Where the first `length` tokens of a block table lie."""
    left, found = length, []
    for page, count in stretches(table[: -(-length // page_tokens)]):
        start = page * page_tokens
        stop = start + min(count * page_tokens, left)
        found.append((start, stop))
        left -= stop - start
    return tuple(found)


@dataclass(frozen=True)
class StreamedRow:
    """A row that is read where it lies: its spans; or, when those are too many, its page numbers."""

    row: int
    where: Spans
    length: int
    pages: Tensor | None


@dataclass(frozen=True)
class DecodePlan:
    """How a decode step reads the cache; made once a step, used by every layer.

    gathered: rows of the batch that are gathered. pages: [gathered, longest] int64 page numbers.
    visible: [gathered, longest * page_tokens] bool, which gathered tokens belong to the sequence.
    streamed: the other rows.
    """

    gathered: Tensor
    pages: Tensor
    visible: Tensor
    streamed: tuple[StreamedRow, ...]


def plan_decode(
    tables: Sequence[Pages], lengths: Sequence[int], page_tokens: int, device: torch.device
) -> DecodePlan:
    """Decides for each row of the batch. `lengths` include the token of this step."""
    short = [row for row, length in enumerate(lengths) if length <= GATHER_TOKENS]
    if len(short) < 2:
        short = []
    chosen = set(short)
    streamed: list[StreamedRow] = []
    for row, (table, length) in enumerate(zip(tables, lengths, strict=True)):
        if row in chosen:
            continue
        where = spans(table, length, page_tokens)
        scattered = len(where) > 1 and length < len(where) * _GATHER_STRETCH_TOKENS
        pages_of_row = None
        if scattered:
            pages_of_row = torch.from_numpy(table[: -(-length // page_tokens)]).long().to(device)
        streamed.append(StreamedRow(row, where, length, pages_of_row))
    counts = [-(-lengths[row] // page_tokens) for row in short]
    pages = np.zeros((len(short), max(counts, default=0)), dtype=np.int64)
    for i, (row, count) in enumerate(zip(short, counts, strict=True)):
        pages[i, :count] = tables[row][:count]
    limits = torch.tensor([lengths[row] for row in short], dtype=torch.int64)
    visible = torch.arange(pages.shape[1] * page_tokens)[None] < limits[:, None]
    return DecodePlan(
        torch.tensor(short, dtype=torch.int64, device=device),
        torch.from_numpy(pages).to(device),
        visible.to(device),
        tuple(streamed),
    )


def attend_decode(q: Tensor, cache: Tensor, plan: DecodePlan, scale: float) -> Tensor:
    """One query token a row. q: [B, H, W]; cache: [pages, page_tokens, W] -> [B, H, W] mean latents."""
    if not len(plan.gathered):
        parts = [_attend_streamed(q[how.row], cache, how, scale) for how in plan.streamed]
        return parts[0][None] if len(parts) == 1 else torch.stack(parts)
    rows, width = plan.pages.shape[0], q.shape[-1]
    keys = cache.flatten(1).index_select(0, plan.pages.flatten()).view(rows, 1, -1, width)
    keys.masked_fill_(~plan.visible[:, None, :, None], 0.0)
    everyone = rows == q.shape[0]
    picked = q if everyone else q.index_select(0, plan.gathered)
    mean = functional.scaled_dot_product_attention(
        picked[:, None], keys, keys, attn_mask=plan.visible[:, None, None], scale=scale
    )[:, 0]
    if everyone:
        return mean
    out = torch.empty_like(q).index_copy_(0, plan.gathered, mean)
    for how in plan.streamed:
        out[how.row] = _attend_streamed(q[how.row], cache, how, scale)
    return out


def attend_prefill(q: Tensor, fresh: Tensor, cache: Tensor, past: Spans, scale: float) -> Tensor:
    """A piece of a prompt: new tokens see the past in the cache, and each other causally.

    q: [T, H, W]; fresh: [T, W] the new tokens' latents; cache: [pages, page_tokens, W] -> [T, H, W].
    """
    T, H, W = q.shape
    flat = cache.flatten(0, 1)
    keys = fresh[None, None].expand(1, H, T, W)
    own, own_weight = _attend(q.transpose(0, 1)[None], keys, scale, causal=T > 1)
    outputs, weights = [own[0].transpose(0, 1)], [own_weight[0].transpose(0, 1)]
    rows = q.reshape(1, 1, T * H, W)
    for start, stop in past:
        mean, weight = _attend(rows, flat[None, None, start:stop], scale)
        outputs.append(mean.view(T, H, W))
        weights.append(weight.view(T, H))
    return _merge(outputs, weights)


def _attend_streamed(q: Tensor, cache: Tensor, how: StreamedRow, scale: float) -> Tensor:
    """One row: q [H, W] -> [H, W]."""
    rows, flat = q[None, None], cache.flatten(0, 1)
    if how.pages is not None:
        keys = cache.index_select(0, how.pages).flatten(0, 1)[None, None, : how.length]
        return _attend(rows, keys, scale)[0][0, 0]
    parts = [_attend(rows, flat[None, None, start:stop], scale) for start, stop in how.where]
    return _merge([mean[0, 0] for mean, _ in parts], [weight[0, 0] for _, weight in parts])


def _attend(q: Tensor, latents: Tensor, scale: float, *, causal: bool = False) -> tuple[Tensor, Tensor]:
    """q: [1, h, T, W]; latents: [1, h, S, W] -> means [1, h, T, W] and log-sum-exps [1, h, T] in fp32."""
    if q.device.type == "cpu":
        mean, weight = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, latents, latents, 0.0, causal, scale=scale
        )
        return mean, weight
    scores = (q @ latents.transpose(-1, -2)).float() * scale
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores.softmax(-1).to(q.dtype) @ latents, scores.logsumexp(-1)


def _merge(means: list[Tensor], weights: list[Tensor]) -> Tensor:
    """Means [..., W] over disjoint sets of keys with their log-sum-exps [...] -> the mean over all keys."""
    if len(means) == 1:
        return means[0]
    share = torch.stack(weights).softmax(0).to(means[0].dtype)
    return (torch.stack(means) * share[..., None]).sum(0)
