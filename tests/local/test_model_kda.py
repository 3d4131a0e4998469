from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from types import ModuleType

import pytest
import torch
from model_helpers import TINY
from torch import Tensor
from torch.func import functional_call

from k3eval_local.model.kda import KDA, kda_chunk, kda_gate, kda_recurrent, kda_step, short_conv
from k3eval_local.model.norm import l2norm
from k3eval_local.model.state import KDAState, Segment

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def inputs(
    length: int, *, bound: float | None = -5.0, batch: int = 2, heads: int = 3, d_k: int = 8, d_v: int = 5,
    dtype: torch.dtype = torch.float64, seed: int = 0,
) -> Inputs:  # fmt: skip
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    q, k = (l2norm(normal(batch, length, heads, d_k)) for _ in range(2))
    v, z = normal(batch, length, heads, d_v), 3 * normal(batch, length, heads, d_k)
    decay = kda_gate(z, 0.5 * normal(heads), bound)
    beta = torch.sigmoid(normal(batch, length, heads))
    S = normal(batch, heads, d_k, d_v)
    return tuple(x.to(dtype) for x in (q, k, v, decay, beta, S))  # type: ignore[return-value]


@pytest.mark.parametrize("bound", [-5.0, None], ids=["k3", "kimi-linear"])
@pytest.mark.parametrize("chunk", [16, 32, 64])
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 63, 64, 65, 127, 150])
def test_chunkwise_equals_recurrent(length: int, chunk: int, bound: float | None) -> None:
    q, k, v, g, beta, S = inputs(length, bound=bound, seed=length)
    o, last = kda_recurrent(q, k, v, g, beta, S)
    o2, last2 = kda_chunk(q, k, v, g, beta, S, chunk=chunk, bounded=bound is not None)
    torch.testing.assert_close(o2, o, rtol=0, atol=1e-10)
    torch.testing.assert_close(last2, last, rtol=0, atol=1e-10)


@pytest.mark.parametrize("form", ["chunk", "recurrent", "step"])
@pytest.mark.parametrize("seed", range(4))
def test_hand_over_at_any_split(form: str, seed: int) -> None:
    *tokens, S = inputs(77, seed=seed)
    whole, last = kda_recurrent(*tokens, S)  # type: ignore[call-arg]
    cuts = sorted(torch.randperm(78, generator=torch.Generator().manual_seed(seed))[:5].tolist())
    edges = list(range(78)) if form == "step" else [0, *cuts, 77]
    parts = []
    for start, end in itertools.pairwise(edges):
        piece = [x[:, start:end] for x in tokens]
        if form == "step":
            o, S = kda_step(*(x[:, 0] for x in piece), S)  # type: ignore[call-arg]
            o = o[:, None]
        else:
            o, S = (kda_chunk if form == "chunk" else kda_recurrent)(*piece, S)  # type: ignore[call-arg]
        parts.append(o)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=0, atol=1e-10)
    torch.testing.assert_close(S, last, rtol=0, atol=1e-10)


@pytest.mark.parametrize("chunk", [16, 64])
def test_fp32_stays_within_1e_5(chunk: int) -> None:
    exact = inputs(200)
    rough = [x.float() for x in exact]
    for form in (kda_recurrent, kda_chunk):
        keywords = {"chunk": chunk} if form is kda_chunk else {}
        o, S = kda_recurrent(*exact)
        o32, S32 = form(*rough, **keywords)  # type: ignore[arg-type]
        torch.testing.assert_close(o32.double(), o, rtol=0, atol=1e-5)
        torch.testing.assert_close(S32.double(), S, rtol=0, atol=1e-5)


@pytest.mark.parametrize("form", [kda_recurrent, kda_chunk])
def test_the_strongest_decay_neither_overflows_nor_loses_the_token(form: object) -> None:
    q, k, v, g, beta, S = inputs(64, dtype=torch.float32)
    g = torch.full_like(g, -5.0)
    o, last = form(q, k, v, g, beta, S)  # type: ignore[operator]
    exact, exact_last = kda_recurrent(*(x.double() for x in (q, k, v, g, beta, S)))
    torch.testing.assert_close(o.double(), exact, rtol=0, atol=1e-6)
    torch.testing.assert_close(last.double(), exact_last, rtol=0, atol=1e-6)


