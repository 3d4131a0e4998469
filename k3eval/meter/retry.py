"""Which errors are tried again, how often, and after which wait: the retry policy as tenacity's callables."""

from __future__ import annotations

import random
from typing import Final

from tenacity import RetryCallState, stop_after_attempt, stop_before_delay
from tenacity.stop import stop_base

from k3eval.errors import (
    ApiError,
    BudgetExceededError,
    OverloadedError,
    QuotaExceededError,
    RateLimitError,
    ServerError,
    StreamInterruptedError,
    TransportError,
)
from k3eval.options import RetryPolicy

TIMED_OUT: Final = (408, 504, 524)
"""Statuses after which nobody knows what the host did, and what it charged."""


class RetryRules:
    """The retry policy as tenacity's callables, for one call."""

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self._used_once = False

    @property
    def stop(self) -> stop_base:
        """When no further try is made."""
        return stop_after_attempt(self._policy.max_attempts) | stop_before_delay(self._policy.max_total_s)

    def again(self, state: RetryCallState) -> bool:
        """Whether an attempt's error is worth another one."""
        error = state.outcome.exception() if state.outcome is not None else None
        if error is None:
            return False
        tries = further_tries(error)
        if tries == 0 or (tries == 1 and self._used_once):
            return False
        self._used_once = self._used_once or tries == 1
        asked = asked_wait(error)
        return asked is None or asked <= self._policy.max_wait_s

    def wait(self, state: RetryCallState) -> float:
        """Seconds until the next try: what the host asks, else doubling, with jitter."""
        error = state.outcome.exception() if state.outcome is not None else None
        asked = None if error is None else asked_wait(error)
        jitter = random.uniform(0.0, 0.25)  # noqa: S311 - spreads retries out, no secret
        if asked is not None:
            return asked + jitter * min(asked, 1.0)
        return min(
            self._policy.first_wait_s * 2.0 ** (state.attempt_number - 1) * (1.0 + jitter),
            self._policy.max_wait_s,
        )


def further_tries(error: BaseException) -> int | None:
    """Return how often an error may be tried again: 0, 1, or ``None`` for as the policy allows."""
    if isinstance(error, QuotaExceededError | BudgetExceededError | StreamInterruptedError):
        return 0
    if isinstance(error, ServerError) and error.status in TIMED_OUT:
        return 1
    if isinstance(error, RateLimitError | OverloadedError | ServerError):
        return None
    return 1 if isinstance(error, TransportError) else 0


def asked_wait(error: BaseException) -> float | None:
    """Return the seconds that a host asked to wait."""
    return error.retry_after_s if isinstance(error, ApiError) else None
