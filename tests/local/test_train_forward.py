"""The training forward computes what the reference model computes, with the same gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from k3eval_local.model import K3Config, K3Model
from k3eval_local.train import forward as fast
from k3eval_local.train import native
from k3eval_local.train.gradients import combine, conv_silu, rms_norm, situ
from k3eval_local.train.initial import initialise

HEAD, ROWS, WIDTH = 21, 3, 45


@pytest.fixture(scope="module")
def model() -> K3Model:
    model = K3Model(replace(K3Config.scaled("a"), vocab_size=512)).init_weights(3)
    with torch.no_grad():  # zero queries would hide the attention residuals
        for name, parameter in model.named_parameters():
            if name.endswith("_res_proj.weight"):
                parameter.copy_(
                    0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
                )
    return model


@pytest.fixture
def torch_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a compiler."""
    native.available.cache_clear()
    monkeypatch.setenv("CC", "/bin/false")
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    native.library.cache_clear()


def _gradients(model: K3Model, logits: Tensor) -> dict[str, Tensor]:
    loss = (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).mean()
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return {name: grad for name, grad in zip(names, found, strict=True) if grad is not None}


def _compare(model: K3Model) -> None:
    generator = torch.Generator().manual_seed(0)
    head = torch.randint(0, 512, (1, HEAD), generator=generator)
    rows = torch.randint(0, 512, (ROWS, WIDTH), generator=generator)
    reference, _ = model(torch.cat([head.expand(ROWS, -1), rows], dim=1), form="recurrent")
    reference = reference[:, HEAD:]
    _, carry = fast.hidden(model, head)
    out, _ = fast.hidden(model, rows, carry)
    result = fast.logits(model, out)
    torch.testing.assert_close(result, reference, atol=1e-3, rtol=1e-3)
    expected, found = _gradients(model, reference), _gradients(model, result)
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        scale = float(gradient.abs().max()) + 1e-9
        assert float((found[name] - gradient).abs().max()) < 2e-3 * scale, name


def test_plain_torch_equals_the_reference(model: K3Model, torch_path: None) -> None:
    assert native.available(32) is not None
    _compare(model)
    native.available.cache_clear()
    native.library.cache_clear()


def test_the_native_layer_equals_the_reference(model: K3Model) -> None:
    reason = native.available(32)
    if reason is not None:
        assert "compiler" in reason or "build" in reason
        return
    _compare(model)


def test_bf16_products_are_as_close_as_bf16_is() -> None:
    generator = torch.Generator().manual_seed(2)
    x, one, other = (torch.randn(*shape, generator=generator) for shape in ((9, 64), (5, 64), (7, 64)))
    exact = fast.Precision().product(x, one, other)
    rough = fast.Precision(torch.bfloat16).product(x, one, other)
    for right, near in zip(exact, rough, strict=True):
        assert near.dtype == torch.float32
        assert float((right - near).abs().max()) < 0.02 * float(right.abs().max())


def test_written_out_gradients_are_right() -> None:
    generator = torch.Generator().manual_seed(4)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-5), (draw(2, 3, 8), draw(8)))
    assert torch.autograd.gradcheck(lambda a, b: situ(a, b, 4.0, 25.0), (draw(3, 5), draw(3, 5)))
    assert torch.autograd.gradcheck(conv_silu, (draw(2, 9, 4), draw(4, 4)))
    assert torch.autograd.gradcheck(
        lambda w, *r: combine(w, r), (draw(2, 3), draw(2, 5), draw(2, 5), draw(2, 5))
    )


def test_the_native_activation_equals_the_written_out_one() -> None:
    if native.available(32) is not None:
        return
    generator = torch.Generator().manual_seed(5)
    a, b = (4 * torch.randn(7, 33, generator=generator) for _ in range(2))
    results = []
    for function in (situ, native.situ):
        x, y = a.clone().requires_grad_(), b.clone().requires_grad_()
        out = function(x, y, 4.0, 25.0)
        results.append((out.detach(), *torch.autograd.grad(out.square().sum(), (x, y))))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-4)


def test_extreme_inputs_stay_finite() -> None:
    """Fast arithmetic would turn 1 / infinity into NaN."""
    if native.available(32) is not None:
        return
    for size in (90.0, 1e4):
        a = torch.tensor([-size, size, 0.0] * 11).requires_grad_()
        b = torch.tensor([size, -size, 1.0] * 11).requires_grad_()
        out = native.situ(a, b, 4.0, 25.0)
        assert all(bool(x.isfinite().all()) for x in (out, *torch.autograd.grad(out.sum(), (a, b))))
        torch.testing.assert_close(out, situ(a, b, 4.0, 25.0), atol=1e-3, rtol=1e-3)
        x = (size * torch.linspace(-1, 1, 2 * 5 * 129).view(2, 5, 129)).requires_grad_()
        z = (size * torch.linspace(1, -1, 2 * 5 * 32).view(2, 5, 32)).requires_grad_()
        gated, state = native.kda_layer(
            x,
            torch.zeros(2, 3, 96),
            z,
            torch.ones(4, 96),
            torch.ones(1),
            torch.ones(32),
            torch.zeros(2, 1, 32, 32),
            beta_at=96,
            gate_at=97,
            bound=-5.0,
            eps=1e-5,
        )
        grads = torch.autograd.grad(gated.sum() + state.sum(), (x, z))
        assert all(bool(t.isfinite().all()) for t in (gated, state, *grads))


def test_the_start_favours_copying() -> None:
    model = K3Model(K3Config.scaled("a"))
    initialise(model, 0)
    attention = model.layers[0].self_attn
    assert torch.equal(attention.k_proj.weight, attention.q_proj.weight)  # type: ignore[union-attr]  # a KDA layer
    again = K3Model(K3Config.scaled("a"))
    initialise(again, 0)
    assert all(
        torch.equal(one, other) for one, other in zip(model.parameters(), again.parameters(), strict=True)
    )
