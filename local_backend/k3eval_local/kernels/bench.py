"""Check and time the Triton kernels on a GPU: ``python -m k3eval_local.kernels.bench --gpu``.

Each kernel is first compared with the reference on fresh random data, then timed with device events against
fla-core's kernels, against the unfused form, and against a device copy and a bf16 product of the same run.
Done in under four minutes; what did not fit is named. Without a GPU it says so and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
import triton
from torch import Tensor
from triton.testing import do_bench

from k3eval_local.kernels import attn_res, kda_decode, kda_prefill, mla_decode, moe
from k3eval_local.model import attn_res as ref_attn_res
from k3eval_local.model import kda as ref_kda
from k3eval_local.model import moe as ref_moe
from k3eval_local.model.norm import l2norm, rmsnorm

LIMIT_S = 225.0
K = 128


@dataclass(frozen=True)
class Figure:
    """One measured row. error: largest difference from the reference over the reference's largest value."""

    kernel: str
    shape: str
    value: float
    unit: str
    goal: float | None = None
    error: float | None = None


@dataclass(frozen=True)
class Device:
    """Ceilings of this device, measured: copy in bytes/s (read plus write), flops of a bf16 product."""

    name: str
    copy: float
    flops: float


def seconds(run: Callable[[], object]) -> float:
    """Median device seconds of a call."""
    return float(do_bench(run, warmup=20, rep=80, return_mode="median")) / 1e3


def relative(a: Tensor, b: Tensor) -> float:
    """Largest difference over the largest value of the reference."""
    return float((a.float() - b.float()).abs().max() / b.float().abs().max().clamp(min=1e-30))


def device() -> Device:
    """Measure the ceilings."""
    data = torch.empty(1 << 28, dtype=torch.int32, device="cuda")
    target = torch.empty_like(data)
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    copy = 2 * data.nbytes / seconds(lambda: target.copy_(data))
    return Device(torch.cuda.get_device_name(), copy, 2 * 8192**3 / seconds(lambda: a @ a))


def prefill(limits: Device) -> Iterable[Figure]:
    """KDA prefill with few heads, where the scan is serial, and with Kimi K3's 96."""
    for H in (16, 96):
        yield from _prefill(H, limits)


