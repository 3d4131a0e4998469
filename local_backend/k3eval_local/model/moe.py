"""Stable LatentMoE: many small experts on a narrow latent, chosen by an fp32 router (K3 report section 2.3).

    s = sigmoid(W_r x)                      router on the full-width input, fp32
    T = top-k(s + b)                        the correction bias b only selects
    p_j = s_j / (sum_{r in T} s_r + 1e-20)
    u = sum_{j in T} p_j E_j(W_dn x)        E_j: SiTU network on the latent
    y = Shared(x) + W_up RMSNorm(u)

Nothing is ever dropped: exactly k experts run for every token. ``b`` is set by ``balancing``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from k3eval_local.model.config import K3Config
from k3eval_local.model.mxfp4 import dequantize
from k3eval_local.model.norm import RMSNorm, exact, wide
from k3eval_local.model.situ import SituMLP, situ_glu, situ_mlp

ExpertForm = Literal["loop", "batched"]
ExpertWeights = tuple[Tensor, Tensor, Tensor]
"""w1 (gate) and w3 (up) [..., f, l], w2 (down) [..., l, f], in the order w1, w3, w2."""


class RoutingObserver(Protocol):
    """Sees the router's scores of a training step; see ``balancing.QuantileBalancer``."""

    def observe(self, layer: int, scores: Tensor, bias: Tensor) -> None:
        """scores: [N, E] of the real tokens (no padding), detached. bias: [E] that was used."""
        ...


@dataclass(frozen=True)
class Routing:
    """index: [N, k] int64 experts. weight: [N, k] their shares of the sum. scores: [N, E], all of them."""

    index: Tensor
    weight: Tensor
    scores: Tensor


def route(x: Tensor, router: Tensor, bias: Tensor, top_k: int, scaling: float = 1.0) -> Routing:
    """Choose k experts for each token. x: [N, d], router: [E, d], bias: [E]; computed in fp32.

    bf16 logits would give about 5% of the tokens another set of experts.
    """
    kept = wide(x.dtype)
    with exact(x.device):
        scores = torch.sigmoid(functional.linear(x.to(kept), router.to(kept)))
    index = (scores.detach() + bias).topk(top_k, dim=-1).indices
    chosen = scores.gather(-1, index)
    return Routing(index, chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * scaling, scores)


def experts_loop(
    z: Tensor, routing: Routing, weights: Callable[[int], ExpertWeights], betas: tuple[float, float]
) -> Tensor:
    """The definition, one expert after the other: best for few tokens, and reads only the experts in use.

    z: [N, l] -> sum of the chosen experts' weighted outputs [N, l].
    """
    u = torch.zeros_like(z)
    for expert in sorted(set(routing.index.flatten().tolist())):
        token, rank = (routing.index == expert).nonzero(as_tuple=True)
        w1, w3, w2 = weights(expert)
        share = routing.weight[token, rank].to(z.dtype)[:, None]
        u = u.index_add(0, token, share * situ_mlp(z[token], w1, w3, w2, *betas))
    return u


