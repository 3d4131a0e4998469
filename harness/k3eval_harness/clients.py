"""Metered clients of one job: one meter and budget for all trials, one client a trial."""

from __future__ import annotations

import threading
from decimal import Decimal
from typing import TYPE_CHECKING, Protocol

from k3eval_harness.agent.protocol import AgentLimits

if TYPE_CHECKING:
    from types import TracebackType

    from k3eval import K3, Meter, ModelRef


class ModelOptions(Protocol):
    """The part of a job's configuration that clients depend on."""

    @property
    def max_cost(self) -> Decimal | None:
        """For the whole job."""

    @property
    def effort(self) -> str | None:
        """Reasoning effort."""

    @property
    def limits(self) -> AgentLimits:
        """Budgets of one trial."""


class ClientFactory:
    """Makes clients that share one meter, and closes them all. Thread-safe."""

    def __init__(self, options: ModelOptions, model: ModelRef | None) -> None:
        self._options = options
        self._model = model
        self._meter: Meter | None = None
        self._lock = threading.Lock()
        self._clients: list[K3] = []
        self.prices_checked_on: str | None = None

    def __enter__(self) -> ClientFactory:
        if self._model is not None:
            from k3eval import Budget, Meter

            limit = self._options.max_cost
            self._meter = Meter(budget=Budget(max_cost=limit) if limit is not None else None)
            # a missing key or an unknown provider must show before the first container starts
            self.new_client()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close_all()

    def new_client(self) -> K3:
        """A client of its own for one trial."""
        from k3eval import K3

        if self._model is None:
            raise RuntimeError("this job has no model")
        client = K3.from_ref(
            self._model,
            meter=self._meter,
            effort=self._options.effort,
            max_output=self._options.limits.max_output_tokens_per_turn,
        )
        with self._lock:
            self._clients.append(client)
        return client

    def close_all(self) -> None:
        """Cut every call in flight."""
        with self._lock:
            clients, self._clients = self._clients, []
        for client in clients:
            client.close()
