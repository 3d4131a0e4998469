"""RMSNorm of rows, fp32 inside. Reference: ``k3eval_local.model.norm.rmsnorm``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rmsnorm_kernel(x_ptr, weight_ptr, y_ptr, stride_x, stride_y, width, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    keep = cols < width
    x = tl.load(x_ptr + row * stride_x + cols, mask=keep, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + cols, mask=keep, other=0.0).to(tl.float32)
    y = x / tl.sqrt(tl.sum(x * x, 0) / width + eps) * weight
    tl.store(y_ptr + row * stride_y + cols, y.to(y_ptr.dtype.element_ty), mask=keep)


def rmsnorm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """X [N, d] with contiguous rows, weight [d]; returns [N, d] in x's dtype."""
    rows, width = x.shape
    y = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    if y.numel():
        block = triton.next_power_of_2(width)
        _rmsnorm_kernel[(rows,)](
            x,
            weight,
            y,
            x.stride(0),
            y.stride(0),
            width,
            eps,
            BLOCK=block,
            num_warps=4 if block <= 2048 else 8,
        )
    return y
