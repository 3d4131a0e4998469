"""The server's engine without the server: prompts, limits, seeds and grammars from the same bodies."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
from server_process import Json

from k3eval_local.checkpoint import open_model
from k3eval_local.engine import Engine, GenerationRequest, GenerationResult, Sampling
from k3eval_local.engine.sampler import uniform
from k3eval_local.protocol.dialects import DIALECTS, DialectOptions
from k3eval_local.server.generate import Generator, Plan
from k3eval_local.tokenizer import Tokenizer

_STEADY = 1e-4
"""Logits differ by 2e-5 with what else is in the batch: a choice that is this clear stays the same."""


class InProcess:
    """An engine for config ``name`` with random weights, seed 0, and the vLLM dialect in front of it."""

    def __init__(self, name: str) -> None:
        model, _ = open_model(name, 0)
        self.engine = Engine(model, seed=0)
        self._vocabulary = model.config.vocab_size
        self._tokenizer = Tokenizer.for_checkpoint(None, self._vocabulary)
        self._generator = Generator(
            self.engine,
            self._tokenizer,
            context_length=model.config.max_position_embeddings,
            default_max_tokens=4096,
            structured=True,
        )
        self._dialect = DIALECTS["vllm"](DialectOptions())

    def requests(self, body: Json, logprobs: int | None = None) -> list[GenerationRequest]:
        """What the server would give its engine, one a choice."""
        plan = self._plan(body)
        chat, end = plan.request, self._tokenizer.control.end_of_msg
        return [
            GenerationRequest(
                plan.prompt.ids,
                plan.max_tokens,
                Sampling(
                    chat.temperature,
                    chat.top_p,
                    None if chat.seed is None else chat.seed + index,
                    logprobs,
                ),
                stop_ids=frozenset() if chat.ignore_eos else frozenset({end}),
                boundaries=plan.prompt.boundaries,
                grammar=grammar,
            )
            for index, grammar in enumerate(plan.grammars)
        ]

    def run(self, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
        """All at once, to the end; nobody reads tokens."""
        running = [self.engine.submit(request) for request in requests]
        return [generation.result() for generation in running]

    def steady(self, body: Json) -> bool:
        """Whether rounding can change no token of the reply: every choice of a token is clear."""
        requests = self.requests(body, logprobs=self._vocabulary)
        grammars = self._plan(body).grammars  # fresh ones, to know what was allowed
        for request, grammar in zip(requests, grammars, strict=True):
            sampling = request.sampling
            for index, event in enumerate(self.engine.submit(request)):
                logprobs = np.full(self._vocabulary, -np.inf)
                for top in event.top_logprobs:
                    logprobs[top.id] = top.logprob
                if grammar is not None:
                    allowed = grammar.allowed()
                    if allowed is not None:
                        logprobs[~np.asarray(allowed)] = -np.inf
                    grammar.accept(event.id)
                if sampling.temperature == 0:
                    distance = np.diff(np.sort(logprobs)[-2:])[0]
                else:
                    cumulative = np.exp(logprobs / sampling.temperature).cumsum()
                    drawn = uniform(sampling.seed or 0, index)
                    distance = np.abs(cumulative / cumulative[-1] - drawn).min()
                if distance < _STEADY:
                    return False
        return True

    def _plan(self, body: Json) -> Plan:
        chat = self._dialect.read_bytes(json.dumps(body).encode())
        return self._generator.prepare(chat, clamp=self._dialect.clamp_output)
