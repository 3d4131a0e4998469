"""How many calls of one account may run at a time, and how fast: learned from the host's refusals.

Sans-io: callers ask for a place, poll, and sleep as told, in threads or in tasks. Places are given in order.
A host that states its limit is believed; one that only says "too many" is asked one call at a time at first,
and more once it has accepted a while. A quota that is used up closes the gate: nobody sends anything more.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from k3eval.errors import ApiError, QuotaExceededError

GROW_AFTER_CALLS: Final = 10
GROW_AFTER_S: Final = 30.0
FIRST_PAUSE_S: Final = 0.05
LONGEST_PAUSE_S: Final = 2.0
_NS: Final = 1_000_000_000


class Ticket:
    """A place in the queue. ``wake`` is called when polling again may help."""

    __slots__ = ("wake",)

    def __init__(self, wake: Callable[[], None]) -> None:
        self.wake = wake


class HostGate:
    """The gate of one account at one host."""

    def __init__(self, limit: int | None = None) -> None:
        self._lock = threading.Lock()
        self._queue: deque[Ticket] = deque()
        self._ceiling = math.inf if limit is None else limit
        self._limit: float = self._ceiling
        self._stated = False
        self._in_flight = 0
        self._not_before_ns = 0
        self._interval_ns = 0
        self._pause_s = 0.0
        self._accepted = 0
        self._refused_ns = 0
        self._closed: QuotaExceededError | None = None

    @property
    def limit(self) -> float:
        """Calls that may run at a time; infinite until a host refuses."""
        return self._limit

    def ask(self, wake: Callable[[], None]) -> Ticket:
        """Queue up."""
        ticket = Ticket(wake)
        with self._lock:
            self._queue.append(ticket)
        return ticket

    def poll(self, ticket: Ticket, now_ns: int) -> float | None:
        """Return ``None`` when the place is given, else the seconds after which to poll again at the latest.

        Raises the ``QuotaExceededError`` that closed the gate.
        """
        with self._lock:
            if self._closed is not None:
                self._forget(ticket)
                raise _again(self._closed)
            if self._queue[0] is not ticket or self._in_flight >= self._limit:
                return math.inf
            if now_ns < self._not_before_ns:
                return (self._not_before_ns - now_ns) / _NS
            self._queue.popleft()
            self._in_flight += 1
            self._not_before_ns = max(self._not_before_ns, now_ns + self._interval_ns)
            self._wake_first()
            return None

    def withdraw(self, ticket: Ticket) -> None:
        """Leave the queue without a place."""
        with self._lock:
            self._forget(ticket)

    def leave(self, now_ns: int) -> None:
        """Give a place back."""
        with self._lock:
            self._in_flight -= 1
            if self._pause_s:
                self._not_before_ns = max(self._not_before_ns, now_ns + int(self._pause_s * _NS))
            self._wake_first()

    def accepted(self, now_ns: int) -> None:
        """Note a call that the host took; after a good while one more may run at a time."""
        with self._lock:
            self._accepted += 1
            waited = (now_ns - self._refused_ns) / _NS >= GROW_AFTER_S
            if self._stated or self._limit >= self._ceiling or not waited:
                return
            if self._accepted >= GROW_AFTER_CALLS * self._limit:
                self._limit += 1
                self._accepted = 0
                self._wake_first()

    def refused(self, error: ApiError, at_once: int | None, per_minute: int | None, now_ns: int) -> None:
        """Note a refusal for rate or capacity, with the limits that its text states."""
        with self._lock:
            others = self._in_flight - 1
            if at_once is not None:
                if others < min(self._limit, at_once) and self._stated:
                    # the host had not yet counted our last call as over: leave it a little time in between
                    self._pause_s = min(max(self._pause_s * 2, FIRST_PAUSE_S), LONGEST_PAUSE_S)
                self._limit, self._stated = max(1, min(at_once, self._ceiling)), True
            elif per_minute is None and others > 0:
                self._limit = 1
            if per_minute is not None:
                self._interval_ns = max(self._interval_ns, 60 * _NS // max(per_minute, 1))
            if at_once is None:
                wait_s = error.retry_after_s if error.retry_after_s is not None else 0.0
                self._not_before_ns = max(self._not_before_ns, now_ns + int(wait_s * _NS))
            self._accepted = 0
            self._refused_ns = now_ns

    def close(self, error: QuotaExceededError) -> None:
        """Let nobody through any more."""
        with self._lock:
            self._closed = error
            for ticket in self._queue:
                ticket.wake()

    def reopen(self) -> None:
        """Let calls through again, after the account was topped up."""
        with self._lock:
            self._closed = None
            self._wake_first()

    def _forget(self, ticket: Ticket) -> None:
        if ticket in self._queue:
            self._queue.remove(ticket)
            self._wake_first()

    def _wake_first(self) -> None:
        if self._queue:
            self._queue[0].wake()


def _again(error: QuotaExceededError) -> QuotaExceededError:
    """Return a copy to raise: one exception object must not be raised in several threads."""
    return QuotaExceededError(
        error.message,
        status=error.status,
        host=error.host,
        type=error.type,
        request_id=error.request_id,
        request=error.request,
        body=error.body,
    )
