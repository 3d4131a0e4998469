"""A model behind the SDK, as the sweep needs it: count a prompt, stream a reply of forced length."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from k3eval_harness.decode.records import ServerTiming
from k3eval_harness.decode.sample import decode_sample
from k3eval_harness.decode.summary import ModelPrice
from k3eval_harness.decode.sweep import Answer
from k3eval_harness.results.schema import Costs, TokenCounts

if TYPE_CHECKING:
    from k3eval import K3, Cost, ModelRef, Usage
    from k3eval.jsontypes import JsonValue

FORCES_LENGTH = ("local", "compatible")
"""They take ``min_tokens`` and ``ignore_eos``, as vLLM does; elsewhere the prompt asks for a long reply."""


class LiveModel:
    """One model under measurement."""

    def __init__(self, name: str, client: K3, reference: ModelRef, seed: int) -> None:
        provider = reference.provider
        self.name = name
        self._model = reference.model
        self._client = client
        self._seed = seed
        self._forced = provider in FORCES_LENGTH
        self._timings = provider == "local"

    def limit(self) -> int | None:
        """The model's context in the host's list; None where there is no such list or no such entry."""
        from k3eval import K3EvalError

        try:
            offered = self._client.models()
        except K3EvalError:  # what is wrong shows in the calls
            return None
        own = (each.context for each in offered if each.id.lower() == self._model.lower())
        return next(own, None)

    def count(self, text: str) -> int:
        """Prompt tokens by the host's own count where it offers one, else by the SDK's estimate."""
        from k3eval import Message

        return self._client.count_tokens([Message.user(text)]).tokens

    def ask(self, text: str, output_tokens: int) -> Answer:
        """Stream one reply and measure it."""
        from k3eval import Message

        extra: dict[str, JsonValue] = {}
        if self._forced:
            extra |= {"min_tokens": output_tokens, "ignore_eos": True}
        if self._timings:
            extra["k3eval_timings"] = True
        seed = self._seed if self._forced else None  # K3's own hosts take none
        with self._client.stream(
            [Message.user(text)], max_output=output_tokens, seed=seed, extra=extra
        ) as stream:
            for _ in stream:
                pass
            completion = stream.completion()
        return Answer(
            tokens=_counts(completion.usage),
            sample=decode_sample(completion.timing, completion.usage),
            costs=costs_of(completion.cost),
            host=completion.host,
            server=server_timing(completion.raw),
        )


def server_timing(reply: Mapping[str, JsonValue]) -> ServerTiming | None:
    """Read the local backend's ``k3eval_timings``: nanoseconds from the request's start; ``None`` without."""
    data = reply.get("k3eval_timings")
    if not isinstance(data, dict):
        return None
    stamps = data.get("token_ns")
    times = [t for t in stamps if isinstance(t, int)] if isinstance(stamps, list) else []
    queue, prefill = data.get("queue_ns"), data.get("prefill_ns")
    return ServerTiming(
        queue_s=queue / 1e9 if isinstance(queue, int) else 0.0,
        prefill_s=prefill / 1e9 if isinstance(prefill, int) else 0.0,
        seconds_per_token=(times[-1] - times[0]) / 1e9 / (len(times) - 1) if len(times) > 1 else None,
    )


def model_price(reference: ModelRef, served_by: str | None) -> ModelPrice:
    """The price of a model's calls by the SDK's dated table; ``served_by`` is the host behind a router."""
    from k3eval import PriceTable, Usage
    from k3eval.meter.usage_wire import UsageReport
    from k3eval.providers import provider_named

    provider = provider_named(reference.provider, reference.base_url)
    host = provider.price_host or urlsplit(provider.base_url or "").hostname or ""
    row = (
        None
        if provider.self_hosted
        else PriceTable.bundled().find(host, reference.model, served_by=served_by)
    )
    if row is None:
        return ModelPrice(lambda miss, read, output: None, provider.currency)

    def price(miss: int, read: int, output: int) -> Decimal | None:
        return row.price(UsageReport(Usage(miss, read, None, output, None)))

    return ModelPrice(price, row.currency, row.label if row.priced else None)


def costs_of(cost: Cost) -> Costs:
    """The SDK's cost as the results record it."""
    return Costs(
        billed=cost.billed,
        computed=cost.computed,
        ideal_cache=cost.ideal_cache,
        currency=cost.currency,
        price_row=cost.price_row,
    )


def _counts(usage: Usage | None) -> TokenCounts:
    if usage is None:
        return TokenCounts()
    return TokenCounts(
        miss=usage.miss,
        cache_read=usage.cache_read,
        cache_write=usage.cache_write,
        output_text=usage.output_text,
        output_reasoning=usage.output_reasoning,
    )
