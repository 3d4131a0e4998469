"""Published prices and rate limits, as dated data.

Prices are per million tokens in USD. The local model costs nothing; these rows are applied only when the
server is asked to, so that cost metering is exercised with true numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from decimal import Decimal

from k3eval_local.protocol.reply import Counts

_MILLION = Decimal(1_000_000)


@dataclass(frozen=True, slots=True)
class PriceRow:
    """One host's price of one model, in USD per million tokens."""

    id: str
    miss: Decimal
    hit: Decimal
    write_5m: Decimal
    write_1h: Decimal | None
    output: Decimal
    checked_on: date

    def cost(self, counts: Counts, *, write_1h: bool = False) -> Decimal:
        """USD for ``counts``. Reasoning is part of the output."""
        write = self.write_1h if write_1h and self.write_1h is not None else self.write_5m
        plain = max(0, counts.prompt - counts.cached - counts.written)
        parts = (
            plain * self.miss
            + counts.written * write
            + counts.cached * self.hit
            + counts.completion * self.output
        )
        return parts / _MILLION


def _row(name: str, miss: str, hit: str, write_1h: str | None, output: str, checked: date) -> PriceRow:
    hour = None if write_1h is None else Decimal(write_1h)
    return PriceRow(name, Decimal(miss), Decimal(hit), Decimal(miss), hour, Decimal(output), checked)


MOONSHOT: Mapping[str, PriceRow] = {
    row.id: row
    for row in (
        _row("kimi-k3", "3.00", "0.30", "6.00", "15.00", date(2026, 10, 15)),
        _row("kimi-k3.1-pro", "2.00", "0.20", "4.00", "10.00", date(2026, 10, 26)),
        _row("kimi-k3.1-pro-highspeed", "4.00", "0.20", "8.00", "20.00", date(2026, 10, 26)),
    )
}
"""First-party prices (international platform)."""


@dataclass(frozen=True, slots=True)
class HostRow:
    """One endpoint behind an OpenRouter model."""

    tag: str
    provider: str
    price: PriceRow
    context_length: int
    max_output: int | None
    quantization: str


def _host(
    tag: str,
    provider: str,
    miss: str,
    hit: str,
    output: str,
    *,
    context: int = 1_048_576,
    out: int | None = None,
) -> HostRow:
    price = _row(tag, miss, hit, None, output, date(2026, 8, 24))
    return HostRow(tag, provider, price, context, out, tag.partition("/")[2] or "unknown")


OPENROUTER_HOSTS: tuple[HostRow, ...] = (
    _host("moonshotai/mxfp4", "Moonshot AI", "3.00", "0.30", "15.00", out=1_048_576),
    _host("sail-research/fp4", "Sail Research", "2.60", "0.26", "13.00", context=974_842),
    _host("morph/fp4", "Morph", "2.80", "0.28", "14.00"),
    _host("deepinfra/bf16", "DeepInfra", "2.85", "0.285", "14.25", out=16_384),
    _host("baseten/fp8", "Baseten", "3.00", "0.30", "15.00", out=262_144),
    _host("fireworks", "Fireworks", "3.00", "0.30", "15.00"),
)
"""Endpoints of moonshotai/kimi-k3 with a published price; a cache read costs a tenth of the input."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Account limits; ``None`` is no limit."""

    concurrency: int | None = None
    per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None
    per_day: int | None = None


MOONSHOT_TIERS: Mapping[str, Limits] = {
    "1": Limits(1, 3, 500_000, 1_500_000),
    "10": Limits(50, 200, 2_000_000),
    "20": Limits(100, 500, 3_000_000),
    "100": Limits(200, 5_000, 3_000_000),
    "1000": Limits(400, 5_000, 4_000_000),
    "3000": Limits(1000, 10_000, 5_000_000),
}
"""By the sum of money that was ever paid in, USD (page of 2026-08-28)."""

OPENROUTER_TIERS: Mapping[str, Limits] = {
    "free": Limits(per_minute=20, per_day=50),
    "free-10": Limits(per_minute=20, per_day=1000),
}
"""Free models, without and with at least $10 of credits bought."""
