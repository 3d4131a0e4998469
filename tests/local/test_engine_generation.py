from __future__ import annotations

import asyncio
import threading
import time

import pytest

from k3eval_local.engine.generation import Generation
from k3eval_local.engine.request import GenerationRequest, GenerationResult, TokenEvent

RESULT = GenerationResult((1, 2), "stop", 0, 0, 0, 0, (0, 0))


def made() -> tuple[Generation, list[Generation]]:
    cancelled: list[Generation] = []
    return Generation(GenerationRequest((1,), 4), submitted_ns=0, on_cancel=cancelled.append), cancelled


def event(token: int) -> TokenEvent:
    return TokenEvent(token, None, (), 0)


def publish(generation: Generation, count: int) -> threading.Thread:
    def run() -> None:
        for token in range(count):
            generation.publish(event(token))
            time.sleep(0.001)
        generation.finish(RESULT)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_every_iterator_sees_every_token_in_order():
    generation, _ = made()
    thread = publish(generation, 20)
    assert [e.id for e in generation] == list(range(20))
    assert [e.id for e in generation] == list(range(20))
    assert generation.result() is RESULT
    thread.join()


def test_async_iteration_from_another_thread():
    async def consume(generation: Generation) -> list[int]:
        return [e.id async for e in generation]

    async def main() -> None:
        generation, _ = made()
        thread = publish(generation, 20)
        both = await asyncio.gather(consume(generation), consume(generation))
        assert both == [list(range(20))] * 2
        assert await generation.aresult() is RESULT
        thread.join()
        assert not generation._wakers

    asyncio.run(main())


def test_a_dead_event_loop_does_not_disturb_the_publisher():
    generation, _ = made()
    generation.publish(event(0))

    async def leave_early() -> None:
        iterator = generation.__aiter__()
        assert (await iterator.__anext__()).id == 0
        await iterator.aclose()

    asyncio.run(leave_early())
    generation.publish(event(1))
    generation.finish(RESULT)
    assert [e.id for e in generation] == [0, 1]


def test_result_times_out_and_the_first_end_counts():
    generation, _ = made()
    with pytest.raises(TimeoutError):
        generation.result(timeout=0.01)
    generation.finish(RESULT)
    generation.finish(GenerationResult((), "error", 0, 0, 0, 0, ()))
    assert generation.done
    assert generation.result() is RESULT


def test_cancel_asks_once_for_each_call():
    generation, cancelled = made()
    generation.cancel()
    generation.cancel()
    assert generation.cancel_requested
    assert cancelled == [generation, generation]
