"""The engine beside the bare model, batch scaling, prefix hits, decode against context, memory.

    python benchmarks/engine.py [--out results] [--repeats 5] [--threads 1] [--prompt 131000]
    python benchmarks/engine.py --long [TOKENS]    one long prompt alone; by default it fills the context

Contestants take turns in one run and minima of the repeats are compared, so trust the ratios. Time is CPU
time of the process, all threads, because the machine is shared; a long prompt also states the wall clock.
Random weights of config A (and its all-MLA twin), seed 0. Writes ``engine-bench.md`` and ``.json``.

``--long`` estimates its time first (prefill is quadratic: three hours of one core for the whole context) and
writes ``engine-bench-long.md``. It runs the native step with an fp32 cache, or else torch with a bf16 cache.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from figures import Measured, machine, say, write

from k3eval_local.engine import Engine, Generation, GenerationRequest, Sampling
from k3eval_local.engine.k3_runner import K3Runner
from k3eval_local.engine.native_runner import NativeRunner
from k3eval_local.engine.runner import Row
from k3eval_local.kernels.native.build import NativeUnavailable, load
from k3eval_local.model.accounting import StoredType, sequence_bytes
from k3eval_local.model.config import K3Config
from k3eval_local.model.decoder import K3Model

GREEDY = Sampling(temperature=0)
WARM_UP = 6000
LONG_CHUNK, LONG_PIECE = 4096, 128
"""Of the --long run: prefill_chunk, and the size to which pieces shrink at such contexts."""
CONTEXTS = (1024, 4096, 16384, 65536, 131072)


def model_of(name: str) -> K3Model:
    """Random weights, seed 0."""
    return K3Model(K3Config.scaled(name)).init_weights(0)


def ids(length: int, seed: int = 0) -> tuple[int, ...]:
    """Random prompt."""
    return tuple(random.Random(seed).choices(range(256), k=length))  # noqa: S311 - benchmark data


def best(contestants: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    """Smallest result of each, taking turns."""
    taken = {name: float("inf") for name in contestants}
    for _ in range(repeats):
        for name, run in contestants.items():
            taken[name] = min(taken[name], run())
    return taken


def timed(run: Callable[[], object]) -> float:
    """CPU seconds."""
    start = time.process_time()
    run()
    return time.process_time() - start


def decode_seconds(generation: Generation) -> float:
    """CPU seconds per token after the first."""
    tokens = iter(generation)
    next(tokens)
    start = time.process_time()
    count = sum(1 for _ in tokens)
    return (time.process_time() - start) / count


def engines(model: K3Model) -> dict[str, Engine]:
    """The engine on torch, and on the native step where that can be had."""
    made = {"engine, torch": Engine(model, kernels="torch")}
    try:
        made["engine, native step"] = Engine(model, kernels="native")
    except NativeUnavailable as reason:
        say(f"without the native step: {reason}")
    return made


def bare_loop(model: K3Model, prompt: tuple[int, ...], count: int) -> float:
    """Seconds per token of `K3Model.step` in a loop."""
    with torch.inference_mode():
        logits, state = model.forward(torch.tensor([prompt]), last_only=True)
        token = logits[0, -1].argmax()[None]
        start = time.process_time()
        for _ in range(count):
            logits, state = model.step(token, state)
            token = logits[0].argmax()[None]
        return (time.process_time() - start) / count


def single_stream(repeats: int) -> list[Measured]:
    """Decode speed of one stream: the bare model and the engine."""
    model, prompt = model_of("a"), ids(256)
    request = GenerationRequest(prompt, 65, GREEDY, use_cache=False)
    running = {name: engine.start() for name, engine in engines(model).items()}

    def through(engine: Engine) -> Callable[[], float]:
        return lambda: decode_seconds(engine.submit(request))

    taken = best(
        {
            "bare K3Model.step": lambda: bare_loop(model, prompt, 64),
            **{n: through(e) for n, e in running.items()},
        },
        repeats,
    )
    for engine in running.values():
        engine.close()
    bare = taken["bare K3Model.step"]
    return [
        row
        for name, seconds in taken.items()
        for row in (
            Measured("one stream, 256-token prompt", name, 1 / seconds, "tok/s"),
            Measured("one stream, 256-token prompt", f"{name} / bare", bare / seconds, "x"),
        )
    ]


def batch_scaling(repeats: int) -> list[Measured]:
    """Output tokens a second of 1 to 64 streams that start together, prefill of 32 tokens included."""
    rows = []
    for name, engine in engines(model_of("a")).items():
        with engine:

            def run(streams: int, engine: Engine = engine) -> float:
                requests = [GenerationRequest(ids(32, seed=i), 64, GREEDY) for i in range(streams)]
                engine.clear_cache()
                return timed(lambda: _all(engine, requests))

            taken = best({str(n): partial(run, n) for n in (1, 4, 16, 64)}, repeats)
        for streams, seconds in taken.items():
            rate = int(streams) * 64 / seconds
            rows.append(Measured("batch scaling", f"{name}, {streams} streams", rate, "tok/s"))
        gain = 64 * taken["1"] / taken["64"]
        rows.append(Measured("batch scaling", f"{name}, 64 streams / 1", gain, "x"))
    return rows


def _all(engine: Engine, requests: list[GenerationRequest]) -> None:
    for generation in [engine.submit(request) for request in requests]:
        generation.result()


def prefix_hits(repeats: int) -> list[Measured]:
    """A 4096-token prompt up to its first token, cold and with all but its last turn cached."""
    rows = []
    request = GenerationRequest(ids(4096), 1, GREEDY, boundaries=(4000,))
    for name, engine in engines(model_of("a")).items():
        with engine:

            def cold(engine: Engine = engine) -> float:
                engine.clear_cache()
                return timed(engine.submit(request).result)

            def hit(engine: Engine = engine) -> float:
                return timed(engine.submit(request).result)

            taken = best({"cold": cold, "hit": hit}, repeats)
        rows += [
            Measured("first token of 4096", f"{name}, {case}", seconds * 1e3, "ms")
            for case, seconds in taken.items()
        ]
        rows.append(Measured("first token of 4096", f"{name}, cold / hit", taken["cold"] / taken["hit"], "x"))
    return rows


def decode_against_context(repeats: int) -> list[Measured]:
    """Milliseconds of a decode step (batch 1) of config A and its all-MLA twin; caches filled with noise."""
    rows = []
    kinds: dict[str, type[K3Runner]] = {"torch": K3Runner, "native step": NativeRunner}
    for kind, runner_type in kinds.items():
        try:
            runners = {
                name: runner_type(model_of(name), memory_budget_bytes=300 * 1024**2, max_batch=1)
                for name in ("a", "a-mla")
            }
        except NativeUnavailable:
            continue
        section = f"decode step, {kind}"
        for context in CONTEXTS:
            steps = {name: step_at(runner, context) for name, runner in runners.items()}
            taken = best(steps, 4 * repeats)
            rows += [
                Measured(section, f"{name} at {context}", seconds * 1e3, "ms")
                for name, seconds in taken.items()
            ]
            ratio = taken["a-mla"] / taken["a"]
            rows.append(Measured(section, f"a-mla / a at {context}", ratio, "x"))
    return rows


def step_at(runner: K3Runner, context: int) -> Callable[[], float]:
    """One decode step after `context` tokens of noise."""
    table = np.arange(runner.layout.pages_for(context + 1), dtype=np.int32)
    runner.fill_with_noise(len(table))
    row = Row(0, table, context)

    def run() -> float:
        with torch.inference_mode():
            return timed(lambda: runner.decode([row], [5]))

    return run


def resident_bytes() -> int:
    """Anonymous memory of this process that is really in use; what the allocator merely keeps is given back.

    File-backed pages are left out: the kernel drops them under pressure.
    """
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in status if line.startswith("RssAnon:")).split()[1]) * 1024


def long_config(heads: int) -> K3Config:
    """Config A with so many attention heads: its prefill's time grows with them, its memory does not."""
    return replace(K3Config.scaled("a"), num_attention_heads=heads)


