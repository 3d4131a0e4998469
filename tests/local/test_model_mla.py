from __future__ import annotations

import pytest
import torch
from model_helpers import TINY
from torch import Tensor
from torch.func import functional_call

from k3eval_local.model.mla import MLA, attention_mask, causal_mask, mla_absorbed, mla_expanded
from k3eval_local.model.state import MLAState, Segment

B, H, N, S, R, V = 2, 3, 5, 2, 4, 6


def parts(new: int, cached: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(new + 100 * cached)
    shapes = ((B, new, H, N + S), (B, cached + new, R + S), (H, N, R), (H, V, R))
    q, latent, w_uk, w_uv = (
        torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype) for shape in shapes
    )
    return q, latent, w_uk, w_uv


def by_hand(q: Tensor, latent: Tensor, w_uk: Tensor, w_uv: Tensor, seen: Tensor) -> Tensor:
    """The equations of the specification, one head and one query at a time. seen: [B, T, keys] bool."""
    out = torch.zeros(*q.shape[:3], w_uv.shape[1], dtype=q.dtype)
    for b in range(q.shape[0]):
        c, slot = latent[b, :, :R], latent[b, :, R:]
        for t in range(q.shape[1]):
            for h in range(H):
                scores = (c @ w_uk[h].T) @ q[b, t, h, :N] + slot @ q[b, t, h, N:]
                scores = (scores / (N + S) ** 0.5).masked_fill(~seen[b, t], -torch.inf)
                out[b, t, h] = scores.softmax(0) @ (c @ w_uv[h].T)
    return out


@pytest.mark.parametrize(("new", "cached"), [(1, 0), (1, 9), (7, 0), (5, 11)])
def test_absorbed_equals_expanded_equals_the_equations(new: int, cached: int) -> None:
    tensors = parts(new, cached)
    mask = causal_mask(new, cached + new, tensors[0].device)
    truth = by_hand(*tensors, mask.expand(B, -1, -1))
    torch.testing.assert_close(mla_expanded(*tensors, mask), truth, rtol=0, atol=1e-10)
    torch.testing.assert_close(mla_absorbed(*tensors, mask), truth, rtol=0, atol=1e-10)
    if cached == 0:
        torch.testing.assert_close(mla_expanded(*tensors, None, causal=True), truth, rtol=0, atol=1e-10)
    if new == 1:
        torch.testing.assert_close(mla_absorbed(*tensors, None), truth, rtol=0, atol=1e-10)


def test_fp32_stays_within_1e_5() -> None:
    tensors = parts(5, 300)
    mask = causal_mask(5, 305, tensors[0].device)
    truth = mla_expanded(*tensors, mask)
    rough = parts(5, 300, torch.float32)
    for form in (mla_expanded, mla_absorbed):
        torch.testing.assert_close(form(*rough, mask).double(), truth, rtol=0, atol=1e-5)


@pytest.mark.parametrize("form", [mla_expanded, mla_absorbed])
def test_rows_with_different_pasts_see_only_their_own(form: object) -> None:
    tensors = parts(2, 6)
    segment = Segment(past=(6, 2), new=(2, 2), width=2)
    mask = attention_mask(segment, 6, tensors[0].device)
    assert mask is not None
    assert mask[1, 0].tolist() == [True, True, False, False, False, False, True, False]
    poisoned = tensors[1].clone()
    poisoned[1, 2:6] = 1e9
    out = form(tensors[0], poisoned, *tensors[2:], mask)  # type: ignore[operator]
    alone = torch.cat([tensors[1][1:, :2], tensors[1][1:, 6:]], dim=1)
    expected = form(tensors[0][1:], alone, *tensors[2:], causal_mask(2, 4, alone.device))  # type: ignore[operator]
    torch.testing.assert_close(out[1:], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("form", ["expanded", "absorbed"])
def test_gradients_of_the_layer(form: str) -> None:
    torch.manual_seed(0)
    layer = MLA(TINY, torch.float64)
    names = [name for name, _ in layer.named_parameters()]
    weights = [torch.randn_like(p).mul_(0.7).requires_grad_() for p in layer.parameters()]
    x = torch.randn(1, 3, 6, dtype=torch.float64, requires_grad=True)
    latent = torch.randn(1, 2, 5, dtype=torch.float64, requires_grad=True)

    def run(x: Tensor, latent: Tensor, *values: Tensor) -> tuple[Tensor, Tensor]:
        parameters = dict(zip(names, values, strict=True))
        segment = Segment((2,), (3,), 3)
        y, state = functional_call(layer, parameters, (x, MLAState(latent), segment, form))
        return y, state.latent

    assert torch.autograd.gradcheck(run, (x, latent, *weights))
