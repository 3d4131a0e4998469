"""One KDA decode step in one launch: convolution update, gate, delta step, output gate and head norm.

A program owns one head of one sequence: its convolution channels, its [d_k, d_v] state and its output.
States live in slots and are updated in place, fp32 or bf16. Bandwidth-bound: the state is read and written
once.
Reference: ``short_conv``, ``kda_gate``, ``kda_step`` and ``KDA.output`` in ``k3eval_local.model.kda``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _stream(x_ptr, conv_ptr, weight_ptr, token, slot, channel, stride_x, stride_slot, stride_tap):
    """Convolve one stream's channels with SiLU, and shift the three carried inputs."""
    x3 = tl.load(x_ptr + token * stride_x + channel).to(tl.float32)
    base = conv_ptr + slot * stride_slot + channel
    x0 = tl.load(base)
    x1 = tl.load(base + stride_tap)
    x2 = tl.load(base + 2 * stride_tap)
    w = weight_ptr + channel * 4
    y = x0.to(tl.float32) * tl.load(w) + x1.to(tl.float32) * tl.load(w + 1)
    y += x2.to(tl.float32) * tl.load(w + 2) + x3 * tl.load(w + 3)
    tl.store(base, x1)
    tl.store(base + stride_tap, x2)
    tl.store(base + 2 * stride_tap, x3.to(x2.dtype))
    return y * tl.sigmoid(y)


@triton.jit
def _decode_kernel(
    x_ptr,
    z_ptr,
    beta_ptr,
    gate_ptr,
    conv_ptr,
    state_ptr,
    slot_ptr,
    weight_ptr,
    rate_ptr,
    bias_ptr,
    norm_ptr,
    out_ptr,
    stride_x,
    stride_z,
    stride_beta,
    stride_gate,
    stride_slot,
    stride_tap,
    stride_state,
    stride_out,
    heads,
    scale,
    bound,
    eps,
    BOUNDED: tl.constexpr,
    K: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slot_ptr + token).to(tl.int64)
    if slot < 0:  # an empty row of a padded batch
        return
    cols = tl.arange(0, K)
    channel = head * K + cols
    width = heads * K
    q = _stream(x_ptr, conv_ptr, weight_ptr, token, slot, channel, stride_x, stride_slot, stride_tap)
    k = _stream(x_ptr, conv_ptr, weight_ptr, token, slot, width + channel, stride_x, stride_slot, stride_tap)
    v = _stream(
        x_ptr, conv_ptr, weight_ptr, token, slot, 2 * width + channel, stride_x, stride_slot, stride_tap
    )
    q = q * (scale / tl.sqrt(tl.sum(q * q, 0) + 1e-6))
    k = k / tl.sqrt(tl.sum(k * k, 0) + 1e-6)
    z = tl.load(z_ptr + token * stride_z + channel).to(tl.float32) + tl.load(bias_ptr + channel)
    rate = tl.load(rate_ptr + head)
    if BOUNDED:
        g = bound * tl.sigmoid(rate * z)
    else:
        g = -rate * tl.where(z > 20.0, z, tl.log(1.0 + tl.exp(tl.minimum(z, 20.0))))
    beta = tl.sigmoid(tl.load(beta_ptr + token * stride_beta + head).to(tl.float32))
    at = state_ptr + slot * stride_state + head * K * K + cols[:, None] * K + cols[None, :]
    stored = tl.load(at)
    S = stored.to(tl.float32) * tl.exp(g)[:, None]
    delta = beta * (v - tl.sum(S * k[:, None], 0))
    S += k[:, None] * delta[None, :]
    o = tl.sum(S * q[:, None], 0)
    tl.store(at, S.to(stored.dtype))
    weight = tl.load(norm_ptr + cols).to(tl.float32)
    gate = tl.sigmoid(tl.load(gate_ptr + token * stride_gate + channel).to(tl.float32))
    y = o / tl.sqrt(tl.sum(o * o, 0) / K + eps) * weight * gate
    tl.store(out_ptr + token * stride_out + channel, y.to(out_ptr.dtype.element_ty))


def kda_decode(
    x: Tensor,
    z: Tensor,
    beta: Tensor,
    gate: Tensor,
    conv: Tensor,
    state: Tensor,
    slots: Tensor,
    *,
    conv_weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    norm: Tensor,
    bound: float | None = -5.0,
    eps: float = 1e-5,
) -> Tensor:
    """One token of each sequence.

    Args:
        x: [B, 3 P], the projections of q, k and v. z: [B, P], the gate's before its bias. beta: [B, H],
            before the sigmoid. gate: [B, P], the output gate before the sigmoid. Rows contiguous, any float
            dtype.
        conv: [slots, 3, 3 P], carried inputs, oldest first; updated in place.
        state: [slots, H, K, K] fp32 or bf16; updated in place. K must be a power of two.
        slots: [B] int32, the slot of each sequence, all different; negative: leave the row out.
        conv_weight: [3 P, 4] fp32. A_log: [H] fp32. dt_bias: [P] fp32. norm: [K].
        bound: lower bound of the log-decay (Kimi K3); None: Kimi Linear's unbounded gate.

    Returns:
        [B, P] in x's dtype: the gated, normed output that ``o_proj`` takes.
    """
    B = x.shape[0]
    H, K = state.shape[1], state.shape[2]
    if triton.next_power_of_2(K) != K:
        raise ValueError(f"the head size must be a power of two, not {K}")
    out = torch.empty(B, H * K, dtype=x.dtype, device=x.device)
    if B:
        _decode_kernel[(B, H)](
            x,
            z,
            beta,
            gate,
            conv,
            state,
            slots,
            conv_weight,
            A_log.exp(),
            dt_bias,
            norm,
            out,
            x.stride(0),
            z.stride(0),
            beta.stride(0),
            gate.stride(0),
            conv.stride(0),
            conv.stride(1),
            state.stride(0),
            out.stride(0),
            H,
            K**-0.5,
            0.0 if bound is None else bound,
            eps,
            BOUNDED=bound is not None,
            K=K,
            num_warps=8 if K >= 128 else 4,
        )
    return out