def experts_batched(
    z: Tensor, routing: Routing, weights: ExpertWeights, betas: tuple[float, float]
) -> Tensor:
    """The same by three batched products: tokens sorted by expert, each expert padded to the busiest one.

    z: [N, l]; weights stacked over E. Costs E * (load of the busiest expert), which balanced routing keeps
    near N * k.
    """
    w1, w3, w2 = weights
    (N, k), E = routing.index.shape, w1.shape[0]
    flat = routing.index.flatten()
    order = flat.argsort(stable=True)
    counts = flat.bincount(minlength=E)
    busiest = int(counts.max())
    sorted_expert = flat[order]
    place = torch.arange(N * k, device=z.device) - (counts.cumsum(0) - counts)[sorted_expert]
    slot = sorted_expert * busiest + place
    inputs = z.new_zeros(E * busiest, z.shape[1]).index_copy(0, slot, z[order // k]).view(E, busiest, -1)
    inner = situ_glu(inputs @ w1.transpose(1, 2), inputs @ w3.transpose(1, 2), *betas)
    outputs = (inner @ w2.transpose(1, 2)).flatten(0, 1)
    slot_of_pair = torch.empty_like(slot).index_copy(0, order, slot)
    return (outputs[slot_of_pair].view(N, k, -1) * routing.weight.to(z.dtype)[..., None]).sum(1)


class Experts(nn.Module):
    """Routed experts, stacked: w1, w3 [E, f, l] and w2 [E, l, f]."""

    def __init__(self, config: K3Config, dtype: torch.dtype) -> None:
        super().__init__()
        E, f, latent = config.num_experts, config.moe_intermediate_size, config.routed_expert_hidden_size
        self.w1 = nn.Parameter(torch.zeros(E, f, latent, dtype=dtype))
        self.w3 = nn.Parameter(torch.zeros(E, f, latent, dtype=dtype))
        self.w2 = nn.Parameter(torch.zeros(E, latent, f, dtype=dtype))

    def one(self, expert: int) -> ExpertWeights:
        """The matrices of one expert (views)."""
        return self.w1[expert], self.w3[expert], self.w2[expert]

    def all(self) -> ExpertWeights:
        """The stacked matrices."""
        return self.w1, self.w3, self.w2


class PackedExperts(nn.Module):
    """Routed experts that stay MXFP4 in memory (4.25 bits a weight) and are unpacked when used."""

    def __init__(self, config: K3Config, dtype: torch.dtype) -> None:
        super().__init__()
        E, f, latent = config.num_experts, config.moe_intermediate_size, config.routed_expert_hidden_size
        self.dtype = dtype
        for name, (rows, columns) in {"w1": (f, latent), "w3": (f, latent), "w2": (latent, f)}.items():
            packed = torch.zeros(E, rows, columns // 2, dtype=torch.uint8)
            scale = torch.zeros(E, rows, columns // 32, dtype=torch.uint8)
            self.register_buffer(f"{name}_packed", packed)
            self.register_buffer(f"{name}_scale", scale)

    def _unpack(self, which: int | slice) -> ExpertWeights:
        w1, w3, w2 = (
            dequantize(
                self.get_buffer(f"{name}_packed")[which], self.get_buffer(f"{name}_scale")[which], self.dtype
            )
            for name in ("w1", "w3", "w2")
        )
        return w1, w3, w2

    def one(self, expert: int) -> ExpertWeights:
        """The matrices of one expert, unpacked."""
        return self._unpack(expert)

    def all(self) -> ExpertWeights:
        """All matrices, unpacked and stacked."""
        return self._unpack(slice(None))


class Gate(nn.Module):
    """Router weight [E, d] and the fp32 correction bias [E], which no gradient reaches."""

    e_score_correction_bias: Tensor

    def __init__(self, config: K3Config, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(config.num_experts, config.hidden_size, dtype=dtype))
        bias = torch.zeros(config.num_experts, dtype=wide(dtype))
        self.register_buffer("e_score_correction_bias", bias)


class LatentMoE(nn.Module):
    """One mixture layer; parameter names are those of the checkpoint, experts stacked."""

    def __init__(self, config: K3Config, dtype: torch.dtype) -> None:
        super().__init__()
        d, latent = config.hidden_size, config.routed_expert_hidden_size
        self.top_k, self.scaling = config.num_experts_per_token, config.routed_scaling_factor
        self.betas = (config.activation_situ_beta, config.activation_situ_linear_beta)
        self.gate = Gate(config, dtype)
        self.routed_expert_down_proj = nn.Linear(d, latent, bias=False, dtype=dtype)
        self.routed_expert_norm = RMSNorm(latent, config.rms_norm_eps, dtype)
        self.routed_expert_up_proj = nn.Linear(latent, d, bias=False, dtype=dtype)
        self.experts: Experts | PackedExperts = (PackedExperts if config.mxfp4 else Experts)(config, dtype)
        shared = config.num_shared_experts * config.moe_intermediate_size
        self.shared_experts = SituMLP(d, shared, self.betas, dtype)

    def forward(self, x: Tensor, form: ExpertForm | None = None) -> tuple[Tensor, Tensor]:
        """Run the layer: x [N, d], normed -> (y [N, d], router scores [N, E])."""
        routing = route(x, self.gate.weight, self.gate.e_score_correction_bias, self.top_k, self.scaling)
        z: Tensor = self.routed_expert_down_proj(x)
        E = self.gate.weight.shape[0]
        if form is None:
            form = "loop" if routing.index.numel() <= E else "batched"
        if form == "loop":
            u = experts_loop(z, routing, self.experts.one, self.betas)
        else:
            u = experts_batched(z, routing, self.experts.all(), self.betas)
        y: Tensor = self.shared_experts(x) + self.routed_expert_up_proj(self.routed_expert_norm(u))
        return y, routing.scores
