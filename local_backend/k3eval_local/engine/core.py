"""The engine's loop: admit, decode, prefill, deliver - on a thread of its own, over any `ModelRunner`.

Requests are checked in `submit`, on the caller's thread; everything after that happens on the engine's
thread, so caches and queues need no locks. A step that raises fails the requests that it ran, with the
error's text as their result, and the loop goes on. `close` cancels what is left and joins.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from types import TracebackType
from typing import Self

import numpy as np
import torch

from k3eval_local.engine.cache import CacheManager
from k3eval_local.engine.check import check
from k3eval_local.engine.errors import EngineClosed, InvalidRequest
from k3eval_local.engine.generation import Generation, MakeGeneration
from k3eval_local.engine.request import Finish, GenerationRequest, GenerationResult, TokenEvent
from k3eval_local.engine.runner import ModelRunner
from k3eval_local.engine.sampler import Choice, Chosen, Logits, Mask, choose
from k3eval_local.engine.scheduler import Chunking, Piece, Scheduler, Sequence, new_sequence
from k3eval_local.engine.stats import EngineStats

_log = logging.getLogger(__name__)


class EngineCore:
    """Continuous batching over a `ModelRunner`. See `Engine` for the one built from a model."""

    def __init__(
        self,
        runner: ModelRunner,
        *,
        prefill_chunk: int = 256,
        checkpoint_tokens: int = 512,
        seed: int | None = None,
    ) -> None:
        """Makes an engine that is not running yet.

        prefill_chunk: most prompt tokens that a step runs besides one token of each stream.
        checkpoint_tokens: spacing of the checkpoints that are kept besides those at turn ends.
        seed: source of the seeds of requests that bring none.
        """
        if prefill_chunk < 1 or checkpoint_tokens < 1:
            raise InvalidRequest("prefill_chunk and checkpoint_tokens must be at least 1")
        self.layout = runner.layout
        self.runner = runner
        self._cache = CacheManager(runner)
        self._chunking = Chunking(prefill_chunk, checkpoint_tokens, runner.layout.attention_parity)
        self._scheduler = Scheduler(self._chunking)
        self._seeds = random.Random(seed)  # noqa: S311 - sampling seeds are not secrets
        self._wake = threading.Condition()
        self._inbox: deque[Sequence] = deque()
        self._cancelled: deque[Generation] = deque()
        self._unwoken: list[Generation] = []
        self._clear_asked = False
        self._closing = False
        self._thread: threading.Thread | None = None
        self._steps = self._prompt_tokens = self._prefilled_tokens = 0
        self._generated_tokens = self._failed_requests = 0

    # Life -----------------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Starts the engine's thread; returns self."""
        with self._wake:
            if self._closing:
                raise EngineClosed("the engine was closed; make a new one")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="k3-engine", daemon=True)
                self._thread.start()
        return self

    def close(self) -> None:
        """Cancels every request, stops the thread after the step in progress and joins it."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Callers' side --------------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest, make: MakeGeneration = Generation) -> Generation:
        """Queues a request. Raises InvalidRequest, ContextOverflow, MemoryBudgetExceeded or EngineClosed.

        make: makes the handle; for handles that pass on what is published.
        """
        check(request, self.layout)
        generation = make(request, submitted_ns=time.monotonic_ns(), on_cancel=self._ask_cancel)
        with self._wake:
            if self._closing or self._thread is None:
                raise EngineClosed("the engine is not running; call start()")
            seed = request.sampling.seed
            self._inbox.append(
                new_sequence(
                    request,
                    generation,
                    seed=self._seeds.getrandbits(63) if seed is None else seed,
                    chunking=self._chunking,
                )
            )
            self._wake.notify_all()
        return generation

    def clear_cache(self) -> None:
        """Evicts every checkpoint and waits until that is done."""
        with self._wake:
            if self._thread is None or self._closing:
                raise EngineClosed("the engine is not running; call start()")
            self._clear_asked = True
            self._wake.notify_all()
            self._wake.wait_for(lambda: not self._clear_asked or self._closing)

    def stats(self) -> EngineStats:
        """Gauges and counters; callable from any thread."""
        pages, counters = self._cache.pages, self._cache.counters
        return EngineStats(
            running=len(self._scheduler.prefilling) + len(self._scheduler.decoding),
            waiting=len(self._scheduler.waiting) + len(self._inbox),
            total_pages=pages.total,
            free_pages=pages.free,
            running_pages=pages.running,
            cached_pages=pages.evictable,
            promised_pages=self._cache.promised_pages,
            page_bytes=self.layout.page_bytes,
            total_slots=self.layout.slots,
            free_slots=self._cache.free_slots,
            checkpoints=len(self._cache.index),
            cache_hits=counters.hits,
            cache_misses=counters.misses,
            hit_tokens=counters.hit_tokens,
            evictions=counters.evictions,
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            prefilled_tokens=self._prefilled_tokens,
            generated_tokens=self._generated_tokens,
            failed_requests=self._failed_requests,
        )

    def _ask_cancel(self, generation: Generation) -> None:
        with self._wake:
            self._cancelled.append(generation)
            self._wake.notify_all()

    # Engine's thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while self._take_orders():
                    self._step()
        finally:  # whatever happened, nobody waits for ever and submit says that the engine is closed
            with self._wake:
                self._closing, self._clear_asked = True, False
                self._scheduler.waiting.extend(self._inbox)
                self._inbox.clear()
                self._wake.notify_all()
            for sequence in [*self._scheduler.waiting, *self._scheduler.running]:
                self._end(sequence, "cancelled", "the engine was closed")

    def _take_orders(self) -> bool:
        """Waits for something to do; False when the engine is to stop."""
        if not self._scheduler.decoding:
            self.wake_consumers()
        with self._wake:
            while not (
                self._closing
                or self._inbox
                or self._cancelled
                or self._clear_asked
                or not self._scheduler.idle
            ):
                self._wake.wait()
            self._scheduler.waiting.extend(self._inbox)
            self._inbox.clear()
            cancelled = set(self._cancelled)
            self._cancelled.clear()
            if self._clear_asked:
                self._cache.clear()
                self._clear_asked = False
                self._wake.notify_all()
            closing = self._closing
        if cancelled:
            for sequence in [*self._scheduler.waiting, *self._scheduler.running]:
                if sequence.generation in cancelled:
                    self._end(sequence, "cancelled")
        return not closing

    def _step(self) -> None:
        self._steps += 1
        self._admit()
        batch = list(self._scheduler.decoding)
        if batch:
            try:
                self._decode(batch)
            except Exception as error:  # noqa: BLE001 - the batch's requests carry it as their result
                self._fail(batch, error)
        for piece in self._scheduler.prefill_pieces():
            self.wake_consumers()
            try:
                self._prefill(piece)
            except Exception as error:  # noqa: BLE001 - the request carries it as its result
                self._fail([piece.sequence], error)

    def _admit(self) -> None:
        """Starts waiting requests in order of arrival, as far as slots and pages go."""
        scheduler = self._scheduler
        while scheduler.waiting:
            sequence = scheduler.waiting[0]
            request = sequence.request
            try:
                memory = self._cache.admit(sequence.known, len(sequence.tokens), use_cache=request.use_cache)
            except Exception as error:  # noqa: BLE001 - the request carries it as its result
                self._fail([sequence], error)
                continue
            if memory is None:
                return
            scheduler.waiting.popleft()
            sequence.memory = memory
            sequence.computed = sequence.cached_tokens = sequence.deepest_checkpoint = memory.hit_tokens
            sequence.started_ns = time.monotonic_ns()
            scheduler.prefilling.append(sequence)
            self._prompt_tokens += sequence.prompt_length

    def _decode(self, batch: list[Sequence]) -> None:
        rows, tokens = [], []
        batch.sort(key=lambda sequence: sequence.memory.slot if sequence.memory else -1)
        for sequence in batch:
            memory = sequence.memory
            if memory is None:
                raise RuntimeError("a decoding sequence holds no memory")
            self._cache.grow(memory, sequence.length)
            rows.append(self._cache.row(memory, sequence.computed))
            tokens.append(int(sequence.tokens[sequence.length - 1]))
        self.wake_consumers()
        logits = self.runner.decode(rows, tokens)
        for sequence in batch:
            sequence.computed += 1
        self._choose(batch, logits)

    def _prefill(self, piece: Piece) -> None:
        sequence, memory = piece.sequence, piece.sequence.memory
        if memory is None:
            raise RuntimeError("a prefilling sequence holds no memory")
        last = piece.stop == sequence.prompt_length
        logits = self.runner.prefill(
            self._cache.row(memory, piece.start), sequence.tokens[piece.start : piece.stop], last=last
        )
        sequence.computed = piece.stop
        self._prefilled_tokens += piece.stop - piece.start
        if piece.stop in sequence.cuts and sequence.request.use_cache:
            automatic = piece.stop not in sequence.request.boundaries
            self._checkpoint(sequence, evict_first=automatic)
        if last:
            if logits is None:
                raise RuntimeError("the runner returned no logits for the end of a prompt")
            self._scheduler.prefilling.remove(sequence)
            self._scheduler.decoding.append(sequence)
            self._choose([sequence], logits[None])

    def _checkpoint(self, sequence: Sequence, *, evict_first: bool) -> None:
        if sequence.memory is None:
            return
        tokens = sequence.tokens[: sequence.computed]
        saved = self._cache.checkpoint(sequence.memory, tokens, evict_first=evict_first)
        if saved and sequence.computed <= sequence.prompt_length:
            sequence.deepest_checkpoint = sequence.computed

    # Choosing and delivering ----------------------------------------------------------------------------

    def _choose(self, batch: list[Sequence], logits: torch.Tensor) -> None:
        """Chooses and delivers one token for each sequence; a bad mask or bad logits fail only their own."""
        choices, alive, index = [], [], []
        for i, sequence in enumerate(batch):
            try:
                mask = self._mask(sequence)
            except Exception as error:  # noqa: BLE001 - the request carries it as its result
                self._fail([sequence], error)
                continue
            choices.append(Choice(sequence.request.sampling, sequence.seed, sequence.generated, mask))
            alive.append(sequence)
            index.append(i)
        if not alive:
            return
        values: Logits = logits.float().numpy(force=True)
        picked = choose(values if len(index) == len(batch) else values[index], choices)
        now = time.monotonic_ns()
        for sequence, chosen in zip(alive, picked, strict=True):
            try:
                self._deliver(sequence, chosen, now)
            except Exception as error:  # noqa: BLE001 - the request carries it as its result
                self._fail([sequence], error)

    def _mask(self, sequence: Sequence) -> Mask | None:
        """Tokens that the grammar and min_tokens leave; a grammar that allows only stops beats min_tokens."""
        request = sequence.request
        allowed = request.grammar.allowed() if request.grammar is not None else None
        mask = None
        if allowed is not None:
            mask = np.asarray(allowed, dtype=np.bool_)
            if mask.shape != (self.layout.vocab_size,):
                raise ValueError(f"the grammar's mask has shape {mask.shape}, not the vocabulary's")
            if not mask.any():
                raise ValueError("the grammar allows no token here")
        if sequence.generated < request.min_tokens and request.stop_ids:
            rest = np.ones(self.layout.vocab_size, dtype=np.bool_) if mask is None else mask.copy()
            rest[list(request.stop_ids)] = False
            mask = rest if rest.any() else mask
        return mask

    def _deliver(self, sequence: Sequence, chosen: Chosen | None, now: int) -> None:
        if chosen is None:
            raise ArithmeticError("the model produced logits that are not finite")
        request = sequence.request
        if request.grammar is not None:
            request.grammar.accept(chosen.id)
        sequence.tokens[sequence.length] = chosen.id
        sequence.length += 1
        sequence.token_ns.append(now)
        self._generated_tokens += 1
        sequence.generation.publish(TokenEvent(chosen.id, chosen.logprob, chosen.top_logprobs, now))
        self._unwoken.append(sequence.generation)
        stopped = chosen.id in request.stop_ids or (request.grammar is not None and request.grammar.done)
        if stopped or sequence.generated == request.max_tokens:
            self._end(sequence, "stop" if stopped else "length")

    def wake_consumers(self) -> None:
        """Called where the model is about to run, which lets go of the interpreter.

        Any sooner, consumers would take it from this thread at every call that gives it up for a moment.
        """
        for generation in self._unwoken:
            generation.wake()
        self._unwoken.clear()

    def _fail(self, sequences: list[Sequence], error: Exception) -> None:
        _log.error("a step failed", exc_info=error)
        for sequence in sequences:
            if not sequence.generation.done:
                self._failed_requests += 1
                self._end(sequence, "error", f"{type(error).__name__}: {error}")

    def _end(self, sequence: Sequence, finish: Finish, error: str | None = None) -> None:
        """Takes the sequence out, returns its memory, and only then tells its consumer - in any case."""
        try:
            self._scheduler.remove(sequence)
            self._return_memory(sequence, keep=finish in ("stop", "length") and sequence.request.use_cache)
        finally:
            sequence.generation.finish(_result(sequence, finish, error))

    def _return_memory(self, sequence: Sequence, *, keep: bool) -> None:
        memory = sequence.memory
        if memory is None:
            return
        try:
            if keep:
                self._checkpoint(sequence, evict_first=False)
        except Exception:  # noqa: BLE001 - clean-up: the request itself is complete
            _log.exception("the end of a finished sequence could not be kept for later requests")
        finally:
            sequence.memory = None
            self._cache.release(memory)


def _result(sequence: Sequence, finish: Finish, error: str | None) -> GenerationResult:
    submitted, now = sequence.generation.submitted_ns, time.monotonic_ns()
    started = sequence.started_ns if sequence.started_ns is not None else now
    first = sequence.token_ns[0] if sequence.token_ns else now
    return GenerationResult(
        ids=tuple(sequence.tokens[sequence.prompt_length : sequence.length].tolist()),
        finish=finish,
        cached_tokens=sequence.cached_tokens,
        written_tokens=max(0, sequence.deepest_checkpoint - sequence.cached_tokens),
        queue_ns=started - submitted,
        prefill_ns=max(0, first - started),
        token_ns=tuple(at - submitted for at in sequence.token_ns),
        error=error,
    )
