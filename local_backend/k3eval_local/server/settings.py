"""What the person who starts the server chose."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

from k3eval_local.protocol.chaos import Chaos
from k3eval_local.protocol.dialects import AnyDialect
from k3eval_local.protocol.prices import Limits

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """One server's settings; everything that requests share and never change."""

    dialect: AnyDialect
    model: str
    """The local name, as it was asked for."""
    weights: str
    """Where they come from: ``random, seed 0``, a checkpoint's digest, or both."""
    context_length: int
    served_names: tuple[str, ...]
    """Ids under which the model answers, case-insensitively."""
    default_max_tokens: int = 4096
    key: str | None = None
    limits: Limits | None = None
    credit: Decimal = Decimal(100)
    """USD on the account; used up only when prices are applied."""
    chaos: Chaos | None = None
    silence_s: float = 30.0
    keep_alive_s: float = 10.0
    max_body_bytes: int = 64 * MIB
    structured: bool = True
    """Sample well-formed messages only. Off: whatever the model says, parsed as far as it goes."""