def _prefill(H: int, limits: Device) -> Iterable[Figure]:
    """Against fla's ``chunk_kda`` on the same inputs; both normalise q and k inside."""
    from fla.ops.kda import chunk_kda

    T = 8192
    q, k, v, z = (torch.randn(T, H, K, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    beta = torch.randn(T, H, device="cuda", dtype=torch.bfloat16)
    A_log, dt = torch.zeros(H, device="cuda"), torch.zeros(H * K, device="cuda")
    cu = torch.tensor([0, T], device="cuda")
    chunks = kda_prefill.Chunks.of(cu)

    def ours() -> tuple[Tensor, Tensor]:
        return kda_prefill.kda_prefill(
            q, k, v, z, beta, A_log=A_log, dt_bias=dt, cu_seqlens=cu, chunks=chunks
        )

    g = ref_kda.kda_gate(z.float() + dt.view(H, K), A_log, -5.0)
    head = 512  # the reference is slow, and causal: a prefix of the output is a full check of that prefix
    expected, _ = ref_kda.kda_recurrent(
        l2norm(q[None, :head].float()) * K**-0.5,
        l2norm(k[None, :head].float()),
        v[None, :head].float(),
        g[None, :head],
        torch.sigmoid(beta[None, :head].float()),
        torch.zeros(1, H, K, K, device="cuda"),
    )
    error = relative(ours()[0][:head], expected[0])
    betas = torch.sigmoid(beta.float())[None]

    def theirs() -> object:
        return chunk_kda(
            q[None], k[None], v[None], g[None], betas, use_qk_l2norm_in_kernel=True, output_final_state=True
        )

    mine, fla = seconds(ours), seconds(theirs)
    moved = T * H * (5 * K * 2 + 2) + 2 * H * K * K * 4
    shape = f"H={H} T={T} K={K} bf16"
    yield Figure("kda_prefill", shape, mine * 1e3, "ms", error=error)
    yield Figure("kda_prefill", f"{shape}: fla chunk_kda / ours", fla / mine, "x", 1.6)
    yield Figure("kda_prefill", f"{shape}: needed bytes, share of copy", moved / mine / limits.copy, "x")


def decode(limits: Device) -> Iterable[Figure]:
    """The fused KDA decode step: against three launches at batch 1, and by bandwidth at 2048 heads."""
    for B in (1, 128):
        yield from _decode(B, limits)


def _decode(B: int, limits: Device) -> Iterable[Figure]:
    H, P = 16, 16 * K
    x = torch.randn(B, 3 * P, device="cuda", dtype=torch.bfloat16)
    z, gate = (torch.randn(B, P, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    beta = torch.randn(B, H, device="cuda", dtype=torch.bfloat16)
    conv = torch.randn(B, 3, 3 * P, device="cuda", dtype=torch.bfloat16)
    state = torch.randn(B, H, K, K, device="cuda")
    slots = torch.arange(B, device="cuda", dtype=torch.int32)
    weight, dt = torch.randn(3 * P, 4, device="cuda"), torch.zeros(P, device="cuda")
    A_log, w = torch.zeros(H, device="cuda"), torch.ones(K, device="cuda")

    def fused() -> Tensor:
        return kda_decode.kda_decode(
            x, z, beta, gate, conv, state, slots, conv_weight=weight, A_log=A_log, dt_bias=dt, norm=w
        )

    mixed, _ = ref_kda.short_conv(x[:, None].float(), weight, conv.float())
    q, k, v = mixed[:, 0].unflatten(-1, (3, H, K)).unbind(1)
    g = ref_kda.kda_gate((z.float() + dt).view(B, H, K), A_log, -5.0)
    o, _ = ref_kda.kda_step(l2norm(q) * K**-0.5, l2norm(k), v, g, torch.sigmoid(beta.float()), state)
    expected = torch.sigmoid(gate.float()) * rmsnorm(o, w, 1e-5).flatten(1)
    error = relative(fused(), expected)
    mine = seconds(fused)
    moved = 2 * state.nbytes + 5 * B * P * 2
    shape = f"B={B} H={H} K={K} fp32 state"
    yield Figure("kda_decode", shape, mine * 1e6, "us", error=error)
    if B == 1:
        apart = seconds(lambda: _three_launches(x, z, beta, gate, conv, state, weight))
        yield Figure("kda_decode", f"{shape}: three launches / fused", apart / mine, "x", 1.8)
    else:
        yield Figure("kda_decode", f"{shape}: share of copy", moved / mine / limits.copy, "x", 0.7)


def _three_launches(
    x: Tensor, z: Tensor, beta: Tensor, gate: Tensor, conv: Tensor, state: Tensor, weight: Tensor
) -> Tensor:
    """The unfused step: fla's short convolution, its recurrent kernel and its gated norm, one launch each."""
    from fla.modules import FusedRMSNormGated
    from fla.modules.conv import causal_conv1d_update
    from fla.ops.kda import fused_recurrent_kda

    B, H = beta.shape
    width = x.shape[1]
    cache = conv.new_zeros(B, width, 4)
    mixed, _ = causal_conv1d_update(x, cache, weight=weight.to(x.dtype), activation="silu")
    q, k, v = mixed.view(B, 3, H, K)[:, None].unbind(2)
    g = z.view(B, 1, H, K).float()
    o, _ = fused_recurrent_kda(
        q, k, v, g, beta.sigmoid()[:, None], initial_state=state, use_qk_l2norm_in_kernel=True
    )
    norm = _norm_module(FusedRMSNormGated)
    result: Tensor = norm(o[:, 0], gate.view(B, H, K))
    return result


_NORMS: dict[type, torch.nn.Module] = {}


def _norm_module(kind: type) -> torch.nn.Module:
    if kind not in _NORMS:
        _NORMS[kind] = kind(K, activation="sigmoid").to("cuda", torch.bfloat16)
    return _NORMS[kind]


def mla(limits: Device) -> Iterable[Figure]:
    """Absorbed MLA decode at 128k context, batch 1: the cache's bytes over the copy's speed."""
    r, slot, page, T, H = 512, 64, 64, 131_072, 16
    cache = torch.randn(T // page, page, r + slot, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(1, H, r + slot, device="cuda", dtype=torch.bfloat16)
    table = torch.randperm(T // page, device="cuda").to(torch.int32)[None]
    length = torch.tensor([T - 3], device="cuda", dtype=torch.int32)
    scale = 192**-0.5
    rows = cache[table[0].long()].flatten(0, 1)[: T - 3].float()
    expected = (q[0].float() @ rows.T * scale).softmax(-1) @ rows[:, :r]

    def ours() -> Tensor:
        return mla_decode.mla_decode(q, cache, table, length, rank=r, scale=scale)

    error = relative(ours()[0], expected)
    mine = seconds(ours)
    yield Figure("mla_decode", f"T={T} H={H} r={r}+{slot} bf16", mine * 1e6, "us", error=error)
    yield Figure("mla_decode", f"T={T} H={H}: share of copy", cache.nbytes / mine / limits.copy, "x", 0.7)


def mixture(limits: Device) -> Iterable[Figure]:
    """Latent MoE: few tokens by bytes, many tokens by flops."""
    E, latent, inner = 64, 512, 512
    w1, w3 = (torch.randn(E, inner, latent, device="cuda", dtype=torch.bfloat16) / 23 for _ in range(2))
    w2 = torch.randn(E, latent, inner, device="cuda", dtype=torch.bfloat16) / 23
    for N in (1, 32, 8192):
        yield from _mixture(N, moe.ExpertTensors(w1, w3, w2), limits)


def _mixture(N: int, tensors: moe.ExpertTensors, limits: Device) -> Iterable[Figure]:
    (E, inner, latent), top = tensors.w1.shape, 8
    z = torch.randn(N, latent, device="cuda", dtype=torch.bfloat16)
    scores = torch.randn(N, E, device="cuda")
    weight, index = scores.softmax(-1).topk(top)
    rows = min(N, 256)
    expected = ref_moe.experts_loop(
        z[:rows].float(),
        ref_moe.Routing(index[:rows], weight[:rows], scores[:rows]),
        lambda e: (tensors.w1[e].float(), tensors.w3[e].float(), tensors.w2[e].float()),
        (4.0, 25.0),
    )
    error = relative(moe.experts(z, index, weight, tensors)[:rows], expected)
    mine = seconds(lambda: moe.experts(z, index, weight, tensors))
    shape = f"N={N} E={E} top-{top} {latent}x{inner} bf16"
    yield Figure("moe experts", shape, mine * 1e6, "us", error=error)
    if N >= 1024:
        share = 6 * N * top * latent * inner / mine / limits.flops
        yield Figure("moe experts", f"{shape}: share of a bf16 product", share, "x", 0.5)
    else:
        share = len(index.unique()) * 3 * latent * inner * 2 / mine / limits.copy
        yield Figure("moe experts", f"{shape}: share of copy", share, "x", 0.5 if N == 1 else None)


def residuals(limits: Device) -> Iterable[Figure]:
    """AttnRes mix with its norm, 9 sources of Kimi K3's width."""
    N, d, sources = 8192, 7168, 8
    bank = torch.randn(sources, N, d, device="cuda", dtype=torch.bfloat16)
    partial = torch.randn(N, d, device="cuda", dtype=torch.bfloat16)
    query, norm = torch.randn(d, device="cuda") / 85, torch.ones(d, device="cuda", dtype=torch.bfloat16)

    def ours() -> tuple[Tensor, Tensor]:
        return attn_res.attn_res_mix(bank, partial, query, norm)

    some = slice(0, 512)
    expected = ref_attn_res.mix([*bank[:, some].float(), partial[some].float()], query, 1e-5)
    error, mine = relative(ours()[0][some], expected), seconds(ours)
    moved = (sources + 3) * N * d * 2
    yield Figure("attn_res mix", f"N={N} d={d} 9 sources bf16", mine * 1e6, "us", error=error)
    yield Figure("attn_res mix", f"N={N}: share of copy", moved / mine / limits.copy, "x", 0.75)


PARTS: tuple[Callable[[Device], Iterable[Figure]], ...] = (prefill, decode, mla, mixture, residuals)


def write(rows: Sequence[Figure], limits: Device, left_out: Sequence[str], out: Path) -> None:
    """``kernels-gpu.md`` and ``kernels-gpu.json``."""
    out.mkdir(parents=True, exist_ok=True)
    about = {
        "command": "python -m k3eval_local.kernels.bench --gpu",
        "date": datetime.now(UTC).date().isoformat(),
        "device": limits.name,
        "copy_gb_per_s": round(limits.copy / 1e9, 1),
        "bf16_product_tflop_per_s": round(limits.flops / 1e12, 1),
        "software": f"torch {torch.__version__}, triton {triton.__version__}",
        "left_out": list(left_out),
    }
    data = json.dumps({"facts": about, "rows": [asdict(row) for row in rows]}, indent=1)
    (out / "kernels-gpu.json").write_text(data + "\n", encoding="utf-8")
    lines = ["# Kernels on a GPU", "", *(f"- {key}: {value}" for key, value in about.items()), ""]
    lines += ["| kernel | shape | figure | unit | goal | met | error |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        met = "" if row.goal is None else "yes" if row.value >= row.goal else "no"
        goal = "" if row.goal is None else f"{row.goal:g}"
        error = "" if row.error is None else f"{row.error:.1e}"
        lines.append(
            f"| {row.kernel} | {row.shape} | {row.value:.4g} | {row.unit} | {goal} | {met} | {error} |"
        )
    (out / "kernels-gpu.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 3 when there is no GPU, 1 when a kernel differs from its reference."""
    parser = argparse.ArgumentParser(prog="python -m k3eval_local.kernels.bench", description=__doc__)
    parser.add_argument(
        "--gpu", action="store_true", required=True, help="run on the GPU (there is no other mode)"
    )
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        sys.stderr.write("k3eval: no CUDA device: nothing was measured; run this on a machine with a GPU\n")
        return 3
    torch.manual_seed(time.time_ns() % 2**31)  # fresh data each time
    start, limits = time.monotonic(), device()
    rows: list[Figure] = []
    left_out = []
    for part in PARTS:
        if time.monotonic() - start > LIMIT_S:
            left_out.append(part.__name__)
            continue
        rows += part(limits)
    write(rows, limits, left_out, options.out)
    wrong = [row for row in rows if row.error is not None and not row.error < 0.05]
    for row in wrong:
        sys.stderr.write(f"k3eval: {row.kernel} {row.shape} differs from its reference by {row.error}\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
