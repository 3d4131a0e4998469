from __future__ import annotations

import io
import json
import multiprocessing
import os
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3eval import K3, Attempt, Budget, BudgetExceededError, ConfigError, Cost, Ledger, Message, Meter, Usage
from k3eval.meter.ledger import attempt_from_json, attempt_to_json, totals
from k3eval.meter.summary import export_attempts, find_ledger, groups, load_attempts
from k3eval.testing import ScriptedTransport, answer

TWO_CENTS = Decimal("0.02")
FIVE_CENTS = Budget(max_cost=Decimal("0.05"))
USED = Usage(100, 50, None, 7, 3)
PLAN = Attempt(
    call_id="c",
    number=1,
    started_at="2026-12-01T00:00:00.000+00:00",
    ended_at=None,
    state="reserved",
    provider="moonshot",
    host="api.moonshot.ai",
    model="kimi-k3",
    held=TWO_CENTS,
)


def settled(cost: str = "0.02") -> Attempt:
    amount = Decimal(cost)
    return replace(PLAN, state="settled", usage=USED, cost=Cost(computed=amount), held=amount)


def spend(ledger: Ledger, budget: Budget) -> bool:
    try:
        held = ledger.reserve(PLAN, tokens=100, budget=budget)
    except BudgetExceededError:
        return False
    ledger.settle(held, settled(), tokens=160)
    return True


def test_the_third_call_is_refused() -> None:
    ledger = Ledger()
    assert [spend(ledger, FIVE_CENTS) for _ in range(3)] == [True, True, False]
    assert ledger.held() == (Decimal("0.04"), 320)


def test_a_budget_that_fits_exactly() -> None:
    ledger, budget = Ledger(), Budget(max_cost=Decimal("0.04"))
    assert [spend(ledger, budget) for _ in range(3)] == [True, True, False]


def test_eight_threads_race_for_it() -> None:
    ledger, start = Ledger(), threading.Barrier(8)

    def run(_: int) -> bool:
        start.wait()
        return spend(ledger, FIVE_CENTS)

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(run, range(8))) == 2
    assert ledger.held()[0] == Decimal("0.04")


