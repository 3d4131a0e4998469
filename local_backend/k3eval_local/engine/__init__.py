"""Caches, scheduler, prefix cache, sampler. What needs torch is loaded on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

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
from k3eval_local.engine.stats import EngineStats

if TYPE_CHECKING:
    from k3eval_local.engine.core import EngineCore
    from k3eval_local.engine.engine import Engine

_LATE = {"Engine": "engine", "EngineCore": "core"}

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


def __getattr__(name: str) -> object:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LATE[name]}"), name)
