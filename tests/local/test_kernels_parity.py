"""Every Triton kernel against its reference, in Triton's interpreter: odd sizes, state, poisoned outputs.

The interpreter proves indexing, masking and algebra; it cannot show races, bf16 rounding or speed.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are defined, so before they are imported

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from k3eval_local.kernels import (
    attn_res,
    kda_decode,
    kda_prefill,
    mla_decode,
    mla_prefill,
    moe,
    norm,
    situ,
)
from k3eval_local.model import attn_res as ref_attn_res
from k3eval_local.model import kda as ref_kda
from k3eval_local.model import mla as ref_mla
from k3eval_local.model import moe as ref_moe
from k3eval_local.model import mxfp4
from k3eval_local.model import norm as ref_norm
from k3eval_local.model import situ as ref_situ

BETAS = (4.0, 25.0)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """New tensors hold NaN, so that an element which a kernel forgets to write is seen."""
    torch.manual_seed(7)
    empty, empty_like = torch.empty, torch.empty_like

    def poison(x: Tensor) -> Tensor:
        return x.fill_(float("nan")) if x.is_floating_point() else x.fill_(-(2**30))

    monkeypatch.setattr(torch, "empty", lambda *a, **k: poison(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poison(empty_like(*a, **k)))
    with np.errstate(over="ignore"):  # numpy's exp behind tl.sigmoid overflows to inf, which is right
        yield


def close(a: Tensor, b: Tensor, bound: float = 5e-6) -> None:
    assert a.shape == b.shape
    assert torch.isfinite(a.float()).all()
    assert (a.float() - b.float()).abs().max().item() <= bound * max(1.0, b.float().abs().max().item())


def reference_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt: Tensor,
    cu: list[int],
    S: Tensor,
) -> tuple[Tensor, Tensor]:
    K = q.shape[-1]
    outputs, finals = [], []
    for n, (a, b) in enumerate(itertools.pairwise(cu)):
        g = ref_kda.kda_gate(z[a:b] + dt.view(-1, K), A_log, -5.0)
        o, final = ref_kda.kda_recurrent(
            ref_norm.l2norm(q[None, a:b]) * K**-0.5,
            ref_norm.l2norm(k[None, a:b]),
            v[None, a:b],
            g[None],
            torch.sigmoid(beta[None, a:b]),
            S[n : n + 1],
        )
        outputs.append(o[0])
        finals.append(final[0])
    return torch.cat(outputs), torch.stack(finals)


@pytest.mark.parametrize(
    ("lengths", "heads", "K", "split"),
    [([1], 1, 32, None), ([31, 33, 0, 2], 2, 32, 16), ([70], 1, 64, 32)],
    ids=["one-token", "packed-odd-empty", "wide-split"],
)
def test_kda_prefill(lengths: list[int], heads: int, K: int, split: int | None) -> None:
    T, cu = sum(lengths), np.cumsum([0, *lengths]).tolist()
    q, k, v, z = (torch.randn(T, heads, K) for _ in range(4))
    z, beta = 3 * z, torch.randn(T, heads)
    A_log, dt, S = 0.3 * torch.randn(heads), torch.randn(heads * K), torch.randn(len(lengths), heads, K, K)
    o, final = kda_prefill.kda_prefill(
        q, k, v, z, beta, A_log=A_log, dt_bias=dt, cu_seqlens=torch.tensor(cu), initial=S, value_split=split
    )
    expected, state = reference_kda(q, k, v, z, beta, A_log, dt, cu, S)
    close(o, expected)
    close(final, state)


def test_kda_prefill_worst_decay_and_repeated_keys() -> None:
    """The strongest and the weakest decay, identical keys, full writes: the extremes of a tile."""
    K, T = 32, 40
    q, v = torch.randn(T, 1, K), torch.randn(T, 1, K)
    k = torch.ones(T, 1, K)
    beta, A_log, dt = torch.full((T, 1), 20.0), torch.zeros(1), torch.zeros(K)
    S, cu = torch.zeros(1, 1, K, K), torch.tensor([0, T])
    for z in (torch.full((T, 1, K), 30.0), torch.full((T, 1, K), -30.0)):
        o, final = kda_prefill.kda_prefill(q, k, v, z, beta, A_log=A_log, dt_bias=dt, cu_seqlens=cu)
        expected, state = reference_kda(q, k, v, z, beta, A_log, dt, [0, T], S)
        close(o, expected, 1e-3)  # powers of 6435 cancel in the inverse of a tile of identical keys
        close(final, state, 1e-3)


def test_kda_prefill_continues_where_it_stopped() -> None:
    K, T, cut = 32, 50, 19
    q, k, v, z = (torch.randn(T, 1, K) for _ in range(4))
    beta, A_log, dt = torch.randn(T, 1), torch.zeros(1), torch.randn(K)

    def run(a: int, b: int, S: Tensor | None) -> tuple[Tensor, Tensor]:
        return kda_prefill.kda_prefill(
            q[a:b], k[a:b], v[a:b], z[a:b], beta[a:b], A_log=A_log, dt_bias=dt, initial=S,
            cu_seqlens=torch.tensor([0, b - a]),
        )  # fmt: skip

    whole, end = run(0, T, None)
    first, middle = run(0, cut, None)
    second, last = run(cut, T, middle)
    close(torch.cat([first, second]), whole)
    close(last, end)


def test_kda_prefill_refuses_an_unbounded_gate() -> None:
    x, cu = torch.zeros(1, 1, 32), torch.tensor([0, 1])
    with pytest.raises(ValueError, match="between -5 and 0"):
        kda_prefill.kda_prefill(
            x, x, x, x, x[..., 0], A_log=torch.zeros(1), dt_bias=torch.zeros(32), cu_seqlens=cu, bound=None
        )


@pytest.mark.parametrize("bound", [-5.0, None], ids=["bounded", "unbounded"])
@pytest.mark.parametrize("state_type", [torch.float32, torch.bfloat16], ids=["fp32-state", "bf16-state"])
def test_kda_decode(bound: float | None, state_type: torch.dtype) -> None:
    B, H, K = 3, 2, 32
    P = H * K
    x, z, gate = torch.randn(B, 3 * P), torch.randn(B, P), torch.randn(B, P)
    beta, conv = torch.randn(B, H), torch.randn(5, 3, 3 * P)
    state = torch.randn(5, H, K, K).to(state_type)
    weight, A_log, dt, w = torch.randn(3 * P, 4), torch.randn(H), torch.randn(P), torch.rand(K)
    conv_before, state_before = conv.clone(), state.clone()
    y = kda_decode.kda_decode(
        x, z, beta, gate, conv, state, torch.tensor([4, -1, 0], dtype=torch.int32),
        conv_weight=weight, A_log=A_log, dt_bias=dt, norm=w, bound=bound,
    )  # fmt: skip
    for row, slot in ((0, 4), (2, 0)):
        mixed, taps = ref_kda.short_conv(x[row][None, None], weight, conv_before[slot][None])
        q, k, v = mixed.unflatten(-1, (3, H, K)).unbind(2)
        g = ref_kda.kda_gate((z[row] + dt).view(1, H, K), A_log, bound)
        q, k = ref_norm.l2norm(q[:, 0]) * K**-0.5, ref_norm.l2norm(k[:, 0])
        o, S = ref_kda.kda_step(
            q, k, v[:, 0], g, torch.sigmoid(beta[row : row + 1]), state_before[slot][None].float()
        )
        close(y[row], torch.sigmoid(gate[row]) * ref_norm.rmsnorm(o, w, 1e-5).flatten())
        close(state[slot], S[0].to(state_type), 1e-2 if state_type is torch.bfloat16 else 5e-6)
        assert torch.equal(conv[slot], taps[0])
    untouched = [1, 2, 3]
    assert torch.equal(state[untouched], state_before[untouched])
    assert torch.equal(conv[untouched], conv_before[untouched])


@pytest.mark.parametrize("heads", [3, 20], ids=["part-of-a-tile", "two-tiles"])
@pytest.mark.parametrize("splits", [1, 3])
def test_mla_decode(heads: int, splits: int) -> None:
    r, slot, page = 32, 8, 16
    lengths = torch.tensor([1, 37, 64], dtype=torch.int32)
    cache, q = torch.randn(20, page, r + slot), torch.randn(3, heads, r + slot)
    table = torch.randperm(20)[:15].view(3, 5).to(torch.int32)
    o = mla_decode.mla_decode(q, cache, table, lengths, rank=r, scale=0.2, splits=splits)
    for b in range(3):
        rows = cache[table[b].long()].flatten(0, 1)[: lengths[b]]
        close(o[b], (q[b] @ rows.T * 0.2).softmax(-1) @ rows[:, :r])


def test_mla_decode_reads_nothing_behind_the_context() -> None:
    cache = torch.full((4, 16, 40), float("nan"))
    cache[2, :5] = torch.randn(5, 40)
    q = torch.randn(1, 2, 40)
    table, length = torch.tensor([[2, 0, 0, 0]], dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
    o = mla_decode.mla_decode(q, cache, table, length, rank=32, scale=0.2, splits=2)
    rows = cache[2, :5]
    close(o[0], (q[0] @ rows.T * 0.2).softmax(-1) @ rows[:, :32])


def test_mla_prefill() -> None:
    H, n, slot, v, r = 2, 32, 16, 16, 24
    w_uk, w_uv = torch.randn(H, n, r) / 5, torch.randn(H, v, r) / 5
    queries, keys = [3, 0, 21, 1], [40, 0, 21, 70]
    cq, ck = np.cumsum([0, *queries]).tolist(), np.cumsum([0, *keys]).tolist()
    q, latent = torch.randn(cq[-1], H, n + slot), torch.randn(ck[-1], r + slot)
    expanded = torch.einsum("sr,hnr->shn", latent[:, :r], w_uk)
    values = torch.einsum("sr,hvr->shv", latent[:, :r], w_uv)
    o = mla_prefill.mla_prefill(
        q, expanded, latent[:, r:], values, torch.tensor(cq), torch.tensor(ck), longest=max(queries)
    )
    for i in (0, 2, 3):
        mask = ref_mla.causal_mask(queries[i], keys[i], torch.device("cpu"))
        rows, past = slice(cq[i], cq[i + 1]), slice(ck[i], ck[i + 1])
        close(o[rows], ref_mla.mla_expanded(q[None, rows], latent[None, past], w_uk, w_uv, mask)[0])


@pytest.mark.parametrize(("experts", "top"), [(12, 3), (5, 5), (33, 1)])
def test_router(experts: int, top: int) -> None:
    x, w, bias = torch.randn(9, 50), torch.randn(experts, 50), torch.randn(experts)
    index, weight, scores = moe.route(x, w, bias, top, 1.5)
    expected = ref_moe.route(x, w, bias, top, 1.5)
    close(scores, expected.scores)
    assert torch.equal(index.long(), expected.index)  # both in order of falling biased score
    close(weight, expected.weight)


@pytest.mark.parametrize("packed", [False, True], ids=["fp32", "mxfp4"])
@pytest.mark.parametrize("tokens", [1, 23])
def test_experts(packed: bool, tokens: int) -> None:
    E, top, latent, inner = 6, 2, 96, 32
    z = torch.randn(tokens, latent)
    routing = ref_moe.route(torch.randn(tokens, 8), torch.randn(E, 8), torch.zeros(E), top)
    w1, w3, w2 = (
        torch.randn(E, inner, latent) / 8,
        torch.randn(E, inner, latent) / 8,
        torch.randn(E, latent, inner) / 6,
    )
    tensors = moe.ExpertTensors(w1, w3, w2)
    if packed:
        stored = [mxfp4.quantize(w) for w in (w1, w3, w2)]
        w1, w3, w2 = (mxfp4.dequantize(*pair) for pair in stored)
        codes, scales = zip(*stored, strict=True)
        tensors = moe.ExpertTensors(codes[0], codes[1], codes[2], scales=(scales[0], scales[1], scales[2]))
    u = moe.experts(z, routing.index, routing.weight, tensors, BETAS)
    close(u, ref_moe.experts_loop(z, routing, lambda e: (w1[e], w3[e], w2[e]), BETAS))


@pytest.mark.parametrize("sources", [0, 1, 4])
@pytest.mark.parametrize("normed", [True, False])
def test_attn_res_mix(sources: int, normed: bool) -> None:
    bank, partial = torch.randn(sources, 5, 40), torch.randn(5, 40)
    query, weight = torch.randn(40), torch.rand(40)
    mixed, out = attn_res.attn_res_mix(bank, partial, query, weight if normed else None)
    expected = ref_attn_res.mix([*bank, partial], query, 1e-5)
    close(mixed, expected)
    close(out, ref_norm.rmsnorm(expected, weight, 1e-5) if normed else expected)


def test_situ_glu_and_rmsnorm_at_odd_widths() -> None:
    x, weight = 20 * torch.randn(3, 90), torch.rand(90)
    close(situ.situ_glu(x), ref_situ.situ_glu(x[:, :45], x[:, 45:], *BETAS))
    close(norm.rmsnorm(x, weight), ref_norm.rmsnorm(x, weight, 1e-5))
    empty = torch.zeros(0, 90)
    assert situ.situ_glu(empty).shape == (0, 45)
    assert norm.rmsnorm(empty, weight).shape == (0, 90)
