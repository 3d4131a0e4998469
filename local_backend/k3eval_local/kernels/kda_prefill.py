"""KDA prefill in two launches: everything inside a chunk, then the scan of the state over chunks.

The chunk kernel runs once per chunk and head: gate, running sum, the decayed products of two 16-token tiles
in the stable form of ``k3eval_local.model.kda``, the inverse of I + A by tiles, and from it W and U. It
spills only
what the scan reads: W, U, the decayed q and k, the q-k products and the chunk's decay. The scan kernel
walks the chunks of one sequence, head and slice of value columns with the state in registers.
Chunk 32: twice as few serial steps as tiles of 16, and the inverse stays two tiles. Sequences are packed.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 32
CHUNK_WARPS = 4
CHUNK_COLUMNS = 32
SCAN_WARPS = 8
SCAN_STAGES = 2
"""Chosen so that no kernel spills at 128-wide heads; see ``compile``."""


@triton.jit
def _dot(a, b, UP: tl.constexpr):
    """A product with fp32 accumulation. UP lifts bf16 operands, which the interpreter cannot multiply."""
    if UP:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, input_precision="ieee" if a.dtype == tl.float32 else "tf32")


@triton.jit
def _unit_inverse(A):
    """(I + A)^-1 of a strictly lower 16 x 16 tile: (I - A)(I + A^2)(I + A^4)(I + A^8), exact since A^16 =
    0.
    """
    i = tl.arange(0, 16)
    eye = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    power = tl.dot(A, A, input_precision="ieee")
    inverse = tl.dot(eye - A, eye + power, input_precision="ieee")
    power = tl.dot(power, power, input_precision="ieee")
    inverse = tl.dot(inverse, eye + power, input_precision="ieee")
    power = tl.dot(power, power, input_precision="ieee")
    return tl.dot(inverse, eye + power, input_precision="ieee")


@triton.jit
def _inverse_norm(
    x_ptr, t, keep, column, stride, scale, NORMALISE: tl.constexpr, K: tl.constexpr, BK: tl.constexpr
):
    """Inverse norms ``scale / |x_t|`` of 16 rows [16]; 1 when the caller has normalised."""
    total = tl.zeros([16], tl.float32)
    if NORMALISE:
        for start in tl.static_range(0, K, BK):
            c = column + start + tl.arange(0, BK)
            x = tl.load(x_ptr + t[:, None] * stride + c[None, :], mask=keep[:, None], other=0.0).to(
                tl.float32
            )
            total += tl.sum(x * x, 1)
        inverse = scale / tl.sqrt(total + 1e-6)
    else:
        inverse = total + 1.0
    return inverse


@triton.jit
def _log_decay(z_ptr, bias_ptr, t, keep, c, stride, rate, bound):
    """Log-decay g [16, BK] of 16 tokens; zero, which decays nothing, where there is no token."""
    z = tl.load(z_ptr + t[:, None] * stride + c[None, :], mask=keep[:, None], other=0.0).to(tl.float32)
    z += tl.load(bias_ptr + c)[None, :]
    return tl.where(keep[:, None], bound * tl.sigmoid(rate * z), 0.0)


@triton.jit
def _chunk_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    z_ptr,
    beta_ptr,
    bias_ptr,
    rate_ptr,
    start_ptr,
    end_ptr,
    qg_ptr,
    kd_ptr,
    w_ptr,
    u_ptr,
    aqk_ptr,
    decay_ptr,
    stride,
    stride_v,
    stride_beta,
    heads,
    bound,
    scale,
    NORMALISE: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    PREC: tl.constexpr,
):
    chunk = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    begin = tl.load(start_ptr + chunk)
    end = tl.load(end_ptr + chunk)
    rate = tl.load(rate_ptr + head)
    i = tl.arange(0, 16)
    t0 = begin + i
    t1 = t0 + 16
    keep0 = t0 < end
    keep1 = t1 < end
    column = head * K
    out = w_ptr.dtype.element_ty
    beta0 = tl.sigmoid(tl.load(beta_ptr + t0 * stride_beta + head, mask=keep0, other=0.0).to(tl.float32))
    beta1 = tl.sigmoid(tl.load(beta_ptr + t1 * stride_beta + head, mask=keep1, other=0.0).to(tl.float32))
    beta0 = tl.where(keep0, beta0, 0.0)
    beta1 = tl.where(keep1, beta1, 0.0)
    nq0 = _inverse_norm(q_ptr, t0, keep0, column, stride, scale, NORMALISE, K, BK)
    nq1 = _inverse_norm(q_ptr, t1, keep1, column, stride, scale, NORMALISE, K, BK)
    nk0 = _inverse_norm(k_ptr, t0, keep0, column, stride, 1.0, NORMALISE, K, BK)
    nk1 = _inverse_norm(k_ptr, t1, keep1, column, stride, 1.0, NORMALISE, K, BK)
    base = (chunk * heads + head) * 32
    r0 = base + i
    r1 = r0 + 16
    A00 = tl.zeros([16, 16], tl.float32)
    A10 = tl.zeros([16, 16], tl.float32)
    A11 = tl.zeros([16, 16], tl.float32)
    S00 = tl.zeros([16, 16], tl.float32)
    S10 = tl.zeros([16, 16], tl.float32)
    S11 = tl.zeros([16, 16], tl.float32)
    # Products over slices of the key channels. Left exponents are <= 0; the right ones of a diagonal tile
    # stay below 80, 16 steps of at most 5.
    for start in tl.static_range(0, K, BK):
        c = column + start + tl.arange(0, BK)
        n = start + tl.arange(0, BK)
        G0 = tl.cumsum(_log_decay(z_ptr, bias_ptr, t0, keep0, c, stride, rate, bound), 0)
        G1 = tl.cumsum(_log_decay(z_ptr, bias_ptr, t1, keep1, c, stride, rate, bound), 0)  # after tile 0
        whole = tl.sum(tl.where(i[:, None] == 15, G0, 0.0), 0)
        last = tl.sum(tl.where(i[:, None] == 15, G1, 0.0), 0)
        k0 = tl.load(k_ptr + t0[:, None] * stride + c[None, :], mask=keep0[:, None], other=0.0).to(tl.float32)
        k0 *= nk0[:, None]
        left = tl.exp(G0)
        q = tl.load(q_ptr + t0[:, None] * stride + c[None, :], mask=keep0[:, None], other=0.0).to(tl.float32)
        q *= nq0[:, None] * left
        tl.store(qg_ptr + r0[:, None] * K + n[None, :], q.to(out))
        right = tl.trans(k0 * tl.exp(-G0))
        A00 += tl.dot(k0 * left, right, input_precision=PREC)
        S00 += tl.dot(q, right, input_precision=PREC)
        tl.store(kd_ptr + r0[:, None] * K + n[None, :], (k0 * tl.exp((whole + last)[None, :] - G0)).to(out))
        across = tl.trans(k0 * tl.exp(whole[None, :] - G0))
        k1 = tl.load(k_ptr + t1[:, None] * stride + c[None, :], mask=keep1[:, None], other=0.0).to(tl.float32)
        k1 *= nk1[:, None]
        left = tl.exp(G1)
        q = tl.load(q_ptr + t1[:, None] * stride + c[None, :], mask=keep1[:, None], other=0.0).to(tl.float32)
        q *= nq1[:, None] * left
        tl.store(qg_ptr + r1[:, None] * K + n[None, :], (q * tl.exp(whole)[None, :]).to(out))
        right = tl.trans(k1 * tl.exp(-G1))
        A11 += tl.dot(k1 * left, right, input_precision=PREC)
        A10 += tl.dot(k1 * left, across, input_precision=PREC)
        S11 += tl.dot(q, right, input_precision=PREC)
        S10 += tl.dot(q, across, input_precision=PREC)
        tl.store(kd_ptr + r1[:, None] * K + n[None, :], (k1 * tl.exp(last[None, :] - G1)).to(out))
        tl.store(decay_ptr + (chunk * heads + head) * K + n, tl.exp(whole + last))
    lower = i[:, None] >= i[None, :]
    tl.store(aqk_ptr + r0[:, None] * 32 + i[None, :], tl.where(lower, S00, 0.0).to(out))
    tl.store(aqk_ptr + r0[:, None] * 32 + 16 + i[None, :], tl.zeros([16, 16], out))
    tl.store(aqk_ptr + r1[:, None] * 32 + i[None, :], S10.to(out))
    tl.store(aqk_ptr + r1[:, None] * 32 + 16 + i[None, :], tl.where(lower, S11, 0.0).to(out))
    strict = i[:, None] > i[None, :]
    M0 = _unit_inverse(tl.where(strict, beta0[:, None] * A00, 0.0))
    M1 = _unit_inverse(tl.where(strict, beta1[:, None] * A11, 0.0))
    A10 = beta1[:, None] * A10
    # Forward substitution over the tiles: Y0 = M0 X0, Y1 = M1 (X1 - A10 Y0), for X = beta Gamma K and beta V.
    for start in tl.static_range(0, K, BK):
        c = column + start + tl.arange(0, BK)
        n = start + tl.arange(0, BK)
        G0 = tl.cumsum(_log_decay(z_ptr, bias_ptr, t0, keep0, c, stride, rate, bound), 0)
        whole = tl.sum(tl.where(i[:, None] == 15, G0, 0.0), 0)
        k0 = tl.load(k_ptr + t0[:, None] * stride + c[None, :], mask=keep0[:, None], other=0.0).to(tl.float32)
        Y0 = tl.dot(M0, (beta0 * nk0)[:, None] * tl.exp(G0) * k0, input_precision=PREC)
        tl.store(w_ptr + r0[:, None] * K + n[None, :], Y0.to(out))
        G1 = tl.cumsum(_log_decay(z_ptr, bias_ptr, t1, keep1, c, stride, rate, bound), 0) + whole[None, :]
        k1 = tl.load(k_ptr + t1[:, None] * stride + c[None, :], mask=keep1[:, None], other=0.0).to(tl.float32)
        X1 = (beta1 * nk1)[:, None] * tl.exp(G1) * k1
        Y1 = tl.dot(M1, X1 - tl.dot(A10, Y0, input_precision=PREC), input_precision=PREC)
        tl.store(w_ptr + r1[:, None] * K + n[None, :], Y1.to(out))
        v0 = tl.load(v_ptr + t0[:, None] * stride_v + c[None, :], mask=keep0[:, None], other=0.0).to(
            tl.float32
        )
        Y0 = tl.dot(M0, beta0[:, None] * v0, input_precision=PREC)
        tl.store(u_ptr + r0[:, None] * K + n[None, :], Y0.to(out))
        v1 = tl.load(v_ptr + t1[:, None] * stride_v + c[None, :], mask=keep1[:, None], other=0.0).to(
            tl.float32
        )
        X1 = beta1[:, None] * v1 - tl.dot(A10, Y0, input_precision=PREC)
        tl.store(u_ptr + r1[:, None] * K + n[None, :], tl.dot(M1, X1, input_precision=PREC).to(out))


@triton.jit
def _scan_kernel(
    qg_ptr,
    kd_ptr,
    w_ptr,
    u_ptr,
    aqk_ptr,
    decay_ptr,
    first_ptr,
    cu_ptr,
    initial_ptr,
    final_ptr,
    o_ptr,
    stride_o,
    heads,
    INITIAL: tl.constexpr,
    K: tl.constexpr,
    BV: tl.constexpr,
    UP: tl.constexpr,
):
    seq = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    col = tl.program_id(2) * BV + tl.arange(0, BV)
    c = tl.arange(0, K)
    t = tl.arange(0, 32)
    first = tl.load(first_ptr + seq)
    count = tl.load(first_ptr + seq + 1) - first
    begin = tl.load(cu_ptr + seq)
    end = tl.load(cu_ptr + seq + 1)
    at_state = (seq * heads + head) * K * K + c[:, None] * K + col[None, :]
    S = tl.zeros([K, BV], tl.float32)
    if INITIAL:
        S = tl.load(initial_ptr + at_state).to(tl.float32)
    for n in range(count):
        base = ((first + n) * heads + head) * 32
        rows = base + t
        w = tl.load(w_ptr + rows[:, None] * K + c[None, :])
        operand = S.to(w.dtype)
        vn = tl.load(u_ptr + rows[:, None] * K + col[None, :]).to(tl.float32) - _dot(w, operand, UP)
        vn = vn.to(w.dtype)
        qg = tl.load(qg_ptr + rows[:, None] * K + c[None, :])
        aqk = tl.load(aqk_ptr + rows[:, None] * 32 + t[None, :])
        o = _dot(qg, operand, UP) + _dot(aqk, vn, UP)
        token = begin + n * 32 + t
        tl.store(
            o_ptr + token[:, None] * stride_o + head * K + col[None, :],
            o.to(o_ptr.dtype.element_ty),
            mask=(token < end)[:, None],
        )
        kd = tl.load(kd_ptr + rows[:, None] * K + c[None, :])
        decay = tl.load(decay_ptr + ((first + n) * heads + head) * K + c)
        S = S * decay[:, None] + _dot(tl.trans(kd), vn, UP)
    tl.store(final_ptr + at_state, S)


@dataclass(frozen=True)
class Chunks:
    """Where the chunks of packed sequences lie. start, end: [chunks] rows. first: [sequences + 1] chunk
    numbers.
    """

    start: Tensor
    end: Tensor
    first: Tensor

    @classmethod
    def of(cls, cu_seqlens: Tensor) -> Chunks:
        """From cumulative lengths [sequences + 1], int64, on any device."""
        bounds = cu_seqlens.tolist()
        start: list[int] = []
        end: list[int] = []
        first = [0]
        for begin, stop in itertools.pairwise(bounds):
            start += range(begin, stop, CHUNK)
            end += [stop] * (len(range(begin, stop, CHUNK)))
            first.append(len(start))
        device = cu_seqlens.device
        return cls(*(torch.tensor(x, dtype=torch.int64, device=device) for x in (start, end, first)))


def kda_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    beta: Tensor,
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    cu_seqlens: Tensor,
    initial: Tensor | None = None,
    bound: float | None = -5.0,
    normalise: bool = True,
    chunks: Chunks | None = None,
    value_split: int | None = None,
) -> tuple[Tensor, Tensor]:
    """KDA over packed sequences.

    Args:
        q, k, v, z: [T, H, K], rows contiguous, after convolution and SiLU; z is the gate before its bias.
        beta: [T, H], before the sigmoid. A_log: [H] fp32. dt_bias: [H * K] fp32.
        cu_seqlens: [N + 1] int64, cumulative lengths; empty sequences are allowed.
        initial: [N, H, K, K] states, fp32; zero when None.
        bound: lower bound of the log-decay, at least -5. Kimi Linear's unbounded gate needs pairwise
            exponents and has no kernel here.
        normalise: L2-normalise q and k and scale q by K^-0.5 (in the kernel).
        chunks: ``Chunks.of(cu_seqlens)``, when it is known already (it reads the lengths on the host).
        value_split: value columns a program; smaller gives more programs for few heads.

    Returns:
        o [T, H, K] in v's dtype and the final states [N, H, K, K] fp32.
    """
    if bound is None or not -5.0 <= bound <= 0.0:
        raise ValueError("the chunk kernel needs a decay bound between -5 and 0 (Kimi K3's gate)")
    T, H, K = q.shape
    if triton.next_power_of_2(K) != K or K < 16:
        raise ValueError(f"the head size must be a power of two of at least 16, not {K}")
    N = cu_seqlens.shape[0] - 1
    chunks = chunks or Chunks.of(cu_seqlens)
    count = chunks.start.shape[0]
    inner = torch.float32 if v.dtype == torch.float32 else torch.bfloat16
    device = q.device
    qg, kd, w, u = (torch.empty(count, H, CHUNK, K, dtype=inner, device=device) for _ in range(4))
    aqk = torch.empty(count, H, CHUNK, CHUNK, dtype=inner, device=device)
    decay = torch.empty(count, H, K, dtype=torch.float32, device=device)
    o = torch.empty(T, H, K, dtype=v.dtype, device=device)
    final = torch.empty(N, H, K, K, dtype=torch.float32, device=device)
    interpreted = device.type == "cpu"
    if count:
        _chunk_kernel[(count, H)](
            q,
            k,
            v,
            z,
            beta,
            dt_bias,
            A_log.exp(),
            chunks.start,
            chunks.end,
            qg,
            kd,
            w,
            u,
            aqk,
            decay,
            q.stride(0),
            v.stride(0),
            beta.stride(0),
            H,
            bound,
            K**-0.5,
            NORMALISE=normalise,
            K=K,
            BK=min(K, CHUNK_COLUMNS),
            PREC="ieee" if inner == torch.float32 else "tf32",
            num_warps=CHUNK_WARPS,
        )
    if N:
        split = value_split or (32 if N * H < 128 and K >= 64 else min(64, K))
        _scan_kernel[(N, H, triton.cdiv(K, split))](
            qg,
            kd,
            w,
            u,
            aqk,
            decay,
            chunks.first,
            cu_seqlens,
            initial if initial is not None else final,
            final,
            o,
            o.stride(0),
            H,
            INITIAL=initial is not None,
            K=K,
            BV=split,
            UP=interpreted,
            num_warps=SCAN_WARPS,
            num_stages=SCAN_STAGES,
        )
    return o, final
