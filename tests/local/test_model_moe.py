from __future__ import annotations

import math

import pytest
import torch
from model_helpers import TINY, random_ids, shaken
from torch import Tensor
from torch.func import functional_call

from k3eval_local.model.balancing import BiasHistogram, QuantileBalancer, exact_bias, required_bias
from k3eval_local.model.config import K3Config
from k3eval_local.model.moe import LatentMoE, Routing, experts_batched, experts_loop, route
from k3eval_local.model.situ import situ_glu

BETAS = (4.0, 25.0)


def test_situ_is_bounded_and_starts_as_swiglu() -> None:
    a, b = (
        torch.linspace(-1e4, 1e4, 101, dtype=torch.float64),
        torch.linspace(1e4, -1e4, 101, dtype=torch.float64),
    )
    assert situ_glu(a, b, 4, 25).abs().max() <= 100
    small = 1e-3 * torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    swiglu = torch.nn.functional.silu(small) * small.flip(0)
    torch.testing.assert_close(situ_glu(small, small.flip(0), 4, 25), swiglu, rtol=1e-6, atol=0)
    one = torch.ones(1, dtype=torch.float64)
    expected = 4 * math.tanh(0.5) / (1 + math.exp(-2)) * 25 * math.tanh(0.12)
    assert float(situ_glu(2 * one, 3 * one, 4, 25)) == pytest.approx(expected, rel=1e-14)


def test_the_bias_selects_and_does_not_weigh() -> None:
    scores = torch.tensor([[0.9, 0.8, 0.2, 0.1]], dtype=torch.float64)
    x, router = torch.logit(scores), torch.eye(4, dtype=torch.float64)
    plain = route(x, router, torch.zeros(4, dtype=torch.float64), 2)
    assert plain.index.tolist() == [[0, 1]]
    biased = route(x, router, torch.tensor([0.0, -1, 0, 1], dtype=torch.float64), 2)
    assert sorted(biased.index[0].tolist()) == [0, 3]
    shares = dict(zip(biased.index[0].tolist(), biased.weight[0].tolist(), strict=True))
    assert shares[0] == pytest.approx(0.9)
    assert shares[3] == pytest.approx(0.1)
    assert float(route(x, router, torch.zeros(4), 2, scaling=2.5).weight.sum()) == pytest.approx(2.5)


def test_the_router_is_fp32_in_a_bf16_model_and_under_autocast() -> None:
    g = torch.Generator().manual_seed(0)
    x, router = torch.randn(64, 128, generator=g).bfloat16(), torch.randn(16, 128, generator=g)
    exact = route(x.float(), router, torch.zeros(16), 2)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = route(x, router, torch.zeros(16), 2)
    assert mixed.scores.dtype == torch.float32
    assert torch.equal(mixed.scores, exact.scores)


@pytest.mark.parametrize("tokens", [0, 1, 3, 40])
def test_batched_equals_loop_equals_the_equation(tokens: int) -> None:
    g = torch.Generator().manual_seed(tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    z, w1, w3, w2 = normal(tokens, 6), normal(5, 4, 6), normal(5, 4, 6), normal(5, 6, 4)
    routing = route(normal(tokens, 7), normal(5, 7), normal(5), 3)
    truth = torch.zeros_like(z)
    for n in range(tokens):
        for share, e in zip(routing.weight[n], routing.index[n].tolist(), strict=True):
            truth[n] += share * (w2[e] @ situ_glu(w1[e] @ z[n], w3[e] @ z[n], *BETAS))
    loop = experts_loop(z, routing, lambda e: (w1[e], w3[e], w2[e]), BETAS)
    torch.testing.assert_close(loop, truth, rtol=0, atol=1e-10)
    if tokens:
        batched = experts_batched(z, routing, (w1, w3, w2), BETAS)
        torch.testing.assert_close(batched, truth, rtol=0, atol=1e-10)


def test_no_token_is_dropped_when_all_choose_the_same_experts() -> None:
    g = torch.Generator().manual_seed(0)
    z, w1, w3, w2 = (torch.randn(*s, generator=g) for s in ((33, 6), (5, 4, 6), (5, 4, 6), (5, 6, 4)))
    routing = Routing(torch.tensor([[1, 4]] * 33), torch.full((33, 2), 0.5), torch.zeros(33, 5))
    loop = experts_loop(z, routing, lambda e: (w1[e], w3[e], w2[e]), BETAS)
    torch.testing.assert_close(experts_batched(z, routing, (w1, w3, w2), BETAS), loop)


@pytest.mark.parametrize("form", ["loop", "batched"])
def test_gradients_of_the_layer(form: str) -> None:
    torch.manual_seed(0)
    layer = LatentMoE(TINY, torch.float64)
    names = [name for name, _ in layer.named_parameters()]
    weights = [torch.randn_like(p).mul_(0.7).requires_grad_() for p in layer.parameters()]
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)

    def run(x: Tensor, *values: Tensor) -> Tensor:
        y: Tensor = functional_call(layer, dict(zip(names, values, strict=True)), (x, form))[0]
        return y

    assert torch.autograd.gradcheck(run, (x, *weights))


