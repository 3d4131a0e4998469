"""Whether an engine with these caches can serve a request at all."""

from __future__ import annotations

from k3eval_local.engine.errors import ContextOverflow, InvalidRequest, MemoryBudgetExceeded
from k3eval_local.engine.request import GenerationRequest
from k3eval_local.engine.runner import CacheLayout


def check(request: GenerationRequest, layout: CacheLayout) -> None:
    """Raises InvalidRequest, ContextOverflow or MemoryBudgetExceeded."""
    n, sampling = len(request.prompt_ids), request.sampling
    if n == 0:
        raise InvalidRequest("the prompt is empty; at least one token is needed")
    if request.max_tokens < 1:
        raise InvalidRequest(f"max_tokens is {request.max_tokens}; it must be at least 1")
    if not 0 <= request.min_tokens <= request.max_tokens:
        raise InvalidRequest(f"min_tokens is {request.min_tokens}; it must be in 0..{request.max_tokens}")
    ids = (*request.prompt_ids, *request.stop_ids)
    low, high = min(ids), max(ids)
    if low < 0 or high >= layout.vocab_size:
        wrong = low if low < 0 else high
        raise InvalidRequest(f"token id {wrong} is outside the vocabulary 0..{layout.vocab_size - 1}")
    if any(not 1 <= boundary <= n for boundary in request.boundaries):
        raise InvalidRequest(f"boundaries must be in 1..{n}, the prompt's length")
    if not sampling.temperature >= 0 or sampling.temperature == float("inf"):
        raise InvalidRequest(f"temperature is {sampling.temperature}; it must be finite and >= 0")
    if not 0 < sampling.top_p <= 1:
        raise InvalidRequest(f"top_p is {sampling.top_p}; it must be in (0, 1]")
    if sampling.logprobs is not None and sampling.logprobs < 0:
        raise InvalidRequest(f"logprobs is {sampling.logprobs}; it must be None or >= 0")
    total = n + request.max_tokens
    if total > layout.max_positions:
        raise ContextOverflow(prompt_tokens=n, max_tokens=request.max_tokens, limit=layout.max_positions)
    needed = layout.pages_for(total)
    if needed > layout.pages:
        raise MemoryBudgetExceeded(
            needed_bytes=needed * layout.page_bytes + layout.slot_bytes,
            budget_bytes=layout.pages * layout.page_bytes + layout.slot_bytes,
            tokens=total,
        )
