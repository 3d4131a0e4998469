"""Latent MoE: an fp32 router with top-k, and grouped products over the experts hit, bf16 or MXFP4 weights.

Pairs of token and expert are sorted by expert and cut into blocks of 16 rows of one expert. The first
product applies SiTU-GLU to its result before it is stored, the second weights it; a last kernel adds the k
rows of each token in a fixed order, so that the sum does not depend on timing. MXFP4 weights are unpacked
in the kernel.
Reference: ``route`` and ``experts_loop`` in ``k3eval_local.model.moe``. Source: K3 report section 2.3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3eval_local.kernels.situ import situ

ROWS = 16


@triton.jit
def _router_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    index_ptr,
    share_ptr,
    score_ptr,
    stride_x,
    width,
    experts,
    scaling,
    TOP: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, EXPERTS)
    live = e < experts
    logit = tl.zeros([EXPERTS], tl.float32)
    for start in range(0, width, BLOCK):
        c = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + token * stride_x + c, mask=c < width, other=0.0).to(tl.float32)
        w = tl.load(
            w_ptr + e[:, None].to(tl.int64) * width + c[None, :],
            mask=live[:, None] & (c < width)[None, :],
            other=0.0,
        )
        logit += tl.sum(w.to(tl.float32) * x[None, :], 1)
    score = tl.sigmoid(logit)
    tl.store(score_ptr + token * experts + e, score, mask=live)
    biased = tl.where(live, score + tl.load(bias_ptr + e, mask=live, other=0.0), -1.0e30)
    total = 0.0
    for j in range(TOP):
        best = tl.argmax(biased, 0)
        chosen = tl.sum(tl.where(e == best, score, 0.0), 0)
        tl.store(index_ptr + token * TOP + j, best)
        tl.store(share_ptr + token * TOP + j, chosen)
        total += chosen
        biased = tl.where(e == best, -1.0e30, biased)
    for j in range(TOP):
        share = tl.load(share_ptr + token * TOP + j)
        tl.store(share_ptr + token * TOP + j, share / (total + 1e-20) * scaling)


def route(
    x: Tensor, router: Tensor, bias: Tensor, top_k: int, scaling: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose k experts a token, in fp32. x: [N, d]; router: [E, d]; bias: [E] fp32.

    Returns index [N, k] int32 in order of falling biased score, weight [N, k] fp32, scores [N, E] fp32.
    """
    N, d = x.shape
    E = router.shape[0]
    index = torch.empty(N, top_k, dtype=torch.int32, device=x.device)
    weight = torch.empty(N, top_k, dtype=torch.float32, device=x.device)
    scores = torch.empty(N, E, dtype=torch.float32, device=x.device)
    if N:
        experts = triton.next_power_of_2(E)
        _router_kernel[(N,)](
            x,
            router,
            bias,
            index,
            weight,
            scores,
            x.stride(0),
            d,
            E,
            scaling,
            TOP=top_k,
            EXPERTS=experts,
            BLOCK=max(16, min(128, 16384 // experts)),
            num_warps=8 if experts >= 256 else 4,
        )
    return index, weight, scores


@dataclass(frozen=True)
class Plan:
    """Pairs sorted by expert in blocks of ``ROWS``. pair: [blocks, ROWS] int32 numbers of pairs (token * k
    + rank), -1 = no row. expert: [blocks] int32.
    """

    pair: Tensor
    expert: Tensor

    @classmethod
    def of(cls, index: Tensor, experts: int) -> Plan:
        """From the router's index [N, k]. The number of blocks is an upper bound that needs no host
        copy.
        """
        flat = index.flatten().to(torch.int64)
        pairs = flat.numel()
        counts = torch.bincount(flat, minlength=experts)
        blocks_of = (counts + ROWS - 1) // ROWS
        ends = blocks_of.cumsum(0)
        most = min(pairs, (pairs + ROWS - 1) // ROWS + experts)
        block = torch.arange(most, device=flat.device)
        expert = torch.searchsorted(ends, block, right=True)
        order = flat.argsort(stable=True)
        begins = counts.cumsum(0) - counts
        sorted_expert = flat[order]
        place = torch.arange(pairs, device=flat.device) - begins[sorted_expert]
        slot = (ends - blocks_of)[sorted_expert] * ROWS + place
        pair = torch.full((most * ROWS,), -1, dtype=torch.int32, device=flat.device)
        pair[slot] = order.to(torch.int32)
        return cls(pair.view(most, ROWS), expert.clamp(max=experts - 1).to(torch.int32))


@triton.jit
def _e2m1(code):
    """The value of a 4-bit code: sign, two exponent bits, one mantissa bit."""
    exponent = (code >> 1) & 3
    mantissa = (code & 1).to(tl.float32)
    normal = (1.0 + 0.5 * mantissa) * tl.exp2((exponent - 1).to(tl.float32))
    value = tl.where(exponent == 0, 0.5 * mantissa, normal)
    return tl.where((code & 8) != 0, -value, value)


@triton.jit
def _weights(w_ptr, s_ptr, expert, rows, k, inputs, out_rows, live, PACKED: tl.constexpr):
    """A tile [k, rows] of expert ``expert``'s matrix [out_rows, inputs], transposed for the product."""
    mask = live[None, :] & (k < inputs)[:, None]
    if PACKED:
        row = expert * out_rows + rows
        byte = tl.load(w_ptr + row[None, :] * (inputs // 2) + (k // 2)[:, None], mask=mask, other=0).to(
            tl.int32
        )
        code = tl.where((k % 2 == 0)[:, None], byte & 15, byte >> 4)
        exponent = tl.load(s_ptr + row[None, :] * (inputs // 32) + (k // 32)[:, None], mask=mask, other=127)
        tile = _e2m1(code) * tl.exp2(exponent.to(tl.float32) - 127.0)
    else:
        tile = tl.load(
            w_ptr + (expert * out_rows + rows)[None, :] * inputs + k[:, None], mask=mask, other=0.0
        )
    return tile


@triton.jit
def _up_kernel(
    z_ptr,
    w1_ptr,
    w3_ptr,
    s1_ptr,
    s3_ptr,
    pair_ptr,
    expert_ptr,
    h_ptr,
    stride_z,
    latent,
    inner,
    top,
    beta_gate: tl.constexpr,
    beta_up: tl.constexpr,
    PACKED: tl.constexpr,
    BF: tl.constexpr,
    BK: tl.constexpr,
    UP: tl.constexpr,
):
    block = tl.program_id(0)
    rows = tl.program_id(1) * BF + tl.arange(0, BF)
    pair = tl.load(pair_ptr + block * 16 + tl.arange(0, 16))
    if tl.max(pair, 0) < 0:
        return
    expert = tl.load(expert_ptr + block).to(tl.int64)
    live = rows < inner
    gate = tl.zeros([16, BF], tl.float32)
    up = tl.zeros([16, BF], tl.float32)
    token = (pair // top).to(tl.int64)
    for start in range(0, latent, BK):
        k = start + tl.arange(0, BK)
        z = tl.load(
            z_ptr + token[:, None] * stride_z + k[None, :],
            mask=(pair >= 0)[:, None] & (k < latent)[None, :],
            other=0.0,
        )
        w1 = _weights(w1_ptr, s1_ptr, expert, rows, k, latent, inner, live, PACKED)
        w3 = _weights(w3_ptr, s3_ptr, expert, rows, k, latent, inner, live, PACKED)
        if UP:
            z = z.to(tl.float32)
        gate += tl.dot(z, w1.to(z.dtype), input_precision="ieee")
        up += tl.dot(z, w3.to(z.dtype), input_precision="ieee")
    h = situ(gate, up, beta_gate, beta_up)
    at = h_ptr + pair[:, None].to(tl.int64) * inner + rows[None, :]
    tl.store(at, h.to(h_ptr.dtype.element_ty), mask=(pair >= 0)[:, None] & live[None, :])


@triton.jit
def _down_kernel(
    h_ptr,
    w2_ptr,
    s2_ptr,
    share_ptr,
    pair_ptr,
    expert_ptr,
    y_ptr,
    latent,
    inner,
    PACKED: tl.constexpr,
    BF: tl.constexpr,
    BK: tl.constexpr,
    UP: tl.constexpr,
):
    block = tl.program_id(0)
    rows = tl.program_id(1) * BF + tl.arange(0, BF)
    pair = tl.load(pair_ptr + block * 16 + tl.arange(0, 16))
    if tl.max(pair, 0) < 0:
        return
    expert = tl.load(expert_ptr + block).to(tl.int64)
    live = rows < latent
    y = tl.zeros([16, BF], tl.float32)
    for start in range(0, inner, BK):
        k = start + tl.arange(0, BK)
        h = tl.load(
            h_ptr + pair[:, None].to(tl.int64) * inner + k[None, :],
            mask=(pair >= 0)[:, None] & (k < inner)[None, :],
            other=0.0,
        )
        w2 = _weights(w2_ptr, s2_ptr, expert, rows, k, inner, latent, live, PACKED)
        if UP:
            h = h.to(tl.float32)
        y += tl.dot(h, w2.to(h.dtype), input_precision="ieee")
    share = tl.load(share_ptr + pair, mask=pair >= 0, other=0.0)
    at = y_ptr + pair[:, None].to(tl.int64) * latent + rows[None, :]
    tl.store(at, y * share[:, None], mask=(pair >= 0)[:, None] & live[None, :])


@triton.jit
def _sum_kernel(y_ptr, u_ptr, latent, TOP: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for j in range(TOP):
        total += tl.load(y_ptr + (token * TOP + j) * latent + c, mask=c < latent, other=0.0)
    tl.store(u_ptr + token * latent + c, total.to(u_ptr.dtype.element_ty), mask=c < latent)


@dataclass(frozen=True)
class ExpertTensors:
    """Stacked experts: w1, w3 [E, f, l] and w2 [E, l, f]; with scales they are MXFP4, packed uint8 [..., in
    / 2] with scales uint8 [..., in / 32].
    """

    w1: Tensor
    w3: Tensor
    w2: Tensor
    scales: tuple[Tensor, Tensor, Tensor] | None = None


def experts(
    z: Tensor, index: Tensor, weight: Tensor, tensors: ExpertTensors, betas: tuple[float, float] = (4.0, 25.0)
) -> Tensor:
    """The chosen experts' weighted outputs, summed. z: [N, l]; index, weight: [N, k]. Returns [N, l] in z's
    dtype.
    """
    N, latent = z.shape
    E, inner = tensors.w1.shape[:2]
    top = index.shape[1]
    u = torch.empty_like(z)
    if not N:
        return u
    plan = Plan.of(index, E)
    packed = tensors.scales is not None
    s1, s3, s2 = tensors.scales or (tensors.w1, tensors.w3, tensors.w2)
    hidden = torch.empty(N * top, inner, dtype=z.dtype, device=z.device)
    parts = torch.empty(N * top, latent, dtype=torch.float32, device=z.device)
    blocks = plan.pair.shape[0]
    up = z.device.type == "cpu"
    _up_kernel[(blocks, triton.cdiv(inner, 64))](
        z,
        tensors.w1,
        tensors.w3,
        s1,
        s3,
        plan.pair,
        plan.expert,
        hidden,
        z.stride(0),
        latent,
        inner,
        top,
        *betas,
        PACKED=packed,
        BF=64,
        BK=64,
        UP=up,
        num_warps=4,
    )
    _down_kernel[(blocks, triton.cdiv(latent, 64))](
        hidden,
        tensors.w2,
        s2,
        weight,
        plan.pair,
        plan.expert,
        parts,
        latent,
        inner,
        PACKED=packed,
        BF=64,
        BK=64,
        UP=up,
        num_warps=4,
    )
    block = min(1024, triton.next_power_of_2(latent))
    _sum_kernel[(N, triton.cdiv(latent, block))](parts, u, latent, TOP=top, BLOCK=block, num_warps=4)
    return u
