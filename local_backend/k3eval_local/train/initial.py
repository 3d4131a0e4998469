"""Weights that start close to copying: what makes a small model learn to find and repeat names quickly.

After the usual random start, KDA keys equal queries but look one to three tokens back while queries and
values look at the present token, so that a state read returns what once followed the same tokens; decay is
slow; MLA queries equal keys; the head equals the embedding.
"""

import torch

from k3eval_local.model.decoder import K3Model
from k3eval_local.model.kda import KDA

_DECAY = (-9.0, -5.5)
"""Range of ``dt_bias``: log-decay a token of -0.0006 to -0.02."""


def initialise(model: K3Model, seed: int) -> None:
    """Fill ``model`` from ``seed``."""
    model.init_weights(seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.model.embed_tokens.weight * model.config.hidden_size**-0.5)
        for layer in model.layers:
            attention = layer.self_attn
            if isinstance(attention, KDA):
                _kda(attention, generator)
            else:
                nope, heads = attention.nope, attention.heads
                shared = min(attention.q_a_proj.weight.shape[0], attention.rank)
                attention.q_a_proj.weight[:shared].copy_(attention.kv_a_proj_with_mqa.weight[:shared])
                queries = attention.q_b_proj.weight.view(heads, -1, attention.q_a_proj.weight.shape[0])
                queries[:, :nope, :shared].copy_(attention.expansion()[0][:, :, :shared])


def _kda(attention: KDA, generator: torch.Generator) -> None:
    attention.k_proj.weight.copy_(attention.q_proj.weight)
    attention.f_b_proj.weight.mul_(0.1)
    low, high = _DECAY
    attention.dt_bias.copy_(low + (high - low) * torch.rand(attention.dt_bias.shape, generator=generator))
    taps = attention.q_conv1d.weight.shape[2]
    for conv in (attention.q_conv1d, attention.k_conv1d, attention.v_conv1d):
        conv.weight.copy_(0.02 * torch.randn(conv.weight.shape, generator=generator))
        conv.weight[:, 0, taps - 1] += 0.0 if conv is attention.k_conv1d else 1.0
    for head in range(attention.heads):
        rows = slice(head * attention.head_dim, (head + 1) * attention.head_dim)
        for back in range(min(head % 3 + 1, taps - 1)):  # heads match one, two or three tokens
            strength = 0.8**back
            attention.k_conv1d.weight[rows, 0, taps - 2 - back] += strength
            if back:
                attention.q_conv1d.weight[rows, 0, taps - 1 - back] += strength
