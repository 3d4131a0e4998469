"""The k3 agent: a tool loop over an append-only conversation.

Messages are appended and never rewritten, so that every call's prompt begins with the bytes of the call
before and the host's prefix cache works; replies go back whole, with their reasoning. Running out of turns,
tokens, context, time or the trial's money is a normal end. Repeated provider errors void the trial.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Final

from k3eval.errors import (
    BudgetExceededError,
    ContentFilterError,
    ContextOverflowError,
    K3EvalError,
)
from k3eval_harness.agent import observations
from k3eval_harness.agent.prompts import prompt_digest, render
from k3eval_harness.agent.protocol import AgentContext, AgentResult
from k3eval_harness.agent.toolbox import Toolbox, ToolOutcome
from k3eval_harness.agent.tools import TOOLS
from k3eval_harness.decode.sample import decode_sample
from k3eval_harness.errors import BudgetError, UsageError
from k3eval_harness.journal import utc_now
from k3eval_harness.results.atif import AtifAgent, Exchange, build_trajectory
from k3eval_harness.results.layout import write_json
from k3eval_harness.results.schema import Costs, StopReason, TokenCounts, TurnRecord
from k3eval_harness.results.sums import sum_costs, sum_tokens

if TYPE_CHECKING:
    from k3eval import K3, Completion, Message, StreamEvent, ToolSpec

_TICK_SECONDS: Final = 0.25
_WATCH_SECONDS: Final = 0.2
_MAX_WAIT_SECONDS: Final = 30.0


class _Stopped(Exception):
    """Ends the loop with a reason; the work so far is graded."""

    def __init__(self, reason: StopReason, detail: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.detail = detail


class K3Agent:
    """See ``Agent``."""

    name = "k3"
    version = "1"
    needs_model = True

    def __init__(self, error_wait_s: float = 2.0) -> None:
        self.error_wait_s = error_wait_s
        """Seconds to wait after a failed call; doubles with each failure in a row."""
        self.prompt_sha256: str | None = prompt_digest()

    def run(self, context: AgentContext) -> AgentResult:
        """Work on the task until it is submitted or a budget ends it."""
        if context.new_client is None:
            raise UsageError("the k3 agent needs a model")
        client = context.new_client()
        toolbox = Toolbox(context)
        try:
            with _cut_at_deadline(client, context):
                return _Loop(self, context, client, toolbox).run()
        finally:
            toolbox.close()
            client.close()


@dataclass(slots=True)
class _State:
    """The conversation and what it used. ``messages`` only ever grows."""

    messages: list[Message]
    exchanges: list[Exchange] = field(default_factory=list)
    tokens: TokenCounts = field(default_factory=TokenCounts)
    costs: Costs | None = None
    context_tokens: int | None = None
    """Prompt and output of the last call: about what the next one will start from."""
    without_tool: int = 0
    provider_errors: int = 0


class _Loop:
    def __init__(self, agent: K3Agent, context: AgentContext, client: K3, toolbox: Toolbox) -> None:
        from k3eval import Message

        self._agent, self._context, self._client, self._toolbox = agent, context, client, toolbox
        self._specs: tuple[ToolSpec, ...] = tuple(tool.spec() for tool in TOOLS)
        self._opening = (
            Message.system(render("system.md.j2", workdir=context.sandbox.workdir)),
            Message.user(render("task.md.j2", instruction=context.task.instruction.strip())),
        )
        self._state = _State(messages=list(self._opening))

    def run(self) -> AgentResult:
        """Turn after turn until something ends it."""
        state = self._state
        try:
            while True:
                self._check_limits()
                self._turn()
        except _Stopped as stop:
            return AgentResult(
                stop_reason=stop.reason,
                detail=stop.detail,
                turns=tuple(exchange.turn for exchange in state.exchanges),
                messages=tuple(state.messages),
            )
        finally:
            self._write_trajectory()

    def _check_limits(self) -> None:
        context, limits, state = self._context, self._context.limits, self._state
        context.check_cancelled()
        if context.seconds_left() <= 0:
            raise _Stopped("time_limit")
        if len(state.exchanges) >= limits.max_turns:
            raise _Stopped("turn_limit", f"{limits.max_turns} turns")
        used = state.tokens.prompt + state.tokens.output
        if limits.max_total_tokens is not None and used >= limits.max_total_tokens:
            raise _Stopped("token_limit", f"{used} tokens")
        size = state.context_tokens
        if limits.max_context_tokens is not None and size is not None and size >= limits.max_context_tokens:
            raise _Stopped("context_limit", f"{size} tokens of context")
        if limits.max_cost is not None and state.costs is not None:
            spent = state.costs.computed if state.costs.billed is None else state.costs.billed
            if spent is None:
                raise UsageError("a limit on a trial's money needs a model with a known price")
            if spent >= limits.max_cost:
                raise _Stopped("money_limit", f"{spent} {state.costs.currency}")

    def _turn(self) -> None:
        """One model call and its tools."""
        state = self._state
        number = len(state.exchanges) + 1
        self._context.listener.turn_started(number, state.context_tokens)
        started_at, start = utc_now(), time.monotonic()
        completion = self._call_model()
        if completion is None:
            return
        model_seconds = time.monotonic() - start
        reply = completion.message
        start = time.monotonic()
        answers, outcomes = self._answer(completion)
        record = TurnRecord(
            index=number,
            started_at=started_at,
            tokens=TokenCounts(**asdict(completion.usage)) if completion.usage else TokenCounts(),
            costs=Costs(**asdict(completion.cost)),
            decode=decode_sample(completion.timing, completion.usage),
            finish_reason=completion.finish_reason,
            model=completion.model,
            host=completion.host,
            request_id=completion.request_id,
            attempts=len(completion.attempts),
            tool_calls=tuple(call.name for call in reply.tool_calls),
            tool_errors=sum(outcome.error for outcome in outcomes),
            tool_seconds=time.monotonic() - start,
            model_seconds=model_seconds,
            cache_miss_reason=completion.cache_miss_reason,
        )
        # an empty reply is not sent back: hosts refuse it, and the prompt stays as it was
        added = ((reply,) if _has_content(reply) else ()) + answers
        state.messages += added
        state.exchanges.append(Exchange(record, reply, answers))
        state.tokens = sum_tokens((state.tokens, record.tokens))
        state.costs = record.costs if state.costs is None else sum_costs((state.costs, record.costs))
        state.context_tokens = record.tokens.prompt + record.tokens.output if completion.usage else None
        self._context.listener.turn_finished(record, added)
        self._write_trajectory()
        if any(outcome.submitted for outcome in outcomes):
            raise _Stopped("submitted")
        state.without_tool = 0 if reply.tool_calls else state.without_tool + 1
        if state.without_tool >= self._context.limits.max_replies_without_tool:
            raise _Stopped("no_tool_call", f"{state.without_tool} replies in a row called no tool")

    def _call_model(self) -> Completion | None:
        """The reply, or None after a provider error that may be tried again."""
        context, state = self._context, self._state
        try:
            with self._client.stream(
                state.messages, tools=self._specs, max_output=self._max_output(), seed=context.seed
            ) as stream:
                self._watch(stream)
                completion = stream.completion()
        except K3EvalError as error:
            context.check_cancelled()
            if context.seconds_left() <= 0:
                raise _Stopped("time_limit", "during a model call") from error
            self._judge(error)
            return None
        state.provider_errors = 0
        return completion

    def _judge(self, error: K3EvalError) -> None:
        """End the trial, or wait before the call is made again."""
        state, limits = self._state, self._context.limits
        if isinstance(error, ContextOverflowError):
            raise _Stopped("context_limit", error.message) from error
        if isinstance(error, ContentFilterError):
            raise _Stopped("error", error.message) from error
        if isinstance(error, BudgetExceededError):
            raise BudgetError(error.message) from error
        state.provider_errors += 1
        if error.cause != "provider" or state.provider_errors >= limits.max_provider_errors:
            raise error
        wait = self._agent.error_wait_s * 2.0 ** (state.provider_errors - 1)
        wait = min(wait, _MAX_WAIT_SECONDS, self._context.seconds_left())
        self._context.cancel.wait(wait)

    def _watch(self, stream: Iterator[StreamEvent]) -> None:
        """Read the stream to its end and report progress."""
        from k3eval import ReasoningDelta, TextDelta, ToolCallDelta

        count, first_ns, last_tick = 0, 0, 0.0
        for event in stream:
            if not isinstance(event, ReasoningDelta | TextDelta | ToolCallDelta):
                continue
            count += 1
            first_ns = first_ns or event.at_ns
            now = time.monotonic()
            if now - last_tick >= _TICK_SECONDS:
                last_tick = now
                elapsed = (event.at_ns - first_ns) / 1e9
                self._context.listener.token_tick(count, (count - 1) / elapsed if elapsed > 0 else None)

    def _max_output(self) -> int | None:
        limits, tokens = self._context.limits, self._state.tokens
        choices = [limits.max_output_tokens_per_turn]
        if limits.max_total_tokens is not None:
            choices.append(max(1, limits.max_total_tokens - tokens.prompt - tokens.output))
        return min((choice for choice in choices if choice is not None), default=None)

    def _answer(self, completion: Completion) -> tuple[tuple[Message, ...], tuple[ToolOutcome, ...]]:
        """Carry out the reply's tool calls in order; every call gets its result, also after ``submit``."""
        from k3eval import Message

        calls = completion.message.tool_calls
        if not calls:
            if not _has_content(completion.message):
                return (), ()
            return (Message.user(observations.no_tool_call_message()),), ()
        answers: list[Message] = []
        outcomes: list[ToolOutcome] = []
        for call in calls:
            if any(outcome.submitted for outcome in outcomes):
                outcome = ToolOutcome(observations.error_observation("not run: the work was handed in"))
            elif self._context.cancel.is_set() or self._context.seconds_left() <= 0:
                outcome = ToolOutcome(observations.error_observation("not run: the time is up"))
            else:
                outcome = self._toolbox.call(call)
            outcomes.append(outcome)
            answers.append(Message.tool(call.id, outcome.observation, name=call.name))
        return tuple(answers), tuple(outcomes)

    def _write_trajectory(self) -> None:
        agent = AtifAgent(
            name=self._agent.name,
            version=self._agent.version,
            tool_definitions=[{"type": "function", "function": asdict(tool)} for tool in TOOLS],
        )
        trajectory = build_trajectory(
            self._context.log_dir.parent.name, agent, self._opening, self._state.exchanges
        )
        data = trajectory.model_dump(mode="json", exclude_none=True)
        write_json(self._context.log_dir / "trajectory.json", data)


def _has_content(message: Message) -> bool:
    return bool(message.text.strip() or message.tool_calls or (message.reasoning and message.reasoning.text))


@contextmanager
def _cut_at_deadline(client: K3, context: AgentContext) -> Iterator[None]:
    """Close the client, which cuts a call in flight, when time is up or the job is cancelled."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(_WATCH_SECONDS):
            if context.cancel.is_set() or context.seconds_left() <= 0:
                client.close()
                return

    thread = threading.Thread(target=watch, name="k3eval-deadline", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
