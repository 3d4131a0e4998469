"""What a running job tells its observer. Plain frozen values; an observer must return quickly.

Order for one trial: TrialStarted, TrialPhase..., (TurnStarted, TokenTick..., TurnFinished)..., TrialFinished.
Trials run on threads: events of different trials interleave, and ``on_event`` is called under one lock.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from k3eval_harness.results.schema import JobSummary, TrialRecord, TurnRecord


@dataclass(frozen=True, slots=True)
class JobStarted:
    """The plan is fixed and the results folder exists."""

    job_id: str
    planned: int
    agent: str
    model: str | None
    results_dir: Path


@dataclass(frozen=True, slots=True)
class TrialStarted:
    """A trial left the queue."""

    trial_id: str
    task: str
    attempt: int


@dataclass(frozen=True, slots=True)
class TrialPhase:
    """A trial entered a phase: image, sandbox, agent, capture, grade, done."""

    trial_id: str
    phase: str


@dataclass(frozen=True, slots=True)
class TurnStarted:
    """A model call is about to be sent."""

    trial_id: str
    turn: int
    context_tokens: int | None
    """Estimated prompt tokens of the call; null when unknown."""


@dataclass(frozen=True, slots=True)
class TokenTick:
    """Progress inside a model call, a few times a second at most."""

    trial_id: str
    output_tokens: int
    """Token-bearing events so far in this call."""
    tok_s: float | None
    """Token-bearing events per second since the first one."""


@dataclass(frozen=True, slots=True)
class TurnFinished:
    """A model call and its tools are done."""

    trial_id: str
    turn: TurnRecord


@dataclass(frozen=True, slots=True)
class TrialFinished:
    """``trial.json`` is written."""

    trial_id: str
    record: TrialRecord


@dataclass(frozen=True, slots=True)
class JobFinished:
    """``job.json`` is written."""

    summary: JobSummary


JobEvent = (
    JobStarted
    | TrialStarted
    | TrialPhase
    | TurnStarted
    | TokenTick
    | TurnFinished
    | TrialFinished
    | JobFinished
)


class JobObserver(Protocol):
    """Receives the events of one job."""

    def on_event(self, event: JobEvent) -> None:
        """Take one event. An exception here is logged and does not stop the job."""


class SilentObserver:
    """Ignores everything."""

    def on_event(self, event: JobEvent) -> None:
        """Ignore ``event``."""