def _spend_in_process(path: Path, start: threading.Barrier, calls: int) -> None:
    with Ledger(path) as ledger:
        start.wait(30)
        os._exit(sum(spend(ledger, FIVE_CENTS) for _ in range(calls)))


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_two_processes_share_it(tmp_path: Path, method: str) -> None:
    context = multiprocessing.get_context(method)
    start = context.Barrier(2)
    path = tmp_path / "ledger.sqlite"
    workers = [context.Process(target=_spend_in_process, args=(path, start, 4)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert sum(worker.exitcode or 0 for worker in workers) == 2
    with Ledger(path) as ledger:
        assert ledger.held() == (Decimal("0.04"), 320)
        assert ledger.totals().calls == 1
        assert ledger.totals().attempts == 2


def test_a_connection_is_not_used_across_a_fork(tmp_path: Path) -> None:
    with Ledger(tmp_path / "l.sqlite") as ledger:
        assert spend(ledger, FIVE_CENTS)
        child = multiprocessing.get_context("fork").Process(
            target=lambda: os._exit(spend(ledger, FIVE_CENTS))
        )
        child.start()
        child.join(60)
        assert child.exitcode == 1
        assert ledger.held()[0] == Decimal("0.04")


def test_a_dead_process_keeps_its_worst_case(tmp_path: Path) -> None:
    with Ledger(tmp_path / "l.sqlite") as ledger:
        ledger.reserve(PLAN, tokens=100, budget=FIVE_CENTS)
    with Ledger(tmp_path / "l.sqlite") as ledger:
        assert ledger.held() == (TWO_CENTS, 100)
        assert ledger.totals().unknown == 1


def test_a_lost_reply_keeps_its_worst_case() -> None:
    ledger = Ledger()
    held = ledger.reserve(PLAN, tokens=100, budget=None)
    ledger.settle(held, replace(PLAN, state="unknown", error="reset"))
    assert ledger.held() == (TWO_CENTS, 100)


def test_token_budget() -> None:
    ledger, budget = Ledger(), Budget(max_tokens=250)
    assert spend(ledger, budget)
    with pytest.raises(BudgetExceededError, match="160 of 250"):
        ledger.reserve(PLAN, tokens=100, budget=budget)


def test_scopes_are_apart() -> None:
    ledger = Ledger()
    other = replace(PLAN, scope="other")
    ledger.reserve(other, tokens=1, budget=Budget(max_cost=TWO_CENTS, scope="other"))
    assert spend(ledger, FIVE_CENTS)
    assert ledger.held("other")[0] == TWO_CENTS
    assert [row.scope for row in ledger.attempts(scope="other")] == ["other"]


def test_other_money_cannot_be_counted() -> None:
    yuan = replace(PLAN, cost=Cost(currency="CNY"))
    with pytest.raises(ConfigError, match="CNY"):
        Ledger().reserve(yuan, tokens=1, budget=FIVE_CENTS)


@pytest.mark.parametrize("bad", [Decimal(-1), Decimal("NaN"), Decimal("Infinity")])
def test_bad_budgets(bad: Decimal) -> None:
    with pytest.raises(ConfigError):
        Budget(max_cost=bad)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(
        st.tuples(st.decimals(0, 1, places=6), st.decimals(0, 1, places=6), st.booleans()),
        min_size=1,
        max_size=12,
    ),
    st.decimals(0, 3, places=3),
)
def test_what_is_held_never_passes_the_budget(
    calls: list[tuple[Decimal, Decimal, bool]], limit: Decimal
) -> None:
    ledger, spent = Ledger(), Decimal(0)
    for worst, cost, lost in calls:
        actual = worst if lost else min(cost, worst)
        plan = replace(PLAN, held=worst)
        try:
            held = ledger.reserve(plan, tokens=1, budget=Budget(max_cost=limit))
        except BudgetExceededError:
            assert spent + worst > limit
            continue
        assert ledger.held()[0] <= limit
        ledger.settle(held, replace(plan, state="unknown" if lost else "settled", held=actual), tokens=1)
        spent += actual
        assert ledger.held()[0] == spent <= limit


FULL = Attempt(
    call_id="call",
    number=2,
    started_at="2026-12-01T00:00:00.000+00:00",
    ended_at="2026-12-01T00:00:01.000+00:00",
    state="settled",
    provider="openrouter",
    host="openrouter.ai",
    model="moonshotai/kimi-k3",
    status=200,
    error=None,
    request_id="gen-1",
    finish_reason="stop",
    served_by="Moonshot AI",
    usage=USED,
    cost=Cost(Decimal("0.000966"), None, Decimal("0.0005"), "USD", "row"),
    held=Decimal("0.000966"),
    notes=("write_tier_unknown", "billed_differs"),
    cache_miss_reason="host flipped from a to b",
    seconds=1.5,
    ttft_seconds=0.25,
    scope="s",
)


@pytest.mark.parametrize("row", [FULL, PLAN, replace(FULL, usage=None, served_by=None, notes=())])
def test_rows_come_back_whole(row: Attempt) -> None:
    ledger = Ledger()
    held = ledger.reserve(PLAN, tokens=1, budget=None)
    ledger.settle(held, row, tokens=1)
    assert list(ledger.attempts()) == [row]
    assert attempt_from_json(json.loads(json.dumps(attempt_to_json(row)))) == row


def test_exports(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.settle(ledger.reserve(PLAN, tokens=1, budget=None), FULL, tokens=1)
    text = io.StringIO()
    assert ledger.export(text, kind="csv") == 1
    header, line = text.getvalue().splitlines()
    assert dict(zip(header.split(","), line.split(","), strict=True))["billed"] == "0.000966"
    ledger.close()
    out = tmp_path / "rows.jsonl"
    assert export_attempts(load_attempts(find_ledger(tmp_path)), out, kind="jsonl") == 1
    assert load_attempts(out) == (FULL,)
    assert load_attempts(out, scope="no") == ()
    assert not list(tmp_path.glob("*.part"))


def test_totals_keep_currencies_and_unknowns_apart() -> None:
    rows = [
        settled("1"),
        replace(settled("2"), cost=Cost(computed=Decimal(2), currency="CNY"), call_id="d"),
        replace(PLAN, state="unknown"),
    ]
    found = totals(rows)
    assert (found.calls, found.attempts, found.unknown) == (2, 3, 1)
    assert found.cost.currency == "mixed"
    assert [(c.currency, c.computed) for c in found.by_currency] == [("CNY", Decimal(2)), ("USD", Decimal(1))]
    assert found.usage.prompt == 300
    assert totals([]).cost == Cost()


def test_groups_name_who_served() -> None:
    found = groups([FULL, FULL, settled()])
    assert [(g.host, g.totals.attempts) for g in found] == [("Moonshot AI", 2), ("api.moonshot.ai", 1)]


@pytest.mark.parametrize("line", ["{", "[]", "{}", '{"cost":{},"usage":null}'])
def test_bad_exports_say_where(tmp_path: Path, line: str) -> None:
    (tmp_path / "x.jsonl").write_text(line, "utf-8")
    with pytest.raises(ConfigError, match=r"x\.jsonl, line 1"):
        load_attempts(tmp_path / "x.jsonl")


def test_what_is_no_ledger(tmp_path: Path) -> None:
    (tmp_path / "no.sqlite").write_text(
        "this is no database, though long enough to look like a file", "utf-8"
    )
    with pytest.raises(ConfigError, match="as a ledger"):
        Ledger(tmp_path / "no.sqlite")
    with sqlite3.connect(tmp_path / "new.sqlite") as db:
        db.execute("PRAGMA user_version=99")
    db.close()
    with pytest.raises(ConfigError, match="another version"):
        Ledger(tmp_path / "new.sqlite")
    with pytest.raises(ConfigError, match="no ledger at"):
        find_ledger(tmp_path / "absent")


def test_default_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("K3EVAL_LEDGER", str(tmp_path / "mine.sqlite"))
    assert Ledger.default_path() == tmp_path / "mine.sqlite"
    monkeypatch.delenv("K3EVAL_LEDGER")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert Ledger.default_path() == tmp_path / "k3eval" / "ledger.sqlite"


# -- the same through whole calls: each costs two cents, and its worst case is little more ----------

CHEAP = {"prompt_tokens": 100, "completion_tokens": 1313, "cached_tokens": 50}
"""50 at 3 + 50 at 0.30 + 1313 at 15 per million = 0.01986."""


def client(meter: Meter) -> K3:
    return K3(
        "moonshot", "kimi-k3", api_key="sk-invented-key", meter=meter, max_output=1250,
        transport=ScriptedTransport(answer(usage=CHEAP), repeat=True),
    )  # fmt: skip


def test_calls_through_the_client_stop_at_the_budget() -> None:
    meter = Meter(budget=FIVE_CENTS, notify=lambda _: None)
    with client(meter) as k3:
        k3.chat([Message.user("hi")])
        k3.chat([Message.user("hi")])
        with pytest.raises(BudgetExceededError, match="Raise the budget or lower max_output") as caught:
            k3.chat([Message.user("hi")])
    assert caught.value.request is not None
    assert "model=kimi-k3" in caught.value.request
    assert meter.total.calls == 2
    assert meter.total.cost.computed == Decimal("0.03972")


def test_eight_threads_with_one_client() -> None:
    meter, start = Meter(budget=FIVE_CENTS, notify=lambda _: None), threading.Barrier(8)
    with client(meter) as k3:

        def run(_: int) -> bool:
            start.wait()
            try:
                k3.chat([Message.user("hi")])
            except BudgetExceededError:
                return False
            return True

        with ThreadPoolExecutor(8) as pool:
            assert sum(pool.map(run, range(8))) == 2


def test_a_budget_of_nothing_lets_a_free_host_work() -> None:
    meter = Meter(budget=Budget(max_cost=Decimal(0)), notify=lambda _: None)
    with K3("local", "a", meter=meter, transport=ScriptedTransport(answer())) as k3:
        assert k3.chat([Message.user("hi")]).cost == Cost()


def test_no_price_and_a_money_budget_is_an_error() -> None:
    meter = Meter(budget=FIVE_CENTS, notify=lambda _: None)
    options = {"base_url": "https://api.example.com/v1", "meter": meter}
    with (
        K3("compatible", "m", transport=ScriptedTransport(answer()), **options) as k3,  # type: ignore[arg-type]
        pytest.raises(ConfigError, match="no price is known"),
    ):
        k3.chat([Message.user("hi")])
    assert list(meter.ledger.attempts()) == []
