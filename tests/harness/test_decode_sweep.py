"""The controlled sweep with models whose speed is known: rows, fits, twin ratio, costs, failures."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal

import pytest
from surface_samples import MODEL, PROVENANCE, START

from k3eval import AuthenticationError, BudgetExceededError, K3EvalError, TransportError
from k3eval_harness.cli.bench import _problem
from k3eval_harness.cli.common import Exit
from k3eval_harness.decode.corpus import Corpus
from k3eval_harness.decode.records import CorpusInfo, ServerTiming, SweepCall, SweepResult
from k3eval_harness.decode.render import COLUMNS, markdown, notes, table_rows
from k3eval_harness.decode.summary import ModelPrice, context_rows, model_fits, twin_rows
from k3eval_harness.decode.sweep import Answer, SweepPlan, run_sweep
from k3eval_harness.errors import UsageError
from k3eval_harness.results.schema import Costs, DecodeSample, TokenCounts

CORPUS = Corpus("sample", "1", "f" * 64, "def f(x):\n    return x + 1\n\n" * 3000)
PLAN = SweepPlan(contexts=(1024, 4096, 16_384), repeats=3, output_tokens=64, seed=7, nonce="n")


def words(text: str) -> int:
    return 9 + len(re.findall(r"\w+|\W", text))


@dataclass
class KnownModel:
    """Needs ``a + b c`` seconds per token; the server is 1 % off, and repeated prompts are cached."""

    name: str
    a: float
    b: float
    fails: Callable[[int], K3EvalError | None] = lambda tokens: None
    seen: set[str] = field(default_factory=set)
    asked: list[int] = field(default_factory=list)
    most: int | None = None

    def limit(self) -> int | None:
        return self.most

    def count(self, text: str) -> int:
        return words(text)

    def ask(self, text: str, output_tokens: int) -> Answer:
        tokens = words(text)
        error = self.fails(tokens)
        if error is not None:
            raise error
        self.asked.append(tokens)
        warm = text in self.seen
        self.seen.add(text)
        seconds = self.a + self.b * tokens
        return Answer(
            tokens=TokenCounts(
                miss=0 if warm else tokens, cache_read=tokens if warm else 0, output_text=output_tokens
            ),
            sample=DecodeSample(
                context_tokens=tokens,
                output_tokens=output_tokens,
                token_events=output_tokens,
                ttft_s=0.1 if warm else tokens / 1000,
                decode_s=seconds * (output_tokens - 1),
                seconds_per_token=seconds,
            ),
            costs=Costs(),
            server=ServerTiming(queue_s=0.0, prefill_s=0.1, seconds_per_token=seconds / 1.01),
        )


FREE = ModelPrice(lambda miss, read, output: None)
PRICED = ModelPrice(
    lambda miss, read, output: (
        (Decimal(miss) * 3 + Decimal(read) * Decimal("0.3") + Decimal(output) * 15) / 10**6
    ),
    row="host/m@2026-01-01",
)


def sweep(*models: KnownModel) -> tuple[SweepCall, ...]:
    return run_sweep(PLAN, models, CORPUS, lambda call: None)


def result(calls: tuple[SweepCall, ...], prices: dict[str, ModelPrice]) -> SweepResult:
    names = list(prices)
    return SweepResult(
        command="k3eval bench decode ...",
        started_at=START,
        finished_at=START,
        stopped=None,
        costs=Costs(computed=Decimal("1.5")),
        seed=7,
        repeats=3,
        output_tokens=64,
        contexts=PLAN.contexts,
        models=tuple(MODEL.model_copy(update={"name": name}) for name in names),
        corpus=CorpusInfo(package="sample", version="1", sha256="f" * 64),
        price_rows=tuple(p.row for p in prices.values() if p.row),
        rows=context_rows(calls, prices),
        fits=model_fits(calls),
        twin=twin_rows(calls, names[0], names[1]) if len(names) == 2 else (),
        calls=calls,
        provenance=PROVENANCE,
    )


def test_rows_fit_and_spread_recover_what_the_model_does() -> None:
    calls = sweep(KnownModel("m", 0.010, 1e-6))
    assert len(calls) == 3 * 3 * 2
    (fit,) = model_fits(calls)
    assert fit.fit.a_s == pytest.approx(0.010)
    assert fit.fit.b_s_per_token == pytest.approx(1e-6)
    rows = context_rows(calls, {"m": PRICED})
    assert [row.context for row in rows] == [1024, 4096, 16_384]
    row = rows[1]
    assert row.prompt_tokens == 4096
    assert row.seconds_per_token is not None
    assert row.seconds_per_token.median == pytest.approx(0.014096)
    assert row.seconds_per_token.n == 6
    assert row.ttft_cold_s is not None
    assert row.ttft_warm_s is not None
    assert (row.ttft_cold_s.median, row.ttft_warm_s.median) == (pytest.approx(4.096), 0.1)
    assert (row.cached_share_cold, row.cached_share_warm) == (0.0, 1.0)
    assert row.prefill_tokens_per_s == pytest.approx(1000)
    assert row.estimator_error == row.estimator_error_max == pytest.approx(0.01)
    assert row.cost_1k_uncached == Decimal("0.027288")
    assert row.cost_1k_cached == Decimal("0.0162288")
    assert row.seconds_1k_uncached == pytest.approx(4.096 + 999 * 0.014096)
    assert row.seconds_1k_cached == pytest.approx(0.1 + 999 * 0.014096)


def test_without_a_price_the_cost_is_unknown_not_zero() -> None:
    rows = context_rows(sweep(KnownModel("m", 0.01, 0.0)), {"m": FREE})
    assert all(row.cost_1k_uncached is None and row.cost_1k_cached is None for row in rows)


def test_the_first_call_is_a_warm_up_that_is_not_counted() -> None:
    model = KnownModel("m", 0.01, 0.0)
    assert len(model.asked) == 0
    calls = sweep(model)
    assert model.asked[0] == 512
    assert len(model.asked) == len(calls) + 1


def test_the_order_is_shuffled_reproducibly_and_cold_precedes_warm() -> None:
    first, again = sweep(KnownModel("m", 0.01, 0.0)), sweep(KnownModel("m", 0.01, 0.0))
    order = [(c.context, c.repeat, c.cache) for c in first]
    assert order == [(c.context, c.repeat, c.cache) for c in again]
    assert [c for c, _, _ in order] != sorted(c for c, _, _ in order)
    assert [cache for _, _, cache in order] == ["cold", "warm"] * 9


def test_the_twin_ratio_is_paired() -> None:
    calls = sweep(KnownModel("a", 0.01, 0.0), KnownModel("b", 0.01, 1e-6))
    rows = twin_rows(calls, "a", "b")
    assert [row.context for row in rows] == [1024, 4096, 16_384]
    assert rows[2].ratio.median == pytest.approx((0.01 + 1e-6 * 16_384) / 0.01)
    assert rows[2].ratio.n == 6
    assert len({c.model for c in calls[:4]}) == 2


def test_a_failing_context_is_recorded_and_the_others_are_measured() -> None:
    def overflow(tokens: int) -> K3EvalError | None:
        return TransportError("the connection\nwas reset") if tokens > 10_000 else None

    calls = sweep(KnownModel("m", 0.01, 0.0, fails=overflow))
    rows = context_rows(calls, {"m": FREE})
    assert (rows[2].failed, rows[2].calls, rows[2].seconds_per_token) == (6, 6, None)
    assert rows[1].failed == 0
    shown = result(calls, {"m": FREE})
    assert any("6 of 6 calls failed: the connection was reset" in line for line in notes(shown))
    assert table_rows(shown)[2][1:4] == ("-", "-", "-")
    assert _problem(shown) == ("6 of 18 calls failed: the connection was reset", Exit.VOID)
    good, bad = (next(call for call in calls if bool(call.error) is failed) for failed in (False, True))
    assert _problem(result((good,) * 9 + (bad,), {"m": FREE})) is None
    assert _problem(shown.model_copy(update={"stopped": "interrupted"})) == (
        "interrupted; what was measured until then is shown", Exit.INTERRUPTED,
    )  # fmt: skip


def test_a_context_that_is_too_short_is_refused_before_the_first_call() -> None:
    model = KnownModel("m", 0.01, 0.0)
    plan = SweepPlan(contexts=(16, 4096), repeats=1, output_tokens=64, seed=7, nonce="n")
    with pytest.raises(UsageError, match="a context of 16 tokens is too short"):
        run_sweep(plan, [model], CORPUS, lambda call: None)
    assert model.asked == []


def test_a_context_that_a_model_does_not_take_is_refused_before_the_first_call() -> None:
    model, other = KnownModel("m", 0.01, 0.0, most=16_384 + 64), KnownModel("o", 0.01, 0.0, most=16_384 + 63)
    with pytest.raises(UsageError, match="16384 and 64 output tokens are more than the 16447 that o takes"):
        sweep(model, other)
    assert model.asked == other.asked == []
    other.most += 1
    assert len(sweep(model, other)) == 36


def test_a_wrong_key_or_a_spent_budget_ends_the_sweep() -> None:
    for error in (AuthenticationError("bad key", status=401, host="h"), BudgetExceededError("spent")):
        with pytest.raises(type(error)):
            sweep(KnownModel("m", 0.01, 0.0, fails=lambda tokens, error=error: error))


def test_void_replies_and_a_cold_prompt_from_a_cache_are_said() -> None:
    calls = [
        call.model_copy(
            update={
                "tokens": TokenCounts(miss=500, cache_read=500, output_text=5),
                "sample": DecodeSample(
                    context_tokens=1000, output_tokens=5, token_events=5, void_reason="too short"
                ),
            }
        )
        for call in sweep(KnownModel("m", 0.01, 0.0))
    ]
    shown = "\n".join(notes(result(tuple(calls), {"m": FREE})))
    assert "m at 1024: not measured: too short (6)" in shown
    assert "50% of the cold prompts came from a cache" in shown
    assert "m at 4096: the model read 1000 tokens" in shown
    assert "replies had 5 to 5 output tokens" in shown


def test_markdown_and_json_hold_the_same_result() -> None:
    shown = result(sweep(KnownModel("a", 0.01, 1e-6), KnownModel("b", 0.02, 2e-6)), {"a": PRICED, "b": FREE})
    text = markdown(shown)
    assert "k3eval bench decode ..." in text
    assert "At 4096: b needs 2.00 times" in text
    assert "$0.0273" in text
    assert "estimator error" in text
    assert "This sweep cost $1.50" in text
    assert "1.00%" in text
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert {line.count("|") for line in rows} == {len(COLUMNS) + 1}
    assert SweepResult.model_validate_json(shown.model_dump_json()) == shown
