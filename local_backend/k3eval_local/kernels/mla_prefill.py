"""MLA prefill in the expanded form: causal attention with an online softmax over packed sequences.

Queries and keys are nope + slot wide; the slot half of a key is one row shared by all heads, so it is read
from the latent and never expanded. A program takes 64 query rows of one head of one sequence.
Reference: ``mla_expanded`` in ``k3eval_local.model.mla``. Source: K3 report section 2.1.2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _prefill_kernel(
    q_ptr,
    k_ptr,
    slot_ptr,
    v_ptr,
    cu_q_ptr,
    cu_k_ptr,
    o_ptr,
    stride_q,
    stride_k,
    stride_slot,
    stride_v,
    stride_o,
    scale,
    N: tl.constexpr,
    SLOT: tl.constexpr,
    SLOT_PAD: tl.constexpr,
    V: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    UP: tl.constexpr,
):
    tile = tl.program_id(0)
    head = tl.program_id(1)
    seq = tl.program_id(2)
    q_begin = tl.load(cu_q_ptr + seq)
    rows = tl.load(cu_q_ptr + seq + 1) - q_begin
    if tile * BM >= rows:
        return
    k_begin = tl.load(cu_k_ptr + seq)
    keys = tl.load(cu_k_ptr + seq + 1) - k_begin
    m = tile * BM + tl.arange(0, BM)
    n = tl.arange(0, N)
    s = tl.arange(0, SLOT_PAD)
    v = tl.arange(0, V)
    position = keys - rows + m  # of each query in its sequence
    at = q_ptr + (q_begin + m)[:, None] * stride_q + head * (N + SLOT)
    q_nope = tl.load(at + n[None, :], mask=(m < rows)[:, None], other=0.0)
    q_slot = tl.load(at + N + s[None, :], mask=(m < rows)[:, None] & (s < SLOT)[None, :], other=0.0)
    if UP:
        q_nope = q_nope.to(tl.float32)
        q_slot = q_slot.to(tl.float32)
    peak = tl.full([BM], -1.0e30, tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, V], tl.float32)
    end = tl.minimum(keys, keys - rows + tile * BM + BM)
    for start in range(0, end, BN):
        j = start + tl.arange(0, BN)
        seen = j < keys
        key = tl.load(
            k_ptr + (k_begin + j)[:, None] * stride_k + head * N + n[None, :], mask=seen[:, None], other=0.0
        )
        slot = tl.load(
            slot_ptr + (k_begin + j)[:, None] * stride_slot + s[None, :],
            mask=seen[:, None] & (s < SLOT)[None, :],
            other=0.0,
        )
        value = tl.load(
            v_ptr + (k_begin + j)[:, None] * stride_v + head * V + v[None, :], mask=seen[:, None], other=0.0
        )
        if UP:
            key = key.to(tl.float32)
            slot = slot.to(tl.float32)
            value = value.to(tl.float32)
        score = tl.dot(q_nope, tl.trans(key), input_precision="ieee")
        score += tl.dot(q_slot, tl.trans(slot), input_precision="ieee")
        visible = (j[None, :] <= position[:, None]) & seen[None, :]
        score = tl.where(visible, score * scale, -1.0e30)
        top = tl.maximum(peak, tl.max(score, 1))
        keep = tl.exp(peak - top)
        p = tl.where(visible, tl.exp(score - top[:, None]), 0.0)
        total = total * keep + tl.sum(p, 1)
        acc = acc * keep[:, None] + tl.dot(p.to(value.dtype), value, input_precision="ieee")
        peak = top
    o = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    out = o_ptr + (q_begin + m)[:, None] * stride_o + head * V + v[None, :]
    tl.store(out, o.to(o_ptr.dtype.element_ty), mask=(m < rows)[:, None])


def mla_prefill(
    q: Tensor,
    keys: Tensor,
    slot: Tensor,
    values: Tensor,
    cu_queries: Tensor,
    cu_keys: Tensor,
    *,
    longest: int,
) -> Tensor:
    """Causal attention of packed sequences whose queries are the last tokens of their keys.

    Args:
        q: [Tq, H, nope + slot]. keys: [Tk, H, nope]. slot: [Tk, slot]. values: [Tk, H, v]. Rows contiguous;
            nope and v powers of two of at least 16.
        cu_queries, cu_keys: [N + 1] int64 cumulative lengths. longest: most queries of a sequence (sizes
            the grid).

    Returns:
        [Tq, H, v] in q's dtype, before the output gate.
    """
    rows, H, width = q.shape
    n, v = keys.shape[2], values.shape[2]
    for name, size in (("nope", n), ("value", v)):
        if triton.next_power_of_2(size) != size or size < 16:
            raise ValueError(f"the {name} head size must be a power of two of at least 16, not {size}")
    o = torch.empty(rows, H, v, dtype=q.dtype, device=q.device)
    block = 64 if longest > 16 else 16
    if rows:
        _prefill_kernel[(triton.cdiv(longest, block), H, cu_queries.shape[0] - 1)](
            q,
            keys,
            slot,
            values,
            cu_queries,
            cu_keys,
            o,
            q.stride(0),
            keys.stride(0),
            slot.stride(0),
            values.stride(0),
            o.stride(0),
            width**-0.5,
            N=n,
            SLOT=width - n,
            SLOT_PAD=max(16, triton.next_power_of_2(width - n)),
            V=v,
            BM=block,
            BN=64 if longest > 16 else 32,
            UP=q.device.type == "cpu",
            num_warps=8 if longest > 16 else 4,
            num_stages=2,
        )
    return o
