"""Muon for the hidden matrices, AdamW for embedding, head, router, convolutions and vectors.

Muon replaces a matrix' momentum by the nearest orthogonal one (five Newton-Schulz steps, Jordan et al. 2024),
scaled by sqrt(longer / shorter side). Stacked experts are treated one by one.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_STEPS = ((3.4445, -4.7750, 2.0315),) * 5


def orthogonal(update: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrices to ``update`` [..., m, n], roughly (to about a fifth)."""
    wide = update.shape[-1] >= update.shape[-2]
    x: Tensor = update if wide else update.transpose(-1, -2)
    x = (x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)).bfloat16()  # the steps correct their own rounding
    for a, b, c in _STEPS:
        gram = x @ x.transpose(-1, -2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    turned = x if wide else x.transpose(-1, -2)
    return turned.to(update.dtype)


class Muon(torch.optim.Optimizer):
    """Momentum, then ``orthogonal``."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], lr: float, momentum: float, weight_decay: float
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure is ever used
        """One update; matrices of the same shape are orthogonalised together."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[tuple[nn.Parameter, Tensor]]] = {}
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(parameter)
                state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                update = parameter.grad.lerp(state["momentum"], group["momentum"])
                by_shape.setdefault(parameter.shape[-2:], []).append((parameter, update))
            for shape, pairs in by_shape.items():
                joined = orthogonal(torch.cat([update.reshape(-1, *shape) for _, update in pairs]))
                scale = group["lr"] * (max(shape) / min(shape)) ** 0.5
                at = 0
                for parameter, update in pairs:
                    count = update.numel() // shape.numel()
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(joined[at : at + count].view_as(parameter), alpha=-scale)
                    at += count


@dataclass(frozen=True)
class Rates:
    """Peak learning rates."""

    muon: float = 0.02
    adam: float = 0.004


class Optimizers:
    """Both optimizers behind one interface; every parameter belongs to exactly one."""

    def __init__(self, model: nn.Module, rates: Rates) -> None:
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            (matrices if is_matrix(name, parameter) else others).append(parameter)
        self.muon = Muon(matrices, rates.muon, momentum=0.95, weight_decay=0.01)
        self.adam = torch.optim.AdamW(others, lr=rates.adam, betas=(0.9, 0.98), eps=1e-10, weight_decay=0.0)
        self._rates = rates

    def step(self, share: float) -> None:
        """One update at ``share`` of the peak rates, then clear the gradients."""
        for optimizer, peak in ((self.muon, self._rates.muon), (self.adam, self._rates.adam)):
            for group in optimizer.param_groups:
                group["lr"] = peak * share
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, dict[str, object]]:
        """For resuming."""
        return {"muon": self.muon.state_dict(), "adam": self.adam.state_dict()}

    def load_state_dict(self, state: Mapping[str, dict[str, object]]) -> None:
        """The inverse of ``state_dict``."""
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])


def is_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether Muon trains it: hidden matrices of two real dimensions."""
    special = ("embed_tokens", "lm_head", ".gate.", "conv1d", "b_proj", "res_proj")
    return (
        parameter.dim() >= 2
        and min(parameter.shape[-2:]) > 1
        and not any(part in name for part in special if part != "b_proj" or ".self_attn.b_proj" in name)
    )
