"""One running request as its consumer sees it: an iterator of tokens, a result, a way to cancel.

The engine's thread publishes, and wakes consumers when it suits it; any thread or event loop consumes.
Every iterator sees every token from the first, so late or repeated iteration is fine. Iteration ends when
the request ends, for whatever reason; `result()` says which. Publishing never blocks and never waits for a
consumer.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import ClassVar, Protocol
from weakref import WeakKeyDictionary, ref

from k3eval_local.engine.request import GenerationRequest, GenerationResult, TokenEvent


class Generation:
    """Handle of one accepted request. Made by `Engine.submit`."""

    def __init__(
        self, request: GenerationRequest, *, submitted_ns: int, on_cancel: Callable[[Generation], None]
    ) -> None:
        self.request = request
        self.submitted_ns = submitted_ns
        self._on_cancel = on_cancel
        self._changed = threading.Condition()
        self._ended = threading.Event()
        self._events: list[TokenEvent] = []
        self._result: GenerationResult | None = None
        self._cancelled = False
        self._waiters: set[_Waiter] = set()

    def __iter__(self) -> Iterator[TokenEvent]:
        seen = 0
        while True:
            with self._changed:
                while seen == len(self._events) and self._result is None:
                    self._changed.wait()
                fresh = self._events[seen:]
            if not fresh:
                return
            seen += len(fresh)
            yield from fresh

    async def batches(self) -> AsyncGenerator[Sequence[TokenEvent]]:
        """Tokens as they come, several at a time only where the consumer has fallen behind."""
        waiter = _Waiter(_LoopWaker.running())
        with self._changed:
            self._waiters.add(waiter)
        try:
            seen = 0
            while True:
                waiter.rearm()
                ended = self._result is not None  # read first: no token follows the end
                fresh = self._events[seen:]
                if fresh:
                    seen += len(fresh)
                    yield fresh
                if ended:
                    return
                await waiter.wait()
        finally:
            with self._changed:
                self._waiters.discard(waiter)

    async def __aiter__(self) -> AsyncGenerator[TokenEvent]:
        async with aclosing(self.batches()) as batches:
            async for batch in batches:
                for event in batch:
                    yield event

    def result(self, timeout: float | None = None) -> GenerationResult:
        """Waits for the end. Raises TimeoutError after `timeout` seconds; a failed request does not raise."""
        # An event of its own: who waits for the end is not woken by every token.
        if not self._ended.wait(timeout) or self._result is None:
            raise TimeoutError(f"request {self.request.request_id!r} did not end within {timeout} s")
        return self._result

    async def aresult(self) -> GenerationResult:
        """`result` for an event loop."""
        async for _ in self.batches():
            pass
        return self.result(timeout=0)

    @property
    def done(self) -> bool:
        """True once the request has ended."""
        return self._result is not None

    @property
    def cancel_requested(self) -> bool:
        """True once `cancel` was called."""
        return self._cancelled

    def cancel(self) -> None:
        """Asks the engine to stop; its pages and slot are free by the engine's next step. Safe to repeat."""
        self._cancelled = True
        self._on_cancel(self)

    def publish(self, event: TokenEvent) -> None:
        """Engine only: delivers one token. Who waits for it sees it at the next `wake` or `finish`."""
        self._events.append(event)

    def wake(self) -> None:
        """Engine only: wakes who waits for what was published."""
        with self._changed:
            self._wake()

    def finish(self, result: GenerationResult) -> None:
        """Engine only: ends the request, once."""
        with self._changed:
            if self._result is None:
                self._result = result
                self._ended.set()
                self._wake()

    def _wake(self) -> None:
        self._changed.notify_all()
        for waiter in list(self._waiters):
            if not waiter.wake():
                self._waiters.discard(waiter)


class MakeGeneration(Protocol):
    """Makes the handle of an accepted request; `Generation` itself, for one."""

    def __call__(
        self, request: GenerationRequest, *, submitted_ns: int, on_cancel: Callable[[Generation], None]
    ) -> Generation:
        """See `Generation`."""
        ...


class _LoopWaker:
    """Wakes the iterators of one event loop from other threads, with one call into it for all that are due.

    A call into a loop writes to a socket, which lets go of the interpreter's lock: one a token would cost the
    engine more than the token.
    """

    _of: ClassVar[WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopWaker]] = WeakKeyDictionary()
    _lock: ClassVar = threading.Lock()

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = ref(loop)
        self._due: deque[_Waiter] = deque()
        self._called = False

    @classmethod
    def running(cls) -> _LoopWaker:
        """The one of the running loop."""
        loop = asyncio.get_running_loop()
        with cls._lock:
            return cls._of.setdefault(loop, cls(loop))

    def wake(self, waiter: _Waiter) -> bool:
        """False when the loop is gone."""
        self._due.append(waiter)
        if self._called:
            return True
        self._called = True
        loop = self._loop()
        try:
            if loop is None:
                return False
            if asyncio._get_running_loop() is loop:
                loop.call_soon(self._fire)
            else:
                loop.call_soon_threadsafe(self._fire)
        except RuntimeError:
            return False
        return True

    def _fire(self) -> None:
        self._called = False  # before looking: what is due from here on calls again
        while self._due:
            self._due.popleft().fire()


class _Waiter:
    """What one async iterator waits on; due at most once until the iterator has looked."""

    def __init__(self, waker: _LoopWaker) -> None:
        self._waker = waker
        self._due = False
        self._fired = False
        self._future: asyncio.Future[None] | None = None

    def rearm(self) -> None:
        """Consumer only, before it looks: what is published from here on wakes it again."""
        self._due = self._fired = False

    async def wait(self) -> None:
        """Consumer only: until something was published since the last rearm, or earlier."""
        if self._fired:
            return
        self._future = asyncio.get_running_loop().create_future()
        try:
            await self._future
        finally:
            self._future = None

    def wake(self) -> bool:
        """Any thread. False when the consumer's loop is gone."""
        if self._due:
            return True
        self._due = True
        return self._waker.wake(self)

    def fire(self) -> None:
        """On the loop."""
        self._fired = True
        if self._future is not None and not self._future.done():
            self._future.set_result(None)
