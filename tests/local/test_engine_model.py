"""The engine over a real (random) K3: cached equals cold, batched equals single, predicted memory is used."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
import pytest
import torch

from k3eval_local.engine import (
    Engine,
    GenerationRequest,
    GenerationResult,
    InvalidRequest,
    MemoryBudgetExceeded,
    Sampling,
)
from k3eval_local.engine.engine import Kernels
from k3eval_local.engine.k3_runner import K3Runner
from k3eval_local.engine.runner import Row
from k3eval_local.model.accounting import cache_bytes_per_token, sequence_bytes
from k3eval_local.model.config import K3Config
from k3eval_local.model.decoder import K3Model

GREEDY = Sampling(temperature=0)
BUDGET = 64 * 1024**2


@cache
def model_of(name: str) -> K3Model:
    return K3Model(K3Config.scaled(name)).init_weights(0)


def ids(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(256), k=length)


def cold(name: str, prompt: Sequence[int], count: int) -> tuple[int, ...]:
    """Greedy tokens of the bare model: one forward pass, then cached steps."""
    model, tokens = model_of(name), []
    with torch.inference_mode():
        logits, state = model.forward(torch.tensor([prompt]), last_only=True)
        tokens.append(int(logits[0, -1].argmax()))
        while len(tokens) < count:
            logits, state = model.step(torch.tensor(tokens[-1:]), state)
            tokens.append(int(logits[0].argmax()))
    return tuple(tokens)


def small_engine(name: str = "a", *, kernels: Kernels = "auto", **options: int) -> Engine:
    """On the native step where a compiler is at hand, unless told otherwise."""
    sizes = {"memory_budget_bytes": BUDGET, "max_batch": 8, "prefill_chunk": 64, "block_tokens": 16}
    return Engine(model_of(name), kernels=kernels, **{**sizes, "checkpoint_tokens": 32, **options})


RUNNERS = pytest.mark.parametrize("kernels", ["auto", "torch"], ids=["native", "torch"])


@pytest.fixture(params=["auto", "torch"], ids=["native", "torch"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with small_engine(kernels=request.param) as engine:
        yield engine
        stats = engine.stats()
        assert stats.running_pages == 0
        assert stats.free_slots == stats.total_slots
        assert stats.free_pages + stats.cached_pages == stats.total_pages


def run(engine: Engine, prompt: Sequence[int], count: int = 8, **options: object) -> GenerationResult:
    wanted = GenerationRequest(tuple(prompt), count, **{"sampling": GREEDY, **options})
    result = engine.submit(wanted).result(60)
    assert result.error is None
    return result


@pytest.mark.parametrize("name", ["a", "a-mla"])
@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 200])
@RUNNERS
def test_engine_equals_the_bare_model(name: str, length: int, kernels: Kernels):
    with small_engine(name, kernels=kernels) as engine:
        assert run(engine, ids(length)).ids == cold(name, ids(length), 8)


@pytest.mark.parametrize("chunk", [1, 7, 32, 512])
@RUNNERS
def test_the_chunk_size_does_not_change_the_output(chunk: int, kernels: Kernels):
    with small_engine(prefill_chunk=chunk, kernels=kernels) as engine:
        assert run(engine, ids(75)).ids == cold("a", ids(75), 8)


@pytest.mark.parametrize("shared", [63, 64, 65])
@pytest.mark.parametrize("turn_end", [False, True])
def test_a_hit_equals_a_cold_run_at_a_boundary_and_beside_it(engine: Engine, shared: int, turn_end: bool):
    boundaries = (shared,) if turn_end else ()
    run(engine, [*ids(shared), *ids(20, seed=1)], boundaries=boundaries)
    prompt = [*ids(shared), *ids(30, seed=2)]
    result = run(engine, prompt, 12, boundaries=boundaries)
    assert result.cached_tokens == (shared if turn_end else shared // 32 * 32)
    assert result.ids == cold("a", prompt, 12)


def test_a_restored_prefill_is_the_same_to_the_last_bit():
    model = model_of("a")
    runner = K3Runner(model, memory_budget_bytes=BUDGET, max_batch=2, page_tokens=16)
    table, other = np.arange(0, 8, dtype=np.int32), np.arange(20, 28, dtype=np.int32)
    tokens = np.array(ids(100), dtype=np.int32)
    with torch.inference_mode():
        runner.prefill(Row(0, table, 0), tokens[:50], last=False)
        state_pages = np.arange(40, 40 + runner.layout.state_pages, dtype=np.int32)
        runner.save_state(0, state_pages)
        straight = runner.prefill(Row(0, table, 50), tokens[50:], last=True)
        runner.load_state(1, state_pages)
        for source, target, tokens_kept in zip(table[:4], other[:4], (16, 16, 16, 2), strict=True):
            runner.copy_page(int(source), int(target), tokens_kept)
        restored = runner.prefill(Row(1, other, 50), tokens[50:], last=True)
    assert straight is not None
    assert restored is not None
    assert torch.equal(straight, restored)


def test_a_conversation_continues_from_the_end_of_its_own_answer(engine: Engine):
    history: list[int] = ids(40)
    for turn in range(5):
        result = run(engine, history, 10, boundaries=(len(history) - 2,))
        assert result.ids == cold("a", history, 10)
        assert result.cached_tokens >= (len(history) - 16 if turn else 0)
        history += [*result.ids, *ids(6, seed=turn)]


@RUNNERS
def test_eight_sessions_that_share_prefixes_equal_cold_runs(kernels: Kernels):
    chance = random.Random(3)
    # Too small for everybody's prefixes, so that checkpoints are evicted meanwhile.
    with small_engine(memory_budget_bytes=8 * 62976 + 260 * 6144, kernels=kernels) as engine:
        histories = [ids(50, seed=session % 3) + ids(session, seed=session) for session in range(8)]
        expected: list[tuple[list[int], GenerationResult]] = []
        for _ in range(3):
            order = chance.sample(range(8), 8)
            counts = [chance.randint(1, 9) for _ in order]
            generations = [
                engine.submit(
                    GenerationRequest(
                        tuple(histories[session]), count, GREEDY, boundaries=(len(histories[session]),)
                    )
                )
                for session, count in zip(order, counts, strict=True)
            ]
            for session, generation in zip(order, generations, strict=True):
                result = generation.result(60)
                expected.append((list(histories[session]), result))
                histories[session] += [*result.ids, *ids(chance.randint(1, 20), seed=session + 10)]
        for prompt, result in expected:
            assert result.ids == cold("a", prompt, len(result.ids))
        stats = engine.stats()
        assert stats.cache_hits > 8
        assert stats.evictions > 8


def test_after_eviction_the_output_is_the_same(engine: Engine):
    first = run(engine, ids(90), boundaries=(70,))
    engine.clear_cache()
    again = run(engine, ids(90), boundaries=(70,))
    assert (again.cached_tokens, again.ids) == (0, first.ids)
    hit = run(engine, ids(90), boundaries=(70,))
    assert (hit.cached_tokens, hit.ids) == (70, first.ids)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=1.0, top_p=0.95, seed=11)])
@RUNNERS
def test_a_batch_gives_what_each_request_gives_alone(sampling: Sampling, kernels: Kernels):
    prompts = [ids(10 + 13 * i, seed=i) for i in range(8)]
    with small_engine(kernels=kernels) as engine:
        alone = [run(engine, prompt, 12, sampling=sampling, use_cache=False).ids for prompt in prompts]
        wanted = [GenerationRequest(tuple(p), 12, sampling, use_cache=False) for p in prompts]
        together = [engine.submit(request) for request in wanted]
        assert [generation.result(60).ids for generation in together] == alone


@RUNNERS
def test_logits_of_a_row_differ_by_rounding_only_when_the_batch_changes(kernels: Kernels):
    runner = small_engine(kernels=kernels).runner
    rows = [Row(i, np.arange(8 * i, 8 * i + 8, dtype=np.int32), 40 + i) for i in range(8)]
    count = runner.layout.state_pages
    saved = [np.arange(100 + count * i, 100 + count * (i + 1), dtype=np.int32) for i in range(8)]
    with torch.inference_mode():
        for i, row in enumerate(rows):
            runner.prefill(Row(i, row.table, 0), np.array(ids(40 + i, seed=i), dtype=np.int32), last=False)
            runner.save_state(i, saved[i])
        together = runner.decode(rows, [5] * 8)
        for i, row in enumerate(rows):
            runner.load_state(i, saved[i])
            alone = runner.decode([row], [5])[0]
            torch.testing.assert_close(together[i], alone, atol=2e-5, rtol=0)
        for i in (1, 4, 6):  # slots that are not consecutive
            runner.load_state(i, saved[i])
        apart = runner.decode([rows[1], rows[4], rows[6]], [5] * 3)
        torch.testing.assert_close(together[[1, 4, 6]], apart, atol=2e-5, rtol=0)


def test_logprobs_are_those_of_the_bare_model(engine: Engine):
    result = engine.submit(GenerationRequest(tuple(ids(20)), 1, Sampling(temperature=0, logprobs=3)))
    (event,) = list(result)
    with torch.inference_mode():
        logits, _ = model_of("a").forward(torch.tensor([ids(20)]), last_only=True)
    expected, order = torch.log_softmax(logits[0, -1].double(), 0).topk(3)
    assert [top.id for top in event.top_logprobs] == order.tolist()
    assert event.logprob == pytest.approx(float(expected[0]), abs=1e-4)


def test_sizes_are_those_of_the_accounting():
    for name in ("a", "a-mla", "b"):
        config = K3Config.scaled(name)
        runner = K3Runner(
            K3Model(config).init_weights(0), memory_budget_bytes=BUDGET, max_batch=2, page_tokens=32
        )
        layout, memory = runner.layout, sequence_bytes(config, 0)
        assert layout.page_bytes == 32 * cache_bytes_per_token(config, "fp32")
        # The accounting keeps the convolution's inputs in bf16; an fp32 model keeps them in fp32.
        assert layout.slot_bytes == memory.kda_state + 2 * memory.conv_state
        assert BUDGET - layout.page_bytes < layout.total_bytes <= BUDGET


def test_the_budget_is_checked_with_figures():
    with pytest.raises(InvalidRequest, match="memory_budget_bytes is 100000; 8 running sequences need"):
        small_engine(memory_budget_bytes=100_000)
    with (
        small_engine(memory_budget_bytes=8 * 62976 + 10 * 6144) as engine,
        pytest.raises(MemoryBudgetExceeded, match="162 tokens needs 130560 bytes"),
    ):
        engine.submit(GenerationRequest(tuple(ids(100)), 62, GREEDY))


def test_a_bf16_cache_halves_the_pages_and_stays_close():
    with small_engine(kernels="torch") as full, small_engine_bf16() as half:
        assert half.layout.page_bytes * 2 == full.layout.page_bytes
        wanted = GenerationRequest(tuple(ids(80)), 1, Sampling(temperature=0, logprobs=5))
        (exact,), (rounded,) = list(full.submit(wanted)), list(half.submit(wanted))
        assert exact.logprob is not None
        assert rounded.top_logprobs[0].logprob == pytest.approx(exact.logprob, abs=0.05)


def small_engine_bf16() -> Engine:
    return Engine(
        model_of("a"),
        memory_budget_bytes=BUDGET,
        max_batch=8,
        prefill_chunk=64,
        block_tokens=16,
        cache_dtype=torch.bfloat16,
    )
