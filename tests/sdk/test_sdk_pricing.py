from __future__ import annotations

from datetime import date
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3eval import ConfigError, PriceRow, PriceTable, Usage
from k3eval.jsontypes import JsonValue
from k3eval.meter.pricing import STALE_DAYS, normal_model, plain, tidy, total_usage, write_tier_unknown
from k3eval.meter.usage_wire import UsageReport, read_usage

TABLE = PriceTable.bundled()
counts = st.integers(min_value=0, max_value=2_000_000)


def report(**usage: JsonValue) -> UsageReport:
    found = read_usage(usage)
    assert found is not None
    return found


def row(host: str = "api.moonshot.ai", model: str = "kimi-k3") -> PriceRow:
    found = TABLE.find(host, model)
    assert found is not None
    return found


def test_cached_prompt_to_the_digit() -> None:
    used = report(prompt_tokens=3099, completion_tokens=168, prompt_tokens_details={"cached_tokens": 2560})
    assert row().price(used) == Decimal("0.004905")


def test_long_context_example() -> None:
    used = report(prompt_tokens=100_000, completion_tokens=8_000, cached_tokens=90_000)
    assert row().price(used) == Decimal("0.177")
    assert row().price(report(prompt_tokens=100_000, completion_tokens=8_000)) == Decimal("0.42")


def test_router_example_is_counted_once() -> None:
    used = report(
        prompt_tokens=2000,
        completion_tokens=10,
        prompt_tokens_details={"cached_tokens": 1920, "cache_write_tokens": 0},
        cost=0.000966,
        is_byok=False,
        cost_details={"upstream_inference_cost": 0.000966},
    )
    found = TABLE.find("openrouter.ai", "moonshotai/kimi-k3-20260715", served_by="Moonshot AI")
    assert used.billed == Decimal("0.000966")
    assert found is not None
    assert found.price(used) == Decimal("0.000966")


def test_own_key_adds_the_upstream_cost() -> None:
    used = report(
        prompt_tokens=1,
        completion_tokens=1,
        cost=0.0001,
        is_byok=True,
        cost_details={"upstream_inference_cost": 0.002},
    )
    assert used.billed == Decimal("0.0021")


def test_write_tiers() -> None:
    details: dict[str, JsonValue] = {"cached_tokens": 1024, "cache_write_tokens": 256}
    used = report(prompt_tokens=1300, completion_tokens=40, prompt_tokens_details=details)
    short = Decimal(20 * 3 + 256 * 3 + 40 * 15) + Decimal(1024) * Decimal("0.3")
    assert row().price(used) == short.scaleb(-6)
    assert write_tier_unknown(row(), used)
    hour = UsageReport(used.usage, write_1h=256)
    assert row().price(hour) == (short + 256 * 3).scaleb(-6)
    assert not write_tier_unknown(row(), hour)


def test_searches_cost_a_fee() -> None:
    used = report(prompt_tokens=1000, completion_tokens=0, server_tool_use={"web_search_requests": 2})
    assert row().price(used) == Decimal("0.013")


def test_host_without_cache_price_charges_in_full() -> None:
    bare = PriceRow("h", "m", "USD", date(2026, 1, 1), "test", input=Decimal(2), output=Decimal(4))
    used = report(prompt_tokens=1_000_000, completion_tokens=0, cached_tokens=900_000)
    assert bare.price(used) == Decimal(2)


def test_row_without_price_is_unknown_not_free() -> None:
    found = TABLE.find("inference.baseten.co", "kimi-k3")
    assert found is not None
    assert found.max_output == 262_144
    assert found.price(report(prompt_tokens=5, completion_tokens=5)) is None
    assert found.worst_case(5, 5) is None


@pytest.mark.parametrize(
    ("host", "model", "prices"),
    [
        ("api.moonshot.ai", "kimi-k3.1-pro", ("2", "0.2", "10")),
        ("api.moonshot.ai", "kimi-k3.1-pro-20261023", ("2", "0.2", "10")),
        ("api.moonshot.ai", "kimi-k3.1-pro-highspeed", ("4", "0.2", "20")),
        ("api.moonshot.ai", "kimi-k2.7-code", ("0.95", "0.19", "4")),
        ("api.moonshot.cn", "kimi-k3", ("20", "2", "100")),
        (
            "bedrock-runtime.us-east-1.amazonaws.com",
            "moonshotai.kimi-k3".rpartition(".")[2],
            ("3", "0.3", "15"),
        ),
        ("api.fireworks.ai", "accounts/fireworks/models/kimi-k3", ("3", "0.3", "15")),
        ("api.novita.ai", "moonshotai/kimi-k3.1-pro", ("2", "0.2", "10")),
    ],
)
def test_bundled_rows(host: str, model: str, prices: tuple[str, str, str]) -> None:
    found = TABLE.find(host, model)
    assert found is not None
    assert (found.input, found.cache_read, found.output) == tuple(Decimal(p) for p in prices)
    assert found.source
    assert found.label.endswith(found.checked_on.isoformat())


