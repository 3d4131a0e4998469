"""MXFP4 as Kimi K3 stores its routed experts: E2M1 values in groups of 32 with one E8M0 scale.

A weight [..., in] becomes ``packed`` uint8 [..., in / 2] and ``scale`` uint8 [..., in / 32]. The low nibble
of a byte is the even element. A scale byte e means 2^(e - 127). Source: the OCP microscaling format, as
compressed-tensors' ``mxfp4-pack-quantized`` writes it.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32
_BIAS = 127
_LARGEST_EXPONENT = 2
"""floor(log2(6)): 6 is the largest E2M1 value."""
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = _MAGNITUDES + tuple(-value for value in _MAGNITUDES)
"""What each 4-bit code means; bit 3 is the sign."""
_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Half-way points between neighbouring magnitudes; ties go to the even code."""


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round to MXFP4: weight [..., in] -> (packed uint8 [..., in / 2], scale uint8 [..., in / 32]).

    The scale of a group is 2^(floor(log2(max |w|)) - 2); what then exceeds 6 saturates.

    Raises:
        ValueError: ``in`` is not a multiple of 32, or a weight is not finite.
    """
    if weight.shape[-1] % GROUP:
        raise ValueError(f"MXFP4 needs a last axis that is a multiple of {GROUP}, not {weight.shape[-1]}")
    groups = weight.detach().to(torch.float64).reshape(*weight.shape[:-1], -1, GROUP)
    if not torch.isfinite(groups).all():
        raise ValueError("MXFP4 cannot hold infinities or NaN")
    peak = groups.abs().amax(-1)
    exponent = torch.frexp(peak).exponent - 1 - _LARGEST_EXPONENT
    exponent = torch.where(peak > 0, exponent, -_BIAS).clamp(-_BIAS, _BIAS)
    scaled = torch.ldexp(groups, -exponent[..., None])
    bounds = torch.tensor(_BOUNDS, dtype=torch.float64, device=weight.device)
    magnitude = scaled.abs().contiguous()
    below = torch.bucketize(magnitude, bounds)
    above = torch.bucketize(magnitude, bounds, right=True)
    code = torch.where(below % 2 == 0, below, above)
    code = code | (torch.signbit(scaled).to(torch.int64) << 3)
    code = code.flatten(-2).to(torch.uint8)
    packed = code[..., 0::2] | (code[..., 1::2] << 4)
    return packed, (exponent + _BIAS).to(torch.uint8)


def dequantize(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Exact values: packed uint8 [..., in / 2], scale uint8 [..., in / 32] -> [..., in] in ``dtype``."""
    if packed.shape[-1] * 2 != scale.shape[-1] * GROUP:
        raise ValueError(f"packed {tuple(packed.shape)} and scale {tuple(scale.shape)} do not fit each other")
    table = torch.tensor(VALUES, dtype=dtype, device=packed.device)
    codes = torch.stack([packed & 0x0F, packed >> 4], dim=-1).flatten(-2)
    values = table[codes.to(torch.int64)].view(*scale.shape, GROUP)
    return torch.ldexp(values, (scale.to(torch.int32) - _BIAS)[..., None]).flatten(-2)
