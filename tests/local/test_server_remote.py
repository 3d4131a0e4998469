"""The engine in a process of its own gives what one in this process gives; how it stops, how it may die."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from server_helpers import until

from k3eval_local.checkpoint import open_model
from k3eval_local.engine import (
    ContextOverflow,
    Engine,
    EngineClosed,
    EngineError,
    GenerationRequest,
    GenerationResult,
    InvalidRequest,
    Sampling,
    TokenEvent,
)
from k3eval_local.protocol.grammar import GrammarCompiler, OrdinaryTokens
from k3eval_local.protocol.messages import ChatMessage, Conversation, ToolChoice, ToolDef
from k3eval_local.server.remote import RemoteEngine, WorkerOptions, _ended
from k3eval_local.tokenizer import Tokenizer

TOKENIZER = Tokenizer.for_vocab(512)
COMPILER = GrammarCompiler(TOKENIZER)
TOOL = ToolDef("add", "", {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]})
CALLS = Conversation((ChatMessage("user", "hi"),), (TOOL,), ToolChoice("required"))
PROMPT = tuple(b"say something, and go on")


@pytest.fixture(autouse=True)
def folders_of_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", f"{root}:{root / 'local_backend'}")


def options(model: str = "a") -> WorkerOptions:
    return WorkerOptions(model, 0, None, 64 * 2**20, 8, 1, "auto", "fp32", "cpu", "warning")


def requests() -> list[GenerationRequest]:
    """A fresh one of each kind: a grammar serves one request."""
    end = frozenset({TOKENIZER.control.end_of_msg})
    return [
        GenerationRequest(PROMPT, 40, Sampling(0)),
        GenerationRequest(PROMPT[:9], 30, Sampling(0.8, seed=5), boundaries=(4, 9)),
        GenerationRequest(PROMPT, 20, Sampling(0, logprobs=2), grammar=OrdinaryTokens(TOKENIZER)),
        GenerationRequest(PROMPT, 400, Sampling(1, seed=3), end, grammar=COMPILER.message(CALLS)),
    ]


def attached(engine: RemoteEngine, act: Callable[[RemoteEngine, list[bool]], Awaitable[None]]) -> None:
    """Run ``act`` on a loop that reads from the engine; the list tells whether the engine has died."""

    async def main() -> None:
        deaths: list[bool] = []
        engine.attach(asyncio.get_running_loop(), lambda: deaths.append(True))
        await act(engine, deaths)

    with engine:
        engine.wait_ready()
        asyncio.run(main())
    assert engine._process.poll() is not None


def shape(result: GenerationResult) -> tuple[object, ...]:
    return result.ids, result.finish, result.error, result.written_tokens


def test_it_says_what_an_engine_in_this_process_says() -> None:
    model, _ = open_model("a", 0)
    with Engine(model, memory_budget_bytes=64 * 2**20, max_batch=8, seed=0) as inside:
        running = [inside.submit(request) for request in requests()]
        expected = [(shape(each.result()), list(each)) for each in running]

    async def act(engine: RemoteEngine, deaths: list[bool]) -> None:
        assert engine.weights == "random, seed 0"
        assert engine.layout.vocab_size == 512

        async def all_of(request: GenerationRequest) -> tuple[tuple[object, ...], list[TokenEvent]]:
            generation = engine.submit(request)
            return shape(await generation.aresult()), list(generation)

        got = await asyncio.gather(*map(all_of, requests()))
        for (result, events), (wanted, tokens) in zip(got, expected, strict=True):
            assert result[:3] == wanted[:3]
            assert [event.id for event in events] == [token.id for token in tokens]
            assert [len(event.top_logprobs) for event in events] == [len(t.top_logprobs) for t in tokens]
            for event, token in zip(events, tokens, strict=True):
                if token.logprob is not None:
                    assert event.logprob == pytest.approx(token.logprob, abs=1e-4)
        stats = engine.stats()
        assert stats.generated_tokens == sum(len(tokens) for _, tokens in expected)
        assert stats.running == 0
        assert deaths == []

    attached(RemoteEngine(options()), act)


def test_a_cancelled_request_ends_and_gives_its_slot_back() -> None:
    async def act(engine: RemoteEngine, deaths: list[bool]) -> None:
        generation = engine.submit(GenerationRequest(PROMPT, 100_000, Sampling(0)))
        async for _ in generation:
            generation.cancel()
            break
        result = await generation.aresult()
        assert result.finish == "cancelled"
        generation.cancel()  # harmless
        assert engine.stats().free_slots == 8

    attached(RemoteEngine(options()), act)


def test_what_it_cannot_serve_is_refused_here() -> None:
    async def act(engine: RemoteEngine, deaths: list[bool]) -> None:
        with pytest.raises(InvalidRequest, match="empty"):
            engine.submit(GenerationRequest((), 5))
        with pytest.raises(ContextOverflow):
            engine.submit(GenerationRequest(PROMPT, 2_000_000))

    attached(RemoteEngine(options()), act)


def test_when_it_is_killed_everybody_is_told() -> None:
    async def act(engine: RemoteEngine, deaths: list[bool]) -> None:
        generation = engine.submit(GenerationRequest(PROMPT, 100_000, Sampling(0)))
        async for _ in generation:
            os.kill(engine._process.pid, signal.SIGKILL)
            break
        result = await generation.aresult()
        assert result.finish == "error"
        assert result.error is not None
        assert "ended" in result.error
        assert deaths == [True]
        with pytest.raises(EngineClosed, match="ended"):
            engine.submit(GenerationRequest(PROMPT, 5))

    attached(RemoteEngine(options()), act)


def test_when_it_is_killed_while_it_loads_that_is_no_refusal() -> None:
    with RemoteEngine(options()) as engine:
        engine._process.kill()
        with pytest.raises(EngineClosed, match="killed by SIGKILL"):
            engine.wait_ready()


def test_a_model_that_cannot_be_loaded_is_one_line() -> None:
    with RemoteEngine(options("nonesuch")) as engine, pytest.raises(EngineError, match="nonesuch"):
        engine.wait_ready()
    assert until(lambda: engine._process.poll() is not None)


@pytest.mark.parametrize(
    ("code", "said"), [(None, ""), (3, " with exit code 3"), (-11, "SIGSEGV"), (-40, "signal 40")]
)
def test_how_it_ended_is_told(code: int | None, said: str) -> None:
    assert _ended(code).endswith(said)