def long_prompt(prompt_tokens: int, threads: int, *, heads: int, alone: bool) -> list[Measured]:
    """One prompt, prefilled and decoded, and the memory that took. Runs in a process of its own.

    alone: nobody else waits, so that larger pieces may be run, which are faster.
    """
    torch.set_num_threads(threads)
    output = 33
    total = prompt_tokens + output
    cache = cache_type()
    config = long_config(heads)
    predicted = sequence_bytes(config, total, cache=cache).total
    step = "native step" if cache == "fp32" else "torch"
    section = f"prompt of {prompt_tokens}, {heads} attention heads, {step}, {cache} cache"
    with Engine(
        K3Model(config).init_weights(0),
        memory_budget_bytes=predicted + 64 * 1024**2,
        max_batch=2,
        cache_dtype=torch.bfloat16 if cache == "bf16" else None,
        prefill_chunk=LONG_CHUNK if alone else None,
    ) as engine:
        # The allocator settles; the pages that this touches are used again and counted below.
        engine.submit(GenerationRequest(ids(WARM_UP), 40, GREEDY, use_cache=False)).result()
        request = GenerationRequest(ids(prompt_tokens), output, GREEDY, use_cache=False)
        before = resident_bytes()
        start = time.process_time()
        generation = engine.submit(request)
        next(iter(generation))
        prefill_cpu = time.process_time() - start
        decode = decode_seconds(generation)
        result = generation.result()
        used = resident_bytes() - before + engine.layout.pages_for(WARM_UP + 40) * engine.layout.page_bytes
    if result.error is not None:
        raise SystemExit(result.error)
    prefill = result.prefill_ns / 1e9
    return [
        Measured(section, "prefill, wall clock", prefill, "s"),
        Measured(section, "prefill, CPU", prefill_cpu, "s"),
        Measured(section, "prefill, CPU", prompt_tokens / prefill_cpu, "tok/s"),
        Measured(section, "decode after it, CPU", decode * 1e3, "ms/token"),
        Measured(section, "memory, predicted by the accounting", predicted / 1e6, "MB"),
        Measured(section, "memory, resident, measured", used / 1e6, "MB"),
        Measured(section, "memory, measured / predicted", used / predicted, "x"),
    ]


