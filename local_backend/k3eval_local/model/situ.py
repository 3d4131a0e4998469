"""SiTU-GLU, the activation of every feed-forward network in Kimi K3 (report section 2.3.2)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from k3eval_local.model.norm import wide


def situ_glu(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """``[beta tanh(a / beta) sigmoid(a)] * [linear_beta tanh(b / linear_beta)]``, a = gate, b = up.

    Any equal shapes; computed in fp32 (fp64 for fp64) and returned in the dtype of ``gate``. Each output
    is below ``beta * linear_beta`` in size (K3: 4 * 25 = 100); near zero it equals SwiGLU to first order.
    """
    a, b = gate.to(wide(gate.dtype)), up.to(wide(up.dtype))
    soft_gate = beta * torch.tanh(a / beta) * torch.sigmoid(a)
    soft_up = linear_beta * torch.tanh(b / linear_beta)
    return (soft_gate * soft_up).to(gate.dtype)


def situ_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, beta: float, linear_beta: float) -> Tensor:
    """``W_down situ(W_gate x, W_up x)``: x [..., d], gate and up [f, d], down [d, f] -> [..., d]."""
    return functional.linear(
        situ_glu(functional.linear(x, gate), functional.linear(x, up), beta, linear_beta), down
    )


class SituMLP(nn.Module):
    """The dense feed-forward network of the first layer, and the fused shared experts."""

    def __init__(
        self,
        width: int,
        inner: int,
        betas: tuple[float, float],
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.betas = betas
        self.gate_proj = nn.Linear(width, inner, bias=False, dtype=dtype)
        self.up_proj = nn.Linear(width, inner, bias=False, dtype=dtype)
        self.down_proj = nn.Linear(inner, width, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width]."""
        return situ_mlp(x, self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight, *self.betas)
