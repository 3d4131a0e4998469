"""``python -m k3eval_local.server.worker FD``: the engine's process. Only :mod:`remote` starts it.

Requests come on the main thread, the engine runs on its own and sends what each step made. The end of the
socket is the end of the process.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from k3eval_local.checkpoint import open_model
from k3eval_local.engine import Engine, EngineError
from k3eval_local.engine.generation import Generation
from k3eval_local.engine.request import GenerationRequest, GenerationResult, Grammar, TokenEvent
from k3eval_local.errors import LocalError
from k3eval_local.model.decoder import K3Model
from k3eval_local.model.names import resolve
from k3eval_local.protocol.grammar import GrammarCompiler, OrdinaryTokens
from k3eval_local.server.remote import (
    ORDINARY,
    Cancel,
    Failed,
    Ready,
    Step,
    Submit,
    Token,
    Wire,
    WorkerOptions,
)
from k3eval_local.tokenizer import Tokenizer

_STATS_NS = 200_000_000


class _Outbox:
    """Collects what a step makes and sends it, on the engine's thread."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self.tokens: list[Token] = []
        self.ends: list[tuple[int, GenerationResult]] = []
        self.running: dict[int, Generation] = {}
        self._stats_due_ns = 0

    def flush(self, engine: Engine) -> None:
        """One message, if there is anything to say."""
        now = time.monotonic_ns()
        tell = bool(self.ends) or now >= self._stats_due_ns
        if not (self.tokens or tell):
            return
        stats = None
        if tell:
            self._stats_due_ns = now + _STATS_NS
            stats = engine.stats()
        try:
            self._wire.send(Step(self.tokens, self.ends, stats))
        except OSError:
            os._exit(0)  # nobody is left to work for
        self.tokens, self.ends = [], []


class _Outgoing(Generation):
    """A request of the other process: what is published goes to the outbox."""

    def __init__(
        self,
        key: int,
        outbox: _Outbox,
        request: GenerationRequest,
        *,
        submitted_ns: int,
        on_cancel: Callable[[Generation], None],
    ) -> None:
        super().__init__(request, submitted_ns=submitted_ns, on_cancel=on_cancel)
        self._key, self._outbox = key, outbox
        outbox.running[key] = self

    def publish(self, event: TokenEvent) -> None:
        self._outbox.tokens.append((self._key, event.id, event.logprob, event.top_logprobs, event.at_ns))

    def wake(self) -> None:
        """Nobody waits here."""

    def finish(self, result: GenerationResult) -> None:
        if not self.done:
            super().finish(result)
            self._outbox.running.pop(self._key, None)
            self._outbox.ends.append((self._key, result))


class _WorkerEngine(Engine):
    """Sends at the moments when consumers would be woken."""

    outbox: _Outbox

    def wake_consumers(self) -> None:
        super().wake_consumers()
        self.outbox.flush(self)


def _load(options: WorkerOptions) -> tuple[_WorkerEngine, GrammarCompiler, Tokenizer, str]:
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise LocalError("torch finds no CUDA device here; use --device cpu")
    found = resolve(options.model)
    model, weights = open_model(options.model, options.seed)
    model.eval().to(torch.device(options.device))
    folder = found if isinstance(found, Path) else None
    tokenizer = Tokenizer.for_checkpoint(folder, model.config.vocab_size, options.tokenizer)
    return _engine(model, options), GrammarCompiler(tokenizer), tokenizer, weights


def _engine(model: K3Model, options: WorkerOptions) -> _WorkerEngine:
    return _WorkerEngine(
        model,
        memory_budget_bytes=options.memory_bytes,
        max_batch=options.max_batch,
        kernels=options.kernels,
        weights=options.weights,
        seed=options.seed,
    )


def run(wire: Wire) -> None:
    """Load, say so, then serve until the other side is gone."""
    options = wire.receive()
    if not isinstance(options, WorkerOptions):
        raise TypeError("the first message must be the options")
    logging.basicConfig(
        stream=sys.stderr, level=options.log_level.upper(), format="%(levelname)s %(name)s: %(message)s"
    )
    try:
        engine, compiler, tokenizer, weights = _load(options)
    except (LocalError, EngineError, OSError, MemoryError, RuntimeError) as error:
        # torch says with a RuntimeError that there is not so much memory
        wire.send(Failed(str(error).partition("\n")[0] or type(error).__name__))
        return
    gc.freeze()  # what is loaded by now stays: a full collection would hold up every stream for 0.1 s
    outbox = engine.outbox = _Outbox(wire)
    wire.send(Ready(engine.layout, weights, engine.stats()))
    engine.start()
    while True:
        message = wire.receive()
        if isinstance(message, Submit):
            grammar: Grammar | None = None
            if message.grammar is not None:
                text = message.grammar
                grammar = OrdinaryTokens(tokenizer) if text == ORDINARY else compiler.from_lark(text)
            request = replace(message.request, grammar=grammar)
            engine.submit(request, partial(_Outgoing, message.key, outbox))
        elif isinstance(message, Cancel):
            running = outbox.running.get(message.key)
            if running is not None:  # else it has just ended
                running.cancel()


def main() -> None:
    """Serve on the socket whose number is the first argument."""
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the other process, whose end this one sees
        signal.signal(number, signal.SIG_IGN)
    with suppress(EOFError, OSError):
        run(Wire(socket.socket(fileno=int(sys.argv[1]))))
    sys.stderr.flush()
    os._exit(0)  # the interpreter's own end would spend 0.7 s on unloading torch


if __name__ == "__main__":
    main()
