"""Block Attention Residuals: score, softmax and mix of all sources in one pass, and the RMSNorm that
follows.

Every source row is read once. Its score needs the row's RMS, and the mix needs the softmax over sources;
both
run online: a running maximum, a running sum and a rescaled accumulator, as in attention with one query.
Reference: ``k3eval_local.model.attn_res``. Source: Attention Residuals (arXiv 2603.15031), K3 report
section 2.2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _mix_kernel(
    bank_ptr,
    partial_ptr,
    query_ptr,
    norm_ptr,
    mixed_ptr,
    out_ptr,
    stride_source,
    stride_bank,
    stride_partial,
    stride_mixed,
    stride_out,
    width,
    eps,
    SOURCES: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    keep = cols < width
    query = tl.load(query_ptr + cols, mask=keep, other=0.0)
    row = tl.load(partial_ptr + token * stride_partial + cols, mask=keep, other=0.0).to(tl.float32)
    top = tl.sum(query * row, 0) / tl.sqrt(tl.sum(row * row, 0) / width + eps)
    total = 1.0
    mix = row
    for source in range(SOURCES):
        row = tl.load(bank_ptr + source * stride_source + token * stride_bank + cols, mask=keep, other=0.0)
        row = row.to(tl.float32)
        score = tl.sum(query * row, 0) / tl.sqrt(tl.sum(row * row, 0) / width + eps)
        new_top = tl.maximum(top, score)
        old = tl.exp(top - new_top)
        weight = tl.exp(score - new_top)
        mix = mix * old + row * weight
        total = total * old + weight
        top = new_top
    mix = mix / total
    tl.store(mixed_ptr + token * stride_mixed + cols, mix.to(mixed_ptr.dtype.element_ty), mask=keep)
    if NORM:
        # the norm sees the mix as it is stored, like the reference
        seen = mix.to(mixed_ptr.dtype.element_ty).to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(seen * seen, 0) / width + eps)
        weight = tl.load(norm_ptr + cols, mask=keep, other=0.0).to(tl.float32)
        tl.store(
            out_ptr + token * stride_out + cols,
            (seen * scale * weight).to(out_ptr.dtype.element_ty),
            mask=keep,
        )


def attn_res_mix(
    bank: Tensor, partial: Tensor, query: Tensor, norm: Tensor | None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """Mix the sources of each token, then normalise.

    Args:
        bank: [sources, N, d], finished block sums; may hold 0 sources. partial: [N, d].
        query: [d] fp32, pseudo-query times the key norm's weight. norm: [d], weight of the RMSNorm that
            follows; None leaves it out.

    Returns:
        The mix [N, d] and its norm [N, d] (the mix again without a norm), in partial's dtype.
    """
    sources, rows, width = bank.shape
    mixed = torch.empty_like(partial)
    out = torch.empty_like(partial) if norm is not None else mixed
    if rows:
        block = triton.next_power_of_2(width)
        _mix_kernel[(rows,)](
            bank,
            partial,
            query,
            norm if norm is not None else query,
            mixed,
            out,
            bank.stride(0),
            bank.stride(1),
            partial.stride(0),
            mixed.stride(0),
            out.stride(0),
            width,
            eps,
            SOURCES=sources,
            NORM=norm is not None,
            BLOCK=block,
            num_warps=4 if block <= 2048 else 8,
        )
    return mixed, out
