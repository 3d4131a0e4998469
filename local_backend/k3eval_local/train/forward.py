"""The model's training forward: the function of ``K3Model.forward`` arranged for gradients on a CPU.

Same parameters, same result (a test holds the two together), less memory traffic: one product for all
projections of an input, matrix products in bf16 if asked, hand-written gradients for the elementwise parts,
attention-residual scores from one product per row, KDA chunks whose only loop is over the state. The head of
a prompt that all rows share is computed once and handed on as a state.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional

from k3eval_local.model.config import K3Config
from k3eval_local.model.decoder import DecoderLayer, K3Model
from k3eval_local.model.kda import KDA
from k3eval_local.model.mla import MLA
from k3eval_local.model.moe import LatentMoE, Routing, RoutingObserver, route
from k3eval_local.model.norm import l2norm
from k3eval_local.train import native
from k3eval_local.train.gradients import combine, conv_silu, rms_norm, situ

CHUNK = 32


@dataclass(frozen=True)
class LayerCarry:
    """What a shared head leaves to one layer: KDA (conv inputs, S) or MLA (latents, nothing)."""

    first: Tensor
    second: Tensor | None


def _ends(weights: Sequence[Tensor]) -> list[int]:
    """Where the outputs of each weight but the last end."""
    return list(accumulate(weight.shape[0] for weight in weights[:-1]))


@dataclass(frozen=True)
class Precision:
    """``matmul``: dtype of the matrix products; everything else is fp32."""

    matmul: torch.dtype = torch.float32

    def product(self, x: Tensor, *weights: Tensor) -> list[Tensor]:
        """``x W^T`` for every weight by one product; fp32 results."""
        joined = weights[0] if len(weights) == 1 else torch.cat(weights)
        if self.matmul == torch.float32:
            y = functional.linear(x, joined)
        else:
            y = functional.linear(x.to(self.matmul), joined.to(self.matmul)).float()
        return [y] if len(weights) == 1 else list(y.tensor_split(_ends(weights), dim=-1))


def hidden(
    model: K3Model,
    ids: Tensor,
    carry: Sequence[LayerCarry] | None = None,
    *,
    precision: Precision | None = None,
    observer: RoutingObserver | None = None,
    valid: Tensor | None = None,
) -> tuple[Tensor, list[LayerCarry]]:
    """The vectors before the final norm for ids [B, T], continuing the batch-1 ``carry`` in every row.

    ``valid`` [B, T] says which positions the observer may see. Returns [B, T, d] and, for a batch of one,
    what can be handed on as ``carry``.
    """
    precision = precision or Precision()
    config = model.config
    stream = _Stream(model, functional.embedding(ids, model.model.embed_tokens.weight))
    after: list[LayerCarry] = []
    for index, layer in enumerate(model.layers):
        before = carry[index] if carry is not None else None
        x = rms_norm(stream.read(), layer.input_layernorm.weight, config.rms_norm_eps)
        attend = _kda if isinstance(layer.self_attn, KDA) else _mla
        y, left = attend(layer.self_attn, x, before, precision)  # type: ignore[arg-type]  # chosen by its type
        after.append(left)
        stream.write_attention(y)
        x = rms_norm(stream.read(), layer.post_attention_layernorm.weight, config.rms_norm_eps)
        stream.write_ffn(_feed_forward(layer, index, x, precision, observer, valid))
    return stream.read(), after


def logits(model: K3Model, out: Tensor, precision: Precision | None = None) -> Tensor:
    """Final norm and head: [N, d] -> [N, V] fp32."""
    x = rms_norm(out, model.model.norm.weight, model.config.rms_norm_eps)
    return (precision or Precision()).product(x, model.lm_head.weight)[0]


class _Stream:
    """`BlockStream` with the scores of a row against all later queries from one product."""

    def __init__(self, model: K3Model, embedding: Tensor) -> None:
        self.config: K3Config = model.config
        self.queries = model.queries()
        self.bank: list[Tensor] = []
        self.scores: list[Tensor] = []
        self.partial = embedding
        self.reads = self.layer = 0

    def _scores(self, row: Tensor, queries: Tensor) -> Tensor:
        scale = torch.rsqrt(row.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return functional.linear(row, queries) * scale

    def read(self) -> Tensor:
        which = self.reads
        self.reads += 1
        if not self.bank:
            return self.partial
        own = self._scores(self.partial, self.queries[which : which + 1])
        score = torch.cat([*(s[..., which : which + 1] for s in self.scores), own], dim=-1)
        return combine(score.softmax(-1), [*self.bank, self.partial])

    def write_attention(self, output: Tensor) -> None:
        if self.layer % self.config.attn_res_block_size == 0:
            self.bank.append(self.partial)
            self.scores.append(self._scores(self.partial, self.queries))
            self.partial = output
        else:
            self.partial = self.partial + output

    def write_ffn(self, output: Tensor) -> None:
        self.partial = self.partial + output
        self.layer += 1


def _kda(
    module: KDA, x: Tensor, before: LayerCarry | None, precision: Precision
) -> tuple[Tensor, LayerCarry]:
    B, H, K = x.shape[0], module.heads, module.head_dim
    P = H * K
    projections = (module.q_proj, module.k_proj, module.v_proj, module.b_proj, module.g_proj, module.f_a_proj)
    joined = precision.product(x, torch.cat([projection.weight for projection in projections]))[0]
    low = joined[..., 4 * P + H :]
    z = precision.product(low, module.f_b_proj.weight)[0] + module.dt_bias
    taps = torch.cat([module.q_conv1d.weight, module.k_conv1d.weight, module.v_conv1d.weight])[:, 0].T
    if before is None or before.second is None:
        carry, S = x.new_zeros(B, taps.shape[0] - 1, 3 * P), x.new_zeros(B, H, K, K)
    else:
        carry, S = before.first.expand(B, -1, -1), before.second.expand(B, -1, -1, -1)
    rate = module.A_log.exp()
    if module.bound is None:
        raise ValueError("training is for K3's bounded gate; this configuration has gate_lower_bound null")
    run = between if native.available(K) else native.kda_layer
    gated, S = run(
        joined,
        carry,
        z,
        taps,
        rate,
        module.o_norm.weight,
        S,
        beta_at=3 * P,
        gate_at=3 * P + H,
        bound=module.bound,
        eps=module.o_norm.eps,
    )
    left = torch.cat([carry, joined[..., : 3 * P]], dim=1)[:, -(taps.shape[0] - 1) :] if B == 1 else carry
    return precision.product(gated, module.o_proj.weight)[0], LayerCarry(left, S)


def between(
    x: Tensor,
    carry: Tensor,
    z: Tensor,
    taps: Tensor,
    rate: Tensor,
    norm: Tensor,
    S: Tensor,
    *,
    beta_at: int,
    gate_at: int,
    bound: float,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """``native.kda_layer`` in plain torch."""
    B, T, _ = x.shape
    H, K = S.shape[1], S.shape[2]
    P = H * K
    mixed = conv_silu(torch.cat([carry, x[..., : 3 * P]], dim=1), taps.T)
    q, k, v = mixed.view(B, T, 3, H, K).unbind(2)
    g = bound * torch.sigmoid(rate[:, None] * z.view(B, T, H, K))
    beta = torch.sigmoid(x[..., beta_at : beta_at + H])
    o, S = chunked(l2norm(q) * K**-0.5, l2norm(k), v, g, beta, S)
    return torch.sigmoid(x[..., gate_at : gate_at + P]) * rms_norm(o, norm, eps).flatten(-2), S


def chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """``kda_chunk`` with exponents taken from the middle of a 32-token chunk.

    With g >= -5 they stay within 16 * 5 = 80 on both sides, which fp32 holds; entries above the diagonal
    may overflow and are dropped.
    """
    B, T, H, K = q.shape
    count = -(-T // CHUNK)

    def chunks(x: Tensor) -> Tensor:
        padded = functional.pad(x, (0, 0, 0, 0, 0, count * CHUNK - T)) if count * CHUNK != T else x
        return padded.view(B, count, CHUNK, H, -1).permute(0, 3, 1, 2, 4)

    q, k, v, g, b = (chunks(x) for x in (q, k, v, g, beta[..., None]))
    G = g.cumsum(-2)
    middle = G[..., CHUNK // 2 - 1 : CHUNK // 2, :]
    up, down = (G - middle).exp(), (middle - G).exp()
    start = middle.exp()
    kb, read = b * k * up, q * up
    right = (k * down).transpose(-1, -2)
    A = (kb @ right).tril(-1)
    scores = (read @ right).tril()
    solved = torch.linalg.solve_triangular(
        A, torch.cat([kb * start, b * v], dim=-1), upper=False, unitriangular=True
    )
    W, U = solved.tensor_split([K], dim=-1)
    end = G[..., -1:, :]
    write = ((end - G).exp() * k).transpose(-1, -2)
    last = end.exp().transpose(-1, -2)
    states, written = [], []
    for w, u, wr, la in zip(W.unbind(2), U.unbind(2), write.unbind(2), last.unbind(2), strict=True):
        states.append(S)
        new = u - w @ S
        written.append(new)
        S = la * S + wr @ new
    o = (read * start) @ torch.stack(states, dim=2) + scores @ torch.stack(written, dim=2)
    return o.permute(0, 2, 3, 1, 4).reshape(B, count * CHUNK, H, K)[:, :T], S


def _mla(
    module: MLA, x: Tensor, before: LayerCarry | None, precision: Precision
) -> tuple[Tensor, LayerCarry]:
    B, T, _ = x.shape
    H, eps = module.heads, module.kv_a_layernorm.eps
    low, latent, gate = precision.product(
        x, module.q_a_proj.weight, module.kv_a_proj_with_mqa.weight, module.g_proj.weight
    )
    q = precision.product(rms_norm(low, module.q_a_layernorm.weight, eps), module.q_b_proj.weight)[0]
    q = q.view(B, T, H, -1).transpose(1, 2)
    c, slot = latent.tensor_split([module.rank], dim=-1)
    joined = torch.cat([rms_norm(c, module.kv_a_layernorm.weight, eps), slot], dim=-1)
    if before is not None:
        joined = torch.cat([before.first.expand(B, -1, -1), joined], dim=1)
    c, slot = joined.tensor_split([module.rank], dim=-1)
    both = precision.product(c, module.kv_b_proj.weight)[0].view(B, -1, H, module.nope + module.value)
    k_nope, v = both.transpose(1, 2).tensor_split([module.nope], dim=-1)
    k = torch.cat([k_nope, slot[:, None].expand(-1, H, -1, -1)], dim=-1)
    o = _attend(q, k, v).transpose(1, 2).flatten(-2)
    y = precision.product(torch.sigmoid(gate) * o, module.o_proj.weight)[0]
    return y, LayerCarry(joined, None)


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of the last T of S positions: q [B, H, T, D], k and v [B, H, S, D]."""
    T, S = q.shape[2], k.shape[2]
    if T < S < 1.5 * T:  # long rows: a few idle queries cost less than a mask
        return _attend(functional.pad(q, (0, 0, S - T, 0)), k, v)[:, :, S - T :]
    mask = None if S == T else torch.ones(T, S, dtype=torch.bool).tril(S - T)
    return functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=q.shape[-1] ** -0.5
    )


