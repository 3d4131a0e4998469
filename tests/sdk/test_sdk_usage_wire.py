from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3eval import Usage
from k3eval.jsontypes import JsonValue
from k3eval.meter.usage_wire import HEADER_WRITE_1H, HEADER_WRITE_5M, UsageFinder, money, read_usage

numbers = st.none() | st.integers(-5, 2_000) | st.floats(allow_nan=True) | st.text(max_size=3) | st.booleans()


@pytest.mark.parametrize(
    ("extra", "read"),
    [
        ({"prompt_tokens_details": {"cached_tokens": 7}}, 7),
        ({"cached_tokens": 7}, 7),
        ({"prompt_cache_hit_tokens": 7}, 7),
        ({"prompt_tokens_details": {"cached_tokens": 7}, "cached_tokens": 7}, 7),
        ({"prompt_tokens_details": {"cached_tokens": None}, "cached_tokens": 7}, 7),
        ({"prompt_tokens_details": None}, None),
        ({"cached_tokens": 0}, 0),
        ({}, None),
    ],
)
def test_names_of_cached_tokens(extra: dict[str, JsonValue], read: int | None) -> None:
    found = read_usage({"prompt_tokens": 10, "completion_tokens": 1, **extra})
    assert found is not None
    assert found.usage.cache_read == read
    assert found.usage.prompt == 10


def test_contradicting_counters_are_all_miss() -> None:
    found = read_usage(
        {
            "prompt_tokens": 10,
            "completion_tokens": 3,
            "cached_tokens": 8,
            "prompt_tokens_details": {"cache_write_tokens": 5},
        }
    )
    assert found is not None
    assert found.inconsistent
    assert found.usage == Usage(10, None, None, 3, None)


def test_more_reasoning_than_output() -> None:
    found = read_usage(
        {"prompt_tokens": 10, "completion_tokens": 3, "completion_tokens_details": {"reasoning_tokens": 9}}
    )
    assert found is not None
    assert found.inconsistent
    assert found.usage.output_reasoning is None


@pytest.mark.parametrize(
    "value",
    [
        None,
        5,
        [],
        "x",
        {},
        {"prompt_tokens": 0},
        {"prompt_tokens": -3, "completion_tokens": 1},
        {"prompt_tokens": 5, "completion_tokens": -1},
        {"prompt_tokens": True},
        {"prompt_tokens": 1e30, "completion_tokens": 1},
        {"prompt_tokens": 1, "completion_tokens": 10**12},
    ],
)
def test_what_is_no_usage(value: JsonValue) -> None:
    assert read_usage(value) is None


@given(
    st.fixed_dictionaries(
        {
            "prompt_tokens": numbers,
            "completion_tokens": numbers,
            "cached_tokens": numbers,
            "prompt_tokens_details": st.none()
            | st.fixed_dictionaries({"cached_tokens": numbers, "cache_write_tokens": numbers}),
            "completion_tokens_details": st.none() | st.fixed_dictionaries({"reasoning_tokens": numbers}),
            "cost": numbers,
            "is_byok": st.booleans(),
        }
    )
)
def test_any_numbers_give_a_consistent_usage_or_none(value: dict[str, JsonValue]) -> None:
    found = read_usage(value)
    if found is not None:
        usage = found.usage
        assert usage.prompt == usage.miss + (usage.cache_read or 0) + (usage.cache_write or 0) > 0
        assert usage.output == usage.output_text + (usage.output_reasoning or 0) >= 0
        assert found.billed is None or found.billed >= 0


def finder(**usage: JsonValue) -> UsageFinder:
    made = UsageFinder()
    made.see({"usage": {"prompt_tokens": 1000, "completion_tokens": 5, **usage}})
    return made


def test_headers_split_the_written_tokens() -> None:
    made = finder(prompt_tokens_details={"cached_tokens": 100, "cache_write_tokens": 300})
    made.see_headers({HEADER_WRITE_5M: "100", HEADER_WRITE_1H: "200"})
    assert made.report is not None
    assert made.report.write_1h == 200


def test_headers_state_written_tokens_that_the_body_leaves_out() -> None:
    made = finder(prompt_tokens_details={"cached_tokens": 100, "cache_write_tokens": None})
    made.see_headers({HEADER_WRITE_1H: "200"})
    assert made.report is not None
    assert made.report.usage == Usage(700, 100, 200, 5, None)
    assert made.report.write_1h == 200


@pytest.mark.parametrize("value", ["-1", "x", "9999", ""])
def test_headers_that_do_not_fit_are_ignored(value: str) -> None:
    made = finder(prompt_tokens_details={"cache_write_tokens": 300})
    made.see_headers({HEADER_WRITE_1H: value})
    assert made.report is not None
    assert made.report.write_1h is None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.000966, "0.000966"),
        ("0.1", "0.1"),
        (3, "3"),
        (None, None),
        (float("nan"), None),
        (float("inf"), None),
        ("x", None),
        (-1, None),
        (True, None),
        (1e-7, "1E-7"),
    ],
)
def test_money(value: JsonValue, text: str | None) -> None:
    found = money(value)
    assert (None if found is None else str(found)) == text
