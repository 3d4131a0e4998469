"""SiTU-GLU in one pass: ``beta1 tanh(a / beta1) sigmoid(a) * beta2 tanh(b / beta2)``, fp32 inside.

Reference: ``k3eval_local.model.situ.situ_glu``. Source: K3 report section 2.3.2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def tanh(x):
    """Tanh by exp of a non-positive argument: no overflow at either end."""
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def situ(a, b, beta_gate: tl.constexpr, beta_up: tl.constexpr):
    """The activation of two fp32 tiles."""
    return beta_gate * tanh(a / beta_gate) * tl.sigmoid(a) * (beta_up * tanh(b / beta_up))


@triton.jit
def _situ_kernel(
    x_ptr,
    y_ptr,
    stride_x,
    stride_y,
    width,
    beta_gate: tl.constexpr,
    beta_up: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = cols < width
    a = tl.load(x_ptr + row * stride_x + cols, mask=keep, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + row * stride_x + width + cols, mask=keep, other=0.0).to(tl.float32)
    y = situ(a, b, beta_gate, beta_up)
    tl.store(y_ptr + row * stride_y + cols, y.to(y_ptr.dtype.element_ty), mask=keep)


def situ_glu(x: Tensor, beta_gate: float = 4.0, beta_up: float = 25.0) -> Tensor:
    """X [N, 2 w], gate and up halves side by side, rows contiguous; returns [N, w] in x's dtype."""
    rows, double = x.shape
    width = double // 2
    y = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    if y.numel():
        block = min(1024, triton.next_power_of_2(width))
        _situ_kernel[(rows, triton.cdiv(width, block))](
            x, y, x.stride(0), y.stride(0), width, beta_gate, beta_up, BLOCK=block, num_warps=4
        )
    return y