def _feed_forward(
    layer: DecoderLayer,
    index: int,
    x: Tensor,
    precision: Precision,
    observer: RoutingObserver | None,
    valid: Tensor | None,
) -> Tensor:
    if not layer.is_moe:
        up, gate = precision.product(x, layer.mlp.up_proj.weight, layer.mlp.gate_proj.weight)
        return precision.product(_situ(gate, up, layer.mlp.betas), layer.mlp.down_proj.weight)[0]
    moe: LatentMoE = layer.block_sparse_moe
    flat = x.flatten(0, 1)
    bias = moe.gate.e_score_correction_bias
    routing = route(flat, moe.gate.weight, bias, moe.top_k, moe.scaling)
    if observer is not None:
        scores = routing.scores.detach()
        observer.observe(index, scores if valid is None else scores[valid.flatten()], bias)
    shared = moe.shared_experts
    gate, up, z = precision.product(
        flat, shared.gate_proj.weight, shared.up_proj.weight, moe.routed_expert_down_proj.weight
    )
    u = _experts(z, routing, moe, precision)
    u = rms_norm(u, moe.routed_expert_norm.weight, moe.routed_expert_norm.eps)
    y = (
        precision.product(_situ(gate, up, moe.betas), shared.down_proj.weight)[0]
        + precision.product(u, moe.routed_expert_up_proj.weight)[0]
    )
    return y.view_as(x)


