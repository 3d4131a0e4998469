"""Reads usage from replies: four places, three names for cached tokens, and the rule for several objects.

Sources: the hosts' published API documents. The last object with a prompt count wins; a zero or null object
never replaces it; objects are never added. A figure that is absent stays unknown (``None``), which is not
zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from typing import Final

from k3eval.jsontypes import JsonValue, as_int, as_object
from k3eval.meter.usage import Usage

MAX_TOKENS: Final = 10**9
"""A call above this, or above ``MAX_CHARGE``, is a broken counter, not a bill: it counts as not reported."""
MAX_CHARGE: Final = Decimal(1_000_000)
HEADER_WRITE_5M = "msh-usage-cache-write-tokens-5m"
HEADER_WRITE_1H = "msh-usage-cache-write-tokens-1h"


@dataclass(frozen=True, slots=True)
class UsageReport:
    """One usage object as a host sent it, made consistent."""

    usage: Usage
    billed: Decimal | None = None
    """What the host says it charged, in its currency."""
    write_1h: int | None = None
    """Of ``usage.cache_write``, the tokens in the one-hour tier; ``None`` = the host did not say."""
    searches: int = 0
    """Billed calls of a hosted search tool."""
    inconsistent: bool = False
    """The counters contradict each other; the prompt is then counted as all miss."""


def read_usage(value: JsonValue) -> UsageReport | None:
    """Read one usage object. ``None`` for null, for anything malformed, and where no prompt was counted."""
    data = as_object(value)
    if data is None:
        return None
    prompt, completion = as_int(data.get("prompt_tokens")), as_int(data.get("completion_tokens"))
    if completion is None:
        completion = 0
    if prompt is None or not 0 < prompt <= MAX_TOKENS or not 0 <= completion <= MAX_TOKENS:
        return None
    details = as_object(data.get("prompt_tokens_details")) or {}
    read = _first(
        details.get("cached_tokens"), data.get("cached_tokens"), data.get("prompt_cache_hit_tokens")
    )
    write = _first(details.get("cache_write_tokens"), details.get("cache_creation_tokens"))
    reasoning = _first((as_object(data.get("completion_tokens_details")) or {}).get("reasoning_tokens"))
    inconsistent = False
    if (read or 0) + (write or 0) > prompt:
        read = write = None
        inconsistent = True
    if reasoning is not None and reasoning > completion:
        reasoning = None
        inconsistent = True
    return UsageReport(
        usage=Usage(
            miss=prompt - (read or 0) - (write or 0),
            cache_read=read,
            cache_write=write,
            output_text=completion - (reasoning or 0),
            output_reasoning=reasoning,
        ),
        billed=_billed(data),
        searches=_searches(data),
        inconsistent=inconsistent,
    )


def usage_objects(payload: Mapping[str, JsonValue]) -> Iterator[JsonValue]:
    """Yield the usage objects of a chunk or a reply, the most authoritative last."""
    choices = payload.get("choices")
    if isinstance(choices, list):
        for choice in choices:
            if isinstance(choice, dict) and choice.get("usage") is not None:
                yield choice["usage"]
    if payload.get("usage") is not None:
        yield payload["usage"]


class UsageFinder:
    """Keeps the usage of one reply while its objects pass by."""

    __slots__ = ("report",)

    def __init__(self) -> None:
        self.report: UsageReport | None = None

    def see(self, payload: Mapping[str, JsonValue]) -> bool:
        """Look at one chunk or reply; return whether the figures changed."""
        before = self.report
        for value in usage_objects(payload):
            found = read_usage(value)
            if found is not None:
                self.report = found if self.report is None else _newer(found, self.report)
        return self.report is not None and self.report != before

    def see_headers(self, headers: Mapping[str, str]) -> None:
        """Take the split of written tokens, which Moonshot gives in headers only."""
        write_1h = _header_int(headers.get(HEADER_WRITE_1H))
        write_5m = _header_int(headers.get(HEADER_WRITE_5M))
        if self.report is None or (write_1h is None and write_5m is None):
            return
        usage, total = self.report.usage, (write_1h or 0) + (write_5m or 0)
        if usage.cache_write is None and total <= usage.miss:
            usage = replace(usage, miss=usage.miss - total, cache_write=total)
        if usage.cache_write is not None and total == usage.cache_write:
            self.report = replace(self.report, usage=usage, write_1h=write_1h or 0)


def _newer(new: UsageReport, old: UsageReport) -> UsageReport:
    """Return the new report; where it counts the same tokens, details that only the old one had are kept."""
    if (new.usage.prompt, new.usage.output) != (old.usage.prompt, old.usage.output):
        return new
    read = old.usage.cache_read if new.usage.cache_read is None else new.usage.cache_read
    write = old.usage.cache_write if new.usage.cache_write is None else new.usage.cache_write
    thought = old.usage.output_reasoning if new.usage.output_reasoning is None else new.usage.output_reasoning
    if (read or 0) + (write or 0) > new.usage.prompt:
        return new
    return replace(
        new,
        usage=Usage(
            new.usage.prompt - (read or 0) - (write or 0),
            read,
            write,
            new.usage.output - (thought or 0),
            thought,
        ),
        billed=old.billed if new.billed is None else new.billed,
        searches=max(old.searches, new.searches),
        inconsistent=old.inconsistent or new.inconsistent,
    )


def _first(*values: JsonValue) -> int | None:
    for value in values:
        number = as_int(value)
        if number is not None and 0 <= number <= MAX_TOKENS:
            return number
    return None


def _searches(data: Mapping[str, JsonValue]) -> int:
    server = as_object(data.get("server_tool_use")) or {}
    return _first(server.get("web_search_requests"), data.get("search_count")) or 0


def _billed(data: Mapping[str, JsonValue]) -> Decimal | None:
    """Return OpenRouter's charge: ``cost``, plus the upstream cost only where the user brought an own key."""
    cost = money(data.get("cost"))
    if cost is not None and data.get("is_byok") is True:
        upstream = money((as_object(data.get("cost_details")) or {}).get("upstream_inference_cost"))
        cost = None if upstream is None else cost + upstream
    return cost if cost is None or cost <= MAX_CHARGE else None


def money(value: JsonValue) -> Decimal | None:
    """Read an amount of money, a JSON number or a decimal string; ``None`` for anything else or negative."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        amount = Decimal(repr(value) if isinstance(value, float) else value)
    except InvalidOperation:
        return None
    return amount if amount.is_finite() and amount >= 0 else None


def _header_int(value: str | None) -> int | None:
    if value is None or not value.strip().isdecimal() or len(value.strip()) > len(str(MAX_TOKENS)):
        return None
    return int(value)
