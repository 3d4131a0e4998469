"""What a call costs: dated price rows bound to host and model, in ``Decimal``, unknown as ``None``.

Formula (per million, each term clamped at 0):
``(prompt - read - write)*input + write_5m*w5m + write_1h*w1h + read*cache_read + output*output
+ searches*fee``.
Reasoning is part of the output. A host without a cache-read price charges cached tokens in full.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from functools import cache
from importlib import resources

from k3eval.errors import ConfigError
from k3eval.meter.usage import Usage
from k3eval.meter.usage_wire import UsageReport

STALE_DAYS = 60
_DATED = re.compile(r"-20\d{2}-?\d{2}-?\d{2}$")


@dataclass(frozen=True, slots=True)
class PriceRow:
    """Prices of one model at one host, per million tokens. ``None`` = not known or not offered."""

    host: str
    model: str
    currency: str
    checked_on: date
    source: str
    input: Decimal | None = None
    output: Decimal | None = None
    cache_read: Decimal | None = None
    cache_write_5m: Decimal | None = None
    cache_write_1h: Decimal | None = None
    search_call: Decimal | None = None
    """Per billed call of the host's search tool."""
    context: int | None = None
    """Tokens of prompt plus output."""
    max_output: int | None = None
    served_by: str | None = None
    """Behind a router: the host that serves the call."""
    tag: str | None = None
    """Behind a router: the variant, where one host offers several."""

    @property
    def label(self) -> str:
        """``host/model@YYYY-MM-DD``, as ledgers and results cite it."""
        via = f"[{self.tag or self.served_by}]" if self.served_by else ""
        return f"{self.host}{via}/{self.model}@{self.checked_on.isoformat()}"

    @property
    def priced(self) -> bool:
        """Whether input and output prices are known."""
        return self.input is not None and self.output is not None

    def age_days(self, today: date) -> int:
        """Days since the row was checked."""
        return (today - self.checked_on).days

    def price(self, report: UsageReport, *, ideal_read: int | None = None) -> Decimal | None:
        """Return the cost of a call, or ``None`` where the row has no price.

        ``ideal_read`` prices the call as if at least so many prompt tokens had come from the cache.
        """
        if self.input is None or self.output is None:
            return None
        usage = report.usage
        read, write = usage.cache_read or 0, usage.cache_write or 0
        write_1h = min(report.write_1h or 0, write)
        if ideal_read is not None:
            read = min(max(read, ideal_read), usage.prompt)
            write = min(write, usage.prompt - read)
            write_1h = min(write_1h, write)
        per_read = self.input if self.cache_read is None else self.cache_read
        per_5m = self.input if self.cache_write_5m is None else self.cache_write_5m
        per_1h = per_5m if self.cache_write_1h is None else self.cache_write_1h
        millionths = (
            max(usage.prompt - read - write, 0) * self.input
            + (write - write_1h) * per_5m
            + write_1h * per_1h
            + read * per_read
            + usage.output * self.output
        )
        return tidy(millionths.scaleb(-6) + report.searches * (self.search_call or Decimal(0)))

    def worst_case(self, prompt_tokens: int, max_output: int) -> Decimal | None:
        """Return the most that a call can cost: nothing cached, everything written, the whole output used."""
        if self.input is None or self.output is None:
            return None
        per_prompt = max(
            price
            for price in (self.input, self.cache_write_5m, self.cache_write_1h, self.cache_read)
            if price is not None
        )
        return tidy((prompt_tokens * per_prompt + max_output * self.output).scaleb(-6))


class PriceTable:
    """Price rows; the later of two rows for the same host, model and variant wins."""

    def __init__(self, rows: Iterable[PriceRow] = ()) -> None:
        self.rows: tuple[PriceRow, ...] = tuple(rows)

    @classmethod
    def bundled(cls) -> PriceTable:
        """Return the table that ships with this package."""
        return _bundled()

    @classmethod
    def parse(cls, text: str, *, name: str = "prices.toml") -> PriceTable:
        """Read a table in the format of the bundled ``prices.toml``; ``ConfigError`` names the bad row."""
        try:
            data = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{name}: {error}") from error
        return cls(_row(raw, f"{name}, row {number}") for number, raw in enumerate(data.get("row", ()), 1))

    def with_rows(self, *rows: PriceRow) -> PriceTable:
        """Return a table in which the given rows come first."""
        return PriceTable((*rows, *self.rows))

    def candidates(self, host: str, model: str) -> tuple[PriceRow, ...]:
        """Return the rows for a model at a host, whoever serves it there."""
        wanted = normal_model(model)
        return tuple(row for row in self.rows if row.model == wanted and _host_matches(row.host, host))

    def find(
        self, host: str, model: str, *, served_by: str | None = None, pinned: Sequence[str] = ()
    ) -> PriceRow | None:
        """Return the row that prices a call, or ``None`` where that cannot be told.

        Behind a router the serving host decides, and of several variants there the pinned one.
        """
        rows = self.candidates(host, model)
        if not rows or all(row.served_by is None for row in rows):
            return rows[0] if rows else None
        tags = {normal_host(tag) for tag in pinned}
        if served_by is None:
            served = tuple(row for row in rows if tags & {normal_host(row.tag or row.served_by or "")})
        else:
            served = tuple(row for row in rows if normal_host(row.served_by or "") == normal_host(served_by))
        exact = tuple(row for row in served if row.tag and normal_host(row.tag) in tags)
        if exact:
            return exact[0]
        return served[0] if len(served) == 1 else None

    def worst(self, host: str, model: str, *, pinned: Sequence[str] = ()) -> tuple[PriceRow, ...]:
        """Return every row that may price a call before it is known who serves it."""
        rows = self.candidates(host, model)
        tags = {normal_host(tag) for tag in pinned}
        chosen = tuple(
            row
            for row in rows
            if tags & {normal_host(row.tag or ""), normal_host(row.served_by or "")} - {""}
        )
        return tuple(row for row in (chosen or rows) if row.priced)


