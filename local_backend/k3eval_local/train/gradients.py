"""Elementwise parts of the training forward with gradients written out: fewer passes over memory.

Each function equals the plain torch expression in its docstring; a test compares values and gradients.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):  # type: ignore[no-untyped-def]  # torch's own signature is untyped
        inverse = torch.rsqrt(
            torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps)
        )
        normed = x * inverse
        ctx.save_for_backward(normed, inverse, weight)
        return normed * weight

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]  # torch's own signature is untyped
        normed, inverse, weight = ctx.saved_tensors
        grad_weight = (grad * normed).flatten(0, -2).sum(0)
        inner = grad * weight
        along = (inner * normed).mean(-1, keepdim=True)
        return torch.addcmul(inner, normed, along, value=-1).mul_(inverse), grad_weight, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last axis."""
    result: Tensor = _RMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]  # torch leaves apply untyped
    return result


class _Situ(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, beta, linear_beta):  # type: ignore[no-untyped-def]  # torch's own signature is untyped
        soft, sigmoid = torch.tanh(a / beta), torch.sigmoid(a)
        up = torch.tanh(b / linear_beta)
        ctx.save_for_backward(soft, sigmoid, up)
        ctx.betas = (beta, linear_beta)
        return (soft * sigmoid).mul_(up).mul_(beta * linear_beta)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]  # torch's own signature is untyped
        soft, sigmoid, up = ctx.saved_tensors
        beta, linear_beta = ctx.betas
        gated = grad * sigmoid
        to_b = (gated * soft).mul_(torch.addcmul(torch.full_like(up, beta), up, up, value=-beta))
        inner = (1 - soft * soft).mul_(linear_beta)
        inner.addcmul_(soft, 1 - sigmoid, value=beta * linear_beta)
        return inner.mul_(gated).mul_(up), to_b, None, None


def situ(a: Tensor, b: Tensor, beta: float, linear_beta: float) -> Tensor:
    """``beta tanh(a / beta) sigmoid(a) * linear_beta tanh(b / linear_beta)``."""
    result: Tensor = _Situ.apply(a, b, beta, linear_beta)  # type: ignore[no-untyped-call]  # as above
    return result


class _ConvSilu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, joined, weight):  # type: ignore[no-untyped-def]  # torch's own signature is untyped
        taps = weight.shape[1]
        length = joined.shape[1] - taps + 1
        y = joined[:, :length] * weight[:, 0]
        for tap in range(1, taps):
            y.addcmul_(joined[:, tap : tap + length], weight[:, tap])
        ctx.save_for_backward(joined, weight, y)
        return functional.silu(y)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]  # torch's own signature is untyped
        joined, weight, y = ctx.saved_tensors
        length, taps = y.shape[1], weight.shape[1]
        grad = torch.ops.aten.silu_backward(grad, y)
        to_joined, to_weight = torch.zeros_like(joined), torch.empty_like(weight)
        for tap in range(taps):
            to_joined[:, tap : tap + length].addcmul_(grad, weight[:, tap])
            to_weight[:, tap] = (grad * joined[:, tap : tap + length]).flatten(0, 1).sum(0)
        return to_joined, to_weight


def conv_silu(joined: Tensor, weight: Tensor) -> Tensor:
    """Causal depthwise convolution and SiLU: joined [B, k - 1 + T, C], weight [C, k] -> [B, T, C]."""
    result: Tensor = _ConvSilu.apply(joined, weight)  # type: ignore[no-untyped-call]  # as above
    return result


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weights, *rows):  # type: ignore[no-untyped-def]  # torch's own signature is untyped
        ctx.save_for_backward(weights, *rows)
        out = rows[0] * weights[..., :1]
        for at, row in enumerate(rows[1:], start=1):
            out.addcmul_(row, weights[..., at : at + 1])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]  # torch's own signature is untyped
        weights, *rows = ctx.saved_tensors
        to_weights = torch.cat([(grad * row).sum(-1, keepdim=True) for row in rows], dim=-1)
        return to_weights, *(grad * weights[..., at : at + 1] for at in range(len(rows)))


def combine(weights: Tensor, rows: Sequence[Tensor]) -> Tensor:
    """``sum_i weights[..., i] rows[i]``: weights [..., R], R rows [..., d] -> [..., d]."""
    result: Tensor = _Combine.apply(weights, *rows)  # type: ignore[no-untyped-call]  # as above
    return result


__all__ = ["FunctionCtx", "combine", "conv_silu", "rms_norm", "situ"]
