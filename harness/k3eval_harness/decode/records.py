"""What ``k3eval bench decode`` leaves behind: all calls, a row per model and context, fits, the twin's ratio.

Times are seconds, contexts are tokens as billed, money is ``Decimal``; unknown is null.
"""

from __future__ import annotations

from datetime import datetime
from decimal import Decimal
from typing import Final, Literal

from pydantic import Field

from k3eval_harness.decode.series import DecodeFit, Spread
from k3eval_harness.results.schema import (
    Costs,
    DecodeSample,
    ModelInfo,
    Provenance,
    Record,
    TokenCounts,
)

DECODE_SCHEMA: Final = "k3eval-decode-1"

CacheState = Literal["cold", "warm"]
"""``cold``: a prompt that is new from its first line on; ``warm``: the same prompt again."""


class CorpusInfo(Record):
    """Whose sources the prompts were cut from."""

    package: str
    version: str
    sha256: str
    """Over the concatenated sources."""


class ServerTiming(Record):
    """The server's own stamps, where it gives them (the local backend does)."""

    queue_s: float
    prefill_s: float
    seconds_per_token: float | None
    """First to last generated token; null for a single token."""


class SweepCall(Record):
    """One measured call."""

    model: str
    context: int
    """Asked for; what the model read is in ``tokens``."""
    repeat: int
    cache: CacheState
    tokens: TokenCounts = TokenCounts()
    sample: DecodeSample | None = None
    server: ServerTiming | None = None
    estimator_error: float | None = None
    """Client's seconds per token over the server's, minus 1."""
    costs: Costs = Costs()
    host: str | None = None
    error: str | None = None
    """Set where the call failed; nothing is measured then."""


class ContextRow(Record):
    """All repeats of one model at one context."""

    model: str
    context: int
    prompt_tokens: int | None
    """Median of what the model really read; null where every call failed."""
    calls: int
    failed: int
    ttft_cold_s: Spread | None
    ttft_warm_s: Spread | None
    cached_share_cold: float | None
    """Share of the cold prompts that came from a cache; should be near 0."""
    cached_share_warm: float | None
    prefill_tokens_per_s: float | None
    """Median of uncached prompt tokens over TTFT, cold calls; includes the network and the queue."""
    seconds_per_token: Spread | None
    estimator_error: float | None
    """Median absolute error of the client's figure against the server's."""
    estimator_error_max: float | None
    cost_1k_uncached: Decimal | None
    """One call that writes 1,000 tokens after this prompt, nothing cached, by the price row."""
    cost_1k_cached: Decimal | None
    """The same with the whole prompt read from the cache."""
    currency: str
    seconds_1k_uncached: float | None
    """Time of such a call: TTFT cold plus 999 tokens."""
    seconds_1k_cached: float | None
    void: dict[str, int] = Field(default_factory=dict)
    """Calls whose decode speed could not be measured, by reason."""


class ModelFit(Record):
    """``d(c) = a + b c`` for one model."""

    model: str
    fit: DecodeFit


class TwinRow(Record):
    """Second model's seconds per token over the first's at one context; pairs share prompt and repeat."""

    context: int
    ratio: Spread


class SweepResult(Record):
    """The JSON of ``k3eval bench decode``."""

    schema_version: Literal["k3eval-decode-1"] = DECODE_SCHEMA
    command: str
    started_at: datetime
    finished_at: datetime
    stopped: str | None
    """Why the sweep ended early; null when it is complete."""
    seed: int
    repeats: int
    output_tokens: int
    contexts: tuple[int, ...]
    models: tuple[ModelInfo, ...]
    corpus: CorpusInfo
    costs: Costs
    """Of all calls, the warm-up with them."""
    price_rows: tuple[str, ...]
    rows: tuple[ContextRow, ...]
    fits: tuple[ModelFit, ...]
    twin: tuple[TwinRow, ...]
    calls: tuple[SweepCall, ...]
    provenance: Provenance
