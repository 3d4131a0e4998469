"""Who runs in the next step. Pure planning: no tensors, no clock.

Each step runs one token of every decoding sequence, then pieces of waiting prompts, in turns, until their
cost reaches `prefill_chunk` tokens. Where a prompt is cut into pieces depends on positions only, never on
what else is running, so a sequence's prefill is the same computation in every company. Pieces shrink as the
context grows, which bounds a step's time: a 500k-token prompt slows other streams but does not stall them.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from k3eval_local.engine.cache import SequenceMemory
from k3eval_local.engine.generation import Generation
from k3eval_local.engine.prefix import TokenArray
from k3eval_local.engine.request import GenerationRequest

MAX_AUTOMATIC_CHECKPOINTS = 64
"""Per prompt; longer prompts space their automatic checkpoints wider."""
_PIECE_COST = 4
"""A piece may cost this many times prefill_chunk; then it must shrink."""
_MIN_PIECE = 16


@dataclass(eq=False)
class Sequence:
    """A request in the engine."""

    request: GenerationRequest
    generation: Generation
    seed: int
    tokens: TokenArray
    """Prompt, then generated tokens; filled up to `length`."""
    length: int
    computed: int = 0
    """Tokens whose state and cache entries exist."""
    memory: SequenceMemory | None = None
    cuts: list[int] = field(default_factory=list)
    """Positions at which a checkpoint is due, ascending."""
    cached_tokens: int = 0
    """Prompt tokens that were restored instead of run."""
    deepest_checkpoint: int = 0
    started_ns: int | None = None
    token_ns: list[int] = field(default_factory=list)

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_ids)

    @property
    def known(self) -> TokenArray:
        """All tokens so far."""
        return self.tokens[: self.length]

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return self.length - self.prompt_length


@dataclass(frozen=True)
class Chunking:
    """How prompts are cut into pieces."""

    prefill_chunk: int
    checkpoint_tokens: int
    attention_parity: float

    def cost(self, start: int, stop: int) -> float:
        """Cost of running tokens start..stop, in tokens of an empty context."""
        return (stop - start) * (1 + start / self.attention_parity)

    def next_cut(self, position: int, stops: Seq[int], end: int) -> int:
        """Where the piece from `position` ends: at a stop, at a multiple of its size, or at `end`."""
        size = self.prefill_chunk
        while size > _MIN_PIECE and self.cost(position, position + size) > _PIECE_COST * self.prefill_chunk:
            size //= 2
        cut = min((position // size + 1) * size, end)
        i = bisect.bisect_right(stops, position)
        return min(cut, stops[i]) if i < len(stops) else cut

    def checkpoint_positions(self, prompt_length: int, boundaries: Seq[int]) -> list[int]:
        """Turn ends and block ends of a prompt, ascending."""
        spacing = self.checkpoint_tokens
        while prompt_length > spacing * MAX_AUTOMATIC_CHECKPOINTS:
            spacing *= 2
        return sorted({*boundaries, *range(spacing, prompt_length + 1, spacing)})


@dataclass(frozen=True)
class Piece:
    """Tokens start..stop of one sequence's prompt."""

    sequence: Sequence
    start: int
    stop: int


class Scheduler:
    """Queues of sequences: waiting, prefilling, decoding."""

    def __init__(self, chunking: Chunking) -> None:
        self.chunking = chunking
        self.waiting: deque[Sequence] = deque()
        self.prefilling: deque[Sequence] = deque()
        self.decoding: list[Sequence] = []

    @property
    def idle(self) -> bool:
        """True when there is nothing to run and nothing to admit."""
        return not (self.waiting or self.prefilling or self.decoding)

    @property
    def running(self) -> list[Sequence]:
        """Sequences that hold memory."""
        return [*self.prefilling, *self.decoding]

    def prefill_pieces(self) -> list[Piece]:
        """The prompt pieces of this step, at least one if any prompt is unfinished; turns rotate."""
        pieces: list[Piece] = []
        cost = 0.0
        for _ in range(len(self.prefilling)):
            if cost >= self.chunking.prefill_chunk:
                break
            sequence = self.prefilling[0]
            self.prefilling.rotate(-1)
            start = sequence.computed
            stop = self.chunking.next_cut(start, sequence.cuts, sequence.prompt_length)
            pieces.append(Piece(sequence, start, stop))
            cost += self.chunking.cost(start, stop)
        return pieces

    def remove(self, sequence: Sequence) -> None:
        """Takes the sequence out of whichever queue it is in."""
        for queue in (self.waiting, self.prefilling, self.decoding):
            if sequence in queue:
                queue.remove(sequence)


def new_sequence(
    request: GenerationRequest, generation: Generation, *, seed: int, chunking: Chunking
) -> Sequence:
    """A sequence that waits for admission."""
    n = len(request.prompt_ids)
    tokens = np.empty(n + request.max_tokens, dtype=np.int32)
    tokens[:n] = request.prompt_ids
    return Sequence(
        request=request,
        generation=generation,
        seed=seed,
        tokens=tokens,
        length=n,
        cuts=chunking.checkpoint_positions(n, request.boundaries),
    )