def _situ(a: Tensor, b: Tensor, betas: tuple[float, float]) -> Tensor:
    return situ(a, b, *betas) if native.available(32) else native.situ(a, b, *betas)


def _experts(z: Tensor, routing: Routing, moe: LatentMoE, precision: Precision) -> Tensor:
    """``experts_batched`` with gate and up projection in one product: tokens sorted by expert, padded."""
    w1, w3, w2 = moe.experts.all()
    (N, k), E = routing.index.shape, w1.shape[0]
    flat = routing.index.flatten()
    order = flat.argsort(stable=True)
    counts = flat.bincount(minlength=E)
    busiest = int(counts.max())
    sorted_expert = flat[order]
    place = torch.arange(N * k) - (counts.cumsum(0) - counts)[sorted_expert]
    slot = sorted_expert * busiest + place
    dtype = precision.matmul
    inputs = z.to(dtype).new_zeros(E * busiest, z.shape[1])
    inputs = inputs.index_copy(0, slot, z.to(dtype)[order // k]).view(E, busiest, -1)
    both = (inputs @ torch.cat([w1, w3], dim=1).to(dtype).transpose(1, 2)).float()
    gate, up = both.tensor_split(2, dim=-1)
    inner = _situ(gate, up, moe.betas)
    outputs = (inner.to(dtype) @ w2.to(dtype).transpose(1, 2)).float().flatten(0, 1)
    slot_of_pair = torch.empty_like(slot).index_copy(0, order, slot).view(N, k)
    weighted = [outputs[slot_of_pair[:, rank]] * routing.weight[:, rank : rank + 1] for rank in range(k)]
    return torch.stack(weighted).sum(0)