def write_tier_unknown(row: PriceRow, report: UsageReport) -> bool:
    """Whether tokens were written to the cache at a host that has two tiers, without saying which."""
    return bool(report.usage.cache_write) and report.write_1h is None and row.cache_write_1h is not None


def normal_model(model: str) -> str:
    """Return the id under which prices are kept: last path segment, lower case, no date, no route suffix."""
    name = model.strip().lower().rsplit("/", 1)[-1].partition(":")[0].removeprefix("~")
    return _DATED.sub("", name)


def normal_host(name: str) -> str:
    """Reduce a serving host's name or tag to what its spellings share: ``Moonshot AI`` = ``moonshotai``."""
    return re.sub(r"[^a-z0-9/]", "", name.lower())


def tidy(amount: Decimal) -> Decimal:
    """Drop trailing zeros without turning 100 into 1E+2."""
    short = amount.normalize()
    exponent = short.as_tuple().exponent
    return short.quantize(Decimal(1)) if isinstance(exponent, int) and exponent > 0 else short


def plain(amount: Decimal | None) -> str | None:
    """Write an amount with all its digits and no exponent; ``None`` stays ``None``."""
    return None if amount is None else f"{tidy(amount):f}"


def total_usage(items: Iterable[Usage]) -> Usage:
    """Add usages up. A counter is unknown only where no call reported it."""
    miss = text = 0
    read: int | None = None
    write: int | None = None
    thought: int | None = None
    for item in items:
        miss += item.miss
        text += item.output_text
        read = _plus(read, item.cache_read)
        write = _plus(write, item.cache_write)
        thought = _plus(thought, item.output_reasoning)
    return Usage(miss, read, write, text, thought)


def _plus(left: int | None, right: int | None) -> int | None:
    return left if right is None else right + (left or 0)


def _host_matches(pattern: str, host: str) -> bool:
    return host == pattern or (pattern.startswith(".") and host.endswith(pattern))


@cache
def _bundled() -> PriceTable:
    return PriceTable.parse((resources.files("k3eval.meter") / "prices.toml").read_text("utf-8"))


_AMOUNTS = ("input", "output", "cache_read", "cache_write_5m", "cache_write_1h", "search_call")
_COUNTS = ("context", "max_output")
_TEXTS = ("host", "model", "currency", "source")


def _row(raw: object, where: str) -> PriceRow:
    if not isinstance(raw, dict):
        raise ConfigError(f"{where}: a row must be a table")
    known = {*_AMOUNTS, *_COUNTS, *_TEXTS, "checked_on", "served_by", "tag"}
    if unknown := sorted(set(raw) - known):
        raise ConfigError(f"{where}: unknown key {unknown[0]!r}; known: {', '.join(sorted(known))}")
    for key in (*_TEXTS, "checked_on"):
        if key not in raw:
            raise ConfigError(f"{where}: {key} is missing")
    if not isinstance(raw["checked_on"], date):
        raise ConfigError(f"{where}: checked_on must be a date such as 2026-12-01")
    amounts: dict[str, Decimal] = {}
    for key in _AMOUNTS:
        if key in raw:
            value = raw[key]
            if not isinstance(value, str) or not re.fullmatch(r"\d+(\.\d+)?", value):
                raise ConfigError(f'{where}: {key} must be a decimal in quotes, such as "3.00"')
            amounts[key] = Decimal(value)
    counts: dict[str, int] = {}
    for key in _COUNTS:
        if key in raw:
            if not isinstance(raw[key], int) or raw[key] <= 0:
                raise ConfigError(f"{where}: {key} must be a positive whole number")
            counts[key] = raw[key]
    served_by, tag = raw.get("served_by"), raw.get("tag")
    return PriceRow(
        host=str(raw["host"]),
        model=normal_model(str(raw["model"])),
        currency=str(raw["currency"]),
        checked_on=raw["checked_on"],
        source=str(raw["source"]),
        input=amounts.get("input"),
        output=amounts.get("output"),
        cache_read=amounts.get("cache_read"),
        cache_write_5m=amounts.get("cache_write_5m"),
        cache_write_1h=amounts.get("cache_write_1h"),
        search_call=amounts.get("search_call"),
        context=counts.get("context"),
        max_output=counts.get("max_output"),
        served_by=None if served_by is None else str(served_by),
        tag=None if tag is None else str(tag),
    )
