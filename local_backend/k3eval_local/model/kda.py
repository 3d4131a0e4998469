"""Kimi Delta Attention: a fixed-size matrix per head instead of a cache (K3 report section 2.1.1).

    S'  = Diag(alpha_t) S_{t-1}                       decay of the rows (key channels)
    S_t = S' + beta_t k_t (v_t - S'^T k_t)^T          delta rule: write what the state does not yet know
    o_t = S_t^T q_t                                   read after the write

Three forms of the same recurrence: ``kda_step`` (one token), ``kda_recurrent`` (token by token) and
``kda_chunk`` (matrix products over chunks). All take and return plain tensors; S is [B, H, d_k, d_v].
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from k3eval_local.model.config import K3Config
from k3eval_local.model.norm import RMSNorm, exact, l2norm, rmsnorm, wide
from k3eval_local.model.state import KDAState, Segment

KDAForm = Literal["recurrent", "chunk", "step"]
TILE = 16
SAFE_BOUND = -5.0
"""A decay of at most exp(-5) a step stays within exp(80) over a 16-token tile, which fp32 and bf16 hold."""


def short_conv(
    x: Tensor, weight: Tensor, carried: Tensor, lengths: tuple[int, ...] | None = None
) -> tuple[Tensor, Tensor]:
    """Causal depthwise convolution, then SiLU: ``y_t = silu(sum_i w_i x_{t - k + 1 + i})``.

    Args:
        x: [B, T, C] projections.
        weight: [C, k] fp32.
        carried: [B, k - 1, C], the inputs before x.
        lengths: real tokens of each row when rows are padded on the right.

    Returns:
        y [B, T, C] in the dtype of ``weight`` or wider, and the last k - 1 real inputs, to be carried.
    """
    taps = weight.shape[1]
    joined = torch.cat([carried.to(x.dtype), x], dim=1)
    T = x.shape[1]
    y = joined[:, :T] * weight[:, 0]
    for tap in range(1, taps):
        y = y + joined[:, tap : tap + T] * weight[:, tap]
    if lengths is None:
        return functional.silu(y), joined[:, T:]
    rows = torch.tensor(lengths, device=x.device)[:, None] + torch.arange(taps - 1, device=x.device)
    last = joined.gather(1, rows[..., None].expand(-1, -1, x.shape[2]))
    return functional.silu(y), last


def kda_gate(z: Tensor, A_log: Tensor, lower_bound: float | None) -> Tensor:
    """Log-decay g of each key channel, so that ``alpha = exp(g)``.

    Kimi K3 (``lower_bound`` = -5): ``g = lower_bound * sigmoid(exp(A) z)``, in (-5, 0).
    Kimi Linear (``None``): ``g = -exp(A) softplus(z)``, in (-inf, 0). Two functions, not one and a clamp.

    Args:
        z: [..., H, d_k] with the bias already added.
        A_log: [H].
        lower_bound: K3's bound, negative; ``None`` for Kimi Linear's gate.
    """
    rate = A_log.exp()[:, None]
    if lower_bound is None:
        return -rate * functional.softplus(z)
    return lower_bound * torch.sigmoid(rate * z)


def kda_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """One token. q, k, g: [B, H, d_k]; v: [B, H, d_v]; beta: [B, H]; S: [B, H, d_k, d_v].

    q and k are already normalised and q scaled. Returns o [B, H, d_v] and the new S.
    """
    S = g.exp()[..., None] * S
    known = (k[..., None, :] @ S).squeeze(-2)
    S = S + k[..., :, None] * (beta[..., None] * (v - known))[..., None, :]
    return (q[..., None, :] @ S).squeeze(-2), S


def kda_recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor
) -> tuple[Tensor, Tensor]:
    """Token by token: the definition. q, k, g: [B, T, H, d_k]; v: [B, T, H, d_v]; beta: [B, T, H].

    Returns o [B, T, H, d_v] and the state after the last token.
    """
    outputs = []
    for q_t, k_t, v_t, g_t, beta_t in zip(*(x.unbind(1) for x in (q, k, v, g, beta)), strict=True):
        o, S = kda_step(q_t, k_t, v_t, g_t, beta_t, S)
        outputs.append(o)
    return (torch.stack(outputs, dim=1) if outputs else torch.zeros_like(v)), S


def kda_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    S: Tensor,
    *,
    chunk: int = 16,
    bounded: bool = True,
) -> tuple[Tensor, Tensor]:
    """Chunkwise form: shapes and results of ``kda_recurrent``, by matrix products over ``chunk`` tokens.

    Inside a chunk, with G the running sum of g and ``Gamma = exp(G)``::

        A[i, j] = beta_i sum_c k_ic k_jc exp(G_ic - G_jc)   for j < i      (what k_j already wrote at k_i)
        [W, U]  = (I + A)^-1 Diag(beta) [Gamma K, V]                       UT transform, forward substitution
        V'      = U - W S                                                  the values that are really written
        O       = (Gamma Q) S + tril(sum_c q_ic k_jc exp(G_ic - G_jc)) V'
        S      <- Diag(Gamma_last) S + (exp(G_last - G) K)^T V'

    ``bounded`` says that every g is at least -5 (K3's gate); see ``_decayed_products``.
    Source: Kimi Linear (arXiv 2510.26692) section 3, K3 report section 2.1.1.
    """
    if chunk % TILE:
        raise ValueError(f"chunk must be a multiple of {TILE}, not {chunk}")
    B, T, H, _ = q.shape
    if T == 0:
        return torch.zeros_like(v), S
    chunk = min(chunk, -(-T // TILE) * TILE)
    count = -(-T // chunk)

    def chunks(x: Tensor) -> Tensor:
        padded = functional.pad(x, (0, 0, 0, 0, 0, count * chunk - T))
        return padded.view(B, count, chunk, H, -1).permute(0, 3, 1, 2, 4)

    q, k, v, g, b = (chunks(x) for x in (q, k, v, g, beta[..., None]))
    G = g.cumsum(-2)
    Gamma = G.exp()
    A, scores = _decayed_products(b * k, q, k, G, bounded)
    A, scores = A.tril(-1), scores.tril()
    solved = torch.linalg.solve_triangular(
        A, torch.cat([b * Gamma * k, b * v], dim=-1), upper=False, unitriangular=True
    )
    W, U = solved.tensor_split([k.shape[-1]], dim=-1)
    read, last = Gamma * q, Gamma[..., -1, :, None]
    write = ((G[..., -1:, :] - G).exp() * k).transpose(-1, -2)
    outputs = []
    # unbind, not indexing: its gradient is one stack, where indexing would add one full tensor per chunk
    for u, w, r, a, fade, k_t in zip(*(x.unbind(2) for x in (U, W, read, scores, last, write)), strict=True):
        written = u - w @ S
        outputs.append(r @ S + a @ written)
        S = fade * S + k_t @ written
    o = torch.stack(outputs, dim=2).permute(0, 2, 3, 1, 4).reshape(B, count * chunk, H, -1)
    return o[:, :T], S


def _decayed_products(kb: Tensor, q: Tensor, k: Tensor, G: Tensor, bounded: bool) -> tuple[Tensor, Tensor]:
    """``sum_c a_ic k_jc exp(G_ic - G_jc)`` for a = kb and a = q; valid for j <= i, [..., C, C] each.

    ``exp(G_i - G_j)`` must not be split at the chunk's start: exp(-G_j) overflows. So the chunk is cut
    into tiles of 16. A tile row refers to r = G just before it: its left factor exp(G_i - r) and the right
    factor exp(r - G_j) of every earlier tile are at most 1. On the diagonal tile r - G_j is positive but
    below 16 * 5 = 80 under K3's bounded gate. Without a bound the diagonal needs explicit pairs (i, j).
    """
    C = k.shape[-2]
    rows = []
    for start in range(0, C, TILE):
        end = start + TILE
        tile = slice(start, end)
        here = G[..., tile, :]
        r = G[..., start - 1 : start, :] if start else torch.zeros_like(here[..., :1, :])
        fade = (here - r).exp()
        left = torch.cat([kb[..., tile, :] * fade, q[..., tile, :] * fade], dim=-2)
        reach = end if bounded else start
        right = k[..., :reach, :] * (r - G[..., :reach, :]).exp()
        products = left @ right.transpose(-1, -2)
        if not bounded:
            pairs = (here[..., :, None, :] - here[..., None, :, :]).clamp(max=0).exp()
            diagonal = [
                torch.einsum("...ic,...jc,...ijc->...ij", a[..., tile, :], k[..., tile, :], pairs)
                for a in (kb, q)
            ]
            products = torch.cat([products, torch.cat(diagonal, dim=-2)], dim=-1)
        rows.append(functional.pad(products, (0, C - end)))
    kk, qk = torch.stack(rows, dim=-3).tensor_split(2, dim=-2)
    return kk.flatten(-3, -2), qk.flatten(-3, -2)


class KDA(nn.Module):
    """One KDA layer; parameter names are those of the checkpoint."""

    def __init__(self, config: K3Config, dtype: torch.dtype) -> None:
        super().__init__()
        d, P, linear = config.hidden_size, config.kda_width, config.linear_attn
        self.heads, self.head_dim, self.bound = linear.num_heads, linear.head_dim, linear.gate_lower_bound
        kept = wide(dtype)

        def matrix(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False, dtype=dtype)

        self.q_proj, self.k_proj, self.v_proj = matrix(d, P), matrix(d, P), matrix(d, P)
        taps = linear.short_conv_kernel_size
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (ConvWeight(P, taps, kept) for _ in range(3))
        self.f_a_proj, self.f_b_proj = matrix(d, self.head_dim), matrix(self.head_dim, P)
        self.b_proj = matrix(d, self.heads)
        self.g_proj = matrix(d, P)
        self.A_log = nn.Parameter(torch.zeros(self.heads, dtype=kept))
        self.dt_bias = nn.Parameter(torch.zeros(P, dtype=kept))
        self.o_norm = RMSNorm(self.head_dim, config.rms_norm_eps, kept)
        self.o_proj = matrix(P, d)

    def forward(self, x: Tensor, state: KDAState, segment: Segment, form: KDAForm) -> tuple[Tensor, KDAState]:
        """Run the layer: x [B, T, d], normed -> (y [B, T, d], new state), which padding does not touch."""
        q, k, v, g, beta, conv = self.inputs(x, state.conv, segment)
        bounded = self.bound is not None and self.bound >= SAFE_BOUND
        with exact(x.device):
            if form == "step":
                o, S = kda_step(q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta[:, 0], state.S)
                o = o[:, None]
            elif form == "recurrent":
                o, S = kda_recurrent(q, k, v, g, beta, state.S)
            else:
                o, S = kda_chunk(q, k, v, g, beta, state.S, bounded=bounded)
        return self.output(x, o), KDAState(conv, S)

    def inputs(
        self, x: Tensor, carried: Tensor, segment: Segment
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """What the recurrence reads, in fp32: q, k, v, g [B, T, H, d_k], beta [B, T, H]; new conv state.

        ``q = l2norm(silu(conv(W_q x))) / sqrt(d_k)``, k alike without the scale, v without the norm;
        ``beta = sigmoid(W_b x)``; ``z = W_fb W_fa x + dt_bias`` feeds the gate.
        """
        streams = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], dim=-1)
        weights = torch.cat([self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight])[:, 0]
        mixed, conv = short_conv(streams, weights, carried, segment.new if segment.padded else None)
        heads = (self.heads, self.head_dim)
        q, k, v = mixed.view(*x.shape[:2], 3, *heads).unbind(2)
        q, k = l2norm(q) * self.head_dim**-0.5, l2norm(k)
        z = self.f_b_proj(self.f_a_proj(x)).to(self.dt_bias.dtype) + self.dt_bias
        g = kda_gate(z.view(*x.shape[:2], *heads), self.A_log, self.bound)
        beta = torch.sigmoid(self.b_proj(x).to(g.dtype))
        if segment.padded:
            valid = segment.valid(x.device)[..., None]
            beta, g = beta * valid, g * valid[..., None]
        return q, k, v, g, beta, conv

    def output(self, x: Tensor, o: Tensor) -> Tensor:
        """``W_o [sigmoid(W_g x) * RMSNorm_head(o)]``: x [B, T, d], o [B, T, H, d_v] -> [B, T, d]."""
        normed = rmsnorm(o, self.o_norm.weight, self.o_norm.eps).flatten(-2)
        gated = torch.sigmoid(self.g_proj(x).to(normed.dtype)) * normed
        projected: Tensor = self.o_proj(gated.to(x.dtype))
        return projected


class ConvWeight(nn.Module):
    """Holds one depthwise convolution weight [P, 1, k], kept in fp32 as in the checkpoint."""

    def __init__(self, channels: int, taps: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(channels, 1, taps, dtype=dtype))
