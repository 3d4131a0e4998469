"""From the calls of a sweep to its rows, fits and the twin's ratio. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from statistics import median

from k3eval_harness.decode.records import ContextRow, ModelFit, SweepCall, TwinRow
from k3eval_harness.decode.series import Spread, decode_fit


@dataclass(frozen=True, slots=True)
class ModelPrice:
    """How a model's calls are priced."""

    price: Callable[[int, int, int], Decimal | None]
    """(uncached prompt tokens, cached prompt tokens, output tokens) to money; ``None`` without a price."""
    currency: str = "USD"
    row: str | None = None
    """``host/model@YYYY-MM-DD``; ``None`` without a price."""


def context_rows(calls: Sequence[SweepCall], prices: dict[str, ModelPrice]) -> tuple[ContextRow, ...]:
    """One row per model and context, models in the order of ``prices``, contexts ascending."""
    contexts = sorted({call.context for call in calls})
    keyed = {
        (model, context): [c for c in calls if (c.model, c.context) == (model, context)]
        for model in prices
        for context in contexts
    }
    return tuple(
        _row(model, context, group, prices[model]) for (model, context), group in keyed.items() if group
    )


def model_fits(calls: Sequence[SweepCall]) -> tuple[ModelFit, ...]:
    """The robust line of every model with measured calls at two contexts or more."""
    fits: list[ModelFit] = []
    for model in dict.fromkeys(call.model for call in calls):
        points = [
            (call.sample.context_tokens, call.sample.seconds_per_token)
            for call in calls
            if call.model == model and call.sample and call.sample.seconds_per_token is not None
        ]
        fit = decode_fit(points)
        if fit is not None:
            fits.append(ModelFit(model=model, fit=fit))
    return tuple(fits)


def twin_rows(calls: Sequence[SweepCall], first: str, second: str) -> tuple[TwinRow, ...]:
    """Seconds per token, second over first, for pairs with the same context, repeat and cache state."""
    speeds = {
        (c.model, c.context, c.repeat, c.cache): c.sample.seconds_per_token
        for c in calls
        if c.sample and c.sample.seconds_per_token
    }
    ratios: dict[int, list[float]] = {}
    for (model, context, repeat, cache), seconds in speeds.items():
        other = speeds.get((second, context, repeat, cache))
        if model == first and other is not None:
            ratios.setdefault(context, []).append(other / seconds)
    spreads = [(context, Spread.of(values)) for context, values in sorted(ratios.items())]
    return tuple(TwinRow(context=context, ratio=spread) for context, spread in spreads if spread)


def _row(model: str, context: int, calls: Sequence[SweepCall], price: ModelPrice) -> ContextRow:
    answered = [call for call in calls if call.error is None]
    cold = [call for call in answered if call.cache == "cold"]
    warm = [call for call in answered if call.cache == "warm"]
    speed = Spread.of(
        [c.sample.seconds_per_token for c in answered if c.sample and c.sample.seconds_per_token is not None]
    )
    errors = [abs(call.estimator_error) for call in answered if call.estimator_error is not None]
    prompt = int(median([call.tokens.prompt for call in answered])) if answered else None
    ttft_cold, ttft_warm = _ttft(cold), _ttft(warm)
    rest = 999 * speed.median if speed else None
    return ContextRow(
        model=model,
        context=context,
        prompt_tokens=prompt,
        calls=len(calls),
        failed=len(calls) - len(answered),
        ttft_cold_s=ttft_cold,
        ttft_warm_s=ttft_warm,
        cached_share_cold=_cached_share(cold),
        cached_share_warm=_cached_share(warm),
        prefill_tokens_per_s=_prefill_speed(cold),
        seconds_per_token=speed,
        estimator_error=median(errors) if errors else None,
        estimator_error_max=max(errors, default=None),
        cost_1k_uncached=None if prompt is None else price.price(prompt, 0, 1000),
        cost_1k_cached=None if prompt is None else price.price(0, prompt, 1000),
        currency=price.currency,
        seconds_1k_uncached=None if ttft_cold is None or rest is None else ttft_cold.median + rest,
        seconds_1k_cached=None if ttft_warm is None or rest is None else ttft_warm.median + rest,
        void=dict(Counter(c.sample.void_reason for c in answered if c.sample and c.sample.void_reason)),
    )


def _ttft(calls: Sequence[SweepCall]) -> Spread | None:
    return Spread.of([c.sample.ttft_s for c in calls if c.sample and c.sample.ttft_s is not None])


def _cached_share(calls: Sequence[SweepCall]) -> float | None:
    """``None`` where the host does not report cached tokens."""
    known = [call.tokens for call in calls if call.tokens.cache_read is not None and call.tokens.prompt]
    prompt = sum(tokens.prompt for tokens in known)
    return sum(tokens.cache_read or 0 for tokens in known) / prompt if prompt else None


def _prefill_speed(calls: Sequence[SweepCall]) -> float | None:
    speeds = [
        (call.tokens.prompt - (call.tokens.cache_read or 0)) / call.sample.ttft_s
        for call in calls
        if call.sample and call.sample.ttft_s
    ]
    return median(speeds) if speeds else None
