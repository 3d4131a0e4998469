"""Results as pandas tables, for joins and exports. pandas is imported on use.

Money is a string in the records; here it is a float for convenience: sum the records where cents matter.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from k3eval_harness.results.schema import Costs, TokenCounts, TrialRecord, TurnRecord

if TYPE_CHECKING:
    from pandas import DataFrame

Cell = str | int | float | bool | None


def trials_frame(trials: Iterable[TrialRecord]) -> DataFrame:
    """One row a trial."""
    import pandas as pd

    return pd.DataFrame([_trial_row(trial) for trial in trials])


def _trial_row(trial: TrialRecord) -> dict[str, Cell]:
    return {
        "job_id": trial.job_id,
        "trial_id": trial.trial_id,
        "task": trial.task.name,
        "family": trial.task.family,
        "attempt": trial.attempt,
        "seed": trial.seed,
        "agent": trial.agent.name,
        "model": trial.model.name if trial.model else None,
        "outcome": trial.outcome.value,
        "cause": trial.cause,
        "stop_reason": trial.stop_reason,
        "reward": trial.rewards.get("reward"),
        "turns": len(trial.turns),
        **_tokens(trial.tokens),
        **_costs(trial.costs),
        "agent_s": trial.phases.agent_s,
        "total_s": trial.phases.total_s,
        "started_at": trial.started_at.isoformat(),
    }


def turns_frame(trials: Iterable[TrialRecord]) -> DataFrame:
    """One row a model call: the in-situ series of decode speed against context length."""
    import pandas as pd

    return pd.DataFrame([_turn_row(trial, turn) for trial in trials for turn in trial.turns])


def _turn_row(trial: TrialRecord, turn: TurnRecord) -> dict[str, Cell]:
    return {
        "trial_id": trial.trial_id,
        "task": trial.task.name,
        "turn": turn.index,
        "host": turn.host,
        "finish_reason": turn.finish_reason,
        **_tokens(turn.tokens),
        **_costs(turn.costs),
        "context_tokens": turn.decode.context_tokens,
        "ttft_s": turn.decode.ttft_s,
        "decode_s": turn.decode.decode_s,
        "seconds_per_token": turn.decode.seconds_per_token,
        "decode_void_reason": turn.decode.void_reason,
        "tool_calls": len(turn.tool_calls),
        "tool_errors": turn.tool_errors,
        "tool_seconds": turn.tool_seconds,
        "model_seconds": turn.model_seconds,
    }


def _tokens(counts: TokenCounts) -> dict[str, Cell]:
    return {f"tokens_{name}": getattr(counts, name) for name in TokenCounts.model_fields}


def _costs(costs: Costs) -> dict[str, Cell]:
    values = {"billed": costs.billed, "computed": costs.computed, "ideal_cache": costs.ideal_cache}
    known: dict[str, Cell] = {
        f"cost_{name}": None if value is None else float(value) for name, value in values.items()
    }
    return {**known, "currency": costs.currency}
