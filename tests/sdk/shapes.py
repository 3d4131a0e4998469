"""Replies as hosts send them, made by hand: ids and numbers are invented. Raw text, because bytes are what is
tested."""

# ruff: noqa: E501, ISC004 - wire text is easier to compare in one piece
from __future__ import annotations

from typing import Final

MOONSHOT_CACHED: Final = (
    '{"id":"chatcmpl-0a1b2c3d4e5f60718293a4b5","object":"chat.completion","model":"kimi-k3","choices":[{"index":0,'
    '"finish_reason":"stop","message":{"role":"assistant","reasoning_content":"adding","content":"42"}}],"usage":'
    '{"prompt_tokens":1300,"completion_tokens":40,"total_tokens":1340,"cached_tokens":1024,"prompt_tokens_details":'
    '{"cached_tokens":1024,"cache_write_tokens":256},"completion_tokens_details":{"reasoning_tokens":31}}}'
)

MOONSHOT_TOOL_STREAM: Final = (
    '{"id":"chatcmpl-00ff","choices":[{"index":0,"delta":{"role":"assistant","reasoning_content":"look"}}]}',
    '{"id":"chatcmpl-00ff","choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"id":"ls_0","type":"function",'
    '"function":{"name":"ls","arguments":""}}]}}]}',
    '{"id":"chatcmpl-00ff","choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"function":'
    '{"arguments":"{\\"p\\":"}}]}}]}',
    '{"id":"chatcmpl-00ff","choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"function":'
    '{"arguments":"\\"src\\"}"}}]}}]}',
    '{"id":"chatcmpl-00ff","choices":[{"index":0,"delta":{},"finish_reason":"tool_calls","usage":'
    '{"prompt_tokens":90,"completion_tokens":22,"total_tokens":112}}]}',
    '{"id":"chatcmpl-00ff","choices":[],"usage":{"prompt_tokens":90,"completion_tokens":22,"total_tokens":112,'
    '"cached_tokens":0}}',
    "[DONE]",
)

OPENROUTER_STREAM: Final = (
    '{"id":"gen-1","provider":"Moonshot AI","model":"moonshotai/kimi-k3","choices":[{"index":0,"delta":'
    '{"role":"assistant","content":"","reasoning":"hm","reasoning_details":[{"type":"reasoning.text","text":"hm",'
    '"format":"unknown","index":0}]},"finish_reason":null}]}',
    '{"id":"gen-1","provider":"Moonshot AI","model":"moonshotai/kimi-k3","choices":[{"index":0,"delta":'
    '{"content":"ok"},"finish_reason":"stop","native_finish_reason":"stop"}]}',
    '{"id":"gen-1","provider":"Moonshot AI","model":"moonshotai/kimi-k3-20260715","choices":[],"usage":'
    '{"prompt_tokens":2000,"completion_tokens":10,"total_tokens":2010,"prompt_tokens_details":{"cached_tokens":1920,'
    '"cache_write_tokens":0},"completion_tokens_details":{"reasoning_tokens":6},"cost":0.000966,"is_byok":false,'
    '"cost_details":{"upstream_inference_cost":0.000966}}}',
    "[DONE]",
)

OPENROUTER_REPEATED_FINISH: Final = (
    '{"id":"gen-5","provider":"X","choices":[{"index":0,"delta":{"role":"assistant","content":null,"tool_calls":'
    '[{"index":0,"id":"add:0","type":"function","function":{"name":"add","arguments":"{}"}}]}}]}',
    '{"id":"gen-5","provider":"X","choices":[{"index":0,"delta":{"content":"","role":"assistant","reasoning":null},'
    '"finish_reason":"tool_calls","native_finish_reason":"tool_calls"}]}',
    '{"id":"gen-5","provider":"X","choices":[{"index":0,"delta":{"content":"","role":"assistant"},"finish_reason":'
    '"tool_calls","native_finish_reason":"tool_calls"}],"usage":{"prompt_tokens":50,"completion_tokens":9,'
    '"total_tokens":59,"cost":0.000285,"is_byok":false,"cost_details":{"upstream_inference_cost":0.000285}}}',
    "[DONE]",
)

