"""What goes into the engine and what comes out: immutable values, no torch at import time.

A request is token ids in and token ids out; the engine knows nothing about text, roles or tools.
Times are `time.monotonic_ns` values; durations and token offsets count from `Engine.submit`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

Finish = Literal["stop", "length", "cancelled", "error"]


class Grammar(Protocol):
    """Constrains one request's output. Called by the engine's thread only, once per token."""

    def allowed(self) -> npt.NDArray[np.bool_] | torch.Tensor | None:
        """Boolean mask [vocab] of the tokens that may come next; None allows every token."""
        ...

    def accept(self, token_id: int) -> None:
        """Advances by the token that was chosen."""
        ...

    @property
    def done(self) -> bool:
        """True once nothing may follow: the request then ends with finish "stop"."""
        ...


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """Keeps the smallest set of most likely tokens whose mass reaches top_p; in (0, 1]."""
    seed: int | None = None
    """Same seed, prompt and options: same tokens, whatever else is in the batch. None draws a seed."""
    logprobs: int | None = None
    """None: no log-probabilities. n >= 0: the chosen token's and those of the n most likely tokens."""


@dataclass(frozen=True)
class GenerationRequest:
    """One sequence to generate."""

    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = Sampling()
    stop_ids: frozenset[int] = frozenset()
    """A generated token of this set ends the request (finish "stop"); it is delivered as the last token."""
    boundaries: tuple[int, ...] = ()
    """Turn ends: ascending lengths n in 1..len(prompt_ids) such that prompt_ids[:n] is worth keeping."""
    grammar: Grammar | None = field(default=None, compare=False)
    min_tokens: int = 0
    """Until this many tokens exist, stop_ids cannot be chosen."""
    use_cache: bool = True
    """False: reads no cached prefix and leaves none behind."""
    request_id: str = ""


@dataclass(frozen=True)
class TopLogprob:
    """One of the most likely tokens at a position."""

    id: int
    logprob: float


@dataclass(frozen=True)
class TokenEvent:
    """One generated token."""

    id: int
    logprob: float | None
    """Natural log of the model's own probability: before temperature, top_p, stop and grammar masks."""
    top_logprobs: tuple[TopLogprob, ...]
    at_ns: int
    """monotonic_ns when the token was chosen."""


@dataclass(frozen=True)
class GenerationResult:
    """Everything about a request that has ended."""

    ids: tuple[int, ...]
    """All generated tokens, the stop token included."""
    finish: Finish
    cached_tokens: int
    """Prompt tokens that the model did not run because their state and pages were reused."""
    written_tokens: int
    """Prompt tokens newly made readable to later requests (beyond what was cached before)."""
    queue_ns: int
    """submit -> first scheduled."""
    prefill_ns: int
    """first scheduled -> first token."""
    token_ns: tuple[int, ...]
    """Offset of each token from submit."""
    error: str | None = None
    """Why, when finish is "error", or when the engine was closed before the end."""
