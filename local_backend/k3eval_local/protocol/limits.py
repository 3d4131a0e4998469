"""Account limits over sliding windows: who may start a request now, and when to come back."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from k3eval_local.protocol.errors import ErrorKind, ProtocolError
from k3eval_local.protocol.prices import Limits

_MINUTE = 60 * 10**9
_DAY = 24 * 60 * _MINUTE


@dataclass(frozen=True, slots=True)
class _Entry:
    at_ns: int
    tokens: int


class RateLimiter:
    """Counts requests and tokens of one account. Not thread-safe: call it from the event loop.

    A request takes the tokens that it may use at most (prompt and output limit), as the vendors do.
    ``clock_ns`` is monotonic.
    """

    def __init__(self, limits: Limits, clock_ns: Callable[[], int]) -> None:
        self._limits = limits
        self._clock_ns = clock_ns
        self._entries: deque[_Entry] = deque()
        self._running = 0

    def admit(self, tokens: int) -> None:
        """Count one more running request.

        Raises:
            ProtocolError: a limit is reached; it names the limit and the seconds to wait.
        """
        now = self._clock_ns()
        while self._entries and now - self._entries[0].at_ns >= _DAY:
            self._entries.popleft()
        limits = self._limits
        if limits.concurrency is not None and self._running >= limits.concurrency:
            raise ProtocolError(
                ErrorKind.CONCURRENCY,
                f"request reached max organization concurrency: {limits.concurrency}",
                retry_after_s=1,
                limit=limits.concurrency,
            )
        self._check(now, _MINUTE, limits.per_minute, "RPM", None)
        self._check(now, _DAY, limits.per_day, "RPD", None)
        self._check(now, _MINUTE, limits.tokens_per_minute, "TPM", tokens)
        self._check(now, _DAY, limits.tokens_per_day, "TPD", tokens)
        self._entries.append(_Entry(now, tokens))
        self._running += 1

    def release(self) -> None:
        """One request has ended."""
        self._running -= 1

    def _check(self, now: int, window_ns: int, limit: int | None, name: str, tokens: int | None) -> None:
        if limit is None:
            return
        inside = [entry for entry in self._entries if now - entry.at_ns < window_ns]
        used = len(inside) if tokens is None else sum(entry.tokens for entry in inside)
        asked = 1 if tokens is None else tokens
        if used + asked <= limit:
            return
        wait = window_ns if not inside else window_ns - (now - inside[0].at_ns)
        raise ProtocolError(
            ErrorKind.RATE,
            f"request reached organization max {name}: {limit}, current: {used}",
            retry_after_s=max(1, math.ceil(wait / 10**9)),
            limit=limit,
            requested=asked,
        )
