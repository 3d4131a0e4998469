"""One reply's decode speed, and its series over context lengths."""

from __future__ import annotations

from dataclasses import replace

import pytest

from k3eval import Timing, Usage
from k3eval_harness.decode.sample import MIN_OUTPUT_TOKENS, decode_sample
from k3eval_harness.decode.series import bin_edges, context_reach, decode_series
from k3eval_harness.results.schema import DecodeSample

MS = 1_000_000


def timing(events: int = 100, first_ms: int | None = 500, last_ms: int | None = 1490, **chars: int) -> Timing:
    first = None if first_ms is None else first_ms * MS
    last = None if last_ms is None else last_ms * MS
    return Timing(
        sent_ns=0,
        first_token_ns=first,
        last_token_ns=last,
        end_ns=2000 * MS,
        token_events=events,
        first_event_chars=chars.get("first_chars", 4),
        total_chars=chars.get("total_chars", 400),
    )


def usage(output: int = 100) -> Usage:
    return Usage(miss=1000, cache_read=3000, cache_write=96, output_text=output - 10, output_reasoning=10)


def test_first_to_last_event_over_the_tokens_after_the_first() -> None:
    sample = decode_sample(timing(), usage())
    assert sample.seconds_per_token == pytest.approx(0.99 / 99)
    assert sample.ttft_s == 0.5
    assert sample.context_tokens == 4096
    assert sample.output_tokens == 100
    assert (sample.bundled, sample.void_reason) == (False, None)


def test_bundled_events_take_the_first_events_share_of_the_text() -> None:
    sample = decode_sample(timing(events=10, first_chars=80), usage())
    assert sample.bundled
    assert sample.seconds_per_token == pytest.approx(0.99 / (100 - 20))


def test_nine_events_for_ten_tokens_count_as_one_token_each() -> None:
    assert not decode_sample(timing(events=90, first_chars=80), usage()).bundled
    assert decode_sample(timing(events=89, first_chars=80), usage()).bundled


def test_a_bundled_first_event_holds_at_least_one_token() -> None:
    sample = decode_sample(timing(events=50, first_chars=1), usage())
    assert sample.seconds_per_token == pytest.approx(0.99 / 99)
    unknown_text = decode_sample(timing(events=50, first_chars=0, total_chars=0), usage())
    assert unknown_text.seconds_per_token == pytest.approx(0.99 / 99)


@pytest.mark.parametrize(
    ("sample", "reason"),
    [
        (decode_sample(timing(), None), "no usage reported"),
        (decode_sample(timing(first_ms=None, last_ms=None, events=0), usage()), "no token-bearing event"),
        (decode_sample(timing(events=1, last_ms=500), usage()), "a single event"),
        (decode_sample(timing(events=15), usage(15)), f"fewer than {MIN_OUTPUT_TOKENS} output tokens"),
        (decode_sample(timing(events=3, first_chars=400), usage()), "all text came in the first event"),
    ],
)
def test_what_cannot_be_measured_is_void_with_its_reason(sample: DecodeSample, reason: str) -> None:
    assert sample.void_reason == reason
    assert sample.seconds_per_token is None
    assert not sample.bundled


def test_events_of_one_packet_measure_nothing() -> None:
    sample = decode_sample(timing(first_ms=500, last_ms=500), usage())
    assert sample.seconds_per_token is None
    assert sample.void_reason == "all events arrived at once"


def test_text_in_few_bursts_measures_nothing() -> None:
    few, enough = (replace(timing(), arrivals=n) for n in (7, 8))
    assert decode_sample(few, usage()).void_reason == "text arrived in only 7 bursts"
    assert decode_sample(enough, usage()).void_reason is None


def test_text_mostly_in_one_burst_measures_the_reader_and_is_void() -> None:
    late, fine = (replace(timing(), arrivals=40, largest_burst=n) for n in (26, 25))
    assert decode_sample(late, usage()).void_reason == "26 of 100 events arrived in one burst"
    assert decode_sample(fine, usage()).void_reason is None


def test_sixteen_tokens_are_enough() -> None:
    assert decode_sample(timing(events=16), usage(16)).seconds_per_token == pytest.approx(0.99 / 15)


@pytest.mark.parametrize(
    ("context", "edges"),
    [(0, (0, 1024)), (1023, (0, 1024)), (1024, (1024, 2048)), (4095, (2048, 4096)), (4096, (4096, 8192))],
)
def test_bins_are_powers_of_two(context: int, edges: tuple[int, int]) -> None:
    assert bin_edges(context) == edges


def sample_at(context: int, seconds: float | None) -> DecodeSample:
    reason = None if seconds is not None else "a single event"
    return DecodeSample(
        context_tokens=context,
        output_tokens=100,
        token_events=100,
        seconds_per_token=seconds,
        void_reason=reason,
    )


def test_a_series_recovers_the_line_and_counts_what_is_void() -> None:
    samples = [sample_at(c, 0.01 + 2e-7 * c) for c in (1500, 1800, 3000, 9000, 40_000)]
    series = decode_series([*samples, sample_at(5000, None)])
    assert [(b.low, b.seconds_per_token.n) for b in series.bins] == [
        (1024, 2), (2048, 1), (8192, 1), (32768, 1),
    ]  # fmt: skip
    assert series.fit is not None
    assert series.fit.a_s == pytest.approx(0.01)
    assert series.fit.b_s_per_token == pytest.approx(2e-7)
    assert series.void == {"a single event": 1}


@pytest.mark.parametrize("contexts", [[], [4000, 4000, 4000], [4000, 8000]])
def test_no_line_through_too_few_points_or_one_context(contexts: list[int]) -> None:
    assert decode_series(sample_at(c, 0.01) for c in contexts).fit is None


def test_reach_shows_which_contexts_were_there() -> None:
    assert context_reach([]) is None
    reach = context_reach([500, 1500, 1600, 90_000])
    assert reach is not None
    assert (reach.smallest, reach.median, reach.largest, reach.n) == (500, 1550, 90_000, 4)
    assert reach.turns_by_bin == {"0-1023": 1, "1024-2047": 2, "65536-131071": 1}
