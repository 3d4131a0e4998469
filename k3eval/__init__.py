"""k3eval: call Kimi K3 through any host, with every token metered.

Names are loaded on first use, so that ``import k3eval`` costs next to nothing. ``__all__`` is the contract.
"""

from __future__ import annotations

__version__ = "0.1.0"

TYPE_CHECKING = (
    False  # type checkers take it as true; importing it from typing would double the import's cost
)

if TYPE_CHECKING:
    from k3eval.client import K3, AsyncK3, AsyncStream, Stream, ToolRun
    from k3eval.errors import (
        ApiError,
        AuthenticationError,
        BadRequestError,
        BudgetExceededError,
        ConfigError,
        ContentFilterError,
        ContextOverflowError,
        K3EvalError,
        OverloadedError,
        ProtocolError,
        QuotaExceededError,
        RateLimitError,
        SchemaError,
        ServerError,
        StreamInterruptedError,
        ToolArgumentsError,
        TransportError,
    )
    from k3eval.events import End, ReasoningDelta, StreamEvent, TextDelta, ToolCallDelta, UsageUpdate
    from k3eval.interop import (
        async_openai_client,
        metered_async_http_client,
        metered_async_httpx2_client,
        metered_http_client,
        metered_httpx2_client,
        openai_client,
    )
    from k3eval.messages import Message, Reasoning, ToolCall
    from k3eval.meter.ledger import Budget, Ledger
    from k3eval.meter.meter import Meter
    from k3eval.meter.pricing import PriceRow, PriceTable
    from k3eval.meter.usage import Usage
    from k3eval.notices import K3EvalWarning, Notice
    from k3eval.options import CachePolicy, RetryPolicy, Routing, Timeouts
    from k3eval.providers.base import Capabilities
    from k3eval.refs import ModelRef
    from k3eval.results import Attempt, Completion, Cost, Timing, Totals
    from k3eval.tokens import TokenCount
    from k3eval.tools import Tool, ToolSpec, tool

_HOMES = {
    "k3eval.client": ("AsyncK3", "AsyncStream", "K3", "Stream", "ToolRun"),
    "k3eval.errors": (
        "ApiError", "AuthenticationError", "BadRequestError", "BudgetExceededError", "ConfigError",
        "ContentFilterError", "ContextOverflowError", "K3EvalError", "OverloadedError", "ProtocolError",
        "QuotaExceededError", "RateLimitError", "SchemaError", "ServerError", "StreamInterruptedError",
        "ToolArgumentsError", "TransportError",
    ),
    "k3eval.events": ("End", "ReasoningDelta", "StreamEvent", "TextDelta", "ToolCallDelta", "UsageUpdate"),
    "k3eval.interop": (
        "async_openai_client", "metered_async_http_client", "metered_async_httpx2_client",
        "metered_http_client", "metered_httpx2_client", "openai_client",
    ),
    "k3eval.messages": ("Message", "Reasoning", "ToolCall"),
    "k3eval.meter.ledger": ("Budget", "Ledger"),
    "k3eval.meter.meter": ("Meter",),
    "k3eval.meter.pricing": ("PriceRow", "PriceTable"),
    "k3eval.meter.usage": ("Usage",),
    "k3eval.notices": ("K3EvalWarning", "Notice"),
    "k3eval.options": ("CachePolicy", "RetryPolicy", "Routing", "Timeouts"),
    "k3eval.providers.base": ("Capabilities",),
    "k3eval.refs": ("ModelRef",),
    "k3eval.results": ("Attempt", "Completion", "Cost", "Timing", "Totals"),
    "k3eval.tokens": ("TokenCount",),
    "k3eval.tools": ("Tool", "ToolSpec", "tool"),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "K3", "ApiError", "AsyncK3", "AsyncStream", "Attempt", "AuthenticationError", "BadRequestError",
    "Budget", "BudgetExceededError", "CachePolicy", "Capabilities", "Completion", "ConfigError",
    "ContentFilterError", "ContextOverflowError", "Cost", "End", "K3EvalError", "K3EvalWarning", "Ledger",
    "Message", "Meter", "ModelRef", "Notice", "OverloadedError", "PriceRow", "PriceTable", "ProtocolError",
    "QuotaExceededError", "RateLimitError", "Reasoning", "ReasoningDelta", "RetryPolicy", "Routing",
    "SchemaError", "ServerError", "Stream", "StreamEvent", "StreamInterruptedError", "TextDelta",
    "Timeouts", "Timing", "TokenCount", "Tool", "ToolArgumentsError", "ToolCall", "ToolCallDelta",
    "ToolRun", "ToolSpec", "Totals", "TransportError", "Usage", "UsageUpdate", "__version__",
    "async_openai_client", "metered_async_http_client", "metered_async_httpx2_client",
    "metered_http_client", "metered_httpx2_client", "openai_client", "tool",
]  # fmt: skip


def __getattr__(name: str) -> object:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value: object = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
