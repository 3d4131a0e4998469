"""The one account that a server has: its limits, its balance, and what its requests cost."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass
from decimal import Decimal

from k3eval_local.protocol.errors import ErrorKind, ProtocolError
from k3eval_local.protocol.limits import RateLimiter
from k3eval_local.protocol.messages import JsonObject
from k3eval_local.server.settings import ServerSettings

_KEPT_GENERATIONS = 10_000
_READY_AFTER_NS = 200_000_000
"""A generation's record can be fetched a little after its reply has ended, as at OpenRouter."""


@dataclass(frozen=True, slots=True)
class _Record:
    data: JsonObject
    ended_ns: int


class Account:
    """Admits, charges and remembers. Only used on the event loop."""

    def __init__(self, settings: ServerSettings) -> None:
        self._limiter = (
            RateLimiter(settings.limits, time.monotonic_ns) if settings.limits is not None else None
        )
        self._records: OrderedDict[str, _Record] = OrderedDict()
        self.credit = settings.credit
        self.spent = Decimal(0)

    @property
    def left(self) -> Decimal:
        """USD that can still be spent."""
        return self.credit - self.spent

    def admit(self, tokens: int) -> None:
        """Count a request that may use ``tokens``.

        Raises:
            ProtocolError: the balance is used up, or a limit is reached.
        """
        if self.left <= 0:
            raise ProtocolError(
                ErrorKind.QUOTA,
                "the balance is used up; start the server with more --credit",
                requested=tokens,
            )
        if self._limiter is not None:
            self._limiter.admit(tokens)

    def release(self) -> None:
        """An admitted request has ended."""
        if self._limiter is not None:
            self._limiter.release()

    def charge(self, cost: Decimal | None) -> None:
        """Take ``cost`` off the balance."""
        self.spent += cost or Decimal(0)

    def remember(self, generation_id: str, data: JsonObject) -> None:
        """Keep what ``/generation`` will be asked for."""
        self._records[generation_id] = _Record(data, time.monotonic_ns())
        if len(self._records) > _KEPT_GENERATIONS:
            self._records.popitem(last=False)

    def recall(self, generation_id: str) -> JsonObject:
        """What was kept.

        Raises:
            ProtocolError: unknown, or not ready yet.
        """
        record = self._records.get(generation_id)
        if record is None or time.monotonic_ns() - record.ended_ns < _READY_AFTER_NS:
            raise ProtocolError(ErrorKind.NOT_FOUND, f"Generation {generation_id} not found", "id")
        return record.data
