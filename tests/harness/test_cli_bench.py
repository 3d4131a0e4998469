"""``k3eval bench decode`` from the command line: bad input, and a real sweep against the local backend."""

from __future__ import annotations

import json
import shlex
from decimal import Decimal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from k3eval import ModelRef
from k3eval_harness.cli.app import app
from k3eval_harness.cli.bench import _references
from k3eval_harness.decode.live import model_price, server_timing
from k3eval_harness.decode.records import SweepResult
from k3eval_harness.launcher import local_server


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--contexts four", "--contexts: 'four' is no length"),
        ("--contexts 0", "--contexts: '0' is no length"),
        ("--contexts 99999999999999999999", "is more than 16777216 tokens"),
        ("--repeats 0", "--repeats must be 1 or more, not 0"),
        ("--repeats 99999999999999", "--repeats must be 10000 or less"),
        ("--output-tokens 15", "--output-tokens must be 16 or more, not 15"),
        ("--model a --model b --model c", "--model can be given twice at most, not 3 times"),
        ("--model a --model A", "--model names local/a twice"),
        ("--model a --model local/a", "--model names local/a twice"),
        ("--model compatible/x", "names no server"),
        ("--model nobody", "no local model is called 'nobody': use a, b, c, d"),
        ("--max-cost free", "--max-cost must be a positive amount"),
        ("--seed=-1", "--seed must be 0 or more"),
        ("--out results", "--out must be a .json file"),
        ("--out /no/such/folder/x.json", "cannot write into /no/such/folder"),
        ("--package no-such-package", "package 'no-such-package' is not installed"),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_2(arguments: str, expected: str) -> None:
    done = CliRunner().invoke(app, ["bench", "decode", *shlex.split(arguments)])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("k3eval: ")
    assert expected in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["A"], ["local/a"]),
        (["A", "A-MLA"], ["local/a", "local/a-mla"]),
        (["moonshot/kimi-k3"], ["moonshot/kimi-k3"]),
        (["compatible/Big@http://h/v1"], ["compatible/Big@http://h/v1"]),
    ],
)
def test_a_bare_name_is_a_local_model(names: list[str], expected: list[str]) -> None:
    assert [str(reference) for reference in _references(names)] == expected


def test_a_folder_is_a_local_model_with_its_own_spelling(tmp_path: Path) -> None:
    folder = tmp_path / "Mine"
    folder.mkdir()
    assert [str(reference) for reference in _references([str(folder)])] == [f"local/{folder}"]


def test_prices_come_from_the_dated_table() -> None:
    price = model_price(ModelRef.parse("moonshot/kimi-k3"), None)
    assert price.row is not None
    assert price.row.startswith("api.moonshot.ai/kimi-k3@")
    assert price.price(4096, 0, 1000) == Decimal("0.027288")
    assert price.price(0, 4096, 1000) == Decimal("0.0162288")
    routed = ModelRef.parse("openrouter/moonshotai/kimi-k3")
    assert model_price(routed, None).row is None
    assert model_price(routed, "MoonshotAI").row is not None
    local = model_price(ModelRef.parse("local/a"), None)
    assert (local.row, local.price(10, 0, 10)) == (None, None)


def test_server_timings_are_read_and_may_be_missing() -> None:
    stamps = [1_000_000_000, 1_010_000_000, 1_030_000_000]
    timing = server_timing({"k3eval_timings": {"queue_ns": 5, "prefill_ns": 10**9, "token_ns": list(stamps)}})
    assert timing is not None
    assert (timing.prefill_s, timing.seconds_per_token) == (1.0, pytest.approx(0.015))
    assert server_timing({}) is None
    assert server_timing({"k3eval_timings": "no"}) is None
    single = server_timing({"k3eval_timings": {"token_ns": [5]}})
    assert single is not None
    assert single.seconds_per_token is None


def test_a_server_that_does_not_answer_is_an_infrastructure_error() -> None:
    model = "compatible/x@http://127.0.0.1:9/v1"
    done = CliRunner().invoke(
        app, ["bench", "decode", "--model", model, "--contexts", "1k", "--repeats", "1"]
    )
    assert done.exit_code == 3, done.output
    assert done.stderr.splitlines()[-1].startswith("k3eval: ")
    assert done.stdout == ""


@pytest.mark.slow
def test_a_sweep_against_the_local_backend_and_its_twin(tmp_path: Path) -> None:
    out = tmp_path / "decode.json"
    arguments = f"--contexts 512,1k --model A --model A-mla --repeats 2 --output-tokens 24 --out {out} --json"
    done = CliRunner().invoke(app, ["bench", "decode", *arguments.split()])
    assert done.exit_code == 0, done.output
    result = SweepResult.model_validate(json.loads(done.stdout))
    assert SweepResult.model_validate_json(out.read_text()) == result
    assert [(row.model, row.context) for row in result.rows] == [
        ("local/a", 512), ("local/a", 1024), ("local/a-mla", 512), ("local/a-mla", 1024),
    ]  # fmt: skip
    assert len(result.calls) == 16
    for call in result.calls:
        assert call.error is None
        assert call.tokens.prompt == call.context
        assert call.tokens.output == 24
        assert call.server is not None
    for row in result.rows:
        assert row.cost_1k_uncached is None
        assert (row.cached_share_warm or 0) > 0.8
        assert (row.cached_share_cold or 0) < 0.3
    assert {model.weights for model in result.models} == {"random, seed 0"}
    # where the cores are busy a reader may be held up: its speed is void then, and for no other reason
    for call in result.calls:
        assert call.sample is not None
        assert call.sample.seconds_per_token or "burst" in (call.sample.void_reason or "")
    timed = {
        (call.model, call.context, call.repeat, call.cache)
        for call in result.calls
        if call.sample and call.sample.seconds_per_token
    }
    paired = {
        context
        for model, context, *rest in timed
        if model == "local/a" and ("local/a-mla", context, *rest) in timed
    }
    assert {row.context for row in result.twin} == paired
    table = out.with_suffix(".md").read_text()
    assert ("local/a-mla needs" in table) == bool(paired)
    assert "pandas" in table
    assert len(done.stderr.strip().splitlines()) == 16


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore::k3eval.notices.K3EvalWarning"
)  # the host's privacy note is not the subject
def test_a_priced_host_gives_costs_and_a_spent_budget_ends_the_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONSHOT_API_KEY", "sk-test-1")
    options = ("--dialect", "moonshot", "--prices", "--served-name", "kimi-k3", "--key", "sk-test-1")
    with local_server("a", options=options) as server:
        base = (
            f"bench decode --contexts 1k --model moonshot/kimi-k3@{server.base_url} --output-tokens 32 --json"
        )
        done = CliRunner().invoke(app, [*base.split(), "--repeats", "1"])
        assert done.exit_code == 0, done.output
        result = SweepResult.model_validate(json.loads(done.stdout))
        (row,) = result.rows
        assert row.cost_1k_uncached == Decimal(1024) * 3 / 10**6 + Decimal("0.015")
        assert row.cost_1k_cached == Decimal(1024) * Decimal("0.3") / 10**6 + Decimal("0.015")
        assert result.costs.computed is not None
        assert result.costs.computed > 0
        cap = 3 * result.costs.computed  # three times what one repeat and the warm-up cost
        short = CliRunner().invoke(app, [*base.split(), "--repeats", "9", "--max-cost", str(cap)])
        assert short.exit_code == 4, short.output
        partial = SweepResult.model_validate(json.loads(short.stdout))
        assert partial.stopped is not None
        assert 0 < len(partial.calls) < 18
        assert partial.costs.computed is not None
        assert partial.costs.computed <= cap
