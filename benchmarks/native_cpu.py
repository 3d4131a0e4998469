"""The native CPU step beside eager torch, its own all-MLA twin, and llama.cpp on the same weights.

    python benchmarks/native_cpu.py [--out results] [--repeats 7] [--only step,scan,twin,llama]

Every figure is a ratio inside one interleaved run: the contestants take turns, the smallest time of each
counts. One thread. Floors are measured in the same run: reading speed and fp32 product speed. Contexts are
filled with noise, except against llama.cpp, where both read the same prompt. Writes ``native-bench.md`` and
``native-bench.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch

from k3eval_local.engine.k3_runner import K3Runner
from k3eval_local.engine.runner import Row
from k3eval_local.kernels.native.build import Isa, NativeUnavailable, load
from k3eval_local.kernels.native.pack import WeightType
from k3eval_local.kernels.native.scan import kda_scan
from k3eval_local.kernels.native.step import NativeSession, NativeStep
from k3eval_local.model import K3Config, K3Model
from k3eval_local.model.config import LinearAttnConfig
from k3eval_local.model.kda import kda_chunk

SHORT = 4096
_MIB = 1 << 20


@dataclass(frozen=True)
class Figure:
    """One row: what was measured, and where there are any, the goal and the share of a floor."""

    section: str
    case: str
    value: float
    unit: str
    goal: float | None = None
    floor_share: float | None = None


def shape(layers: int, width: int, heads: int, rank: int, expert: int, vocab: int) -> K3Config:
    """A timing shape: every fourth layer MLA and no doubled last one, so the ceiling is 4."""
    mla = tuple(range(4, layers + 1, 4))
    linear = LinearAttnConfig(
        num_heads=heads,
        head_dim=64,
        kda_layers=tuple(i for i in range(1, layers + 1) if i not in mla),
        full_attn_layers=mla,
    )
    return K3Config(
        vocab_size=vocab,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        q_lora_rank=width // 2,
        kv_lora_rank=rank,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=64,
        routed_expert_hidden_size=width // 2,
        moe_intermediate_size=expert,
        num_experts=32,
        num_experts_per_token=4,
        attn_res_block_size=4,
        linear_attn=linear,
    )


def shape_m() -> K3Config:
    """16 layers, 512 wide, 8 heads of 64, latent 128, top-4 of 32 experts: about 200 MB of active fp32."""
    return shape(layers=16, width=512, heads=8, rank=128, expert=320, vocab=8192)


def shape_s() -> K3Config:
    """8 layers, 256 wide, 4 heads of 64, latent 64: about 27 MB of active fp32."""
    return shape(layers=8, width=256, heads=4, rank=64, expert=256, vocab=4096)


def built(config: K3Config) -> K3Model:
    """Random weights."""
    return K3Model(config).init_weights(0).eval()


def timed(run: Callable[[], object]) -> float:
    """Seconds."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def best(contestants: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Smallest seconds of each, taking turns, after one call each to warm up."""
    for run in contestants.values():
        run()
    taken = dict.fromkeys(contestants, float("inf"))
    for _ in range(repeats):
        for name, run in contestants.items():
            taken[name] = min(taken[name], timed(run))
    return taken


@dataclass(frozen=True)
class Floors:
    """What this machine does at best, one thread. read: bytes/s. flops: fp32 multiply-adds count two."""

    read: float
    flops: float


def measure_floors() -> Floors:
    """Reading 512 MiB, as a sum or as a matrix times a vector, and a 1024 x 1024 x 1024 product."""
    data, a, x = torch.ones(128, _MIB), torch.randn(1024, 1024), torch.ones(1, _MIB)
    reading = best({"sum": data.sum, "product": lambda: torch.nn.functional.linear(x, data)}, 7)
    product = best({"product": lambda: a @ a}, 7)["product"]
    return Floors(data.nbytes / min(reading.values()), 2 * 1024**3 / product)


def at_context(session: NativeSession, tokens: int) -> Callable[[], object]:
    """One decode step at a context of noise; the position is set back each time."""
    session.fill(tokens)

    def run() -> object:
        session.rewind(tokens)
        return session.run([5])

    return run


def torch_at(model: K3Model, tokens: int) -> Callable[[], object]:
    """One step of the engine's torch path, which is faster than the reference model's own step."""
    runner = K3Runner(model, memory_budget_bytes=512 * _MIB, max_batch=1)
    table = np.arange(runner.layout.pages_for(tokens + 1), dtype=np.int32)
    runner.fill_with_noise(len(table))
    row = Row(0, table, tokens)

    def run() -> object:
        with torch.inference_mode():
            return runner.decode([row], [5])

    return run


