"""Absorbed MLA decode over a paged latent cache, split over the context, with a second reduction.

All heads share one key row of r + slot values whose first r are also the value. A program takes 16 heads of
one sequence and one part of its context, reads each page row once for all of them, and leaves a partial sum
with its maximum; a second kernel merges the parts.
Reference: ``mla_absorbed`` in ``k3eval_local.model.mla`` before W_UV. Source: K3 report section 2.1.2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

HEADS = 16
"""Heads of a program: the smallest tile of a tensor core."""


@triton.jit
def _split_kernel(
    q_ptr,
    cache_ptr,
    table_ptr,
    length_ptr,
    part_ptr,
    peak_ptr,
    stride_q,
    stride_head,
    stride_table,
    scale,
    heads,
    splits,
    R: tl.constexpr,
    SLOT: tl.constexpr,
    SLOT_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    HB: tl.constexpr,
    UP: tl.constexpr,
):
    seq = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HB + tl.arange(0, HB)
    part = tl.program_id(2)
    length = tl.load(length_ptr + seq)
    blocks = tl.cdiv(length, BLOCK)
    per = tl.cdiv(blocks, splits)
    first = part * per
    last = tl.minimum(first + per, blocks)
    W: tl.constexpr = R + SLOT
    c = tl.arange(0, R)
    s = tl.arange(0, SLOT_PAD)
    live = head < heads
    row = q_ptr + seq * stride_q + head[:, None] * stride_head
    q_latent = tl.load(row + c[None, :], mask=live[:, None], other=0.0)
    q_slot = tl.load(row + R + s[None, :], mask=live[:, None] & (s < SLOT)[None, :], other=0.0)
    peak = tl.full([HB], -1.0e30, tl.float32)
    total = tl.zeros([HB], tl.float32)
    acc = tl.zeros([HB, R], tl.float32)
    for block in range(first, last):
        token = block * BLOCK + tl.arange(0, BLOCK)
        seen = token < length
        page = tl.load(table_ptr + seq * stride_table + token // PAGE, mask=seen, other=0).to(tl.int64)
        at = (page * PAGE + token % PAGE) * W
        latent = tl.load(cache_ptr + at[:, None] + c[None, :], mask=seen[:, None], other=0.0)
        slot = tl.load(
            cache_ptr + at[:, None] + R + s[None, :], mask=seen[:, None] & (s < SLOT)[None, :], other=0.0
        )
        if UP:
            latent = latent.to(tl.float32)
            slot = slot.to(tl.float32)
            q_latent = q_latent.to(tl.float32)
            q_slot = q_slot.to(tl.float32)
        score = tl.dot(q_latent, tl.trans(latent), input_precision="ieee")
        score += tl.dot(q_slot, tl.trans(slot), input_precision="ieee")
        score = tl.where(seen[None, :], score * scale, -1.0e30)
        top = tl.maximum(peak, tl.max(score, 1))
        keep = tl.exp(peak - top)
        p = tl.where(seen[None, :], tl.exp(score - top[:, None]), 0.0)
        total = total * keep + tl.sum(p, 1)
        acc = acc * keep[:, None] + tl.dot(p.to(latent.dtype), latent, input_precision="ieee")
        peak = top
    at_part = (seq * heads + head) * splits + part
    tl.store(part_ptr + at_part[:, None] * R + c[None, :], acc, mask=live[:, None])
    tl.store(peak_ptr + at_part * 2, peak, mask=live)
    tl.store(peak_ptr + at_part * 2 + 1, total, mask=live)


@triton.jit
def _merge_kernel(part_ptr, peak_ptr, out_ptr, splits, R: tl.constexpr, SPLITS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, SPLITS)
    c = tl.arange(0, R)
    live = n < splits
    peaks = tl.load(peak_ptr + (row * splits + n) * 2, mask=live, other=-1.0e30)
    totals = tl.load(peak_ptr + (row * splits + n) * 2 + 1, mask=live, other=0.0)
    top = tl.max(peaks, 0)
    total = tl.sum(totals * tl.exp(peaks - top), 0)
    o = tl.zeros([R], tl.float32)
    for part in range(splits):
        weight = tl.exp(tl.load(peak_ptr + (row * splits + part) * 2) - top)
        o += tl.load(part_ptr + (row * splits + part) * R + c) * weight
    tl.store(out_ptr + row * R + c, (o / total).to(out_ptr.dtype.element_ty))


def mla_decode(
    q: Tensor,
    cache: Tensor,
    table: Tensor,
    lengths: Tensor,
    *,
    rank: int,
    scale: float,
    splits: int | None = None,
) -> Tensor:
    """One query token of each sequence against its cached context.

    Args:
        q: [B, H, r + slot], absorbed queries, last axis contiguous. cache: [pages, page, r + slot],
            contiguous, the page size a power of two. table: [B, most pages] int32. lengths: [B] int32, at
            least 1 each.
        rank: r, a power of two of at least 16. scale: (nope + slot)^-0.5. splits: parts of the context; by
            default enough to fill a large GPU.

    Returns:
        [B, H, r] in q's dtype, in the latent: W_UV comes after.
    """
    B, H, width = q.shape
    page = cache.shape[1]
    if triton.next_power_of_2(rank) != rank or rank < 16:
        raise ValueError(f"the latent rank must be a power of two of at least 16, not {rank}")
    groups = triton.cdiv(H, HEADS)
    if splits is None:
        longest = table.shape[1] * page
        splits = max(1, min(64, 264 // max(1, B * groups), triton.cdiv(longest, 512)))
    parts = torch.empty(B, H, splits, rank, dtype=torch.float32, device=q.device)
    peaks = torch.empty(B, H, splits, 2, dtype=torch.float32, device=q.device)
    out = torch.empty(B, H, rank, dtype=q.dtype, device=q.device)
    if B:
        _split_kernel[(B, groups, splits)](
            q,
            cache,
            table,
            lengths,
            parts,
            peaks,
            q.stride(0),
            q.stride(1),
            table.stride(0),
            scale,
            H,
            splits,
            R=rank,
            SLOT=width - rank,
            SLOT_PAD=max(16, triton.next_power_of_2(width - rank)),
            PAGE=page,
            BLOCK=32,
            HB=HEADS,
            UP=q.device.type == "cpu",
            num_warps=4,
            num_stages=2,
        )
        _merge_kernel[(B * H,)](
            parts, peaks, out, splits, R=rank, SPLITS=triton.next_power_of_2(splits), num_warps=4
        )
    return out
