"""What every agent gets and gives back. The built-in ones are oracle, nop and k3; others by ``module:Class``.

An agent works inside one sandbox until it is done or out of budget. It returns how it stopped; running out
of a budget is a normal end and is graded. It raises only when the trial measured nothing (provider or sandbox
down).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from k3eval_harness.errors import Cancelled
from k3eval_harness.results.schema import StopReason, TurnRecord
from k3eval_harness.sandbox.protocol import Sandbox
from k3eval_harness.task import Task

if TYPE_CHECKING:
    from k3eval import K3, Message


@dataclass(frozen=True, slots=True)
class AgentLimits:
    """Budgets of one trial. None = no limit of that kind."""

    max_turns: int = 100
    max_output_tokens_per_turn: int | None = None
    """None = the model's own default."""
    max_total_tokens: int | None = None
    """Prompt plus output tokens over all turns, as billed."""
    max_context_tokens: int | None = None
    """Prompt tokens of one call; None = the model's window."""
    max_cost: Decimal | None = None
    """In the price row's currency."""
    max_seconds: float | None = None
    """Wall seconds for the agent; the task's own limit holds as well."""
    max_replies_without_tool: int = 3
    """Consecutive replies that call no tool before the agent is stopped."""
    max_provider_errors: int = 3
    """Consecutive failed model calls (each already retried by the SDK) that void the trial."""
    command_output_bytes: int = 30_000


class AgentListener(Protocol):
    """Hears what a model-driven agent does."""

    def turn_started(self, turn: int, context_tokens: int | None) -> None:
        """A model call is about to be sent."""

    def token_tick(self, output_tokens: int, tok_s: float | None) -> None:
        """Progress inside the call."""

    def turn_finished(self, turn: TurnRecord, messages: Sequence[Message]) -> None:
        """A call and its tools are done; ``messages`` are those it added to the conversation."""


class SilentListener:
    """Ignores everything."""

    def turn_started(self, turn: int, context_tokens: int | None) -> None:
        """Ignore it."""

    def token_tick(self, output_tokens: int, tok_s: float | None) -> None:
        """Ignore it."""

    def turn_finished(self, turn: TurnRecord, messages: Sequence[Message]) -> None:
        """Ignore it."""


@dataclass(frozen=True, slots=True)
class AgentContext:
    """All that an agent may use."""

    task: Task
    sandbox: Sandbox
    log_dir: Path
    """Host folder for the agent's own files, ``agent/`` of the trial."""
    limits: AgentLimits
    seed: int
    cancel: threading.Event
    deadline: float
    """Value of ``time.monotonic()`` at which the agent must stop; ``inf`` = none."""
    listener: AgentListener = field(default_factory=SilentListener)
    new_client: Callable[[], K3] | None = None
    """Makes a metered client for this trial; None when no model was named."""
    fetch_oracle_files: Callable[[Path], None] | None = None
    """Copies the files of the task's oracle stage into a host folder; the oracle calls it."""

    def seconds_left(self) -> float:
        """Seconds until the deadline, never negative."""
        return max(0.0, self.deadline - time.monotonic())

    def check_cancelled(self) -> None:
        """Raise Cancelled when the user stopped the job."""
        if self.cancel.is_set():
            raise Cancelled("stopped by the user")


@dataclass(frozen=True, slots=True)
class AgentResult:
    """How an agent ended."""

    stop_reason: StopReason
    detail: str | None = None
    turns: tuple[TurnRecord, ...] = ()
    messages: tuple[Message, ...] = ()
    """The whole conversation, for the trajectory."""


class Agent(Protocol):
    """An agent. A class named with ``module:Class`` is constructed without arguments."""

    @property
    def name(self) -> str:
        """Short name, shown in tables."""

    @property
    def version(self) -> str:
        """Changes whenever results could change."""

    @property
    def prompt_sha256(self) -> str | None:
        """Digest over prompt templates and tool descriptions; None without a model."""

    @property
    def needs_model(self) -> bool:
        """Whether the run must name a model (or take the local one)."""

    def run(self, context: AgentContext) -> AgentResult:
        """Work on the task."""
