"""Gated multi-head latent attention without positions (K3 report section 2.1.2).

    cq = RMSNorm(W_qa x);  [q_n, q_s]^h = W_qb^h cq;   [c~, k_s] = W_kva x;  c = RMSNorm(c~)
    k^h = [W_UK^h c ; k_s],  v^h = W_UV^h c,   p = softmax((q_n . k_n + q_s . k_s) / sqrt(n + s)), causal
    y = W_o [sigmoid(W_g x) * concat_h(sum_j p_j v_j^h)]

The slot k_s is neither normed nor rotated and shared by all heads. Only [c ; k_s] is cached. The expanded
form makes keys and values of every head; the absorbed form attends in the latent and expands afterwards.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from k3eval_local.model.config import K3Config
from k3eval_local.model.norm import RMSNorm
from k3eval_local.model.state import MLAState, Segment

MLAForm = Literal["expanded", "absorbed"]


def mla_expanded(
    q: Tensor, latent: Tensor, w_uk: Tensor, w_uv: Tensor, mask: Tensor | None, *, causal: bool = False
) -> Tensor:
    """Attention over expanded keys and values.

    Args:
        q: [B, T, H, n + s], the nope part first.
        latent: [B, S, r + s], what is cached.
        w_uk: [H, n, r].
        w_uv: [H, v, r].
        mask: bool, True may be seen, [T, S] or [B, T, S]; ``None`` shows everything.
        causal: instead of a mask, for T = S.

    Returns:
        [B, T, H, v], before the output gate.
    """
    H, _, r = w_uk.shape
    c, slot = latent.tensor_split([r], dim=-1)
    keys = torch.einsum("bsr,hnr->bhsn", c, w_uk)
    keys = torch.cat([keys, slot[:, None].expand(-1, H, -1, -1)], dim=-1)
    values = torch.einsum("bsr,hvr->bhsv", c, w_uv)
    if mask is not None and mask.dim() == 3:
        mask = mask[:, None]
    # torch's memory-saving attention on CPU wants values as wide as the keys: no T x T scores, and faster
    padding = max(0, q.shape[-1] - values.shape[-1])
    o = functional.scaled_dot_product_attention(
        q.transpose(1, 2),
        keys,
        functional.pad(values, (0, padding)),
        attn_mask=mask,
        is_causal=causal,
        scale=q.shape[-1] ** -0.5,
    )
    return o[..., : values.shape[-1]].transpose(1, 2)


def mla_absorbed(q: Tensor, latent: Tensor, w_uk: Tensor, w_uv: Tensor, mask: Tensor | None) -> Tensor:
    """The same result without expanding the cache: ``q~^h = (W_UK^h)^T q_n^h`` scores the latent itself.

    All heads share one key, so they are passed as the query rows of a single head: attention reads the
    cache once and makes no copy. Arguments and result as in ``mla_expanded`` (no ``causal``).
    """
    B, T, H, _ = q.shape
    n, r = w_uk.shape[1:]
    q_nope, q_slot = q.tensor_split([n], dim=-1)
    rows = torch.cat([torch.einsum("bthn,hnr->bthr", q_nope, w_uk), q_slot], dim=-1)
    if mask is not None:
        mask = mask.repeat_interleave(H, dim=-2)
        mask = mask[:, None] if mask.dim() == 3 else mask
    o = functional.scaled_dot_product_attention(
        rows.reshape(B, 1, T * H, latent.shape[-1]),
        latent[:, None],
        latent[:, None],
        attn_mask=mask,
        scale=q.shape[-1] ** -0.5,
    )
    return torch.einsum("bthr,hvr->bthv", o.view(B, T, H, latent.shape[-1])[..., :r], w_uv)


class MLA(nn.Module):
    """One gated MLA layer; parameter names are those of the checkpoint."""

    def __init__(self, config: K3Config, dtype: torch.dtype) -> None:
        super().__init__()
        d, H = config.hidden_size, config.num_attention_heads
        self.heads, self.nope, self.value = H, config.qk_nope_head_dim, config.v_head_dim
        self.rank, eps = config.kv_lora_rank, config.rms_norm_eps

        def matrix(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False, dtype=dtype)

        self.q_a_proj = matrix(d, config.q_lora_rank)
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, eps, dtype)
        self.q_b_proj = matrix(config.q_lora_rank, H * config.qk_head_dim)
        self.kv_a_proj_with_mqa = matrix(d, config.latent_cache_width)
        self.kv_a_layernorm = RMSNorm(self.rank, eps, dtype)
        self.kv_b_proj = matrix(self.rank, H * (self.nope + self.value))
        self.g_proj = matrix(d, H * self.value)
        self.o_proj = matrix(H * self.value, d)

    def forward(self, x: Tensor, state: MLAState, segment: Segment, form: MLAForm) -> tuple[Tensor, MLAState]:
        """Run the layer: x [B, T, d], normed -> (y [B, T, d], state with the new latents appended)."""
        q, new = self.queries(x), self.latents(x)
        old = state.latent.to(new.dtype)
        joined = torch.cat([old, new], dim=1)
        mask = attention_mask(segment, old.shape[1], x.device)
        w_uk, w_uv = self.expansion()
        if form == "absorbed":
            if mask is None and segment.width > 1:
                mask = causal_mask(segment.width, joined.shape[1], x.device)
            o = mla_absorbed(q, joined, w_uk, w_uv, mask)
        else:
            o = mla_expanded(q, joined, w_uk, w_uv, mask, causal=mask is None and segment.width > 1)
        return self.output(x, o), MLAState(_compact(joined, old.shape[1], segment))

    def queries(self, x: Tensor) -> Tensor:
        """Queries of all heads: x [B, T, d] -> [B, T, H, nope + slot]."""
        q: Tensor = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        return q.view(*x.shape[:-1], self.heads, q.shape[-1] // self.heads)

    def latents(self, x: Tensor) -> Tensor:
        """What is cached: x [B, T, d] -> [B, T, kv_lora + slot], the latent normed, the slot raw."""
        c, slot = self.kv_a_proj_with_mqa(x).tensor_split([self.rank], dim=-1)
        return torch.cat([self.kv_a_layernorm(c), slot], dim=-1)

    def expansion(self) -> tuple[Tensor, Tensor]:
        """W_UK [H, nope, kv_lora] and W_UV [H, v, kv_lora], views of ``kv_b_proj``."""
        both = self.kv_b_proj.weight.view(self.heads, -1, self.rank)
        w_uk, w_uv = both.tensor_split([self.nope], dim=1)
        return w_uk, w_uv

    def output(self, x: Tensor, o: Tensor) -> Tensor:
        """``W_o [sigmoid(W_g x) * o]``: x [B, T, d], o [B, T, H, v] -> [B, T, d]."""
        y: Tensor = self.o_proj(torch.sigmoid(self.g_proj(x)) * o.flatten(-2))
        return y


def causal_mask(new: int, total: int, device: torch.device) -> Tensor:
    """[new, total] bool: query i, the token at ``total - new + i``, sees all up to itself."""
    return torch.ones(new, total, dtype=torch.bool, device=device).tril(total - new)


def attention_mask(segment: Segment, cached: int, device: torch.device) -> Tensor | None:
    """Which of [cached, new] keys each new token sees; ``None`` where plain causal order does it.

    Padding is on the right, so no real token sees a padded one. Rows with a shorter past must not see the
    unused end of their cache.
    """
    if not segment.ragged_past:
        return (
            None
            if cached == 0 or segment.width == 1
            else causal_mask(segment.width, cached + segment.width, device)
        )
    past = torch.tensor(segment.past, device=device)
    seen = torch.arange(cached, device=device) < past[:, None]
    causal = causal_mask(segment.width, segment.width, device).expand(len(segment.past), -1, -1)
    return torch.cat([seen[:, None].expand(-1, segment.width, -1), causal], dim=-1)


def _compact(joined: Tensor, cached: int, segment: Segment) -> Tensor:
    """[B, cached + T, W] with gaps -> [B, longest, W] without: each row's real latents, then zeros."""
    if not (segment.padded or segment.ragged_past):
        return joined
    past = torch.tensor(segment.past, device=joined.device)[:, None]
    total = past + torch.tensor(segment.new, device=joined.device)[:, None]
    longest = max(before + new for before, new in zip(segment.past, segment.new, strict=True))
    slots = torch.arange(longest, device=joined.device)[None]
    source = torch.where(slots < past, slots, slots - past + cached)
    source = source.clamp(max=joined.shape[1] - 1)[..., None].expand(-1, -1, joined.shape[2])
    return joined.gather(1, source) * (slots < total)[..., None]
