"""The ledger: one row an attempt, in SQLite, written before the call (reserved) and after it (settled).

The budget check and the reservation are one transaction, so a limit holds across threads, tasks and processes
that share the file. What the budget counts is kept in whole picounits (1e-12 of the currency), rounded up.
A process that dies leaves its reservation at the worst case: unknown money is never treated as free.
"""

from __future__ import annotations

import csv
import json
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from decimal import ROUND_CEILING, Decimal
from pathlib import Path
from typing import Final, Literal, TextIO, cast

from k3eval.errors import BudgetExceededError, ConfigError
from k3eval.jsontypes import JsonObject, JsonValue
from k3eval.meter.pricing import plain, tidy, total_usage
from k3eval.meter.usage import Usage
from k3eval.results import Attempt, AttemptState, Cost, Totals

_VERSION: Final = 1
_WAIT_S: Final = 30.0
_COLUMNS: Final = (
    "call_id", "number", "scope", "started_at", "ended_at", "state", "provider", "host", "model", "status",
    "error", "request_id", "finish_reason", "served_by", "miss", "cache_read", "cache_write", "output_text",
    "output_reasoning", "billed", "computed", "ideal_cache", "currency", "price_row", "held", "notes",
    "cache_miss_reason", "seconds", "ttft_seconds",
)  # fmt: skip
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS attempts (
  id INTEGER PRIMARY KEY, call_id TEXT NOT NULL, number INTEGER NOT NULL, scope TEXT NOT NULL,
  started_at TEXT NOT NULL, ended_at TEXT, state TEXT NOT NULL, provider TEXT NOT NULL, host TEXT NOT NULL,
  model TEXT NOT NULL, status INTEGER, error TEXT, request_id TEXT, finish_reason TEXT, served_by TEXT,
  miss INTEGER, cache_read INTEGER, cache_write INTEGER, output_text INTEGER, output_reasoning INTEGER,
  billed TEXT, computed TEXT, ideal_cache TEXT, currency TEXT NOT NULL, price_row TEXT,
  held TEXT, notes TEXT NOT NULL, cache_miss_reason TEXT, seconds REAL, ttft_seconds REAL,
  held_pico INTEGER NOT NULL, held_tokens INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS holdings (
  scope TEXT NOT NULL, currency TEXT NOT NULL, pico INTEGER NOT NULL, tokens INTEGER NOT NULL,
  PRIMARY KEY (scope, currency)
) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True)
class Budget:
    """A limit on money, tokens or both. No call starts that could break it.

    It counts every attempt that the ledger holds under ``scope``, from whichever process: settled ones at
    their cost, running and lost ones at their worst case.
    """

    max_cost: Decimal | None = None
    max_tokens: int | None = None
    currency: str = "USD"
    scope: str = ""

    def __post_init__(self) -> None:
        if self.max_cost is not None:
            amount = Decimal(str(self.max_cost))
            if not amount.is_finite() or amount < 0:
                raise ConfigError(f"a budget must be zero or more, not {self.max_cost}")
            object.__setattr__(self, "max_cost", amount)
        if self.max_tokens is not None and self.max_tokens < 0:
            raise ConfigError(f"a token budget must be zero or more, not {self.max_tokens}")


@dataclass(frozen=True, slots=True)
class Reservation:
    """An attempt under way: its row, and what it holds."""

    row: int
    attempt: Attempt
    tokens: int


