"""One reply's decode speed at its real context length, from the client's stamps and the billed usage.

A pure function. A reply that cannot be measured becomes a void sample with its reason, never a zero.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from k3eval.meter.usage import Usage
from k3eval_harness.results.schema import DecodeSample

if TYPE_CHECKING:
    from k3eval import Timing

MIN_OUTPUT_TOKENS = 16
"""Below this the first and last event's jitter is as large as what is measured."""

MIN_ARRIVALS = 8
"""Below this, events came in so few bursts that the first and last burst decide the figure."""

MAX_BURST_SHARE = 0.25
"""A larger share of the events in one burst means that the reader was held up; the figure is then its own."""

BUNDLED_BELOW = 0.9
"""With fewer events than this share of the output tokens, events carry several tokens each."""


def decode_sample(timing: Timing, usage: Usage | None) -> DecodeSample:
    """Seconds per token ``d = (T1 - T0) / (n - n_first)`` at context ``c``.

    ``T0`` and ``T1`` are the first and the last token-bearing event (content, reasoning or tool arguments,
    never a role-only delta), ``n`` the billed output tokens with reasoning, ``c`` the billed prompt tokens,
    cached or not. ``n_first``, the tokens of the first event, is 1 where events match tokens, else its share
    of the text (``bundled``). Void with a reason: no usage, no token-bearing event, a single event, all
    events in one packet, text in fewer than ``MIN_ARRIVALS`` bursts, more than ``MAX_BURST_SHARE`` of it in
    one of them, or fewer than ``MIN_OUTPUT_TOKENS``.
    """
    first, last = timing.first_token_ns, timing.last_token_ns
    ttft_s = None if first is None else (first - timing.sent_ns) / 1e9
    decode_s = None if first is None or last is None else (last - first) / 1e9
    output = 0 if usage is None else usage.output
    bundled = output > 0 and timing.token_events < BUNDLED_BELOW * output
    reason = _void_reason(timing, usage)
    seconds_per_token = None
    if reason is None and decode_s is not None:
        after_first = output - _first_event_tokens(timing, output, bundled)
        if after_first > 0:
            seconds_per_token = decode_s / after_first
        else:
            reason = "all text came in the first event"
    return DecodeSample(
        context_tokens=0 if usage is None else usage.prompt,
        output_tokens=output,
        token_events=timing.token_events,
        ttft_s=ttft_s,
        decode_s=decode_s,
        seconds_per_token=seconds_per_token,
        bundled=bundled and reason is None,
        void_reason=reason,
    )


def _void_reason(timing: Timing, usage: Usage | None) -> str | None:
    if usage is None:
        return "no usage reported"
    if timing.first_token_ns is None or timing.last_token_ns is None or timing.token_events == 0:
        return "no token-bearing event"
    if usage.output < MIN_OUTPUT_TOKENS:
        return f"fewer than {MIN_OUTPUT_TOKENS} output tokens"
    if timing.token_events == 1:
        return "a single event"
    if timing.last_token_ns <= timing.first_token_ns:
        return "all events arrived at once"
    if 0 < timing.arrivals < MIN_ARRIVALS:
        return f"text arrived in only {timing.arrivals} bursts"
    if timing.largest_burst > MAX_BURST_SHARE * timing.token_events:
        return f"{timing.largest_burst} of {timing.token_events} events arrived in one burst"
    return None


def _first_event_tokens(timing: Timing, output: int, bundled: bool) -> float:
    if not bundled or timing.total_chars <= 0:
        return 1.0
    return max(1.0, output * timing.first_event_chars / timing.total_chars)
