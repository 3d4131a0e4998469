"""One chat request from the neutral form to parsed events: prompt, grammar, engine, parser, stop texts.

The engine's ids become events here; dialects shape them later. Token ids are counted as the engine made
them: ``completion`` includes the structure tokens, ``reasoning`` those of the think element.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from k3eval_local.engine.errors import ContextOverflow, EngineClosed, InvalidRequest, MemoryBudgetExceeded
from k3eval_local.engine.generation import Generation
from k3eval_local.engine.request import GenerationRequest, GenerationResult, Sampling, TokenEvent
from k3eval_local.protocol.errors import ErrorKind, ProtocolError, bad_request
from k3eval_local.protocol.grammar import GrammarCompiler, MessageGrammar, OrdinaryTokens, SchemaError
from k3eval_local.protocol.parser import (
    CallArguments,
    CallEnd,
    CallStart,
    Event,
    OutputParser,
    Reasoning,
    Text,
)
from k3eval_local.protocol.reply import (
    Counts,
    FinishReason,
    ReplyCall,
    ReplyChoice,
    Timings,
    TokenLogprob,
)
from k3eval_local.protocol.request import ChatRequest
from k3eval_local.protocol.xtml import ConversationError, Prompt, encode
from k3eval_local.tokenizer import Tokenizer

if TYPE_CHECKING:
    from k3eval_local.engine.stats import EngineStats


class ServedEngine(Protocol):
    """The part of the engine that the server needs."""

    def submit(self, request: GenerationRequest) -> Generation:
        """Accept a request, or raise an EngineError."""
        ...

    def stats(self) -> EngineStats:
        """Gauges and counters."""
        ...


@dataclass(frozen=True, slots=True)
class Piece:
    """An event of one choice, with the log-probabilities of the answer's tokens in it."""

    choice: int
    event: Event
    logprobs: tuple[TokenLogprob, ...] | None
    tokens: int
    """Tokens of this choice so far."""


@dataclass(frozen=True, slots=True)
class ChoiceEnd:
    """A choice is complete; ``counts`` are its own."""

    choice: ReplyChoice
    counts: Counts


Item = Piece | ChoiceEnd


