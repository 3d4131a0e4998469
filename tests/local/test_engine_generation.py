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
            generation.wake()
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
        assert not generation._waiters

    asyncio.run(main())


def test_a_consumer_that_fell_behind_gets_what_is_there_in_one_batch():
    async def main() -> list[list[int]]:
        generation, _ = made()
        for token in range(3):
            generation.publish(event(token))
        seen = []
        async for batch in generation.batches():
            seen.append([e.id for e in batch])
            if len(seen) < 3:
                generation.publish(event(10 + len(seen)))
                generation.wake()
            else:
                generation.finish(RESULT)
        return seen

    assert asyncio.run(main()) == [[0, 1, 2], [11], [12]]


def test_one_call_into_the_loop_wakes_every_stream_that_is_due(monkeypatch: pytest.MonkeyPatch):
    async def consume(generation: Generation) -> list[int]:
        return [e.id async for e in generation]

    async def main() -> None:
        loop = asyncio.get_running_loop()
        generations = [made()[0] for _ in range(20)]
        tasks = [asyncio.create_task(consume(generation)) for generation in generations]
        await asyncio.sleep(0)
        calls: list[object] = []
        call = loop.call_soon_threadsafe
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *a: (calls.append(a), call(*a)))

        def publish() -> None:
            for token in range(3):
                for generation in generations:
                    generation.publish(event(token))
                for generation in generations:
                    generation.wake()

        thread = threading.Thread(target=publish)
        thread.start()
        thread.join()  # the loop cannot run meanwhile
        assert len(calls) == 1
        await asyncio.sleep(0.01)
        for generation in generations:
            generation.finish(RESULT)  # on the loop itself nothing has to be called from outside
        assert len(calls) == 1
        assert await asyncio.gather(*tasks) == [[0, 1, 2]] * 20

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