class Ledger:
    """A ledger file, or one in memory when no path is given. One object may be shared by all threads."""

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = None if path is None else Path(path).expanduser()
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._db = self._open()

    @staticmethod
    def default_path() -> Path:
        """``$K3EVAL_LEDGER``, else ``ledger.sqlite`` in the user's data folder."""
        if named := os.environ.get("K3EVAL_LEDGER"):
            return Path(named).expanduser()
        base = os.environ.get("XDG_DATA_HOME")
        return (Path(base) if base else Path.home() / ".local" / "share") / "k3eval" / "ledger.sqlite"

    def reserve(self, attempt: Attempt, *, tokens: int, budget: Budget | None) -> Reservation:
        """Write an attempt down before it is sent; ``BudgetExceededError`` if it could break the budget."""
        pico = _pico(attempt.held)
        with self._transaction() as db:
            if budget is not None:
                self._check(db, budget, attempt, pico, tokens)
            values = (*_values(attempt), pico, tokens)
            marks = ",".join("?" * len(values))
            cursor = db.execute(
                f"INSERT INTO attempts ({','.join(_COLUMNS)},held_pico,held_tokens) VALUES ({marks})",  # noqa: S608 - names are constants
                values,
            )
            _hold(db, attempt.scope, attempt.cost.currency, pico, tokens)
        return Reservation(cast("int", cursor.lastrowid), attempt, tokens)

    def settle(self, reservation: Reservation, attempt: Attempt, *, tokens: int | None = None) -> Attempt:
        """Write the result of an attempt. ``tokens`` is what it used; ``None`` keeps what was reserved."""
        pico = _pico(attempt.held)
        used = reservation.tokens if tokens is None else tokens
        before = _pico(reservation.attempt.held)
        with self._transaction() as db:
            assignments = ",".join(f"{name}=?" for name in _COLUMNS)
            db.execute(
                f"UPDATE attempts SET {assignments},held_pico=?,held_tokens=? WHERE id=?",  # noqa: S608 - names are constants
                (*_values(attempt), pico, used, reservation.row),
            )
            _hold(db, attempt.scope, attempt.cost.currency, pico - before, used - reservation.tokens)
        return attempt

    def held(self, scope: str = "", currency: str = "USD") -> tuple[Decimal, int]:
        """Return money and tokens that a budget of this scope counts at the moment."""
        with self._guard() as db:
            return self._held(db, scope, currency)

    def attempts(self, *, scope: str | None = None, call_id: str | None = None) -> Iterator[Attempt]:
        """Yield the rows, oldest first."""
        query = f"SELECT {','.join(_COLUMNS)} FROM attempts"  # noqa: S608 - names are constants
        where, values = [], []
        for name, value in (("scope", scope), ("call_id", call_id)):
            if value is not None:
                where.append(f"{name}=?")
                values.append(value)
        if where:
            query += f" WHERE {' AND '.join(where)}"
        with self._guard() as db:
            rows = db.execute(f"{query} ORDER BY id", values).fetchall()
        for row in rows:
            yield _attempt(row)

    def totals(self, *, scope: str | None = None) -> Totals:
        """Return sums over the rows."""
        return totals(self.attempts(scope=scope))

    def export(
        self, out: TextIO, *, kind: Literal["csv", "jsonl"] = "jsonl", scope: str | None = None
    ) -> int:
        """Write the rows as JSON lines or as a table, amounts with all their digits; return how many."""
        return write_rows(self.attempts(scope=scope), out, kind=kind)

    def close(self) -> None:
        """Close the file. Rows are already safe on disk."""
        with self._lock:
            self._db.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(
        self, db: sqlite3.Connection, budget: Budget, attempt: Attempt, pico: int, tokens: int
    ) -> None:
        money, used = self._held(db, budget.scope, budget.currency)
        if budget.max_cost is not None:
            if attempt.cost.currency != budget.currency:
                raise ConfigError(
                    f"the budget is in {budget.currency}, {attempt.host} charges {attempt.cost.currency};"
                    " give the budget that currency"
                )
            asked = _amount(pico)
            if money + asked > budget.max_cost:
                raise BudgetExceededError(
                    f"this call could cost {plain(asked)} {budget.currency}; {plain(money)} of"
                    f" {plain(budget.max_cost)} is spent or held. Raise the budget or lower max_output"
                )
        if budget.max_tokens is not None and used + tokens > budget.max_tokens:
            raise BudgetExceededError(
                f"this call could use {tokens} tokens; {used} of {budget.max_tokens} are spent or held."
                " Raise the budget or lower max_output"
            )

    def _held(self, db: sqlite3.Connection, scope: str, currency: str) -> tuple[Decimal, int]:
        money = db.execute(
            "SELECT pico FROM holdings WHERE scope=? AND currency=?", (scope, currency)
        ).fetchone()
        tokens = db.execute("SELECT sum(tokens) FROM holdings WHERE scope=?", (scope,)).fetchone()
        return _amount(money[0] if money else 0), int(tokens[0] or 0)

    def _open(self) -> sqlite3.Connection:
        name = ":memory:"
        try:
            if self.path is not None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                name = str(self.path)
            db = sqlite3.connect(name, timeout=_WAIT_S, isolation_level=None, check_same_thread=False)
            if self.path is not None:
                _to_wal(db)
                db.execute("PRAGMA synchronous=NORMAL")
            version = db.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, _VERSION):
                raise ConfigError(f"{name} is a ledger of another version of k3eval; use a new file")
            if version == 0:
                db.execute("BEGIN IMMEDIATE")
                for statement in _SCHEMA.split(";"):
                    db.execute(statement)
                db.execute(f"PRAGMA user_version={_VERSION}")
                db.execute("COMMIT")
        except (sqlite3.Error, OSError) as error:
            raise ConfigError(f"cannot use {name} as a ledger: {error}") from error
        return db

    @contextmanager
    def _guard(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            if self._pid != os.getpid() and self.path is not None:
                self._pid = os.getpid()
                self._db = self._open()  # a connection must not be used on both sides of a fork
            yield self._db

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._guard() as db:
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
            except BaseException:
                db.execute("ROLLBACK")
                raise
            db.execute("COMMIT")


def write_rows(attempts: Iterable[Attempt], out: TextIO, *, kind: Literal["csv", "jsonl"]) -> int:
    """Write rows as JSON lines or as a table with a header line; return how many."""
    count = 0
    if kind == "csv":
        writer = csv.writer(out)
        writer.writerow(_COLUMNS)
        for attempt in attempts:
            writer.writerow(["" if value is None else value for value in _values(attempt)])
            count += 1
        return count
    for attempt in attempts:
        out.write(json.dumps(attempt_to_json(attempt), ensure_ascii=False) + "\n")
        count += 1
    return count


def totals(attempts: Iterable[Attempt]) -> Totals:
    """Sum attempts up. Costs that are unknown are left out of the sums and counted in ``unknown``."""
    usages: list[Usage] = []
    sums: dict[str, dict[str, Decimal | None]] = {}
    calls: set[str] = set()
    count = unknown = 0
    for attempt in attempts:
        count += 1
        calls.add(attempt.call_id)
        unknown += attempt.state != "settled"
        if attempt.usage is not None:
            usages.append(attempt.usage)
        if attempt.usage is not None or attempt.cost.best is not None:
            kept = sums.setdefault(attempt.cost.currency, {})
            for name in ("billed", "computed", "ideal_cache"):
                value = cast("Decimal | None", getattr(attempt.cost, name))
                if value is not None:
                    kept[name] = (kept.get(name) or Decimal(0)) + value
                else:
                    kept.setdefault(name, None)
    by_currency = tuple(
        Cost(kept.get("billed"), kept.get("computed"), kept.get("ideal_cache"), currency)
        for currency, kept in sorted(sums.items())
    )
    cost = by_currency[0] if len(by_currency) == 1 else Cost(currency="mixed" if by_currency else "USD")
    return Totals(total_usage(usages), cost, len(calls), count, unknown, by_currency)


def attempt_to_json(attempt: Attempt) -> JsonObject:
    """Return a row as JSON: amounts as strings, unknown as null."""
    data = cast("JsonObject", asdict(attempt))
    data["cost"] = {
        "billed": plain(attempt.cost.billed),
        "computed": plain(attempt.cost.computed),
        "ideal_cache": plain(attempt.cost.ideal_cache),
        "currency": attempt.cost.currency,
        "price_row": attempt.cost.price_row,
    }
    data["held"] = plain(attempt.held)
    data["notes"] = list(attempt.notes)
    return data


def attempt_from_json(data: JsonValue) -> Attempt:
    """Read a row that ``attempt_to_json`` wrote; ``ConfigError`` where it is none."""
    try:
        if not isinstance(data, dict):
            raise TypeError("not an object")
        cost, usage = data["cost"], data.get("usage")
        if not isinstance(cost, dict) or not (usage is None or isinstance(usage, dict)):
            raise TypeError("cost and usage must be objects")
        members = dict(data)
        members["cost"] = Cost(
            billed=_decimal(cost["billed"]),
            computed=_decimal(cost["computed"]),
            ideal_cache=_decimal(cost["ideal_cache"]),
            currency=str(cost["currency"]),
            price_row=cast("str | None", cost["price_row"]),
        )
        members["usage"] = None if usage is None else Usage(**usage)
        members["held"] = _decimal(data["held"])
        members["notes"] = tuple(cast("list[str]", data["notes"]))
        return Attempt(**members)
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(f"not a row of an exported ledger: {error}") from error


def _decimal(value: object) -> Decimal | None:
    return None if value is None else Decimal(str(value))


def _pico(amount: Decimal | None) -> int:
    return 0 if amount is None else int(amount.scaleb(12).to_integral_value(ROUND_CEILING))


def _amount(pico: int) -> Decimal:
    return tidy(Decimal(pico).scaleb(-12))


def _hold(db: sqlite3.Connection, scope: str, currency: str, pico: int, tokens: int) -> None:
    db.execute(
        "INSERT INTO holdings (scope,currency,pico,tokens) VALUES (?,?,?,?)"
        " ON CONFLICT (scope,currency) DO UPDATE SET pico=pico+excluded.pico, tokens=tokens+excluded.tokens",
        (scope, currency, pico, tokens),
    )


def _to_wal(db: sqlite3.Connection) -> None:
    """Switch to write-ahead logging; two processes that open a new file at once may have to try again."""
    import time

    for _ in range(100):
        with suppress(sqlite3.OperationalError):
            db.execute("PRAGMA journal_mode=WAL")
            return
        time.sleep(0.05)
    db.execute("PRAGMA journal_mode=WAL")


_Cell = str | int | float | None


def _values(attempt: Attempt) -> tuple[_Cell, ...]:
    usage, cost = attempt.usage, attempt.cost
    counters: tuple[int | None, ...] = (None,) * 5
    if usage is not None:
        counters = (
            usage.miss,
            usage.cache_read,
            usage.cache_write,
            usage.output_text,
            usage.output_reasoning,
        )
    return (
        attempt.call_id, attempt.number, attempt.scope, attempt.started_at, attempt.ended_at, attempt.state,
        attempt.provider, attempt.host, attempt.model, attempt.status, attempt.error, attempt.request_id,
        attempt.finish_reason, attempt.served_by, *counters, plain(cost.billed), plain(cost.computed),
        plain(cost.ideal_cache), cost.currency, cost.price_row, plain(attempt.held), " ".join(attempt.notes),
        attempt.cache_miss_reason, attempt.seconds, attempt.ttft_seconds,
    )  # fmt: skip


def _attempt(row: tuple[_Cell, ...]) -> Attempt:
    cell = dict(zip(_COLUMNS, row, strict=True))

    def text(name: str) -> str | None:
        return None if cell[name] is None else str(cell[name])

    def amount(name: str) -> Decimal | None:
        return _decimal(cell[name])

    def count(name: str) -> int | None:
        return None if cell[name] is None else int(cell[name] or 0)

    usage = None
    if cell["miss"] is not None:
        usage = Usage(
            count("miss") or 0,
            count("cache_read"),
            count("cache_write"),
            count("output_text") or 0,
            count("output_reasoning"),
        )
    return Attempt(
        call_id=str(cell["call_id"]),
        number=count("number") or 0,
        started_at=str(cell["started_at"]),
        ended_at=text("ended_at"),
        state=cast("AttemptState", cell["state"]),
        provider=str(cell["provider"]),
        host=str(cell["host"]),
        model=str(cell["model"]),
        status=count("status"),
        error=text("error"),
        request_id=text("request_id"),
        finish_reason=text("finish_reason"),
        served_by=text("served_by"),
        usage=usage,
        cost=Cost(
            amount("billed"),
            amount("computed"),
            amount("ideal_cache"),
            str(cell["currency"]),
            text("price_row"),
        ),
        held=amount("held"),
        notes=tuple(str(cell["notes"]).split()),
        cache_miss_reason=text("cache_miss_reason"),
        seconds=cast("float | None", cell["seconds"]),
        ttft_seconds=cast("float | None", cell["ttft_seconds"]),
        scope=str(cell["scope"]),
    )
