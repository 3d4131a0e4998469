"""What a trial and a job leave behind: ``trial.json`` and ``job.json``, versioned.

These files have what Harbor's ``result.json`` lacks: a three-way outcome with its cause, usage split by
kind, three costs, and the decode speed of every turn at its context length.
Tokens are ints, money is ``Decimal`` written as a string, unknown is null, and zero is zero.
What cannot be is refused, written or read: negative or endless figures, an outcome against its own reward.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from enum import StrEnum
from typing import Annotated, Final, Literal, Self

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, FiniteFloat, model_validator

from k3eval.errors import Cause

TRIAL_SCHEMA: Final = "k3eval-trial-1"
JOB_SCHEMA: Final = "k3eval-job-1"
_MOST: Final = 10**18

Count = Annotated[int, Field(ge=0, le=_MOST)]
"""Tokens, trials or events; so large that only a broken file is refused, so small that sums stay exact."""
Seconds = Annotated[float, Field(ge=0, le=_MOST, allow_inf_nan=False)]
Money = Annotated[Decimal, Field(ge=0, le=_MOST, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class Record(BaseModel):
    """Base of all records: immutable; a reader of a newer file ignores members it does not know."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Outcome(StrEnum):
    """``void`` says that the trial measured nothing; it is never counted as failed."""

    PASSED = "passed"
    FAILED = "failed"
    VOID = "void"


StopReason = Literal[
    "submitted", "no_tool_call", "turn_limit", "token_limit", "context_limit", "time_limit", "money_limit",
    "finished", "error", "cancelled",
]  # fmt: skip
"""Why the agent stopped; ``finished`` is for agents without a model (oracle, nop)."""


class TokenCounts(Record):
    """Disjoint token counters as in ``k3eval.meter.usage.Usage``; null = not reported."""

    miss: Count = 0
    cache_read: Count | None = None
    cache_write: Count | None = None
    output_text: Count = 0
    output_reasoning: Count | None = None

    @property
    def prompt(self) -> int:
        """All prompt tokens."""
        return self.miss + (self.cache_read or 0) + (self.cache_write or 0)

    @property
    def output(self) -> int:
        """All generated tokens."""
        return self.output_text + (self.output_reasoning or 0)


class Costs(Record):
    """Three views of one cost in ``currency``; null = unknown."""

    billed: Money | None = None
    """What the provider says it charged."""
    computed: Money | None = None
    """Tokens times the dated price row."""
    ideal_cache: Money | None = None
    """What a perfect prefix cache would have cost."""
    currency: str = "USD"
    price_row: str | None = None
    """Id and check date of the price row used, as ``host/model@YYYY-MM-DD``."""


class DecodeSample(Record):
    """Decode speed of one reply at its real context length.

    ``seconds_per_token = (last - first token-bearing event) / (output tokens - tokens of the first event)``.
    Void (null with a reason) below 16 output tokens or with a single event.
    """

    context_tokens: Count
    """Tokens in the model's context when the first output token is made (prompt, cached or not)."""
    output_tokens: Count
    token_events: Count
    ttft_s: Seconds | None = None
    """Request sent to first token-bearing event."""
    decode_s: Seconds | None = None
    """First to last token-bearing event."""
    seconds_per_token: Seconds | None = None
    bundled: bool = False
    """Fewer events with text than tokens: those of the first event are estimated by its share of the text."""
    void_reason: str | None = None


class TurnRecord(Record):
    """One model call of an agent."""

    index: Count
    started_at: AwareDatetime
    tokens: TokenCounts
    costs: Costs
    decode: DecodeSample
    finish_reason: str | None = None
    model: str | None = None
    host: str | None = None
    """Who served the call, where the provider says so."""
    request_id: str | None = None
    attempts: Count = 1
    tool_calls: tuple[str, ...] = ()
    """Names of the tools called."""
    tool_errors: Count = 0
    """Calls that did not parse or named no tool."""
    tool_seconds: Seconds = 0.0
    model_seconds: Seconds = 0.0
    cache_miss_reason: str | None = None


class PhaseTimes(Record):
    """Wall seconds of a trial's phases; null = not reached."""

    image_s: Seconds | None = None
    sandbox_start_s: Seconds | None = None
    agent_s: Seconds | None = None
    capture_s: Seconds | None = None
    grade_s: Seconds | None = None
    total_s: Seconds | None = None


