from __future__ import annotations

import csv
import json
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from k3eval import Attempt, Cost, Ledger, Usage
from k3eval_harness.cli.app import app

PLAN = Attempt(
    "c", 1, "2026-12-01T00:00:00.000+00:00", None, "reserved", "moonshot", "api.moonshot.ai", "kimi-k3"
)
PAID = replace(
    PLAN,
    state="settled",
    usage=Usage(539, 2560, None, 168, None),
    cost=Cost(computed=Decimal("0.004905")),
    status=200,
)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["usage", *map(str, arguments)])


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    path = tmp_path / "ledger.sqlite"
    with Ledger(path) as made:
        for row in (
            PAID,
            replace(PAID, call_id="d", scope="job"),
            replace(PLAN, state="unknown", call_id="e"),
        ):
            made.settle(made.reserve(replace(PLAN, scope=row.scope), tokens=0, budget=None), row)
    return path


def test_what_is_shown_fits_a_narrow_terminal(ledger: Path) -> None:
    result = run(ledger)
    assert result.exit_code == 0, result.output
    assert result.output.splitlines() == [
        "api.moonshot.ai / kimi-k3",
        "  count   calls 3, attempts 3, lost 1",
        "  tokens  miss 1,078, read 5,120, write -, output 336",
        "  cost    billed -, computed 0.00981 USD, ideal cache -",
    ]


def test_figures_of_a_large_job_fit_80_columns(tmp_path: Path) -> None:
    large = replace(
        PAID,
        host="openrouter.ai",
        model="moonshotai/kimi-k3",
        usage=Usage(12_345_678, 987_654_321, 12_345_678, 1_234_567, None),
        cost=Cost(
            billed=Decimal("12345.678901"), computed=Decimal("12345.67"), ideal_cache=Decimal("1234.5")
        ),
    )
    with Ledger(tmp_path / "ledger.sqlite") as made:
        made.settle(made.reserve(PLAN, tokens=0, budget=None), large)
    assert max(len(line) for line in run(tmp_path).output.splitlines()) <= 80


def test_json_and_scope(ledger: Path) -> None:
    data = json.loads(run(ledger, "--json").stdout)
    assert (data["calls"], data["attempts"], data["unknown"]) == (3, 3, 1)
    assert data["costs"] == [{"currency": "USD", "billed": None, "computed": "0.00981", "ideal_cache": None}]
    assert data["groups"][0]["model"] == "kimi-k3"
    assert json.loads(run(ledger, "--json", "--scope", "job").stdout)["calls"] == 1


def test_exports_and_reading_them_back(ledger: Path, tmp_path: Path) -> None:
    jsonl, table = tmp_path / "rows.jsonl", tmp_path / "rows.csv"
    assert run(ledger, "--jsonl", jsonl, "--csv", table).exit_code == 0
    assert len(jsonl.read_text("utf-8").splitlines()) == 3
    with table.open(encoding="utf-8", newline="") as stream:
        assert [row["computed"] for row in csv.DictReader(stream)] == ["0.004905", "0.004905", ""]
    assert json.loads(run(jsonl, "--json").stdout) == json.loads(run(ledger, "--json").stdout)
    assert run(jsonl, "--jsonl", jsonl).exit_code == 0
    assert len(jsonl.read_text("utf-8").splitlines()) == 3


def test_the_folder_of_a_run_and_the_default(ledger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(ledger.parent, "--json").exit_code == 0
    monkeypatch.setenv("K3EVAL_LEDGER", str(ledger))
    assert json.loads(run("--json").stdout)["calls"] == 3


def test_an_empty_ledger(tmp_path: Path) -> None:
    Ledger(tmp_path / "ledger.sqlite").close()
    assert "no rows" in run(tmp_path).output
    assert json.loads(run(tmp_path, "--json").stdout)["costs"] == []


def test_bad_input_is_one_line_and_nothing_is_left(tmp_path: Path, ledger: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{}\n", "utf-8")
    garbage = tmp_path / "garbage.sqlite"
    garbage.write_text("no database at all, but long enough", "utf-8")
    for arguments in (
        (tmp_path / "absent",),
        (bad,),
        (garbage,),
        (ledger, "--csv", tmp_path / "no" / "x.csv"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2
        assert len(result.stderr.splitlines()) == 1
        assert result.stderr.startswith("k3eval: ")
    assert not (tmp_path / "absent").exists()
    assert not (tmp_path / "no").exists()
