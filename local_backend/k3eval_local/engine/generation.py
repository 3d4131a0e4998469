"""One running request as its consumer sees it: an iterator of tokens, a result, a way to cancel.

The engine's thread publishes; any thread or event loop consumes. Every iterator sees every token from the
first, so late or repeated iteration is fine. Iteration ends when the request ends, for whatever reason;
`result()` says which. Publishing never blocks and never waits for a consumer.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator

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
        self._wakers: set[_Waker] = set()

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

    async def __aiter__(self) -> AsyncIterator[TokenEvent]:
        waker = _Waker(asyncio.get_running_loop())
        with self._changed:
            self._wakers.add(waker)
        try:
            seen = 0
            while True:
                waker.rearm()
                with self._changed:
                    fresh = self._events[seen:]
                    ended = self._result is not None
                seen += len(fresh)
                for event in fresh:
                    yield event
                if ended and not fresh:
                    return
                if not ended:
                    await waker.event.wait()
        finally:
            with self._changed:
                self._wakers.discard(waker)

    def result(self, timeout: float | None = None) -> GenerationResult:
        """Waits for the end. Raises TimeoutError after `timeout` seconds; a failed request does not raise."""
        # An event of its own: who waits for the end is not woken by every token.
        if not self._ended.wait(timeout) or self._result is None:
            raise TimeoutError(f"request {self.request.request_id!r} did not end within {timeout} s")
        return self._result

    async def aresult(self) -> GenerationResult:
        """`result` for an event loop."""
        async for _ in self:
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
        """Engine only: delivers one token."""
        with self._changed:
            self._events.append(event)
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
        for waker in list(self._wakers):
            if not waker.wake():
                self._wakers.discard(waker)


class _Waker:
    """Wakes one async iterator from another thread, at most once until the iterator has looked."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.event = asyncio.Event()
        self._loop = loop
        self._called = False

    def rearm(self) -> None:
        """Consumer only, before it looks: what is published from here on wakes it again."""
        self.event.clear()
        self._called = False

    def wake(self) -> bool:
        """False when the consumer's loop is gone."""
        if self._called:
            return True
        self._called = True
        try:
            self._loop.call_soon_threadsafe(self.event.set)
        except RuntimeError:
            return False
        return True
