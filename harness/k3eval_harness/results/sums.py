"""Sums over turns and trials: unknown stays unknown only where nothing is known."""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal

from k3eval_harness.results.schema import Costs, TokenCounts


def sum_tokens(counts: Iterable[TokenCounts]) -> TokenCounts:
    """Sum field by field; a counter is null when no summand reports it."""
    items = tuple(counts)
    return TokenCounts(
        miss=sum(item.miss for item in items),
        cache_read=_sum_known(item.cache_read for item in items),
        cache_write=_sum_known(item.cache_write for item in items),
        output_text=sum(item.output_text for item in items),
        output_reasoning=_sum_known(item.output_reasoning for item in items),
    )


def sum_costs(costs: Iterable[Costs]) -> Costs:
    """Sum view by view; a view with an unknown summand is unknown, because a partial sum is no cost.

    Raises ValueError for different currencies.
    """
    items = tuple(costs)
    currencies = {item.currency for item in items}
    if len(currencies) > 1:
        raise ValueError(f"costs in different currencies cannot be added: {', '.join(sorted(currencies))}")
    rows = {item.price_row for item in items}
    return Costs(
        billed=_sum_or_unknown(item.billed for item in items),
        computed=_sum_or_unknown(item.computed for item in items),
        ideal_cache=_sum_or_unknown(item.ideal_cache for item in items),
        currency=currencies.pop() if currencies else "USD",
        price_row=rows.pop() if len(rows) == 1 else None,
    )


def _sum_known(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _sum_or_unknown(values: Iterable[Decimal | None]) -> Decimal | None:
    items = tuple(values)
    if not items or any(value is None for value in items):
        return None
    return sum((value for value in items if value is not None), Decimal(0))
