"""A conversation as an ATIF 1.8 trajectory, the format that Harbor's viewer reads.

Members are those of the format and no others; what it has no member for (timing, cache writes, host) goes
into ``extra``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from pydantic import BaseModel, ConfigDict

from k3eval_harness.results.schema import TurnRecord
from k3eval_harness.results.sums import sum_costs, sum_tokens

if TYPE_CHECKING:
    from k3eval import Message, ToolCall

SCHEMA: Final = "ATIF-v1.8"


@dataclass(frozen=True, slots=True)
class Exchange:
    """One model call: its figures, the reply, and the messages that answered it."""

    turn: TurnRecord
    reply: Message
    answers: tuple[Message, ...] = ()


class _Node(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class AtifToolCall(_Node):
    """One tool call; ``arguments`` is an object even where the model wrote something else."""

    tool_call_id: str
    function_name: str
    arguments: dict[str, object]


class AtifResult(_Node):
    """What one tool call gave."""

    source_call_id: str | None = None
    content: str


class AtifObservation(_Node):
    """Results of one step's tool calls."""

    results: list[AtifResult]


class AtifMetrics(_Node):
    """Figures of one step. ``prompt_tokens`` includes cached ones."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None
    cost_usd: float | None = None
    extra: dict[str, object] | None = None


class AtifStep(_Node):
    """One step of a trajectory."""

    step_id: int
    timestamp: str | None = None
    source: Literal["system", "user", "agent"]
    message: str
    model_name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[AtifToolCall] | None = None
    observation: AtifObservation | None = None
    metrics: AtifMetrics | None = None
    llm_call_count: int | None = None


class AtifAgent(_Node):
    """Who acted."""

    name: str
    version: str
    model_name: str | None = None
    tool_definitions: list[dict[str, object]] | None = None


class AtifFinalMetrics(_Node):
    """Sums over the trajectory."""

    total_prompt_tokens: int
    total_completion_tokens: int
    total_cached_tokens: int | None = None
    total_cost_usd: float | None = None
    total_steps: int


class Trajectory(_Node):
    """``agent/trajectory.json``."""

    schema_version: str = SCHEMA
    session_id: str
    agent: AtifAgent
    steps: list[AtifStep]
    final_metrics: AtifFinalMetrics


def build_trajectory(
    session_id: str, agent: AtifAgent, opening: Sequence[Message], exchanges: Sequence[Exchange]
) -> Trajectory:
    """The trajectory of a conversation that ``opening`` began."""
    steps: list[AtifStep] = []
    for message in opening:
        steps.append(_plain_step(len(steps) + 1, message))
    for exchange in exchanges:
        steps.append(_agent_step(len(steps) + 1, exchange))
        steps += [
            _plain_step(len(steps) + 1 + offset, message)
            for offset, message in enumerate(item for item in exchange.answers if item.role != "tool")
        ]
    tokens = sum_tokens(exchange.turn.tokens for exchange in exchanges)
    return Trajectory(
        session_id=session_id,
        agent=agent,
        steps=steps,
        final_metrics=AtifFinalMetrics(
            total_prompt_tokens=tokens.prompt,
            total_completion_tokens=tokens.output,
            total_cached_tokens=tokens.cache_read,
            total_cost_usd=_dollars([exchange.turn for exchange in exchanges]),
            total_steps=len(steps),
        ),
    )


def _plain_step(number: int, message: Message) -> AtifStep:
    source: Literal["system", "user"] = "system" if message.role == "system" else "user"
    return AtifStep(step_id=number, source=source, message=message.text)


def _agent_step(number: int, exchange: Exchange) -> AtifStep:
    turn, reply = exchange.turn, exchange.reply
    results = [
        AtifResult(source_call_id=item.tool_call_id, content=item.text)
        for item in exchange.answers
        if item.role == "tool"
    ]
    return AtifStep(
        step_id=number,
        timestamp=turn.started_at.isoformat(),
        source="agent",
        message=reply.text,
        model_name=turn.model,
        reasoning_content=reply.reasoning.text if reply.reasoning else None,
        tool_calls=[_tool_call(call) for call in reply.tool_calls] or None,
        observation=AtifObservation(results=results) if results else None,
        metrics=_metrics(turn),
        llm_call_count=1,
    )


def _tool_call(call: ToolCall) -> AtifToolCall:
    from k3eval import ToolArgumentsError

    try:
        arguments: dict[str, object] = dict(call.parsed())
    except ToolArgumentsError:
        arguments = {"malformed": call.arguments}
    return AtifToolCall(tool_call_id=call.id, function_name=call.name, arguments=arguments)


def _metrics(turn: TurnRecord) -> AtifMetrics:
    extra: dict[str, object] = {
        "context_tokens": turn.decode.context_tokens,
        "ttft_s": turn.decode.ttft_s,
        "decode_s": turn.decode.decode_s,
        "seconds_per_token": turn.decode.seconds_per_token,
        "token_events": turn.decode.token_events,
        "cache_write_tokens": turn.tokens.cache_write,
        "reasoning_tokens": turn.tokens.output_reasoning,
        "host": turn.host,
        "request_id": turn.request_id,
    }
    return AtifMetrics(
        prompt_tokens=turn.tokens.prompt,
        completion_tokens=turn.tokens.output,
        cached_tokens=turn.tokens.cache_read,
        cost_usd=_dollars([turn]),
        extra={key: value for key, value in extra.items() if value is not None},
    )


def _dollars(turns: Sequence[TurnRecord]) -> float | None:
    costs = sum_costs(turn.costs for turn in turns)
    best = costs.billed if costs.billed is not None else costs.computed
    return float(best) if best is not None and costs.currency == "USD" else None
