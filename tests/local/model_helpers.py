"""Shared by the model tests: weights in which every mechanism matters, and small configs."""

from __future__ import annotations

from dataclasses import replace

import torch

from k3eval_local.model.config import K3Config, LinearAttnConfig
from k3eval_local.model.decoder import K3Model

TINY = K3Config(
    vocab_size=260,
    hidden_size=6,
    num_hidden_layers=3,
    num_attention_heads=2,
    intermediate_size=5,
    q_lora_rank=4,
    kv_lora_rank=3,
    qk_nope_head_dim=3,
    qk_rope_head_dim=2,
    v_head_dim=2,
    routed_expert_hidden_size=4,
    moe_intermediate_size=3,
    num_experts=4,
    num_experts_per_token=2,
    attn_res_block_size=2,
    linear_attn=LinearAttnConfig(num_heads=2, head_dim=3, kda_layers=(1,), full_attn_layers=(2, 3)),
)
"""No two sizes that could be confused are equal, so that a transposed weight cannot pass."""


def shaken(config: K3Config, seed: int = 0, dtype: torch.dtype = torch.float64) -> K3Model:
    """Random weights with nothing left at its neutral start: queries, norms, decay rates, biases."""
    model = K3Model(config, dtype).init_weights(seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            size = 0.3 if parameter.dim() == 1 or parameter.shape[0] == 1 else 0.1 * float(parameter.std())
            parameter += size * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        for buffer in model.buffers():
            buffer += 0.1 * torch.randn(buffer.shape, generator=generator, dtype=buffer.dtype)
    return model


def all_experts(config: K3Config) -> K3Config:
    """Every expert runs for every token, so that rounding cannot flip a choice."""
    return replace(config, num_experts=4, num_experts_per_token=4)


def random_ids(config: K3Config, batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """[batch, length] ids."""
    return torch.randint(0, config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))
