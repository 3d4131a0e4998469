"""Caches, scheduler, prefix cache, sampler."""

from __future__ import annotations

from k3eval_local.engine.core import EngineCore, EngineStats
from k3eval_local.engine.engine import Engine
from k3eval_local.engine.errors import (
    ContextOverflow,
    EngineClosed,
    EngineError,
    InvalidRequest,
    MemoryBudgetExceeded,
)
from k3eval_local.engine.generation import Generation
from k3eval_local.engine.request import (
    Finish,
    GenerationRequest,
    GenerationResult,
    Grammar,
    Sampling,
    TokenEvent,
    TopLogprob,
)

__all__ = [
    "ContextOverflow",
    "Engine",
    "EngineClosed",
    "EngineCore",
    "EngineError",
    "EngineStats",
    "Finish",
    "Generation",
    "GenerationRequest",
    "GenerationResult",
    "Grammar",
    "InvalidRequest",
    "MemoryBudgetExceeded",
    "Sampling",
    "TokenEvent",
    "TopLogprob",
]
