"""RMSNorm and the L2 norm of KDA's queries and keys, computed in fp32 (fp64 stays fp64)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which norms, gates, the router and the KDA state are computed: fp32, or fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def exact(device: torch.device) -> AbstractContextManager[object]:
    """Context in which ``torch.autocast`` does not touch products that K3 computes in fp32."""
    if device.type == "meta":  # has no autocast
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last axis; same shape and dtype as ``x``.

    Source: K3 report section 2 (pre-norm, eps 1e-5).
    """
    wider = x.to(wide(x.dtype))
    scaled = wider * torch.rsqrt(wider.square().mean(-1, keepdim=True) + eps)
    return (scaled * weight).to(x.dtype)


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """``x / sqrt(sum(x^2) + eps)`` over the last axis. Source: fla ``l2norm``, as KDA's kernels use it."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


class RMSNorm(nn.Module):
    """Holds one RMSNorm weight [width]."""

    def __init__(self, width: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis."""
        return rmsnorm(x, self.weight, self.eps)