def step_against_torch(floors: Floors, repeats: int) -> Iterable[Figure]:
    """The whole decode step of the 16-layer shape at 4k, by weight type and instruction set."""
    model = built(shape_m())
    goals: dict[tuple[Isa, WeightType], float] = {
        ("avx512", "fp32"): 2.3,
        ("avx512", "bf16"): 3.2,
        ("avx512", "int8"): 4.5,
        ("avx2", "fp32"): 2.0,
        ("avx2", "int8"): 3.5,
    }
    runs: dict[str, Callable[[], object]] = {"torch": torch_at(model, SHORT)}
    steps: dict[str, tuple[NativeStep, float]] = {}
    for (isa, weights), goal in goals.items():
        try:
            step = NativeStep(model, weights=weights, library=load(isa=isa))
        except NativeUnavailable as reason:
            say(f"left out: {isa} {weights}: {reason}")
            continue
        name = f"{isa} {weights}"
        steps[name] = (step, goal)
        runs[name] = at_context(NativeSession(step, SHORT + 2), SHORT)
    taken = best(runs, repeats)
    section = "decode step, 16 layers x 512, context 4k: eager torch / native"
    yield Figure(section, "torch eager fp32", taken["torch"] * 1e3, "ms")
    for name, (step, goal) in steps.items():
        floor = step.active_bytes / floors.read
        yield Figure(section, name, taken["torch"] / taken[name], "x", goal, floor / taken[name])


def scan_against_fla(floors: Floors, repeats: int) -> Iterable[Figure]:
    """KDA prefill of one layer, 1024 tokens: tokens/s over fla-core's naive recurrence."""
    T = 1024
    for H, K in ((8, 64), (4, 128)):
        taken = best(scan_contestants(H, K, T), repeats)
        section = f"KDA prefill, H={H} K={K}, {T} tokens: fla naive_recurrent_kda / ours"
        floor = 7 * H * K * K * T / floors.flops
        yield Figure(section, "fla naive_recurrent_kda", T / taken["fla"], "tok/s")
        yield Figure(
            section, "native scan", taken["fla"] / taken["native"], "x", 6.0, floor / taken["native"]
        )
        yield Figure(
            section, "torch chunkwise", taken["fla"] / taken["torch"], "x", 2.5, floor / taken["torch"]
        )


def scan_contestants(H: int, K: int, T: int) -> dict[str, Callable[[], object]]:
    """The same recurrence, three ways."""
    from fla.ops.kda.naive import naive_recurrent_kda

    generator = torch.Generator().manual_seed(0)
    q, k, v, g = (torch.randn(1, T, H, K, generator=generator) for _ in range(4))
    q, k = torch.nn.functional.normalize(q, dim=-1), torch.nn.functional.normalize(k, dim=-1)
    g, beta = -torch.sigmoid(g), torch.rand(1, T, H, generator=generator)
    state = torch.zeros(1, H, K, K)
    return {
        "fla": lambda: naive_recurrent_kda(q, k, v, g, beta, scale=1.0),
        "native": lambda: kda_scan(q[0], k[0], v[0], g[0], beta[0], state[0].clone()),
        "torch": lambda: kda_chunk(q, k, v, g, beta, state),
    }