def in_own_process(prompt_tokens: int, threads: int, *, heads: int, alone: bool) -> list[Measured]:
    """`long_prompt` where nothing else has touched memory."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(long_prompt, (prompt_tokens, threads), {"heads": heads, "alone": alone})


def cache_type() -> StoredType:
    """Of a long prompt's cache: fp32 for the native step; without it torch needs the narrower one."""
    try:
        load()
    except NativeUnavailable as reason:
        say(f"without the native step: {reason}")
        return "bf16"
    return "fp32"


def estimate_hours(prompt_tokens: int, heads: int) -> float:
    """Prefill cost grows linearly with position: the cost at half the prompt is the average cost."""
    config, cache = long_config(heads), cache_type()
    model = K3Model(config).init_weights(0)
    budget = sequence_bytes(config, prompt_tokens // 2 + LONG_PIECE + 64, cache=cache).total + 2 * 10**6
    runner = (
        NativeRunner(model, memory_budget_bytes=budget, max_batch=1)
        if cache == "fp32"
        else K3Runner(model, memory_budget_bytes=budget, max_batch=1, cache_dtype=torch.bfloat16)
    )
    table = np.arange(runner.layout.pages_for(prompt_tokens // 2 + LONG_PIECE), dtype=np.int32)
    runner.fill_with_noise(len(table))
    row, piece = Row(0, table, prompt_tokens // 2), np.array(ids(LONG_PIECE), dtype=np.int32)
    with torch.inference_mode():
        seconds = min(timed(lambda: runner.prefill(row, piece, last=False)) for _ in range(3))
    return seconds * prompt_tokens / LONG_PIECE / 3600


TITLE = "Engine benchmark"
NOTES = (
    "Config A (1.2M parameters) with random weights. Contestants took turns; minima are shown.",
    "Time is CPU time of the process unless it says wall clock: the machine was shared.",
)


def main() -> None:
    """Runs every section, or the long prompt."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--prompt", type=int, default=131_000, help="tokens of the long prompt; 0 leaves it out"
    )
    parser.add_argument(
        "--long",
        type=int,
        nargs="?",
        const=K3Config.scaled("a").max_position_embeddings - 33,
        metavar="TOKENS",
        help="only one prompt, by default one that fills the context",
    )
    parser.add_argument(
        "--heads",
        type=int,
        default=K3Config.scaled("a").num_attention_heads,
        help="attention heads of the long prompt's model (%(default)s)",
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    facts = machine("benchmarks/engine.py", arguments.threads)
    if arguments.long:
        hours = estimate_hours(arguments.long, arguments.heads)
        say(f"{arguments.long} tokens: prefill is estimated at {hours:.2f} h")
        rows = in_own_process(arguments.long, arguments.threads, heads=arguments.heads, alone=True)
        rows.insert(0, Measured(rows[0].section, "prefill, CPU, estimated before", hours * 3600, "s"))
        write(rows, facts, arguments.out, "engine-bench-long", TITLE, NOTES)
        return
    rows = []
    for part in (single_stream, batch_scaling, prefix_hits, decode_against_context):
        say(part.__name__)
        rows += part(arguments.repeats)
    if arguments.prompt:
        say(f"prompt of {arguments.prompt} tokens")
        rows += in_own_process(arguments.prompt, arguments.threads, heads=arguments.heads, alone=False)
    write(rows, facts, arguments.out, "engine-bench", TITLE, NOTES)


if __name__ == "__main__":
    main()