class Generator:
    """Runs chat requests on one engine."""

    def __init__(
        self,
        engine: ServedEngine,
        tokenizer: Tokenizer,
        *,
        context_length: int,
        default_max_tokens: int,
        structured: bool,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self._compiler = GrammarCompiler(tokenizer)
        self._context_length = context_length
        self._default_max_tokens = default_max_tokens
        self._structured = structured

    def prepare(self, request: ChatRequest, *, clamp: bool) -> Plan:
        """Render the prompt, fix the output limit, compile the grammar. Slow parts: call it off the loop.

        Raises:
            ProtocolError: no rendering, no room in the context, a schema that cannot be used.
        """
        prompt = self.render(request)
        room = self._context_length - len(prompt.ids)
        wanted = request.max_tokens
        if room < 1 or (wanted is not None and wanted > room and not clamp):
            asked = prompt.prompt_tokens + (wanted or 0)
            raise ProtocolError(
                ErrorKind.CONTEXT,
                f"the prompt has {prompt.prompt_tokens} tokens and {wanted or 'some'} more are asked for; "
                "shorten the prompt or ask for less",
                "messages",
                limit=self._context_length,
                requested=asked,
            )
        limit = min(wanted if wanted is not None else self._default_max_tokens, room)
        return Plan(request, prompt, limit, [self._grammar(request) for _ in range(request.n)])

    def render(self, request: ChatRequest) -> Prompt:
        """The prompt's ids.

        Raises:
            ProtocolError: a tool result that answers no call.
        """
        try:
            return encode(self.tokenizer, request.conversation)
        except ConversationError as error:
            raise bad_request(f"messages.{error.index}: {error}", "messages") from error

    def start(self, plan: Plan, request_id: str) -> Job:
        """Hand the plan to the engine.

        Raises:
            ProtocolError: the engine refuses it.
        """
        runs: list[ChoiceRun] = []
        try:
            for index, grammar in enumerate(plan.grammars):
                generation = self.engine.submit(self._engine_request(plan, grammar, index, request_id))
                runs.append(ChoiceRun(index, generation, plan, self.tokenizer))
        except (ContextOverflow, MemoryBudgetExceeded, InvalidRequest, EngineClosed) as error:
            for run in runs:
                run.cancel()
            raise _as_protocol_error(error) from error
        return Job(plan, runs)

    def _grammar(self, request: ChatRequest) -> MessageGrammar | OrdinaryTokens | None:
        if request.ignore_eos:
            return OrdinaryTokens(self.tokenizer)
        conversation = request.conversation
        constrained = conversation.response_format.kind != "text" or conversation.tool_choice.mode in (
            "required",
            "named",
        )
        try:
            grammar = self._compiler.message(conversation, parallel_calls=request.parallel_calls)
        except SchemaError as error:
            raise bad_request(
                str(error), "response_format" if error.where == "response_format" else "tools"
            ) from error
        return grammar if self._structured or constrained else None

    def _engine_request(
        self, plan: Plan, grammar: MessageGrammar | OrdinaryTokens | None, index: int, request_id: str
    ) -> GenerationRequest:
        request = plan.request
        stop = self.tokenizer.control.end_of_msg
        return GenerationRequest(
            prompt_ids=plan.prompt.ids,
            max_tokens=plan.max_tokens,
            sampling=Sampling(
                temperature=request.temperature,
                top_p=request.top_p,
                seed=None if request.seed is None else (request.seed + index) % 2**63,
                logprobs=request.logprobs,
            ),
            stop_ids=frozenset() if request.ignore_eos else frozenset({stop}),
            boundaries=plan.prompt.boundaries,
            grammar=grammar,
            min_tokens=min(request.min_tokens, plan.max_tokens),
            request_id=f"{request_id}-{index}",
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """A request that is ready for the engine."""

    request: ChatRequest
    prompt: Prompt
    max_tokens: int
    grammars: list[MessageGrammar | OrdinaryTokens | None]


class ChoiceRun:
    """One generation, parsed as it comes."""

    def __init__(self, index: int, generation: Generation, plan: Plan, tokenizer: Tokenizer) -> None:
        request = plan.request
        self._generation = generation
        self._plan = plan
        self._tokenizer = tokenizer
        self._parser = OutputParser(
            tokenizer,
            thinking=request.conversation.thinking,
            allow_calls=bool(request.conversation.every_tool)
            and request.conversation.tool_choice.mode != "none",
        )
        self._stops = StopScanner(request.stop)
        self._pending: list[TokenLogprob] = []
        self._names: dict[int, str] = {}
        self._arguments: dict[int, list[str]] = {}
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._logprobs: list[TokenLogprob] | None = [] if request.logprobs is not None else None
        self._index = index
        self._count = 0
        self.result: GenerationResult | None = None
        self.end: ChoiceEnd | None = None

    def cancel(self) -> None:
        """Stop generating."""
        self._generation.cancel()

    async def items(self) -> AsyncGenerator[list[Item]]:
        """Pieces as they are generated, those that came together in one list; then the end.

        Raises:
            ProtocolError: the engine failed, or was closed, in the middle.
        """
        async with aclosing(self._generation.batches()) as batches:
            async for tokens in batches:
                items = self._pieces(tokens)
                if items:
                    yield items
                if self._stops.hit is not None:
                    self.cancel()
                    break
        if not self._generation.done:
            await self._generation.aresult()
        self.result = result = self._generation.result(timeout=0)
        last: list[Item] = []
        if self._stops.hit is None:
            last.extend(self._rest())
            if result.finish in ("error", "cancelled"):
                if last:
                    yield last
                raise ProtocolError(
                    ErrorKind.SERVER if result.finish == "error" else ErrorKind.UNAVAILABLE,
                    f"the generation was {_ENDED[result.finish]}: {result.error or 'stopped'}",
                )
        self.end = ChoiceEnd(self._choice(result), self._counts(result))
        yield [*last, self.end]

    def _pieces(self, tokens: Sequence[TokenEvent]) -> list[Item]:
        """Pieces of new tokens, up to one that completes a stop text."""
        items: list[Item] = []
        for token in tokens:
            self._count += 1
            items.extend(self._token(token))
            if self._stops.hit is not None:
                break
        return items

    def _token(self, token: TokenEvent) -> list[Piece]:
        if self._logprobs is not None and self._parser.in_answer and not self._tokenizer.is_control(token.id):
            self._pending.append(self._logprob(token))
        return [piece for event in self._parser.feed(token.id) for piece in self._event(event)]

    def _rest(self) -> list[Piece]:
        pieces = [piece for event in self._parser.finish() for piece in self._event(event)]
        return pieces + self._text(self._stops.flush())

    def _event(self, event: Event) -> list[Piece]:
        if isinstance(event, Text):
            return self._text(self._stops.feed(event.text))
        flushed = self._text(self._stops.flush())
        match event:
            case Reasoning(text):
                self._reasoning.append(text)
            case CallStart(index, name):
                self._names[index] = name
                self._arguments[index] = []
            case CallArguments(index, text):
                self._arguments[index].append(text)
            case CallEnd():
                pass
        return [*flushed, Piece(self._index, event, None, self._count)]

    def _text(self, text: str) -> list[Piece]:
        if not text:
            return []
        self._content.append(text)
        logprobs: tuple[TokenLogprob, ...] | None = None
        if self._logprobs is not None:
            logprobs = tuple(self._pending)
            self._logprobs.extend(logprobs)
            self._pending.clear()
        return [Piece(self._index, Text(text), logprobs, self._count)]

    def _logprob(self, token: TokenEvent) -> TokenLogprob:
        name = self._tokenizer.token_bytes
        top = tuple((name(each.id), each.logprob) for each in token.top_logprobs)
        return TokenLogprob(name(token.id), token.logprob if token.logprob is not None else 0.0, top)

    def _choice(self, result: GenerationResult) -> ReplyChoice:
        return ReplyChoice(
            index=self._index,
            reasoning="".join(self._reasoning),
            content="".join(self._content),
            calls=[
                ReplyCall("", name, "".join(self._arguments[index])) for index, name in self._names.items()
            ],
            logprobs=self._logprobs,
            finish=self._finish(result),
            stopped_by=self._stops.hit,
        )

    def _finish(self, result: GenerationResult) -> FinishReason:
        if self._stops.hit is not None:
            return "stop"
        if result.finish == "length":
            return "length"
        return "tool_calls" if self._parser.complete_calls else "stop"

    def _counts(self, result: GenerationResult) -> Counts:
        prompt = self._plan.prompt.prompt_tokens
        cached = min(result.cached_tokens, prompt)
        return Counts(
            prompt=prompt,
            completion=self._count,
            cached=cached,
            written=min(result.written_tokens, prompt - cached),
            reasoning=min(self._parser.reasoning_tokens, self._count),
        )


_ENDED = {"error": "broken off", "cancelled": "cancelled"}


class Job:
    """A running chat request with its choices."""

    def __init__(self, plan: Plan, runs: Sequence[ChoiceRun]) -> None:
        self.plan = plan
        self._runs = runs

    def cancel(self) -> None:
        """Stop every choice; harmless when they have ended."""
        for run in self._runs:
            run.cancel()

    def items(self) -> AsyncGenerator[list[Item]]:
        """Items of all choices, in the order in which they are made; those that came together in one list.

        Raises:
            ProtocolError: as `ChoiceRun.items`.
        """
        return self._runs[0].items() if len(self._runs) == 1 else self._merged()

    async def _merged(self) -> AsyncGenerator[list[Item]]:
        queue: asyncio.Queue[list[Item] | ProtocolError | None] = asyncio.Queue()
        tasks = [asyncio.create_task(_pump(run, queue)) for run in self._runs]
        try:
            for _ in tasks:
                while (queued := await queue.get()) is not None:
                    if isinstance(queued, ProtocolError):
                        raise queued
                    yield queued
        finally:
            self.cancel()
            for task in tasks:
                task.cancel()

    @property
    def _ends(self) -> list[ChoiceEnd]:
        return [run.end for run in self._runs if run.end is not None]

    @property
    def choices(self) -> list[ReplyChoice]:
        """The choices that have ended, by index."""
        return [end.choice for end in self._ends]

    @property
    def counts(self) -> Counts:
        """The prompt once, the outputs of all choices that have ended."""
        ends = self._ends
        return replace(
            ends[0].counts,
            completion=sum(end.counts.completion for end in ends),
            reasoning=sum(end.counts.reasoning for end in ends),
        )

    @property
    def results(self) -> list[GenerationResult]:
        """The engine's results so far."""
        return [run.result for run in self._runs if run.result is not None]

    @property
    def timings(self) -> Timings:
        """Of the first choice."""
        result = self.results[0]
        return Timings(result.queue_ns, result.prefill_ns, result.token_ns)


async def _pump(run: ChoiceRun, queue: asyncio.Queue[list[Item] | ProtocolError | None]) -> None:
    try:
        async for items in run.items():
            await queue.put(items)
    except ProtocolError as error:
        await queue.put(error)
    else:
        await queue.put(None)


class StopScanner:
    """Looks for stop texts in a growing answer; holds back what could still become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.hit: str | None = None
        """The stop text that was found first."""

    def feed(self, text: str) -> str:
        """The part of the answer that can be shown now."""
        if self.hit is not None:
            return ""
        if not self._stops:
            return text
        self._held += text
        found = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            at, self.hit = min(found, key=lambda each: each[0])
            shown, self._held = self._held[:at], ""
            return shown
        keep = max(_overlap(self._held, stop) for stop in self._stops)
        shown = self._held[: len(self._held) - keep]
        self._held = self._held[len(shown) :]
        return shown

    def flush(self) -> str:
        """What was held back, now that no stop text can follow."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0


def _as_protocol_error(error: Exception) -> ProtocolError:
    if isinstance(error, ContextOverflow):
        asked = error.prompt_tokens + error.max_tokens
        return ProtocolError(ErrorKind.CONTEXT, str(error), "messages", limit=error.limit, requested=asked)
    if isinstance(error, MemoryBudgetExceeded):
        return ProtocolError(ErrorKind.OVERLOADED, str(error), "messages", requested=error.tokens)
    if isinstance(error, InvalidRequest):
        return bad_request(str(error))
    return ProtocolError(ErrorKind.UNAVAILABLE, f"the server is stopping: {error}")