class TestCounts(Record):
    """What the hidden tests said, where the task writes a report."""

    __test__ = False

    passed: Count = 0
    failed: Count = 0
    skipped: Count = 0
    failed_names: tuple[str, ...] = ()


class TaskInfo(Record):
    """Which task, down to its content."""

    name: str
    family: str | None = None
    path: str
    """Relative to the tasks folder where the task is bundled, else the folder's name."""
    digest: str
    """SHA-256 over the task folder's files."""
    image: str | None = None
    image_digest: str | None = None


class AgentInfo(Record):
    """Which agent, down to its prompt."""

    name: str
    version: str
    prompt_sha256: str | None = None


class ModelInfo(Record):
    """Which model, by the name given on the command line."""

    name: str
    provider: str
    model: str
    base_url: str | None = None
    weights: str | None = None
    """What the local backend says of its weights (``random, seed 0`` or a checkpoint digest)."""


class Provenance(Record):
    """What else a sceptic needs to repeat the trial."""

    k3eval_version: str
    git_commit: str | None = None
    """Of the k3eval checkout; ``-dirty`` when changed."""
    python: str
    platform: str
    engine_version: str | None = None
    prices_checked_on: str | None = None


class TrialRecord(Record):
    """``trial.json``."""

    schema_version: Literal["k3eval-trial-1"] = TRIAL_SCHEMA
    trial_id: str
    job_id: str
    task: TaskInfo
    attempt: Annotated[int, Field(ge=1, le=_MOST)]
    """1-based number of this attempt at the task."""
    seed: int
    agent: AgentInfo
    model: ModelInfo | None = None
    outcome: Outcome
    cause: Cause | None = None
    """Set when void."""
    detail: str | None = None
    """One line: why it is void, or what failed."""
    stop_reason: StopReason
    rewards: dict[str, FiniteFloat] = Field(default_factory=dict)
    tests: TestCounts | None = None
    turns: tuple[TurnRecord, ...] = ()
    tokens: TokenCounts = TokenCounts()
    costs: Costs = Costs()
    phases: PhaseTimes = PhaseTimes()
    started_at: AwareDatetime
    finished_at: AwareDatetime
    provenance: Provenance

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        if (self.outcome is Outcome.VOID) != (self.cause is not None):
            raise ValueError(f"outcome {self.outcome.value} with cause {self.cause or 'null'}")
        if self.outcome is Outcome.PASSED:
            if not self.rewards:
                raise ValueError("outcome passed without a reward")
            if main_reward(self.rewards) <= 0:  # a threshold is always above 0
                raise ValueError(f"outcome passed with reward {main_reward(self.rewards):g}")
        return self


def main_reward(rewards: Mapping[str, float]) -> float:
    """The member ``reward``; without one the smallest, so that every one of them must reach the threshold."""
    return rewards["reward"] if "reward" in rewards else min(rewards.values())


class Interval(Record):
    """A confidence interval with the method's name."""

    low: FiniteFloat
    high: FiniteFloat
    level: Share = 0.95
    method: str


class JobSummary(Record):
    """``job.json`` and the one JSON object that ``k3eval run --json`` prints."""

    schema_version: Literal["k3eval-job-1"] = JOB_SCHEMA
    job_id: str
    agent: str
    model: str | None
    tasks: Count
    attempts: Count
    planned: Count
    passed: Count
    failed: Count
    void: Count
    score: Share | None
    """passed / (passed + failed); null when no trial is valid."""
    score_interval: Interval | None
    coverage: Share | None
    """Valid trials / planned trials."""
    worst_case_score: Share | None
    """passed / planned: every void or missing trial counted as failed."""
    void_causes: dict[str, Count] = Field(default_factory=dict)
    tokens: TokenCounts = TokenCounts()
    costs: Costs = Costs()
    decode_median_s_per_token: Seconds | None = None
    decode_samples: Count = 0
    wall_s: Seconds
    started_at: AwareDatetime
    finished_at: AwareDatetime
    interrupted: bool = False
    """The user stopped the job."""
    stopped_by: Cause | None = None
    """Set when the job ended before all planned trials: ``user``, or ``budget`` (money or time)."""
    stop_detail: str | None = None
    results_dir: str

    @model_validator(mode="after")
    def _counts_fit(self) -> Self:
        if self.passed + self.failed + self.void > self.planned:
            raise ValueError(
                f"{self.passed + self.failed + self.void} results of {self.planned} planned trials"
            )
        return self
