"""The engine over a runner without a model: scheduling, memory, delivery, faults."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3eval_local.engine import (
    ContextOverflow,
    EngineClosed,
    EngineCore,
    Generation,
    GenerationRequest,
    InvalidRequest,
    MemoryBudgetExceeded,
    Sampling,
)
from k3eval_local.engine.testing import FakeRunner, expected_output

GREEDY = Sampling(temperature=0)
VOCAB = 64


def request(prompt: Sequence[int], count: int = 4, **options: object) -> GenerationRequest:
    return GenerationRequest(tuple(prompt), count, **{"sampling": GREEDY, **options})


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


@pytest.fixture
def runner() -> FakeRunner:
    return FakeRunner()


@pytest.fixture
def engine(runner: FakeRunner) -> Iterator[EngineCore]:
    with EngineCore(runner, prefill_chunk=16, checkpoint_tokens=8) as engine:
        yield engine
        assert_nothing_leaked(engine)


def assert_nothing_leaked(engine: EngineCore) -> None:
    stats = engine.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert (stats.running_pages, stats.promised_pages) == (0, 0)
    assert stats.free_slots == stats.total_slots
    assert stats.free_pages + stats.cached_pages == stats.total_pages
    engine.clear_cache()
    stats = engine.stats()
    assert (stats.free_pages, stats.checkpoints, stats.cache_bytes) == (stats.total_pages, 0, 0)


def run(engine: EngineCore, prompt: Sequence[int], count: int = 4, **options: object) -> Generation:
    generation = engine.submit(request(prompt, count, **options))
    result = generation.result(30)
    assert result.error is None
    assert result.ids == expected_output(prompt, count, VOCAB)
    return generation


# Right tokens ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 3, 4, 5, 15, 16, 17, 31, 32, 33, 100])
def test_output_is_right_for_any_prompt_length(engine: EngineCore, length: int):
    result = run(engine, prompt_of(length), 9).result()
    assert (result.finish, result.cached_tokens, len(result.token_ns)) == ("length", 0, 9)
    assert result.queue_ns >= 0
    assert 0 < result.token_ns[0] <= result.token_ns[-1]


@pytest.mark.parametrize("chunk", [1, 3, 16, 64])
@pytest.mark.parametrize("state_pages", [0, 1, 5])
def test_chunk_sizes_and_models_without_state_agree(chunk: int, state_pages: int):
    with EngineCore(FakeRunner(state_pages=state_pages), prefill_chunk=chunk, checkpoint_tokens=8) as engine:
        first, second = prompt_of(37), prompt_of(29) + prompt_of(8, seed=1)
        run(engine, first)
        assert run(engine, second).result().cached_tokens == 24
        assert_nothing_leaked(engine)


def test_stop_ids_end_the_request_with_the_stop_token_last(engine: EngineCore):
    prompt = prompt_of(10)
    whole = expected_output(prompt, 8, VOCAB)
    result = engine.submit(request(prompt, 8, stop_ids=frozenset({whole[3]}))).result(30)
    end = whole.index(whole[3]) + 1
    assert (result.ids, result.finish) == (whole[:end], "stop")


def test_min_tokens_holds_the_stop_back(engine: EngineCore):
    prompt = prompt_of(10)
    first = expected_output(prompt, 1, VOCAB)[0]
    result = engine.submit(request(prompt, 6, stop_ids=frozenset({first}), min_tokens=3)).result(30)
    assert first not in result.ids[:3]
    assert len(result.ids) >= 3


def test_a_seed_gives_the_same_tokens_alone_and_in_company(runner: FakeRunner):
    wanted = request(prompt_of(20), 12, sampling=Sampling(temperature=1.3, top_p=0.9, seed=7))
    with EngineCore(runner, prefill_chunk=16) as engine:
        alone = engine.submit(wanted).result(30).ids
        others = [
            engine.submit(request(prompt_of(10 + i, seed=i), 12, sampling=Sampling())) for i in range(6)
        ]
        assert engine.submit(wanted).result(30).ids == alone
        assert {other.result(30).finish for other in others} == {"length"}
        different = engine.submit(request(prompt_of(20), 12, sampling=Sampling(temperature=1.3, seed=8)))
        assert different.result(30).ids != alone


def test_unseeded_requests_differ_but_follow_the_engines_seed():
    def tokens(seed: int) -> list[tuple[int, ...]]:
        with EngineCore(FakeRunner(), seed=seed) as engine:
            wanted = request(prompt_of(5), 20, sampling=Sampling(temperature=2.0))
            return [engine.submit(wanted).result(30).ids for _ in range(2)]

    first, second = tokens(1)
    assert first != second
    assert tokens(1) == [first, second]


# Prefix cache ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [7, 8, 9, 15, 16, 17, 23, 24, 25])
def test_block_ends_are_hit_and_the_count_is_what_was_skipped(shared: int):
    runner = FakeRunner()
    with EngineCore(runner, prefill_chunk=16, checkpoint_tokens=8) as engine:
        run(engine, [*prompt_of(shared), 1, 2, 3])
        before = runner.tokens_run
        result = run(engine, [*prompt_of(shared), 4, 5, 6]).result()
        assert result.cached_tokens == shared // 8 * 8
        # 4 generated tokens are 3 decode steps: the last one is not run.
        assert runner.tokens_run - before == shared + 3 - result.cached_tokens + 3


@pytest.mark.parametrize("end", [5, 7, 8, 9, 13])
def test_turn_ends_are_hit_wherever_they_lie(engine: EngineCore, end: int):
    first = run(engine, [*prompt_of(end), 1, 2], boundaries=(end,)).result()
    assert first.written_tokens == max(end, (end + 2) // 8 * 8)
    second = run(engine, [*prompt_of(end), 3, 4], boundaries=(end,)).result()
    assert second.cached_tokens == end
    assert second.written_tokens == max(0, (end + 2) // 8 * 8 - end)


def test_the_end_of_a_finished_sequence_is_hit_by_its_continuation(engine: EngineCore):
    prompt = prompt_of(13)
    first = run(engine, prompt, 6).result()
    following = [*prompt, *first.ids, 1, 2, 3]
    # The last generated token was never run, so the state ends one token before it.
    assert run(engine, following).result().cached_tokens == len(prompt) + 5


def test_a_prompt_that_is_an_exact_multiple_of_the_block_serves_later_prompts(engine: EngineCore):
    prompt = prompt_of(32)
    assert run(engine, prompt).result().written_tokens == 32
    assert run(engine, [*prompt, 5]).result().cached_tokens == 32
    # The same prompt again must leave a token to run: the block end before is used.
    assert run(engine, prompt).result().cached_tokens == 24


def test_use_cache_false_neither_reads_nor_writes(engine: EngineCore):
    prompt = prompt_of(40)
    run(engine, prompt, use_cache=False)
    assert engine.stats().checkpoints == 0
    run(engine, prompt)
    result = run(engine, prompt, use_cache=False).result()
    assert (result.cached_tokens, result.written_tokens) == (0, 0)


def test_prefixes_that_are_being_written_in_this_step_are_not_hit():
    gate = threading.Event()
    runner = FakeRunner(before_run=lambda _: gate.wait(10) and None)
    with EngineCore(runner, prefill_chunk=64, checkpoint_tokens=8) as engine:
        blocker = engine.submit(request([1], 2))
        pair = [engine.submit(request(prompt_of(40))) for _ in range(2)]
        gate.set()  # the pair is admitted in the same step
        results = [generation.result(30) for generation in (*pair, blocker)][:2]
        assert {result.ids for result in results} == {expected_output(prompt_of(40), 4, VOCAB)}
        assert [result.cached_tokens for result in results] == [0, 0]
        assert_nothing_leaked(engine)


def test_several_chats_at_once_share_one_prefix(engine: EngineCore):
    system = prompt_of(30)
    run(engine, [*system, 1], boundaries=(30,))
    for _ in range(20):
        prompts = [[*system, chat, *prompt_of(chat, seed=chat)] for chat in range(4)]
        chats = [engine.submit(request(prompt, 6, boundaries=(30,))) for prompt in prompts]
        for prompt, chat in zip(prompts, chats, strict=True):
            assert chat.result(30).ids == expected_output(prompt, 6, VOCAB)
            assert chat.result().cached_tokens >= 30


def test_an_agent_session_rereads_its_prompt_from_the_cache():
    runner = FakeRunner(pages=4096, page_tokens=16)
    with EngineCore(runner, prefill_chunk=128, checkpoint_tokens=512) as engine:
        history, seen, results, prompts = prompt_of(2000), [], [], []
        for turn in range(20):
            seen.append(len(history) if turn else 0)  # tokens of earlier prompts and answers
            history += prompt_of(60, seed=turn)
            prompts.append(len(history))
            results.append(run(engine, history, 12, boundaries=(len(history) - 3,)).result())
            history += results[-1].ids
        cached = [result.cached_tokens for result in results]
        # Only the last generated token of the turn before is run again.
        assert cached[1:] == [tokens - 1 for tokens in seen[1:]]
        assert sum(cached) >= 0.95 * sum(prompts[1:])
        assert runner.tokens_run == sum(prompts) - sum(cached) + 20 * 11


def test_eviction_keeps_results_right_and_drops_pages_and_states_together():
    runner = FakeRunner(pages=40, slots=2)
    with EngineCore(runner, prefill_chunk=16, checkpoint_tokens=8) as engine:
        for turn in range(30):
            prompt = prompt_of(24, seed=turn // 3) + prompt_of(9, seed=turn)
            run(engine, prompt, boundaries=(24, 33))
        assert engine.stats().evictions > 20
        assert engine.stats().cache_hits > 0
        assert_nothing_leaked(engine)


def test_a_prefix_in_use_outlives_block_ends_that_nobody_used():
    with EngineCore(FakeRunner(pages=64, slots=1), prefill_chunk=16, checkpoint_tokens=8) as engine:
        system = prompt_of(12)
        run(engine, [*system, 1], 1, boundaries=(12,))
        for other in range(12):
            run(engine, prompt_of(40, seed=50 + other), 1)
            assert run(engine, [*system, other], 1, boundaries=(12,)).result().cached_tokens == 12


# Random workloads ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_sessions_that_share_prefixes_in_random_interleavings(seed: int):
    chance = random.Random(seed)
    runner = FakeRunner(pages=chance.choice([60, 150, 400]), slots=chance.choice([2, 5, 8]))
    with EngineCore(runner, prefill_chunk=chance.choice([5, 16]), checkpoint_tokens=8) as engine:
        errors: list[str] = []

        def session(number: int) -> None:
            own = random.Random(seed * 100 + number)
            history, ends = prompt_of(own.choice([11, 16, 20]), seed=number % 3), []
            for _ in range(6):
                history += own.choices(range(VOCAB), k=own.randint(1, 9))
                ends.append(len(history))
                wanted = request(history, own.randint(1, 6), boundaries=tuple(ends))
                generation = engine.submit(wanted)
                if own.random() < 0.2:
                    generation.cancel()
                    generation.result(30)
                    continue
                result = generation.result(30)
                if result.ids != expected_output(history, wanted.max_tokens, VOCAB):
                    errors.append(f"session {number}: {result} for {history}")
                history += result.ids
                ends.append(len(history))

        threads = [threading.Thread(target=session, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert_nothing_leaked(engine)


step = st.tuples(st.integers(0, 3), st.integers(1, 30), st.integers(1, 6), st.booleans())


@settings(max_examples=40, deadline=None)
@given(
    st.lists(step, min_size=1, max_size=12),
    st.integers(9, 60),
    st.integers(1, 4),
    st.sampled_from([1, 4, 16]),
)
def test_any_workload_is_right_and_leaks_nothing(
    steps: list[tuple[int, int, int, bool]], pages: int, slots: int, chunk: int
):
    with EngineCore(FakeRunner(pages=pages, slots=slots), prefill_chunk=chunk, checkpoint_tokens=8) as engine:
        started = []
        for family, length, count, cancel in steps:
            prompt = prompt_of(length, seed=family)
            generation = engine.submit(request(prompt, count, boundaries=((length + 1) // 2,)))
            if cancel:
                generation.cancel()
            started.append((prompt, count, generation))
        for prompt, count, generation in started:
            result = generation.result(30)
            assert result.finish in ("length", "cancelled")
            assert result.ids == expected_output(prompt, count, VOCAB)[: len(result.ids)]
        assert_nothing_leaked(engine)


# Fairness, in steps ----------------------------------------------------------------------------------------


def test_long_prefills_give_every_stream_a_token_in_each_step():
    gate = threading.Event()
    runner = FakeRunner(pages=4096, before_run=lambda _: gate.wait(10) and None)
    with EngineCore(runner, prefill_chunk=16, checkpoint_tokens=512) as engine:
        streams = [engine.submit(request(prompt_of(3, seed=i), 60)) for i in range(3)]
        long = [engine.submit(request(prompt_of(3000, seed=i), 2)) for i in range(4)]
        gate.set()
        for stream in streams:
            stream.result(30)
        assert not any(prompt.done for prompt in long)
        between, decodes = 0, 0
        for call in runner.calls:
            if call.kind == "decode" and call.tokens >= 3:
                assert between <= 16  # however many prompts wait
                between, decodes = 0, decodes + 1
            elif call.kind == "prefill" and decodes:
                between += call.tokens
        assert decodes >= 50
        assert long[0].result(30).ids == expected_output(prompt_of(3000), 2, VOCAB)
        for prompt in long:
            prompt.cancel()
            prompt.result(30)


def test_prompts_take_turns_so_a_short_one_overtakes_a_long_one():
    gate = threading.Event()
    runner = FakeRunner(pages=4096, before_run=lambda _: gate.wait(10) and None)
    with EngineCore(runner, prefill_chunk=16) as engine:
        long = engine.submit(request(prompt_of(3000), 1))
        short = engine.submit(request(prompt_of(40, seed=1), 1))
        gate.set()
        short.result(30)
        assert not long.done
        # Three pieces of the short prompt, each after at most one of the long prompt.
        slots = [call.slot for call in runner.calls[:7]]
        assert slots.count(1) == 3
        long.cancel()
        assert long.result(30).finish == "cancelled"


def test_pieces_shrink_as_the_context_grows():
    runner = FakeRunner(pages=4096, attention_parity=100)
    with EngineCore(runner, prefill_chunk=64, checkpoint_tokens=4096) as engine:
        run(engine, prompt_of(2000), 1)
        sizes = [call.tokens for call in runner.calls]
        assert sizes[0] == 64
        assert sizes == sorted(sizes, reverse=True)
        start = 0
        for size in sizes:
            assert size <= 16 or size * (1 + start / 100) <= 4 * 64
            start += size


def test_waiting_requests_start_in_order_as_slots_return():
    with EngineCore(FakeRunner(slots=2), prefill_chunk=16) as engine:
        prompts = [prompt_of(5 + i, seed=i) for i in range(9)]
        generations = [engine.submit(request(prompt, 5)) for prompt in prompts]
        results = [generation.result(30) for generation in generations]
        assert [r.ids for r in results] == [expected_output(p, 5, VOCAB) for p in prompts]
        starts = [r.queue_ns + g.submitted_ns for r, g in zip(results, generations, strict=True)]
        assert starts == sorted(starts)


# Cancellation, faults, life --------------------------------------------------------------------------------


def test_cancelling_returns_pages_and_slot(engine: EngineCore):
    generation = engine.submit(request(prompt_of(10), 900))
    assert next(iter(generation)).id == expected_output(prompt_of(10), 1, VOCAB)[0]
    generation.cancel()
    result = generation.result(30)
    assert result.finish == "cancelled"
    assert 1 <= len(result.ids) < 900
    stats = engine.stats()
    assert (stats.running, stats.running_pages, stats.free_slots) == (0, 0, stats.total_slots)


def test_cancelling_a_waiting_or_ended_request_is_harmless():
    with EngineCore(FakeRunner(slots=1)) as engine:
        running = engine.submit(request(prompt_of(4), 900))
        waiting = engine.submit(request(prompt_of(4), 900))
        waiting.cancel()
        result = waiting.result(30)
        assert (result.finish, result.ids, result.cached_tokens) == ("cancelled", (), 0)
        running.cancel()
        running.result(30)
        running.cancel()
        run(engine, prompt_of(6))


def poisoned(tokens: Sequence[int]) -> None:
    if 63 in tokens:
        raise RuntimeError("token 63 is poison")


def test_a_failing_prefill_fails_its_request_and_nothing_else():
    with EngineCore(FakeRunner(vocab_size=VOCAB, before_run=poisoned), checkpoint_tokens=8) as engine:
        good = [
            p
            for p in (prompt_of(9, seed=i) for i in range(40))
            if 63 not in (*p, *expected_output(p, 4, VOCAB))
        ]
        streams = [engine.submit(request(prompt, 4)) for prompt in good[:3]]
        bad = engine.submit(request([1, 2, 63], 4))
        result = bad.result(30)
        assert (result.finish, result.ids) == ("error", ())
        assert "token 63 is poison" in (result.error or "")
        for prompt, stream in zip(good, streams, strict=False):
            assert stream.result(30).ids == expected_output(prompt, 4, VOCAB)
        assert engine.stats().failed_requests == 1
        assert_nothing_leaked(engine)


def test_a_failing_decode_step_fails_its_batch_and_the_engine_goes_on():
    broken = threading.Event()

    def fail_once(tokens: Sequence[int]) -> None:
        if broken.is_set():
            broken.clear()
            raise RuntimeError("the step broke")

    with EngineCore(FakeRunner(before_run=fail_once)) as engine:
        generation = engine.submit(request(prompt_of(5), 900))
        next(iter(generation))
        broken.set()
        result = generation.result(30)
        assert result.finish == "error"
        assert "the step broke" in (result.error or "")
        run(engine, prompt_of(7))
        assert_nothing_leaked(engine)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # it is the point here
def test_nobody_waits_for_ever_when_the_engine_thread_dies():
    dying = threading.Event()

    def leave(tokens: Sequence[int]) -> None:
        if dying.is_set():
            raise SystemExit

    engine = EngineCore(FakeRunner(slots=1, before_run=leave)).start()
    running, waiting = (engine.submit(request(prompt_of(5), 900)) for _ in range(2))
    next(iter(running))
    dying.set()
    assert {running.result(30).error, waiting.result(30).error} == {"the engine was closed"}
    with pytest.raises(EngineClosed):
        engine.submit(request([1], 1))
    engine.close()


class ForgetfulRunner(FakeRunner):
    """Cannot save a state."""

    def save_state(self, slot: int, pages: np.ndarray) -> None:
        raise RuntimeError("no room for the state")


def test_a_state_that_cannot_be_saved_spoils_no_finished_request_and_leaks_nothing():
    with EngineCore(ForgetfulRunner(), prefill_chunk=16, checkpoint_tokens=8) as engine:
        run(engine, prompt_of(6))  # its end cannot be kept
        result = engine.submit(request(prompt_of(20), 4)).result(30)  # nor its block ends
        assert (result.finish, result.error) == ("error", "RuntimeError: no room for the state")
        assert engine.stats().checkpoints == 0
        assert_nothing_leaked(engine)


class Digits:
    """A grammar: only tokens 0..9, at most `limit` of them."""

    def __init__(self, limit: int, fail_at: int | None = None) -> None:
        self.accepted: list[int] = []
        self._limit, self._fail_at = limit, fail_at

    def allowed(self) -> np.ndarray:
        if len(self.accepted) == self._fail_at:
            raise ValueError("grammar is broken")
        return np.arange(VOCAB) < 10

    def accept(self, token_id: int) -> None:
        self.accepted.append(token_id)

    @property
    def done(self) -> bool:
        return len(self.accepted) == self._limit


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(seed=1)])
def test_a_grammar_binds_and_ends_the_output(engine: EngineCore, sampling: Sampling):
    grammar = Digits(5)
    result = engine.submit(request(prompt_of(6), 50, grammar=grammar, sampling=sampling)).result(30)
    assert (result.finish, len(result.ids)) == ("stop", 5)
    assert list(result.ids) == grammar.accepted
    assert max(result.ids) < 10


def test_a_broken_grammar_fails_only_its_request(engine: EngineCore):
    stream = engine.submit(request(prompt_of(8), 40))
    broken = engine.submit(request(prompt_of(6), 50, grammar=Digits(20, fail_at=3)))
    assert "grammar is broken" in (broken.result(30).error or "")
    assert len(broken.result().ids) == 3
    assert stream.result(30).ids == expected_output(prompt_of(8), 40, VOCAB)


def test_a_grammar_that_allows_only_stops_beats_min_tokens(engine: EngineCore):
    stops = frozenset(range(10))
    result = engine.submit(request(prompt_of(6), 9, grammar=Digits(9), stop_ids=stops, min_tokens=5)).result(
        30
    )
    assert (result.finish, len(result.ids)) == ("stop", 1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (request([], 1), "prompt is empty"),
        (request([1], 0), "max_tokens"),
        (request([1], 3, min_tokens=4), "min_tokens"),
        (request([1, VOCAB], 1), "token id 64"),
        (request([-1], 1), "token id -1"),
        (request([1], 1, stop_ids=frozenset({99})), "token id 99"),
        (request([1], 1, boundaries=(2,)), "boundaries"),
        (request([1], 1, sampling=Sampling(temperature=-1.0)), "temperature"),
        (request([1], 1, sampling=Sampling(temperature=float("nan"))), "temperature"),
        (request([1], 1, sampling=Sampling(top_p=0.0)), "top_p"),
        (request([1], 1, sampling=Sampling(logprobs=-1)), "logprobs"),
    ],
)
def test_requests_outside_their_range_are_refused_with_the_member_named(
    engine: EngineCore, wrong: GenerationRequest, message: str
):
    with pytest.raises(InvalidRequest, match=message):
        engine.submit(wrong)


def test_context_and_memory_are_checked_before_a_request_is_accepted():
    with EngineCore(FakeRunner(pages=10, max_positions=64)) as engine:
        with pytest.raises(ContextOverflow, match=r"60 tokens.*\(5\) = 65.*64 tokens"):
            engine.submit(request(prompt_of(60), 5))
        with pytest.raises(MemoryBudgetExceeded, match=r"41 tokens needs 416 bytes.*leaves 384") as refused:
            engine.submit(request(prompt_of(36), 5))
        assert (refused.value.needed_bytes, refused.value.budget_bytes) == (416, 384)
        run(engine, prompt_of(36), 4)
        assert_nothing_leaked(engine)


@pytest.mark.parametrize("state_pages", [0, 2])
def test_a_request_as_large_as_the_budget_runs_whatever_is_cached(state_pages: int):
    runner = FakeRunner(pages=10, state_pages=state_pages)
    with EngineCore(runner, prefill_chunk=16, checkpoint_tokens=8) as engine:
        run(engine, prompt_of(20), 1, boundaries=(18,))
        for _ in range(2):
            run(engine, prompt_of(36), 4, boundaries=(18, 34))
        assert_nothing_leaked(engine)


def test_close_cancels_joins_and_refuses():
    engine = EngineCore(FakeRunner(slots=2)).start()
    generations = [engine.submit(request(prompt_of(5), 900)) for _ in range(5)]
    engine.close()
    assert {generation.result(5).finish for generation in generations} <= {"cancelled", "length"}
    assert not [thread for thread in threading.enumerate() if thread.name == "k3-engine"]
    with pytest.raises(EngineClosed):
        engine.submit(request([1], 1))
    with pytest.raises(EngineClosed):
        engine.start()
    engine.close()


def test_an_engine_that_was_never_started_refuses_and_closes():
    engine = EngineCore(FakeRunner())
    with pytest.raises(EngineClosed, match="start"):
        engine.submit(request([1], 1))
    engine.close()


def test_stats_count(engine: EngineCore):
    run(engine, prompt_of(16))
    run(engine, [*prompt_of(16), 1])
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.prefilled_tokens, stats.hit_tokens) == (33, 17, 16)
    assert (stats.generated_tokens, stats.cache_hits, stats.cache_misses) == (8, 1, 1)
    assert stats.used_bytes == (stats.total_pages - stats.free_pages) * stats.page_bytes > 0
