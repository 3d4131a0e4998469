"""The engine's error tree: what `Engine.submit` raises before it accepts a request.

EngineError
    EngineClosed              the engine was not started or is closed
    InvalidRequest            a token id, length or sampling value outside its range
    ContextOverflow           prompt + output exceeds the model's positions
    MemoryBudgetExceeded      the request alone needs more memory than the engine may use
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of every error that the engine raises on purpose."""


class EngineClosed(EngineError):
    """The engine was not started, or was closed."""


class InvalidRequest(EngineError):
    """A member of the request is outside its range; the message names it."""


class ContextOverflow(EngineError):
    """Prompt and output together exceed the model's positions."""

    def __init__(self, *, prompt_tokens: int, max_tokens: int, limit: int) -> None:
        super().__init__(
            f"prompt ({prompt_tokens} tokens) + max_tokens ({max_tokens}) = {prompt_tokens + max_tokens} "
            f"exceeds the context of {limit} tokens; shorten the prompt or lower max_tokens"
        )
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.limit = limit


class MemoryBudgetExceeded(EngineError):
    """The request alone would not fit the engine's memory budget."""

    def __init__(self, *, needed_bytes: int, budget_bytes: int, tokens: int) -> None:
        super().__init__(
            f"a context of {tokens} tokens needs {needed_bytes} bytes of cache and state, the engine's "
            f"budget leaves {budget_bytes}; shorten the request or raise memory_budget_bytes"
        )
        self.needed_bytes = needed_bytes
        self.budget_bytes = budget_bytes
        self.tokens = tokens