ERROR_WITH_CHOICE: Final = (
    '{"id":"gen-2","provider":"X","choices":[{"index":0,"delta":{"content":""},"finish_reason":"error"}],"error":'
    '{"code":502,"message":"upstream dropped","metadata":{"error_type":"provider_unavailable"}}}',
)
ERROR_WITHOUT_CHOICE: Final = (
    '{"id":"gen-3","choices":[],"error":{"code":429,"message":"slow down","metadata":{"error_type":'
    '"rate_limit_exceeded"}}}',
)
ERROR_WITH_PARTIAL_TEXT: Final = (
    '{"id":"gen-4","choices":[{"index":0,"finish_reason":"error","message":{"role":"assistant","content":"half"},'
    '"error":{"code":502,"message":"upstream dropped"}}]}'
)

RATE_429: Final = '{"error":{"type":"rate_limit_reached_error","message":"max organization concurrency: 1, try again after 1 seconds"}}'
QUOTA_429: Final = (
    '{"error":{"type":"exceeded_current_quota_error","message":"account org-abc123def suspended, insufficient balance'
    ' <ak-f00ba4>"}}'
)
OVERLOADED_429: Final = '{"error":{"type":"engine_overloaded_error","message":"capacity"}}'
WRAPPED_QUOTA_429: Final = (
    '{"error":{"code":429,"message":"Provider returned error","metadata":{"provider_name":"Moonshot AI","raw":'
    '"{\\"error\\":{\\"type\\":\\"exceeded_current_quota_error\\",\\"message\\":\\"x\\"}}"}}}'
)
FINAL_402: Final = (
    '{"error":{"code":402,"message":"more credits needed, or fewer max_tokens: asked 65536, can afford 900"}}'
)
TEMPORARY_402: Final = '{"error":{"code":402,"message":"budget in use","metadata":{"limit_source":"openrouter_in_flight_budget"}}}'
OVERFLOW_MOONSHOT: Final = (
    '{"error":{"type":"invalid_request_error","message":"Your request exceeded model token limit: 262144'
    ' (requested: 300001)"}}'
)
OVERFLOW_OPENROUTER: Final = (
    '{"error":{"code":400,"message":"maximum context length is 262144 tokens, requested about 300001","metadata":'
    '{"error_type":"context_length_exceeded"}}}'
)
OVERFLOW_VLLM: Final = '{"object":"error","message":"maximum context length is 32768 tokens","type":"BadRequestError","code":400}'
CUT_AT_CAP: Final = (
    '{"choices":[{"index":0,"finish_reason":"length","message":{"role":"assistant","reasoning_content":"long",'
    '"content":""}}],"usage":{"prompt_tokens":20,"completion_tokens":48,"total_tokens":68,'
    '"completion_tokens_details":{"reasoning_tokens":45}}}'
)
CUT_IN_ARGUMENTS: Final = (
    '{"choices":[{"index":0,"finish_reason":"length","message":{"role":"assistant","tool_calls":[{"id":"w_0","type":'
    '"function","function":{"name":"w","arguments":"{\\"text\\":\\"cut he"}}]}}]}'
)
EMPTY: Final = (
    '{"choices":[{"index":0,"finish_reason":"stop","message":{"role":"assistant","content":null}}]}'
)
FILTERED: Final = '{"choices":[{"index":0,"finish_reason":"content_filter","message":{"role":"assistant","content":"par"}}]}'
FILTERED_400: Final = '{"error":{"type":"content_filter","message":"rejected, considered high risk"}}'
HTML_504: Final = "<html><h1>504 Gateway Time-out</h1></html>"


def sse(events: tuple[str, ...], *, keep_alive: str = "", space: bool = True) -> bytes:
    """Return the events as a stream, each ended by a blank line."""
    mark = "data: " if space else "data:"
    return "".join(f"{keep_alive}{mark}{event}\n\n" for event in events).encode()
