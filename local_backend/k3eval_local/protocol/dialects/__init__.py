"""The vendors' dialects of chat completions, by name."""

from __future__ import annotations

from k3eval_local.protocol.dialects.base import DialectOptions
from k3eval_local.protocol.dialects.moonshot import MoonshotDialect
from k3eval_local.protocol.dialects.openrouter import OpenRouterDialect
from k3eval_local.protocol.dialects.vllm import VllmDialect

AnyDialect = VllmDialect | MoonshotDialect | OpenRouterDialect

DIALECTS: dict[str, type[AnyDialect]] = {
    kind.name: kind for kind in (VllmDialect, MoonshotDialect, OpenRouterDialect)
}

__all__ = ["DIALECTS", "AnyDialect", "DialectOptions", "MoonshotDialect", "OpenRouterDialect", "VllmDialect"]