def test_currency_belongs_to_the_row() -> None:
    assert row("api.moonshot.cn").currency == "CNY"
    assert row().currency == "USD"


def test_variant_of_a_host_needs_a_pin() -> None:
    assert TABLE.find("openrouter.ai", "kimi-k3", served_by="Morph") is None
    fast = TABLE.find("openrouter.ai", "kimi-k3", served_by="Morph", pinned=("morph/fast",))
    assert fast is not None
    assert fast.input == Decimal(6)
    assert TABLE.find("openrouter.ai", "kimi-k3", served_by="nobody") is None


def test_worst_rows_follow_the_pin() -> None:
    assert len(TABLE.worst("openrouter.ai", "kimi-k3")) > 5
    assert [r.served_by for r in TABLE.worst("openrouter.ai", "kimi-k3", pinned=("deepinfra",))] == [
        "deepinfra"
    ]


def test_age() -> None:
    assert row().age_days(date(2026, 12, 1)) == 47
    assert row().age_days(date(2026, 12, 31)) > STALE_DAYS


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[row]]\nhost='h'", "model is missing"),
        ("[[row]]\nhost='h'\nmodel='m'\ncurrency='USD'\nsource='s'\nchecked_on='x'", "must be a date"),
        (
            "[[row]]\nhost='h'\nmodel='m'\ncurrency='USD'\nsource='s'\nchecked_on=2026-01-01\ninput=3.0",
            "in quotes",
        ),
        (
            "[[row]]\nhost='h'\nmodel='m'\ncurrency='USD'\nsource='s'\nchecked_on=2026-01-01\ncontext=0",
            "positive",
        ),
        ("[[row]]\ncost='1'", "unknown key 'cost'"),
        ("[[row", "prices.toml"),
    ],
)
def test_bad_tables_say_where(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        PriceTable.parse(text)


def test_own_rows_come_first() -> None:
    own = PriceRow(
        "api.moonshot.ai", "kimi-k3", "USD", date(2026, 11, 30), "contract", Decimal(1), Decimal(2)
    )
    assert TABLE.with_rows(own).find("api.moonshot.ai", "kimi-k3") is own


@given(miss=counts, read=counts, write=counts, output=counts, hour=counts)
def test_price_is_linear_and_bounded(miss: int, read: int, write: int, output: int, hour: int) -> None:
    used = UsageReport(Usage(miss, read, write, output, None), write_1h=min(hour, write))
    cost = row().price(used)
    worst = row().worst_case(used.usage.prompt, used.usage.output)
    ideal = row().price(used, ideal_read=used.usage.prompt)
    assert cost is not None
    assert worst is not None
    assert ideal is not None
    assert 0 <= ideal <= cost <= worst
    assert cost == sum(
        (
            part or Decimal(0)
            for part in (
                row().price(UsageReport(Usage(miss, None, None, 0, None))),
                row().price(UsageReport(Usage(0, read, None, 0, None))),
                row().price(UsageReport(Usage(0, None, write, 0, None), write_1h=min(hour, write))),
                row().price(UsageReport(Usage(0, None, None, output, None))),
            )
        ),
        Decimal(0),
    )


@given(st.lists(st.tuples(counts, counts, counts), max_size=5))
def test_usages_add_up(items: list[tuple[int, int, int]]) -> None:
    used = [Usage(miss, read, None, text, None) for miss, read, text in items]
    total = total_usage(used)
    assert total.prompt == sum(item.prompt for item in used)
    assert total.output == sum(item.output for item in used)
    assert total.cache_write is None


def test_unknown_stays_unknown_in_sums() -> None:
    assert total_usage([Usage(1, None, None, 1, None)]).cache_read is None
    assert total_usage([Usage(1, None, None, 1, None), Usage(1, 0, None, 1, None)]).cache_read == 0


def test_amounts_are_written_plainly() -> None:
    assert [plain(tidy(Decimal(x))) for x in ("100", "0.00490500", "1E+3", "0")] == [
        "100",
        "0.004905",
        "1000",
        "0",
    ]
    assert plain(None) is None


def test_model_names() -> None:
    names = (
        "moonshotai/kimi-k3",
        "~moonshotai/kimi-k3:nitro",
        "Kimi-K3",
        "kimi-k3-20260715",
        "kimi-k3-2026-07-15",
    )
    assert {normal_model(name) for name in names} == {"kimi-k3"}
