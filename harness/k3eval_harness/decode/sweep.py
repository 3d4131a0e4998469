"""The controlled sweep: the same real sources at several context lengths, forced output, shuffled order.

For each context and repeat a prompt is sent twice: first new from its first line on (cold), then again
(warm). Two models get the same cuts close in time, so that their ratio is paired. The first call of each
model is a warm-up and is not counted. Calls are made one after the other.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from k3eval.errors import AuthenticationError, BudgetExceededError, ConfigError, K3EvalError
from k3eval_harness.decode.corpus import Corpus
from k3eval_harness.decode.prompts import FittedPrompt, fit_prompt
from k3eval_harness.decode.records import CacheState, ServerTiming, SweepCall
from k3eval_harness.errors import UsageError
from k3eval_harness.results.schema import Costs, DecodeSample, TokenCounts

WARM_UP_TOKENS = 512
"""Context of the uncounted first call."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What one call gave."""

    tokens: TokenCounts
    sample: DecodeSample
    costs: Costs
    host: str | None = None
    server: ServerTiming | None = None


class SweepModel(Protocol):
    """A model under measurement."""

    @property
    def name(self) -> str:
        """As on the command line."""

    def limit(self) -> int | None:
        """Tokens that prompt and reply may have together, where the host says so."""

    def count(self, text: str) -> int:
        """Prompt tokens of a request whose one user message is ``text``."""

    def ask(self, text: str, output_tokens: int) -> Answer:
        """Stream a reply of ``output_tokens`` tokens (forced where the host allows it), or K3EvalError."""


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """What to measure."""

    contexts: tuple[int, ...]
    repeats: int
    output_tokens: int
    seed: int
    nonce: str
    """Makes the prompts new to every cache; another run must have another one."""

    def units(self) -> list[tuple[int, int]]:
        """(context, repeat), shuffled by the seed so that a drift of the machine hits all contexts."""
        units = [(context, repeat) for context in self.contexts for repeat in range(self.repeats)]
        random.Random(self.seed).shuffle(units)  # noqa: S311 - an order, not a secret
        return units


def run_sweep(
    plan: SweepPlan, models: Sequence[SweepModel], corpus: Corpus, done: Callable[[SweepCall], None]
) -> tuple[SweepCall, ...]:
    """Make all calls and hand each to ``done`` as it ends.

    A failing call is recorded and the sweep goes on. What would fail again ends it: a wrong key or
    configuration, a spent budget (AuthenticationError, ConfigError, BudgetExceededError), and before the
    first call a context that is too short, or longer than a model's (UsageError).
    """
    calls: list[SweepCall] = []
    prompts = _Prompts(plan, corpus)
    for model in models:
        limit, longest = model.limit(), max(plan.contexts)
        if limit is not None and longest + plan.output_tokens > limit:
            raise UsageError(
                f"a context of {longest} and {plan.output_tokens} output tokens are more than the {limit} "
                f"that {model.name} takes; give shorter --contexts"
            )
        prompts.fit(model, min(plan.contexts), 0)
    for model in models:
        model.ask(prompts.fit(model, WARM_UP_TOKENS, -1).text, plan.output_tokens)
    for context, repeat in plan.units():
        for model in _order(models, plan, context, repeat):
            for cache in ("cold", "warm"):
                call = _measure(model, prompts, plan, context, repeat, cache)
                calls.append(call)
                done(call)
    return tuple(calls)


def _order(models: Sequence[SweepModel], plan: SweepPlan, context: int, repeat: int) -> list[SweepModel]:
    shuffled = list(models)
    random.Random(f"{plan.seed} {context} {repeat}").shuffle(shuffled)  # noqa: S311 - an order, not a secret
    return shuffled


def _measure(
    model: SweepModel, prompts: _Prompts, plan: SweepPlan, context: int, repeat: int, cache: CacheState
) -> SweepCall:
    try:
        answer = model.ask(prompts.fit(model, context, repeat).text, plan.output_tokens)
    except (ConfigError, AuthenticationError, BudgetExceededError):
        raise
    except K3EvalError as error:
        message = " ".join(error.message.split())
        return SweepCall(model=model.name, context=context, repeat=repeat, cache=cache, error=message)
    client = answer.sample.seconds_per_token
    server = answer.server.seconds_per_token if answer.server else None
    return SweepCall(
        model=model.name,
        context=context,
        repeat=repeat,
        cache=cache,
        tokens=answer.tokens,
        sample=answer.sample,
        server=answer.server,
        estimator_error=client / server - 1 if client is not None and server else None,
        costs=answer.costs,
        host=answer.host,
    )


class _Prompts:
    """Fits each prompt once per model; the warm call and the twin reuse the cut."""

    def __init__(self, plan: SweepPlan, corpus: Corpus) -> None:
        self.plan = plan
        self.corpus = corpus
        self.density: dict[str, float] = {}
        self.last: dict[str, tuple[tuple[int, int], FittedPrompt]] = {}

    def fit(self, model: SweepModel, context: int, repeat: int) -> FittedPrompt:
        key = (context, repeat)
        known = self.last.get(model.name)
        if known is not None and known[0] == key:
            return known[1]
        rng = random.Random(f"{self.plan.seed} {context} {repeat}")  # noqa: S311 - a place to cut, not a secret
        # a digest, so that no two prompts of a run share more than the chat template's first tokens
        nonce = hashlib.sha256(f"{self.plan.nonce} {context} {repeat}".encode()).hexdigest()[:16]
        density = self.density.get(model.name, 3.0)
        fitted = fit_prompt(self.corpus, context, model.count, rng, nonce, density)
        if fitted.source_chars:
            self.density[model.name] = fitted.source_chars / fitted.tokens
        self.last[model.name] = (key, fitted)
        return fitted