def skewed_scores(tokens: int, experts: int, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    popularity = 1.5 * torch.randn(experts, generator=g, dtype=torch.float64)
    return torch.sigmoid(torch.randn(tokens, experts, generator=g, dtype=torch.float64) + popularity)


def loads(scores: Tensor, bias: Tensor, top_k: int) -> Tensor:
    return (scores + bias).topk(top_k, dim=-1).indices.flatten().bincount(minlength=scores.shape[1])


@pytest.mark.parametrize(
    ("experts", "top_k", "tokens"), [(16, 2, 999), (32, 4, 500), (112, 2, 2001), (8, 7, 90)]
)
def test_the_histogram_is_within_one_bin_of_the_exact_quantile(experts: int, top_k: int, tokens: int) -> None:
    g = torch.Generator().manual_seed(experts)
    bias = 0.2 * torch.randn(experts, generator=g, dtype=torch.float64)
    required = required_bias(skewed_scores(tokens, experts, 1), bias, top_k)
    histogram = BiasHistogram.for_bias(bias)
    for part in required.split(101):
        histogram.add(part)
    assert int(histogram.counts.sum()) == tokens * experts
    estimate = histogram.quantile(top_k)
    exact = required.kthvalue(math.ceil(tokens * top_k / experts), dim=0).values
    assert float((estimate - exact).abs().max()) <= histogram.width
    torch.testing.assert_close(exact_bias(required, top_k), exact - exact.mean())


@pytest.mark.parametrize(("form", "factor"), [("exact", 1.25), ("histogram", 1.6)])
@pytest.mark.parametrize(("experts", "top_k"), [(16, 2), (112, 2)])
def test_the_load_becomes_nearly_uniform(form: str, factor: float, experts: int, top_k: int) -> None:
    scores = skewed_scores(4000, experts, 2)
    bias = torch.zeros(experts, dtype=torch.float64)
    uniform = 4000 * top_k / experts
    before = loads(scores, bias, top_k)
    assert before.max() > 5 * uniform
    assert before.min() == 0
    for _ in range(12):
        required = required_bias(scores, bias, top_k)
        if form == "exact":
            bias = exact_bias(required, top_k)
        else:
            histogram = BiasHistogram.for_bias(bias)
            histogram.add(required)
            bias = histogram.quantile(top_k) - histogram.quantile(top_k).mean()
        assert abs(float(bias.mean())) < 1e-12
    after = loads(scores, bias, top_k)
    assert after.max() <= factor * uniform
    assert after.min() >= uniform / factor


@pytest.mark.parametrize("form", ["exact", "histogram"])
def test_the_balancer_acts_from_the_next_step_and_never_sees_padding(form: str) -> None:
    config = K3Config.scaled("a")
    model, padded = (shaken(config, dtype=torch.float32) for _ in range(2))
    balancer = QuantileBalancer(model, form)  # type: ignore[arg-type]
    ids = random_ids(config, 3, 40)
    lengths = (40, 17, 1)
    gate = model.layers[1].block_sparse_moe.gate
    before = gate.e_score_correction_bias.clone()
    with torch.no_grad():
        for row, length in enumerate(lengths):
            model(ids[row : row + 1, :length], observer=balancer)
        assert torch.equal(gate.e_score_correction_bias, before)
        step_loads = balancer.step()
        assert not torch.equal(gate.e_score_correction_bias, before)
        assert abs(float(gate.e_score_correction_bias.mean())) < 1e-6
        other = QuantileBalancer(padded, form)  # type: ignore[arg-type]
        padded(ids, lengths=lengths, observer=other)
        other_loads = other.step()
    assert sorted(step_loads) == [1, 2, 3, 4]
    for index in step_loads:
        assert int(step_loads[index].sum()) == sum(lengths) * 2
        assert torch.equal(step_loads[index], other_loads[index])
        torch.testing.assert_close(
            model.layers[index].block_sparse_moe.gate.e_score_correction_bias,
            padded.layers[index].block_sparse_moe.gate.e_score_correction_bias,
            rtol=0,
            atol=1e-4,
        )
    assert balancer.step() == {}


def test_the_moving_average_keeps_a_share_of_the_old_bias() -> None:
    config = K3Config.scaled("a")
    models = [shaken(config) for _ in range(2)]
    old = models[0].layers[1].block_sparse_moe.gate.e_score_correction_bias.clone()
    for model, ema in zip(models, (0.0, 0.75), strict=True):
        balancer = QuantileBalancer(model, "exact", ema=ema)
        with torch.no_grad():
            model(random_ids(config, 1, 30), observer=balancer)
        balancer.step()
    new, averaged = (m.layers[1].block_sparse_moe.gate.e_score_correction_bias for m in models)
    torch.testing.assert_close(averaged, 0.75 * old + 0.25 * new)
    with pytest.raises(ValueError, match="ema"):
        QuantileBalancer(models[0], ema=1.0)