def twin_over_hybrid(floors: Floors, repeats: int, longest: int) -> Iterable[Figure]:
    """Decode of the all-MLA twin over the hybrid, native fp32, 8 layers x 256."""
    config = shape_s()
    steps = {"hybrid": NativeStep(built(config)), "all-MLA": NativeStep(built(config.mla_twin()))}
    section = "all-MLA twin / hybrid, 8 layers x 256, native fp32 (ceiling 4.0)"
    for context, goal in ((4096, 1.0), (65536, 2.5), (262_144, 3.4), (1_048_576, 3.6)):
        if context > longest:
            continue
        sessions = {name: NativeSession(step, context + 2) for name, step in steps.items()}
        taken = best({n: at_context(s, context) for n, s in sessions.items()}, max(3, repeats // 2))
        # absorbed attention: every head reads W values for the score and r for the sum, two operations each
        layers = len(config.linear_attn.full_attn_layers)
        work = (
            2
            * config.num_attention_heads
            * (config.latent_cache_width + config.kv_lora_rank)
            * context
            * layers
        )
        floor = work / floors.flops + steps["hybrid"].active_bytes / floors.read
        for name in sessions:
            yield Figure(section, f"{name} at {context}", taken[name] * 1e3, "ms")
        ratio = taken["all-MLA"] / taken["hybrid"]
        yield Figure(section, f"ratio at {context}", ratio, "x", goal, floor / taken["hybrid"])


def against_llama(repeats: int) -> Iterable[Figure]:
    """Config A, fp32, one thread, the same weights by GGUF: decode and prefill at the same prompts."""
    import xllamacpp

    from k3eval_local.model.gguf import export

    model = built(K3Config.scaled("a"))
    contexts = {512: 1.0, 4096: 1.2, 16384: 2.0, 65536: 3.0}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.gguf"
        export(model, path)
        options = xllamacpp.CommonParams()
        options.model.path = str(path)
        options.n_ctx, options.n_parallel, options.warmup = max(contexts) + 256, 1, True
        options.cpuparams.n_threads = options.cpuparams_batch.n_threads = 1
        options.fit_params, options.cache_ram_mib, options.verbosity = False, 0, 0
        server = xllamacpp.Server(options)
        step = NativeStep(model)
        for context, goal in contexts.items():
            rounds = max(2, repeats // 2) if context < 16384 else 1 if context > 16384 else 2
            theirs, ours = _duel(server, step, context, rounds)
            section = "config A, fp32, one thread, same weights: ours / llama.cpp"
            yield Figure(section, f"llama.cpp decode at {context}", theirs[1], "tok/s")
            yield Figure(section, f"ours decode at {context}", ours[1], "tok/s")
            yield Figure(section, f"decode at {context}", ours[1] / theirs[1], "x", goal)
            wanted = 1.0 if context == 16384 else None
            yield Figure(section, f"prefill of {context}", ours[0] / theirs[0], "x", wanted)


def _duel(server: object, step: NativeStep, context: int, rounds: int) -> tuple[list[float], list[float]]:
    """Best prefill and decode speeds, tokens/s, of llama.cpp and of the native step, taking turns."""
    count = 48
    theirs, ours = [0.0, 0.0], [0.0, 0.0]
    for turn in range(rounds):
        ids = np.random.default_rng(turn).integers(0, 250, context)
        reply = server.handle_completions(  # type: ignore[attr-defined]  # a binary module without types
            {
                "prompt": ids.tolist(),
                "n_predict": count,
                "temperature": 0,
                "cache_prompt": False,
                "ignore_eos": True,
            }
        )
        timings = (json.loads(reply) if isinstance(reply, str) else reply)["timings"]
        theirs = [
            max(theirs[0], timings["prompt_per_second"]),
            max(theirs[1], timings["predicted_per_second"]),
        ]
        session = NativeSession(step, context + count + 1)
        start = time.perf_counter()
        logits = session.run(ids.astype(np.int32))
        middle = time.perf_counter()
        for _ in range(count):
            logits = session.run([int(logits.argmax())])
        end = time.perf_counter()
        ours = [max(ours[0], context / (middle - start)), max(ours[1], count / (end - middle))]
    return theirs, ours


def say(text: str) -> None:
    """One line on stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def facts(floors: Floors) -> dict[str, str]:
    """What the figures depend on."""
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    cpu = next((line.split(":", 1)[1].strip() for line in info if line.startswith("model name")), "unknown")
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "command": " ".join(["python", "benchmarks/native_cpu.py", *sys.argv[1:]]),
        "cpu": f"{cpu}, {os.cpu_count()} cores, one thread used",
        "software": f"Python {platform.python_version()}, torch {torch.__version__}",
        "load": f"1-minute load average {os.getloadavg()[0]:.1f} at the end",
        "read speed": f"{floors.read / 1e9:.1f} GB/s",
        "fp32 product": f"{floors.flops / 1e9:.0f} GFLOP/s",
    }


def write(rows: list[Figure], about: Mapping[str, str], out: Path) -> None:
    """The table, and the same figures as JSON."""
    out.mkdir(parents=True, exist_ok=True)
    data = {"facts": dict(about), "rows": [asdict(row) for row in rows]}
    (out / "native-bench.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    lines = ["# Native CPU step", "", *(f"- {key}: {value}" for key, value in about.items())]
    section = ""
    for row in rows:
        if row.section != section:
            section = row.section
            lines += ["", f"## {section}", "", "| case | figure | unit | goal | met | share of the floor |"]
            lines.append("|---|---|---|---|---|---|")
        goal = "" if row.goal is None else f"{row.goal:g}"
        met = "" if row.goal is None else "yes" if row.value >= row.goal else "no"
        share = "" if row.floor_share is None else f"{row.floor_share:.0%}"
        lines.append(f"| {row.case} | {row.value:.4g} | {row.unit} | {goal} | {met} | {share} |")
    (out / "native-bench.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    """Run the chosen parts and write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", default="step,scan,twin,llama")
    parser.add_argument(
        "--longest", type=int, default=1_048_576, help="longest context of the twin comparison"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    floors = measure_floors()
    parts: dict[str, Callable[[], Iterable[Figure]]] = {
        "step": lambda: step_against_torch(floors, options.repeats),
        "scan": lambda: scan_against_fla(floors, options.repeats),
        "twin": lambda: twin_over_hybrid(floors, options.repeats, options.longest),
        "llama": lambda: against_llama(options.repeats),
    }
    rows: list[Figure] = []
    for name in options.only.split(","):
        if name not in parts:
            parser.error(f"--only takes {', '.join(parts)}; not {name}")
        for row in parts[name]():
            say(f"{row.section}: {row.case}: {row.value:.4g} {row.unit}")
            rows.append(row)
    write(rows, facts(floors), options.out)


if __name__ == "__main__":
    main()
