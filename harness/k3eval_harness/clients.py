"""Metered clients of one job: one ledger, meter and budget for all trials, one client a trial."""

from __future__ import annotations

import threading
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, cast

from k3eval_harness.errors import UsageError

if TYPE_CHECKING:
    from types import TracebackType

    from k3eval import K3, Meter, ModelRef
    from k3eval.options import Effort


class ClientFactory:
    """Makes clients that share one meter, and closes them all. Thread-safe.

    Entering checks the model's name, key and options, before the first container starts.
    """

    def __init__(
        self,
        model: ModelRef | None,
        *,
        max_cost: Decimal | None = None,
        effort: str | None = None,
        max_output: int | None = None,
    ) -> None:
        self._model = model
        self._max_cost = max_cost
        self._effort = effort
        self._max_output = max_output
        self._meter: Meter | None = None
        self._currency = "USD"
        self._lock = threading.Lock()
        self._clients: list[K3] = []
        self._closed = False
        self.price_row: str | None = None
        """Price row of the model, ``host/model@YYYY-MM-DD``; None when its price is unknown."""

    def __enter__(self) -> ClientFactory:
        if self._model is not None:
            client = self._make(None)
            self.price_row = client.capabilities().price_row
            self._currency = client.provider.currency
            client.close()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close_all()

    def open_ledger(self, path: Path, job_id: str, log: Callable[[str], None]) -> None:
        """Keep the money record in the file ``path`` from now on: it survives whatever ends the job.

        What the SDK warns about (privacy, stale prices) goes to ``log`` too.
        """
        if self._model is None:
            return
        from k3eval import Budget, Ledger, Meter
        from k3eval.notices import Notice, warn

        def notify(notice: Notice) -> None:
            log(f"{notice.code}: {notice.message}")
            warn(notice)

        budget = Budget(max_cost=self._max_cost, currency=self._currency, scope=job_id)
        self._meter = Meter(ledger=Ledger(path), budget=budget, notify=notify)

    def new_client(self) -> K3:
        """A client of its own for one trial."""
        client = self._make(self._meter)
        with self._lock:
            self._clients.append(client)
            closed = self._closed
        if closed:
            client.close()
        return client

    def close_all(self) -> None:
        """Cut every call in flight; later clients are closed from the start."""
        with self._lock:
            self._closed = True
            clients, self._clients = self._clients, []
        for client in clients:
            client.close()

    def _make(self, meter: Meter | None) -> K3:
        from k3eval import K3

        if self._model is None:
            raise UsageError("this job has no model; name one with --model")
        return K3.from_ref(
            self._model, meter=meter, effort=cast("Effort | None", self._effort), max_output=self._max_output
        )