def test_gates_are_two_functions() -> None:
    z = torch.linspace(-9, 9, 7, dtype=torch.float64)[:, None, None].expand(-1, 2, 1)
    A = torch.tensor([0.0, 1.0], dtype=torch.float64)
    bounded, unbounded = kda_gate(z, A, -5.0), kda_gate(z, A, None)
    assert bounded.min() > -5
    assert unbounded.min() < -9
    assert float(bounded[3, 1, 0]) == -2.5
    expected = -5 / (1 + torch.exp(-torch.e * z[:, 1, 0]))
    torch.testing.assert_close(bounded[:, 1, 0], expected)
    torch.testing.assert_close(unbounded[:, 0, 0], -torch.log1p(z[:, 0, 0].exp()))


def test_short_conv_is_causal_and_carries() -> None:
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(2, 9, 5, generator=g), torch.randn(5, 4, generator=g)
    zeros = torch.zeros(2, 3, 5)
    y, carried = short_conv(x, w, zeros)
    padded = torch.cat([zeros, x], dim=1)
    direct = torch.stack([sum(padded[:, t + i] * w[:, i] for i in range(4)) for t in range(9)], dim=1)  # type: ignore[misc]
    torch.testing.assert_close(y, torch.nn.functional.silu(direct))
    assert torch.equal(carried, x[:, -3:])
    first, state = short_conv(x[:, :2], w, zeros)
    second, _ = short_conv(x[:, 2:], w, state)
    torch.testing.assert_close(torch.cat([first, second], dim=1), y)
    _, ragged = short_conv(x, w, zeros, (9, 2))
    assert torch.equal(ragged[0], x[0, -3:])
    assert torch.equal(ragged[1], padded[1, 2:5])


def load_fla() -> ModuleType:
    """fla's plain-torch KDA, by file: importing the package would set up its Triton kernels."""
    package = importlib.util.find_spec("fla")
    assert package is not None
    assert package.submodule_search_locations
    path = Path(package.submodule_search_locations[0]) / "ops" / "kda" / "naive.py"
    spec = importlib.util.spec_from_file_location("fla_naive_kda", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("bound", [-5.0, None], ids=["k3", "kimi-linear"])
def test_against_fla(bound: float | None) -> None:
    fla = load_fla()
    q, k, v, g, beta, S = inputs(128, bound=bound, dtype=torch.float32)
    for naive in (fla.naive_recurrent_kda, fla.naive_chunk_kda):
        theirs, their_state = naive(q, k, v, g, beta, initial_state=S, output_final_state=True)
        for ours, our_state in (
            kda_recurrent(q * 8**-0.5, k, v, g, beta, S),
            kda_chunk(q * 8**-0.5, k, v, g, beta, S, chunk=64, bounded=bound is not None),
        ):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
            torch.testing.assert_close(our_state, their_state, rtol=0, atol=1e-5)


@pytest.mark.parametrize("bounded", [True, False])
def test_gradients_of_the_recurrence(bounded: bool) -> None:
    small = inputs(18, batch=1, heads=1, d_k=2, d_v=2, bound=-5.0 if bounded else None)
    leaves = [x.requires_grad_() for x in small]
    assert torch.autograd.gradcheck(lambda *x: kda_chunk(*x, bounded=bounded), leaves)
    short = [x[:, :4].detach().requires_grad_() for x in small[:5]] + [small[5].detach().requires_grad_()]
    assert torch.autograd.gradcheck(kda_recurrent, short)


@pytest.mark.parametrize("form", ["recurrent", "chunk"])
def test_gradients_of_the_layer(form: str) -> None:
    torch.manual_seed(0)
    layer = KDA(TINY, torch.float64)
    names = [name for name, _ in layer.named_parameters()]
    weights = [torch.randn_like(p).mul_(0.7).requires_grad_() for p in layer.parameters()]
    x = torch.randn(1, 3, 6, dtype=torch.float64, requires_grad=True)
    conv = torch.randn(1, 3, 18, dtype=torch.float64, requires_grad=True)
    S = torch.randn(1, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    segment = Segment((5,), (2,), 3)

    def run(x: Tensor, conv: Tensor, S: Tensor, *values: Tensor) -> tuple[Tensor, Tensor]:
        parameters = dict(zip(names, values, strict=True))
        y, state = functional_call(layer, parameters, (x, KDAState(conv, S), segment, form))
        return y[:, :2], state.S

    assert torch.autograd.gradcheck(run, (x, conv, S, *weights))
